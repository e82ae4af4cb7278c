// Attention that a library runs on a GPU, in the layouts of training and of context parallelism, and with the
// values that libraries are known to get wrong: rows start at 16 bytes, the workspace holds NaN, and scores
// may be near -100.

#include <cmath>

#include "core/ops/attention.h"
#include "core/ops/attention_engine.h"
#include "tests/ops/cases.h"
#include "tests/ops/reference/table.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  std::vector<int64_t> queries;  ///< per sequence
  int64_t heads, kv_heads, d;
  bool causal = true;
  double score = 0;                ///< mean of the scores; 0: not shifted
  std::vector<int64_t> keys = {};  ///< none: as queries
  int64_t window = 0;

  std::string name() const {
    return fmt::format("({}{}{}) {}/{} D{}{}{}{}", fmt::join(queries, ","), keys.empty() ? "" : " of ",
                       fmt::join(keys, ","), heads, kv_heads, d, causal ? "" : " full",
                       window > 0 ? fmt::format(" window {}", window) : "",
                       score != 0 ? fmt::format(" scores near {}", score) : "");
  }
  const std::vector<int64_t>& key_lengths() const { return keys.empty() ? queries : keys; }
  static int64_t sum(const std::vector<int64_t>& lengths) {
    int64_t n = 0;
    for (const int64_t length : lengths) n += length;
    return n;
  }
  int64_t longest() const {
    const auto& k = key_lengths();
    return std::max(*std::max_element(queries.begin(), queries.end()), *std::max_element(k.begin(), k.end()));
  }
  /// Of lists with other keys than queries, the blocks: these are equally long and far apart.
  SequenceLengths known() const {
    SequenceLengths l{.longest = longest()};
    if (keys.empty()) {
      l.equal = std::count(queries.begin(), queries.end(), l.longest) == std::ssize(queries);
      return l;
    }
    int64_t query = 0, key = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (queries[i] > 0 && keys[i] > 0) {
        if (l.blocks == 0) {
          l.queries = {query, queries[i], queries[i]};
          l.keys = {key, keys[i], keys[i]};
        } else if (l.blocks == 1) {
          l.queries.step = query - l.queries.first;
          l.keys.step = key - l.keys.first;
        }
        ++l.blocks;
      }
      query += queries[i], key += keys[i];
    }
    return l;
  }
};

Buffer boundaries(const std::vector<int64_t>& lengths) {
  Buffer cu(DType::i32, {static_cast<int64_t>(lengths.size()) + 1});
  int64_t at = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    cu.set(static_cast<int64_t>(i) + 1, static_cast<double>(at += lengths[i]));
  return cu;
}

/// A step of a ring on samples of two chunks: all queries see the low chunk of an earlier rank, the queries
/// of the high chunk see both of a later one.
Shape ring(int64_t samples, int64_t chunk, bool earlier, Shape s) {
  s.causal = false;
  for (int64_t i = 0; i < samples; ++i) {
    if (samples > 1 && !earlier) s.queries.push_back(chunk), s.keys.push_back(0);
    s.queries.push_back(earlier ? 2 * chunk : chunk);
    s.keys.push_back(earlier ? chunk : 2 * chunk);
    if (samples > 1 && earlier) s.queries.push_back(0), s.keys.push_back(chunk);
  }
  return s;
}

/// A chunk of queries and the gathered keys up to its end.
Shape gathered(int64_t chunk, int64_t keys, int64_t window, Shape s) {
  s.queries = {chunk};
  s.keys = {keys};
  s.window = window;
  return s;
}

struct Problem {
  Shape s;
  Buffer q, k, v, out, lse, dout, dq, dk, dv, cu_q, other_cu_k;

  Problem(DType t, const Shape& shape) : s(shape), cu_q(boundaries(s.queries)) {
    if (!s.keys.empty()) other_cu_k = boundaries(s.keys);
    const int64_t n = Shape::sum(s.queries), m = Shape::sum(s.key_lengths()), unit = 8;  // 16 bytes
    q = Buffer(t, {n, s.heads, s.d}, unit).normal("q");
    k = Buffer(t, {m, s.kv_heads, s.d}).normal("k");
    // The first column gives the scores their mean. It is small in k, where sums of gradients of scores,
    // which cancel, multiply it.
    if (s.score != 0) {
      for (int64_t i = 0; i < q.size(); i += s.d) q.set(i, s.score / scale());
      for (int64_t i = 0; i < k.size(); i += s.d) k.set(i, 1);
    }
    v = Buffer(t, {m, s.kv_heads, s.d}, 2 * unit).normal("v");
    dq = Buffer(t, {n, s.heads, s.d}, unit).fill(7);
    dk = Buffer(t, {m, s.kv_heads, s.d}, 2 * unit).fill(7);
    dv = Buffer(t, {m, s.kv_heads, s.d}).fill(7);
    out = Buffer(t, {n, s.heads, s.d}).fill(7);
    lse = Buffer(DType::f32, {s.heads, n}).fill(7);
    dout = Buffer(t, {n, s.heads, s.d}).normal("dout");
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(s.d)); }
  const Buffer& cu_k() const { return s.keys.empty() ? cu_q : other_cu_k; }
  AttentionForward forward() const {
    return {q, k, v, out, lse, cu_q, cu_k(), scale(), s.causal, s.window, s.known()};
  }
  AttentionBackward backward() const {
    return {dout, q, k, v, out, lse, cu_q, cu_k(), dq, dk, dv, scale(), s.causal, s.window, s.known()};
  }
};

template <class Body>
void in_poisoned_workspace(const Exec& e, const Problem& p, const Body& body) {
  const Shape& s = p.s;
  const int64_t rows = std::max(Shape::sum(s.queries), Shape::sum(s.key_lengths()));
  const size_t bytes = e.multiprocessors > 0
                           ? attention_gpu_workspace(rows, s.heads, s.kv_heads, s.d)
                           : attention_workspace(rows, s.heads, s.kv_heads, s.d, s.longest(), e.threads);
  const Buffer memory = Buffer(DType::f32, {static_cast<int64_t>(bytes / sizeof(float))}).fill(std::nan(""));
  Exec exact = e;
  exact.workspace = {static_cast<std::byte*>(memory.tensor().data), bytes};
  body(exact);
}

/// Where a library is there, it runs the forward pass to the keys of other ranks.
void expect_library(const Exec& e, const Problem& p) {
  if (!e.libraries || !e.libraries->attention || p.s.keys.empty()) return;
  const attention::Problem problem = attention::problem_of(p.forward());
  const attention::Choice choice = attention::choose(*e.libraries, problem, e.workspace.size);
  expect(choice.engine != nullptr, p.s.name() + " runs on " + describe(choice, problem).implementation);
}

/// The backward pass reads out and lse of the reference.
Outputs attention(Exec& e, const Shape& s, DType t) {
  Problem p(t, s);
  const bool rounded = rounds_attention(e, t);
  const int64_t length = s.d + s.longest(), gradient = 4 * length * (s.heads / s.kv_heads);
  in_poisoned_workspace(e, p, [&](Exec& exact) {
    expect_library(exact, p);
    attention_forward(exact, p.forward());
  });
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
  const Shape multi{{}, 2, 2, 64}, grouped{{}, 4, 2, 64}, wide{{}, 2, 1, 128},
      low{{}, 2, 1, 64, true, negative};
  for (const DType t : {DType::bf16, DType::f16})
    for (const Shape& s : {
             Shape{{64}, 2, 2, 64, false, negative},
             {{192, 192}, 2, 1, 64, false, negative},
             {{128}, 2, 1, 64, false, negative},
             {{100}, 2, 1, 64, false, negative},
             {{160}, 2, 1, 64, true, negative},
             {{9, 8, 8, 12, 1, 20}, 2, 2, 64, true},
             {{70, 130, 64, 3}, 4, 2, 64, true},
             {{70, 130}, 2, 1, 128, false, negative},
             ring(1, 64, true, grouped),
             ring(1, 128, false, multi),
             ring(1, 64, true, low),
             ring(1, 32, false, low),
             ring(3, 128, true, grouped),
             ring(2, 40, false, grouped),
             ring(3, 64, true, low),
             ring(2, 128, false, wide),
             gathered(64, 128, 0, grouped),
             gathered(128, 384, 0, wide),
             gathered(40, 120, 0, multi),
             gathered(64, 192, 0, low),
             gathered(64, 163, 100, grouped),
             gathered(100, 150, 51, multi),
         })
      registry.tests.push_back({fmt::format("attention of a library {} {}", name_of(t), s.name()),
                                [=](Exec& e) { return attention(e, s, t); }});
}

}  // namespace nrl::ops_test
