#include "parallel/pipeline/messages.h"

#include <vector>

#include "parallel/comm/ledger.h"

namespace nrl::pipeline {

using comm::Direction;

std::vector<comm::ChannelEnd> StageMessages::channel_ends(int stages, int stage, int chunks_per_stage) {
  const int next = (stage + 1) % stages, previous = (stage + stages - 1) % stages;
  std::vector<comm::ChannelEnd> out;
  // With one chunk per stage nothing leads from the last stage to the first.
  if (chunks_per_stage > 1 || stage + 1 < stages) {
    out.push_back({next, Direction::send, activations});
    out.push_back({next, Direction::receive, gradients});
  }
  if (chunks_per_stage > 1 || stage > 0) {
    out.push_back({previous, Direction::receive, activations});
    out.push_back({previous, Direction::send, gradients});
  }
  return out;
}

StageMessages::StageMessages(comm::Channels& channels, int stages, int stage)
    : next_((stage + 1) % stages), previous_((stage + stages - 1) % stages), channels_(channels) {}

comm::Handle StageMessages::send(bool backward, comm::ConstView data, comm::StreamRef stream) {
  comm::Channel& to = backward ? channels_.to(previous_, gradients) : channels_.to(next_, activations);
  const comm::PurposeScope purpose(comm::Purpose::messages);
  return to.send_async(data, stream);
}

comm::Handle StageMessages::receive(bool backward, comm::View data, comm::StreamRef stream) {
  comm::Channel& from = backward ? channels_.from(next_, gradients) : channels_.from(previous_, activations);
  const comm::PurposeScope purpose(comm::Purpose::messages);
  return from.receive_async(data, stream);
}

}  // namespace nrl::pipeline
