#include "memory/plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "core/base/error.h"

namespace nrl::memory {
namespace {

/// Which buffers are alive at the same time; built in one sweep over the ticks.
class Overlaps {
 public:
  Overlaps(const std::vector<MemoryPlan::Buffer>& buffers, const std::vector<size_t>& which)
      : words_((which.size() + 63) / 64), bits_(64 * words_ * words_), alive_(words_) {
    std::vector<Life> lives;
    for (size_t i = 0; i < which.size(); ++i)
      for (const MemoryPlan::Buffer& b = buffers[which[i]];
           const Lifetime& life : b.reserved.empty() ? b.lifetimes : b.reserved)
        lives.push_back({life, i});
    const std::vector<uint32_t> begins = in_order(lives, &Lifetime::first),
                                ends = in_order(lives, &Lifetime::last);
    size_t dead = 0;
    for (const uint32_t next : begins) {
      const auto& [life, buffer] = lives[next];
      for (; lives[ends[dead]].life.last < life.first; ++dead)
        alive_[lives[ends[dead]].buffer / 64] &= ~bit(lives[ends[dead]].buffer);
      for (size_t w = 0; w < words_; ++w) bits_[buffer * words_ + w] |= alive_[w];
      alive_[buffer / 64] |= bit(buffer);
    }
    // So far only the one that begins later knows of the other.
    for (size_t row = 0; row < words_; ++row)
      for (size_t column = row; column < words_; ++column) {
        const Square above = transposed(square(row, column)), below = transposed(square(column, row));
        add(row, column, below);
        add(column, row, above);
      }
  }
  bool together(size_t a, size_t b) const { return (bits_[a * words_ + b / 64] & bit(b)) != 0; }
  /// A bit for each buffer: that it is alive at the same time as `a`.
  std::span<const uint64_t> with(size_t a) const { return {&bits_[a * words_], words_}; }

 private:
  struct Life {
    Lifetime life;
    size_t buffer;
  };
  /// Indices of the lives by their first or last tick, counted.
  static std::vector<uint32_t> in_order(const std::vector<Life>& lives, int Lifetime::*tick) {
    int most = 0;
    for (const Life& l : lives) most = std::max(most, l.life.*tick);
    std::vector<uint32_t> places(static_cast<size_t>(most) + 2), out(lives.size());
    for (const Life& l : lives) ++places[static_cast<size_t>(l.life.*tick) + 1];
    std::partial_sum(places.begin(), places.end(), places.begin());
    for (size_t i = 0; i < lives.size(); ++i)
      out[places[static_cast<size_t>(lives[i].life.*tick)]++] = static_cast<uint32_t>(i);
    return out;
  }

  /// A part of the matrix of 64 x 64 bits.
  using Square = std::array<uint64_t, 64>;

  static uint64_t bit(size_t i) { return uint64_t{1} << (i % 64); }
  /// Swaps quarters, then quarters of these (Warren, Hacker's Delight, 7-3).
  static Square transposed(Square s) {
    uint64_t mask = 0xffffffff;
    for (size_t half = 32; half > 0; half /= 2, mask ^= mask << half)
      for (size_t i = 0; i < 64; i = (i + half + 1) & ~half) {
        const uint64_t swapped = (s[i] >> half ^ s[i + half]) & mask;
        s[i] ^= swapped << half;
        s[i + half] ^= swapped;
      }
    return s;
  }
  Square square(size_t row, size_t column) const {
    Square out;
    for (size_t i = 0; i < 64; ++i) out[i] = bits_[(64 * row + i) * words_ + column];
    return out;
  }
  void add(size_t row, size_t column, const Square& s) {
    for (size_t i = 0; i < 64; ++i) bits_[(64 * row + i) * words_ + column] |= s[i];
  }

  size_t words_;
  std::vector<uint64_t> bits_, alive_;  // bits_: a matrix with a row for each buffer
};

/// Places buffers at the lowest offsets that are free. The placed ones are in runs by offset: a run is
/// skipped as a whole by a buffer that is alive with none of it, or with all of it where it has no gaps.
class FirstFit {
 public:
  FirstFit(const Overlaps& overlaps, int64_t base) : overlaps_(overlaps), base_(base) {}

  /// Returns the offset of buffer `i` of the overlaps.
  int64_t place(size_t i, int64_t bytes) {
    int64_t offset = base_;
    for (const Run& run : runs_) {
      if (run.end <= offset || !has(run.any, i)) continue;
      if (run.solid && has(run.all, i)) {
        if (run.placed.front().begin >= offset + bytes) break;
        offset = run.end;
      } else if (!pass(run, i, bytes, offset)) {
        break;
      }
    }
    insert({offset, offset + bytes, i});
    return offset;
  }

 private:
  struct Placed {
    int64_t begin, end;
    size_t buffer;
  };
  struct Run {
    std::vector<Placed> placed = {};           // by begin
    int64_t end = 0;                           // the largest
    bool solid = true;                         // no byte between the first begin and `end` is in none of them
    std::vector<uint64_t> any = {}, all = {};  // buffers that are alive at the same time
  };
  static constexpr size_t longest = 64;

  static bool has(const std::vector<uint64_t>& set, size_t i) { return (set[i / 64] >> (i % 64) & 1) != 0; }

  /// Moves `offset` behind all of the run that is in the way; false if there is room before one of it.
  bool pass(const Run& run, size_t i, int64_t bytes, int64_t& offset) const {
    for (const Placed& other : run.placed) {
      if (other.end <= offset || !overlaps_.together(i, other.buffer)) continue;
      if (other.begin >= offset + bytes) return false;
      offset = other.end;
    }
    return true;
  }

  void insert(const Placed& now) {
    const auto before = [](const Placed& a, const Placed& b) { return a.begin < b.begin; };
    auto at = std::upper_bound(runs_.begin(), runs_.end(), now, [&](const Placed& a, const Run& run) {
      return before(a, run.placed.front());
    });
    if (at == runs_.begin() && at == runs_.end())
      at = runs_.insert(at, Run{});
    else if (at != runs_.begin())
      --at;
    std::vector<Placed>& placed = at->placed;
    placed.insert(std::upper_bound(placed.begin(), placed.end(), now, before), now);
    if (placed.size() < longest) {
      add(*at, now.buffer);
      measure(*at);
      return;
    }
    Run second;
    second.placed.assign(placed.begin() + longest / 2, placed.end());
    placed.resize(longest / 2);
    for (Run* run : {&*at, &second}) {
      run->any.clear();
      for (const Placed& p : run->placed) add(*run, p.buffer);
      measure(*run);
    }
    runs_.insert(at + 1, std::move(second));
  }

  void add(Run& run, size_t buffer) const {
    const std::span<const uint64_t> with = overlaps_.with(buffer);
    if (run.any.empty()) {
      run.any.assign(with.begin(), with.end());
      run.all = run.any;
    }
    for (size_t w = 0; w < with.size(); ++w) {
      run.any[w] |= with[w];
      run.all[w] &= with[w];
    }
  }
  static void measure(Run& run) {
    run.end = run.placed.front().begin;
    run.solid = true;
    for (const Placed& p : run.placed) {
      run.solid = run.solid && p.begin <= run.end;
      run.end = std::max(run.end, p.end);
    }
  }

  const Overlaps& overlaps_;
  int64_t base_;
  std::vector<Run> runs_;
};

}  // namespace

BufferId MemoryPlan::add(std::string name, Category category, int64_t bytes, Tier tier) {
  NRL_CHECK(!solved_ && bytes >= 0, "buffer {}", name);
  const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
  buffers_.push_back({.name = std::move(name), .category = category, .tier = tier, .bytes = rounded});
  return static_cast<BufferId>(buffers_.size()) - 1;
}

BufferId MemoryPlan::add(std::string name, Category category, int64_t bytes, std::vector<Lifetime> lifetimes,
                         Tier tier, std::vector<Lifetime> reserved) {
  NRL_CHECK(!lifetimes.empty(), "buffer {} has no lifetime", name);
  for (const auto* list : {&lifetimes, &reserved})
    for (size_t i = 0; i < list->size(); ++i)
      NRL_CHECK(0 <= (*list)[i].first && (*list)[i].first <= (*list)[i].last &&
                    (i == 0 || (*list)[i - 1].last < (*list)[i].first),
                "buffer {} has lifetimes out of order", name);
  const BufferId id = add(std::move(name), category, bytes, tier);
  buffers_.back().lifetimes = std::move(lifetimes);
  buffers_.back().reserved = std::move(reserved);
  return id;
}

void MemoryPlan::solve() {
  NRL_CHECK(!solved_);
  solved_ = true;
  for (int t = 0; t < tier_count; ++t) place(static_cast<Tier>(t));
  int64_t shared = total_bytes();
  for (const Buffer& b : buffers_)
    if (b.always() && b.tier == Tier::device) {
      labeled_[static_cast<size_t>(b.category)] += b.bytes;
      shared -= b.bytes;
    }
  labeled_[static_cast<size_t>(Category::activations)] += shared;
}

void MemoryPlan::place(Tier tier) {
  int64_t& arena = arena_[static_cast<size_t>(tier)];
  std::vector<size_t> order;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    if (buffer.tier != tier || buffer.bytes == 0) continue;
    if (buffer.always()) {
      buffer.offset = arena;
      arena += buffer.bytes;
    } else {
      order.push_back(i);
    }
  }
  const int64_t base = arena;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return buffers_[a].bytes > buffers_[b].bytes; });
  const Overlaps overlaps(buffers_, order);
  FirstFit fit(overlaps, base);
  for (size_t i = 0; i < order.size(); ++i) {
    Buffer& buffer = buffers_[order[i]];
    buffer.offset = fit.place(i, buffer.bytes);
    arena = std::max(arena, buffer.offset + buffer.bytes);
  }
}

Arenas::Arenas(const MemoryPlan& plan, const std::string& offload_directory)
    : host_(static_cast<size_t>(plan.bytes(Tier::device))) {
  NRL_CHECK(plan.bytes(Tier::pinned) == 0, "a CPU run has pinned memory in its plan");
  blocks_[static_cast<size_t>(Tier::device)] = {host_.data(), plan.bytes(Tier::device)};
  const int64_t offloaded = plan.bytes(Tier::host);
  if (offload_directory.empty())
    offloaded_ = cpu::HostMemory(static_cast<size_t>(offloaded));
  else
    file_ = cpu::FileMemory(offload_directory, static_cast<size_t>(offloaded));
  blocks_[static_cast<size_t>(Tier::host)] = {file_.data() ? file_.data() : offloaded_.data(), offloaded};
}

Arenas Arenas::unreserved(const MemoryPlan& plan) {
  Arenas out;
  for (const auto& [tier, memory] : {std::pair(Tier::device, &out.host_), {Tier::host, &out.offloaded_}}) {
    *memory = cpu::HostMemory(static_cast<size_t>(plan.bytes(tier)), false);
    out.blocks_[static_cast<size_t>(tier)] = {memory->data(), plan.bytes(tier)};
  }
  return out;
}

Arenas Arenas::nowhere() {
  Arenas out;
  out.nowhere_ = true;
  return out;
}

Arenas::Arenas(const MemoryPlan& plan, device::Runtime& device, device::StreamHandle stream,
               const device::Allocator& allocator) {
  using Kind = device::Memory::Kind;
  for (int i = 0; i < tier_count; ++i) {
    const auto t = static_cast<size_t>(i);
    const auto tier = static_cast<Tier>(i);
    const int64_t bytes = plan.bytes(tier);
    device_[t] = device::Memory(device, tier == Tier::device ? Kind::device : Kind::pinned,
                                static_cast<size_t>(bytes), allocator);
    blocks_[t] = {device_[t].data(), bytes};
    if (bytes > 0 && tier == Tier::device)
      device.fill(blocks_[t].data, 0, static_cast<size_t>(bytes), stream);
  }
}

void Arenas::prefetch(const void* begin, int64_t bytes) const {
  if (file_.data()) file_.prefetch(begin, static_cast<size_t>(bytes));
}

void Arenas::evict(const void* begin, int64_t bytes) const {
  if (file_.data()) file_.evict(begin, static_cast<size_t>(bytes));
}

void Arenas::evict() const {
  evict(file_.data(), static_cast<int64_t>(file_.size()));
}

void* Arenas::at(const MemoryPlan& plan, BufferId id) const {
  if (nowhere_) {
    alignas(MemoryPlan::alignment) static std::byte first[MemoryPlan::alignment];
    return first + id * MemoryPlan::alignment;
  }
  const auto& buffer = plan.buffers()[id];
  const auto& block = blocks_[static_cast<size_t>(buffer.tier)];
  NRL_CHECK(buffer.offset + buffer.bytes <= block.size, "buffer {} lies outside its arena", buffer.name);
  return block.data + buffer.offset;
}

}  // namespace nrl::memory
