// Gradients that travel in fp8: what is lost on the way, and where it comes back.
#include <cmath>
#include <cstring>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/comm/random_params.h"
#include "tests/comm/reduced_gradients.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using nrl::test::Gradients;
using nrl::test::random_params;
using parallel::ShardingStrategy;

namespace {

// Numbers of sizes between 2^-8 and 1, another size for every 100 neighbors: blocks have scales of their own.
float gradient(int rank, int step, int64_t i) {
  const auto hash = static_cast<uint32_t>((i + 1) * 2654435761 + rank * 40503 + step * 977);
  const float sign_and_size = static_cast<float>(hash >> 8) * 0x1p-23f - 1.0f;
  return std::ldexp(sign_and_size, -static_cast<int>(i / 100 % 9));
}

/// Sums over steps of what an element was reduced to on this rank, in the order of `held` ranges.
struct Accumulated {
  std::vector<double> got, exact, lost;
  double worst() const {
    double most = 0;
    for (size_t i = 0; i < got.size(); ++i) most = std::max(most, std::fabs(got[i] - exact[i]));
    return most;
  }
};

Accumulated accumulate(const parallel::FlatBuckets& layout, comm::Communicator& dp,
                       const parallel::ReduceOptions& options, int steps, bool repeated) {
  Gradients gradients(layout, {&dp}, options);
  Accumulated out;
  for (int step = 0; step < steps; ++step) {
    const int seed = repeated ? 0 : step;
    gradients.step(1, [&](int, int64_t i) { return gradient(dp.rank(), seed, i); });
    size_t at = 0;
    for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
      const parallel::ElementRange r = gradients.held(b, options.strategy);
      for (int64_t i = r.begin; i < r.end; ++i, ++at) {
        if (step == 0) out.got.push_back(0), out.exact.push_back(0);
        out.got[at] += static_cast<double>(gradients.at(b, i));
        for (int k = 0; k < dp.size(); ++k) out.exact[at] += static_cast<double>(gradient(k, seed, i));
      }
    }
  }
  // What all ranks still owe, by element.
  std::vector<double> owed(gradients.errors.begin(), gradients.errors.end());
  for (int b = 0; !gradients.sum_errors.empty() && b < static_cast<int>(layout.buckets().size()); ++b) {
    const int64_t own = layout.shard(b, dp.rank()).begin, in = layout.in_shards(b).begin;
    for (int64_t i = 0; i < layout.in_shards(b).size(); ++i)
      owed[own + i] += static_cast<double>(gradients.sum_errors[in + i]);
  }
  if (!owed.empty()) dp.all_reduce(owed, comm::Reduce::sum);
  for (int b = 0; !owed.empty() && b < static_cast<int>(layout.buckets().size()); ++b) {
    const parallel::ElementRange r = gradients.held(b, options.strategy);
    out.lost.insert(out.lost.end(), owed.begin() + r.begin, owed.begin() + r.end);
  }
  return out;
}

const ShardingStrategy* const strategies[] = {&parallel::sharding::ddp, &parallel::sharding::optim};

}  // namespace

TEST_CASE("what fp8 loses is kept, and comes with the next steps", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  if (dp.size() == 1) return;
  const parallel::FlatBuckets layout(random_params(3, 12, 20000), 50000, dp.size());
  REQUIRE(layout.buckets().size() > 2);
  for (const ShardingStrategy* strategy : strategies)
    for (const DType wire : {DType::e4m3, DType::e5m2})
      for (const bool overlap : {false, true}) {
        CAPTURE(strategy->name, name_of(wire), overlap);
        const Accumulated a = accumulate(
            layout, dp, {.strategy = *strategy, .overlap = overlap, .wire = wire, .error_feedback = true}, 5,
            false);
        REQUIRE(a.lost.size() == a.got.size());
        // Exact but for the roundings of fp32 sums.
        int64_t bad = 0;
        for (size_t i = 0; i < a.got.size(); ++i) bad += std::fabs(a.got[i] + a.lost[i] - a.exact[i]) > 1e-5;
        REQUIRE(bad == 0);
        REQUIRE(a.worst() > 1e-4);  // there was something to lose
        REQUIRE(dp.outstanding() == 0);
      }
}

TEST_CASE("roundings that repeat add up without error feedback only", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  if (dp.size() == 1) return;
  const parallel::FlatBuckets layout(random_params(4, 5, 9000), 0, dp.size());
  for (const ShardingStrategy* strategy : strategies) {
    const auto worst = [&](int steps, bool feedback) {
      return accumulate(layout, dp, {.strategy = *strategy, .wire = DType::e4m3, .error_feedback = feedback},
                        steps, true)
          .worst();
    };
    CAPTURE(strategy->name);
    REQUIRE(worst(20, false) == Approx(20 * worst(1, false)).epsilon(1e-3));
    // With it at most what is owed at the end: a rounding error of a gradient and what it carried over.
    REQUIRE(worst(20, true) < 3 * worst(1, true));
  }
}

TEST_CASE("e4m3 loses half of what e5m2 loses", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  if (dp.size() == 1) return;
  const parallel::FlatBuckets layout(random_params(5, 5, 9000), 0, dp.size());
  const auto rms = [&](DType wire) {
    const Accumulated a =
        accumulate(layout, dp, {.strategy = parallel::sharding::optim, .wire = wire}, 1, false);
    double squares = 0, size = 0;
    for (size_t i = 0; i < a.got.size(); ++i) {
      squares += (a.got[i] - a.exact[i]) * (a.got[i] - a.exact[i]);
      size += a.exact[i] * a.exact[i];
    }
    return std::sqrt(squares / size);
  };
  const double fine = rms(DType::e4m3), coarse = rms(DType::e5m2);
  CAPTURE(fine, coarse);
  REQUIRE(coarse / fine > 1.7);
  REQUIRE(fine < 0.03);  // 2^-4 / sqrt(3) at most, for each of the gradients
}

TEST_CASE("every rank of ddp has the same bits of a sum that travelled in fp8", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout(random_params(6, 9, 20000), 30000, dp.size());
  Gradients gradients(layout, {&dp},
                      {.strategy = parallel::sharding::ddp, .wire = DType::e4m3, .error_feedback = true});
  for (int step = 0; step < 3; ++step)
    gradients.step(1, [&](int, int64_t i) { return gradient(dp.rank(), step, i); });
  std::vector<float> first = gradients.values;
  dp.broadcast(first, 0);
  REQUIRE(std::memcmp(first.data(), gradients.values.data(), first.size() * sizeof(float)) == 0);
}

TEST_CASE("a gradient that is not finite stays so, and spoils no error", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  if (dp.size() == 1) return;
  const parallel::FlatBuckets layout({{"a", 5000}}, 0, dp.size());
  for (const ShardingStrategy* strategy : strategies) {
    Gradients gradients(layout, {&dp}, {.strategy = *strategy, .wire = DType::e4m3, .error_feedback = true});
    const int64_t bad = dp.rank() == 0 ? 7 : -1;
    gradients.step(1, [&](int, int64_t i) { return i == bad ? INFINITY : gradient(dp.rank(), 0, i); });
    const parallel::ElementRange held = gradients.held(0, *strategy);
    if (held.begin <= 7) REQUIRE(!std::isfinite(gradients.at(0, 7)));
    for (const float e : gradients.errors) REQUIRE(std::isfinite(e));
    for (const float e : gradients.sum_errors) REQUIRE(std::isfinite(e));
  }
}

TEST_CASE("gradients in shards do not travel in fp8", "[reducer][fp8]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout({{"a", 10}}, 0, dp.size());
  REQUIRE_THROWS_AS(
      Gradients(layout, {&dp}, {.strategy = parallel::sharding::optim_grads, .wire = DType::e4m3}), Error);
}
