#include "apps/train/launch/agreed.h"

#include "core/base/log.h"

namespace nrl::train {

comm::ErrorConsensus attempt_collectively(comm::World& world, const std::function<void()>& work) {
  return comm::attempt_on_all(world.comm(), work);
}

void run_collectively(comm::World& world, const std::function<void()>& work) {
  require_agreed(world, attempt_collectively(world, work));
}

void require_agreed(comm::World& world, const comm::ErrorConsensus& consensus) {
  if (consensus.code == Exit::ok) return;
  if (world.rank() == consensus.rank) log::error_text(consensus.message);
  throw AgreedExit{consensus.code, consensus.message};
}

}  // namespace nrl::train
