#include "memory/liveness.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/base/error.h"

namespace nrl::memory {
namespace {

/// Merges both lists if they overlap at exactly these ticks, where an interval of `input` ends and one of
/// `output` begins; else nullopt.
std::optional<std::vector<Lifetime>> joined(const std::vector<Lifetime>& input,
                                            const std::vector<Lifetime>& output,
                                            const std::vector<int>& ticks) {
  std::vector<Lifetime> merged;
  std::merge(input.begin(), input.end(), output.begin(), output.end(), std::back_inserter(merged),
             [](const Lifetime& a, const Lifetime& b) {
               return a.first != b.first ? a.first < b.first : a.last < b.last;
             });
  std::vector<Lifetime> result;
  size_t met = 0;
  for (const Lifetime& life : merged) {
    if (!result.empty() && life.first <= result.back().last) {
      const int tick = result.back().last;
      if (life.first != tick || !std::binary_search(ticks.begin(), ticks.end(), tick)) return std::nullopt;
      result.back().last = life.last;
      ++met;
    } else {
      result.push_back(life);
    }
  }
  if (met != ticks.size()) return std::nullopt;
  return result;
}

/// Makes the intervals ascending and disjoint. Returns whether some of them overlapped.
bool unite(std::vector<Lifetime>& all) {
  std::sort(all.begin(), all.end(), [](const Lifetime& a, const Lifetime& b) { return a.first < b.first; });
  std::vector<Lifetime> out;
  bool overlapped = false;
  for (const Lifetime& life : all) {
    if (!out.empty() && life.first <= out.back().last) {
      overlapped = true;
      out.back().last = std::max(out.back().last, life.last);
    } else {
      out.push_back(life);
    }
  }
  all = std::move(out);
  return overlapped;
}

}  // namespace

int Liveness::add(std::string name, int64_t bytes, Category category, Tier tier) {
  return add_family(name, bytes, category, tier, 1);
}

int Liveness::add_family(const std::string& name, int64_t bytes, Category category, Tier tier, int count) {
  const auto first = static_cast<int>(buffers_.size());
  for (int i = 0; i < count; ++i)
    buffers_.push_back(
        {.name = name, .bytes = bytes, .category = category, .tier = tier, .first = first, .count = count});
  return first;
}

void Liveness::use(int buffer, int tick, bool begins) {
  Buffer& b = buffers_[buffer];
  if (begins && (b.lifetimes.empty() || b.lifetimes.back().last < tick)) {
    b.lifetimes.push_back({tick, tick});
    return;
  }
  NRL_CHECK(!b.lifetimes.empty(), "{} is read before it is written", b.name);
  NRL_CHECK(tick >= b.lifetimes.back().last, "{}: ticks must not descend", b.name);
  b.lifetimes.back().last = tick;
}

void Liveness::may_take_over(int output, int input, int tick) {
  takeovers_[{output, input}].push_back(tick);
}

std::vector<BufferId> Liveness::declare(MemoryPlan& plan) const {
  // By the first buffer of a family: the first one of the family whose memory it uses.
  std::vector<int> shared(buffers_.size());
  std::iota(shared.begin(), shared.end(), 0);
  const auto root = [&](int first) {
    while (shared[first] != first) first = shared[first];
    return first;
  };
  struct TakeOver {
    std::vector<std::vector<int>> ticks = {};  // by number in the family
    bool aligned = true;                       // numbers are always the same
  };
  std::map<std::pair<int, int>, TakeOver> takeovers;  // by families
  for (const auto& [pair, ticks] : takeovers_) {
    const Buffer &out = buffers_[pair.first], &in = buffers_[pair.second];
    TakeOver& t = takeovers[{out.first, in.first}];
    t.ticks.resize(static_cast<size_t>(out.count));
    const int number = pair.first - out.first;
    t.aligned = t.aligned && out.count == in.count && number == pair.second - in.first;
    t.ticks[static_cast<size_t>(number)] = ticks;
  }
  std::vector<std::vector<Lifetime>> lives;
  for (const Buffer& b : buffers_) lives.push_back(b.lifetimes);
  for (const auto& [pair, takeover] : takeovers) {
    const int output = root(pair.first), input = root(pair.second);
    const Buffer &out = buffers_[output], &in = buffers_[input];
    if (output == input || out.bytes != in.bytes || out.tier != in.tier || out.count != in.count ||
        !takeover.aligned)
      continue;
    std::vector<std::vector<Lifetime>> both;
    for (int i = 0; i < in.count; ++i) {
      auto life = joined(lives[input + i], lives[output + i], takeover.ticks[static_cast<size_t>(i)]);
      if (!life) break;
      both.push_back(std::move(*life));
    }
    if (static_cast<int>(both.size()) < in.count) continue;
    std::move(both.begin(), both.end(), lives.begin() + input);
    shared[output] = input;
  }
  std::vector<BufferId> ids(buffers_.size(), -1);
  for (int first = 0; first < static_cast<int>(buffers_.size()); first += buffers_[first].count) {
    if (shared[first] != first) continue;
    const Buffer& b = buffers_[first];
    std::vector<Lifetime> all;
    for (int i = first; i < first + b.count; ++i) all.insert(all.end(), lives[i].begin(), lives[i].end());
    if (all.empty()) continue;
    const bool together = unite(all);
    if (!together) {
      std::fill_n(ids.begin() + first, b.count, plan.add(b.name, b.category, b.bytes, all, b.tier));
      continue;
    }
    for (int i = first; i < first + b.count; ++i)
      ids[i] = plan.add(b.name, b.category, b.bytes, lives[i].empty() ? all : lives[i], b.tier, all);
  }
  for (int i = 0; i < static_cast<int>(buffers_.size()); ++i) {
    const int first = buffers_[i].first;
    ids[i] = ids[root(first) + i - first];
  }
  return ids;
}

}  // namespace nrl::memory
