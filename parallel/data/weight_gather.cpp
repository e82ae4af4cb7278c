#include "parallel/data/weight_gather.h"

#include <utility>

#include "core/base/error.h"

namespace nrl::parallel {

WeightGather::WeightGather(const FlatBuckets& layout, comm::ConstView shards, std::vector<comm::View> buckets,
                           comm::Communicator& group, comm::StreamRef stream)
    : layout_(layout),
      shards_(shards),
      buckets_(std::move(buckets)),
      group_(group),
      stream_(stream),
      states_(layout.buckets().size()) {
  NRL_CHECK(group.size() == layout.shards() && shards.count == layout.shard_total() &&
                buckets_.size() == states_.size(),
            "{} has {} ranks, the layout {} shards", group.label(), group.size(), layout.shards());
  for (size_t b = 0; b < buckets_.size(); ++b)
    NRL_CHECK(buckets_[b].count == layout.buckets()[b].size && buckets_[b].dtype == shards.dtype,
              "the buffer of bucket {} has {} elements of {}", b, buckets_[b].count,
              name_of(buckets_[b].dtype));
}

void WeightGather::start(std::span<const int> buckets) {
  std::vector<comm::Operands> operands;
  const auto gather = std::make_shared<comm::Handle>();
  for (const int bucket : buckets) {
    State& s = of_bucket(bucket);
    if (s.version == version_) continue;
    NRL_CHECK(s.version < 0, "bucket {} was not released before the weights changed", bucket);
    const ElementRange own = layout_.in_shards(bucket);
    const comm::ConstView shard(
        static_cast<const std::byte*>(shards_.data) + own.begin * size_of(shards_.dtype), own.size(),
        shards_.dtype);
    operands.push_back({shard, buckets_[bucket]});
    s.gather = gather;
    s.version = version_;
  }
  if (!operands.empty()) *gather = group_.all_gather_async(operands, stream_);
}

void WeightGather::finish(State& s) {
  if (const auto gather = std::exchange(s.gather, nullptr)) gather->wait();
}

void WeightGather::wait(int bucket) {
  State& s = of_bucket(bucket);
  NRL_CHECK(s.version >= 0, "bucket {} is waited for, but not gathered", bucket);
  finish(s);
}

void WeightGather::release(int bucket) {
  State& s = of_bucket(bucket);
  finish(s);
  s.version = -1;
}

void WeightGather::require(int param) const {
  const State& s = of_bucket(layout_.place(param).bucket);
  const std::string& name = layout_.params()[param].name;
  NRL_CHECK(s.version >= 0, "{} is read, but released", name);
  NRL_CHECK(s.version == version_, "{} is read, but stale: gathered as version {}, now {}", name, s.version,
            version_);
  NRL_CHECK(!s.gather, "{} is read while it is gathered", name);
}

}  // namespace nrl::parallel
