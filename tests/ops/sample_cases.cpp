#include <algorithm>
#include <cmath>

#include "core/ops/sample.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

void set_i64(Buffer& b, int64_t i, int64_t value) {
  static_cast<int64_t*>(b.tensor().data)[i] = value;
}

/// Rows of different temperatures (every third one greedy), seeds and positions.
struct Rows {
  Buffer logits, temperature, seed, sample, position;
  Rows(int64_t n, int64_t v, int64_t gap = 0)
      : logits(Buffer(DType::f32, {n, v}, gap).normal("logits", 3.0)),
        temperature(DType::f32, {n}),
        seed(DType::i64, {n}),
        sample(DType::i64, {n}),
        position(DType::i32, {n}) {
    for (int64_t i = 0; i < n; ++i) {
      temperature.set(i, i % 3 == 2 ? 0 : 0.5 + 0.25 * static_cast<double>(i % 5));
      set_i64(seed, i, (int64_t{1} << 40) * (i % 2) + 17);
      set_i64(sample, i, i * 0x1'0000'0001);
      position.set(i, static_cast<double>(i * 3 + 1));
    }
  }
  SampleTokens arguments(const Tensor& out, int64_t tokens) const {
    return {.logits = logits,
            .temperature = temperature,
            .seed = seed,
            .sample = sample,
            .position = position,
            .tokens = tokens,
            .out = out};
  }
};

struct Result {
  std::vector<double> token, log_prob;
};
/// Samples from the vocabulary in slices that begin at these columns.
Result sample(Exec& e, const Rows& r, int64_t tokens, std::vector<int64_t> begins = {0}) {
  const int64_t n = r.logits.tensor().dim(0), v = r.logits.tensor().dim(1);
  Buffer parts = Buffer(DType::f32, {static_cast<int64_t>(begins.size()), n, SamplePart::columns}).fill(NAN);
  begins.push_back(v);
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const Tensor part = make_tensor(
        static_cast<float*>(parts.tensor().data) + static_cast<int64_t>(i) * n * SamplePart::columns,
        DType::f32, {n, SamplePart::columns});
    SampleTokens a = r.arguments(part, tokens);
    a.logits = a.logits.columns(begins[i], begins[i + 1] - begins[i]);
    a.first_column = begins[i];
    sample_tokens(e, a);
  }
  Buffer token = Buffer(DType::i32, {n}).fill(-7), log_prob = Buffer(DType::f32, {n}).fill(NAN);
  join_samples(e, {.parts = parts, .token = token, .log_prob = log_prob});
  synchronize(e);
  return {token.values(), log_prob.values()};
}

Outputs parts(Exec& e, int64_t n, int64_t v, int64_t gap) {
  const Rows r(n, v, gap);
  Buffer out = Buffer(DType::f32, {n, SamplePart::columns}).fill(NAN);
  sample_tokens(e, r.arguments(out, std::max<int64_t>(1, v - 3)));
  Buffer token = Buffer(DType::i32, {n}).fill(-7), log_prob = Buffer(DType::f32, {n}).fill(NAN);
  Tensor one = out;
  one = make_tensor(one.data, DType::f32, {1, n, SamplePart::columns});
  join_samples(e, {.parts = one, .token = token, .log_prob = log_prob});
  synchronize(e);
  return {{"parts", out, v}, {"token", token}, {"log_prob", log_prob, v}};
}

/// A row has the same token alone and in any batch, with the vocabulary in slices of any size, and depends on
/// seed, sample and position.
void keys(Exec& e) {
  constexpr int64_t n = 24, v = 203;
  const Rows all(n, v);
  const Result want = sample(e, all, v - 3);
  for (const std::vector<int64_t>& begins :
       {std::vector<int64_t>{0, 100}, {0, 1, 2, 3, 5}, {0, 51, 102, 153}, {0, 202}}) {
    const Result got = sample(e, all, v - 3, begins);
    expect(got.token == want.token, fmt::format("{} slices", begins.size()));
    for (size_t i = 0; i < got.log_prob.size(); ++i)
      expect(std::fabs(got.log_prob[i] - want.log_prob[i]) < 2e-6, "log-probability of slices");
  }
  int changed[3] = {};
  for (int64_t i = 0; i < n; ++i) {
    const auto alone = [&](int64_t seed, int64_t sample_id, int64_t position) {
      Rows r(1, v);
      for (int64_t c = 0; c < v; ++c) r.logits.set(c, all.logits.get(i * v + c));
      r.temperature.set(0, all.temperature.get(i));
      const auto number = [i](const Buffer& b) { return static_cast<const int64_t*>(b.tensor().data)[i]; };
      set_i64(r.seed, 0, number(all.seed) + seed);
      set_i64(r.sample, 0, number(all.sample) + sample_id);
      r.position.set(0, all.position.get(i) + static_cast<double>(position));
      return sample(e, r, v - 3).token[0];
    };
    expect(alone(0, 0, 0) == want.token[static_cast<size_t>(i)], fmt::format("row {} alone", i));
    changed[0] += alone(1, 0, 0) != want.token[static_cast<size_t>(i)];
    changed[1] += alone(0, int64_t{1} << 33, 0) != want.token[static_cast<size_t>(i)];
    changed[2] += alone(0, 0, 1) != want.token[static_cast<size_t>(i)];
  }
  for (const int c : changed) expect(c > n / 3, "a number of the key has no effect");
}

/// Frequencies of 40000 samples equal the probabilities (chi-square with 15 degrees of freedom below its
/// quantile of 1e-4), at two temperatures.
void frequencies(Exec& e) {
  constexpr int64_t v = 16, n = 2000, rounds = 20;
  for (const double temperature : {1.0, 0.6}) {
    Rows r(n, v);
    double p[v], total = 0;
    for (int64_t c = 0; c < v; ++c)
      total += p[c] = std::exp(std::sin(static_cast<double>(c) * 2) / temperature);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < v; ++c) r.logits.set(i * v + c, std::sin(static_cast<double>(c) * 2));
      r.temperature.set(i, temperature);
      set_i64(r.seed, i, 5);
    }
    double count[v] = {};
    for (int64_t round = 0; round < rounds; ++round) {
      for (int64_t i = 0; i < n; ++i) {
        set_i64(r.sample, i, i);
        r.position.set(i, static_cast<double>(round));
      }
      for (const double token : sample(e, r, v, {0, 7}).token) ++count[static_cast<size_t>(token)];
    }
    double chi = 0;
    for (int64_t c = 0; c < v; ++c) {
      const double expected = p[c] / total * n * rounds;
      chi += (count[c] - expected) * (count[c] - expected) / expected;
    }
    expect(chi < 44.3, fmt::format("chi-square {}", chi));
  }
}

/// Tokens of padding are never sampled, but count in the log-sum-exp; a row without numbers has no token.
void padding(Exec& e) {
  Rows r(3, 40);
  for (int64_t i = 0; i < 3; ++i) {
    r.temperature.set(i, i == 0 ? 0 : 1);
    for (int64_t c = 0; c < 40; ++c) r.logits.set(i * 40 + c, i == 2 ? NAN : c >= 20 ? 9.0 : 0.0);
  }
  const Result got = sample(e, r, 20, {0, 25});
  expect(got.token[0] == 0, "of equal logits the first");
  expect(got.token[1] >= 0 && got.token[1] < 20, "padding was sampled");
  const double want = -std::log(20 + 20 * std::exp(9.0));
  expect(std::fabs(got.log_prob[0] - want) < 1e-5 && std::fabs(got.log_prob[1] - want) < 1e-5,
         "padding does not count");
  expect(got.token[2] == -1, "a token of NaN");
}

}  // namespace

NRL_OP_CASES(sample) {
  for (const auto& [n, v, gap] :
       {std::tuple<int64_t, int64_t, int64_t>{1, 1, 0}, {3, 7, 1}, {2, 64, 0}, {9, 203, 5}, {4, 3001, 0}})
    registry.tests.push_back(
        {fmt::format("sample.tokens {} of {}", n, v), [=](Exec& e) { return parts(e, n, v, gap); }, true});
  registry.properties.push_back({"sample.keys", keys});
  registry.properties.push_back({"sample.frequencies", frequencies});
  registry.properties.push_back({"sample.padding", padding});
}

}  // namespace nrl::ops_test
