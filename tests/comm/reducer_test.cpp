// Sums of gradients and gathers of weights over flat buckets, for every sharding strategy.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/base/error.h"
#include "parallel/comm/dry/dry_comm.h"
#include "parallel/data/weight_gather.h"
#include "tests/catch.h"
#include "tests/comm/random_params.h"
#include "tests/comm/reduced_gradients.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;
using nrl::test::Gradients;
using nrl::test::Kept;
using nrl::test::random_params;
using parallel::GradReducer;
using parallel::ShardingStrategy;

namespace {

/// How gradients travel.
struct Wire {
  DType dtype = DType::f32;
  bool fp32_sums = false;
};
constexpr Wire wires[] = {{}, {DType::bf16, false}, {DType::bf16, true}};

/// How a strategy may keep gradients.
std::vector<Kept> ways_to_keep(const ShardingStrategy& strategy) {
  std::vector<Kept> ways{{}};
  if (strategy.optimizer_state) ways.push_back({true, DType::bf16});
  if (strategy.optimizer_state && !strategy.gradients) ways.push_back({true, DType::f32});
  return ways;
}

// Small integers: exact in bf16, and so are their sums.
float gradient(int rank, int step, int microbatch, int64_t i) {
  return static_cast<float>((i * 31 + rank * 17 + step * 5 + microbatch * 3) % 17 - 8);
}

}  // namespace

TEST_CASE("reduced gradients are the plain sum, whatever the strategy, the wire and the order of arrival",
          "[reducer]") {
  auto& dp = test_world().comm();
  const int n = dp.size(), me = dp.rank();
  auto params = random_params(2, 30, 40000);
  for (size_t i = 0; i < params.size(); ++i) params[i].unit = static_cast<int>(i / 5);
  const parallel::FlatBuckets layout(params, 60000, n);
  for (const ShardingStrategy& strategy : parallel::sharding::all)
    for (const bool overlap : {false, true})
      for (const Wire& wire : wires)
        for (const Kept& kept : ways_to_keep(strategy)) {
          CAPTURE(strategy.name, overlap, name_of(wire.dtype), wire.fp32_sums, kept.in_buckets,
                  name_of(kept.dtype));
          Gradients gradients(
              layout, {&dp},
              {.strategy = strategy, .overlap = overlap, .wire = wire.dtype, .fp32_sums = wire.fp32_sums},
              kept);
          for (int step = 0; step < 2; ++step)
            for (const int microbatches : {1, 3}) {
              std::vector<int> order(params.size());
              std::iota(order.begin(), order.end(), 0);
              std::rotate(order.begin(), order.begin() + 7 * me, order.end());  // another one on every rank
              gradients.step(
                  microbatches, [&](int m, int64_t i) { return gradient(me, step, m, i); }, order);
              int64_t bad = 0;
              for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
                const parallel::ElementRange r = gradients.held(b, strategy);
                for (int64_t i = r.begin; i < r.end; ++i) {
                  float sum = 0;
                  for (int k = 0; k < n; ++k)
                    for (int m = 0; m < microbatches; ++m) sum += gradient(k, step, m, i);
                  bad += gradients.at(b, i) != sum;
                }
              }
              REQUIRE(bad == 0);
            }
          REQUIRE(dp.outstanding() == 0);
        }
}

TEST_CASE("gradients in bf16 are rounded before they travel, and their sums at most once", "[reducer]") {
  auto& dp = test_world().comm();
  const int n = dp.size(), me = dp.rank();
  if (n == 1) return;
  const parallel::FlatBuckets layout(random_params(2, 9, 9000), 20000, n);
  // On rank 0 256, elsewhere 1 and a part that bf16 drops.
  const auto value = [&](int, int64_t) { return me == 0 ? 256.0f : 1.0f + 0x1p-12f; };
  for (const ShardingStrategy& strategy : parallel::sharding::all)
    for (const bool fp32_sums : {false, true}) {
      CAPTURE(strategy.name, fp32_sums);
      Gradients gradients(layout, {&dp}, {.strategy = strategy, .wire = DType::bf16, .fp32_sums = fp32_sums});
      gradients.step(1, value);
      const float exact = 256.0f + static_cast<float>(n - 1);
      // Every rank of ddp gets the sum in bf16 as well.
      const bool rounded = !fp32_sums || !strategy.optimizer_state;
      const float expected = rounded ? static_cast<float>(bf16(exact)) : exact;
      REQUIRE(gradients.at(0, gradients.held(0, strategy).begin) == expected);
      if (n % 2 == 0) REQUIRE((expected == exact) == !rounded);  // 257 and 259 are not bf16
    }
}

TEST_CASE("sums over slices and replicas are the sums over all ranks", "[reducer]") {
  auto& world = test_world().comm();
  if (world.size() != 4) return;
  const auto inside = world.split(world.rank() / 2, world.rank(), "slice"),
             across = world.split(world.rank() % 2, world.rank(), "across");
  const parallel::FlatBuckets layout(random_params(2, 20, 20000), 50000, 2);
  for (const ShardingStrategy& strategy : parallel::sharding::all) {
    const parallel::ReduceGroup group{inside.get(), across.get()};
    if (!strategy.optimizer_state) {
      REQUIRE_THROWS_AS(Gradients(layout, group, {.strategy = strategy}), Error);
      continue;
    }
    for (const Wire& wire : wires)
      for (const Kept& kept : ways_to_keep(strategy))
        for (const int microbatches : {1, 3}) {
          CAPTURE(strategy.name, name_of(wire.dtype), wire.fp32_sums, microbatches, kept.in_buckets,
                  name_of(kept.dtype));
          Gradients gradients(layout, group,
                              {.strategy = strategy, .wire = wire.dtype, .fp32_sums = wire.fp32_sums}, kept);
          gradients.step(microbatches, [&](int m, int64_t i) { return gradient(world.rank(), 0, m, i); });
          int64_t bad = 0;
          for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
            const parallel::ElementRange r = gradients.held(b, strategy);
            for (int64_t i = r.begin; i < r.end; ++i) {
              float sum = 0;
              for (int k = 0; k < 4; ++k)
                for (int m = 0; m < microbatches; ++m) sum += gradient(k, 0, m, i);
              bad += gradients.at(b, i) != sum;
            }
          }
          REQUIRE(bad == 0);
        }
  }
}

TEST_CASE("sums over replicas are waited for at the end of a step only", "[reducer]") {
  comm::Ledger ledger;
  const auto inside = comm::make_dry("slice", 0, {0, 1}, ledger, 0),
             across = comm::make_dry("across", 0, {0, 2}, ledger, 1);
  const parallel::FlatBuckets layout(random_params(2, 20, 20000), 50000, 2);
  const size_t buckets = layout.buckets().size();
  REQUIRE(buckets > 3);  // more than the staging buffer holds
  for (const ShardingStrategy& strategy : parallel::sharding::all)
    for (const Wire& wire : wires) {
      if (!strategy.optimizer_state) continue;
      CAPTURE(strategy.name, name_of(wire.dtype), wire.fp32_sums);
      Gradients gradients(layout, {inside.get(), across.get()},
                          {.strategy = strategy, .wire = wire.dtype, .fp32_sums = wire.fp32_sums});
      std::vector<comm::Ledger::Event> events;
      ledger.observe([&](const comm::Ledger::Event& e) { events.push_back(e); });
      gradients.step(1, [](int, int64_t) { return 1.0f; });
      ledger.observe({});
      std::set<int> sums;  // over replicas
      size_t waits = 0;
      for (const comm::Ledger::Event& e : events)
        if (!e.wait) {
          CHECK(waits == 0);
          if (e.group == 1) sums.insert(e.operation);
        } else if (sums.contains(e.operation)) {
          ++waits;
        }
      CHECK(sums.size() == buckets);
      CHECK(waits == buckets);
    }
}

TEST_CASE("the bytes of a reduction are those of its strategy and element type", "[reducer]") {
  auto& dp = test_world().comm();
  const int n = dp.size();
  if (n == 1) return;
  const parallel::FlatBuckets layout(random_params(2, 20, 20000), 50000, n);
  comm::CollectiveLog& log = *dp.collective_log();
  // Bytes that this rank sends, with the collective's optimal algorithm, by operation.
  const auto measure = [&](const ShardingStrategy& strategy, const Wire& wire) {
    Gradients gradients(layout, {&dp},
                        {.strategy = strategy, .wire = wire.dtype, .fp32_sums = wire.fp32_sums});
    std::vector<float> weights(static_cast<size_t>(layout.total()));
    log.reset_totals();
    gradients.step(1, [](int, int64_t) { return 1.0f; });
    if (!strategy.parameters) gradients.reducer->start_gather(std::span(weights));
    gradients.reducer->wait_gathers();
    double bytes = 0;
    for (const comm::LogTotal& total : log.totals()) {
      const double share = static_cast<double>(n - 1) / n * static_cast<double>(total.bytes);
      if (total.op == comm::Op::all_reduce) bytes += 2 * share;
      if (total.op == comm::Op::reduce_scatter || total.op == comm::Op::all_gather) bytes += share;
      if (total.op == comm::Op::all_to_all) bytes += share;
    }
    return bytes;
  };
  const double once = static_cast<double>(n - 1) / n * static_cast<double>(layout.total()) * 4;
  const double ddp = measure(parallel::sharding::ddp, {});
  REQUIRE(ddp == Approx(2 * once));
  REQUIRE(measure(parallel::sharding::optim, {}) == ddp);
  REQUIRE(measure(parallel::sharding::optim_grads, {}) == ddp);
  REQUIRE(measure(parallel::sharding::optim_grads_params, {}) == Approx(once));  // gathers: WeightGather
  for (const bool fp32_sums : {false, true}) {
    CAPTURE(fp32_sums);
    REQUIRE(measure(parallel::sharding::ddp, {DType::bf16, fp32_sums}) == Approx(once));
    REQUIRE(measure(parallel::sharding::optim, {DType::bf16, fp32_sums}) == Approx(1.5 * once));
  }
}

TEST_CASE("whole gradients in buckets travel once in a step, and are rounded after each microbatch",
          "[reducer]") {
  auto& dp = test_world().comm();
  const int n = dp.size();
  const parallel::FlatBuckets layout(random_params(2, 20, 20000), 50000, n);
  comm::CollectiveLog& log = *dp.collective_log();
  const auto bytes = [&](const Kept& kept, int microbatches) {
    Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::optim}, kept);
    log.reset_totals();
    // 256, and then halves of the distance to the next number of bf16: a tie, which goes to the even 256.
    gradients.step(microbatches, [](int m, int64_t) { return m == 0 ? 256.0f : 1.0f; });
    const float sum = 256.0f + static_cast<float>(microbatches - 1);
    // The last microbatch is added in fp32 to what is kept, and only the sum over the ranks is rounded.
    const float last = microbatches > 1 ? 257.0f : 256.0f;
    const float expected = kept.dtype == DType::bf16
                               ? static_cast<float>(bf16(static_cast<float>(n) * (n > 1 ? last : 256.0f)))
                               : static_cast<float>(n) * sum;
    CHECK(gradients.at(0, gradients.held(0, parallel::sharding::optim).begin) == expected);
    int64_t out = 0;
    for (const comm::LogTotal& total : log.totals()) out += total.bytes;
    return out;
  };
  const int64_t whole = bytes({}, 1);
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int microbatches : {1, 2, 5}) {
      CAPTURE(name_of(dtype), microbatches);
      CHECK(bytes({true, dtype}, microbatches) == whole);
    }
}

TEST_CASE("updated shards are gathered in any element type", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout(random_params(5, 12, 70000), 150000, dp.size());
  Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::optim});
  std::vector<uint16_t> all(static_cast<size_t>(layout.total()));
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const parallel::ElementRange own = layout.shard(b, dp.rank());
    for (int64_t i = own.begin; i < own.end; ++i) all[i] = static_cast<uint16_t>(i * 3 + 1);
  }
  gradients.reducer->start_gather(all);
  gradients.reducer->wait_gathers();
  int64_t bad = 0;
  for (size_t i = 0; i < all.size(); ++i) bad += all[i] != static_cast<uint16_t>(i * 3 + 1);
  REQUIRE(bad == 0);
}

TEST_CASE("a gather in flight is waited for bucket by bucket", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout(random_params(6, 12, 70000), 40000, dp.size());
  const auto buckets = static_cast<int>(layout.buckets().size());
  REQUIRE(buckets > 2);
  Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::optim});
  GradReducer& reducer = *gradients.reducer;
  std::vector<float> all(static_cast<size_t>(layout.total()));
  for (int step = 1; step <= 3; ++step) {
    const auto value = [&](int64_t i) { return static_cast<float>(i % 1000 + step); };
    for (int b = 0; b < buckets; ++b) {
      const parallel::ElementRange own = layout.shard(b, dp.rank());
      for (int64_t i = own.begin; i < own.end; ++i) all[i] = value(i);
    }
    reducer.start_gather(std::span(all));
    // Two at a time; the wait for one issues the next.
    const auto in_flight = [&](int left) { return dp.size() == 1 ? 0 : std::min(left, 2); };
    REQUIRE(dp.outstanding() == in_flight(buckets));
    if (dp.size() > 1) REQUIRE_THROWS_AS(reducer.start_gather(std::span(all)), Error);
    int waited = 0;
    if (step == 3) {  // the last bucket first: all others are issued before it
      reducer.wait_gather(layout.buckets()[0].params[0]);
      REQUIRE(dp.outstanding() == (dp.size() == 1 ? 0 : buckets - 1));
    }
    for (int b = buckets; b-- > 0 && step < 3;) {  // in the order of the forward pass
      const parallel::Bucket& bucket = layout.buckets()[b];
      for (const int p : bucket.params) reducer.wait_gather(p);
      ++waited;
      REQUIRE(dp.outstanding() == in_flight(buckets - waited));
      int64_t bad = 0;
      for (int64_t i = bucket.start; i < bucket.start + bucket.size; ++i) bad += all[i] != value(i);
      REQUIRE(bad == 0);
    }
    reducer.wait_gathers();
    REQUIRE(dp.outstanding() == 0);
    int64_t bad = 0;
    for (size_t i = 0; i < all.size(); ++i) bad += all[i] != value(static_cast<int64_t>(i));
    REQUIRE(bad == 0);
  }
}

TEST_CASE("gradients reported twice, never or too early are an internal error", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout({{"a", 10}, {"b", 20}}, 0, dp.size());
  Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::ddp});
  GradReducer& reducer = *gradients.reducer;
  REQUIRE_THROWS_AS(reducer.ready(0), Error);
  REQUIRE_THROWS_AS(reducer.finish(), Error);
  reducer.start();
  REQUIRE_THROWS_AS(reducer.start(), Error);
  REQUIRE_THROWS_AS(reducer.open(0, true), Error);
  reducer.ready(0);
  REQUIRE_THROWS_AS(reducer.ready(0), Error);
  REQUIRE_THROWS_AS(reducer.ready(2), Error);
  try {
    reducer.finish();
    FAIL();
  } catch (const Error& e) {
    REQUIRE(std::string(e.what()).find("b was never reported") != std::string::npos);
  }
  reducer.ready(1);
  reducer.finish();
}

TEST_CASE("a bucket of sharded gradients is written only while it is open", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout({{"a", 10, 0}, {"b", 20, 1}}, 0, dp.size());
  REQUIRE(layout.buckets().size() == 2);
  Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::optim_grads});
  GradReducer& reducer = *gradients.reducer;
  REQUIRE_THROWS_AS(reducer.open(0, true), Error);  // outside of a step
  reducer.start();
  REQUIRE_THROWS_AS(reducer.ready(1), Error);
  reducer.open(0, true);
  REQUIRE(reducer.is_open(0));
  REQUIRE_THROWS_AS(reducer.open(0, true), Error);
  reducer.ready(1);
  REQUIRE(!reducer.is_open(0));
  REQUIRE_THROWS_AS(reducer.ready(1), Error);
  REQUIRE_THROWS_AS(reducer.open(0, true), Error);  // its sum is in flight
  reducer.settle(0);
  REQUIRE_THROWS_AS(reducer.finish(), Error);  // a was never reported
  reducer.open(1, true);
  reducer.ready(0);
  reducer.finish();
  REQUIRE(dp.outstanding() == 0);
}

TEST_CASE("a bucket of several microbatches is summed when all have reported", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout({{"a", 10, 0}, {"b", 20, 0}}, 0, dp.size());
  REQUIRE(layout.buckets().size() == 1);
  Gradients gradients(layout, {&dp}, {.strategy = parallel::sharding::optim_grads});
  GradReducer& reducer = *gradients.reducer;
  reducer.start();
  reducer.open(0, true, 2);
  for (const int param : {1, 1, 0}) reducer.ready(param);
  REQUIRE_THROWS_AS(reducer.ready(1), Error);
  REQUIRE(reducer.is_open(0));
  reducer.ready(0);
  REQUIRE(!reducer.is_open(0));
  reducer.settle(0);
  reducer.finish();
  REQUIRE(dp.outstanding() == 0);
}

TEST_CASE("gathered weights are there until they are released, and stale after an update", "[gather]") {
  auto& dp = test_world().comm();
  const int me = dp.rank();
  auto params = random_params(5, 12, 30000);
  for (size_t i = 0; i < params.size(); ++i) params[i].unit = static_cast<int>(i / 3);
  const parallel::FlatBuckets layout(params, 0, dp.size());
  const auto buckets = static_cast<int>(layout.buckets().size());
  REQUIRE(buckets == 4);
  std::vector<uint16_t> shards(static_cast<size_t>(layout.shard_total()));
  std::vector<std::vector<uint16_t>> buffers;
  std::vector<comm::View> views;
  for (const parallel::Bucket& b : layout.buckets()) buffers.emplace_back(static_cast<size_t>(b.size));
  for (auto& buffer : buffers)
    views.emplace_back(buffer.data(), static_cast<int64_t>(buffer.size()), DType::bf16);
  parallel::WeightGather gather(layout, {shards.data(), layout.shard_total(), DType::bf16}, views, dp);
  const auto start = [&](std::vector<int> buckets) { gather.start(buckets); };
  const auto value = [](int step, int64_t i) { return static_cast<uint16_t>(i * 3 + step); };
  const auto param_in = [&](int b) { return layout.buckets()[b].params.front(); };
  const auto why_not = [&](int b) {
    try {
      gather.require(param_in(b));
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::internal);
      return std::string(e.what());
    }
    return std::string();
  };
  for (int step = 0; step < 3; ++step) {
    for (int b = 0; b < buckets; ++b)
      for (int64_t i = 0; i < layout.in_shards(b).size(); ++i)
        shards[layout.in_shards(b).begin + i] = value(step, layout.shard(b, me).begin + i);
    if (step > 0) gather.updated();
    for (int b = 0; b < buckets; ++b) {
      if (b == 0) {  // the others are started in advance
        REQUIRE(why_not(b).find("is read, but released") != std::string::npos);
        REQUIRE_THROWS_AS(gather.wait(b), Error);
      }
      start({b});
      start({b});  // once
      // With those in flight, two buckets in one operation.
      if (b == 0) start({0, 1, 2});
      if (b == 2) start({2, 3});
      REQUIRE(dp.outstanding() <= 2);
      REQUIRE(why_not(b).find("while it is gathered") != std::string::npos);
      gather.wait(b);
      REQUIRE(why_not(b).empty());
      int64_t bad = 0;
      for (int64_t i = 0; i < layout.range(b).size(); ++i)
        bad += buffers[b][i] != value(step, layout.range(b).begin + i);
      REQUIRE(bad == 0);
      if (b + 1 == buckets) {
        gather.updated();
        REQUIRE(why_not(b).find("stale: gathered as version") != std::string::npos);
        REQUIRE_THROWS_AS(start({b}), Error);
      }
      gather.release(b);
      REQUIRE(why_not(b).find("is read, but released") != std::string::npos);
    }
    REQUIRE(dp.outstanding() == 0);
  }
}
