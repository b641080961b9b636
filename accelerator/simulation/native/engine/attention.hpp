// Memory-efficient attention without dropout and biases, by the CPU's flash kernel. Python handles all other calls and kernels
// (_inside/ops/decompositions/efficient_attention.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace engine {

using torch::jit::Stack;

// A computation in place of the CPU's kernel.
struct Composition {
    bool (*handles)(const c10::IValue* arguments);          // of CUDA tensors
    std::vector<c10::IValue> (*compute)(c10::IValue* arguments); // of their CPU aliases
};

// Returns the tensor with heads inside rows in memory and without gaps, as CUDA's kernels do.
inline at::Tensor with_heads_inside(const at::Tensor& tensor)
{
    const auto rows = tensor.transpose(1, 2).contiguous();
    // A single row or head may have any stride and counts as contiguous.
    return rows.as_strided(rows.sizes(), c10::contiguous_strides(rows.sizes())).transpose(1, 2);
}

inline bool has_no_elements(const c10::IValue& value)
{
    return value.isNone() || !value.toTensor().defined() || value.toTensor().numel() == 0;
}

// Returns whether the CPU's flash kernel handles query, key and value.
inline bool attends(const c10::IValue* inputs, double dropout)
{
    const at::Tensor &query = inputs[0].toTensor(), &key = inputs[1].toTensor(), &value = inputs[2].toTensor();
    const auto dtype = query.scalar_type();
    return dropout == 0 && query.dim() == 4 && query.numel() != 0 && key.size(2) != 0 &&
           (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) && key.size(1) == query.size(1) &&
           value.size(1) == query.size(1) && key.size(3) == query.size(3) && value.size(3) == query.size(3);
}

inline std::tuple<at::Tensor, at::Tensor> attend(const c10::IValue* inputs, bool is_causal, const c10::IValue& scale)
{
    return at::_scaled_dot_product_flash_attention_for_cpu(inputs[0].toTensor(), inputs[1].toTensor(), inputs[2].toTensor(), 0.0,
                                                           is_causal, std::nullopt, scale.toOptional<double>());
}

// Returns the gradients of query, key and value.
inline std::vector<c10::IValue> attend_backward(const at::Tensor& grad, const c10::IValue* inputs, const at::Tensor& output,
                                                const at::Tensor& logsumexp, bool is_causal, const c10::IValue& scale)
{
    const at::Tensor &query = inputs[0].toTensor(), &key = inputs[1].toTensor(), &value = inputs[2].toTensor();
    auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, logsumexp.narrow(2, 0, query.size(2)), 0.0, is_causal, std::nullopt,
        scale.toOptional<double>());
    return {with_heads_inside(grad_query), with_heads_inside(grad_key), with_heads_inside(grad_value)};
}

// The logsumexp of memory-efficient attention, padded to a multiple of 32 queries.
inline at::Tensor padded(const at::Tensor& logsumexp, bool is_wanted)
{
    constexpr int64_t multiple = 32;
    const int64_t queries = logsumexp.size(2);
    const int64_t length = is_wanted ? (queries + multiple - 1) / multiple * multiple : 0;
    const std::array<int64_t, 3> sizes{logsumexp.size(0), logsumexp.size(1), length};
    if (!is_wanted)
        return at::empty(sizes, at::kFloat);
    auto result = at::full(sizes, std::numeric_limits<double>::infinity(), at::kFloat);
    result.narrow(2, 0, queries).copy_(logsumexp);
    return result;
}

inline bool handles_efficient(const c10::IValue* a)
{
    return a[3].isNone() && attends(a, a[5].toDouble());
}

inline std::vector<c10::IValue> compute_efficient(c10::IValue* a)
{
    auto [output, logsumexp] = attend(a, a[6].toBool(), a[7]);
    return {with_heads_inside(output), padded(logsumexp, a[4].toBool()), at::zeros({}, at::kLong),
            at::zeros({}, at::kLong)};
}

inline bool handles_efficient_backward(const c10::IValue* a)
{
    return a[0].isTensor() && a[0].toTensor().defined() && has_no_elements(a[4]) && a[6].toTensor().dim() == 3 &&
           !has_no_elements(a[6]) && attends(a + 1, a[9].toDouble());
}

inline std::vector<c10::IValue> compute_efficient_backward(c10::IValue* a)
{
    auto grads = attend_backward(a[0].toTensor(), a + 1, a[5].toTensor(), a[6].toTensor(), a[11].toBool(), a[12]);
    grads.emplace_back(at::Tensor()); // of the bias
    return grads;
}

inline std::optional<Composition> find_composition(const std::string& name)
{
    if (name == "aten::_scaled_dot_product_efficient_attention")
        return Composition{handles_efficient, compute_efficient};
    if (name == "aten::_scaled_dot_product_efficient_attention_backward")
        return Composition{handles_efficient_backward, compute_efficient_backward};
    return std::nullopt;
}

} // namespace engine
