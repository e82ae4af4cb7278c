#include "parallel/pipeline/equivalent.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace nrl::pipeline {

namespace {

/// True for actions of no microbatch.
bool ends_step(const Action& a) {
  return a.kind == ActionKind::finish_reduce || a.kind == ActionKind::step;
}

/// The way of one microbatch through a chunk: its stash, 0 if the stashes of a pool may be exchanged, and its
/// actions in order. The action that hands a tensor to a chunk of the same rank belongs to both ways.
struct Way {
  int chunk = 0, stash = 0;
  std::vector<int> actions = {};  // kinds, negative for those that another chunk's action does to this one
  auto operator<=>(const Way&) const = default;
};

/// Numbers for passes, and for points of ways: equal for equal ones.
class Points {
 public:
  explicit Points(size_t chunks) : next_(after_passes(chunks)) {}

  /// The number of a way's first point; the next ones follow.
  size_t first(const Way& way) {
    const auto [at, added] = first_.try_emplace(way, next_);
    if (added) next_ += way.actions.size();
    return at->second;
  }
  size_t count() const { return next_; }

  /// The number of a pass, as the one before an action or after it.
  static size_t pass(const Action& a, bool after) {
    return 2 * (4 * static_cast<size_t>(a.chunk) + static_cast<size_t>(a.kind)) + (after ? 2 : 1);
  }

 private:
  static size_t after_passes(size_t chunks) { return 8 * chunks + 1; }

  std::map<Way, size_t> first_;
  size_t next_;
};

/// A set of points.
class PointSet {
 public:
  explicit PointSet(size_t points) : words_((points + 63) / 64) {}
  void insert(size_t point) { words_[point / 64] |= uint64_t{1} << point % 64; }
  void erase(size_t point) { words_[point / 64] &= ~(uint64_t{1} << point % 64); }
  void insert(const PointSet& other) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  bool includes(const PointSet& other) const {
    for (size_t i = 0; i < words_.size(); ++i)
      if ((other.words_[i] & ~words_[i]) != 0) return false;
    return true;
  }

 private:
  std::vector<uint64_t> words_;
};

/// By point: those at which another way was, before its end, when this one was reached; plus the number of
/// points, if several ways were there. By pass: the same of the points that were reached between this pass
/// and the next one or during them, and the next pass.
using Meetings = std::vector<PointSet>;

bool includes(const Meetings& have, const Meetings& need) {
  for (size_t i = 0; i < need.size(); ++i)
    if (!have[i].includes(need[i])) return false;
  return true;
}

/// By action: the passes before and after it (Points::pass()); 0: none. Buffers that one pass leaves to the
/// next one, or prepares for it, live in between.
struct Neighbors {
  size_t before = 0, after = 0;
};

std::vector<Neighbors> neighbors(const std::vector<Action>& actions) {
  const auto is_pass = [](const Action& a) {
    return a.kind == ActionKind::forward || a.kind == ActionKind::backward ||
           a.kind == ActionKind::backward_data || a.kind == ActionKind::backward_weight;
  };
  std::vector<Neighbors> out(actions.size());
  for (size_t i = 0, last = 0; i < actions.size(); ++i) {
    const bool pass = is_pass(actions[i]);
    if (i + 1 < actions.size()) out[i + 1].before = pass ? Points::pass(actions[i], false) : out[i].before;
    if (!pass) continue;
    for (; last < i; ++last) out[last].after = Points::pass(actions[i], true);
  }
  return out;
}

/// Finds the meetings of the points that `points` numbers afterwards or, if there are `known` ones already,
/// of these alone. `exchange`: the stashes of a pool may be exchanged.
Meetings meetings(const Schedule& schedule, Points& points, bool exchange, size_t known = 0) {
  // On one of several stages, some chunk sends its output, or the only one receives its input.
  const auto message = [](const Action& a) {
    return a.kind == ActionKind::send_forward || (a.kind == ActionKind::receive_forward && a.chunk == 0);
  };
  const bool one_stage = std::none_of(schedule.actions.begin(), schedule.actions.end(), message);
  const auto chunks = static_cast<size_t>(schedule.stashes.chunks());
  std::vector<size_t> index;  // of ways plus 1, by microbatch and chunk; 0: none
  std::vector<Way> ways;
  std::vector<std::pair<size_t, size_t>> reached;  // way and point, in order; two in a row for a hand-over
  std::vector<size_t> ends;                        // by action: end of its entries in `reached`
  const std::vector<Neighbors> passes = neighbors(schedule.actions);
  const auto reach = [&](int chunk, const Action& a, int kind) {
    const size_t at = static_cast<size_t>(a.microbatch) * chunks + static_cast<size_t>(chunk);
    if (at >= index.size()) index.resize(2 * at + chunks);
    if (index[at] == 0) {
      ways.push_back({chunk, exchange ? 0 : schedule.stashes.of(chunk, a.microbatch)});
      index[at] = ways.size();
    }
    Way& way = ways[index[at] - 1];
    reached.emplace_back(index[at] - 1, way.actions.size());
    way.actions.push_back(kind);
  };
  for (const Action& a : schedule.actions) {
    if (ends_step(a)) {
      ends.push_back(reached.size());
      continue;
    }
    const int kind = static_cast<int>(a.kind) + 1;
    reach(a.chunk, a, kind);
    if (one_stage && a.kind == ActionKind::receive_forward) reach(a.chunk - 1, a, -kind);
    if (one_stage && a.kind == ActionKind::receive_backward) reach(a.chunk + 1, a, -kind);
    ends.push_back(reached.size());
  }
  std::vector<size_t> first;
  for (const Way& way : ways) first.push_back(points.first(way));

  const size_t count = known > 0 ? known : points.count();
  Meetings out(count, PointSet(2 * count));
  PointSet open(2 * count);  // points of the ways that have begun and not ended
  std::vector<int> ways_at(count);
  const auto enter = [&](size_t number) {
    if (number >= count) return;
    if (ways_at[number] < 2) open.insert(number + (ways_at[number] == 0 ? 0 : count));
    ++ways_at[number];
  };
  const auto leave = [&](size_t number) {
    if (number >= count) return;
    --ways_at[number];
    if (ways_at[number] < 2) open.erase(number + (ways_at[number] == 0 ? 0 : count));
  };
  size_t begin = 0;
  for (size_t action = 0; action < ends.size(); ++action) {
    const std::span now(reached.begin() + begin, reached.begin() + ends[action]);
    begin = ends[action];
    for (const auto& [way, point] : now) {
      if (point > 0) leave(first[way] + point - 1);
      enter(first[way] + point);
    }
    for (const auto& [way, point] : now)
      if (first[way] < count) out[first[way] + point].insert(open);
    const auto [before, after] = passes[action];
    if (before != 0) out[before].insert(open);
    if (after != 0) out[after].insert(open);
    if (before != 0 && after != 0) out[before].insert(after);
    for (const auto& [way, point] : now)
      if (point + 1 == ways[way].actions.size()) leave(first[way] + point);
  }
  return out;
}

}  // namespace

bool covers(const Schedule& shorter, const Schedule& longer) {
  if (!longer.stashes.extends(shorter.stashes)) return false;
  Points points(static_cast<size_t>(shorter.stashes.chunks()));
  const bool exchange = shorter.period.exchanges_stashes;
  const Meetings need = meetings(longer, points, exchange);
  return includes(meetings(shorter, points, exchange, need.size()), need);
}

namespace {

/// Whether b is a, `later` microbatches later; their stashes follow from the microbatches.
bool repeats(const Action& a, const Action& b, int later) {
  return a.kind == b.kind && a.chunk == b.chunk && a.last == b.last &&
         a.microbatch + (ends_step(a) ? 0 : later) == b.microbatch;
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

/// The most stashes of all pools that are in use at the same time.
size_t most_in_use(const Schedule& schedule) {
  std::set<std::pair<int, int>> in_use;  // chunk and microbatch
  size_t most = 0;
  for (const Action& a : schedule.actions) {
    if (a.kind == ActionKind::forward || a.kind == ActionKind::receive_forward ||
        a.kind == ActionKind::post_forward)
      in_use.insert({a.chunk, a.microbatch});
    most = std::max(most, in_use.size());
    if (a.kind == ActionKind::backward || a.kind == ActionKind::backward_weight)
      in_use.erase({a.chunk, a.microbatch});
  }
  return most;
}

/// True if the first `microbatches` of every chunk have all stashes that the chunk has in `whole`.
bool shows_all(const Stashes& whole, int microbatches) {
  for (int chunk = 0; chunk < whole.chunks(); ++chunk) {
    const std::vector<int>& numbers = whole.numbers(chunk);
    std::vector<bool> seen(static_cast<size_t>(whole.count(chunk)));
    for (int m = 0; m < microbatches; ++m) seen[static_cast<size_t>(numbers[m])] = true;
    const auto missing = [&](int number) { return !seen[static_cast<size_t>(number)]; };
    if (std::any_of(numbers.begin() + microbatches, numbers.end(), missing)) return false;
  }
  return true;
}

/// Results of search(): a plan asks for the same ones several times, a search of layouts hundreds of times.
class KnownSchedules {
 public:
  std::optional<Schedule> at(const ScheduleOptions& options, int stage) {
    const std::lock_guard lock(mutex_);
    const auto found = schedules_.find({options, stage});
    return found == schedules_.end() ? std::nullopt : std::optional(found->second);
  }
  void add(const ScheduleOptions& options, int stage, const Schedule& schedule) {
    const std::lock_guard lock(mutex_);
    // Stashes have a number for each chunk and microbatch.
    const auto chunks = static_cast<size_t>(schedule.stashes.chunks());
    const size_t entries = schedule.actions.size() + chunks * static_cast<size_t>(options.microbatches);
    entries_ += entries;
    if (entries_ > most_entries) schedules_.clear(), entries_ = entries;
    schedules_.insert_or_assign({options, stage}, schedule);
  }

 private:
  static constexpr size_t most_entries = 2'000'000;  // some 40 MB
  std::mutex mutex_;
  std::map<std::pair<ScheduleOptions, int>, Schedule> schedules_;
  size_t entries_ = 0;
};

Schedule search(ScheduleOptions options, int stage) {
  const Schedule whole = make_schedule(options, stage);
  const int all = options.microbatches;
  // A pool has no more stashes than there are microbatches in all chunks.
  const int most_stashes = *std::max_element(whole.stashes.counts().begin(), whole.stashes.counts().end());
  const int chunks = whole.stashes.chunks();
  const int least = std::min(all, std::max(2, (most_stashes + chunks - 1) / chunks));
  std::map<bool, std::pair<Points, Meetings>> needed;  // by `exchange`
  // `stride`: of the numbers of microbatches that are tried, from the number before.
  const auto find = [&](bool exchange, int begin, int end, const auto& stride) -> std::optional<Schedule> {
    if (end <= begin) return {};
    const auto [at, added] = needed.try_emplace(exchange, Points(static_cast<size_t>(chunks)), Meetings());
    auto& [points, need] = at->second;
    if (added) need = meetings(whole, points, exchange);
    for (int n = begin; n < end; n += stride(n)) {
      options.microbatches = n;
      if (!exchange && !shows_all(whole.stashes, n)) continue;
      if (!unsupported_reason(options).empty()) continue;  // groups of microbatches
      Schedule shorter = make_schedule(options, stage);
      if (!whole.stashes.extends(shorter.stashes)) continue;
      shorter.period = period_of(shorter.actions, whole.actions, all - options.microbatches);
      if (shorter.period.times == 0) continue;
      shorter.period.exchanges_stashes = exchange;
      if (!includes(meetings(shorter, points, exchange, need.size()), need)) continue;
      shorter.stashes = whole.stashes;
      return shorter;
    }
    return {};
  };
  // A way meets those of the next and the previous group of microbatches, and no others. Memory is planned
  // with fewer bytes if every stash has its own meetings, which takes as many microbatches as all of them
  // need to meet. Where that is too many, the stashes are exchanged. Pools that are not in use at once would
  // need more bytes then: if it is over a twentieth, a longer list is looked for first. The whole schedule
  // would take seconds and a gigabyte to plan.
  const int most = std::min(all, 8 * options.stages + 8);
  const auto each = [](int) { return 1; };
  std::optional<Schedule> found = find(false, least, most, each);
  const std::vector<int>& counts = whole.stashes.counts();
  const auto reserved = static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), 0));
  if (!found && 20 * most_in_use(whole) >= 19 * reserved)
    found = find(true, least, std::min(most, all / 4), each);
  if (!found && counts.size() > 1) {
    // Periods have a multiple of a group's microbatches. An eighth more does little harm.
    const int group = options.group > 0 ? options.group : options.stages, begin = std::max(least, most);
    const auto eighth = [&](int n) { return std::max(n / 8 / group, 1) * group; };
    found = find(false, begin + (all - begin) % group, all / 4, eighth);
  }
  if (!found) found = find(true, least, std::min(most, all / 4), each);
  return found ? *std::move(found) : whole;
}

}  // namespace

Schedule shortest_equivalent(ScheduleOptions options, int stage) {
  static KnownSchedules known;
  if (std::optional<Schedule> found = known.at(options, stage)) return *std::move(found);
  Schedule made = search(options, stage);
  known.add(options, stage, made);
  return made;
}

namespace {

/// `shorter` with its period more often, so that it gives `whole`, which has `more` microbatches; empty if it
/// does not.
Schedule repeated_for(const Schedule& shorter, int more, const Schedule& whole) {
  if (shorter.period.microbatches == 0 || more % shorter.period.microbatches != 0 ||
      !whole.stashes.extends(shorter.stashes))
    return {};
  // Else the same ones meet again.
  if (!shorter.period.exchanges_stashes)
    for (int chunk = 0; chunk < whole.stashes.chunks(); ++chunk)
      for (int m = microbatches(shorter) - 1; m >= 0; --m)
        if (whole.stashes.of(chunk, m) != whole.stashes.of(chunk, m + more)) return {};
  Schedule out = shorter;
  out.period.times += more / out.period.microbatches;
  out.stashes = whole.stashes;
  return unrolled(out).actions == whole.actions ? out : Schedule{};
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
      const Schedule whole = make_schedule(options, stage);
      for (int more = 1; options.microbatches > regular && more <= regular && next.actions.empty(); ++more)
        next = repeated_for(*(out.end() - more), more, whole);
      if (next.actions.empty()) next = shortest_equivalent(options, stage);
    }
    out.push_back(std::move(next));
  }
  return out;
}

bool same_but_times(const Schedule& a, const Schedule& b) {
  return a.actions == b.actions && (a.stashes.extends(b.stashes) || b.stashes.extends(a.stashes)) &&
         a.period.begin == b.period.begin && a.period.end == b.period.end &&
         a.period.microbatches == b.period.microbatches &&
         a.period.exchanges_stashes == b.period.exchanges_stashes;
}

Schedule unrolled(const Schedule& schedule) {
  Schedule out{.actions = {}, .stashes = schedule.stashes};
  const Period& period = schedule.period;
  period.for_each_part(schedule.actions.size(), [&](size_t begin, size_t end, int repetition) {
    for (size_t i = begin; i < end; ++i) {
      Action& a = out.actions.emplace_back(schedule.actions[i]);
      if (ends_step(a)) continue;
      a.microbatch += repetition * period.microbatches;
      a.stash = schedule.stashes.of(a.chunk, a.microbatch);
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
