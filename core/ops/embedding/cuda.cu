// Token and position embeddings on the GPU.
//
//   forward:  out[n] = scale * table[ids[n]] + position_table[positions[n]]
//   backward: dtable[ids[n]] += scale * dout[n], dposition_table likewise, without scale
//
// forward_kernel: a warp per token; writes out (=).
// backward: the tokens are sorted by id, so that the rows of one id follow each other (a run).
// add_runs_kernel: a block per group of sorted tokens and slice of columns; adds the runs within its group to
// the table (+=) and writes those that cross its ends as partial sums (=, workspace). join_partials_kernel
// adds these (+=). No atomics: the order of additions depends on the ids alone.
//
// A slice of a table (first_id) has the rows of ids [first, first + rows). Tokens of other ids select no row:
// forward they give zeros, backward their key is `rows`, which sorts after all others.

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

/// The ids of the rows of a table: row id - first. Ids outside of a slice select none.
struct IdRange {
  static constexpr int whole = 0x7fffffff;
  int first = 0, rows = whole;
  IdRange() = default;
  IdRange(const std::optional<int64_t>& first_id, const Tensor& table) {
    if (!first_id) return;
    first = static_cast<int>(*first_id);
    rows = static_cast<int>(table.dim(0));
  }
  __device__ __forceinline__ bool has(int row) const {
    return static_cast<unsigned>(row) < static_cast<unsigned>(rows);
  }
};

/// An embedding table and, for each token, the row that it selects.
template <class W>
struct Table {
  IdRange range;
  const int32_t* ids = nullptr;
  const W* rows = nullptr;  ///< null: no such table
  int64_t stride = 0;       ///< of a row
  Table() = default;
  Table(const Tensor& index, const Tensor& t, const std::optional<int64_t>& first_id = {})
      : range(first_id, t),
        ids(static_cast<const int32_t*>(index.data)),
        rows(static_cast<const W*>(t.data)),
        stride(t.stride[0]) {}
  __device__ __forceinline__ const W* row(int64_t r) const {
    if (!rows) return nullptr;
    const int row = ids[r] - range.first;
    return range.has(row) ? rows + row * stride : nullptr;
  }
};

template <class W, class T>
__global__ void __launch_bounds__(forward_warps* warp)
    forward_kernel(Table<W> table, Table<W> position_rows, T* out, int64_t out_stride, int64_t n, int64_t h,
                   float scale, bool vectors) {
  const int64_t r = int64_t{blockIdx.x} * forward_warps + threadIdx.x / warp;
  if (r >= n) return;
  const int lane = static_cast<int>(threadIdx.x) % warp;
  const W* __restrict__ token_row = table.row(r);
  const W* __restrict__ position_row = position_rows.row(r);
  T* __restrict__ out_row = out + r * out_stride;
  const int64_t units = vectors ? h / unit_elements : 0;
#pragma unroll 4
  for (int64_t u = lane; u < units; u += warp) {
    float v[unit_elements] = {};
    if (token_row) load_floats(token_row + u * unit_elements, v);
#pragma unroll
    for (int k = 0; k < unit_elements; ++k) v[k] *= scale;
    if (position_row) {
      float position[unit_elements];
      load_floats(position_row + u * unit_elements, position);
#pragma unroll
      for (int k = 0; k < unit_elements; ++k) v[k] += position[k];
    }
    store_floats(out_row + u * unit_elements, v);
  }
  for (int64_t i = units * unit_elements + lane; i < h; i += warp) {
    float v = token_row ? scale * static_cast<float>(token_row[i]) : 0.0f;
    if (position_row) v += static_cast<float>(position_row[i]);
    out_row[i] = T(v);
  }
}

/// True when every row is 16-byte aligned, or the tensor is absent.
bool aligned_rows(const Tensor& t) {
  return !t.data || (aligned16(t.data) && t.stride[0] * size_of(t.dtype) % 16 == 0);
}

template <class W, class T>
void forward_as(Exec& exec, const EmbeddingForward& a) {
  const int64_t n = a.out.dim(0), h = a.out.dim(1);
  const bool vectors = aligned_rows(a.table) && aligned_rows(a.position_table) && aligned_rows(a.out);
  NRL_LAUNCH((forward_kernel<W, T>), static_cast<unsigned>((n + forward_warps - 1) / forward_warps),
             forward_warps * warp, 0, exec.stream, Table<W>(a.ids, a.table, a.first_id),
             Table<W>(a.positions, a.position_table), static_cast<T*>(a.out.data), a.out.stride[0], n, h,
             a.scale, vectors);
}

void forward_launch(Exec& exec, const EmbeddingForward& a) {
  for_float_pair(a.table.dtype, a.out.dtype, [&]<class W, class T>() { forward_as<W, T>(exec, a); });
}

// --- backward: the tokens in the order of their ids ------------------------------------------------------

// A stable LSD radix sort. Each pass counts the tokens by digit and tile (count_kernel), takes the exclusive
// prefix sums of the counts (scan_kernel), and moves every token to the sum of its digit and tile plus its
// rank among the tokens of that digit in the tile (scatter_kernel).

/// The keys of a pass: rows of the table. The first pass computes them from the ids.
struct Keys {
  const int* data;
  IdRange range;
  bool ids;  ///< data are ids
  __device__ __forceinline__ int operator[](int64_t i) const {
    if (!ids) return data[i];
    const int row = data[i] - range.first;
    return range.has(row) ? row : range.rows;
  }
};

__device__ __forceinline__ int digit_of(int key, int shift) {
  return (key >> shift) & (sorted::digits - 1);
}

/// counts[digit, tile] = tokens; a block per tile.
__global__ void __launch_bounds__(sorted::tile)
    count_kernel(Keys keys, int64_t n, int shift, int* __restrict__ counts) {
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

/// Replaces counts by their exclusive prefix sums; one block.
__global__ void __launch_bounds__(scan_threads) scan_kernel(int* counts, int64_t n) {
  NRL_SHARED(int, warp_sums, [scan_threads / warp]);
  const int lane = static_cast<int>(threadIdx.x) % warp, w = static_cast<int>(threadIdx.x) / warp;
  const int64_t each = (n + scan_threads - 1) / scan_threads;
  const int64_t begin = min(n, each * threadIdx.x), end = min(n, begin + each);
  int sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  auto inclusive_scan = [lane](int v) {  // over the warp
#pragma unroll
    for (int o = 1; o < warp; o <<= 1) {
      const int before = __shfl_up_sync(all_lanes, v, o);
      if (lane >= o) v += before;
    }
    return v;
  };
  const int inclusive = inclusive_scan(sum);
  if (lane == warp - 1) warp_sums[w] = inclusive;
  __syncthreads();
  if (w == 0) {
    const int v = warp_sums[lane];
    warp_sums[lane] = inclusive_scan(v) - v;
  }
  __syncthreads();
  int running = warp_sums[w] + inclusive - sum;
  for (int64_t i = begin; i < end; ++i) {
    const int count = counts[i];
    counts[i] = running;
    running += count;
  }
}

/// A block per tile. `tokens` is null in the first pass, where element i is token i.
__global__ void __launch_bounds__(sorted::tile)
    scatter_kernel(Keys keys, const int* __restrict__ tokens, int64_t n, int shift,
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
  const int4 last = four_digits[t / 4];
  rank += (t % 4 > 0 && last.x == digit) + (t % 4 > 1 && last.y == digit) + (t % 4 > 2 && last.z == digit);
  const int64_t to = counts[int64_t{digit} * gridDim.x + blockIdx.x] + rank;
  sorted_keys[to] = key;
  sorted_tokens[to] = tokens ? tokens[i] : static_cast<int>(i);
}

/// The tokens ordered by row.
struct Sorted {
  const int* keys = nullptr;
  const int* tokens = nullptr;
  int64_t n = 0;
  int outside = IdRange::whole;  ///< the key of tokens without a row, which are last
};

/// The workspace of the backward pass, used for one table after the other.
struct SortWorkspace {
  int *keys[2], *tokens[2], *counts;
  float* partials;
  SortWorkspace(Exec& exec, int64_t n, int64_t h) {
    Scratch scratch("embedding_backward", exec.workspace);
    auto integers = [&](int64_t count) {
      return reinterpret_cast<int*>(scratch.bytes(scratch_bytes(count, sizeof(int))));
    };
    for (int i = 0; i < 2; ++i) {
      keys[i] = integers(n);
      tokens[i] = integers(n);
    }
    counts = integers(sorted::digits * sorted::tiles_of(n));
    partials = scratch.floats(2 * sorted::groups_of(n) * h);
  }
};

/// `max_key`: the largest key there may be, which decides how many passes the sort takes.
Sorted sort(Exec& exec, const SortWorkspace& memory, const int32_t* ids, const IdRange& range, int64_t n,
            int64_t max_key) {
  const auto tiles = static_cast<unsigned>(sorted::tiles_of(n));
  Sorted now{ids, nullptr, n, range.rows};
  for (int pass = 0; pass < sorted::passes_of(max_key); ++pass) {
    const int shift = pass * sorted::digit_bits, turn = pass % 2;
    const Keys keys{now.keys, range, pass == 0};
    NRL_LAUNCH(count_kernel, tiles, sorted::tile, 0, exec.stream, keys, n, shift, memory.counts);
    NRL_LAUNCH(scan_kernel, 1, scan_threads, 0, exec.stream, memory.counts, int64_t{sorted::digits} * tiles);
    NRL_LAUNCH(scatter_kernel, tiles, sorted::tile, 0, exec.stream, keys, now.tokens, n, shift, memory.counts,
               memory.keys[turn], memory.tokens[turn]);
    now = {memory.keys[turn], memory.tokens[turn], n, range.rows};
  }
  return now;
}

// --- backward: sums over runs of one id ------------------------------------------------------------------

constexpr int sum_threads = 128;

/// sum += scale * the elements of `pack`.
template <class T, int width>
__device__ __forceinline__ void add_to(float (&sum)[width], const Pack<T, width>& pack, float scale = 1) {
  float v[width];
  pack.get(v);
#pragma unroll
  for (int e = 0; e < width; ++e) sum[e] += scale * v[e];
}

/// The gradient of a table, and for each group the partial sums of the run that began before it and of the
/// run that continues after it.
struct Target {
  float* table;
  int64_t stride;   ///< of a row
  float* partials;  ///< (groups, 2, h)
  int64_t h;
  float scale;  ///< of dout
};

/// Grid (groups, column slices). Runs that cross a group boundary are written as partial sums and combined by
/// join_partials_kernel. A thread has `width` columns and `ahead` rows in flight.
template <class T, int width>
__global__ void __launch_bounds__(sum_threads)
    add_runs_kernel(Sorted s, const T* __restrict__ dout, int64_t dout_stride, Target to) {
  constexpr int group = sorted::group, ahead = 4;
  NRL_SHARED(int, key, [group + 2]);  // with both neighbors; -1 where there is none
  NRL_SHARED(int, token, [group]);
  const int t = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x} * group;
  int count = static_cast<int>(min(int64_t{group}, s.n - first));
  if (t < count + 2) {
    const int64_t i = first + t - 1;
    key[t] = i >= 0 && i < s.n ? s.keys[i] : -1;
  }
  if (t < count) token[t] = s.tokens[first + t];
  __syncthreads();
  while (count > 0 && key[count] == s.outside) --count;
  if (count == 0) return;
  const int64_t column = (int64_t{blockIdx.y} * sum_threads + t) * width;
  if (column >= to.h) return;
  float* partials = to.partials + int64_t{blockIdx.x} * 2 * to.h + column;
  auto ends = [&](int i) { return key[i + 2] != key[i + 1]; };
  auto table_row = [&](int i) { return to.table + key[i + 1] * to.stride + column; };

  bool from_before = key[0] == key[1];
  float sum[width] = {};
  for (int i = 0; i < count; i += ahead) {
    Pack<T, width> row[ahead];
    Pack<float, width> old[ahead];
    bool continued = from_before;
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      if (i + k >= count) continue;
      row[k].load(dout + token[i + k] * dout_stride + column);
      if (!ends(i + k)) continue;
      if (!continued) old[k].load(table_row(i + k));
      continued = false;
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      if (i + k >= count) continue;
      add_to(sum, row[k], to.scale);
      if (!ends(i + k)) continue;
      if (from_before) {
        store_floats(partials, sum);
      } else {
        add_to(sum, old[k]);
        store_floats(table_row(i + k), sum);
      }
      from_before = false;
#pragma unroll
      for (int e = 0; e < width; ++e) sum[e] = 0.0f;
    }
  }
  if (!ends(count - 1)) store_floats(from_before ? partials : partials + to.h, sum);
}

/// Grid (groups, column slices): adds the run that begins in the group and continues after it, partial sum
/// by partial sum.
template <int width>
__global__ void __launch_bounds__(sum_threads) join_partials_kernel(Sorted s, Target to) {
  constexpr int group = sorted::group;
  const int64_t first = int64_t{blockIdx.x} * group, next = first + group;
  if (next >= s.n) return;
  const int key = s.keys[next];
  if (s.keys[next - 1] != key || key == s.outside) return;
  if (s.keys[first] == key && first > 0 && s.keys[first - 1] == key) return;
  const int64_t column = (int64_t{blockIdx.y} * sum_threads + threadIdx.x) * width;
  if (column >= to.h) return;
  // The run continues in the groups whose first token has its id: [after, end), found by bisection.
  const int64_t after = int64_t{blockIdx.x} + 1;
  int64_t low = after, end = (s.n + group - 1) / group;
  while (end - low > 1) {
    const int64_t middle = (low + end) / 2;
    (s.keys[middle * group] == key ? low : end) = middle;
  }
  float sum[width] = {};
  Pack<float, width> pack;
  pack.load(to.partials + (2 * after - 1) * to.h + column);
  add_to(sum, pack);
#pragma unroll 8
  for (int64_t g = after; g < end; ++g) {
    Pack<float, width> partial;
    partial.load(to.partials + 2 * g * to.h + column);
    add_to(sum, partial);
  }
  float* table_row = to.table + key * to.stride + column;
  pack.load(table_row);
  add_to(sum, pack);
  store_floats(table_row, sum);
}

template <class T, int width>
void add_runs(Exec& exec, const Sorted& s, const Tensor& dout, const Target& to) {
  const int64_t slice = int64_t{sum_threads} * width;
  const dim3 grid(static_cast<unsigned>(sorted::groups_of(s.n)),
                  static_cast<unsigned>((to.h + slice - 1) / slice));
  NRL_LAUNCH((add_runs_kernel<T, width>), grid, sum_threads, 0, exec.stream, s,
             static_cast<const T*>(dout.data), dout.stride[0], to);
  NRL_LAUNCH((join_partials_kernel<width>), grid, sum_threads, 0, exec.stream, s, to);
}

void scatter_add(Exec& exec, const SortWorkspace& memory, const Tensor& ids,
                 const std::optional<int64_t>& first_id, const Tensor& dout, const Tensor& table,
                 float scale) {
  const int64_t max_key = first_id ? table.dim(0) : table.dim(0) - 1;
  const Sorted s = sort(exec, memory, static_cast<const int32_t*>(ids.data), IdRange(first_id, table),
                        dout.dim(0), max_key);
  const Target to{static_cast<float*>(table.data), table.stride[0], memory.partials, dout.dim(1), scale};
  const bool vectors = aligned_rows(table) && aligned_rows(dout) && to.h % 4 == 0;
  for_float_type(dout.dtype, [&]<class T>() {
    vectors ? add_runs<T, 4>(exec, s, dout, to) : add_runs<T, 1>(exec, s, dout, to);
  });
}

void backward_launch(Exec& exec, const EmbeddingBackward& a) {
  const SortWorkspace memory(exec, a.dout.dim(0), a.dout.dim(1));
  scatter_add(exec, memory, a.ids, a.first_id, a.dout, a.dtable, a.scale);
  if (a.dposition_table) scatter_add(exec, memory, a.positions, {}, a.dout, a.dposition_table, 1.0f);
}

}  // namespace

void fill_embedding(KernelTable& table) {
  table.embedding_forward = forward_launch;
  table.embedding_backward = backward_launch;
}

}  // namespace nrl::ops::NRL_GPU
