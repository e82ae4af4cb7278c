#include "parallel/data/grad_reducer.h"

#include "core/base/error.h"

namespace nrl::parallel {

GradReducer::GradReducer(const FlatBuckets& layout, std::span<float> grads, comm::Communicator& dp,
                         const ShardingStrategy& strategy, bool overlap, comm::StreamRef stream)
    : layout_(layout),
      grads_(grads),
      dp_(dp),
      strategy_(strategy),
      overlap_(overlap),
      stream_(stream),
      sums_(layout.buckets().size()),
      gathers_(layout.buckets().size()) {
  if (strategy.gradients || strategy.parameters)
    fail(Exit::config, "shard_strategy {} (ZeRO-2/3) is not supported yet. Fix: use ddp or optim",
         strategy.name);
  NRL_CHECK(static_cast<int64_t>(grads.size()) == layout.total(), "{} gradients for a layout of {}",
            grads.size(), layout.total());
  NRL_CHECK(dp.size() == layout.shards(), "{} has {} ranks, the layout {} shards", dp.label(), dp.size(),
            layout.shards());
}

GradReducer::~GradReducer() = default;

void GradReducer::start() {
  NRL_CHECK(!started_, "the gradient reducer was started twice in a step");
  started_ = true;
  next_ = 0;
  seen_.assign(layout_.params().size(), false);
  missing_.clear();
  for (const Bucket& b : layout_.buckets()) missing_.push_back(static_cast<int>(b.params.size()));
}

void GradReducer::ready(int param) {
  NRL_CHECK(started_, "parameter {} is ready outside of a step", param);
  NRL_CHECK(param >= 0 && static_cast<size_t>(param) < seen_.size(), "no parameter {}", param);
  NRL_CHECK(!seen_[static_cast<size_t>(param)], "the gradient of {} was reported twice",
            layout_.params()[static_cast<size_t>(param)].name);
  seen_[static_cast<size_t>(param)] = true;
  --missing_[static_cast<size_t>(layout_.place(param).bucket)];
  if (overlap_) launch_complete();
}

void GradReducer::launch_complete() {
  for (; next_ < missing_.size() && missing_[next_] == 0; ++next_) {
    if (dp_.size() == 1) continue;
    const ElementRange whole = layout_.range(static_cast<int>(next_));
    const auto part = [&](const ElementRange& r) {
      return grads_.subspan(static_cast<size_t>(r.begin), static_cast<size_t>(r.size()));
    };
    sums_[next_] = strategy_.optimizer_state
                       ? dp_.reduce_scatter_async(comm::View(part(whole)),
                                                  part(layout_.shard(static_cast<int>(next_), dp_.rank())),
                                                  comm::Reduce::sum, stream_)
                       : dp_.all_reduce_async(part(whole), comm::Reduce::sum, stream_);
  }
}

void GradReducer::finish() {
  NRL_CHECK(started_, "the gradient reducer was not started");
  for (size_t p = 0; p < seen_.size(); ++p)
    NRL_CHECK(seen_[p], "the gradient of {} was never reported", layout_.params()[p].name);
  launch_complete();
  for (comm::Handle& h : sums_) h.wait();
  dp_.check();
  started_ = false;
}

void GradReducer::start_gather(comm::View flat) {
  NRL_CHECK(flat.count == layout_.total(), "{} parameters for a layout of {}", flat.count, layout_.total());
  if (dp_.size() == 1 || !strategy_.optimizer_state) return;
  const auto part = [&](const ElementRange& r) {
    return comm::View(static_cast<std::byte*>(flat.data) + r.begin * size_of(flat.dtype), r.size(),
                      flat.dtype);
  };
  for (size_t b = gathers_.size(); b-- > 0;) {
    NRL_CHECK(gathers_[b].empty(), "bucket {} was not waited for", b);
    const auto bucket = static_cast<int>(b);
    gathers_[b] =
        dp_.all_gather_async(part(layout_.shard(bucket, dp_.rank())), part(layout_.range(bucket)), stream_);
  }
}

void GradReducer::wait_gathers() {
  for (size_t b = gathers_.size(); b-- > 0;) gathers_[b].wait();
}

}  // namespace nrl::parallel
