#include "parallel/control/verdict.h"

#include <iterator>
#include <ranges>
#include <tuple>
#include <utility>

#include <spdlog/fmt/fmt.h>

namespace nrl::control {

namespace {

static_assert(Payload<Suspicion> && sizeof(Suspicion) == 424);
static_assert(Payload<Verdict> && sizeof(Verdict) == 952);
static_assert(Payload<Answer> && sizeof(Answer) == 168);

constexpr std::string_view kind_names[] = {
    "error",   "rank_exited", "rank_killed", "rank_stopped",  "rank_hung",         "mismatch",
    "network", "node_lost",   "gpu",         "launcher_lost", "silent_corruption", "start_timeout"};
static_assert(std::size(kind_names) == static_cast<size_t>(last_kind) + 1);
constexpr std::string_view evidence_names[] = {"error",       "process_exit", "node_silent",
                                               "rank_silent", "hang",         "secondary"};

constexpr uint8_t exit_peer_lost = 80, exit_wrong_result = 81;

template <size_t N, class... Args>
void append(Text<N>& text, fmt::format_string<Args...> format, Args&&... args) {
  std::array<char, N> buffer;
  const auto end = fmt::format_to_n(buffer.data(), buffer.size(), format, std::forward<Args>(args)...);
  text.append({buffer.data(), std::min(end.size, buffer.size())});
}

// "rank 3" or "ranks 0-2, 5": the ranks below `size` that `contains` accepts, at most eight ranges.
template <class Contains>
void append_ranks(Text<798>& text, int size, const Contains& contains) {
  const int count = static_cast<int>(std::ranges::count_if(std::views::iota(0, size), contains));
  text.append(count == 1 ? "rank " : "ranks ");
  int ranges = 0, shown = 0;
  for (int first = 0; first < size; ++first) {
    if (!contains(first)) continue;
    int end = first + 1;
    while (end < size && contains(end)) ++end;
    if (++ranges > 8) return append(text, " and {} more", count - shown);
    append(text, "{}{}", ranges > 1 ? ", " : "", first);
    if (end - first > 1) append(text, "-{}", end - 1);
    shown += end - first;
    first = end;
  }
}

void append_position(Text<798>& text, int64_t step, uint8_t phase, PhaseName phase_name) {
  if (step > 0) append(text, " at step {}", step);
  append(text, " in {}", phase_name(phase));
}

void add_culprit(Verdict& v, int rank, const Topology& topology) {
  if (v.rank_count == 0) v.node = topology.node_of_rank(rank), v.issuer = topology.rank;
  if (v.rank_count < max_named) v.ranks[v.rank_count++] = rank;
}

}  // namespace

std::string_view name_of(Kind kind) {
  return kind_names[static_cast<size_t>(kind)];
}
std::string_view name_of(Evidence evidence) {
  return evidence_names[static_cast<size_t>(evidence)];
}

std::string_view remedy_of(Kind kind) {
  switch (kind) {
    case Kind::error:
      return "";
    case Kind::rank_exited:
      return "Fix: look at the output of that rank; the same command resumes";
    case Kind::rank_killed:
      return "Fix: look for the sender of the signal (out of memory: nrl-train plan shows the need); the "
             "same "
             "command resumes";
    case Kind::rank_stopped:
      return "Fix: look at that node; the same command resumes";
    case Kind::rank_hung:
      return "Fix: look at that rank; the same command resumes";
    case Kind::mismatch:
      return "Fix: this is a bug in nrl-train; report it with this message";
    case Kind::network:
    case Kind::node_lost:
      return "Fix: check the network of that node; the same command resumes";
    case Kind::gpu:
      return "Fix: check that GPU; the same command resumes";
    case Kind::launcher_lost:
      return "Fix: find out what ended the launcher; the same command resumes";
    case Kind::silent_corruption:
      return "Fix: resume without that node";
    case Kind::start_timeout:
      return "Fix: look at the ranks that did not start";
  }
  return "";
}

Verdict decide(std::span<const Suspicion> evidence, const Topology& topology, const StatusSample& own,
               PhaseName phase_name, Nanos now) {
  const auto stronger = [](const Suspicion& a, const Suspicion& b) {
    return a.evidence != b.evidence ? a.evidence < b.evidence : a.when < b.when;
  };
  const Suspicion& cause = *std::min_element(evidence.begin(), evidence.end(), stronger);
  Verdict v;
  v.kind = cause.kind;
  v.phase = cause.phase;
  v.step = cause.step;
  v.exit_code = cause.kind == Kind::silent_corruption                            ? exit_wrong_result
                : cause.evidence == Evidence::error && cause.kind == Kind::error ? cause.exit_code
                                                                                 : exit_peer_lost;
  add_culprit(v, cause.rank, topology);
  for (const Suspicion& s : evidence) {
    const auto known = v.others();
    if (s.rank != cause.rank && v.also_count < max_named &&
        std::find(known.begin(), known.end(), s.rank) == known.end())
      v.also_failed[v.also_count++] = s.rank;
  }
  Text<798>& text = v.text;
  if (cause.kind == Kind::node_lost) {
    append(text, "node {} (", v.node);
    append_ranks(text, topology.size, [&](int r) { return topology.node_of_rank(r) == v.node; });
    text.append(") is unreachable");
    if (cause.step > 0) append(text, " since step {}", cause.step);
    append(text, ": {}", cause.text.view());
  } else if (cause.kind == Kind::error) {
    append(text, "rank {} (node {}): {}", cause.rank, v.node, cause.text.view());
    return v;  // the message of an error is complete
  } else {
    const std::string_view what = cause.kind == Kind::rank_exited    ? " ended without a message"
                                  : cause.kind == Kind::rank_killed  ? " was killed"
                                  : cause.kind == Kind::rank_stopped ? " stopped responding"
                                  : cause.kind == Kind::rank_hung    ? " hangs"
                                                                     : " failed";
    append(text, "rank {} (node {}){}", cause.rank, v.node, what);
    append_position(text, cause.step, cause.phase, phase_name);
    if (cause.text.length > 0) append(text, ": {}", cause.text.view());
  }
  append(text, " ({:.1f} s ago)", in_seconds(now - cause.when));
  if (own.wait.active() && cause.rank != topology.rank)
    append(text, ". Rank {} waits in {} #{} since {:.1f} s", topology.rank, own.wait.text.view(),
           own.wait.sequence, in_seconds(own.wait.waiting));
  return v;
}

std::optional<Verdict> judge_hang(std::span<const Answer> answers, std::span<int> scratch,
                                  const Topology& topology, PhaseName phase_name) {
  const int size = static_cast<int>(answers.size());
  const auto answer = [&](int rank) -> const Answer& { return answers[static_cast<size_t>(rank)]; };
  const auto wait_of = [&](int rank) -> const Wait& { return answer(rank).sample.wait; };
  const auto waits = [&](int rank) { return answer(rank).rank >= 0 && wait_of(rank).active(); };
  const auto hangs = [&](int rank) {
    return answer(rank).rank >= 0 && !wait_of(rank).active() && answer(rank).sample.over_limit;
  };
  Verdict v;
  Text<798>& text = v.text;
  const auto append_call = [&](int rank) {
    const Wait& w = wait_of(rank);
    append(text, "rank {} waits in {} ({} B) #{} since {:.1f} s", rank, w.text.view(), w.bytes, w.sequence,
           in_seconds(w.waiting));
  };
  const auto finish = [&](Kind kind) {
    const StatusSample& first = answer(v.ranks[0]).sample;
    v.kind = kind;
    v.exit_code = exit_peer_lost;
    v.step = first.step;
    v.phase = first.phase;
    return v;
  };

  size_t waiting = 0;
  bool excused = false, missing = false, early = false;
  for (int r = 0; r < size; ++r) {
    if (hangs(r))
      add_culprit(v, r, topology);
    else if (waits(r))
      scratch[waiting++] = r, early |= !answer(r).sample.over_limit;
    else
      (answer(r).rank < 0 ? missing : excused) = true;
  }
  if (v.rank_count > 0) {
    const StatusSample& first = answer(v.ranks[0]).sample;
    append_ranks(text, size, hangs);
    append(text, " (node {}) {} for {:.1f} s", v.node, v.rank_count == 1 ? "hangs" : "hang",
           in_seconds(first.in_phase));
    append_position(text, first.step, first.phase, phase_name);
    if (waiting > 0) {
      text.append(". ");
      append_ranks(text, size, waits);
      text.append(waiting == 1 ? " waits: " : " wait: ");
      append_call(scratch[0]);
    }
    return finish(Kind::rank_hung);
  }
  if (excused || waiting == 0) return std::nullopt;

  // Members of a group together, by the number of the call they wait for.
  const std::span<int> order = scratch.first(waiting);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const Wait &x = wait_of(a), &y = wait_of(b);
    return std::tie(x.group, x.sequence, a) < std::tie(y.group, y.sequence, b);
  });
  const auto group_end = [&](size_t first) {
    size_t end = first + 1;
    while (end < waiting && wait_of(order[end]).group == wait_of(order[first]).group) ++end;
    return end;
  };
  for (size_t i = 1; i < waiting; ++i) {
    const Wait &a = wait_of(order[i - 1]), &b = wait_of(order[i]);
    if (a.group != b.group || a.sequence != b.sequence || (a.operation == b.operation && a.bytes == b.bytes))
      continue;
    append(text, "ranks disagree on call #{}: ", a.sequence);
    append_call(order[i - 1]);
    text.append(", ");
    append_call(order[i]);
    add_culprit(v, order[i - 1], topology);
    add_culprit(v, order[i], topology);
    return finish(Kind::mismatch);
  }
  if (early) return std::nullopt;
  for (size_t first = 0, end; first < waiting; first = end) {
    end = group_end(first);
    if (end - first < wait_of(order[first]).ranks) continue;
    const uint64_t group = wait_of(order[first]).group;
    append_ranks(text, size, [&](int r) { return waits(r) && wait_of(r).group == group; });
    text.append(" have all entered a call that does not finish: ");
    append_call(order[first]);
    for (size_t i = first; i < end; ++i) add_culprit(v, order[i], topology);
    return finish(Kind::network);
  }
  if (missing) return std::nullopt;
  text.append("ranks wait for each other: ");
  for (size_t first = 0; first < waiting && v.rank_count < 4; first = group_end(first)) {
    if (v.rank_count > 0) text.append(", ");
    append_call(order[first]);
    add_culprit(v, order[first], topology);
  }
  return finish(Kind::mismatch);
}

}  // namespace nrl::control
