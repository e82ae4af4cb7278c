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

}  // namespace

int Liveness::add(std::string name, int64_t bytes, Category category, Tier tier) {
  buffers_.push_back({.name = std::move(name), .bytes = bytes, .category = category, .tier = tier});
  return static_cast<int>(buffers_.size()) - 1;
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
  std::vector<int> shared(buffers_.size());  // the buffer whose memory each one uses
  std::iota(shared.begin(), shared.end(), 0);
  const auto root = [&](int i) {
    while (shared[i] != i) i = shared[i];
    return i;
  };
  std::vector<std::vector<Lifetime>> lives;
  for (const Buffer& b : buffers_) lives.push_back(b.lifetimes);
  for (const auto& [pair, ticks] : takeovers_) {
    const int output = root(pair.first), input = root(pair.second);
    const Buffer &out = buffers_[output], &in = buffers_[input];
    if (output == input || out.bytes != in.bytes || out.tier != in.tier) continue;
    auto life = joined(lives[input], lives[output], ticks);
    if (!life) continue;
    lives[input] = std::move(*life);
    shared[output] = input;
  }
  std::vector<BufferId> ids(buffers_.size(), -1);
  for (size_t i = 0; i < buffers_.size(); ++i)
    if (shared[i] == static_cast<int>(i) && !lives[i].empty())
      ids[i] =
          plan.add(buffers_[i].name, buffers_[i].category, buffers_[i].bytes, lives[i], buffers_[i].tier);
  for (size_t i = 0; i < buffers_.size(); ++i) ids[i] = ids[root(static_cast<int>(i))];
  return ids;
}

}  // namespace nrl::memory
