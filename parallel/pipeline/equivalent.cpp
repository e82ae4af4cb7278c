#include "parallel/pipeline/equivalent.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace nrl::pipeline {

namespace {

/// The way of one microbatch through a chunk: its stash and its actions in order. The action that hands a
/// tensor to a chunk of the same rank belongs to both ways.
struct Way {
  int chunk = 0, stash = 0;
  std::vector<int> actions = {};  // kinds, negative for those that another chunk's action does to this one
  auto operator<=>(const Way&) const = default;
};

/// Numbers for points of ways, equal for equal ones.
class Points {
 public:
  /// Of the way's first point; the next ones follow.
  int first(const Way& way) {
    const auto [at, added] = first_.try_emplace(way, next_);
    if (added) next_ += static_cast<int>(way.actions.size());
    return at->second;
  }

 private:
  std::map<Way, int> first_;
  int next_ = 0;
};
/// Points that were reached while another way was at the other point, before its end. Negative numbers are
/// passes: points that were reached between a pass and the next one or during them, with both passes.
using Meetings = std::vector<std::pair<int, int>>;  // ascending, each once

/// By action: the passes before and after it, as numbers below 0 of their kinds and chunks; 0: none. Buffers
/// that one pass leaves to the next one, or prepares for it, live in between.
struct Neighbors {
  int before = 0, after = 0;
};

std::vector<Neighbors> neighbors(const std::vector<Action>& actions) {
  const auto number = [](const Action& a) {
    const bool pass = a.kind == ActionKind::forward || a.kind == ActionKind::backward ||
                      a.kind == ActionKind::backward_data || a.kind == ActionKind::backward_weight;
    return pass ? -2 * (4 * a.chunk + static_cast<int>(a.kind) + 1) : 0;
  };
  std::vector<Neighbors> out(actions.size());
  for (size_t i = 0, last = 0; i < actions.size(); ++i) {
    const int pass = number(actions[i]);
    if (i + 1 < actions.size()) out[i + 1].before = pass != 0 ? pass : out[i].before;
    if (pass == 0) continue;
    for (; last < i; ++last) out[last].after = pass - 1;
  }
  return out;
}

Meetings meetings(const Schedule& schedule, Points& points) {
  // On one of several stages, some chunk sends its output, or the only one receives its input.
  const auto message = [](const Action& a) {
    return a.kind == ActionKind::send_forward || (a.kind == ActionKind::receive_forward && a.chunk == 0);
  };
  const bool one_stage = std::none_of(schedule.actions.begin(), schedule.actions.end(), message);
  std::map<std::pair<int, int>, size_t> index;  // of ways, by chunk and microbatch
  std::vector<Way> ways;
  std::vector<std::pair<size_t, int>> reached;  // way and point, in order; two in a row for a hand-over
  std::vector<size_t> ends;                     // by action: end of its entries in `reached`
  const std::vector<Neighbors> passes = neighbors(schedule.actions);
  const auto reach = [&](int chunk, const Action& a, int kind) {
    const auto [at, added] = index.try_emplace({chunk, a.microbatch}, ways.size());
    if (added) ways.push_back({chunk, a.microbatch % schedule.stashes[chunk]});
    Way& way = ways[at->second];
    reached.emplace_back(at->second, static_cast<int>(way.actions.size()));
    way.actions.push_back(kind);
  };
  for (const Action& a : schedule.actions) {
    if (a.kind == ActionKind::finish_reduce || a.kind == ActionKind::step) {
      ends.push_back(reached.size());
      continue;
    }
    const int kind = static_cast<int>(a.kind) + 1;
    reach(a.chunk, a, kind);
    if (one_stage && a.kind == ActionKind::receive_forward) reach(a.chunk - 1, a, -kind);
    if (one_stage && a.kind == ActionKind::receive_backward) reach(a.chunk + 1, a, -kind);
    ends.push_back(reached.size());
  }
  std::vector<int> first, numbers;
  for (const Way& way : ways) first.push_back(points.first(way));
  for (const auto& [way, point] : reached) numbers.push_back(first[way] + point);

  Meetings out;
  std::map<size_t, int> open;  // ways that have begun and not ended: the number of their point
  size_t begin = 0;
  for (size_t action = 0; action < ends.size(); ++action) {
    const size_t end = ends[action];
    for (size_t i = begin; i < end; ++i) open[reached[i].first] = numbers[i];
    for (size_t i = begin; i < end; ++i)
      for (const auto& [way, number] : open) out.emplace_back(numbers[i], number);
    const auto [before, after] = passes[action];
    for (const auto& [way, number] : open) {
      if (before != 0) out.emplace_back(before, number);
      if (after != 0) out.emplace_back(after, number);
    }
    if (before != 0 && after != 0) out.emplace_back(before, after);
    for (size_t i = begin; i < end; ++i)
      if (static_cast<size_t>(reached[i].second) + 1 == ways[reached[i].first].actions.size())
        open.erase(reached[i].first);
    begin = end;
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

bool covers(const Schedule& shorter, const Schedule& longer) {
  if (shorter.stashes != longer.stashes) return false;
  Points points;
  const Meetings have = meetings(shorter, points), need = meetings(longer, points);
  return std::includes(have.begin(), have.end(), need.begin(), need.end());
}

namespace {

/// Whether b is a, `later` microbatches later; their stashes follow from the microbatches.
bool repeats(const Action& a, const Action& b, int later) {
  const bool ends = a.kind == ActionKind::finish_reduce || a.kind == ActionKind::step;
  return a.kind == b.kind && a.chunk == b.chunk && a.last == b.last &&
         a.microbatch + (ends ? 0 : later) == b.microbatch;
}

/// The period with which `list`, the same schedule with `fewer` microbatches less, gives `whole`; empty if
/// there is none that the list goes through at least three times.
Period period_of(const std::vector<Action>& list, const std::vector<Action>& whole, int fewer) {
  size_t same = 0, same_end = 0;
  while (same < list.size() && repeats(list[same], whole[same], 0)) ++same;
  while (same_end < list.size() &&
         repeats(list[list.size() - 1 - same_end], whole[whole.size() - 1 - same_end], fewer))
    ++same_end;
  for (int step = 1; step <= fewer; ++step) {
    const size_t more = whole.size() - list.size();
    if (fewer % step != 0 || more * static_cast<size_t>(step) % static_cast<size_t>(fewer) != 0) continue;
    const size_t length = more * static_cast<size_t>(step) / static_cast<size_t>(fewer);
    if (list.size() < 3 * length) return {};
    // The end of the period: the lists are the same up to there, and the same from there on.
    const size_t first = std::max(2 * length, list.size() - same_end);
    for (size_t end = std::min(same, list.size() - length); end >= first; --end) {
      size_t i = end - length;  // the list repeats from one period before
      while (i < end + length && repeats(list[i - length], list[i], step)) ++i;
      if (i < end + length) continue;
      i = end;
      while (i < end + more && repeats(list[end - length + (i - end) % length], whole[i],
                                       step * static_cast<int>(1 + (i - end) / length)))
        ++i;
      if (i == end + more)
        return {.begin = end - length, .end = end, .times = fewer / step, .microbatches = step};
    }
  }
  return {};
}

}  // namespace

Schedule shortest_equivalent(ScheduleOptions options, int stage) {
  const Schedule whole = make_schedule(options, stage);
  Points points;
  const Meetings need = meetings(whole, points);
  const int all = options.microbatches;
  // A way meets those of the next and the previous group of microbatches, and no others.
  const int most = std::min(all, 8 * options.stages + 8);
  for (options.microbatches = std::min(all, 2); options.microbatches < most; ++options.microbatches) {
    if (!unsupported_reason(options).empty()) continue;  // groups of microbatches
    Schedule shorter = make_schedule(options, stage);
    if (shorter.stashes != whole.stashes) continue;
    shorter.period = period_of(shorter.actions, whole.actions, all - options.microbatches);
    if (shorter.period.times == 0) continue;
    const Meetings have = meetings(shorter, points);
    if (std::includes(have.begin(), have.end(), need.begin(), need.end())) return shorter;
  }
  return whole;
}

namespace {

/// True if a schedule with `more` microbatches repeats its period more often, in the same stashes.
bool extends(const Schedule& shorter, int more) {
  return shorter.period.microbatches > 0 && more % shorter.period.microbatches == 0 &&
         std::all_of(shorter.stashes.begin(), shorter.stashes.end(), [more](int s) { return more % s == 0; });
}

}  // namespace

std::vector<Schedule> equivalents_of_fewer(ScheduleOptions options, int stage) {
  std::vector<Schedule> out;
  // From here on schedules are regular: a shorter one with its period more often.
  const int regular = 8 * options.stages + 8;
  for (const int all = options.microbatches; static_cast<int>(out.size()) + 1 < all;) {
    options.microbatches = static_cast<int>(out.size()) + 1;
    Schedule next;
    if (unsupported_reason(options).empty()) {
      for (int more = 1; options.microbatches > regular && more <= regular && next.actions.empty(); ++more) {
        const Schedule& shorter = *(out.end() - more);
        if (!extends(shorter, more)) continue;
        next = shorter;
        next.period.times += more / next.period.microbatches;
      }
      if (next.actions.empty()) next = shortest_equivalent(options, stage);
    }
    out.push_back(std::move(next));
  }
  return out;
}

bool same_but_times(const Schedule& a, const Schedule& b) {
  return a.actions == b.actions && a.stashes == b.stashes && a.period.begin == b.period.begin &&
         a.period.end == b.period.end && a.period.microbatches == b.period.microbatches;
}

Schedule unrolled(const Schedule& schedule) {
  Schedule out{.actions = {}, .stashes = schedule.stashes};
  const Period& period = schedule.period;
  period.for_each_part(schedule.actions.size(), [&](size_t begin, size_t end, int repetition) {
    for (size_t i = begin; i < end; ++i) {
      Action& a = out.actions.emplace_back(schedule.actions[i]);
      if (a.kind == ActionKind::finish_reduce || a.kind == ActionKind::step) continue;
      a.microbatch += repetition * period.microbatches;
      a.stash = a.microbatch % schedule.stashes[a.chunk];
    }
  });
  return out;
}

int microbatches(const Schedule& schedule) {
  int most = -1;
  for (const Action& a : schedule.actions) most = std::max(most, a.microbatch);
  return most + 1 + schedule.period.times * schedule.period.microbatches;
}

}  // namespace nrl::pipeline
