#pragma once
// Traces for ui.perfetto.dev, in its protobuf: https://perfetto.dev/docs/reference/trace-packet-proto.
// A process per rank; in it the threads, the streams of the device, one lane per concurrent operation of each
// group of ranks, and the live memory by category. Operations have their FLOPs, bytes and the fraction of
// attainable speed as arguments. Arrows lead from sends to receives, and from the rank that arrived last in a
// collective to its end on the others.
//
// Times are nanoseconds of the steady clock and are not relative to an origin; identifiers contain the rank.
// So files of ranks, one after another, are a valid trace. Packets are compressed by deflate.

#include <cstdint>
#include <span>
#include <string>

#include "apps/profile/recorded.h"

namespace nrl::profile {

/// Writes the trace of a rank, atomically. Fails with Exit::cannot_create or Exit::io.
void write_trace(const std::string& path, const Recorded& recorded);

/// Larger traces do not load in a browser.
inline constexpr uint64_t most_trace_bytes = uint64_t{256} << 20;

/// Joins the traces of ranks, which must exist, into one, atomically and without holding them in memory.
/// Stops before the first one with which it would exceed `most_bytes`. Returns how many traces it holds.
size_t join_traces(const std::string& path, std::span<const std::string> traces,
                   uint64_t most_bytes = most_trace_bytes);

}  // namespace nrl::profile
