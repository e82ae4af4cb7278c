#pragma once
// Evidence of a failure and the verdict that follows from it. All structs are sent between ranks as they lie
// in memory: no pointers, no padding.

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "parallel/control/frame.h"
#include "parallel/control/topology.h"

namespace nrl::control {

/// In order of priority: the strongest class decides.
enum class Evidence : uint8_t {
  error,         ///< a rank reports its own failure
  process_exit,  ///< a process ended without a word
  node_silent,
  rank_silent,
  hang,       ///< a limit passed; all ranks answer which one the others wait for
  secondary,  ///< a consequence of another rank's failure, such as a lost MPI peer
};

enum class Kind : uint8_t {
  error,
  rank_exited,
  rank_killed,
  rank_stopped,
  rank_hung,
  mismatch,
  network,
  node_lost,
  gpu,
  launcher_lost,
  silent_corruption,
  start_timeout,
};
inline constexpr Kind last_kind = Kind::start_timeout;

/// "rank_exited".
std::string_view name_of(Kind kind);
std::string_view name_of(Evidence evidence);
/// "Fix: ..." of a kind; empty for Kind::error, whose text has its own.
std::string_view remedy_of(Kind kind);

/// Text of bounded length without allocation; cut at a character boundary.
template <size_t N>
struct Text {
  uint16_t length = 0;
  char data[N] = {};

  Text() = default;
  explicit Text(std::string_view text) { assign(text); }
  void assign(std::string_view text) { length = 0, append(text); }
  void append(std::string_view text) {
    size_t n = std::min(text.size(), N - length);
    if (n < text.size())
      while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
    std::memcpy(data + length, text.data(), n);
    length = static_cast<uint16_t>(length + n);
  }
  std::string_view view() const { return {data, length}; }
  bool valid() const { return length <= N; }
};

/// The collective or message that a rank waits for.
struct Wait {
  uint64_t group = 0;     ///< the same number on all members
  uint64_t sequence = 0;  ///< of the call within the group
  uint64_t bytes = 0;
  Nanos waiting = 0;       ///< time since it began
  uint32_t ranks = 0;      ///< members of the group; 0: the rank does not wait
  uint32_t operation = 0;  ///< code of operation and type: members that differ called different things
  Text<62> text;           ///< "all_reduce of dp[0,1]"

  bool active() const { return ranks > 0; }
};

/// The present activity of a rank. The control thread asks for it at least once a second.
struct StatusSample {
  /// The step that runs, counted from 1; 0 before the first. It increases only when the rank has completed a
  /// step, which needs every rank: that is proof of life of all of them.
  int64_t step = 0;
  uint64_t progress = 0;   ///< increases whenever the main thread gets on
  Nanos in_phase = 0;      ///< time since the phase began
  Nanos median_step = 0;   ///< 0 if unknown
  Nanos own = 0;           ///< work of the rank in all steps so far, without waits for other ranks
  Nanos own_data = 0;      ///< the part of it that read data
  uint8_t phase = 0;       ///< Options::phase_name names it
  uint8_t over_limit = 0;  ///< the phase or a wait lasts longer than the watchdog allows
  uint8_t unused[6] = {};
  Wait wait;
};

/// One piece of evidence.
struct Suspicion {
  Evidence evidence = Evidence::error;
  Kind kind = Kind::error;
  uint8_t phase = 0;
  uint8_t exit_code = 80;
  int32_t rank = 0;  ///< the suspected one; of a node, its leader
  int64_t step = 0;
  Nanos when = 0;  ///< local time of the event; its age in a frame
  Text<398> text;  ///< what was observed, or the whole message of an error
};

inline constexpr size_t max_named = 16;

/// The reason for which all ranks leave.
struct Verdict {
  Kind kind = Kind::error;
  uint8_t exit_code = 80;
  uint8_t phase = 0;
  uint8_t rank_count = 0, also_count = 0;
  uint8_t unused[3] = {};
  int32_t node = 0;    ///< of the first rank
  int32_t issuer = 0;  ///< rank that decided
  int64_t step = 0;
  std::array<int32_t, max_named> ranks{};        ///< the culprits
  std::array<int32_t, max_named> also_failed{};  ///< suspected of weaker or later evidence
  Text<798> text;                                ///< the whole sentence, without a remedy and the exit code

  std::span<const int32_t> culprits() const { return {ranks.data(), rank_count}; }
  std::span<const int32_t> others() const { return {also_failed.data(), also_count}; }
};

/// The answer of a rank to the question of a hang.
struct Answer {
  int32_t rank = -1;
  uint32_t question = 0;
  StatusSample sample;
};

/// Own work of a rank in a step: mean over the steps of some seconds.
struct Pace {
  int32_t rank = 0;
  float seconds = 0;       ///< without waits for other ranks
  float data_seconds = 0;  ///< the part of it that read data
};

/// An event that ends nothing.
enum class Notice : uint8_t { link_lost, link_restored, debugger };

template <class T>
concept Payload = std::is_trivially_copyable_v<T> && sizeof(T) <= max_payload;

using PhaseName = std::string_view (*)(uint8_t phase);

/// The strongest class decides, within it the earliest; the others are listed. `evidence` must not be empty.
/// `own`: the sample of the deciding rank, whose wait is added to the text.
Verdict decide(std::span<const Suspicion> evidence, const Topology& topology, const StatusSample& own,
               PhaseName phase_name, Nanos now);

/// Names the ranks that everyone waits for. A rank that does not wait and is over its limit is a culprit; one
/// within its limit (an evaluation) excuses all: nullopt. Members that called different things, or wait in a
/// circle, are a mismatch; a call that all members have entered and none leaves is the network. `answers[r]`
/// is of rank r, or missing (rank < 0); `scratch` has room for as many numbers.
std::optional<Verdict> judge_hang(std::span<const Answer> answers, std::span<int> scratch,
                                  const Topology& topology, PhaseName phase_name);

}  // namespace nrl::control
