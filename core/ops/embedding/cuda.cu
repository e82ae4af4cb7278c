#include "core/device/kernel.h"
#include "core/ops/embedding/sorted.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/shared/gpu/rows.cuh"
#include "core/ops/shared/scratch.h"

namespace nrl::ops::NRL_GPU {
namespace {

using namespace kernel;

// --- forward ---------------------------------------------------------------------------------------------

constexpr int forward_warps = 8;
/// A lane's elements at a time: 16 bytes of bf16 or 32 of f32, because table and out may differ in type.
constexpr int unit_elements = 8;

template <class W>
struct Table {
  const int32_t* ids = nullptr;
  const W* rows = nullptr;  ///< null: none
  int64_t step = 0;
  Table() = default;
  Table(const Tensor& index, const Tensor& t)
      : ids(static_cast<const int32_t*>(index.data)),
        rows(static_cast<const W*>(t.data)),
        step(t.stride[0]) {}
  __device__ __forceinline__ const W* row(int64_t r) const { return rows ? rows + ids[r] * step : nullptr; }
};

/// One warp per row.
template <class W, class T>
__global__ void __launch_bounds__(forward_warps* warp)
    forward_kernel(Table<W> table, Table<W> places, T* out, int64_t out_step, int64_t n, int64_t h,
                   bool vectors) {
  const int64_t r = int64_t{blockIdx.x} * forward_warps + threadIdx.x / warp;
  if (r >= n) return;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const W* __restrict__ word = table.row(r);
  const W* __restrict__ place = places.row(r);
  T* __restrict__ to = out + r * out_step;
  const int64_t units = vectors ? h / unit_elements : 0;
#pragma unroll 4
  for (int64_t u = lane; u < units; u += warp) {
    float v[unit_elements];
    load_floats(word + u * unit_elements, v);
    if (place) {
      float add[unit_elements];
      load_floats(place + u * unit_elements, add);
#pragma unroll
      for (int k = 0; k < unit_elements; ++k) v[k] += add[k];
    }
    store_floats(to + u * unit_elements, v);
  }
  for (int64_t i = units * unit_elements + lane; i < h; i += warp) {
    float v = static_cast<float>(word[i]);
    if (place) v += static_cast<float>(place[i]);
    to[i] = T(v);
  }
}

/// Every row begins at a multiple of 16 bytes; an absent tensor's do.
bool aligned_rows(const Tensor& t) {
  return !t.data || (aligned16(t.data) && t.stride[0] * size_of(t.dtype) % 16 == 0);
}

template <class W, class T>
void forward_as(Exec& exec, const EmbeddingForward& a) {
  const int64_t n = a.out.dim(0), h = a.out.dim(1);
  const bool vectors = aligned_rows(a.table) && aligned_rows(a.position_table) && aligned_rows(a.out);
  NRL_LAUNCH((forward_kernel<W, T>), static_cast<unsigned>((n + forward_warps - 1) / forward_warps),
             forward_warps * warp, 0, exec.stream, Table<W>(a.ids, a.table),
             Table<W>(a.positions, a.position_table), static_cast<T*>(a.out.data), a.out.stride[0], n, h,
             vectors);
}

void forward_launch(Exec& exec, const EmbeddingForward& a) {
  for_float_type(a.table.dtype, [&]<class W>() {
    for_float_type(a.out.dtype, [&]<class T>() { forward_as<W, T>(exec, a); });
  });
}

// --- backward: the tokens in the order of their ids ------------------------------------------------------

// A stable radix sort, least significant digit first: counts by digit and tile, their running sums, and then
// every token to its place, which is the sum in front of its digit and tile plus the tokens of the same digit
// in front of it in the tile.

__device__ __forceinline__ int digit_of(int key, int shift) {
  return (key >> shift) & (sorted::digits - 1);
}

/// counts (digits, tiles).
__global__ void __launch_bounds__(sorted::tile)
    count_kernel(const int* __restrict__ keys, int64_t n, int shift, int* __restrict__ counts) {
  NRL_SHARED(int, count, [sorted::digits]);
  const int t = static_cast<int>(threadIdx.x);
  for (int d = t; d < sorted::digits; d += sorted::tile) count[d] = 0;
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * sorted::tile + t;
  if (i < n) atomicAdd(&count[digit_of(keys[i], shift)], 1);
  __syncthreads();
  for (int d = t; d < sorted::digits; d += sorted::tile)
    counts[int64_t{d} * gridDim.x + blockIdx.x] = count[d];
}

constexpr int scan_threads = 1024;

/// counts[i] = the sum of what was in front of it; one block.
__global__ void __launch_bounds__(scan_threads) scan_kernel(int* counts, int64_t n) {
  NRL_SHARED(int, warp_sums, [scan_threads / warp]);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t each = (n + scan_threads - 1) / scan_threads;
  const int64_t begin = min(n, each * threadIdx.x), end = min(n, begin + each);
  int sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  auto scanned = [lane](int v) {  // over the lanes up to this one
#pragma unroll
    for (int o = 1; o < warp; o <<= 1) {
      const int before = __shfl_up_sync(all_lanes, v, o);
      if (lane >= o) v += before;
    }
    return v;
  };
  const int upto = scanned(sum);
  if (lane == warp - 1) warp_sums[w] = upto;
  __syncthreads();
  if (w == 0) {
    const int v = warp_sums[lane];
    warp_sums[lane] = scanned(v) - v;
  }
  __syncthreads();
  int running = warp_sums[w] + upto - sum;
  for (int64_t i = begin; i < end; ++i) {
    const int count = counts[i];
    counts[i] = running;
    running += count;
  }
}

/// `tokens` null: the first pass, token i is at place i.
__global__ void __launch_bounds__(sorted::tile)
    place_kernel(const int* __restrict__ keys, const int* __restrict__ tokens, int64_t n, int shift,
                 const int* __restrict__ counts, int* __restrict__ sorted_keys,
                 int* __restrict__ sorted_tokens) {
  NRL_SHARED(int4, four_digits, [sorted::tile / 4]);
  const int t = static_cast<int>(threadIdx.x);
  const int64_t i = int64_t{blockIdx.x} * sorted::tile + t;
  const int key = i < n ? keys[i] : 0, digit = i < n ? digit_of(key, shift) : -1;
  reinterpret_cast<int*>(&four_digits[0])[t] = digit;
  __syncthreads();
  if (i >= n) return;
  int rank = 0;
  for (int j = 0; j < t / 4; ++j) {
    const int4 d = four_digits[j];
    rank += (d.x == digit) + (d.y == digit) + (d.z == digit) + (d.w == digit);
  }
  const int4 own = four_digits[t / 4];
  rank += (t % 4 > 0 && own.x == digit) + (t % 4 > 1 && own.y == digit) + (t % 4 > 2 && own.z == digit);
  const int64_t to = counts[int64_t{digit} * gridDim.x + blockIdx.x] + rank;
  sorted_keys[to] = key;
  sorted_tokens[to] = tokens ? tokens[i] : static_cast<int>(i);
}

struct Sorted {
  const int* keys = nullptr;
  const int* tokens = nullptr;
  int64_t n = 0;
};

/// Memory of the backward pass, used for one table after the other.
struct Memory {
  int *keys[2], *tokens[2], *counts;
  float* pieces;
  Memory(Exec& exec, int64_t n, int64_t h) {
    Scratch scratch("embedding_backward", exec.workspace);
    auto integers = [&](int64_t count) {
      return reinterpret_cast<int*>(scratch.bytes(scratch_bytes(count, sizeof(int))));
    };
    for (int i = 0; i < 2; ++i) {
      keys[i] = integers(n);
      tokens[i] = integers(n);
    }
    counts = integers(sorted::digits * sorted::tiles_of(n));
    pieces = scratch.floats(2 * sorted::groups_of(n) * h);
  }
};

Sorted sort(Exec& exec, const Memory& memory, const int32_t* ids, int64_t n, int64_t largest) {
  const auto tiles = static_cast<unsigned>(sorted::tiles_of(n));
  Sorted now{ids, nullptr, n};
  for (int shift = 0, turn = 0; shift == 0 || largest >> shift; shift += sorted::digit_bits, turn ^= 1) {
    NRL_LAUNCH(count_kernel, tiles, sorted::tile, 0, exec.stream, now.keys, n, shift, memory.counts);
    NRL_LAUNCH(scan_kernel, 1, scan_threads, 0, exec.stream, memory.counts, int64_t{sorted::digits} * tiles);
    NRL_LAUNCH(place_kernel, tiles, sorted::tile, 0, exec.stream, now.keys, now.tokens, n, shift,
               memory.counts, memory.keys[turn], memory.tokens[turn]);
    now = {memory.keys[turn], memory.tokens[turn], n};
  }
  return now;
}

// --- backward: sums over runs of one id ------------------------------------------------------------------

constexpr int sum_threads = 128;

/// sum += the elements of `pack`.
template <class T, int width>
__device__ __forceinline__ void add_to(float (&sum)[width], const Pack<T, width>& pack) {
  float v[width];
  pack.get(v);
#pragma unroll
  for (int e = 0; e < width; ++e) sum[e] += v[e];
}

struct Target {
  float* table;
  int64_t step;
  float* pieces;  ///< (groups, 2, h): of the run that came from the group before, of the one that goes on
  int64_t h;
};

/// Grid (groups, column slices). A run that lies in the group is added to the table; what others leave here
/// is joined by the next kernel.
template <class T, int width>
__global__ void __launch_bounds__(sum_threads)
    add_runs_kernel(Sorted s, const T* __restrict__ dout, int64_t dout_step, Target to) {
  constexpr int group = sorted::group, ahead = 4;
  NRL_SHARED(int, key, [group + 2]);  // with both neighbours; -1 where there is none
  NRL_SHARED(int, token, [group]);
  const int t = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x} * group;
  const int count = static_cast<int>(min(int64_t{group}, s.n - first));
  if (t < count + 2) {
    const int64_t i = first + t - 1;
    key[t] = i >= 0 && i < s.n ? s.keys[i] : -1;
  }
  if (t < count) token[t] = s.tokens[first + t];
  __syncthreads();
  const int64_t column = (int64_t{blockIdx.y} * sum_threads + t) * width;
  if (column >= to.h) return;
  float* pieces = to.pieces + int64_t{blockIdx.x} * 2 * to.h + column;
  auto ends = [&](int i) { return key[i + 2] != key[i + 1]; };
  auto place = [&](int i) { return to.table + key[i + 1] * to.step + column; };

  bool from_before = key[0] == key[1];
  float sum[width] = {};
  for (int i = 0; i < count; i += ahead) {
    Pack<T, width> row[ahead];
    Pack<float, width> old[ahead];
    bool begun = from_before;
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      if (i + k >= count) continue;
      row[k].load(dout + token[i + k] * dout_step + column);
      if (!ends(i + k)) continue;
      if (!begun) old[k].load(place(i + k));
      begun = false;
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      if (i + k >= count) continue;
      add_to(sum, row[k]);
      if (!ends(i + k)) continue;
      if (from_before) {
        store_floats(pieces, sum);
      } else {
        add_to(sum, old[k]);
        store_floats(place(i + k), sum);
      }
      from_before = false;
#pragma unroll
      for (int e = 0; e < width; ++e) sum[e] = 0.0f;
    }
  }
  if (!ends(count - 1)) store_floats(from_before ? pieces : pieces + to.h, sum);
}

/// Grid (groups, column slices): the run that begins in the group and leaves it, piece by piece.
template <int width>
__global__ void __launch_bounds__(sum_threads) join_pieces_kernel(Sorted s, Target to) {
  constexpr int group = sorted::group;
  const int64_t first = int64_t{blockIdx.x} * group, next = first + group;
  if (next >= s.n) return;
  const int key = s.keys[next];
  if (s.keys[next - 1] != key) return;
  if (s.keys[first] == key && first > 0 && s.keys[first - 1] == key) return;
  const int64_t column = (int64_t{blockIdx.y} * sum_threads + threadIdx.x) * width;
  if (column >= to.h) return;
  // The groups that the run reaches into are those that begin with it: [after, end).
  const int64_t after = int64_t{blockIdx.x} + 1;
  int64_t low = after, end = (s.n + group - 1) / group;
  while (end - low > 1) {
    const int64_t middle = (low + end) / 2;
    (s.keys[middle * group] == key ? low : end) = middle;
  }
  float sum[width] = {};
  Pack<float, width> piece;
  piece.load(to.pieces + (2 * after - 1) * to.h + column);
  add_to(sum, piece);
#pragma unroll 8
  for (int64_t g = after; g < end; ++g) {
    Pack<float, width> part;
    part.load(to.pieces + 2 * g * to.h + column);
    add_to(sum, part);
  }
  float* place = to.table + key * to.step + column;
  piece.load(place);
  add_to(sum, piece);
  store_floats(place, sum);
}

template <class T, int width>
void add_runs(Exec& exec, const Sorted& s, const Tensor& dout, const Target& to) {
  const int64_t slice = int64_t{sum_threads} * width;
  const dim3 grid(static_cast<unsigned>(sorted::groups_of(s.n)),
                  static_cast<unsigned>((to.h + slice - 1) / slice));
  NRL_LAUNCH((add_runs_kernel<T, width>), grid, sum_threads, 0, exec.stream, s,
             static_cast<const T*>(dout.data), dout.stride[0], to);
  NRL_LAUNCH((join_pieces_kernel<width>), grid, sum_threads, 0, exec.stream, s, to);
}

void scatter(Exec& exec, const Memory& memory, const Tensor& ids, const Tensor& dout, const Tensor& table) {
  const Sorted s = sort(exec, memory, static_cast<const int32_t*>(ids.data), dout.dim(0), table.dim(0) - 1);
  const Target to{static_cast<float*>(table.data), table.stride[0], memory.pieces, dout.dim(1)};
  const bool vectors = aligned_rows(table) && aligned_rows(dout) && to.h % 4 == 0;
  for_float_type(dout.dtype, [&]<class T>() {
    vectors ? add_runs<T, 4>(exec, s, dout, to) : add_runs<T, 1>(exec, s, dout, to);
  });
}

void backward_launch(Exec& exec, const EmbeddingBackward& a) {
  const Memory memory(exec, a.dout.dim(0), a.dout.dim(1));
  scatter(exec, memory, a.ids, a.dout, a.dtable);
  if (a.dposition_table) scatter(exec, memory, a.positions, a.dout, a.dposition_table);
}

}  // namespace

void fill_embedding(KernelTable& table) {
  table.embedding_forward = forward_launch;
  table.embedding_backward = backward_launch;
}

}  // namespace nrl::ops::NRL_GPU
