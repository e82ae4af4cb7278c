// Token dispatch on the GPU; contracts in core/ops/dispatch.h.
//
// offsets_kernel    one block; counts the entries of each expert and writes offsets (=)
// place_kernel      a block per expert, which goes through all entries in order, 8 neighbors to a thread,
//                   after four times to find the limit if it keeps the most probable; writes row, source (=).
//                   The result does not depend on the order in which blocks or threads run.
// permute_kernel    a warp per row; writes out (=)
// unpermute_kernel  a warp per token; writes out (=), added in the order of the choices
// gate_kernel       a warp per entry; writes dprob, dact_out, act_out (=)

#include "core/device/kernel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/gpu/select.cuh"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

constexpr int max_bins = 1024, place_threads = 512, row_warps = 8;
/// Entries that a thread reads before it looks at the first, and packs of each operand.
constexpr int entries_ahead = 8, packs_ahead = 4;

/// Calls each(i, expert[i]) for the entries of this thread of `threads`, in order.
template <int threads, class Each>
__device__ __forceinline__ void for_entries(const int* __restrict__ expert, int64_t entries,
                                            const Each& each) {
  for (int64_t base = threadIdx.x; base < entries; base += threads * entries_ahead) {
    int of[entries_ahead];
#pragma unroll
    for (int j = 0; j < entries_ahead; ++j)
      of[j] = base + j * threads < entries ? expert[base + j * threads] : -1;
#pragma unroll
    for (int j = 0; j < entries_ahead; ++j) each(base + j * threads, of[j]);
  }
}

__global__ void __launch_bounds__(1024)
    offsets_kernel(const int* __restrict__ expert, int64_t entries, int first, int experts, int capacity,
                   bool pad, int* __restrict__ offsets) {
  NRL_SHARED(int, count, [max_bins]);
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < experts; e += 1024) count[e] = 0;
  __syncthreads();
  for_entries<1024>(expert, entries, [&](int64_t, int of) {
    const int e = of - first;
    if (e >= 0 && e < experts) atomicAdd(&count[e], 1);
  });
  __syncthreads();
  if (thread != 0) return;
  int sum = 0;
  offsets[0] = 0;
  for (int e = 0; e < experts; ++e) {
    const int kept = capacity > 0 && count[e] > capacity ? capacity : count[e];
    sum += pad ? capacity : kept;
    offsets[e + 1] = sum;
  }
}

/// Orders as the probabilities do.
__device__ __forceinline__ unsigned order_of(float prob) {
  const unsigned bits = __float_as_uint(prob + 0.0f);  // -0 as 0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__global__ void __launch_bounds__(place_threads)
    place_kernel(const int* __restrict__ expert, const float* __restrict__ prob, int64_t entries, int first,
                 int experts, int capacity, const int* __restrict__ offsets, int64_t rows,
                 int* __restrict__ row, int* __restrict__ source) {
  constexpr int warps = place_threads / warp, ahead = entries_ahead;
  NRL_SHARED(int, sums_of_warps, [2][2][warps]);  // double-buffered: one barrier per count
  const int e = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int own = first + e, begin = offsets[e];
  const bool by_prob = capacity > 0 && prob;
  Limit limit{0, 0};
  if (by_prob)
    limit = limit_of<place_threads>(
        [&](const auto& each) {
          for_entries<place_threads>(expert, entries, [&](int64_t i, int of) {
            if (of == own) each(order_of(prob[i]));
          });
        },
        capacity);
  int placed = 0, equals = 0, turn = 0;
  for (int64_t base = 0; base < entries; base += place_threads * ahead, turn ^= 1) {
    // A thread reads neighboring entries, so that threads and entries have the same order.
    const int64_t i = base + thread * ahead;
    int of[ahead];
    unsigned mine = 0, fits = 0;  // bits of the entries
#pragma unroll
    for (int j = 0; j < ahead; ++j) of[j] = i + j < entries ? expert[i + j] - first : -1;
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (i + j < entries && e == 0 && (of[j] < 0 || of[j] >= experts)) row[i + j] = -1;
      if (of[j] == e) mine |= 1u << j;
    }
    fits = mine;
    if (by_prob) {
      unsigned above = 0, equal = 0;
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        if (!(mine >> j & 1)) continue;
        const unsigned order = order_of(prob[i + j]);
        if (order > limit.order) above |= 1u << j;
        if (order == limit.order) equal |= 1u << j;
      }
      int before = sum_before(__popc(equal), sums_of_warps[0][turn], equals);
      fits = above;
#pragma unroll
      for (int j = 0; j < ahead; ++j)
        if (equal >> j & 1 && before++ < limit.equals) fits |= 1u << j;
    }
    int before = sum_before(__popc(fits), sums_of_warps[1][turn], placed);
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      if (!(mine >> j & 1)) continue;
      const bool kept = fits >> j & 1 && (capacity == 0 || before < capacity);
      row[i + j] = kept ? begin + before : -1;
      if (kept) source[begin + before] = static_cast<int>(i) + j;
      if (fits >> j & 1) ++before;
    }
  }
  if (capacity > 0 && placed > capacity) placed = capacity;
  const int64_t end = e + 1 == experts ? rows : offsets[e + 1];
  for (int64_t r = begin + placed + thread; r < end; r += place_threads) source[r] = -1;
}

template <class T, int E>
__global__ void __launch_bounds__(row_warps* warp)
    permute_kernel(const T* __restrict__ x, int64_t x_stride, const int* __restrict__ source, int64_t rows,
                   int64_t h, Divider top_k, T* __restrict__ out, int64_t out_stride) {
  const int64_t r = int64_t{blockIdx.x} * row_warps + threadIdx.x / warp;
  if (r >= rows) return;
  const int entry = source[r];
  const T* from = x + (entry < 0 ? 0 : top_k.quotient(entry)) * x_stride;
  T* to = out + r * out_stride;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(threadIdx.x) % warp * E; i < h; i += warp * E) {
    Pack<T, E> v;
    if (entry >= 0) v.load(from + i);
    v.store(to + i);
  }
}

template <class T, int E>
__global__ void __launch_bounds__(row_warps* warp)
    regroup_kernel(const T* __restrict__ x, int64_t x_stride, const int* __restrict__ begin,
                   const int* __restrict__ place, int groups, bool placed_in, int64_t rows, int64_t h,
                   T* __restrict__ out, int64_t out_stride) {
  const int64_t r = int64_t{blockIdx.x} * row_warps + threadIdx.x / warp;
  if (r >= rows) return;
  // The last group that begins at the row or before it; groups may be empty.
  int low = 0, high = groups - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (begin[middle] <= r)
      low = middle;
    else
      high = middle - 1;
  }
  const int64_t placed = place[low] + r - begin[low];
  const T* from = x + (placed_in ? placed : r) * x_stride;
  T* to = out + (placed_in ? r : placed) * out_stride;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(threadIdx.x) % warp * E; i < h; i += warp * E) {
    Pack<T, E> v;
    v.load(from + i);
    v.store(to + i);
  }
}

/// `most`: choices of a token at most, whose rows and probabilities are kept in registers; 0: any number.
template <class T, int most, int E>
__global__ void __launch_bounds__(row_warps* warp)
    unpermute_kernel(const T* __restrict__ x, int64_t x_stride, const int* __restrict__ row,
                     const float* __restrict__ prob, int64_t n, int k, int64_t h, const T* addend,
                     int64_t addend_stride, T* out, int64_t out_stride) {
  const int64_t t = int64_t{blockIdx.x} * row_warps + threadIdx.x / warp;
  if (t >= n) return;
  const auto row_of = [&](int c) { return c >= k ? -1 : row ? row[t * k + c] : static_cast<int>(t * k + c); };
  const auto prob_of = [&](int c) { return c < k && prob ? prob[t * k + c] : 1.0f; };
  constexpr int held = most > 0 ? most : 1, ahead = most == 2 ? 2 : packs_ahead;
  int rows[held];
  float probs[held];
#pragma unroll
  for (int c = 0; c < most; ++c) rows[c] = row_of(c), probs[c] = prob_of(c);
  for (int64_t i = static_cast<int64_t>(threadIdx.x) % warp * E; i < h; i += warp * E) {
    float sum[E] = {};
    if (addend) load_floats(addend + t * addend_stride + i, sum);
    const auto add = [&](int first) {
      Pack<T, E> packs[ahead];
      int from[ahead];
#pragma unroll
      for (int u = 0; u < ahead; ++u) {
        from[u] = most > 0 ? rows[(first + u) % held] : row_of(first + u);
        if (from[u] >= 0) packs[u].load(x + from[u] * x_stride + i);
      }
#pragma unroll
      for (int u = 0; u < ahead; ++u) {
        if (from[u] < 0) continue;
        const float p = most > 0 ? probs[(first + u) % held] : prob_of(first + u);
        float v[E];
        packs[u].get(v);
#pragma unroll
        for (int j = 0; j < E; ++j) sum[j] += p * v[j];
      }
    };
    if constexpr (most > 0) {
#pragma unroll
      for (int c = 0; c < most; c += ahead) add(c);
    } else {
#pragma unroll 1
      for (int c = 0; c < k; c += ahead) add(c);
    }
    store_floats(out + t * out_stride + i, sum);
  }
}

template <class T, int E>
__global__ void __launch_bounds__(row_warps* warp)
    gate_kernel(const T* dact, int64_t dact_stride, const T* act, int64_t act_stride,
                const float* __restrict__ prob, const int* __restrict__ row, int64_t entries, int64_t f,
                float* __restrict__ dprob, T* dact_out, int64_t dact_out_stride, T* act_out,
                int64_t act_out_stride) {
  const int64_t i = int64_t{blockIdx.x} * row_warps + threadIdx.x / warp;
  if (i >= entries) return;
  const int64_t lane = threadIdx.x % warp, r = row ? row[i] : i;
  const float p = prob[i];
  float dot = 0;
  // The results may take the place of the operands, so that only what is loaded before a store is in flight.
  constexpr int step = warp * E;
  for (int64_t base = lane * E; r >= 0 && base < f; base += packs_ahead * step) {
    Pack<T, E> dacts[packs_ahead], acts[packs_ahead];
#pragma unroll
    for (int u = 0; u < packs_ahead; ++u) {
      const int64_t j = base + u * step;
      if (j >= f) continue;
      dacts[u].load(dact + r * dact_stride + j);
      acts[u].load(act + r * act_stride + j);
    }
#pragma unroll
    for (int u = 0; u < packs_ahead; ++u) {
      const int64_t j = base + u * step;
      if (j >= f) continue;
      float d[E], a[E];
      dacts[u].get(d);
      acts[u].get(a);
#pragma unroll
      for (int q = 0; q < E; ++q) {
        dot += d[q] * a[q];
        d[q] *= p;
        a[q] *= p;
      }
      store_floats(dact_out + r * dact_out_stride + j, d);
      store_floats(act_out + r * act_out_stride + j, a);
    }
  }
  dot = warp_sum(dot);
  if (lane == 0) dprob[i] = dot;
}

template <class T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(t.data);
}

unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>((rows + row_warps - 1) / row_warps);
}

void sort_launch(Exec& exec, const DispatchSort& a) {
  const int64_t entries = a.expert.numel();
  const int experts = static_cast<int>(a.offsets.dim(0)) - 1, capacity = static_cast<int>(a.capacity),
            first = static_cast<int>(a.first);
  NRL_LAUNCH(offsets_kernel, 1, 1024, 0, exec.stream, data_of<const int>(a.expert), entries, first, experts,
             capacity, a.pad, data_of<int>(a.offsets));
  NRL_LAUNCH(place_kernel, static_cast<unsigned>(experts), place_threads, 0, exec.stream,
             data_of<const int>(a.expert), data_of<const float>(a.prob), entries, first, experts, capacity,
             data_of<const int>(a.offsets), a.source.dim(0), data_of<int>(a.row), data_of<int>(a.source));
}

template <class T, int E>
void permute_as(Exec& exec, const Permute& a) {
  NRL_LAUNCH((permute_kernel<T, E>), blocks_for(a.out.dim(0)), row_warps * warp, 0, exec.stream,
             data_of<const T>(a.x), a.x.step(0), data_of<const int>(a.source), a.out.dim(0), a.x.dim(1),
             Divider(a.top_k), data_of<T>(a.out), a.out.step(0));
}

void permute_launch(Exec& exec, const Permute& a) {
  const bool packed = packed_rows(a.x) && packed_rows(a.out);
  for_float_type(a.x.dtype, [&]<class T>() {
    packed ? permute_as<T, per_pack<T>>(exec, a) : permute_as<T, 1>(exec, a);
  });
}

template <class T, int E>
void regroup_as(Exec& exec, const RegroupRows& a) {
  NRL_LAUNCH((regroup_kernel<T, E>), blocks_for(a.out.dim(0)), row_warps * warp, 0, exec.stream,
             data_of<const T>(a.x), a.x.step(0), data_of<const int>(a.begin), data_of<const int>(a.place),
             static_cast<int>(a.place.dim(0)), a.placed_in, a.out.dim(0), a.x.dim(1), data_of<T>(a.out),
             a.out.step(0));
}

void regroup_launch(Exec& exec, const RegroupRows& a) {
  const bool packed = packed_rows(a.x) && packed_rows(a.out);
  for_float_type(a.x.dtype, [&]<class T>() {
    packed ? regroup_as<T, per_pack<T>>(exec, a) : regroup_as<T, 1>(exec, a);
  });
}

template <class T, int E, int most>
void unpermute_choices(Exec& exec, const Unpermute& a) {
  NRL_LAUNCH((unpermute_kernel<T, most, E>), blocks_for(a.out.dim(0)), row_warps * warp, 0, exec.stream,
             data_of<const T>(a.x), a.x.step(0), data_of<const int>(a.row), data_of<const float>(a.prob),
             a.out.dim(0), static_cast<int>((a.row ? a.row : a.prob).dim(1)), a.x.dim(1),
             data_of<const T>(a.addend), a.addend ? a.addend.step(0) : 0, data_of<T>(a.out), a.out.step(0));
}

template <class T, int E>
void unpermute_as(Exec& exec, const Unpermute& a) {
  const int64_t k = (a.row ? a.row : a.prob).dim(1);
  k <= 2   ? unpermute_choices<T, E, 2>(exec, a)
  : k <= 8 ? unpermute_choices<T, E, 8>(exec, a)
           : unpermute_choices<T, E, 0>(exec, a);
}

void unpermute_launch(Exec& exec, const Unpermute& a) {
  const bool packed = packed_rows(a.x) && packed_rows(a.out) && packed_rows(a.addend);
  for_float_type(a.x.dtype, [&]<class T>() {
    packed ? unpermute_as<T, per_pack<T>>(exec, a) : unpermute_as<T, 1>(exec, a);
  });
}

template <class T, int E>
void gate_as(Exec& exec, const GateBackward& a) {
  NRL_LAUNCH((gate_kernel<T, E>), blocks_for(a.prob.numel()), row_warps * warp, 0, exec.stream,
             data_of<const T>(a.dact), a.dact.step(0), data_of<const T>(a.act), a.act.step(0),
             data_of<const float>(a.prob), data_of<const int>(a.row), a.prob.numel(), a.dact.dim(1),
             data_of<float>(a.dprob), data_of<T>(a.dact_out), a.dact_out.step(0), data_of<T>(a.act_out),
             a.act_out.step(0));
}

void gate_launch(Exec& exec, const GateBackward& a) {
  const bool packed =
      packed_rows(a.dact) && packed_rows(a.act) && packed_rows(a.dact_out) && packed_rows(a.act_out);
  for_float_type(a.dact.dtype,
                 [&]<class T>() { packed ? gate_as<T, per_pack<T>>(exec, a) : gate_as<T, 1>(exec, a); });
}

}  // namespace

void fill_dispatch(KernelTable& table) {
  table.dispatch_sort = sort_launch;
  table.permute = permute_launch;
  table.regroup_rows = regroup_launch;
  table.unpermute = unpermute_launch;
  table.gate_backward = gate_launch;
}

}  // namespace nrl::ops::NRL_GPU
