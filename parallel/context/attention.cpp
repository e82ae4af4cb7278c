#include "parallel/context/attention.h"

#include "core/ops/transfer.h"
#include "core/trace/trace.h"
#include "parallel/context/passes.h"

namespace nrl::parallel {

using namespace context;

namespace {

/// The all-to-all among `a2a` neighboring ranks. Each rank sends heads of its rows and gets rows of its
/// heads, which it puts in the order of the tokens: the rows of a rank whose chunks are `a2a` times as long.
class HeadExchange {
 public:
  HeadExchange(ops::Exec& exec, comm::Communicator* group, const ContextShape& s)
      : exec_(exec), traffic_(exec, group), zigzag_(s.zigzag), ranks_(s.exchange.a2a) {}

  /// Blocks, one per rank, of columns [rank * width / ranks, ...) of x (N, width), from column `at` of them.
  void pack_columns(const Tensor& x, const Tensor& blocks, int64_t at) const {
    const int64_t n = zigzag_.rows(), width = x.dim(1) / ranks_;
    for (int r = 0; r < ranks_; ++r)
      ops::copy(exec_, x.columns(r * width, width), blocks.rows(r * n, n).columns(at, width));
  }
  /// The inverse.
  void unpack_columns(const Tensor& blocks, int64_t at, const Tensor& x) const {
    const int64_t n = zigzag_.rows(), width = x.dim(1) / ranks_;
    for (int r = 0; r < ranks_; ++r)
      ops::copy(exec_, blocks.rows(r * n, n).columns(at, width), x.columns(r * width, width));
  }
  void exchange(const Tensor& in, const Tensor& out) const { traffic_.all_to_all(in, out); }
  /// Rows from blocks of the ranks' rows to the order of the tokens.
  void to_tokens(const Tensor& blocks, const Tensor& x) const {
    for_each_chunk([&](const int64_t block_row, int64_t row, int64_t n) {
      ops::copy(exec_, one_row(blocks.rows(block_row, n)), one_row(x.rows(row, n)));
    });
  }
  /// The inverse.
  void to_blocks(const Tensor& x, const Tensor& blocks) const {
    for_each_chunk([&](const int64_t block_row, int64_t row, int64_t n) {
      ops::copy(exec_, one_row(x.rows(row, n)), one_row(blocks.rows(block_row, n)));
    });
  }

 private:
  template <class Body>
  void for_each_chunk(const Body& body) const {
    const int64_t chunk = zigzag_.chunk();
    for (int r = 0; r < ranks_; ++r)
      for (int64_t s = 0; s < zigzag_.samples(); ++s)
        for (int half = 0; half < 2; ++half) {
          const int64_t place = half == 0 ? r : 2 * ranks_ - 1 - r;
          body(r * zigzag_.rows() + s * zigzag_.sample_rows() + half * chunk,
               s * ranks_ * zigzag_.sample_rows() + place * chunk, chunk);
        }
  }

  ops::Exec& exec_;
  Traffic traffic_;
  const ZigZag& zigzag_;
  int ranks_;
};

/// Queries, keys and values of the all-to-all's heads, side by side in (rows, width).
struct Fused {
  Tensor q, k, v;
  Fused(const Tensor& x, const ContextShape& core)
      : q(x.columns(0, core.heads * core.d).split_heads(core.heads, core.d)),
        k(x.columns(core.heads * core.d, core.kv_heads * core.d).split_heads(core.kv_heads, core.d)),
        v(x.columns((core.heads + core.kv_heads) * core.d, core.kv_heads * core.d)
              .split_heads(core.kv_heads, core.d)) {}
};

int64_t qkv_width(const ContextShape& s) {
  return (s.heads + 2 * s.kv_heads) * s.d;
}

/// What the backward pass reads.
struct Saved {
  Tensor lse, qkv, out;  ///< qkv and out only with an all-to-all
  Saved(const Tensor& memory, const ContextShape& s, const ContextShape& core) {
    Cutter cutter(memory);
    const int64_t rows = core.zigzag.rows();
    lse = cutter.take(DType::f32, core.heads, rows);
    if (s.exchange.a2a == 1) return;
    qkv = cutter.take(s.dtype, rows, qkv_width(core));
    out = cutter.take(s.dtype, rows, core.heads * core.d);
  }
};

/// The same memory, (rows, width) of fewer columns.
Tensor narrowed(const Tensor& t, int64_t width) {
  return make_tensor(t.data, t.dtype, {t.dim(0), width}, t.device);
}

void check(const ContextShape& s, const Tensor& saved, const Tensor& buffer, int64_t saved_width,
           int64_t width) {
  const auto fits = [&](const Tensor& t, int64_t w) {
    return w == 0 || (t.data && t.rank == 2 && t.dtype == DType::u8 && t.contiguous() &&
                      t.dim(0) == s.zigzag.rows() && t.dim(1) >= w);
  };
  NRL_CHECK(fits(saved, saved_width) && fits(buffer, width),
            "context-parallel attention: saved is {}, the buffer {}, wanted u8[{}, {}] and u8[{}, {}]",
            describe(saved), describe(buffer), s.zigzag.rows(), saved_width, s.zigzag.rows(), width);
}

}  // namespace

ContextAttention::ContextAttention(const ContextShape& shape) : shape_(shape) {
  const int a2a = shape.exchange.a2a;
  NRL_CHECK(a2a >= 1 && shape.zigzag.size() % a2a == 0 && (a2a == 1 || !shape.exchange.gather) &&
                shape.heads % a2a == 0 && shape.kv_heads % a2a == 0 && shape.kv_heads > 0 &&
                shape.heads % shape.kv_heads == 0 &&
                (shape.dtype == DType::f32 || shape.dtype == DType::bf16 || shape.dtype == DType::f16),
            "context-parallel attention of {} heads and {} key heads with an all-to-all among {} of {} ranks",
            shape.heads, shape.kv_heads, a2a, shape.zigzag.size());
  NRL_CHECK(shape.window == 0 || shape.exchange.gather || a2a == shape.zigzag.size(),
            "a window of {} in a ring of {} ranks", shape.window, shape.zigzag.size() / a2a);
}

ContextShape ContextAttention::core() const {
  ContextShape core = shape_;
  const ZigZag& z = shape_.zigzag;
  const int a2a = shape_.exchange.a2a;
  core.zigzag = ZigZag(z.samples(), z.length(), z.size() / a2a, z.rank() / a2a);
  core.heads /= a2a;
  core.kv_heads /= a2a;
  core.exchange.a2a = 1;
  if (core.slice.all == 0) core.slice.all = shape_.heads;
  core.slice.first += z.rank() % a2a * core.heads;
  return core;
}

int64_t ContextAttention::saved_width() const {
  const int64_t lse = padded(shape_.heads * 4), size = size_of(shape_.dtype);
  return saves_inputs() ? lse + padded(qkv_width(shape_) * size) + padded(shape_.heads * shape_.d * size)
                        : lse;
}

int64_t ContextAttention::forward_width() const {
  if (shape_.exchange.gather) return gather_forward_width(shape_);
  const int64_t blocks = padded(qkv_width(shape_) * size_of(shape_.dtype));
  return (saves_inputs() ? 2 * blocks : 0) + ring_forward_width(shape_);
}

int64_t ContextAttention::backward_width() const {
  if (shape_.exchange.gather) return gather_backward_width(shape_);
  const int64_t size = size_of(shape_.dtype), blocks = padded(qkv_width(shape_) * size);
  return (saves_inputs() ? 3 * blocks + padded(shape_.heads * shape_.d * size) : 0) +
         ring_backward_width(shape_);
}

void ContextAttention::forward(ops::Exec& exec, const ContextGroups& groups, const Forward& a) const {
  const trace::Range range("context_attention");
  check(shape_, a.saved, a.buffer, saved_width(), forward_width());
  if (saves_inputs()) return forward_all_to_all(exec, groups, a);
  const Saved saved(a.saved, shape_, shape_);
  const ForwardPass pass{
      .q = a.q, .k = a.k, .v = a.v, .out = a.out, .lse = saved.lse, .bounds = a.bounds, .dropout = a.dropout};
  if (shape_.exchange.gather)
    gather_forward(exec, groups.all, shape_, pass, Cutter(a.buffer));
  else
    ring_forward(exec, groups.ring, shape_, pass, Cutter(a.buffer));
}

void ContextAttention::backward(ops::Exec& exec, const ContextGroups& groups, const Backward& a) const {
  const trace::Range range("context_attention");
  check(shape_, a.saved, a.buffer, saved_width(), backward_width());
  if (saves_inputs()) return backward_all_to_all(exec, groups, a);
  const Saved saved(a.saved, shape_, shape_);
  const BackwardPass pass{.dout = a.dout,
                          .q = a.q,
                          .k = a.k,
                          .v = a.v,
                          .out = a.out,
                          .lse = saved.lse,
                          .dq = a.dq,
                          .dk = a.dk,
                          .dv = a.dv,
                          .bounds = a.bounds,
                          .dropout = a.dropout};
  if (shape_.exchange.gather)
    gather_backward(exec, groups.all, shape_, pass, Cutter(a.buffer));
  else
    ring_backward(exec, groups.ring, shape_, pass, Cutter(a.buffer));
}

void ContextAttention::forward_all_to_all(ops::Exec& exec, const ContextGroups& groups,
                                          const Forward& a) const {
  const ContextShape c = core();
  const int64_t rows = c.zigzag.rows(), width = qkv_width(c), q = c.heads * c.d, kv = c.kv_heads * c.d;
  const Saved saved(a.saved, shape_, c);
  Cutter buffer(a.buffer);
  const Tensor send = buffer.take(c.dtype, rows, width), received = buffer.take(c.dtype, rows, width);
  const HeadExchange x(exec, groups.a2a, shape_);
  x.pack_columns(matrix(a.q), send, 0);
  x.pack_columns(matrix(a.k), send, q);
  x.pack_columns(matrix(a.v), send, q + kv);
  x.exchange(send, received);
  x.to_tokens(received, saved.qkv);
  const Fused in(saved.qkv, c);
  ring_forward(exec, groups.ring, c,
               {.q = in.q,
                .k = in.k,
                .v = in.v,
                .out = saved.out.split_heads(c.heads, c.d),
                .lse = saved.lse,
                .bounds = a.bounds,
                .dropout = a.dropout},
               buffer);
  x.to_blocks(saved.out, narrowed(send, q));
  x.exchange(narrowed(send, q), narrowed(received, q));
  x.unpack_columns(narrowed(received, q), 0, matrix(a.out));
}

void ContextAttention::backward_all_to_all(ops::Exec& exec, const ContextGroups& groups,
                                           const Backward& a) const {
  const ContextShape c = core();
  const int64_t rows = c.zigzag.rows(), width = qkv_width(c), q = c.heads * c.d, kv = c.kv_heads * c.d;
  const Saved saved(a.saved, shape_, c);
  Cutter buffer(a.buffer);
  const Tensor send = buffer.take(c.dtype, rows, width), received = buffer.take(c.dtype, rows, width),
               d_qkv = buffer.take(c.dtype, rows, width), d_out = buffer.take(c.dtype, rows, q);
  const HeadExchange x(exec, groups.a2a, shape_);
  x.pack_columns(matrix(a.dout), narrowed(send, q), 0);
  x.exchange(narrowed(send, q), narrowed(received, q));
  x.to_tokens(narrowed(received, q), d_out);
  const Fused in(saved.qkv, c), gradient(d_qkv, c);
  ring_backward(exec, groups.ring, c,
                {.dout = d_out.split_heads(c.heads, c.d),
                 .q = in.q,
                 .k = in.k,
                 .v = in.v,
                 .out = saved.out.split_heads(c.heads, c.d),
                 .lse = saved.lse,
                 .dq = gradient.q,
                 .dk = gradient.k,
                 .dv = gradient.v,
                 .bounds = a.bounds,
                 .dropout = a.dropout},
                buffer);
  x.to_blocks(d_qkv, send);
  x.exchange(send, received);
  x.unpack_columns(received, 0, matrix(a.dq));
  x.unpack_columns(received, q, matrix(a.dk));
  x.unpack_columns(received, q + kv, matrix(a.dv));
}

}  // namespace nrl::parallel
