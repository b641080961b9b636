"""CUB's device algorithms and Thrust's give the results of the host's, at three sizes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.simulation.runtime.test_nvcc import compile_cuda
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

NVCC = shutil.which("nvcc")
pytestmark = [
    linux_only,
    needs_cuda_torch,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
]

PROLOGUE = """
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <vector>
typedef std::vector<int> V;
static int compared, wrong;
static void check(const char *name, int n, bool is_right)
{
    compared++;
    if (!is_right && ++wrong)
        printf("wrong: %s of %d\\n", name, n);
}
static V draw(int n, int below)
{
    static unsigned state = 1;
    V v(n);
    for (int &x : v)
        x = (int)((state = state * 1664525u + 1013904223u) >> 12) % below;
    return v;
}
struct Odd { __host__ __device__ bool operator()(int x) const { return x & 1; } };
struct Twice { __host__ __device__ int operator()(int x) const { return 2 * x; } };
static V runs(const V &keys, const V &values, bool counts, V *unique)
{
    V result;
    for (size_t i = 0; i < keys.size(); i++) {
        if (!i || keys[i] != keys[i - 1])
            result.push_back(0), unique->push_back(keys[i]);
        result.back() += counts ? 1 : values[i];
    }
    return result;
}
"""

CUB = """
#include <cub/cub.cuh>
struct Buffer {
    int *p; int n;
    explicit Buffer(const V &v) : n((int)v.size())
    {
        cudaMalloc(&p, (n + 4) * sizeof(int));
        cudaMemcpy(p, v.data(), n * sizeof(int), cudaMemcpyHostToDevice);
    }
    explicit Buffer(int n) : Buffer(V(n)) {}
    ~Buffer() { cudaFree(p); }
    V get(int count) const
    {
        V v(count);
        cudaMemcpy(v.data(), p, count * sizeof(int), cudaMemcpyDeviceToHost);
        return v;
    }
    V get() const { return get(n); }
};
#define RUN(name, ...)                                                                                                 \\
    {                                                                                                                  \\
        size_t bytes = 0; void *t = nullptr;                                                                           \\
        cudaError_t e = __VA_ARGS__;                                                                                   \\
        cudaMalloc(&t, bytes + 1);                                                                                     \\
        e = e ? e : __VA_ARGS__;                                                                                       \\
        check(name ": no error", n, !e && !cudaDeviceSynchronize());                                                   \\
        cudaFree(t);                                                                                                   \\
    }
static void test(int n)
{
    V a = draw(n, 500), b = draw(n, 40), keys = b, sorted = a, sums(n), expected, unique;
    for (int i = 0; i < n; i++)
        keys[i] = i / 7 % 5;
    std::sort(sorted.begin(), sorted.end());
    Buffer A(a), B(b), K(keys), S(sorted), O(n), P(2 * n), Q(n), C(4);
    auto count = [&] { return C.get(1)[0]; };

    RUN("Reduce::Sum", cub::DeviceReduce::Sum(t, bytes, A.p, C.p, n));
    check("Reduce::Sum", n, count() == std::accumulate(a.begin(), a.end(), 0));
    RUN("Reduce::Max", cub::DeviceReduce::Max(t, bytes, A.p, C.p, n));
    check("Reduce::Max", n, count() == sorted.back());
    RUN("Reduce::Min", cub::DeviceReduce::Min(t, bytes, A.p, C.p, n));
    check("Reduce::Min", n, count() == sorted[0]);
    RUN("Reduce::TransformReduce", cub::DeviceReduce::TransformReduce(t, bytes, A.p, C.p, n, cuda::std::plus<>(), Twice(), 5));
    check("Reduce::TransformReduce", n, count() == 5 + 2 * std::accumulate(a.begin(), a.end(), 0));
    expected = runs(keys, a, false, &unique);
    RUN("Reduce::ReduceByKey", cub::DeviceReduce::ReduceByKey(t, bytes, K.p, Q.p, A.p, O.p, C.p, cuda::std::plus<>(), n));
    check("Reduce::ReduceByKey", n, count() == (int)unique.size() && Q.get(count()) == unique && O.get(count()) == expected);
    unique.clear(), expected = runs(keys, a, true, &unique);
    RUN("RunLengthEncode", cub::DeviceRunLengthEncode::Encode(t, bytes, K.p, Q.p, O.p, C.p, n));
    check("RunLengthEncode", n, count() == (int)unique.size() && Q.get(count()) == unique && O.get(count()) == expected);
    RUN("RunLengthEncode::NonTrivialRuns", cub::DeviceRunLengthEncode::NonTrivialRuns(t, bytes, K.p, Q.p, O.p, C.p, n));
    expected.erase(std::remove(expected.begin(), expected.end(), 1), expected.end());
    check("RunLengthEncode::NonTrivialRuns", n, count() == (int)expected.size() && O.get(count()) == expected);

    RUN("Scan::InclusiveSum", cub::DeviceScan::InclusiveSum(t, bytes, A.p, O.p, n));
    std::partial_sum(a.begin(), a.end(), sums.begin());
    check("Scan::InclusiveSum", n, O.get() == sums);
    RUN("Scan::ExclusiveSum", cub::DeviceScan::ExclusiveSum(t, bytes, A.p, O.p, n));
    expected = V(n);
    for (int i = 1; i < n; i++)
        expected[i] = sums[i - 1];
    check("Scan::ExclusiveSum", n, O.get() == expected);
    RUN("Scan::InclusiveScan", cub::DeviceScan::InclusiveScan(t, bytes, A.p, O.p, cuda::maximum<>(), n));
    for (int i = 0; i < n; i++)
        expected[i] = std::max(a[i], i ? expected[i - 1] : 0);
    check("Scan::InclusiveScan", n, O.get() == expected);
    RUN("Scan::InclusiveSumByKey", cub::DeviceScan::InclusiveSumByKey(t, bytes, K.p, A.p, O.p, n));
    for (int i = 0; i < n; i++)
        expected[i] = a[i] + (i && keys[i] == keys[i - 1] ? expected[i - 1] : 0);
    check("Scan::InclusiveSumByKey", n, O.get() == expected);

    expected.clear(), std::copy_if(a.begin(), a.end(), std::back_inserter(expected), Odd());
    RUN("Select::If", cub::DeviceSelect::If(t, bytes, A.p, O.p, C.p, n, Odd()));
    check("Select::If", n, count() == (int)expected.size() && O.get(count()) == expected);
    RUN("Partition::If", cub::DevicePartition::If(t, bytes, A.p, O.p, C.p, n, Odd()));
    check("Partition::If", n, count() == (int)expected.size() && O.get(count()) == expected);
    expected.clear();
    for (int i = 0; i < n; i++)
        if (b[i] & 1)
            expected.push_back(a[i]);
    V odd = b;
    for (int &x : odd)
        x &= 1;
    Buffer F(odd);
    RUN("Select::Flagged", cub::DeviceSelect::Flagged(t, bytes, A.p, F.p, O.p, C.p, n));
    check("Select::Flagged", n, count() == (int)expected.size() && O.get(count()) == expected);
    RUN("Partition::Flagged", cub::DevicePartition::Flagged(t, bytes, A.p, F.p, O.p, C.p, n));
    check("Partition::Flagged", n, count() == (int)expected.size() && O.get(count()) == expected);
    RUN("Select::Unique", cub::DeviceSelect::Unique(t, bytes, K.p, O.p, C.p, n));
    check("Select::Unique", n, count() == (int)unique.size() && O.get(count()) == unique);
    RUN("Select::UniqueByKey", cub::DeviceSelect::UniqueByKey(t, bytes, K.p, A.p, Q.p, O.p, C.p, n));
    check("Select::UniqueByKey", n, count() == (int)unique.size() && Q.get(count()) == unique && O.get(1)[0] == a[0]);

    RUN("RadixSort::SortKeys", cub::DeviceRadixSort::SortKeys(t, bytes, A.p, O.p, n));
    check("RadixSort::SortKeys", n, O.get() == sorted);
    V order(n), values(n);
    std::iota(order.begin(), order.end(), 0);
    Buffer I(order);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return b[x] > b[y]; });
    RUN("RadixSort::SortPairsDescending", cub::DeviceRadixSort::SortPairsDescending(t, bytes, B.p, Q.p, I.p, O.p, n));
    check("RadixSort::SortPairsDescending", n, O.get() == order);
    RUN("MergeSort::SortKeysCopy", cub::DeviceMergeSort::SortKeysCopy(t, bytes, A.p, O.p, n, cuda::std::less<>()));
    check("MergeSort::SortKeysCopy", n, O.get() == sorted);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int x, int y) { return b[x] < b[y]; });
    Buffer J(b), L(I.get());
    RUN("MergeSort::StableSortPairs", cub::DeviceMergeSort::StableSortPairs(t, bytes, J.p, L.p, n, cuda::std::less<>()));
    check("MergeSort::StableSortPairs", n, L.get() == order);
    V merged(2 * n), other = b;
    std::sort(other.begin(), other.end());
    std::merge(sorted.begin(), sorted.end(), other.begin(), other.end(), merged.begin());
    RUN("Merge::MergeKeys", cub::DeviceMerge::MergeKeys(t, bytes, S.p, n, Buffer(other).p, n, P.p));
    Buffer Z(other);
    RUN("Merge::MergeKeys", cub::DeviceMerge::MergeKeys(t, bytes, S.p, n, Z.p, n, P.p));
    check("Merge::MergeKeys", n, P.get() == merged);

    V offsets;
    for (int i = 0; i < n; i += i % 3 ? 17 : 250)
        offsets.push_back(i);
    int segments = (int)offsets.size();
    offsets.push_back(n);
    Buffer D(offsets);
    RUN("SegmentedReduce::Sum", cub::DeviceSegmentedReduce::Sum(t, bytes, A.p, O.p, segments, D.p, D.p + 1));
    expected = V(segments), values = a;
    for (int i = 0; i < segments; i++) {
        expected[i] = std::accumulate(a.begin() + offsets[i], a.begin() + offsets[i + 1], 0);
        std::sort(values.begin() + offsets[i], values.begin() + offsets[i + 1]);
    }
    check("SegmentedReduce::Sum", n, O.get(segments) == expected);
    RUN("SegmentedSort::SortKeys", cub::DeviceSegmentedSort::SortKeys(t, bytes, A.p, O.p, n, segments, D.p, D.p + 1));
    check("SegmentedSort::SortKeys", n, O.get() == values);
    RUN("SegmentedRadixSort::SortKeys", cub::DeviceSegmentedRadixSort::SortKeys(t, bytes, A.p, O.p, n, segments, D.p, D.p + 1));
    check("SegmentedRadixSort::SortKeys", n, O.get() == values);

    Buffer H(500);
    RUN("Histogram::HistogramEven", cub::DeviceHistogram::HistogramEven(t, bytes, A.p, H.p, 501, 0, 500, n));
    expected = V(500);
    for (int x : a)
        expected[x]++;
    check("Histogram::HistogramEven", n, H.get() == expected);
    expected = V(n);
    RUN("AdjacentDifference", cub::DeviceAdjacentDifference::SubtractLeftCopy(t, bytes, A.p, O.p, n));
    std::adjacent_difference(a.begin(), a.end(), expected.begin());
    check("AdjacentDifference", n, O.get() == expected);
    check("Transform: no error", n, !cub::DeviceTransform::Transform(A.p, O.p, n, Twice()) && !cudaDeviceSynchronize());
    std::transform(a.begin(), a.end(), expected.begin(), Twice());
    check("Transform", n, O.get() == expected);
    int *out = O.p;
    cudaError_t error = cub::DeviceFor::Bulk(n, [out] __device__(int i) { out[i] = i * i; });
    check("For::Bulk: no error", n, !error && !cudaDeviceSynchronize());
    for (int i = 0; i < n; i++)
        expected[i] = i * i;
    check("For::Bulk", n, O.get() == expected);
}
int main()
{
    for (int n : {1, 1000, 50000})
        test(n);
    printf("%d compared, %d wrong\\n", compared, wrong);
}
"""

THRUST = """
#include <thrust/adjacent_difference.h>
#include <thrust/binary_search.h>
#include <thrust/count.h>
#include <thrust/device_vector.h>
#include <thrust/equal.h>
#include <thrust/extrema.h>
#include <thrust/fill.h>
#include <thrust/find.h>
#include <thrust/for_each.h>
#include <thrust/gather.h>
#include <thrust/inner_product.h>
#include <thrust/logical.h>
#include <thrust/merge.h>
#include <thrust/mismatch.h>
#include <thrust/partition.h>
#include <thrust/reduce.h>
#include <thrust/remove.h>
#include <thrust/replace.h>
#include <thrust/reverse.h>
#include <thrust/scan.h>
#include <thrust/scatter.h>
#include <thrust/sequence.h>
#include <thrust/set_operations.h>
#include <thrust/sort.h>
#include <thrust/swap.h>
#include <thrust/tabulate.h>
#include <thrust/transform.h>
#include <thrust/transform_reduce.h>
#include <thrust/transform_scan.h>
#include <thrust/unique.h>
typedef thrust::device_vector<int> D;
static V host(const D &d) { V v(d.size()); thrust::copy(d.begin(), d.end(), v.begin()); return v; }
#define ALL(v) v.begin(), v.end()
#define SAME(name, device, expected) check(name, n, host(device) == expected)
static void test(int n)
{
    V a = draw(n, 500), b = draw(n, 40), e(n), u, keys = b;
    for (int i = 0; i < n; i++)
        keys[i] = i / 7 % 5;
    const D A(ALL(a)), B(ALL(b)), K(ALL(keys));
    D O(n), Q(n);
    check("reduce", n, thrust::reduce(ALL(A)) == std::accumulate(ALL(a), 0));
    int total = thrust::transform_reduce(ALL(A), Twice(), 1, thrust::plus<int>());
    check("transform_reduce", n, total == 1 + 2 * std::accumulate(ALL(a), 0));
    check("inner_product", n, thrust::inner_product(ALL(A), B.begin(), 0) == std::inner_product(ALL(a), b.begin(), 0));
    check("count_if", n, thrust::count_if(ALL(A), Odd()) == std::count_if(ALL(a), Odd()));
    check("max_element", n, thrust::max_element(ALL(A)) - A.begin() == std::max_element(ALL(a)) - a.begin());
    check("min_element", n, thrust::min_element(ALL(A)) - A.begin() == std::min_element(ALL(a)) - a.begin());
    check("find", n, thrust::find(ALL(A), a[n / 2]) - A.begin() == std::find(ALL(a), a[n / 2]) - a.begin());
    check("any_of", n, thrust::any_of(ALL(A), Odd()) == std::any_of(ALL(a), Odd()));
    check("all_of", n, thrust::all_of(ALL(A), Odd()) == std::all_of(ALL(a), Odd()));
    check("none_of", n, thrust::none_of(ALL(A), Odd()) == std::none_of(ALL(a), Odd()));
    O = A, O[n - 1] = -1;
    check("mismatch", n, thrust::mismatch(ALL(A), O.begin()).first - A.begin() == n - 1);
    check("equal", n, !thrust::equal(ALL(A), O.begin()) && thrust::equal(ALL(A), A.begin()));
    thrust::transform(ALL(A), B.begin(), O.begin(), thrust::multiplies<int>());
    std::transform(ALL(a), b.begin(), e.begin(), std::multiplies<int>());
    SAME("transform", O, e);
    thrust::inclusive_scan(ALL(A), O.begin()), std::partial_sum(ALL(a), e.begin());
    SAME("inclusive_scan", O, e);
    thrust::exclusive_scan(ALL(A), O.begin(), 3);
    for (int i = n - 1; i >= 0; i--)
        e[i] = i ? e[i - 1] + 3 : 3;
    SAME("exclusive_scan", O, e);
    thrust::transform_inclusive_scan(ALL(A), O.begin(), Twice(), thrust::plus<int>());
    for (int i = 0, sum = 0; i < n; i++)
        e[i] = sum += 2 * a[i];
    SAME("transform_inclusive_scan", O, e);
    thrust::inclusive_scan_by_key(ALL(K), A.begin(), O.begin());
    for (int i = 0; i < n; i++)
        e[i] = a[i] + (i && keys[i] == keys[i - 1] ? e[i - 1] : 0);
    SAME("inclusive_scan_by_key", O, e);
    thrust::adjacent_difference(ALL(A), O.begin()), std::adjacent_difference(ALL(a), e.begin());
    SAME("adjacent_difference", O, e);
    V sums = runs(keys, a, false, &u);
    auto ends = thrust::reduce_by_key(ALL(K), A.begin(), Q.begin(), O.begin());
    int m = ends.first - Q.begin();
    V q = host(Q), o = host(O);
    q.resize(m), o.resize(m);
    check("reduce_by_key", n, q == u && o == sums);
    D U = K;
    U.resize(thrust::unique(ALL(U)) - U.begin());
    SAME("unique", U, u);
    D M = A;
    M.resize(thrust::remove_if(ALL(M), Odd()) - M.begin());
    V r = a;
    r.erase(std::remove_if(ALL(r), Odd()), r.end());
    SAME("remove_if", M, r);
    O.resize(n);
    O.resize(thrust::copy_if(ALL(A), O.begin(), Odd()) - O.begin());
    V c;
    std::copy_if(ALL(a), std::back_inserter(c), Odd());
    SAME("copy_if", O, c);
    O = A, e = a;
    thrust::stable_partition(ALL(O), Odd()), std::stable_partition(ALL(e), Odd());
    SAME("stable_partition", O, e);
    O = A, e = a;
    thrust::replace_if(ALL(O), Odd(), 7), std::replace_if(ALL(e), Odd(), 7);
    SAME("replace_if", O, e);
    thrust::reverse(ALL(O)), std::reverse(ALL(e));
    SAME("reverse", O, e);
    D X = A, Y = B;
    thrust::swap_ranges(ALL(X), Y.begin());
    check("swap_ranges", n, host(X) == b && host(Y) == a);
    thrust::sort(ALL(X), thrust::greater<int>());
    e = b, std::sort(ALL(e), std::greater<int>());
    SAME("sort", X, e);
    V order(n);
    std::iota(ALL(order), 0);
    D I(n);
    thrust::sequence(ALL(I));
    SAME("sequence", I, order);
    X = B, thrust::stable_sort_by_key(ALL(X), I.begin());
    std::stable_sort(ALL(order), [&](int x, int y) { return b[x] < b[y]; });
    SAME("stable_sort_by_key", I, order);
    O.resize(n), thrust::gather(ALL(I), A.begin(), O.begin());
    for (int i = 0; i < n; i++)
        e[i] = a[order[i]];
    SAME("gather", O, e);
    thrust::scatter(ALL(O), I.begin(), Q.begin());
    SAME("scatter", Q, a);
    V s = a, z = b;
    std::sort(ALL(s)), std::sort(ALL(z));
    const D S(ALL(s)), Z(ALL(z));
    thrust::lower_bound(ALL(S), ALL(B), O.begin());
    for (int i = 0; i < n; i++)
        e[i] = std::lower_bound(ALL(s), b[i]) - s.begin();
    SAME("lower_bound", O, e);
    D W(2 * n);
    V w(2 * n);
    thrust::merge(ALL(S), ALL(Z), W.begin()), std::merge(ALL(s), ALL(z), w.begin());
    SAME("merge", W, w);
#define SET(name)                                                                                                      \\
    W.resize(2 * n), w.resize(2 * n);                                                                                  \\
    W.resize(thrust::name(ALL(S), ALL(Z), W.begin()) - W.begin());                                                     \\
    w.resize(std::name(ALL(s), ALL(z), w.begin()) - w.begin());                                                        \\
    SAME(#name, W, w);
    SET(set_union)
    SET(set_intersection)
    SET(set_difference)
    SET(set_symmetric_difference)
    thrust::fill(ALL(O), 9);
    SAME("fill", O, V(n, 9));
    thrust::tabulate(ALL(O), Twice());
    for (int i = 0; i < n; i++)
        e[i] = 2 * i;
    SAME("tabulate", O, e);
    check("is_sorted", n, thrust::is_sorted(ALL(S)));
}
int main()
{
    for (int n : {1, 1000, 50000})
        test(n);
    printf("%d compared, %d wrong\\n", compared, wrong);
}
"""


@pytest.mark.parametrize("name", ["cub", "thrust"])
def test_each_algorithm(name: str, tmp_path: Path) -> None:
    output = tmp_path / name
    flags = ("-cudart", "shared", "-w", "-O1", "--extended-lambda", "-gencode", "arch=compute_90,code=compute_90")
    compile_cuda(PROLOGUE + (CUB if name == "cub" else THRUST), output, *flags)
    done = subprocess.run([output], env=simulated_environment(gpus=1), capture_output=True, text=True)
    print(done.stdout)
    assert done.stdout.endswith(" compared, 0 wrong\n"), (done.stdout[-2000:], done.stderr[-2000:])
