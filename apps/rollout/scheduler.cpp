#include "apps/rollout/scheduler.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/base/error.h"

namespace nrl::rollout {

Scheduler::Scheduler(const SchedulerLimits& limits, int64_t pages, int64_t page_tokens)
    : limits_(limits), pages_(pages, page_tokens) {
  NRL_CHECK(limits.sequences > 0 && limits.sequences <= limits.tokens, "{} sequences in passes of {} tokens",
            limits.sequences, limits.tokens);
}

int64_t Scheduler::add(int64_t tokens, int64_t most, int64_t samples) {
  NRL_CHECK(tokens > 0 && most >= tokens && samples > 0 && pages_.pages_of(most) <= pages_.count(),
            "{} sequences of {} to {} tokens in {} pages of {}", samples, tokens, most, pages_.count(),
            pages_.page_tokens());
  const int64_t first = std::exchange(next_sequence_, next_sequence_ + samples);
  Unit unit{.members = std::vector<int64_t>(static_cast<size_t>(samples)), .tokens = tokens, .most = most};
  std::iota(unit.members.begin(), unit.members.end(), first);
  waiting_.emplace(first, std::move(unit));
  return first;
}

int64_t Scheduler::running() const {
  int64_t n = 0;
  for (const auto& [first, unit] : active_) n += static_cast<int64_t>(unit.members.size());
  return n;
}

int64_t Scheduler::promised() const {
  int64_t n = 0;
  for (const auto& [first, unit] : active_) {
    const bool full = unit.tokens % pages_.page_tokens() == 0;
    const auto members = static_cast<int64_t>(unit.members.size());
    n += full || pages_.users(unit.pages.back()) > 1 ? members : members - 1;
  }
  return n;
}

Scheduler::Units::iterator Scheduler::admit() {
  if (waiting_.empty()) return active_.end();
  const auto at = waiting_.begin();
  Unit& unit = at->second;
  const auto members = static_cast<int64_t>(unit.members.size());
  const int64_t places = limits_.sequences - running();
  const int64_t room = pages_.free() - promised() - pages_.pages_of(unit.tokens);
  int64_t fit = std::min(places, room);
  // A group that is too large for all places or pages starts in parts, when nothing else runs.
  if (active_.empty())
    fit = std::clamp<int64_t>(fit, 1, members);
  else if (fit < std::min(members, limits_.sequences))
    return active_.end();
  fit = std::min(fit, members);
  if (fit < members) {
    Unit rest{.members = {unit.members.begin() + fit, unit.members.end()},
              .tokens = unit.tokens,
              .most = unit.most};
    unit.members.resize(static_cast<size_t>(fit));
    waiting_.emplace(rest.members.front(), std::move(rest));
  }
  NRL_CHECK(pages_.extend(unit.pages, unit.tokens), "{} tokens in {} free pages", unit.tokens, pages_.free());
  return active_.insert(waiting_.extract(at)).position;
}

void Scheduler::preempt(Units::iterator at) {
  Unit unit = std::move(at->second);
  active_.erase(at);
  pages_.release(unit.pages);
  unit.cached = 0;
  preempted_ += static_cast<int64_t>(unit.members.size());
  waiting_.emplace(unit.members.front(), std::move(unit));
}

void Scheduler::add_rows(Units::iterator at, int64_t count, Pass& pass) {
  Unit& unit = at->second;
  PassRows& rows = pass.rows.emplace_back(PassRows{.sequence = unit.members.front(),
                                                   .first = unit.cached,
                                                   .count = count,
                                                   .sampled = {},
                                                   .pages = unit.pages});
  unit.cached += count;
  if (unit.left() > 0) return;
  rows.sampled = unit.members;
  for (size_t i = 1; i < rows.sampled.size(); ++i)
    active_.emplace(rows.sampled[i], Unit{.members = {rows.sampled[i]},
                                          .tokens = unit.tokens,
                                          .most = unit.most,
                                          .cached = unit.cached,
                                          .pages = pages_.share(unit.pages)});
  unit.members.resize(1);
}

Pass Scheduler::next() {
  Pass pass;
  int64_t budget = limits_.tokens;
  std::vector<int64_t> prompts;
  for (auto at = active_.begin(); at != active_.end();) {
    Unit& unit = at->second;
    NRL_CHECK(unit.left() > 0, "sequence {} has no new token", at->first);
    if (unit.left() > 1) {
      prompts.push_back(at->first);
      ++at;
      continue;
    }
    const int64_t position = unit.cached;
    bool lost = false;
    while (!lost && !(pages_.extend(unit.pages, unit.tokens) &&
                      pages_.make_writable(unit.pages, position, pass.copies))) {
      const auto youngest = std::prev(active_.end());
      lost = youngest == at;
      NRL_CHECK(!lost || active_.size() > 1, "sequence {} lacks a page, and has all of them", at->first);
      preempt(youngest);
    }
    if (lost) break;  // it was the last one
    const auto row = at++;
    const auto rest = at;  // the members of a prompt of one token, which row has completed, come before it
    add_rows(row, 1, pass);
    at = rest;
    --budget;
  }
  const auto fill = [&](Units::iterator at) {
    const int64_t count = std::min(budget, at->second.left());
    if (count > 0) add_rows(at, count, pass);
    budget -= count;
  };
  for (const int64_t first : prompts)
    if (const auto at = active_.find(first); at != active_.end()) fill(at);
  while (budget > 0) {
    const auto admitted = admit();
    if (admitted == active_.end()) break;
    fill(admitted);
  }
  return pass;
}

void Scheduler::grow(int64_t sequence) {
  const auto at = active_.find(sequence);
  NRL_CHECK(at != active_.end() && at->second.left() == 0 && at->second.tokens < at->second.most,
            "sequence {} cannot grow", sequence);
  ++at->second.tokens;
}

Scheduler::Units::iterator Scheduler::find(Units& units, int64_t sequence) {
  auto at = units.upper_bound(sequence);
  if (at == units.begin()) return units.end();
  --at;
  const std::vector<int64_t>& members = at->second.members;
  return std::binary_search(members.begin(), members.end(), sequence) ? at : units.end();
}

void Scheduler::finish(int64_t sequence) {
  for (Units* units : {&active_, &waiting_}) {
    const auto at = find(*units, sequence);
    if (at == units->end()) continue;
    Unit unit = std::move(at->second);
    units->erase(at);
    std::erase(unit.members, sequence);
    if (unit.members.empty())
      pages_.release(unit.pages);
    else
      units->emplace(unit.members.front(), std::move(unit));
    return;
  }
  NRL_CHECK(false, "sequence {} is not known", sequence);
}

}  // namespace nrl::rollout
