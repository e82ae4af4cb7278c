#include <algorithm>
#include <tuple>

#include "core/base/error.h"
#include "parallel/data/flat_buckets.h"
#include "tests/catch.h"
#include "tests/comm/random_params.h"

using namespace nrl;

using nrl::test::random_params;

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
        REQUIRE(b.size - b.used < parallel::FlatBuckets::shard_unit * (shards == 7      ? 7
                                                                       : shards == 1024 ? 2
                                                                                        : 1));
        REQUIRE(layout.shard(static_cast<int>(&b - layout.buckets().data()), shards - 1).begin % 8 == 0);
        int64_t at = 0;
        for (int p : b.params) {
          REQUIRE(layout.place(p).offset % parallel::FlatBuckets::param_align == 0);
          REQUIRE(layout.place(p).offset >= at);
          REQUIRE(layout.place(p).offset - at < parallel::FlatBuckets::param_align);
          REQUIRE(layout.place(p).start == b.start + layout.place(p).offset);
          at = layout.place(p).offset + params[p].numel;
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
        for (int64_t i = s.begin; i < s.end; ++i) ++covered[i];
      }
      REQUIRE(owned == layout.shard_total());
      int64_t last = 0;
      for (const parallel::ShardPiece& p : layout.pieces(r)) {
        REQUIRE(p.in_shard >= last);
        last = p.in_shard + p.in_param.size();
        REQUIRE(last <= layout.shard_total());
        REQUIRE(p.in_flat == layout.place(p.param).start + p.in_param.begin);
        REQUIRE(p.in_param.begin == found[p.param]);  // ranks own ascending parts
        found[p.param] = p.in_param.end;
      }
    }
    REQUIRE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }));
    for (size_t i = 0; i < params.size(); ++i) REQUIRE(found[i] == params[i].numel);
  }
}

TEST_CASE("the layout does not depend on sensible data-parallel sizes", "[buckets]") {
  const auto params = random_params(4, 30, 90000);
  const parallel::FlatBuckets one(params, 150000, 1);
  for (int shards : {2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 48, 96, 128, 320, 512, 768}) {
    const parallel::FlatBuckets other(params, 150000, shards);
    REQUIRE(other.total() == one.total());
    for (int p = 0; p < 30; ++p) REQUIRE(other.place(p).start == one.place(p).start);
  }
  for (int shards : {7, 1024}) {
    const parallel::FlatBuckets odd(params, 150000, shards);
    for (int p = 0; p < 30; ++p) {
      REQUIRE(odd.place(p).bucket == one.place(p).bucket);
      REQUIRE(odd.place(p).offset == one.place(p).offset);
    }
  }
}

TEST_CASE("automatic buckets grow with the ranks up to an eighth of the gradients", "[buckets]") {
  constexpr int64_t mib = (int64_t{1} << 20) / 4, large = int64_t{8} << 30;
  for (const int ranks : {1, 2, 8, 10}) REQUIRE(parallel::auto_bucket_elements(large, ranks) == 40 * mib);
  REQUIRE(parallel::auto_bucket_elements(large, 11) == 44 * mib);
  REQUIRE(parallel::auto_bucket_elements(large, 64) == 256 * mib);
  REQUIRE(parallel::auto_bucket_elements(large, 1024) == large / 8);
  REQUIRE(parallel::auto_bucket_elements(2 * large, 1024) == 4096 * mib);
  REQUIRE(parallel::auto_bucket_elements(1000, 1024) == 40 * mib);
}

TEST_CASE("a bucket holds parameters of one unit only, and is full or at the end of its unit", "[buckets]") {
  auto params = random_params(3, 40, 30000);
  for (size_t i = 0; i < params.size(); ++i) params[i].unit = static_cast<int>(i / 7);
  for (const int64_t target : {int64_t{0}, int64_t{20000}, int64_t{1} << 40}) {
    const parallel::FlatBuckets layout(params, target, 4);
    int last = 1 << 30;
    std::vector<int64_t> of_unit(6);
    for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
      const parallel::Bucket& bucket = layout.buckets()[b];
      const int unit = params[bucket.params.front()].unit;
      for (const int p : bucket.params) REQUIRE(params[p].unit == unit);
      REQUIRE(unit <= last);
      if (unit == last) REQUIRE(layout.buckets()[static_cast<size_t>(b) - 1].used >= target);
      last = unit;
      ++of_unit[unit];
      // The shards of a rank are consecutive over buckets.
      REQUIRE(layout.in_shards(b).size() == layout.shard(b, 1).size());
      REQUIRE(layout.in_shards(b).begin == (b == 0 ? 0 : layout.in_shards(b - 1).end));
    }
    for (const int64_t buckets : of_unit) REQUIRE((target == 20000 ? buckets > 1 : buckets == 1));
  }
}

TEST_CASE("shards begin at multiples of their alignment, and parameters stay where they are", "[buckets]") {
  const std::vector<parallel::ParamSpec> params{{"a", 100000, 0}, {"b", 64, 0}, {"c", 70001, 1}};
  for (const int shards : {1, 2, 3, 7, 64, 128, 1000}) {
    CAPTURE(shards);
    const parallel::FlatBuckets plain(params, 20000, 1), aligned(params, 20000, shards, 64);
    for (int b = 0; b < static_cast<int>(aligned.buckets().size()); ++b)
      for (int rank = 0; rank < shards; ++rank) {
        REQUIRE(aligned.shard(b, rank).begin % 64 == 0);
        REQUIRE(aligned.in_shards(b).begin % 64 == 0);
      }
    for (int p = 0; p < 3; ++p) {
      REQUIRE(aligned.place(p).bucket == plain.place(p).bucket);
      REQUIRE(aligned.place(p).offset == plain.place(p).offset);
    }
    for (const parallel::ShardPiece& piece : aligned.pieces(shards - 1)) REQUIRE(piece.in_shard % 64 == 0);
  }
  // Without, shards of some sizes begin elsewhere.
  REQUIRE(parallel::FlatBuckets(params, 20000, 256).shard(0, 1).begin % 64 != 0);
}

TEST_CASE("a bad list of parameters is refused", "[buckets]") {
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", 3}, {"a", 4}}, 0, 1), Error);
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", 0}}, 0, 1), Error);
  REQUIRE_THROWS_AS(parallel::FlatBuckets({{"a", INT64_MAX - 5}, {"b", INT64_MAX - 5}}, 0, 1), Error);
  REQUIRE(parallel::FlatBuckets({}, 0, 4).total() == 0);
}

TEST_CASE("a strategy shards what its enumerator says", "[buckets]") {
  using parallel::sharding_of;
  const auto shards = [](ShardStrategy s) {
    const parallel::ShardingStrategy of = sharding_of(s);
    return std::tuple{of.name, of.optimizer_state, of.gradients, of.parameters};
  };
  REQUIRE(shards(ShardStrategy::ddp) == std::tuple{"ddp", false, false, false});
  REQUIRE(shards(ShardStrategy::optim) == std::tuple{"optim", true, false, false});
  REQUIRE(shards(ShardStrategy::optim_grads) == std::tuple{"optim_grads", true, true, false});
  REQUIRE(shards(ShardStrategy::optim_grads_params) == std::tuple{"optim_grads_params", true, true, true});
  REQUIRE(shards(ShardStrategy::hsdp) == std::tuple{"hsdp", true, true, true});
}
