// Attention that a library runs on a GPU, in the layouts and with the values that libraries are known to get
// wrong: rows start at 16 bytes, the workspace holds NaN, and scores may be near -100.

#include <cmath>

#include "core/ops/attention.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  std::vector<int64_t> lengths;  ///< per sequence
  int64_t heads, kv_heads, d;
  bool causal = true;
  double score = 0;  ///< mean of the scores; 0: not shifted

  std::string name() const {
    return fmt::format("({}) {}/{} D{}{}{}", fmt::join(lengths, ","), heads, kv_heads, d,
                       causal ? "" : " full", score != 0 ? fmt::format(" scores near {}", score) : "");
  }
  int64_t rows() const {
    int64_t n = 0;
    for (const int64_t length : lengths) n += length;
    return n;
  }
  int64_t longest() const { return *std::max_element(lengths.begin(), lengths.end()); }
  SequenceLengths known() const {
    return {longest(), std::count(lengths.begin(), lengths.end(), longest()) == std::ssize(lengths)};
  }
  Buffer boundaries() const {
    Buffer cu(DType::i32, {static_cast<int64_t>(lengths.size()) + 1});
    int64_t at = 0;
    for (size_t i = 0; i < lengths.size(); ++i)
      cu.set(static_cast<int64_t>(i) + 1, static_cast<double>(at += lengths[i]));
    return cu;
  }
};

struct Problem {
  Shape s;
  Buffer q, k, v, out, lse, dout, dq, dk, dv, cu;

  Problem(DType t, const Shape& shape) : s(shape), cu(shape.boundaries()) {
    const int64_t n = s.rows(), unit = 8;  // elements of 16 bytes
    q = Buffer(t, {n, s.heads, s.d}, unit).normal("q");
    k = Buffer(t, {n, s.kv_heads, s.d}).normal("k");
    // The first column gives the scores their mean. It is small in k, where sums of gradients of scores,
    // which cancel, multiply it.
    if (s.score != 0) {
      for (int64_t i = 0; i < q.size(); i += s.d) q.set(i, s.score / scale());
      for (int64_t i = 0; i < k.size(); i += s.d) k.set(i, 1);
    }
    v = Buffer(t, {n, s.kv_heads, s.d}, 2 * unit).normal("v");
    dq = Buffer(t, {n, s.heads, s.d}, unit).fill(7);
    dk = Buffer(t, {n, s.kv_heads, s.d}, 2 * unit).fill(7);
    dv = Buffer(t, {n, s.kv_heads, s.d}).fill(7);
    out = Buffer(t, {n, s.heads, s.d}).fill(7);
    lse = Buffer(DType::f32, {s.heads, n}).fill(7);
    dout = Buffer(t, {n, s.heads, s.d}).normal("dout");
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(s.d)); }
  AttentionForward forward() const { return {q, k, v, out, lse, cu, cu, scale(), s.causal, 0, s.known()}; }
  AttentionBackward backward() const {
    return {dout, q, k, v, out, lse, cu, cu, dq, dk, dv, scale(), s.causal, 0, s.known()};
  }
};

template <class Body>
void in_poisoned_workspace(const Exec& e, const Problem& p, const Body& body) {
  const Shape& s = p.s;
  const size_t bytes = e.multiprocessors > 0
                           ? attention_gpu_workspace(s.rows(), s.heads, s.kv_heads, s.d)
                           : attention_workspace(s.rows(), s.heads, s.kv_heads, s.d, s.longest(), e.threads);
  const Buffer memory = Buffer(DType::f32, {static_cast<int64_t>(bytes / sizeof(float))}).fill(std::nan(""));
  Exec exact = e;
  exact.workspace = {static_cast<std::byte*>(memory.tensor().data), bytes};
  body(exact);
}

/// The backward pass reads out and lse of the reference.
Outputs attention(Exec& e, const Shape& s, DType t) {
  Problem p(t, s);
  const bool rounded = e.multiprocessors > 0;
  const int64_t length = s.d + s.longest(), gradient = 4 * length * (s.heads / s.kv_heads);
  in_poisoned_workspace(e, p, [&](Exec& exact) { attention_forward(exact, p.forward()); });
  Outputs results{{"out", p.out, length, rounded}, {"lse", p.lse, length}};
  Exec reference{.kernels = &reference_kernels()};
  attention_forward(reference, p.forward());
  in_poisoned_workspace(e, p, [&](Exec& exact) { attention_backward(exact, p.backward()); });
  results.push_back({"dq", p.dq, gradient, rounded});
  Buffer dk = p.dk;
  if (s.score != 0)  // a small sum of large products
    for (int64_t i = 0; i < dk.size(); i += s.d) dk.set(i, std::isfinite(dk.get(i)) ? 0 : NAN);
  results.push_back({"dk", dk, gradient, rounded});
  results.push_back({"dv", p.dv, gradient, rounded});
  return results;
}

}  // namespace

NRL_OP_CASES(attention_library) {
  constexpr double negative = -100;  // exp(100) overflows
  for (const DType t : {DType::bf16, DType::f16})
    for (const Shape& s : {
             Shape{{64}, 2, 2, 64, false, negative},
             {{192, 192}, 2, 1, 64, false, negative},
             {{128}, 2, 1, 64, false, negative},
             {{100}, 2, 1, 64, false, negative},
             {{192}, 2, 1, 128, true, negative},
             {{9, 8, 8, 12, 1, 20}, 2, 2, 64, true},
             {{70, 130, 64, 3}, 4, 2, 64, true},
             {{70, 130}, 2, 1, 128, false, negative},
         })
      registry.tests.push_back({fmt::format("attention of a library {} {}", name_of(t), s.name()),
                                [=](Exec& e) { return attention(e, s, t); }});
}

}  // namespace nrl::ops_test
