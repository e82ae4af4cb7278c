// Attention to a paged cache on the CPU; contract in core/ops/paged.h. For row i of a sequence and the keys j
// that it sees, in tiles of 64 that begin at multiples of 64 in the sequence:
//
//   s_ij = scale q_i . k_j,  m_i = max_j s_ij,  l_i = sum_j exp(s_ij - m_i)
//   out_i = sum_j exp(s_ij - m_i) v_j / l_i
//
// A task is a block of rows of a sequence with one key head, for all query heads that read it: keys are
// loaded once for them, 16 x 16 numbers at a time, and transposed in registers, so that scores of different
// keys lie in the lanes of a vector.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/device/cpu/parallel.h"
#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"
#include "core/ops/paged/blocks.h"
#include "core/ops/shared/cpu/simd.h"

namespace nrl::ops::NRL_ISA {
namespace {

using paged::key_tile;

constexpr float lowest_score = -3.4028234663852886e38f;

void cache_write_kernel(Exec& exec, const CacheWrite& a) {
  const int* slots = data_of<const int>(a.slots);
  const int64_t size = size_of(a.keys.dtype);
  const auto width = static_cast<size_t>(a.keys.dim(1) * size);
  const auto row = [size](const Tensor& t, int64_t r) {
    return static_cast<std::byte*>(t.data) + r * t.step(0) * size;
  };
  cpu::parallel_for(exec.threads, a.keys.dim(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (slots[n] < 0) continue;
      std::memcpy(row(a.key_cache, slots[n]), row(a.keys, n), width);
      std::memcpy(row(a.value_cache, slots[n]), row(a.values, n), width);
    }
  });
}

/// Keys or values of a tile, one pointer per token.
template <class T>
using Tile = std::array<const T*, key_tile>;

template <class T>
class PagedAttention {
 public:
  PagedAttention(Exec& exec, const AttentionPaged& a)
      : a_(a),
        d_(a.q.dim(2)),
        kv_heads_(a.keys.dim(1)),
        group_(a.q.dim(1) / kv_heads_),
        block_(group_, d_),
        threads_(exec.threads),
        memory_(Scratch("attention_paged", exec.workspace)
                    .bytes(static_cast<size_t>(threads_) * block_.bytes())) {}

  void run() const {
    const int* cu = data_of<const int>(a_.cu_q);
    std::vector<Rows> blocks;
    for (int64_t s = 0; s < a_.context.dim(0); ++s)
      for (int64_t row = cu[s]; row < cu[s + 1]; row += block_.rows)
        blocks.push_back({s, row, std::min(block_.rows, cu[s + 1] - row),
                          data_of<const int>(a_.context)[s] - (cu[s + 1] - row)});
    cpu::parallel_tasks(threads_, static_cast<int64_t>(blocks.size()) * kv_heads_,
                        [&](int64_t task, int64_t thread) {
                          attend(blocks[static_cast<size_t>(task / kv_heads_)], task % kv_heads_, thread);
                        });
  }

 private:
  /// Rows of q that follow each other in a sequence; the first one is its token `position`.
  struct Rows {
    int64_t sequence, first, count, position;
  };
  struct Buffers {
    float *q, *out, *scores, *m, *l;
    Buffers(Scratch scratch, const paged::Block& b)
        : q(scratch.floats(b.vectors * b.padded)),
          out(scratch.floats(b.vectors * b.padded)),
          scores(scratch.floats(b.vectors * key_tile)),
          m(scratch.floats(b.vectors)),
          l(scratch.floats(b.vectors)) {}
  };

  int64_t first_key(int64_t position) const {
    return a_.window > 0 ? std::max<int64_t>(0, position - a_.window + 1) : 0;
  }
  /// The element of a row and head of q or out.
  static T* at(const Tensor& t, int64_t row, int64_t head) {
    return data_of<T>(t) + row * t.step(0) + head * t.step(1);
  }

  void attend(const Rows& rows, int64_t kv_head, int64_t thread) const {
    const Buffers b(
        Scratch("attention_paged", {memory_ + static_cast<size_t>(thread) * block_.bytes(), block_.bytes()}),
        block_);
    const int64_t vectors = rows.count * group_;
    for (int64_t v = 0; v < vectors; ++v) {
      const T* q = at(a_.q, rows.first + v / group_, kv_head * group_ + v % group_);
      float* to = b.q + v * block_.padded;
      for_lanes(
          d_, [&](int64_t i, const auto& access) { NRL_ISA::store(to + i, access.load(q + i) * a_.scale); });
      for (int64_t i = (d_ + lanes - 1) / lanes * lanes; i < block_.padded; ++i) to[i] = 0;
    }
    std::fill_n(b.out, vectors * block_.padded, 0.0f);
    std::fill_n(b.m, vectors, lowest_score);
    std::fill_n(b.l, vectors, 0.0f);
    const int64_t end = rows.position + rows.count;
    for (int64_t key = first_key(rows.position) / key_tile * key_tile; key < end; key += key_tile) {
      const int64_t count = std::min(key_tile, end - key);
      Tile<T> tile;
      find(a_.keys, rows.sequence, kv_head, key, count, tile);
      score(tile, count, vectors, b);
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t position = rows.position + v / group_;
        softmax(v, first_key(position) - key, position + 1 - key, count, b);
      }
      find(a_.values, rows.sequence, kv_head, key, count, tile);
      add_values(tile, count, vectors, b);
    }
    for (int64_t v = 0; v < vectors; ++v) {
      T* out = at(a_.out, rows.first + v / group_, kv_head * group_ + v % group_);
      const float* from = b.out + v * block_.padded;
      const float inverse = 1.0f / b.l[v];
      for_lanes(d_, [&](int64_t i, const auto& access) {
        access.store(out + i, NRL_ISA::load(from + i) * inverse);
      });
    }
  }

  /// The rows of tokens [key, key + count); those behind repeat the last one.
  void find(const Tensor& cache, int64_t sequence, int64_t kv_head, int64_t key, int64_t count,
            Tile<T>& tile) const {
    const int* table = data_of<const int>(a_.block_table) + sequence * a_.block_table.dim(1);
    const T* first = data_of<const T>(cache) + kv_head * d_;
    const int64_t step = kv_heads_ * d_;
    for (int64_t j = 0; j < count; ++j)
      tile[j] = first + (table[(key + j) / a_.page] * a_.page + (key + j) % a_.page) * step;
    for (int64_t j = count; j < key_tile; ++j) tile[j] = tile[count - 1];
  }

  /// scores[v][j] = q_v . k_j.
  void score(const Tile<T>& tile, int64_t count, int64_t vectors, const Buffers& b) const {
    for (int64_t j = 0; j < count; j += lanes)
      for_lanes(d_, [&](int64_t i, const auto& access) {
        Lanes k[lanes];
#pragma GCC unroll 16
        for (int l = 0; l < lanes; ++l) k[l] = access.load(tile[j + l] + i);
        transpose(k);
        for (int64_t v = 0; v < vectors; ++v) {
          const float* q = b.q + v * block_.padded + i;
          float* to = b.scores + v * key_tile + j;
          Lanes sum = i == 0 ? Lanes{} : NRL_ISA::load(to);
#pragma GCC unroll 16
          for (int l = 0; l < lanes; ++l) sum += q[l] * k[l];
          NRL_ISA::store(to, sum);
        }
      });
  }

  /// Scores of the keys [begin, end) of a tile become probabilities, others 0; m, l and out get the new
  /// maximum.
  void softmax(int64_t v, int64_t begin, int64_t end, int64_t count, const Buffers& b) const {
    float* s = b.scores + v * key_tile;
    const IntLanes low = static_cast<int32_t>(std::clamp<int64_t>(begin, 0, key_tile)) + IntLanes{},
                   high = static_cast<int32_t>(std::clamp<int64_t>(end, 0, key_tile)) + IntLanes{};
    IntLanes index;
    for (int l = 0; l < lanes; ++l) index[l] = l;
    Lanes most = lowest_score + Lanes{};
    const IntLanes first = index;
    for (int64_t j = 0; j < count; j += lanes, index += lanes) {
      const IntLanes seen = (index >= low) & (index < high);
      most = max(seen ? NRL_ISA::load(s + j) : lowest_score + Lanes{}, most);
    }
    float m = b.m[v];
    for (int l = 0; l < lanes; ++l) m = most[l] > m ? most[l] : m;
    const float rescale = exp_f32(b.m[v] - m);
    Lanes sum{};
    index = first;
    for (int64_t j = 0; j < count; j += lanes, index += lanes) {
      const IntLanes seen = (index >= low) & (index < high);
      const Lanes p = seen ? exp_f32(NRL_ISA::load(s + j) - m) : Lanes{};
      sum += p;
      NRL_ISA::store(s + j, p);
    }
    b.m[v] = m;
    b.l[v] = b.l[v] * rescale + sum_lanes(sum);
    if (rescale == 1.0f) return;
    float* out = b.out + v * block_.padded;
    for (int64_t i = 0; i < block_.padded; i += lanes)
      NRL_ISA::store(out + i, NRL_ISA::load(out + i) * rescale);
  }

  /// out_v += sum over j of scores[v][j] v_j.
  void add_values(const Tile<T>& tile, int64_t count, int64_t vectors, const Buffers& b) const {
    for_lanes(d_, [&](int64_t i, const auto& access) {
      int64_t v = 0;
      const auto add = [&]<int n>() __attribute__((always_inline)) {
        Lanes sum[n];
        for (int r = 0; r < n; ++r) sum[r] = NRL_ISA::load(b.out + (v + r) * block_.padded + i);
        const float* p = b.scores + v * key_tile;
        for (int64_t j = 0; j < count; ++j) {
          const Lanes x = access.load(tile[j] + i);
#pragma GCC unroll 4
          for (int r = 0; r < n; ++r) sum[r] += p[r * key_tile + j] * x;
        }
        for (int r = 0; r < n; ++r) NRL_ISA::store(b.out + (v + r) * block_.padded + i, sum[r]);
        v += n;
      };
      while (vectors - v >= 4) add.template operator()<4>();
      while (v < vectors) add.template operator()<1>();
    });
  }

  const AttentionPaged& a_;
  int64_t d_, kv_heads_, group_;
  paged::Block block_;
  int threads_;
  std::byte* memory_;
};

void attention_paged_kernel(Exec& exec, const AttentionPaged& a) {
  for_float_type(a.q.dtype, [&]<class T>() { PagedAttention<T>(exec, a).run(); });
}

}  // namespace

void fill_paged(KernelTable& table) {
  table.cache_write = cache_write_kernel;
  table.attention_paged = attention_paged_kernel;
}

}  // namespace nrl::ops::NRL_ISA
