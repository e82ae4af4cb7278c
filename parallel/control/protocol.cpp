#include "parallel/control/protocol.h"

#include <cmath>
#include <csignal>
#include <limits>

#include <sys/wait.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/fatal_signals.h"

namespace nrl::control {

namespace {

constexpr Nanos never = std::numeric_limits<Nanos>::max();
constexpr size_t no_link = SIZE_MAX;

struct Beat {
  int64_t step = 0;
  uint64_t progress = 0;
  uint32_t nodes = 0;
  uint8_t phase = 0;
  uint8_t debugged = 0;  // upwards: within the subtree; downwards: anywhere
  uint8_t unused[2] = {};
};
// The first steps of a process are slower on some ranks than on others.
constexpr int64_t steps_before_pace = 3;

struct Bye {
  int64_t step = 0;
};

// The payload of a message; false if it is none of this type.
template <Payload T>
bool take(const Message& message, T& payload) {
  if (message.length != sizeof(T)) return false;
  std::memcpy(static_cast<void*>(&payload), message.payload.data(), sizeof(T));
  return true;
}

bool valid_rank(int rank, const Topology& topology) {
  return rank >= 0 && rank < topology.size;
}
bool valid(const Suspicion& s, const Topology& topology) {
  return s.evidence <= Evidence::secondary && s.kind <= last_kind && valid_rank(s.rank, topology) &&
         s.text.valid() && s.when >= 0;
}
bool valid(const Verdict& v, const Topology& topology) {
  const auto in_run = [&](int rank) { return valid_rank(rank, topology); };
  return v.kind <= last_kind && v.exit_code != 0 && v.rank_count >= 1 && v.rank_count <= max_named &&
         v.also_count <= max_named && v.text.valid() && std::ranges::all_of(v.culprits(), in_run) &&
         std::ranges::all_of(v.others(), in_run);
}

}  // namespace

Protocol::Protocol(const Topology& topology, const Limits& limits, PhaseName phase_name, Nanos now)
    : topology_(topology),
      limits_(limits),
      phase_name_(phase_name),
      peers_(topology.links.size()),
      next_beat_(now),
      progressed_(now) {
  for (Peer& p : peers_) p.heard = now;
  if (!has_up()) {
    answers_.resize(static_cast<size_t>(topology.size));
    scratch_.resize(static_cast<size_t>(topology.size));
  }
}

template <Payload T>
void Protocol::send(size_t link, FrameType type, const T& payload, Actions& actions) {
  if (!peers_[link].open || peers_[link].bye) return;
  Message message;
  message.type = type;
  message.length = sizeof(T);
  std::memcpy(message.payload.data(), &payload, sizeof(T));
  actions.send(link, message);
}

template <Payload T>
void Protocol::send_up(FrameType type, const T& payload, Actions& actions) {
  if (has_up()) send(0, type, payload, actions);
}

void Protocol::on_message(size_t link, const Message& message, Nanos now, Actions& actions) {
  Peer& peer = peers_[link];
  const bool from_above = topology_.links[link].up;
  peer.heard = now;
  peer.process_state = 'R';
  if (over()) return;
  switch (message.type) {
    case FrameType::beat: {
      Beat beat;
      if (!take(message, beat)) return;
      peer.step = beat.step;
      peer.phase = beat.phase;
      peer.nodes = beat.nodes;
      peer.debugged = beat.debugged != 0;
      if (from_above) debugger_above_ = peer.debugged;
      return;
    }
    case FrameType::suspect: {
      Suspicion s;
      if (!take(message, s) || !valid(s, topology_)) return;
      // From above come the last words of the parent only.
      if (from_above && (s.evidence != Evidence::process_exit || s.rank != topology_.links[link].rank))
        return;
      s.when = now - s.when;
      if (s.evidence == Evidence::hang)
        raise_hang(s, now, actions);
      else
        add(s, now, actions);
      return;
    }
    case FrameType::ask: {
      uint32_t question;
      if (!from_above || !take(message, question)) return;
      for (size_t i = 1; i < peers_.size(); ++i) send(i, FrameType::ask, question, actions);
      send(0, FrameType::answer, Answer{topology_.rank, question, sample_}, actions);
      return;
    }
    case FrameType::answer: {
      Answer answer;
      if (from_above || !take(message, answer) || !valid_rank(answer.rank, topology_) ||
          !answer.sample.wait.text.valid())
        return;
      if (!has_up())
        take_answer(answer);
      else
        send_up(FrameType::answer, answer, actions);
      return;
    }
    case FrameType::verdict: {
      Verdict verdict;
      if (take(message, verdict) && valid(verdict, topology_)) leave(verdict, link, actions);
      return;
    }
    case FrameType::pace: {
      if (from_above || message.length % sizeof(Pace) != 0) return;
      for (size_t at = 0; at < message.length; at += sizeof(Pace)) {
        Pace pace;
        std::memcpy(static_cast<void*>(&pace), message.payload.data() + at, sizeof pace);
        if (valid_rank(pace.rank, topology_) && std::isfinite(pace.seconds) &&
            std::isfinite(pace.data_seconds))
          add_pace(pace, actions);
      }
      return;
    }
    case FrameType::bye:
      peer.bye = true;
      say_bye(actions);
      return;
    default:
      return;  // of the handshake
  }
}

void Protocol::on_closed(size_t link, Closed closed, Nanos now, Actions& actions) {
  Peer& peer = peers_[link];
  if (!peer.open) return;
  peer.open = false;
  peer.closed = now;
  peer.how = closed.how;
  if (over() || peer.bye || peer.suspected) return;
  if (!topology_.links[link].local || closed.how == Closed::How::failed) {
    actions.notice(Notice::link_lost, topology_.links[link].rank);
    return;  // judge_silence() waits for a new connection
  }
  Text<128> text;
  const bool ended = closed.wait_status >= 0, killed = ended && WIFSIGNALED(closed.wait_status);
  const bool no_memory =
      closed.out_of_memory && (!ended || (killed && WTERMSIG(closed.wait_status) == SIGKILL));
  const Kind kind = killed || no_memory ? Kind::rank_killed : Kind::rank_exited;
  if (ended) {
    std::array<char, 64> buffer;
    const auto end =
        killed
            ? fmt::format_to_n(buffer.data(), buffer.size(), "by signal {} ({})",
                               WTERMSIG(closed.wait_status),
                               std::string_view(fatal_signals::name_of(WTERMSIG(closed.wait_status))))
            : fmt::format_to_n(buffer.data(), buffer.size(), "exit code {}", WEXITSTATUS(closed.wait_status));
    text.assign({buffer.data(), std::min(end.size, buffer.size())});
  }
  if (no_memory) {
    if (ended) text.append(", ");
    text.append("by the kernel, because memory ran out (oom_kill)");
  }
  suspect_peer(link, Evidence::process_exit, kind, now, text.view(), now, actions);
}

void Protocol::on_connected(size_t link, Nanos now, Actions& actions) {
  Peer& peer = peers_[link];
  if (peer.open) return;
  peer.open = true;
  peer.heard = now;
  actions.notice(Notice::link_restored, topology_.links[link].rank);
}

void Protocol::on_process_state(size_t link, char state) {
  peers_[link].process_state = state;
}

void Protocol::on_local(const StatusSample& sample, Nanos now) {
  if (sample.step > sample_.step) progressed_ = now;
  sample_ = sample;
  if (own_hang_since_ != 0) sample_.over_limit = 1;
}

void Protocol::on_failure(const Suspicion& suspicion, Nanos now, Actions& actions) {
  if (over()) return;
  Suspicion s = suspicion;
  s.rank = topology_.rank;
  s.step = sample_.step;
  s.phase = sample_.phase;
  if (s.evidence == Evidence::process_exit) {
    Suspicion sent = s;
    sent.when = std::max<Nanos>(0, now - s.when);
    for (size_t i = has_up() ? 1 : 0; i < peers_.size(); ++i) send(i, FrameType::suspect, sent, actions);
  }
  if (s.evidence != Evidence::hang) return add(s, now, actions);
  own_hang_ = s;
  own_hang_since_ = now;
  sample_.over_limit = 1;
  raised_ = now;
  raise_hang(s, now, actions);
}

void Protocol::on_finish(Nanos now, Actions& actions) {
  finishing_ = now;
  say_bye(actions);
}

void Protocol::say_bye(Actions& actions) {
  if (finishing_ == 0 || over() || evidence_count_ > 0) return;
  for (size_t i = 0; i < peers_.size(); ++i)
    if (!topology_.links[i].up && !peers_[i].bye) return;
  send_up(FrameType::bye, Bye{sample_.step}, actions);
  gone_ = true;
}

// After a reset the child may notice only when it sends its next beat.
Nanos Protocol::grace_of(const Peer& peer) const {
  return limits_.grace + (peer.how == Closed::How::reset ? limits_.beat : 0);
}

// Puts a suspicion of a neighbor together from its last beat. Every step ends with an operation of all ranks,
// so the neighbor has come as far as this rank, whatever its last beat said.
void Protocol::suspect_peer(size_t link, Evidence evidence, Kind kind, Nanos when, std::string_view text,
                            Nanos now, Actions& actions) {
  Peer& peer = peers_[link];
  peer.suspected = true;
  Suspicion s;
  s.evidence = evidence;
  s.kind = kind;
  s.rank = topology_.links[link].rank;
  s.step = std::max(peer.step, sample_.step);
  s.phase = peer.phase;
  s.when = when;
  s.text.assign(text);
  add(s, now, actions);
}

void Protocol::judge_silence(size_t link, Nanos now, Actions& actions) {
  Peer& peer = peers_[link];
  if (peer.bye || peer.suspected) return;
  const bool local = topology_.links[link].local;
  const bool stopped = local && (peer.process_state == 'T' || peer.process_state == 'Z');
  const Nanos timeout = local ? limits_.heartbeat : limits_.network;
  const bool ended = !peer.open && peer.how != Closed::How::failed;
  Nanos limit = std::max(timeout, sample_.median_step + sample_.median_step / 2);
  Nanos since = std::max(peer.heard, progressed_);  // a completed step proves every rank alive
  if (stopped) {
    limit = timeout;
    since = peer.heard;
  } else if (ended) {
    limit = grace_of(peer);
    since = std::max(peer.closed, progressed_);
  }
  if (now - since < limit) return;
  std::array<char, 160> buffer;
  fmt::format_to_n_result<char*> end;
  Evidence evidence = local ? Evidence::rank_silent : Evidence::node_silent;
  Kind kind = local ? Kind::rank_stopped : Kind::node_lost;
  if (ended) {
    evidence = Evidence::process_exit;
    kind = Kind::rank_exited;
    end = fmt::format_to_n(buffer.data(), buffer.size(), "its link was closed and not connected again");
  } else if (stopped) {
    end = fmt::format_to_n(buffer.data(), buffer.size(), "no heartbeat for {:.1f} s, process state {}",
                           in_seconds(now - peer.heard),
                           peer.process_state == 'T' ? "T (stopped)" : "Z (zombie)");
  } else {
    end = fmt::format_to_n(
        buffer.data(), buffer.size(), "no {} for {:.1f} s, no step completed{}",
        local ? "heartbeat" : "control traffic", in_seconds(now - peer.heard),
        peer.process_state == 'D' ? ", process state D (waits for a device or a file system)" : "");
  }
  suspect_peer(link, evidence, kind, since, {buffer.data(), std::min(end.size, buffer.size())}, now, actions);
}

void Protocol::add(const Suspicion& s, Nanos now, Actions& actions) {
  if (over()) return;
  for (const Suspicion& known : evidence())
    if (known.rank == s.rank && known.evidence == s.evidence) return;
  if (evidence_count_ < evidence_.size()) {
    evidence_[evidence_count_++] = s;
  } else {
    Suspicion& weakest =
        *std::max_element(evidence_.begin(), evidence_.end(), [](const auto& a, const auto& b) {
          return std::pair(a.evidence, a.when) < std::pair(b.evidence, b.when);
        });
    if (s.evidence >= weakest.evidence) return;
    weakest = s;
  }
  if (first_evidence_ == 0) first_evidence_ = now;
  if (first_strong_ == 0 && s.evidence != Evidence::secondary) first_strong_ = now;
  Suspicion sent = s;
  sent.when = std::max<Nanos>(0, now - s.when);
  send_up(FrameType::suspect, sent, actions);
}

void Protocol::raise_hang(const Suspicion& s, Nanos now, Actions& actions) {
  if (!has_up()) return ask(now, actions);
  Suspicion sent = s;
  sent.when = std::max<Nanos>(0, now - s.when);
  send_up(FrameType::suspect, sent, actions);
}

void Protocol::ask(Nanos now, Actions& actions) {
  if (asked_ != 0 || now < ask_after_ || evidence_count_ > 0) return;
  asked_ = now;
  ++question_;
  missing_answers_ = answers_.size();
  for (Answer& a : answers_) a.rank = -1;
  for (size_t i = 0; i < peers_.size(); ++i) send(i, FrameType::ask, question_, actions);
  take_answer({topology_.rank, question_, sample_});
}

void Protocol::take_answer(const Answer& answer) {
  Answer& slot = answers_[static_cast<size_t>(answer.rank)];
  if (asked_ == 0 || answer.question != question_ || slot.rank >= 0) return;
  slot = answer;
  --missing_answers_;
}

void Protocol::judge_answers(Nanos now, Actions& actions) {
  asked_ = 0;
  ask_after_ = now + limits_.ask_again;
  const std::optional<Verdict> verdict = judge_hang(answers_, scratch_, topology_, phase_name_);
  if (!verdict) return;
  Suspicion s;
  s.evidence = Evidence::hang;
  s.kind = verdict->kind;
  s.rank = verdict->ranks[0];
  s.step = verdict->step;
  s.phase = verdict->phase;
  s.when = now;
  s.text.assign(verdict->text.view());
  add(s, now, actions);
  leave(*verdict, no_link, actions);
}

void Protocol::leave(const Verdict& verdict, size_t from, Actions& actions) {
  for (size_t i = 0; i < peers_.size(); ++i)
    if (i != from) send(i, FrameType::verdict, verdict, actions);
  left_ = true;
  actions.leave(verdict);
}

uint32_t Protocol::heard_nodes(Nanos now) const {
  const Nanos fresh = limits_.network / 2 / topology_.depth;
  uint32_t nodes = topology_.leader() ? 1 : 0;
  for (size_t i = 0; i < peers_.size(); ++i)
    if (!topology_.links[i].up && peers_[i].open && now - peers_[i].heard <= fresh) nodes += peers_[i].nodes;
  return nodes;
}

void Protocol::send_beats(Nanos now, Actions& actions) {
  bool debugged = false;
  for (size_t i = 0; i < peers_.size(); ++i)
    debugged |= peers_[i].process_state == 't' || (!topology_.links[i].up && peers_[i].debugged);
  const bool anywhere = debugged || debugger_above_;
  if (anywhere && !debugged_) actions.notice(Notice::debugger, topology_.rank);
  debugged_ = anywhere;
  Beat beat{sample_.step, sample_.progress, heard_nodes(now), sample_.phase, debugged, {}};
  if (has_up()) send(0, FrameType::beat, beat, actions);
  beat.debugged = anywhere;
  for (size_t i = has_up() ? 1 : 0; i < peers_.size(); ++i) send(i, FrameType::beat, beat, actions);
}

void Protocol::measure_pace(Nanos now, Actions& actions) {
  if (limits_.pace == 0 || sample_.step <= steps_before_pace) return;
  const int64_t steps = sample_.step - pace_sample_.step;
  if (pace_since_ != 0) {
    if (now - pace_since_ < limits_.pace || steps == 0) return;
    const auto mean = [&](Nanos time, Nanos before) {
      return static_cast<float>(in_seconds(time - before) / static_cast<double>(steps));
    };
    // A rollback counts its steps again.
    if (steps > 0)
      add_pace({topology_.rank, mean(sample_.own, pace_sample_.own),
                mean(sample_.own_data, pace_sample_.own_data)},
               actions);
  }
  pace_since_ = now;
  pace_sample_ = sample_;
}

void Protocol::add_pace(const Pace& pace, Actions& actions) {
  if (!has_up()) return actions.pace(pace);
  if (pace_count_ == paces_.size()) send_paces(actions);
  paces_[pace_count_++] = pace;
}

void Protocol::send_paces(Actions& actions) {
  if (pace_count_ == 0) return;
  Message message;
  message.type = FrameType::pace;
  message.length = static_cast<uint16_t>(pace_count_ * sizeof(Pace));
  std::memcpy(message.payload.data(), paces_.data(), message.length);
  if (peers_[0].open && !peers_[0].bye) actions.send(0, message);
  pace_count_ = 0;
}

void Protocol::on_tick(Nanos now, Nanos gap, Actions& actions) {
  if (over()) return;
  if (gap > limits_.own_pause) {
    for (Peer& p : peers_) {
      p.heard = std::min(now, p.heard + gap);
      p.closed = std::min(now, p.closed + gap);
    }
    progressed_ = std::min(now, progressed_ + gap);
    for (Nanos* t : {&first_evidence_, &first_strong_, &asked_, &finishing_, &own_hang_since_})
      if (*t != 0) *t = std::min(now, *t + gap);
  }
  if (now >= next_beat_) {
    send_beats(now, actions);
    measure_pace(now, actions);
    send_paces(actions);
    next_beat_ = std::max(next_beat_ + limits_.beat, now + limits_.beat / 2);
  }
  if (debugged_)
    for (Peer& p : peers_) p.heard = p.closed = now;
  for (size_t i = 0; i < peers_.size() && !over(); ++i) judge_silence(i, now, actions);
  if (sample_.over_limit && !debugged_ && now - raised_ >= limits_.ask_again) {
    raised_ = now;
    Suspicion hang;
    hang.evidence = Evidence::hang;
    hang.kind = Kind::rank_hung;
    hang.rank = topology_.rank;
    hang.when = now;
    raise_hang(hang, now, actions);
  }
  // No rank was named, or there is no answer from above.
  if (own_hang_since_ != 0 && now - own_hang_since_ >= 2 * limits_.ask_again) add(own_hang_, now, actions);
  if (finishing_ != 0 && now - finishing_ >= limits_.finish && evidence_count_ == 0)
    for (size_t i = 0; i < peers_.size() && evidence_count_ == 0; ++i)
      if (!topology_.links[i].up && !peers_[i].bye)
        suspect_peer(i, Evidence::rank_silent, Kind::rank_hung, now, "it did not finish with the others", now,
                     actions);
  if (asked_ != 0 && (missing_answers_ == 0 || now - asked_ >= limits_.answer)) judge_answers(now, actions);
  if (!over() && now >= decides_at())
    leave(decide(evidence(), topology_, sample_, phase_name_, now), no_link, actions);
}

Nanos Protocol::decides_at() const {
  if (evidence_count_ == 0) return never;
  if (topology_.size == 1) return first_evidence_;
  // Libraries of the launcher end the process soon, and nothing explains more than its end.
  const bool no_launcher =
      std::ranges::any_of(evidence(), [](const Suspicion& s) { return s.kind == Kind::launcher_lost; });
  if (no_launcher && alone()) return first_evidence_;
  const Nanos at =
      first_strong_ != 0 ? first_strong_ + limits_.window : first_evidence_ + limits_.secondary_window;
  return alone() ? at : std::max(at, first_evidence_ + limits_.window) + limits_.escalate;
}

Nanos Protocol::deadline() const {
  if (over()) return never;
  Nanos at = std::min(next_beat_, decides_at());
  if (asked_ != 0) at = missing_answers_ == 0 ? asked_ : std::min(at, asked_ + limits_.answer);
  for (const Peer& p : peers_)
    if (!p.open && !p.bye && !p.suspected && p.how != Closed::How::failed)
      at = std::min(at, std::max(p.closed, progressed_) + grace_of(p));
  return at;
}

State Protocol::state() const {
  return left_                 ? State::leaving
         : gone_               ? State::gone
         : evidence_count_ > 0 ? State::suspecting
         : asked_ != 0         ? State::asking
         : finishing_ != 0     ? State::finishing
                               : State::running;
}

bool Protocol::has_lease(Nanos now) const {
  return topology_.root() && !left_ && evidence_count_ == 0 &&
         2 * static_cast<int64_t>(heard_nodes(now)) > topology_.nodes;
}

Nanos Protocol::silence(size_t link, Nanos now) const {
  const Peer& peer = peers_[link];
  return peer.bye || !peer.open ? 0 : now - peer.heard;
}

}  // namespace nrl::control
