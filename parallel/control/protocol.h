#pragma once
// The control plane's state machine: no socket, no thread, no clock, and no allocation after construction.
// The same calls lead to the same actions, which is why a simulator can run thousands of them
// (tests/control/simulator.h).

#include <span>
#include <vector>

#include "parallel/control/topology.h"
#include "parallel/control/verdict.h"

namespace nrl::control {

constexpr Nanos operator""_s(unsigned long long seconds) {
  return static_cast<Nanos>(seconds) * 1'000'000'000;
}
constexpr Nanos operator""_ms(unsigned long long ms) {
  return static_cast<Nanos>(ms) * 1'000'000;
}

enum class State : uint8_t { running, suspecting, asking, finishing, leaving, gone };

struct Limits {
  Nanos beat = 1_s;
  Nanos heartbeat = 10_s;  ///< silence of a process of the node
  Nanos network = 30_s;    ///< silence of another node
  Nanos grace = 500_ms;    ///< for a closed link to another node to be restored; a beat more after a reset
  Nanos window = 100_ms;   ///< for stronger evidence; Open MPI 5 kills all ranks 0.3 s after a death
  Nanos secondary_window = 1_s;
  Nanos answer = 2_s;     ///< for the answers to a question
  Nanos ask_again = 5_s;  ///< after a question that named no rank
  Nanos escalate = 3_s;   ///< without a verdict from above, decide for the own subtree
  Nanos own_pause = 2_s;  ///< a longer gap between two ticks moves all deadlines
  Nanos finish = 120_s;   ///< for the children's BYE
  Nanos pace = 0;         ///< time of steps over which Pace is a mean; 0: it is not sent
};

/// The end of a link.
struct Closed {
  /// Closed by the peer's system, as when its process ends; reset, which a router can do too; a refused frame
  /// or a lost network.
  enum class How : uint8_t { ended, reset, failed } how = How::ended;
  int wait_status = -1;        ///< as of waitpid(2), if known
  bool out_of_memory = false;  ///< the kernel killed a process for memory at that time
};

/// Receives what must be done. Calls come from inside its functions and must not call back.
class Actions {
 public:
  virtual ~Actions() = default;
  virtual void send(size_t link, const Message& message) = 0;
  /// The verdict has been sent on; nothing follows.
  virtual void leave(const Verdict& verdict) = 0;
  virtual void notice(Notice notice, int rank) = 0;
  /// To the root: the pace of a rank, once in Limits::pace.
  virtual void pace(const Pace& /*pace*/) {}
};

/// One process. `now` is its monotonic clock; links are indices of Topology::links.
class Protocol {
 public:
  Protocol(const Topology& topology, const Limits& limits, PhaseName phase_name, Nanos now);

  void on_message(size_t link, const Message& message, Nanos now, Actions& actions);
  void on_closed(size_t link, Closed closed, Nanos now, Actions& actions);
  void on_connected(size_t link, Nanos now, Actions& actions);  ///< again, after on_closed
  /// State letter of /proc of a silent process of this node: T and Z need no further proof, t (a debugger)
  /// suspends all limits of the run.
  void on_process_state(size_t link, char state);
  /// Must precede on_message and on_tick of the same time, so that answers are fresh.
  void on_local(const StatusSample& sample, Nanos now);
  /// A failure of this rank: `suspicion.when` and, of an error, kind, exit code and text. Of class hang: the
  /// question is asked. Of class process_exit: the last words of a process that is about to end.
  void on_failure(const Suspicion& suspicion, Nanos now, Actions& actions);
  /// This rank is done; its BYE is sent once its children's have come.
  void on_finish(Nanos now, Actions& actions);
  /// Call at deadline(), after all messages that have arrived. `gap`: time since this process last ran.
  void on_tick(Nanos now, Nanos gap, Actions& actions);

  Nanos deadline() const;
  State state() const;
  /// A majority of the nodes was heard within half of the network timeout, and there is no evidence of a
  /// failure. Only of rank 0.
  bool has_lease(Nanos now) const;
  std::span<const Suspicion> evidence() const { return {evidence_.data(), evidence_count_}; }
  bool said_bye(size_t link) const { return peers_[link].bye; }
  /// Time since the peer of a link was heard; 0 after its BYE.
  Nanos silence(size_t link, Nanos now) const;

 private:
  struct Peer {
    Nanos heard = 0;   // or connected
    Nanos closed = 0;  // if `open` is false
    int64_t step = 0;
    uint32_t nodes = 0;  // of its subtree that it has heard
    uint8_t phase = 0;
    bool open = true, bye = false, suspected = false, debugged = false;
    Closed::How how = Closed::How::ended;
    char process_state = 'R';
  };

  bool has_up() const { return !peers_.empty() && topology_.links[0].up; }
  bool alone() const { return !has_up() || !peers_[0].open || peers_[0].suspected; }
  bool over() const { return left_ || gone_; }
  void judge_silence(size_t link, Nanos now, Actions& actions);
  void suspect_peer(size_t link, Evidence evidence, Kind kind, Nanos when, std::string_view text, Nanos now,
                    Actions& actions);
  void add(const Suspicion& suspicion, Nanos now, Actions& actions);
  void raise_hang(const Suspicion& suspicion, Nanos now, Actions& actions);
  void ask(Nanos now, Actions& actions);
  void take_answer(const Answer& answer);
  void judge_answers(Nanos now, Actions& actions);
  void leave(const Verdict& verdict, size_t from, Actions& actions);
  void send_beats(Nanos now, Actions& actions);
  void measure_pace(Nanos now, Actions& actions);
  void add_pace(const Pace& pace, Actions& actions);
  void send_paces(Actions& actions);
  void say_bye(Actions& actions);
  uint32_t heard_nodes(Nanos now) const;
  Nanos grace_of(const Peer& peer) const;
  Nanos decides_at() const;
  template <Payload T>
  void send(size_t link, FrameType type, const T& payload, Actions& actions);
  template <Payload T>
  void send_up(FrameType type, const T& payload, Actions& actions);

  Topology topology_;
  Limits limits_;
  PhaseName phase_name_;
  std::vector<Peer> peers_;
  StatusSample sample_;
  Nanos next_beat_, progressed_;  // when the own step last increased
  bool debugged_ = false, debugger_above_ = false;

  std::array<Suspicion, max_named> evidence_;
  size_t evidence_count_ = 0;
  Nanos first_evidence_ = 0, first_strong_ = 0;  // 0: none

  Suspicion own_hang_;  // a hang that this rank reported of itself
  Nanos own_hang_since_ = 0, raised_ = 0;
  uint32_t question_ = 0;
  Nanos asked_ = 0, ask_after_ = 0;  // of the root: asked_ is 0 unless it waits for answers
  std::vector<Answer> answers_;      // of the root
  std::vector<int> scratch_;
  size_t missing_answers_ = 0;

  // Collected from this rank and its children until the next beat.
  static constexpr size_t most_paces = max_payload / sizeof(Pace);
  std::array<Pace, most_paces> paces_;
  size_t pace_count_ = 0;
  Nanos pace_since_ = 0;  // 0: not before some steps are done
  StatusSample pace_sample_;

  Nanos finishing_ = 0;
  bool left_ = false, gone_ = false;
};

}  // namespace nrl::control
