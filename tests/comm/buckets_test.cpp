#include <algorithm>
#include <numeric>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "parallel/data/grad_reducer.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"

using namespace nrl;

namespace {

std::vector<parallel::ParamSpec> random_params(uint64_t seed, int count, int64_t most) {
  const PhiloxStream stream(seed, "sizes");
  std::vector<parallel::ParamSpec> out;
  for (int i = 0; i < count; ++i) {
    const auto bits = stream.bits(static_cast<uint64_t>(i));
    out.push_back({"p" + std::to_string(i), 1 + bits % most});
  }
  return out;
}

}  // namespace

TEST_CASE("buckets hold every parameter once, aligned, in reverse order", "[buckets]") {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto params = random_params(seed, 40, 30000);
    for (int shards : {1, 2, 3, 8, 7, 1024}) {
      const parallel::FlatBuckets layout(params, 100000, shards);
      std::vector<int> order;
      int64_t end = 0, sum = 0;
      for (const parallel::Bucket& b : layout.buckets()) {
        REQUIRE(b.start == end);
        REQUIRE(b.size % shards == 0);
        REQUIRE(b.size >= b.used);
        REQUIRE(b.size - b.used < parallel::FlatBuckets::shard_unit * (shards == 7 ? 7 : 1));
        int64_t at = 0;
        for (int p : b.params) {
          REQUIRE(layout.place(p).offset % parallel::FlatBuckets::param_align == 0);
          REQUIRE(layout.place(p).offset >= at);
          REQUIRE(layout.place(p).offset - at < parallel::FlatBuckets::param_align);
          REQUIRE(layout.place(p).start == b.start + layout.place(p).offset);
          at = layout.place(p).offset + params[static_cast<size_t>(p)].numel;
          if (p != b.params.back()) REQUIRE(at < 100000);  // would have been closed
        }
        REQUIRE(b.used == at);
        order.insert(order.end(), b.params.begin(), b.params.end());
        end += b.size;
        sum += b.size;
      }
      REQUIRE(sum == layout.total());
      REQUIRE(order.size() == params.size());
      for (size_t i = 0; i < order.size(); ++i) REQUIRE(order[i] == static_cast<int>(params.size() - 1 - i));
      REQUIRE(layout.find("p17") == 17);
      REQUIRE(layout.find("p40") == -1);
    }
  }
}

TEST_CASE("shards cover the buffer and pieces cover the parameters", "[buckets]") {
  const auto params = random_params(9, 25, 50000);
  for (int shards : {1, 2, 5, 6, 64}) {
    const parallel::FlatBuckets layout(params, 200000, shards);
    std::vector<int> covered(static_cast<size_t>(layout.total()));
    std::vector<int64_t> found(params.size());
    for (int r = 0; r < shards; ++r) {
      int64_t owned = 0;
      for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
        const parallel::ElementRange s = layout.shard(b, r);
        owned += s.size();
        for (int64_t i = s.begin; i < s.end; ++i) ++covered[static_cast<size_t>(i)];
      }
      REQUIRE(owned == layout.shard_total());
      int64_t last = 0;
      for (const parallel::ShardPiece& p : layout.pieces(r)) {
        REQUIRE(p.in_shard >= last);
        last = p.in_shard + p.in_param.size();
        REQUIRE(last <= layout.shard_total());
        REQUIRE(p.in_flat == layout.place(p.param).start + p.in_param.begin);
        REQUIRE(p.in_param.begin == found[static_cast<size_t>(p.param)]);  // ranks own ascending parts
        found[static_cast<size_t>(p.param)] = p.in_param.end;
      }
    }
    REQUIRE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }));
    for (size_t i = 0; i < params.size(); ++i) REQUIRE(found[i] == params[i].numel);
  }
}

TEST_CASE("the layout does not depend on sensible data-parallel sizes", "[buckets]") {
  const auto params = random_params(4, 30, 90000);
  const parallel::FlatBuckets one(params, 150000, 1);
  for (int shards : {2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 48, 96, 128, 320, 768, 1024}) {
    const parallel::FlatBuckets other(params, 150000, shards);
    REQUIRE(other.total() == one.total());
    for (int p = 0; p < 30; ++p) REQUIRE(other.place(p).start == one.place(p).start);
  }
  const parallel::FlatBuckets odd(params, 150000, 7);
  for (int p = 0; p < 30; ++p) {
    REQUIRE(odd.place(p).bucket == one.place(p).bucket);
    REQUIRE(odd.place(p).offset == one.place(p).offset);
  }
}

TEST_CASE("a bad list of parameters is refused", "[buckets]") {
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", 3}, {"a", 4}}, 0, 1), Error);
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", 0}}, 0, 1), Error);
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", INT64_MAX - 5}, {"b", INT64_MAX - 5}}, 0, 1), Error);
  REQUIRE(parallel::FlatBuckets({}, 0, 4).total() == 0);
  REQUIRE(*parallel::find_sharding("optim") == parallel::sharding::optim);
  REQUIRE(parallel::find_sharding("zero") == nullptr);
}

TEST_CASE("reduced gradients are the plain sum, whatever the strategy and the order of arrival",
          "[reducer]") {
  auto& dp = test_world().comm();
  const int n = dp.size(), me = dp.rank();
  const auto params = random_params(2, 30, 40000);
  const parallel::FlatBuckets layout(params, 120000, n);
  const auto grad = [](int rank, int64_t i) { return static_cast<float>((i * 31 + rank * 17) % 257 - 128); };
  for (const parallel::ShardingStrategy& strategy : {parallel::sharding::ddp, parallel::sharding::optim}) {
    for (bool overlap : {false, true}) {
      std::vector<float> grads(static_cast<size_t>(layout.total()));
      parallel::GradReducer reducer(layout, grads, dp, strategy, overlap);
      for (int step = 0; step < 2; ++step) {
        for (int64_t i = 0; i < layout.total(); ++i) grads[static_cast<size_t>(i)] = grad(me + step, i);
        // Every rank reports in another order.
        std::vector<int> order(params.size());
        std::iota(order.begin(), order.end(), 0);
        std::rotate(order.begin(), order.begin() + 7 * me, order.end());
        reducer.start();
        for (int p : order) reducer.ready(p);
        reducer.finish();
        int64_t bad = 0;
        for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
          const parallel::ElementRange r = strategy.optimizer_state ? layout.shard(b, me) : layout.range(b);
          for (int64_t i = r.begin; i < r.end; ++i) {
            float sum = 0;
            for (int k = 0; k < n; ++k) sum += grad(k + step, i);
            bad += grads[static_cast<size_t>(i)] != sum;
          }
        }
        REQUIRE(bad == 0);
      }
      REQUIRE(dp.outstanding() == 0);
    }
  }
}

TEST_CASE("updated shards are gathered in any element type", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout(random_params(5, 12, 70000), 150000, dp.size());
  std::vector<float> grads(static_cast<size_t>(layout.total()));
  parallel::GradReducer reducer(layout, grads, dp, parallel::sharding::optim, true);
  std::vector<uint16_t> flat(grads.size());
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const parallel::ElementRange own = layout.shard(b, dp.rank());
    for (int64_t i = own.begin; i < own.end; ++i)
      flat[static_cast<size_t>(i)] = static_cast<uint16_t>(i * 3 + 1);
  }
  const auto wrong = [&](const std::vector<uint16_t>& v) {
    int64_t bad = 0;
    for (size_t i = 0; i < v.size(); ++i) bad += v[i] != static_cast<uint16_t>(i * 3 + 1);
    return bad;
  };
  reducer.start_gather(flat);
  reducer.wait_gathers();
  REQUIRE(wrong(flat) == 0);
}

TEST_CASE("a gather in flight is waited for bucket by bucket", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout(random_params(6, 12, 70000), 40000, dp.size());
  const auto buckets = static_cast<int>(layout.buckets().size());
  REQUIRE(buckets > 2);
  std::vector<float> grads(static_cast<size_t>(layout.total())), flat(grads.size());
  parallel::GradReducer reducer(layout, grads, dp, parallel::sharding::optim, true);
  for (int step = 1; step <= 3; ++step) {
    const auto value = [&](int64_t i) { return static_cast<float>(i % 1000 + step); };
    for (int b = 0; b < buckets; ++b) {
      const parallel::ElementRange own = layout.shard(b, dp.rank());
      for (int64_t i = own.begin; i < own.end; ++i) flat[static_cast<size_t>(i)] = value(i);
    }
    reducer.start_gather(std::span(flat));
    const int in_flight = dp.size() == 1 ? 0 : buckets;
    REQUIRE(dp.outstanding() == in_flight);
    if (in_flight > 0) REQUIRE_THROWS_AS(reducer.start_gather(std::span(flat)), Error);
    int waited = 0;
    for (int b = buckets; b-- > 0 && step < 3;) {  // in the order of the forward pass
      const parallel::Bucket& bucket = layout.buckets()[static_cast<size_t>(b)];
      for (const int p : bucket.params) reducer.wait_gather(p);
      ++waited;
      REQUIRE(dp.outstanding() == std::max(in_flight - waited, 0));
      int64_t bad = 0;
      for (int64_t i = bucket.start; i < bucket.start + bucket.size; ++i)
        bad += flat[static_cast<size_t>(i)] != value(i);
      REQUIRE(bad == 0);
    }
    reducer.wait_gathers();
    REQUIRE(dp.outstanding() == 0);
    int64_t bad = 0;
    for (size_t i = 0; i < flat.size(); ++i) bad += flat[i] != value(static_cast<int64_t>(i));
    REQUIRE(bad == 0);
  }
}

TEST_CASE("gradients reported twice, never or too early are an internal error", "[reducer]") {
  auto& dp = test_world().comm();
  const parallel::FlatBuckets layout({{"a", 10}, {"b", 20}}, 0, dp.size());
  std::vector<float> grads(static_cast<size_t>(layout.total()));
  parallel::GradReducer reducer(layout, grads, dp, parallel::sharding::ddp, true);
  REQUIRE_THROWS_AS(reducer.ready(0), Error);
  REQUIRE_THROWS_AS(reducer.finish(), Error);
  reducer.start();
  REQUIRE_THROWS_AS(reducer.start(), Error);
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
  REQUIRE_THROWS_AS(parallel::GradReducer(layout, grads, dp, parallel::sharding::optim_grads, true), Error);
}
