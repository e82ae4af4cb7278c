#pragma once
// Ranks that fail together: at the end of a phase all of them have the same error, or none.

#include <functional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// The error that all ranks agree on at the end of a phase.
struct ErrorConsensus {
  Exit code = Exit::ok;  ///< the greatest code of all ranks
  int rank = -1;         ///< first rank with that code; -1: no error
  std::string message;   ///< its message
};

/// Collective, over host memory: every rank passes its code (Exit::ok without an error) and text and gets the
/// same consensus, so that all exit with the same code. For points that every rank reaches (start-up, end); a
/// rank that fails within a step must call World::abort, since its peers wait elsewhere.
ErrorConsensus agree_on_error(Communicator& all, Exit code, std::string_view message);

/// Collective: runs `work` on every rank and agrees on the outcome. A rank whose work fails goes straight to
/// the agreement, so after anything that can fail, `work` must not wait for other ranks.
ErrorConsensus attempt_on_all(Communicator& all, const std::function<void()>& work);
/// The same, and throws the consensus on all ranks if it is an error.
void run_on_all(Communicator& all, const std::function<void()>& work);

}  // namespace nrl::comm
