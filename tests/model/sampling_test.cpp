// Top-k and top-p: which logits are kept, by the probabilities that softmax gives, written out by hand.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "apps/rollout/likeliest.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

using Options = rollout::Likeliest;

std::vector<float> kept(std::vector<float> logits, const Options& options, int64_t usable) {
  rollout::keep_likeliest(logits, usable, options);
  return logits;
}

/// The probabilities that are left.
std::vector<double> shares(const std::vector<float>& logits, const Options& options) {
  std::vector<double> share;
  double sum = 0;
  for (const float x : kept(logits, options, std::ssize(logits)))
    sum += share.emplace_back(std::exp(x / options.temperature));
  for (double& x : share) x /= sum;
  return share;
}

/// The logits of these probabilities, plus a constant that softmax removes.
std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p) + 3));
  return logits;
}

void check_shares(const std::vector<float>& logits, const Options& options,
                  const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const std::vector<double> share = shares(logits, options);
  for (size_t i = 0; i < share.size(); ++i) {
    INFO("token " << i);
    CHECK(share[i] == Approx(weights[i] / sum).epsilon(1e-5));
  }
}

const std::vector<double> p = {0.1, 0.4, 0.05, 0.3, 0.15};  // of the tokens 0 to 4

}  // namespace

TEST_CASE("top-k keeps the likeliest tokens", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  check_shares(logits, {1.0, 1, 1.0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 2, 1.0}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 3, 1.0}, {0, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 4, 1.0}, {0.1, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 5, 1.0}, p);
  check_shares(logits, {1.0, 1000, 1.0}, p);
  check_shares({2, 5, 5, 5}, {1.0, 2, 1.0}, {0, 1, 1, 0});  // of equal ones the lowest ids
}

TEST_CASE("top-p keeps the likeliest tokens up to the one that reaches the sum", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  check_shares(logits, {1.0, 0, 0.0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 0, 0.39}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 0, 0.41}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 0, 0.69}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 0, 0.71}, {0, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 0, 0.94}, {0.1, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 0, 0.96}, p);
  // Tokens that reach the sum exactly are enough, as in transformers.
  check_shares({1, 1, 1, 1}, {1.0, 0, 0.5}, {1, 1, 0, 0});
  check_shares({1, 1, 1, 1}, {1.0, 0, 0.51}, {1, 1, 1, 0});
}

TEST_CASE("temperature comes first, then top-k, then top-p of what is left", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  // 0.4 of 0.7 is more than half; without top-k it would not be.
  check_shares(logits, {1.0, 2, 0.5}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 2, 0.6}, {0, 0.4, 0, 0.3, 0});
  // Squared, 0.4 is more than half: 0.16 of 0.285. Square roots: 0.632 of 2.106.
  check_shares(logits, {0.5, 0, 0.5}, {0, 1, 0, 0, 0});
  check_shares(logits, {2.0, 0, 0.5}, {0, std::sqrt(0.4), 0, std::sqrt(0.3), 0});
}

TEST_CASE("tokens beyond the usable ones are left out, and a row with NaN has none", "[sampling]") {
  const std::vector<float> logits = {1, 2, 3, 9, 8};
  constexpr float never = -std::numeric_limits<float>::infinity();
  CHECK(kept(logits, {1.0, 2, 1.0}, 3) == std::vector<float>{never, 2, 3, never, never});
  CHECK(kept(logits, {1.0, 7, 1.0}, 3) == std::vector<float>{1, 2, 3, never, never});
  for (const float x : kept({1, NAN, 3}, {1.0, 0, 0.5}, 3)) CHECK(std::isnan(x));
}

TEST_CASE("top-p of a large vocabulary keeps the tokens that sorting all of it keeps", "[sampling]") {
  constexpr int64_t vocabulary = 5000;
  uint32_t state = 1;
  std::vector<float> logits;  // many are equal
  for (int64_t i = 0; i < vocabulary; ++i) {
    state = state * 1664525 + 1013904223;
    logits.push_back(static_cast<float>(state >> 24) / 64);
  }
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  for (const int64_t top_k : {0, 300, 2000})
    for (const double temperature : {0.25, 1.0, 3.0})
      for (const double top_p : {0.0, 0.013, 0.31, 0.77, 0.9931, 0.9999}) {
        CAPTURE(top_k, temperature, top_p);
        const size_t most = top_k > 0 ? static_cast<size_t>(top_k) : order.size();
        double total = 0, sum = 0;
        for (size_t i = 0; i < most; ++i) total += std::exp(logits[order[i]] / temperature);
        std::vector<float> want(logits.size(), -std::numeric_limits<float>::infinity());
        for (size_t i = 0; i < most && (i == 0 || sum < top_p * total); ++i) {
          want[order[i]] = logits[order[i]];
          sum += std::exp(logits[order[i]] / temperature);
        }
        CHECK(kept(logits, {temperature, top_k, top_p}, vocabulary) == want);
      }
}
