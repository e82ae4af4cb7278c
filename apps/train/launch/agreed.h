#pragma once
// Errors that all ranks agree on: one message, one exit code.

#include <functional>
#include <optional>
#include <string>

#include "core/base/error.h"
#include "parallel/comm/agreement.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// Thrown on all ranks with the same exit code, after one rank has printed the message.
struct AgreedExit {
  Exit code;
  std::string text = {};         ///< the message
  std::optional<int> rank = {};  ///< the rank to which it happened; unset: to all
};

/// Collective: runs `work` on every rank and agrees on the outcome (comm::attempt_on_all()). `work` must not
/// communicate.
comm::ErrorConsensus attempt_collectively(comm::World& world, const std::function<void()>& work);

/// Returns if the ranks agreed on no error; else one rank prints the message and all throw AgreedExit.
void require_agreed(comm::World& world, const comm::ErrorConsensus& consensus);

/// Collective: runs `work` on every rank. If it fails on any rank, one message is printed and all ranks throw
/// AgreedExit with the same code. `work` must not communicate.
void run_collectively(comm::World& world, const std::function<void()>& work);

}  // namespace nrl::train
