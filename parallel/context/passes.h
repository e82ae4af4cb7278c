#pragma once
// Parts of ContextAttention (attention.h): buffers, the ring, gathering, and the all-to-all.

#include "core/ops/attention.h"
#include "core/ops/merge.h"
#include "parallel/comm/communicator.h"
#include "parallel/context/shape.h"

namespace nrl::parallel::context {

/// Widths of sub-buffers are multiples of this many bytes per row, so that they are aligned for any number
/// of rows.
constexpr int64_t row_unit = 64;
constexpr int64_t padded(int64_t bytes) {
  return (bytes + row_unit - 1) / row_unit * row_unit;
}

/// Takes tensors one after another from a (N, width) u8 tensor.
class Cutter {
 public:
  explicit Cutter(const Tensor& memory) : memory_(memory) {}
  /// A contiguous (rows, width) of `dtype`; the memory's rows must divide its elements.
  Tensor take(DType dtype, int64_t rows, int64_t width) {
    const int64_t n = memory_.dim(0), elements = n == 0 ? 0 : rows * width / n;
    NRL_CHECK(elements * n == rows * width, "{} x {} elements in {} rows", rows, width, n);
    Tensor t = make_tensor(static_cast<char*>(memory_.data) + at_ * n, dtype, {rows, width}, memory_.device);
    at_ += padded(elements * size_of(dtype));
    NRL_CHECK(at_ <= memory_.dim(1), "a buffer of context-parallel attention has {} bytes per row, needs {}",
              memory_.dim(1), at_);
    return t;
  }

 private:
  Tensor memory_;
  int64_t at_ = 0;
};

/// (N, heads, d) with contiguous heads as (N, heads * d).
inline Tensor matrix(const Tensor& t) {
  NRL_CHECK(t.rank == 3 && t.step(2) == 1 && (t.dim(1) == 1 || t.step(1) == t.dim(2)),
            "heads are not contiguous: {}", describe(t));
  Tensor m = t;
  m.rank = 2;
  m.shape = {t.dim(0), t.dim(1) * t.dim(2)};
  m.stride = {t.step(0), 1};
  return m;
}

/// Contiguous rows as one, which are copied at once.
inline Tensor one_row(const Tensor& t) {
  return make_tensor(t.data, t.dtype, {1, t.numel()}, t.device);
}

/// Communication on the stream of `exec`.
class Traffic {
 public:
  Traffic(const ops::Exec& exec, comm::Communicator* group) : group_(group), stream_{exec.stream} {
    NRL_CHECK(group, "context-parallel attention without its communicator");
  }
  comm::Handle shift(const Tensor& send, const Tensor& receive, int tag) const;
  void all_gather(const Tensor& own, const Tensor& all) const;
  void reduce_scatter(const Tensor& all, const Tensor& own) const;
  void all_to_all(const Tensor& in, const Tensor& out) const;

 private:
  comm::Communicator* group_;
  comm::StreamRef stream_;
};

/// What the passes read and write; the rows are those of the shape's zigzag.
struct ForwardPass {
  Tensor q, k, v, out, lse;  ///< lse (heads, rows) f32
  std::span<const CallBounds> bounds;
  ops::FusedDropout dropout = {};  ///< its rows come with the bounds
};
struct BackwardPass {
  Tensor dout, q, k, v, out, lse, dq, dk, dv;
  std::span<const CallBounds> bounds;
  ops::FusedDropout dropout = {};
};

/// The mask of a call with boundaries `b`.
template <class Attention>
void set_dropout(Attention& a, const ContextShape& s, const CallBounds& b, const ops::FusedDropout& dropout) {
  a.slice = s.slice;
  if (dropout.p == 0) return;
  a.dropout = dropout;
  a.dropout.rows = b.rows;
  a.key_places = b.key_places;
}

// Widths of buffers are bytes per row of `shape`; the passes may run on the all-to-all's rows instead, of
// which there are as many times more as there are fewer heads.

/// Attention over a ring; with one rank plain attention.
int64_t ring_forward_width(const ContextShape& shape);
int64_t ring_backward_width(const ContextShape& shape);
void ring_forward(ops::Exec& exec, comm::Communicator* group, const ContextShape& shape, const ForwardPass& a,
                  Cutter buffer);
void ring_backward(ops::Exec& exec, comm::Communicator* group, const ContextShape& shape,
                   const BackwardPass& a, Cutter buffer);

/// Attention to gathered keys and values.
int64_t gather_forward_width(const ContextShape& shape);
int64_t gather_backward_width(const ContextShape& shape);
void gather_forward(ops::Exec& exec, comm::Communicator* group, const ContextShape& shape,
                    const ForwardPass& a, Cutter buffer);
void gather_backward(ops::Exec& exec, comm::Communicator* group, const ContextShape& shape,
                     const BackwardPass& a, Cutter buffer);

}  // namespace nrl::parallel::context
