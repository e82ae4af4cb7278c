#include "parallel/data/flat_buckets.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/error.h"

namespace nrl::parallel {

namespace {

int64_t round_up(int64_t n, int64_t unit) {
  const int64_t rest = n % unit;
  int64_t out = n;
  if (rest != 0 && __builtin_add_overflow(n, unit - rest, &out))
    fail(Exit::config, "the parameters of one rank overflow the flat buffer");
  return out;
}

}  // namespace

int64_t auto_bucket_elements(int64_t total, int ranks) {
  constexpr int64_t per_rank = int64_t{1} << 20, least = 10 * per_rank;
  return std::max(least, std::min(ranks * per_rank, total / 8));
}

FlatBuckets::FlatBuckets(std::vector<ParamSpec> params, int64_t bucket_elements, int shards,
                         int64_t shard_align)
    : params_(std::move(params)), places_(params_.size()), by_name_(params_.size()), shards_(shards) {
  NRL_CHECK(shards >= 1 && bucket_elements >= 0 && shard_align >= 1, "{} shards, {} elements, {} aligned",
            shards, bucket_elements, shard_align);
  const int64_t target = bucket_elements == 0 ? std::numeric_limits<int64_t>::max() : bucket_elements;
  const int64_t unit = std::lcm(shard_unit, shards * std::lcm(shard_align, min_shard_align));

  const auto close = [&] {
    if (buckets_.empty() || buckets_.back().size != 0) return;  // closed already
    Bucket& b = buckets_.back();
    b.size = round_up(b.used, unit);
    if (__builtin_add_overflow(total_, b.size, &total_))
      fail(Exit::config, "the parameters of one rank overflow the flat buffer");
  };
  for (int i = static_cast<int>(params_.size()) - 1; i >= 0; --i) {
    const ParamSpec& p = params_[i];
    NRL_CHECK(p.numel > 0, "parameter {} has {} elements", p.name, p.numel);
    if (buckets_.empty() || buckets_.back().size != 0) {
      buckets_.emplace_back();
      buckets_.back().start = total_;
    }
    Bucket& b = buckets_.back();
    const int64_t offset = round_up(b.used, param_align);
    places_[i] = {
        .bucket = static_cast<int>(buckets_.size()) - 1, .offset = offset, .start = b.start + offset};
    if (__builtin_add_overflow(offset, p.numel, &b.used))
      fail(Exit::config, "the parameters of one rank overflow the flat buffer");
    b.params.push_back(i);
    if (b.used >= target || (i > 0 && params_[static_cast<size_t>(i) - 1].unit != p.unit)) close();
  }
  close();

  std::iota(by_name_.begin(), by_name_.end(), 0);
  const auto name = [&](int i) -> const std::string& { return params_[i].name; };
  std::sort(by_name_.begin(), by_name_.end(), [&](int a, int b) { return name(a) < name(b); });
  for (size_t i = 1; i < by_name_.size(); ++i)
    NRL_CHECK(name(by_name_[i - 1]) != name(by_name_[i]), "parameter {} is listed twice", name(by_name_[i]));
}

int FlatBuckets::find(std::string_view name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [&](int i, std::string_view n) { return params_[i].name < n; });
  return at != by_name_.end() && params_[*at].name == name ? *at : -1;
}

ElementRange FlatBuckets::range(int bucket) const {
  const Bucket& b = buckets_.at(static_cast<size_t>(bucket));
  return {b.start, b.start + b.size};
}

ElementRange FlatBuckets::shard(int bucket, int shard_rank) const {
  NRL_CHECK(shard_rank >= 0 && shard_rank < shards_, "shard {} of {}", shard_rank, shards_);
  const Bucket& b = buckets_.at(static_cast<size_t>(bucket));
  const int64_t each = b.size / shards_;
  return {b.start + shard_rank * each, b.start + (shard_rank + 1) * each};
}

ElementRange FlatBuckets::in_shards(int bucket) const {
  const Bucket& b = buckets_.at(static_cast<size_t>(bucket));
  return {b.start / shards_, (b.start + b.size) / shards_};
}

std::vector<ShardPiece> FlatBuckets::pieces(int shard_rank) const {
  std::vector<ShardPiece> out;
  int64_t base = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const ElementRange own = shard(static_cast<int>(b), shard_rank);
    for (int p : buckets_[b].params) {
      const int64_t start = place(p).start;
      const int64_t from = std::max(own.begin, start);
      const int64_t to = std::min(own.end, start + params_[p].numel);
      if (from < to)
        out.push_back({.param = p,
                       .in_param = {from - start, to - start},
                       .in_flat = from,
                       .in_shard = base + from - own.begin});
    }
    base += own.size();
  }
  return out;
}

}  // namespace nrl::parallel
