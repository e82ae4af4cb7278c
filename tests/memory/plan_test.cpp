// Offsets from lifetimes, and lifetimes from recorded uses.
#include <algorithm>
#include <random>
#include <vector>

#include "core/base/error.h"
#include "memory/liveness.h"
#include "tests/catch.h"

using namespace nrl::memory;

namespace {

bool overlap(const MemoryPlan::Buffer& a, const MemoryPlan::Buffer& b) {
  return a.tier == b.tier && a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes &&
         b.offset < a.offset + a.bytes;
}

bool together(const MemoryPlan::Buffer& a, const MemoryPlan::Buffer& b) {
  if (a.always() || b.always()) return true;
  for (const Lifetime& x : a.lifetimes)
    for (const Lifetime& y : b.lifetimes)
      if (x.first <= y.last && y.first <= x.last) return true;
  return false;
}

const MemoryPlan::Buffer& of(const MemoryPlan& plan, BufferId id) {
  return plan.buffers()[id];
}

}  // namespace

TEST_CASE("buffers lie where a plain first fit puts them", "[memory]") {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 60; ++round) {
    MemoryPlan plan;
    const int buffers = 1 + below(500), ticks = 1 + below(300), longest = 1 + below(ticks);
    for (int i = 0; i < buffers; ++i) {
      std::vector<Lifetime> lifetimes;
      int at = below(ticks);
      for (int n = 1 + below(3); n > 0; --n) {
        lifetimes.push_back({at, at + below(longest)});
        at = lifetimes.back().last + 1 + below(5);
      }
      plan.add("b", Category::activations, MemoryPlan::alignment * (1 + below(1 + below(50))), lifetimes);
    }
    plan.solve();
    std::vector<const MemoryPlan::Buffer*> order, placed;  // the latter by offset
    for (const MemoryPlan::Buffer& b : plan.buffers()) order.push_back(&b);
    std::stable_sort(order.begin(), order.end(),
                     [](const auto* a, const auto* b) { return a->bytes > b->bytes; });
    for (const MemoryPlan::Buffer* b : order) {
      int64_t lowest = 0;
      for (const MemoryPlan::Buffer* other : placed) {
        if (other->offset + other->bytes <= lowest || !together(*b, *other)) continue;
        if (other->offset >= lowest + b->bytes) break;
        lowest = other->offset + other->bytes;
      }
      INFO("round " << round);
      REQUIRE(b->offset == lowest);
      placed.insert(std::upper_bound(placed.begin(), placed.end(), b,
                                     [](const auto* x, const auto* y) { return x->offset < y->offset; }),
                    b);
    }
  }
}

TEST_CASE("buffers with disjoint lifetimes share memory", "[memory]") {
  MemoryPlan plan;
  const auto weights = plan.add("weights", Category::weights, 1000);
  const auto a = plan.add("a", Category::activations, 512, {{0, 3}, {8, 9}});
  const auto b = plan.add("b", Category::activations, 512, {{4, 7}});
  const auto c = plan.add("c", Category::activations, 512, {{3, 4}});
  const auto pinned = plan.add("pinned", Category::data, 300, Tier::pinned);
  const auto state = plan.add("state", Category::optimizer, 700, Tier::host);
  const auto d = plan.add("d", Category::activations, 256, {{0, 3}}, Tier::host);
  const auto e = plan.add("e", Category::activations, 256, {{4, 5}}, Tier::host);
  plan.solve();
  CHECK(plan.bytes(Tier::host) == 768 + 256);
  CHECK(plan.offset(state) == 0);
  CHECK(plan.offset(d) == plan.offset(e));
  CHECK(plan.bytes(Category::optimizer) == 0);
  CHECK(plan.offset(weights) == 0);
  CHECK(plan.offset(a) == plan.offset(b));
  CHECK(plan.offset(c) == plan.offset(a) + 512);
  CHECK(plan.bytes(Tier::device) == 1024 + 2 * 512);
  CHECK(plan.bytes(Category::weights) == 1024);
  CHECK(plan.bytes(Category::activations) == 2 * 512);
  CHECK(plan.bytes(Category::data) == 0);
  CHECK(plan.bytes(Tier::pinned) == 512);
  CHECK(plan.offset(pinned) == 0);
}

TEST_CASE("buffers with random lifetimes never overlap while both are alive", "[memory]") {
  std::mt19937 random(1);
  for (int round = 0; round < 30; ++round) {
    MemoryPlan plan;
    for (int i = 0; i < 70; ++i) {
      std::vector<Lifetime> lives;
      int tick = static_cast<int>(random() % 20);
      for (unsigned k = random() % 4; k > 0; --k) {
        const int last = tick + static_cast<int>(random() % 5);
        lives.push_back({tick, last});
        tick = last + 1 + static_cast<int>(random() % 7);
      }
      const auto bytes = static_cast<int64_t>(random() % 2000);
      if (lives.empty())
        plan.add("b", Category::data, bytes);
      else
        plan.add("b", Category::activations, bytes, lives);
    }
    plan.solve();
    int64_t labeled = 0;
    for (int c = 0; c < category_count; ++c) labeled += plan.bytes(static_cast<Category>(c));
    CHECK(labeled == plan.total_bytes());
    const auto& all = plan.buffers();
    for (size_t i = 0; i < all.size(); ++i) {
      CHECK(all[i].offset % MemoryPlan::alignment == 0);
      CHECK(all[i].offset + all[i].bytes <= plan.total_bytes());
      for (size_t j = 0; j < i; ++j)
        if (together(all[i], all[j])) CHECK_FALSE(overlap(all[i], all[j]));
    }
  }
}

TEST_CASE("an output takes over an input that is used for the last time", "[memory]") {
  MemoryPlan plan;
  Liveness l;
  const int x = l.add("x", 512, Category::activations), y = l.add("y", 512, Category::activations),
            z = l.add("z", 512, Category::activations), w = l.add("w", 1024, Category::activations);
  for (const int start : {0, 10}) {  // twice the same, as for two microbatches
    l.use(x, start, true);
    l.use(x, start + 1, false);
    l.use(y, start + 1, true);
    l.may_take_over(y, x, start + 1);
    l.use(y, start + 2, false);
    l.use(z, start + 2, true);
    l.may_take_over(z, y, start + 2);
    l.use(z, start + 3, false);
    l.use(w, start + 3, true);
    l.may_take_over(w, z, start + 3);  // another size
  }
  const auto ids = l.declare(plan);
  CHECK(ids[0] == ids[1]);
  CHECK(ids[1] == ids[2]);
  CHECK(ids[3] != ids[2]);
  CHECK(of(plan, ids[0]).lifetimes == std::vector<Lifetime>{{0, 3}, {10, 13}});
  CHECK(of(plan, ids[3]).lifetimes == std::vector<Lifetime>{{3, 3}, {13, 13}});
}

TEST_CASE("an input that is read again is not taken over", "[memory]") {
  MemoryPlan plan;
  Liveness l;
  const int x = l.add("x", 512, Category::activations), y = l.add("y", 512, Category::activations);
  for (const int start : {0, 10}) {
    l.use(x, start, true);
    l.use(x, start + 1, false);
    l.use(y, start + 1, true);
    l.may_take_over(y, x, start + 1);
    if (start == 10) l.use(x, start + 2, false);  // in the second round only
    l.use(y, start + 3, false);
  }
  const auto ids = l.declare(plan);
  REQUIRE(ids[0] != ids[1]);
  CHECK(of(plan, ids[0]).lifetimes == std::vector<Lifetime>{{0, 1}, {10, 12}});
  CHECK(of(plan, ids[1]).lifetimes == std::vector<Lifetime>{{1, 3}, {11, 13}});
}

TEST_CASE("the buffers of a family may be exchanged", "[memory]") {
  MemoryPlan plan;
  Liveness l;
  // Two stashes that are in use together, of three; a gradient that takes over what each of them keeps.
  const int kept = l.add_family("kept", 512, Category::activations, Tier::device, 3),
            gradient = l.add_family("gradient", 512, Category::activations, Tier::device, 3),
            passing = l.add_family("passing", 512, Category::activations, Tier::device, 3);
  for (const int stash : {0, 1}) {
    l.use(kept + stash, 10 * stash, true);
    l.use(passing + stash, 10 * stash + 1, true);
    l.use(passing + stash, 10 * stash + 2, false);
  }
  for (const int stash : {0, 1}) {
    l.use(kept + stash, 20 + 10 * stash, false);
    l.use(gradient + stash, 20 + 10 * stash, true);
    l.may_take_over(gradient + stash, kept + stash, 20 + 10 * stash);
    l.use(gradient + stash, 25 + 10 * stash, false);
  }
  const auto ids = l.declare(plan);
  for (int stash = 0; stash < 3; ++stash) {
    CHECK(ids[static_cast<size_t>(gradient + stash)] == ids[static_cast<size_t>(kept + stash)]);
    CHECK(ids[static_cast<size_t>(passing + stash)] == ids[static_cast<size_t>(passing)]);
    CHECK(of(plan, ids[static_cast<size_t>(kept + stash)]).reserved == std::vector<Lifetime>{{0, 35}});
  }
  CHECK(of(plan, ids[static_cast<size_t>(kept)]).lifetimes == std::vector<Lifetime>{{0, 25}});
  CHECK(of(plan, ids[static_cast<size_t>(passing)]).lifetimes == std::vector<Lifetime>{{1, 2}, {11, 12}});
  plan.solve();
  CHECK(plan.total_bytes() == 4 * 512);
}

TEST_CASE("a buffer that is read before it is written is an error", "[memory]") {
  Liveness l;
  const int x = l.add("x", 1, Category::activations);
  REQUIRE_THROWS_WITH(l.use(x, 3, false), ContainsSubstring("x is read before it is written"));
}
