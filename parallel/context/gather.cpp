// Keys and values of all ranks are gathered and put in the order of the tokens; each chunk of queries attends
// to its prefix. The gradients of keys and values are summed in f32, in rank order, and reduce-scattered.

#include <algorithm>

#include "core/ops/optimizer.h"
#include "core/ops/transfer.h"
#include "parallel/context/passes.h"

namespace nrl::parallel::context {
namespace {

/// The queries of chunk `half` of a sample and the tokens that are keys for them.
struct Prefix {
  int64_t row, rows;  ///< local rows of the queries
  int64_t key, keys;  ///< first token in the sample, and their number
  size_t call;        ///< index of its boundaries

  Prefix(const ContextShape& s, int64_t sample, int half)
      : row(sample * s.zigzag.sample_rows() + half * s.zigzag.chunk()),
        rows(s.zigzag.chunk()),
        key(first_key(s.zigzag.first_token(half), s.window)),
        keys(s.zigzag.first_token(half) + rows - key),
        call(static_cast<size_t>(2 * sample + half)) {}
};

template <class Attention>
void set_rules(Attention& a, const ContextShape& s, const CallBounds& b, const Prefix& p,
               const ops::FusedDropout& dropout) {
  set_dropout(a, s, b, dropout);
  a.cu_q = b.cu_q;
  a.cu_k = b.cu_k;
  a.scale = s.scale;
  a.window = s.window;
  a.lengths = {.longest = p.keys, .equal = b.whole && p.keys == p.rows};
  if (b.whole && p.keys > p.rows) {
    a.lengths.blocks = 1;
    a.lengths.queries = {.rows = p.rows, .step = p.rows};
    a.lengths.keys = {.rows = p.keys, .step = p.keys};
  }
}

/// All keys and values by token, (samples * length, 2 * kv_heads * d), from the local ones. `gathered`: as
/// many rows, in the order of the ranks.
void gather(ops::Exec& exec, const Traffic& traffic, const ContextShape& s, const Tensor& k, const Tensor& v,
            const Tensor& gathered, const Tensor& by_token) {
  const ZigZag& z = s.zigzag;
  const int64_t rows = z.rows(), width = s.kv_heads * s.d;
  const Tensor own = gathered.rows(z.rank() * rows, rows);
  ops::copy(exec, matrix(k), own.columns(0, width));
  ops::copy(exec, matrix(v), own.columns(width, width));
  traffic.all_gather(own, gathered);
  for (int rank = 0; rank < z.size(); ++rank)
    ZigZag(z.samples(), z.length(), z.size(), rank)
        .for_each_chunk([&](int64_t local, int64_t token, int64_t n) {
          ops::copy(exec, one_row(gathered.rows(rank * rows + local, n)), one_row(by_token.rows(token, n)));
        });
}

/// sums += gradients of the keys of a prefix, which are by token. `sums` is in the order of the ranks.
void add_by_rank(ops::Exec& exec, const ZigZag& z, int64_t sample, const Prefix& p, const Tensor& gradients,
                 const Tensor& sums) {
  for (int rank = 0; rank < z.size(); ++rank)
    for (int half = 0; half < 2; ++half) {
      const int64_t chunk = z.chunk_begin(rank, half), begin = std::max(chunk, p.key),
                    end = std::min(chunk + z.chunk(), p.key + p.keys);
      if (begin >= end) continue;
      const int64_t to = rank * z.rows() + sample * z.sample_rows() + half * z.chunk() + begin - chunk;
      ops::add_rows(exec, {.x = gradients.rows(begin - p.key, end - begin),
                           .out = sums.rows(to, end - begin),
                           .accumulate = true});
    }
}

Tensor heads_of(const Tensor& kv, int part, const ContextShape& s) {
  const int64_t width = s.kv_heads * s.d;
  return kv.columns(part * width, width).split_heads(s.kv_heads, s.d);
}

}  // namespace

int64_t gather_forward_width(const ContextShape& s) {
  return 2 * padded(s.zigzag.size() * 2 * s.kv_heads * s.d * size_of(s.dtype));
}

int64_t gather_backward_width(const ContextShape& s) {
  return gather_forward_width(s) + padded(s.zigzag.size() * 2 * s.kv_heads * s.d * 4);
}

void gather_forward(ops::Exec& exec, comm::Communicator* group, const ContextShape& s, const ForwardPass& a,
                    Cutter buffer) {
  const ZigZag& z = s.zigzag;
  const int64_t all = z.size() * z.rows(), width = 2 * s.kv_heads * s.d;
  const Tensor gathered = buffer.take(s.dtype, all, width), by_token = buffer.take(s.dtype, all, width);
  gather(exec, Traffic(exec, group), s, a.k, a.v, gathered, by_token);
  for (int64_t sample = 0; sample < z.samples(); ++sample)
    for (int half = 0; half < 2; ++half) {
      const Prefix p(s, sample, half);
      const Tensor kv = by_token.rows(sample * z.length() + p.key, p.keys);
      ops::AttentionForward f{.q = a.q.rows(p.row, p.rows),
                              .k = heads_of(kv, 0, s),
                              .v = heads_of(kv, 1, s),
                              .out = a.out.rows(p.row, p.rows),
                              .lse = a.lse.columns(p.row, p.rows),
                              .cu_q = {},
                              .cu_k = {}};
      set_rules(f, s, a.bounds[p.call], p, a.dropout);
      ops::attention_forward(exec, f);
    }
}

void gather_backward(ops::Exec& exec, comm::Communicator* group, const ContextShape& s, const BackwardPass& a,
                     Cutter buffer) {
  const ZigZag& z = s.zigzag;
  const int64_t rows = z.rows(), all = z.size() * rows, width = 2 * s.kv_heads * s.d;
  const Tensor gathered = buffer.take(s.dtype, all, width), by_token = buffer.take(s.dtype, all, width),
               sums = buffer.take(DType::f32, all, width);
  const Traffic traffic(exec, group);
  gather(exec, traffic, s, a.k, a.v, gathered, by_token);
  ops::zero(exec, {.x = sums});
  const Tensor& gradients = gathered;  // which is no longer needed
  for (int64_t sample = 0; sample < z.samples(); ++sample)
    for (int half = 0; half < 2; ++half) {
      const Prefix p(s, sample, half);
      const Tensor kv = by_token.rows(sample * z.length() + p.key, p.keys), d_kv = gradients.rows(0, p.keys);
      ops::AttentionBackward b{.dout = a.dout.rows(p.row, p.rows),
                               .q = a.q.rows(p.row, p.rows),
                               .k = heads_of(kv, 0, s),
                               .v = heads_of(kv, 1, s),
                               .out = a.out.rows(p.row, p.rows),
                               .lse = a.lse.columns(p.row, p.rows),
                               .cu_q = {},
                               .cu_k = {},
                               .dq = a.dq.rows(p.row, p.rows),
                               .dk = heads_of(d_kv, 0, s),
                               .dv = heads_of(d_kv, 1, s)};
      set_rules(b, s, a.bounds[p.call], p, a.dropout);
      ops::attention_backward(exec, b);
      add_by_rank(exec, z, sample, p, d_kv, sums);
    }
  const Tensor own = sums.rows(z.rank() * rows, rows);
  traffic.reduce_scatter(sums, own);
  ops::add_rows(exec, {.x = own.columns(0, width / 2), .out = matrix(a.dk)});
  ops::add_rows(exec, {.x = own.columns(width / 2, width / 2), .out = matrix(a.dv)});
}

}  // namespace nrl::parallel::context
