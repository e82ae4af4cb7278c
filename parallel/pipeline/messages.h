#pragma once
// The messages of a pipeline stage with its neighbors: one FIFO per neighbor and kind, as schedules are
// written for (schedule.h).

#include <vector>

#include "parallel/comm/channel.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

/// This stage's ends of the channels. A message is the tensor at the boundary of two chunks: of equal size on
/// both stages, in the memory of the group's backend.
class StageMessages {
 public:
  /// The ends that `stage` of `stages`, at least two, has of the channels among them, whose rank p is stage
  /// p.
  static std::vector<comm::ChannelEnd> channel_ends(int stages, int stage, int chunks_per_stage);
  /// `channels`: with these ends; must outlive this object. Does not communicate.
  StageMessages(comm::Channels& channels, int stages, int stage);

  /// Starts to send activations to the next stage or, `backward`, their gradient to the previous one, after
  /// the work already in `stream`. The data must stay untouched until the handle has been waited for.
  comm::Handle send(bool backward, comm::ConstView data, comm::StreamRef stream);
  /// Starts to receive activations from the previous stage or, `backward`, their gradient from the next one,
  /// after the work already in `stream`. Work enqueued there sees the data once the handle has been waited
  /// for; without a stream that blocks until the message is there.
  comm::Handle receive(bool backward, comm::View data, comm::StreamRef stream);

 private:
  static constexpr int activations = 0, gradients = 1;  // lanes

  int next_, previous_;  // neighboring stages
  comm::Channels& channels_;
};

}  // namespace nrl::pipeline
