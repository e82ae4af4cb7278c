#pragma once
// Finds the rank that a run which hangs, or ended, waited for, from the flight files of its ranks.

#include <cstdint>
#include <string>
#include <vector>

#include "core/io/json.h"
#include "parallel/comm/flight.h"

namespace nrl::diagnosis {

/// A process, as its host sees it.
enum class Life : uint8_t {
  unknown,  ///< of another host
  alive,
  stopped,  ///< by a signal, or by a debugger
  ended,    ///< without having removed its flight file
};

/// One rank: its flight file, and its process.
struct Rank {
  comm::Flight flight;
  Life life = Life::unknown;
  int64_t now_ns = 0;  ///< steady clock of its host, to which waits in progress have lasted; 0: unknown
};

enum class Cause : uint8_t {
  none,   ///< the records name no rank
  ended,  ///< the process of a rank is gone; the others wait for it, or it died of an error of its own
  stopped,
  mismatch,  ///< ranks of a group called different operations
  late,      ///< the others wait for an operation that a rank has not begun
  lost,      ///< the others did when all processes ended: the rank hung, or ended first
};
/// "rank_ended", "rank_stopped", "mismatch", "rank_hung", "rank_lost", "none".
std::string_view name_of(Cause cause);

/// Ranks that one operation waits for.
struct Missing {
  comm::LogGroup group;
  comm::LogEntry entry;                         ///< as a waiting rank issued it
  std::vector<int> waiting = {}, missing = {};  ///< ranks of the world
  double seconds = 0;                           ///< the longest wait
};

struct Diagnosis {
  Cause cause = Cause::none;
  std::vector<int> culprits;  ///< ranks; mismatch: the smaller party
  std::vector<Missing> missing;
  std::vector<std::string> mismatches;  ///< a line each
  std::vector<std::string> unheard;     ///< ranks without a flight file, and what is known of them
};

/// `ranks`: of one attempt, by rank, each at most once. Pure.
Diagnosis diagnose(const std::vector<Rank>& ranks);

/// For people: the cause, the operations that wait, and a line for each rank.
std::string text_of(const Diagnosis& diagnosis, const std::vector<Rank>& ranks);
JsonValue json_of(const Diagnosis& diagnosis, const std::vector<Rank>& ranks);

/// "all_reduce #51 of dp[0,1] (f32, 4.0 MiB)"
std::string describe(const comm::LogGroup& group, const comm::LogEntry& entry);

}  // namespace nrl::diagnosis
