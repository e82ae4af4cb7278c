#pragma once
// A group of which only this rank exists, to time its work alone: groups have their true sizes, and nothing
// waits for anyone.

#include <memory>
#include <string_view>
#include <vector>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// A group with these members, of which this process is `rank`. Every operation is complete when it is
/// issued, on a device in the operation's stream:
///   all_reduce, broadcast   the data stays
///   all_gather              every block becomes a copy of the own one: counts of rows for experts, for
///                           example, are then equal to the counts of ranks that route alike
///   reduce_scatter          the own block is copied
///   all_to_all(_v)          the own block is copied
///   recv                    random normal numbers of the element type; zeros draw less power
///   exchange                messages to oneself arrive; others bring what this rank sends, in turn
std::unique_ptr<Communicator> make_mute(std::string_view name, int rank, std::vector<int> members);
/// The same for memory of `device`, which must outlive it.
std::unique_ptr<Communicator> make_mute(std::string_view name, int rank, std::vector<int> members,
                                        device::Runtime& device);

}  // namespace nrl::comm
