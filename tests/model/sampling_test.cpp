// Drawing a token from logits: the probability of every token is the share of uniform numbers that draw it,
// and is compared with softmax written out by hand.

#include <cmath>
#include <limits>
#include <numeric>

#include "apps/train/loop/text_generator.h"
#include "tests/catch.h"

using namespace nrl;
using train::SamplingOptions;

namespace {

constexpr int draws = 20000;  // evenly spread uniform numbers

/// How often each token is drawn.
std::vector<double> shares(const std::vector<float>& logits, const SamplingOptions& options) {
  std::vector<double> share(logits.size());
  std::vector<int32_t> order;
  for (int i = 0; i < draws; ++i) {
    const auto uniform = static_cast<float>((i + 0.5) / draws);
    const int32_t id = train::sample_token(logits, options, uniform, order);
    share.at(static_cast<size_t>(id)) += 1.0 / draws;
  }
  return share;
}

/// The logits of these probabilities, plus a constant that softmax removes.
std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p) + 3));
  return logits;
}

void check_shares(const std::vector<float>& logits, const SamplingOptions& options,
                  const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const std::vector<double> share = shares(logits, options);
  for (size_t i = 0; i < share.size(); ++i) {
    INFO("token " << i);
    // The interval of a token holds at most one number more or less than its length says.
    CHECK(share[i] == Approx(weights[i] / sum).margin(1.5 / draws));
    if (weights[i] == 0) CHECK(share[i] == 0);
  }
}

const std::vector<double> p = {0.1, 0.4, 0.05, 0.3, 0.15};  // of the tokens 0 to 4

}  // namespace

TEST_CASE("tokens are drawn with their softmax probabilities", "[sampling]") {
  check_shares(logits_of(p), {1.0, 0, 1.0, 0}, p);
}

TEST_CASE("a temperature divides the logits", "[sampling]") {
  for (double temperature : {0.25, 0.5, 0.8, 2.0, 10.0}) {
    INFO(temperature);
    std::vector<double> weights;
    for (double x : p) weights.push_back(std::pow(x, 1 / temperature));
    check_shares(logits_of(p), {temperature, 0, 1.0, 0}, weights);
  }
}

TEST_CASE("temperature 0 takes the likeliest token, of equal ones the lowest", "[sampling]") {
  check_shares(logits_of(p), {0.0, 0, 1.0, 0}, {0, 1, 0, 0, 0});
  check_shares({1, 7, -2, 7, 7}, {0.0, 0, 1.0, 0}, {0, 1, 0, 0, 0});
  check_shares({-5, -5}, {0.0, 3, 0.5, 0}, {1, 0});
  // A temperature near 0 comes to the same.
  check_shares(logits_of(p), {1e-3, 0, 1.0, 0}, {0, 1, 0, 0, 0});
  check_shares({1e4f, -1e4f, 9.9e3f}, {1e-3, 0, 1.0, 0}, {1, 0, 0});
}

TEST_CASE("top-k keeps the likeliest tokens", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  check_shares(logits, {1.0, 1, 1.0, 0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 2, 1.0, 0}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 3, 1.0, 0}, {0, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 4, 1.0, 0}, {0.1, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 5, 1.0, 0}, p);
  check_shares(logits, {1.0, 1000, 1.0, 0}, p);
  check_shares({2, 5, 5, 5}, {1.0, 2, 1.0, 0}, {0, 1, 1, 0});  // of equal ones the lowest ids
}

TEST_CASE("top-p keeps the likeliest tokens up to the one that reaches the sum", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  check_shares(logits, {1.0, 0, 0.0, 0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 0, 0.39, 0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 0, 0.41, 0}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 0, 0.69, 0}, {0, 0.4, 0, 0.3, 0});
  check_shares(logits, {1.0, 0, 0.71, 0}, {0, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 0, 0.94, 0}, {0.1, 0.4, 0, 0.3, 0.15});
  check_shares(logits, {1.0, 0, 0.96, 0}, p);
  // Tokens that reach the sum exactly are enough, as in transformers.
  check_shares({1, 1, 1, 1}, {1.0, 0, 0.5, 0}, {1, 1, 0, 0});
  check_shares({1, 1, 1, 1}, {1.0, 0, 0.51, 0}, {1, 1, 1, 0});
}

TEST_CASE("temperature comes first, then top-k, then top-p of what is left", "[sampling]") {
  const std::vector<float> logits = logits_of(p);
  // 0.4 of 0.7 is more than half; without top-k it would not be.
  check_shares(logits, {1.0, 2, 0.5, 0}, {0, 1, 0, 0, 0});
  check_shares(logits, {1.0, 2, 0.6, 0}, {0, 0.4, 0, 0.3, 0});
  // Squared, 0.4 is more than half: 0.16 of 0.285. Square roots: 0.632 of 2.106.
  check_shares(logits, {0.5, 0, 0.5, 0}, {0, 1, 0, 0, 0});
  check_shares(logits, {2.0, 0, 0.5, 0}, {0, std::sqrt(0.4), 0, std::sqrt(0.3), 0});
}

TEST_CASE("uniform numbers at both ends draw a token that is kept", "[sampling]") {
  std::vector<int32_t> order;
  const std::vector<float> logits = {-std::numeric_limits<float>::infinity(), 2, 1,
                                     -std::numeric_limits<float>::infinity()};
  for (const SamplingOptions& options :
       {SamplingOptions{1.0, 0, 1.0, 0}, SamplingOptions{1.0, 2, 1.0, 0}, SamplingOptions{1.0, 0, 0.99, 0}})
    for (float uniform : {0.0f, 0x1.fffffep-1f}) {
      const int32_t id = train::sample_token(logits, options, uniform, order);
      CHECK((id == 1 || id == 2));
    }
}
