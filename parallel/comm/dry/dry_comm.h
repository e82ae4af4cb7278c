#pragma once
// The group of a rank in a dry run: no other rank exists, and nothing is moved.

#include "parallel/comm/communicator.h"
#include "parallel/comm/ledger.h"

namespace nrl::comm {

/// A group with these members, of which this process is `rank`. Every operation is complete when it is issued
/// and touches no memory; `ledger`, which must outlive the communicator, counts it under `group`.
std::unique_ptr<Communicator> make_dry(std::string_view name, int rank, std::vector<int> members,
                                       Ledger& ledger, int group);

}  // namespace nrl::comm
