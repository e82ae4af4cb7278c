#include <cmath>

#include "core/ops/attention.h"
#include "core/ops/shared/attention_dropout.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  std::vector<int64_t> queries, keys;  ///< per sequence; no keys: as queries
  int64_t heads, kv_heads, d;
  int64_t window = 0;
  bool causal = true;
  bool fused = false;  ///< q, k and v are columns of one buffer
  int64_t gap = 3;     ///< between the rows of that buffer
  int64_t slack = 0;   ///< how much longer than the longest sequence the caller says it may be
  float dropout = 0;

  std::string name() const {
    return fmt::format("({}{}{}) {}/{} D{}{}{}{}{}", fmt::join(queries, ","), keys.empty() ? "" : " of ",
                       fmt::join(keys, ","), heads, kv_heads, d,
                       window ? fmt::format(" window {}", window) : "", causal ? "" : " full",
                       fused ? " fused" : "", dropout > 0 ? fmt::format(" dropout {}", dropout) : "");
  }
  const std::vector<int64_t>& key_lengths() const { return keys.empty() ? queries : keys; }
  int64_t longest() const {
    int64_t n = 0;
    for (int64_t k : key_lengths()) n = std::max(n, k);
    return n;
  }
};

/// What a caller knows on the host.
SequenceLengths lengths_of(const Shape& s) {
  const auto& keys = s.key_lengths();
  SequenceLengths l;
  l.longest = std::max(s.longest(), *std::max_element(s.queries.begin(), s.queries.end()));
  l.longest += s.slack;
  l.equal = s.slack == 0 && s.queries == keys &&
            std::count(keys.begin(), keys.end(), l.longest) == std::ssize(keys);
  return l;
}

Buffer boundaries(const std::vector<int64_t>& lengths) {
  Buffer cu(DType::i32, {static_cast<int64_t>(lengths.size()) + 1});
  double total = 0;
  for (size_t s = 0; s < lengths.size(); ++s)
    cu.set(static_cast<int64_t>(s) + 1, total += static_cast<double>(lengths[s]));
  return cu;
}

int64_t total(const std::vector<int64_t>& lengths) {
  int64_t n = 0;
  for (int64_t x : lengths) n += x;
  return n;
}

/// Everything that a forward and a backward pass touch.
struct Problem {
  Shape s;
  Buffer qkv, q_, k_, v_, out, lse, dout, dqkv, dq_, dk_, dv_, cu_q, cu_k, step;
  Tensor q, k, v, dq, dk, dv;
  float scale;
  int64_t first_row = 1000003;

  Problem(DType t, const Shape& shape, DType lse_type = DType::f32) : s(shape) {
    const int64_t nq = total(s.queries), nk = total(s.key_lengths()), h = s.heads, g = s.kv_heads, d = s.d;
    scale = 1.0f / std::sqrt(static_cast<float>(d));
    cu_q = boundaries(s.queries);
    cu_k = boundaries(s.key_lengths());
    step = Buffer(DType::i64, {1}).fill(4);
    if (s.fused) {
      qkv = Buffer(t, {nq, (h + 2 * g) * d}, s.gap).normal("qkv");
      dqkv = Buffer(t, {nq, (h + 2 * g) * d}, s.gap).fill(7);
      q = qkv.tensor().columns(0, h * d).split_heads(h, d);
      k = qkv.tensor().columns(h * d, g * d).split_heads(g, d);
      v = qkv.tensor().columns((h + g) * d, g * d).split_heads(g, d);
      dq = dqkv.tensor().columns(0, h * d).split_heads(h, d);
      dk = dqkv.tensor().columns(h * d, g * d).split_heads(g, d);
      dv = dqkv.tensor().columns((h + g) * d, g * d).split_heads(g, d);
    } else {
      q_ = Buffer(t, {nq, h, d}, 7).normal("q", 1.5);
      k_ = Buffer(t, {nk, g, d}).normal("k");
      v_ = Buffer(t, {nk, g, d}, 16).normal("v");
      dq_ = Buffer(t, {nq, h, d}, 1).fill(7);
      dk_ = Buffer(t, {nk, g, d}, 2).fill(7);
      dv_ = Buffer(t, {nk, g, d}).fill(7);
      q = q_;
      k = k_;
      v = v_;
      dq = dq_;
      dk = dk_;
      dv = dv_;
    }
    out = Buffer(t, {nq, h, d}, s.gap).fill(7);
    lse = Buffer(lse_type, {h, nq}).fill(7);
    dout = Buffer(t, {nq, h, d}).normal("dout");
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  FusedDropout dropout() const { return {s.dropout, 0x123456789abcdefull, 0x2f2, first_row, step}; }
  AttentionForward forward() const {
    return {q, k, v, out, lse, cu_q, cu_k, scale, s.causal, s.window, lengths_of(s), dropout()};
  }
  AttentionBackward backward() const {
    return {dout, q,  k,  v,     out,      lse,      cu_q,          cu_k,
            dq,   dk, dv, scale, s.causal, s.window, lengths_of(s), dropout()};
  }
  size_t workspace(const Exec& e) const {
    const int64_t tokens = total(s.queries);
    if (e.multiprocessors > 0) return attention_gpu_workspace(tokens, s.heads, s.kv_heads, s.d);
    return attention_workspace(tokens, s.heads, s.kv_heads, s.d, s.longest(), e.threads);
  }
};

/// The workspace is exactly as large as asked for.
template <class Body>
void with_workspace(const Exec& e, const Problem& p, const Body& body) {
  const size_t bytes = p.workspace(e);
  const Buffer memory = Buffer(DType::i32, {static_cast<int64_t>(bytes / sizeof(int32_t))}).fill(-1);
  Exec exact = e;
  exact.workspace = {static_cast<std::byte*>(memory.tensor().data), bytes};
  body(exact);
}

Outputs forward(Exec& e, const Shape& s, DType t) {
  Problem p(t, s);
  with_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
  return {{"out", p.out, s.d + s.longest(), rounds_attention(e, t)}, {"lse", p.lse, s.d + s.longest()}};
}

Buffer columns(const Buffer& from, int64_t begin, int64_t count) {
  const int64_t rows = from.tensor().dim(0), width = from.tensor().dim(1);
  Buffer to(from.tensor().dtype, {rows, count});
  for (int64_t i = 0; i < rows * count; ++i) to.set(i, from.get(i / count * width + begin + i % count));
  return to;
}

/// The backward pass reads out and lse of the reference, so that only its own errors count.
Outputs backward(Exec& e, const Shape& s, DType t) {
  Problem p(t, s);
  Exec reference{.kernels = &reference_kernels()};
  attention_forward(reference, p.forward());
  with_workspace(e, p, [&](Exec& exact) { attention_backward(exact, p.backward()); });
  // Errors of the scores, exponentiated, add to those of the sums.
  const int64_t length = 4 * (s.d + s.longest()) * (s.heads / s.kv_heads);
  const bool rounded = rounds_attention(e, t);
  if (s.fused) {
    // Apart, because each is judged by its own size.
    expect(p.dqkv.gap_intact(), "dqkv: wrote outside its rows");
    const int64_t q = s.heads * s.d, kv = s.kv_heads * s.d;
    return {{"dq", columns(p.dqkv, 0, q), length, rounded},
            {"dk", columns(p.dqkv, q, kv), length, rounded},
            {"dv", columns(p.dqkv, q + kv, kv), length, rounded}};
  }
  return {{"dq", p.dq_, length, rounded}, {"dk", p.dk_, length, rounded}, {"dv", p.dv_, length, rounded}};
}

GradProblem gradient(DType t, const Shape& s) {
  auto p = std::make_shared<Problem>(t, s, t);
  GradProblem g;
  g.keep = p;
  g.reduction_length = s.d + s.longest();
  g.inputs = {&p->q_, &p->k_, &p->v_};
  g.gradients = {&p->dq_, &p->dk_, &p->dv_};
  g.loss = [p](Exec& e) {
    e.kernels->attention_forward(e, p->forward());
    return dot(p->out, p->dout);
  };
  g.backward = [p](Exec& e) { e.kernels->attention_backward(e, p->backward()); };
  return g;
}

/// Scores of a thousand and more must neither overflow nor lose the softmax.
void large_scores(Exec& e) {
  Problem p(DType::f32, {{70}, {}, 2, 1, 16});
  p.q_.normal("q", 200.0);
  Problem want(DType::f32, p.s);
  want.q_.normal("q", 200.0);
  Exec reference{.kernels = &reference_kernels()};
  attention_forward(reference, want.forward());
  with_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
  // The error of a score of size 1000 is an absolute error of the probability.
  expect(error_of(p.lse, want.lse) < 1e-6 + exp_tolerance(e) && error_of(p.out, want.out) < 1e-3,
         "large scores");
}

/// A NaN in one sequence stays in that sequence, and is not swallowed.
void nan_stays(Exec& e) {
  Problem p(DType::f32, {{40, 30}, {}, 1, 1, 16});
  p.k_.set(41 * 16, NAN);  // second sequence, key 1
  with_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
  for (int64_t i = 0; i < 70; ++i)
    expect(std::isnan(p.out.get(i * 16)) == (i >= 41), fmt::format("row {} is {}", i, p.out.get(i * 16)));
}

/// A score that overflows to minus infinity has probability zero, not NaN.
void minus_infinity(Exec& e) {
  Problem p(DType::f32, {{2}, {}, 1, 1, 16});
  for (int64_t i = 0; i < 16; ++i) {
    p.q_.set(16 + i, 1e25);
    p.k_.set(i, 0);
    p.k_.set(16 + i, -1e25);
  }
  with_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
  for (int64_t i = 0; i < 32; ++i)
    expect(p.out.get(i) == p.v_.get(i % 16), fmt::format("out {} is {}", i, p.out.get(i)));
}

void wrong_boundaries(Exec& e) {
  if (e.multiprocessors > 0) return;  // in a GPU's memory, where the host does not look
  for (double value : {9.0, 7.0, -1.0}) {
    Problem p(DType::f32, {{4, 4}, {}, 1, 1, 16});
    p.cu_k.set(value == -1.0 ? 1 : 2, value);
    bool refused = false;
    try {
      with_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
    } catch (const Error& error) {
      refused = error.code() == Exit::internal;
    }
    expect(refused, fmt::format("a boundary of {} was accepted", value));
  }
}

/// Scores of zero and values that are the unit vectors: out[i, h, j] is 1 / (1 - p) / keys where the
/// probability of key j is kept, else zero.
struct MaskProblem : Problem {
  MaskProblem(DType t, int64_t sequences, int64_t heads, float p)
      : Problem(t, {std::vector<int64_t>(static_cast<size_t>(sequences), 64), {}, heads, heads, 64}) {
    s.causal = false;
    s.dropout = p;
    q_ = Buffer(t, {64 * sequences, heads, 64});  // dense: tensor cores want rows that start at 16 bytes
    v_ = Buffer(t, {64 * sequences, heads, 64});
    out = Buffer(t, {64 * sequences, heads, 64});
    q = q_;
    v = v_;
    for (int64_t row = 0; row < 64 * sequences; ++row)
      for (int64_t h = 0; h < heads; ++h) v_.set((row * heads + h) * 64 + row % 64, 1);
  }
  std::vector<bool> mask(Exec& e) {
    with_workspace(e, *this, [&](Exec& exact) { attention_forward(exact, forward()); });
    std::vector<bool> kept;
    for (int64_t i = 0; i < out.size(); ++i) kept.push_back(out.get(i) != 0);
    return kept;
  }
};

/// Every backend keeps the same probabilities, and multiplies them by the same number.
void mask_of_the_reference(Exec& e) {
  Exec reference{.kernels = &reference_kernels()};
  for (DType t : {DType::f32, DType::bf16})
    for (float p : {0.1f, 0.75f}) {
      MaskProblem got(t, 2, 2, p), want(t, 2, 2, p);
      expect(got.mask(e) == want.mask(reference), fmt::format("{} p {}: other mask", name_of(t), p));
      expect(error_of(got.out, want.out) < (t == DType::f32 ? 1e-6 : 4e-3) + exp_tolerance(e),
             fmt::format("{} p {}: other scale", name_of(t), p));
      for (int64_t i = 0; i < 64 * 2 * 2; ++i)
        expect(std::fabs(got.lse.get(i) - std::log(64.0)) < 1e-5 + 5 * exp_tolerance(e),
               "lse is of all scores");
    }
}

/// As many are kept as should be, whatever their neighbors in any direction do.
void mask_is_random(Exec& e) {
  const int64_t sequences = 2, heads = 3, rows = 64 * sequences, n = rows * heads * 64;
  const double p = 0.25;
  MaskProblem problem(DType::f32, sequences, heads, static_cast<float>(p));
  const std::vector<bool> mask = problem.mask(e);
  problem.step.fill(5);
  const std::vector<bool> later = problem.mask(e);
  const auto within = [&](const char* what, int64_t count, int64_t of, double rate) {
    const double mean = rate * static_cast<double>(of), sigma = std::sqrt(mean * (1 - rate));
    expect(std::fabs(static_cast<double>(count) - mean) < 5 * sigma,
           fmt::format("{}: {} of {}, wanted {} +- {}", what, count, of, mean, sigma));
  };
  within("dropped", std::count(mask.begin(), mask.end(), false), n, p);
  const auto both = [&](const char* what, int64_t step, const std::vector<bool>& other) {
    int64_t count = 0;
    for (int64_t i = 0; i + step < n; ++i) count += !mask[i] && !other[i + step];
    within(what, count, n - step, p * p);
  };
  for (int64_t key = 1; key < 9; ++key) both("dropped with a key near it", key, mask);
  both("dropped in two heads", 64, mask);
  both("dropped of two queries", heads * 64, mask);
  both("dropped of two samples", 64 * heads * 64, mask);
  both("dropped in two steps", 0, later);
}

/// A sequence has the same mask alone as among others, at its place in the batch.
void sequences_can_be_split(Exec& e) {
  for (DType t : {DType::f32, DType::bf16}) {
    const Shape shape{.queries = {70, 40}, .keys = {}, .heads = 2, .kv_heads = 2, .d = 16, .dropout = 0.3f};
    Problem whole(t, shape);
    with_workspace(e, whole, [&](Exec& exact) { attention_forward(exact, whole.forward()); });
    int64_t row = 0;
    for (int64_t n : shape.queries) {
      Shape one = shape;
      one.queries = {n};
      Problem part(t, one);
      part.q = whole.q.rows(row, n);
      part.k = whole.k.rows(row, n);
      part.v = whole.v.rows(row, n);
      part.first_row += row;
      with_workspace(e, part, [&](Exec& exact) { attention_forward(exact, part.forward()); });
      for (int64_t i = 0; i < n * 32; ++i)
        expect(part.out.get(i) == whole.out.get(row * 32 + i), "the mask depends on the microbatch");
      row += n;
    }
  }
}

/// Heads [first, first + n) of (rows, heads, D).
Tensor some_heads(Tensor t, int64_t first, int64_t n) {
  t.data = static_cast<std::byte*>(t.data) + first * t.stride[1] * size_of(t.dtype);
  t.shape[1] = n;
  return t;
}

/// Tensor-parallel ranks have some of the heads.
void heads_can_be_split(Exec& e) {
  for (DType t : {DType::f32, DType::bf16}) {
    const Shape shape{.queries = {70, 40}, .keys = {}, .heads = 4, .kv_heads = 2, .d = 16, .dropout = 0.3f};
    Problem whole(t, shape);
    with_workspace(e, whole, [&](Exec& exact) { attention_forward(exact, whole.forward()); });
    Shape half = shape;
    half.heads = 2, half.kv_heads = 1;
    for (int64_t rank = 0; rank < 2; ++rank) {
      Problem part(t, half);
      part.q = some_heads(whole.q, 2 * rank, 2);
      part.k = some_heads(whole.k, rank, 1);
      part.v = some_heads(whole.v, rank, 1);
      AttentionForward a = part.forward();
      a.slice = {.first = 2 * rank, .all = 4};
      with_workspace(e, part, [&](Exec& exact) { attention_forward(exact, a); });
      for (int64_t row = 0; row < 110; ++row)
        for (int64_t i = 0; i < 32; ++i)
          expect(part.out.get(row * 32 + i) == whole.out.get(row * 64 + 32 * rank + i),
                 "the mask depends on how the heads are divided");
    }
  }
}

/// p is rounded to multiples of 2^-16 and what is kept is scaled for the rounded p; no p below 1 drops all.
void probability_is_rounded(Exec&) {
  using namespace nrl::ops::attention;
  expect(drop_below(0) == 0 && keep_scale(0) == 1.0f, "p 0");
  expect(drop_below(0.1f) == 6554 && keep_scale(0.1f) == 65536.0f / 58982.0f, "p 0.1");
  expect(drop_below(0.5f) == 32768 && keep_scale(0.5f) == 2.0f, "p 0.5");
  expect(drop_below(0x1.fffffep-1f) == 65535, "p next to 1");
}

void wrong_dropout(Exec& e) {
  const auto refused = [&](float p, int64_t first_row) {
    Problem problem(DType::f32,
                    {.queries = {4}, .keys = {}, .heads = 1, .kv_heads = 1, .d = 16, .dropout = p});
    problem.first_row = first_row;
    try {
      with_workspace(e, problem, [&](Exec& exact) { attention_forward(exact, problem.forward()); });
    } catch (const Error& error) {
      return error.code() == Exit::internal;
    }
    return false;
  };
  expect(refused(1.0f, 0) && refused(-0.5f, 0) && refused(0.1f, -1) && refused(0.1f, int64_t{1} << 40),
         "dropout out of range was accepted");
  expect(!refused(0.1f, (int64_t{1} << 40) - 4), "the last row was refused");
}

}  // namespace

NRL_OP_CASES(attention) {
  const std::vector<Shape> shapes = {
      {{1}, {}, 1, 1, 1},
      {{5}, {}, 1, 1, 8},
      {{64}, {}, 2, 2, 64},
      {{65}, {}, 2, 1, 20},
      {{129}, {}, 4, 1, 80},
      {{200}, {}, 2, 1, 128},
      {{257}, {}, 3, 3, 64, 0, true, true},
      {{321}, {}, 1, 1, 33},
      {{1, 0, 63, 64, 1, 130, 0}, {}, 4, 2, 48, 0, true, true},
      {{96, 17}, {}, 2, 1, 16, 2},
      {{300}, {}, 2, 2, 32, 5},
      {{200}, {}, 2, 1, 64, 64},
      {{190, 70}, {}, 2, 1, 64, 100},
      {{300}, {}, 1, 1, 17, 150, true, true},
      {{70, 130}, {}, 2, 1, 64, 0, false},
      {{30, 1, 1}, {30, 77, 200}, 4, 2, 64},
      {{5, 0, 70}, {64, 9, 131}, 4, 4, 32},
      {{3, 40}, {100, 150}, 2, 1, 64, 33},
      {{40, 3}, {10, 0}, 2, 2, 16},  // queries that see no key
      {{40, 3}, {10, 5}, 2, 1, 16, 0, false},
      {{40, 40, 40}, {}, 4, 2, 32, 0, true, true, 8},  // equally long: one block of memory for a library
      {{33, 33}, {}, 2, 1, 64, 20, true, true, 8},
      {{30, 70, 9}, {}, 2, 2, 16, 0, true, true, 8, 100},
      {{20, 9}, {}, 2, 1, 16, 0, true, true, 8},  // rows that start at 16 bytes, as tensor cores want
      {{70, 0, 33}, {}, 4, 2, 80, 0, true, true, 8},
      {{70, 66}, {}, 2, 1, 256, 30, true, true, 8},
      {{66}, {}, 2, 2, 192, 0, false, true, 0},
      // queries, keys, heads, head dimension, window, causal, fused, gap, slack, dropout
      {{5}, {}, 1, 1, 8, 0, true, false, 3, 0, 0.5f},
      {{129}, {}, 4, 2, 32, 0, true, false, 3, 0, 0.1f},
      {{257}, {}, 2, 1, 16, 0, true, true, 3, 0, 0.1f},
      {{1, 0, 63, 64, 1, 130, 0}, {}, 2, 1, 24, 0, true, true, 3, 0, 0.2f},
      {{300}, {}, 1, 1, 16, 5, true, false, 3, 0, 0.5f},
      {{190, 70}, {}, 2, 1, 16, 100, true, false, 3, 0, 0.1f},
      {{70, 130}, {}, 2, 1, 33, 0, false, false, 3, 0, 0.3f},
      {{30, 1, 1}, {30, 77, 200}, 4, 2, 32, 0, true, false, 3, 0, 0.1f},
      {{40, 3}, {10, 0}, 2, 2, 16, 0, true, false, 3, 0, 0.1f},
      {{20, 9}, {}, 2, 1, 16, 0, true, true, 8, 0, 0.25f},  // on tensor cores from here on
      {{70, 0, 33}, {}, 4, 2, 80, 0, true, true, 8, 0, 0.1f},
      {{130}, {}, 1, 1, 64, 0, true, true, 0, 0, 0.1f},
      {{66}, {}, 2, 1, 256, 30, true, true, 8, 0, 0.2f},
      {{66}, {}, 1, 1, 192, 0, false, true, 0, 0, 0.1f},
  };
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (const Shape& s : shapes) {
      const std::string name = fmt::format("attention.{} {}", name_of(t), s.name());
      registry.tests.push_back({name + " forward", [=](Exec& e) { return forward(e, s, t); }, true});
      registry.tests.push_back({name + " backward", [=](Exec& e) { return backward(e, s, t); }});
    }
  for (const Shape& s :
       {Shape{{5, 1, 0, 3}, {}, 2, 1, 3}, Shape{{7}, {}, 2, 2, 2, 3}, Shape{{2, 3}, {4, 6}, 4, 2, 5},
        Shape{{4}, {3}, 1, 1, 4, 0, false}, Shape{{9, 4}, {}, 4, 2, 3, 0, true, false, 3, 0, 0.3f},
        Shape{{5}, {18}, 2, 1, 4, 7, true, false, 3, 0, 0.5f}})
    registry.grads.push_back({"attention " + s.name(), [=](DType t) { return gradient(t, s); }});
  registry.properties.push_back({"attention of large scores", large_scores});
  registry.properties.push_back({"attention keeps NaN", nan_stays});
  registry.properties.push_back({"attention of a score of minus infinity", minus_infinity});
  registry.properties.push_back({"attention checks boundaries", wrong_boundaries});
  registry.properties.push_back({"attention dropout has one mask everywhere", mask_of_the_reference});
  registry.properties.push_back({"attention dropout is random", mask_is_random});
  registry.properties.push_back({"attention dropout of split batches", sequences_can_be_split});
  registry.properties.push_back({"attention dropout of split heads", heads_can_be_split});
  registry.properties.push_back({"attention dropout rounds p", probability_is_rounded});
  registry.properties.push_back({"attention checks dropout", wrong_dropout});
}

}  // namespace nrl::ops_test
