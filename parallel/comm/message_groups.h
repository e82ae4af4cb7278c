#pragma once
// Division of an exchange into grouped NCCL calls that cannot deadlock.
//
// NCCL runs the messages of a group by kernels whose arguments hold (4096 - 32) / 16 = 254 batches. Beyond
// that it starts another kernel, cut where the rank's own queue is full. Up to NCCL 2.29.3 such a kernel
// begins again with the first peer, so that ranks whose messages differ in size order them differently:
// kernel k of one rank can wait for kernel k + 1 of another, and neither finishes.
//
// A group is safe if it fits into one kernel on every rank, or if it has at most one message per pair of
// ranks and direction: then all kernels go through the peers in one order. A batch holds messages of up to
// eight peers on one channel, so that n messages per pair need at most 32 n ceil(ranks / 8) batches.

#include <vector>

#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// Batches that the arguments of one NCCL kernel hold.
inline constexpr int nccl_batches = (4096 - 32) / 16;
/// Channels that NCCL uses for messages, at most, unless NCCL_MIN_P2P_NCHANNELS asks for more.
inline constexpr int nccl_message_channels = 32;

/// The most messages from one rank to another in a group, at least 1. The same on all ranks.
int messages_per_pair(int ranks);

/// The messages of an exchange of `ranks` ranks, in groups to be run in this order; messages of 0 bytes are
/// dropped. Message k from one rank to another, counted by tag and then in the order given, is in group
/// k / messages_per_pair. Both ends count alike, so all ranks cut at the same messages.
std::vector<std::vector<Message>> message_groups(std::vector<Message> messages, int ranks);

}  // namespace nrl::comm
