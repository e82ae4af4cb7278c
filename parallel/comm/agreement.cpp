#include "parallel/comm/agreement.h"

#include <exception>
#include <vector>

#include "core/base/threads.h"

namespace nrl::comm {

ErrorConsensus agree_on_error(Communicator& all, Exit code, std::string_view message) {
  std::vector<int32_t> worst = {static_cast<int32_t>(code)};
  all.all_reduce(worst, Reduce::max);
  ErrorConsensus consensus;
  consensus.code = static_cast<Exit>(worst[0]);
  if (consensus.code == Exit::ok) return consensus;
  std::vector<int32_t> first = {code == consensus.code ? all.rank() : all.size()};
  all.all_reduce(first, Reduce::min);
  consensus.rank = first[0];
  consensus.message = message;
  all.broadcast_text(consensus.message, consensus.rank);
  return consensus;
}

ErrorConsensus attempt_on_all(Communicator& all, const std::function<void()>& work) {
  Error own(Exit::ok, "");
  try {
    work();
  } catch (const std::exception& e) {
    own = error_from(e);
  }
  return agree_on_error(all, own.code(), own.what());
}

void run_on_all(Communicator& all, const std::function<void()>& work) {
  const ErrorConsensus consensus = attempt_on_all(all, work);
  if (consensus.code != Exit::ok) throw Error(consensus.code, consensus.message);
}

}  // namespace nrl::comm
