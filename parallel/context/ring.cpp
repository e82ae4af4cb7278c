// Keys and values go around a ring: in step i rank r has those of rank r - i and sends them to rank r + 1
// while it computes. Their gradients follow one step later, in f32: each rank adds its part, and the last hop
// brings them home.

#include "core/ops/transfer.h"
#include "parallel/context/passes.h"

namespace nrl::parallel::context {
namespace {

constexpr int kv_tag = 0, gradient_tag = 1;

/// The rows that take part in a step. With one sample those that can see each other; with several all of
/// them, and the boundaries leave out the others.
struct StepRows {
  int64_t query, queries, key, keys;

  StepRows(const ZigZag& z, int step) : query(0), queries(z.rows()), key(0), keys(z.rows()) {
    if (step == 0 || z.samples() != 1) return;
    if (step <= z.rank())
      keys = z.chunk();  // of an earlier rank: its low chunk
    else
      query = queries = z.chunk();  // of a later rank: seen by the high chunk
  }
};

/// Whose keys each query of a step sees, where samples are whole documents: all queries see the low keys of
/// an earlier rank, the high queries see all keys of a later one.
ops::SequenceLengths step_lengths(const ZigZag& z, int step) {
  const int64_t chunk = z.chunk(), rows = z.sample_rows();
  const ops::RowBlocks all{.rows = rows, .step = rows}, low{.rows = chunk, .step = rows},
      // With one sample the tensors have the chunk alone.
      high{.first = z.samples() == 1 ? 0 : chunk, .rows = chunk, .step = rows};
  const bool earlier = step <= z.rank();
  return {
      .longest = rows, .blocks = z.samples(), .queries = earlier ? all : high, .keys = earlier ? low : all};
}

/// One attention call. Step 0 is attention among the rank's own rows.
template <class Attention>
void set_rules(Attention& a, const ContextShape& s, std::span<const CallBounds> bounds, int step,
               const ops::FusedDropout& dropout) {
  const CallBounds& b = bounds[step];
  set_dropout(a, s, b, dropout);
  a.cu_q = b.cu_q;
  a.cu_k = step == 0 ? b.cu_q : b.cu_k;
  a.scale = s.scale;
  a.causal = step == 0;
  a.window = s.window;
  a.lengths = {.longest = s.zigzag.sample_rows(), .equal = b.whole && step == 0};
  if (b.whole && step > 0) a.lengths = step_lengths(s.zigzag, step);
}

/// Keys and values side by side in a (rows, 2 * kv_heads * d).
struct KeysAndValues {
  Tensor k, v;
  KeysAndValues(const Tensor& kv, const ContextShape& s)
      : k(kv.columns(0, s.kv_heads * s.d).split_heads(s.kv_heads, s.d)),
        v(kv.columns(s.kv_heads * s.d, s.kv_heads * s.d).split_heads(s.kv_heads, s.d)) {}
};

void pack(ops::Exec& exec, const Tensor& k, const Tensor& v, const ContextShape& s, const Tensor& kv) {
  const KeysAndValues to(kv, s);
  ops::copy(exec, matrix(k), matrix(to.k));
  ops::copy(exec, matrix(v), matrix(to.v));
}

bool is_f32(const ContextShape& s) {
  return s.dtype == DType::f32;
}

}  // namespace

int64_t ring_forward_width(const ContextShape& s) {
  if (s.zigzag.size() == s.exchange.a2a) return 0;
  const int64_t size = size_of(s.dtype), q = s.heads * s.d, kv = 2 * s.kv_heads * s.d;
  return 2 * padded(kv * size) + padded(q * size) + padded(s.heads * 4) + (is_f32(s) ? 0 : padded(q * 4));
}

int64_t ring_backward_width(const ContextShape& s) {
  if (s.zigzag.size() == s.exchange.a2a) return 0;
  const int64_t size = size_of(s.dtype), q = s.heads * s.d, kv = 2 * s.kv_heads * s.d;
  return 3 * padded(kv * size) + 2 * padded(kv * 4) + padded(q * size) + (is_f32(s) ? 0 : padded(q * 4));
}

void ring_forward(ops::Exec& exec, comm::Communicator* group, const ContextShape& s, const ForwardPass& a,
                  Cutter buffer) {
  const ZigZag& z = s.zigzag;
  ops::AttentionForward own{.q = a.q, .k = a.k, .v = a.v, .out = a.out, .lse = a.lse, .cu_q = {}, .cu_k = {}};
  set_rules(own, s, a.bounds, 0, a.dropout);
  if (z.size() == 1) return ops::attention_forward(exec, own);

  const Traffic traffic(exec, group);
  const int64_t rows = z.rows(), q_width = s.heads * s.d, kv_width = 2 * s.kv_heads * s.d;
  const Tensor kv[2] = {buffer.take(s.dtype, rows, kv_width), buffer.take(s.dtype, rows, kv_width)};
  const Tensor part = buffer.take(s.dtype, rows, q_width).split_heads(s.heads, s.d),
               part_lse = buffer.take(DType::f32, s.heads, rows);
  const Tensor sum = is_f32(s) ? a.out : buffer.take(DType::f32, rows, q_width).split_heads(s.heads, s.d);
  pack(exec, a.k, a.v, s, kv[0]);
  for (int step = 0; step < z.size(); ++step) {
    const Tensor &now = kv[step % 2], &next = kv[(step + 1) % 2];
    comm::Handle in_flight;
    if (step + 1 < z.size()) in_flight = traffic.shift(now, next, kv_tag);
    if (step == 0) {
      ops::attention_forward(exec, own);
      if (!is_f32(s)) ops::add_rows(exec, {.x = matrix(a.out), .out = matrix(sum)});
    } else {
      const StepRows r(z, step);
      const KeysAndValues from(now.rows(r.key, r.keys), s);
      ops::AttentionForward f{.q = a.q.rows(r.query, r.queries),
                              .k = from.k,
                              .v = from.v,
                              .out = part.rows(r.query, r.queries),
                              .lse = part_lse.columns(r.query, r.queries),
                              .cu_q = {},
                              .cu_k = {}};
      set_rules(f, s, a.bounds, step, a.dropout);
      ops::attention_forward(exec, f);
      ops::merge_attention(exec, {.part = f.out,
                                  .part_lse = f.lse,
                                  .out = sum.rows(r.query, r.queries),
                                  .lse = a.lse.columns(r.query, r.queries)});
    }
    in_flight.wait();
  }
  if (!is_f32(s)) ops::add_rows(exec, {.x = matrix(sum), .out = matrix(a.out)});
}

void ring_backward(ops::Exec& exec, comm::Communicator* group, const ContextShape& s, const BackwardPass& a,
                   Cutter buffer) {
  const ZigZag& z = s.zigzag;
  ops::AttentionBackward own{.dout = a.dout,
                             .q = a.q,
                             .k = a.k,
                             .v = a.v,
                             .out = a.out,
                             .lse = a.lse,
                             .cu_q = {},
                             .cu_k = {},
                             .dq = a.dq,
                             .dk = a.dk,
                             .dv = a.dv};
  set_rules(own, s, a.bounds, 0, a.dropout);
  if (z.size() == 1) return ops::attention_backward(exec, own);

  const Traffic traffic(exec, group);
  const int64_t rows = z.rows(), q_width = s.heads * s.d, kv_width = 2 * s.kv_heads * s.d;
  const Tensor kv[2] = {buffer.take(s.dtype, rows, kv_width), buffer.take(s.dtype, rows, kv_width)};
  const Tensor gradient[2] = {buffer.take(DType::f32, rows, kv_width),
                              buffer.take(DType::f32, rows, kv_width)};
  const Tensor part_kv = buffer.take(s.dtype, rows, kv_width),
               part_q = buffer.take(s.dtype, rows, q_width).split_heads(s.heads, s.d);
  const Tensor sum_q = is_f32(s) ? a.dq : buffer.take(DType::f32, rows, q_width).split_heads(s.heads, s.d);
  pack(exec, a.k, a.v, s, kv[0]);
  comm::Handle gradient_in_flight;
  for (int step = 0; step < z.size(); ++step) {
    const Tensor &now = kv[step % 2], &next = kv[(step + 1) % 2], &sum_kv = gradient[step % 2];
    comm::Handle in_flight;
    if (step + 1 < z.size()) in_flight = traffic.shift(now, next, kv_tag);
    const StepRows r(z, step);
    const KeysAndValues from(now.rows(r.key, r.keys), s), to(part_kv.rows(r.key, r.keys), s);
    ops::AttentionBackward b{.dout = a.dout.rows(r.query, r.queries),
                             .q = a.q.rows(r.query, r.queries),
                             .k = from.k,
                             .v = from.v,
                             .out = a.out.rows(r.query, r.queries),
                             .lse = a.lse.columns(r.query, r.queries),
                             .cu_q = {},
                             .cu_k = {},
                             .dq = part_q.rows(r.query, r.queries),
                             .dk = to.k,
                             .dv = to.v};
    set_rules(b, s, a.bounds, step, a.dropout);
    ops::attention_backward(exec, b);
    ops::add_rows(exec,
                  {.x = matrix(b.dq), .out = matrix(sum_q.rows(r.query, r.queries)), .accumulate = step > 0});
    gradient_in_flight.wait();  // the sum of the ranks before, from the second step on
    ops::add_rows(
        exec, {.x = part_kv.rows(r.key, r.keys), .out = sum_kv.rows(r.key, r.keys), .accumulate = step > 0});
    gradient_in_flight = traffic.shift(sum_kv, gradient[(step + 1) % 2], gradient_tag);
    in_flight.wait();
  }
  if (!is_f32(s)) ops::add_rows(exec, {.x = matrix(sum_q), .out = matrix(a.dq)});
  gradient_in_flight.wait();
  const KeysAndValues home(gradient[z.size() % 2], s);
  ops::add_rows(exec, {.x = matrix(home.k), .out = matrix(a.dk)});
  ops::add_rows(exec, {.x = matrix(home.v), .out = matrix(a.dv)});
}

}  // namespace nrl::parallel::context
