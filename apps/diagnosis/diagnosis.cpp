#include "apps/diagnosis/diagnosis.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <spdlog/fmt/ranges.h>

#include "core/base/fatal_signals.h"
#include "core/base/text.h"

namespace nrl::diagnosis {
namespace {

using comm::LogEntry;
using comm::LogGroup;
using comm::Op;

bool is_message(Op op) {
  return op == Op::send || op == Op::recv || op == Op::exchange;
}

// The rank of the world that a message goes to or comes from; unset in a damaged record.
std::optional<int> peer_of(const LogGroup& group, const LogEntry& e) {
  if (e.peer < 0 || static_cast<size_t>(e.peer) >= group.members.size()) return {};
  return group.members[static_cast<size_t>(e.peer)];
}

// A communicator, by what all of its ranks agree on.
using Key = std::pair<std::string, std::vector<int>>;

Key key_of(const LogGroup& group) {
  return {group.name, group.members};
}

struct Index {
  std::map<int, const Rank*> by_rank;
  /// Collectives of a communicator on a rank, by number. Communicators of one name and members follow each
  /// other (one for each engine): the last one counts.
  std::map<Key, std::map<int, std::map<uint64_t, const LogEntry*>>> collectives;
  /// Messages that a rank has issued: (sender, receiver, lane, number), and whether as the sender.
  std::set<std::tuple<int, int, int32_t, int64_t, bool>> messages;

  explicit Index(const std::vector<Rank>& ranks) {
    for (const Rank& r : ranks) {
      const comm::Flight& f = r.flight;
      by_rank[f.identity.rank] = &r;
      std::map<Key, uint32_t> last;
      for (uint32_t g = 0; g < f.groups.size(); ++g) last[key_of(f.groups[g])] = g;
      for (const LogEntry& e : f.entries) {
        const LogGroup& group = f.groups[e.group];
        if (e.op == Op::send || e.op == Op::recv) {
          const std::optional<int> peer = peer_of(group, e);
          if (!peer) continue;
          const int self = f.identity.rank;
          const bool sends = e.op == Op::send;
          messages.emplace(sends ? self : *peer, sends ? *peer : self, e.lane, e.message, sends);
        } else if (!is_message(e.op) && last[key_of(group)] == e.group) {
          collectives[key_of(group)][f.identity.rank][e.seq] = &e;
        }
      }
    }
  }
};

// The operation that the thread of the steps waits for.
const LogEntry* waits_for(const comm::Flight& f) {
  if (f.wait_since_ns == 0) return nullptr;
  const auto at = std::lower_bound(f.entries.begin(), f.entries.end(), f.wait_id,
                                   [](const LogEntry& e, uint64_t id) { return e.id < id; });
  return at != f.entries.end() && at->id == f.wait_id && at->progress < comm::Progress::done ? &*at : nullptr;
}

// 0: unknown.
double seconds_waited(const Rank& r) {
  return std::max(0.0, static_cast<double>(r.now_ns - r.flight.wait_since_ns) * 1e-9);
}

std::string time_text(double seconds) {
  return seconds > 0 ? fmt::format(" for {:.1f} s", seconds) : "";
}

// Ranks that have not issued what `rank` waits for.
std::vector<int> missing_in(const Index& index, const Rank& rank, const LogEntry& e) {
  const LogGroup& group = rank.flight.groups[e.group];
  std::vector<int> out;
  const auto lacks = [&](int other) {
    const auto found = index.by_rank.find(other);
    if (found == index.by_rank.end()) return false;  // nothing is known of it
    if (e.op == Op::send || e.op == Op::recv) {
      const bool sends = e.op == Op::send;
      const int self = rank.flight.identity.rank;
      return !index.messages.contains(
          {sends ? self : other, sends ? other : self, e.lane, e.message, !sends});
    }
    const auto ranks = index.collectives.find(key_of(group));
    if (ranks == index.collectives.end()) return false;
    const auto calls = ranks->second.find(other);
    return calls == ranks->second.end() || calls->second.empty() || calls->second.rbegin()->first < e.seq;
  };
  if (e.op == Op::exchange) return out;
  if (is_message(e.op)) {
    if (const std::optional<int> other = peer_of(group, e); other && lacks(*other)) out.push_back(*other);
    return out;
  }
  for (const int other : group.members)
    if (other != rank.flight.identity.rank && lacks(other)) out.push_back(other);
  return out;
}

bool same_call(const LogEntry& a, const LogEntry& b) {
  return a.op == b.op && a.dtype == b.dtype && (a.bytes == b.bytes || a.op == Op::all_to_all_v);
}

// The first number of a communicator at which its ranks called different operations.
void find_mismatches(const Index& index, Diagnosis& d) {
  for (const auto& [key, ranks] : index.collectives) {
    if (ranks.size() < 2) continue;
    uint64_t from = 0;
    for (const auto& [rank, calls] : ranks)
      if (!calls.empty()) from = std::max(from, calls.begin()->first);
    const auto& reference = ranks.begin()->second;
    for (auto at = reference.lower_bound(from); at != reference.end(); ++at) {
      std::map<int, const LogEntry*> called;
      std::vector<int> same, other;
      for (const auto& [rank, calls] : ranks)
        if (const auto found = calls.find(at->first); found != calls.end()) {
          called[rank] = found->second;
          (same_call(*at->second, *found->second) ? same : other).push_back(rank);
        }
      if (other.empty()) continue;
      const auto text = [&](int rank) {
        return fmt::format("{} of {} {}", comm::name_of(called[rank]->op),
                           human_bytes(static_cast<uint64_t>(called[rank]->bytes)),
                           nrl::name_of(called[rank]->dtype));
      };
      d.mismatches.push_back(fmt::format("{} #{}: {} on ranks {}; {} on ranks {}", key.first, at->first,
                                         text(same.front()), fmt::join(same, ","), text(other.front()),
                                         fmt::join(other, ",")));
      const std::vector<int>& few = other.size() <= same.size() ? other : same;
      d.culprits.insert(d.culprits.end(), few.begin(), few.end());
      break;
    }
  }
}

// Follows the waits from every rank to ranks that wait for none of the known ranks.
std::vector<int> ends_of_waits(const std::map<int, std::vector<int>>& waits) {
  std::set<int> ends;
  for (const auto& [rank, none] : waits) {
    std::set<int> seen{rank};
    std::vector<int> todo{rank};
    while (!todo.empty()) {
      const int at = todo.back();
      todo.pop_back();
      const auto next = waits.find(at);
      if (next == waits.end()) {
        ends.insert(at);
        continue;
      }
      for (const int other : next->second)
        if (seen.insert(other).second) todo.push_back(other);
    }
  }
  return {ends.begin(), ends.end()};
}

void sort_unique(std::vector<int>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

std::string place_of(const comm::Flight& f) {
  std::string text = fmt::format("{} of step {}", status::name_of(f.phase), f.step);
  if (f.phase == status::Phase::computing && f.microbatch >= 0)
    text += fmt::format(", microbatch {}", f.microbatch);
  if (f.phase == status::Phase::computing && f.layer >= 0)
    text += fmt::format(", {} of layer {}", f.backward ? "backward" : "forward", f.layer);
  return text;
}

std::string_view text_of(Life life) {
  switch (life) {
    case Life::alive:
      return "";
    case Life::stopped:
      return ", stopped";
    case Life::ended:
      return ", ended";
    default:
      return ", not of this host";
  }
}

std::string signal_of(const comm::Flight& f) {
  if (f.signal == 0) return "";
  return fmt::format(" by {}",
                     std::string_view(fatal_signals::describe(f.signal, f.signal_sent, f.signal_at)));
}

std::string line_of(const Rank& r) {
  const comm::Flight& f = r.flight;
  std::string text = fmt::format("rank {} ({}, pid {}{}{}): {}", f.identity.rank, f.identity.host,
                                 f.identity.pid, text_of(r.life), signal_of(f), place_of(f));
  if (const LogEntry* e = waits_for(f))
    text += fmt::format("; waits{} for {}", time_text(seconds_waited(r)), describe(f.groups[e->group], *e));
  return text;
}

}  // namespace

std::string_view name_of(Cause cause) {
  constexpr std::string_view names[] = {"none",     "rank_ended", "rank_stopped",
                                        "mismatch", "rank_hung",  "rank_lost"};
  return names[static_cast<int>(cause)];
}

std::string describe(const LogGroup& group, const LogEntry& e) {
  if (e.op == Op::send || e.op == Op::recv) {
    const std::optional<int> peer = peer_of(group, e);
    return fmt::format("{} {} {} of {} ({})", comm::name_of(e.op), e.op == Op::send ? "to" : "from",
                       peer ? fmt::format("rank {}", *peer) : "a rank", group.label,
                       human_bytes(static_cast<uint64_t>(e.bytes)));
  }
  return fmt::format("{} #{} of {} ({}, {})", comm::name_of(e.op), e.seq, group.label, nrl::name_of(e.dtype),
                     human_bytes(static_cast<uint64_t>(e.bytes)));
}

Diagnosis diagnose(const std::vector<Rank>& ranks) {
  Diagnosis d;
  const Index index(ranks);
  std::map<int, std::vector<int>> waits;  // rank -> ranks that it waits for
  std::map<std::tuple<Key, uint64_t, Op, int32_t, int64_t>, size_t> place;
  for (const Rank& r : ranks) {
    const LogEntry* e = waits_for(r.flight);
    if (!e) continue;
    std::vector<int> missing = missing_in(index, r, *e);
    if (missing.empty()) continue;
    const LogGroup& group = r.flight.groups[e->group];
    const bool message = is_message(e->op);
    const auto [at, added] =
        place.try_emplace({key_of(group), message ? 0 : e->seq, e->op, message ? r.flight.identity.rank : 0,
                           message ? e->message : 0},
                          d.missing.size());
    if (added) d.missing.push_back({.group = group, .entry = *e});
    Missing& m = d.missing[at->second];
    m.waiting.push_back(r.flight.identity.rank);
    m.missing.insert(m.missing.end(), missing.begin(), missing.end());
    sort_unique(m.missing);
    m.seconds = std::max(m.seconds, seconds_waited(r));
    waits[r.flight.identity.rank] = std::move(missing);
  }
  std::vector<int> ended, stopped, crashed;
  for (const Rank& r : ranks) {
    if (r.life != Life::alive && r.flight.signal != 0) crashed.push_back(r.flight.identity.rank);
    if (r.life == Life::ended) ended.push_back(r.flight.identity.rank);
    if (r.life == Life::stopped) stopped.push_back(r.flight.identity.rank);
  }
  const int world = ranks.empty() ? 0 : ranks.front().flight.identity.ranks;
  for (int rank = 0; rank < world; ++rank)
    if (!index.by_rank.contains(rank)) d.unheard.push_back(fmt::format("rank {}", rank));
  find_mismatches(index, d);
  std::vector<int> ends = ends_of_waits(waits);
  const bool all_ended = ended.size() == ranks.size();
  if (!crashed.empty()) {
    d.cause = Cause::ended;
    d.culprits = std::move(crashed);
  } else if (!ended.empty() && !all_ended) {
    d.cause = Cause::ended;
    d.culprits = ended;
  } else if (!stopped.empty()) {
    d.cause = Cause::stopped;
    d.culprits = stopped;
  } else if (!d.mismatches.empty()) {
    d.cause = Cause::mismatch;
  } else if (!ends.empty()) {
    d.cause = all_ended ? Cause::lost : Cause::late;
    d.culprits = std::move(ends);
  }
  sort_unique(d.culprits);
  return d;
}

std::string text_of(const Diagnosis& d, const std::vector<Rank>& ranks) {
  std::string text;
  if (d.cause == Cause::none)
    text = "cause: the records name no rank\n";
  else
    text = fmt::format("cause: {}, rank{} {}\n", name_of(d.cause), d.culprits.size() > 1 ? "s" : "",
                       fmt::join(d.culprits, ", "));
  for (const std::string& line : d.mismatches) text += line + "\n";
  for (const Missing& m : d.missing)
    text += fmt::format("{}: waited for by {}{}; not begun by {}\n", describe(m.group, m.entry),
                        fmt::join(m.waiting, ","), time_text(m.seconds), fmt::join(m.missing, ","));
  // The culprits first; of the others those that differ.
  const auto is_culprit = [&](const Rank& r) {
    return std::binary_search(d.culprits.begin(), d.culprits.end(), r.flight.identity.rank);
  };
  constexpr int most_lines = 64;
  int lines = 0;
  for (const bool culprits : {true, false})
    for (const Rank& r : ranks)
      if (is_culprit(r) == culprits && ++lines <= most_lines) text += line_of(r) + "\n";
  if (lines > most_lines) text += fmt::format("and {} other ranks\n", lines - most_lines);
  if (!d.unheard.empty())
    text += fmt::format(
        "no records of {} ranks: {}\n", d.unheard.size(),
        fmt::join(d.unheard.begin(), d.unheard.begin() + std::min<int64_t>(8, std::ssize(d.unheard)), ", "));
  return text;
}

JsonValue json_of(const Diagnosis& d, const std::vector<Rank>& ranks) {
  JsonValue missing = JsonValue::array({}), lines = JsonValue::array({});
  for (const Missing& m : d.missing)
    missing.push_back(JsonValue::object({{"operation", describe(m.group, m.entry)},
                                         {"waiting", JsonValue(m.waiting)},
                                         {"missing", JsonValue(m.missing)},
                                         {"seconds", m.seconds}}));
  for (const Rank& r : ranks) {
    const comm::Flight& f = r.flight;
    const LogEntry* e = waits_for(f);
    lines.push_back(
        JsonValue::object({{"rank", int64_t{f.identity.rank}},
                           {"host", f.identity.host},
                           {"pid", f.identity.pid},
                           {"phase", std::string(status::name_of(f.phase))},
                           {"step", f.step},
                           {"completed", f.completed},
                           {"signal", f.signal != 0 ? JsonValue(int64_t{f.signal}) : JsonValue()},
                           {"waits_for", e ? JsonValue(describe(f.groups[e->group], *e)) : JsonValue()},
                           {"waited_s", e ? JsonValue(seconds_waited(r)) : JsonValue()}}));
  }
  return JsonValue::object({{"cause", std::string(name_of(d.cause))},
                            {"culprits", JsonValue(d.culprits)},
                            {"mismatches", JsonValue(d.mismatches)},
                            {"missing", missing},
                            {"ranks", lines}});
}

}  // namespace nrl::diagnosis
