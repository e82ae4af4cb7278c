#include "parallel/pipeline/messages.h"

#include <vector>

#include "core/base/error.h"

namespace nrl::pipeline {

namespace {

using comm::Direction;

/// With one chunk per stage nothing leads from the last stage to the first.
std::vector<comm::ChannelEnd> ends(const comm::Communicator& stages, int chunks, int activations,
                                   int gradients) {
  const int count = stages.size(), stage = stages.rank();
  std::vector<comm::ChannelEnd> out;
  if (chunks > 1 || stage + 1 < count) {
    const int next = (stage + 1) % count;
    out.push_back({next, Direction::send, activations});
    out.push_back({next, Direction::receive, gradients});
  }
  if (chunks > 1 || stage > 0) {
    const int previous = (stage + count - 1) % count;
    out.push_back({previous, Direction::receive, activations});
    out.push_back({previous, Direction::send, gradients});
  }
  return out;
}

}  // namespace

StageMessages::StageMessages(comm::Communicator& stages, int chunks_per_stage)
    : next_((stages.rank() + 1) % stages.size()),
      previous_((stages.rank() + stages.size() - 1) % stages.size()),
      channels_(stages, ends(stages, chunks_per_stage, activations, gradients)) {}

comm::Handle StageMessages::send(ActionKind send, comm::ConstView data, comm::StreamRef stream) {
  NRL_CHECK(send == ActionKind::send_forward || send == ActionKind::send_backward);
  comm::Channel& to = send == ActionKind::send_forward ? channels_.to(next_, activations)
                                                       : channels_.to(previous_, gradients);
  return to.send_async(data, stream);
}

comm::Handle StageMessages::receive(ActionKind receive, comm::View data, comm::StreamRef stream) {
  NRL_CHECK(receive == ActionKind::receive_forward || receive == ActionKind::receive_backward);
  comm::Channel& from = receive == ActionKind::receive_forward ? channels_.from(previous_, activations)
                                                               : channels_.from(next_, gradients);
  return from.receive_async(data, stream);
}

}  // namespace nrl::pipeline
