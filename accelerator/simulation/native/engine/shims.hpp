// The functions by which code of AOTInductor calls ops of CUDA tensors. torch's own call CUDA's kernels past the dispatcher.
//
// shim_functions.inc defines them, as _engine_build.py makes it of the declarations of the installed torch. Its libraries find
// these definitions first, because this one is loaded with RTLD_GLOBAL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <initializer_list>
#include <string>
#include <unordered_map>

namespace engine {

// An argument of such a function: a value, or a pointer to an optional one, to the elements of a list, or to a result.
struct ShimArgument {
    template <typename T> ShimArgument(const char* name, T value) : name(name)
    {
        if constexpr (std::is_pointer_v<T>)
            pointer = value;
        else if constexpr (std::is_floating_point_v<T>)
            number = value;
        else
            integer = value;
    }

    // Where the value lies.
    const void* address(const c10::Type& type) const
    {
        const auto kind = type.kind();
        const bool is_number = kind == c10::TypeKind::FloatType || kind == c10::TypeKind::NumberType;
        const bool is_handle = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::GeneratorType ||
                               kind == c10::TypeKind::StringType;
        return is_number ? static_cast<const void*>(&number) : is_handle ? static_cast<const void*>(&pointer) : &integer;
    }

    const char* name;
    int64_t integer = 0;
    double number = 0;
    const void* pointer = nullptr;
};

class ShimCall {
public:
    ShimCall(const char* name, std::initializer_list<ShimArgument> arguments) : op_(find(name)), arguments_(arguments) {}

    void run()
    {
        // As torch's own functions, which the dispatcher does not reach.
        const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                       c10::autocast_dispatch_keyset);
        torch::jit::Stack stack;
        for (const c10::Argument& argument : op_.schema().arguments())
            stack.push_back(convert(argument));
        op_.callBoxed(&stack);
        for (size_t i = 0; i < stack.size(); i++) {
            const auto* const result = argument("ret" + std::to_string(i));
            if (!result || !result->pointer)
                continue;
            auto* const target = const_cast<void*>(result->pointer);
            if (stack[i].isTensor())
                *static_cast<AtenTensorHandle*>(target) = torch::aot_inductor::new_tensor_handle(std::move(stack[i]).toTensor());
            else if (stack[i].isInt() || stack[i].isSymInt())
                *static_cast<int64_t*>(target) = stack[i].toSymInt().expect_int();
            else
                *static_cast<double*>(target) = stack[i].toScalar().toDouble();
        }
    }

private:
    // The name of a function is that of the op and its overload. A later version of it has a number at its end.
    static c10::OperatorHandle find(std::string name)
    {
        static const auto* const ops = [] {
            auto* const found = new std::unordered_map<std::string, c10::OperatorName>;
            for (const auto& op : c10::Dispatcher::singleton().getAllOpNames())
                if (op.name.rfind("aten::", 0) == 0)
                    found->emplace(op.name.substr(6) + (op.overload_name.empty() ? "" : "_" + op.overload_name), op);
            return found;
        }();
        auto op = ops->find(name);
        if (op == ops->end())
            op = ops->find(name.substr(0, name.rfind("_v")));
        TORCH_CHECK(op != ops->end(), "aoti_torch_cuda_", name, " is not simulated: torch has no such op");
        return c10::Dispatcher::singleton().findSchemaOrThrow(op->second.name.c_str(), op->second.overload_name.c_str());
    }

    const ShimArgument* argument(const std::string& name) const
    {
        for (const auto& each : arguments_)
            if (each.name == name)
                return &each;
        return nullptr;
    }

    c10::IValue convert(const c10::Argument& described) const
    {
        const auto* const given = argument(described.name());
        if (!given) // an older version of the function lacks it
            return described.default_value().value_or(c10::IValue());
        c10::TypePtr type = described.real_type();
        const auto optional = type->cast<c10::OptionalType>();
        if (optional) {
            if (!given->pointer)
                return {};
            type = optional->getElementType();
        }
        if (const auto list = type->cast<c10::ListType>())
            return convert_list(list->getElementType(), optional ? *static_cast<const void* const*>(given->pointer) : given->pointer,
                                argument(described.name() + "_len_")->integer);
        const void* const address = optional ? given->pointer : given->address(*type);
        if (type->kind() == c10::TypeKind::DeviceObjType)
            return c10::Device(c10::DeviceType(*static_cast<const int32_t*>(address)),
                               c10::DeviceIndex(argument(described.name() + "_index_")->integer));
        return read(*type, address);
    }

    static c10::IValue convert_list(c10::TypePtr type, const void* elements, int64_t count)
    {
        if (type->kind() == c10::TypeKind::SymIntType)
            type = c10::IntType::get();
        c10::impl::GenericList list(type);
        const bool is_optional = type->kind() == c10::TypeKind::OptionalType;
        for (int64_t i = 0; i < count; i++) {
            if (type->kind() == c10::TypeKind::BoolType) {
                list.push_back(read(*type, static_cast<const int32_t*>(elements) + i));
                continue;
            }
            const auto* const element = static_cast<const void* const*>(elements) + i;
            if (!is_optional)
                list.push_back(read(*type, element));
            else
                list.push_back(*element ? read(*c10::TensorType::get(), *element) : c10::IValue());
        }
        return list;
    }

    static c10::IValue read(const c10::Type& type, const void* address)
    {
        switch (type.kind()) {
        case c10::TypeKind::TensorType:
            return **static_cast<at::Tensor* const*>(address);
        case c10::TypeKind::GeneratorType:
            return **static_cast<at::Generator* const*>(address);
        case c10::TypeKind::StringType:
            return std::string(*static_cast<const char* const*>(address));
        case c10::TypeKind::FloatType:
            return *static_cast<const double*>(address);
        case c10::TypeKind::NumberType:
            return c10::Scalar(*static_cast<const double*>(address));
        case c10::TypeKind::BoolType:
            return *static_cast<const int32_t*>(address) != 0;
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
            return *static_cast<const int64_t*>(address);
        default: // of a type, a layout or a memory format
            return int64_t(*static_cast<const int32_t*>(address));
        }
    }

    const c10::OperatorHandle op_;
    const std::initializer_list<ShimArgument> arguments_;
};

} // namespace engine

#define SHIM(name, ...) AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ engine::ShimCall(name, __VA_ARGS__).run(); })

#include <shim_functions.inc>
