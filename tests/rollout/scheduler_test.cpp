// Continuous batching without a model. A fake cache holds for each place the hash of the prefix that a model
// would have computed it from: every pass must find the right one for each token before its rows.
#include "apps/rollout/scheduler.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using rollout::Pass;
using rollout::PassRows;
using rollout::Scheduler;

namespace {

/// The hash of a prefix, from the hash of the shorter one.
uint64_t extended(uint64_t prefix, uint64_t token) {
  return (prefix ^ (token + 1)) * 0x9E3779B97F4A7C15u + 7;
}

class FakeModel {
 public:
  FakeModel(rollout::SchedulerLimits limits, int64_t pages, int64_t page_tokens)
      : scheduler(limits, pages, page_tokens),
        limits_(limits),
        page_(page_tokens),
        cache_(static_cast<size_t>(pages * page_tokens)) {}

  /// `most`: tokens of each sample, by which it is over.
  void add(int64_t tokens, const std::vector<int64_t>& most) {
    const int64_t longest = *std::max_element(most.begin(), most.end());
    const int64_t first = scheduler.add(tokens, longest, static_cast<int64_t>(most.size()));
    for (size_t i = 0; i < most.size(); ++i)
      sequences_[first + static_cast<int64_t>(i)] = {prompts_, tokens, most[i]};
    ++prompts_;
  }
  void abort(int64_t sequence) {
    scheduler.finish(sequence);
    REQUIRE(sequences_.erase(sequence) == 1);
  }
  std::vector<int64_t> alive() const {
    std::vector<int64_t> ids;
    for (const auto& [id, s] : sequences_) ids.push_back(id);
    return ids;
  }

  /// Executes a pass; false if there is none.
  bool step() {
    const Pass pass = scheduler.next();
    for (const auto& [from, to] : pass.copies)
      std::copy_n(cache_.begin() + from * page_, page_, cache_.begin() + to * page_);
    int64_t rows = 0;
    std::set<int64_t> written;
    for (const PassRows& r : pass.rows) {
      Sequence& s = sequences_.at(r.sequence);
      REQUIRE(r.count > 0);
      REQUIRE(static_cast<int64_t>(r.pages.size()) * page_ >= r.first + r.count);
      uint64_t prefix = 0;
      for (int64_t p = 0; p < r.first + r.count; ++p) {
        prefix = extended(prefix, token(r.sequence, p));
        const int64_t place = r.pages[static_cast<size_t>(p / page_)] * page_ + p % page_;
        if (p < r.first) {
          REQUIRE(cache_[static_cast<size_t>(place)] == prefix);
        } else {
          REQUIRE(written.insert(place).second);  // no other row of the pass writes it
          REQUIRE(scheduler.pages().users(static_cast<int32_t>(place / page_)) >=
                  static_cast<int>(std::max<size_t>(r.sampled.size(), 1)));
          cache_[static_cast<size_t>(place)] = prefix;
        }
      }
      rows += r.count;
      computed += r.count;
      largest_chunk = std::max(largest_chunk, r.count);
      if (r.sampled.empty()) continue;
      REQUIRE(r.first + r.count == s.tokens);
      for (const int64_t id : r.sampled) sampled_.push_back(id);
    }
    REQUIRE(rows <= limits_.tokens);
    REQUIRE(scheduler.running() <= limits_.sequences);
    REQUIRE(static_cast<int64_t>(sampled_.size()) <= limits_.sequences);
    for (const int64_t id : std::exchange(sampled_, {})) {
      Sequence& s = sequences_.at(id);
      if (s.tokens + 1 < s.most) {
        ++s.tokens;
        scheduler.grow(id);
      } else {
        scheduler.finish(id);
        finished.push_back(id);
        sequences_.erase(id);
      }
    }
    return rows > 0;
  }
  void run() {
    while (step()) {
    }
    REQUIRE(scheduler.idle());
    REQUIRE(sequences_.empty());
    REQUIRE(scheduler.pages().free() == scheduler.pages().count());
  }

  Scheduler scheduler;
  std::vector<int64_t> finished;
  int64_t computed = 0, largest_chunk = 0;

 private:
  struct Sequence {
    int64_t prompt = 0, tokens = 0, most = 0;
    int64_t prompt_tokens = tokens;
  };
  uint64_t token(int64_t id, int64_t position) const {
    const Sequence& s = sequences_.at(id);
    const int64_t of = position < s.prompt_tokens ? -1 - s.prompt : id;
    return static_cast<uint64_t>(of * 100003 + position);
  }

  rollout::SchedulerLimits limits_;
  int64_t page_, prompts_ = 0;
  std::vector<uint64_t> cache_;
  std::map<int64_t, Sequence> sequences_;
  std::vector<int64_t> sampled_;
};

}  // namespace

TEST_CASE("a prompt goes through in chunks, then a token at a time", "[rollout]") {
  Scheduler s({.tokens = 8, .sequences = 4}, 10, 4);
  REQUIRE(s.add(18, 30, 1) == 0);
  std::vector<int64_t> counts;
  for (int i = 0; i < 5; ++i) {
    const Pass pass = s.next();
    REQUIRE(pass.rows.size() == 1);
    counts.push_back(pass.rows[0].count);
    CHECK(pass.rows[0].sampled.empty() == (i < 2));
    if (i >= 2) s.grow(0);
  }
  CHECK(counts == std::vector<int64_t>{8, 8, 2, 1, 1});
  s.finish(0);
  CHECK(s.next().rows.empty());
  CHECK(s.idle());
}

TEST_CASE("running sequences come before prompts in a pass", "[rollout]") {
  Scheduler s({.tokens = 6, .sequences = 4}, 20, 4);
  s.add(3, 10, 1);
  s.add(20, 30, 1);
  const Pass first = s.next();
  REQUIRE(first.rows.size() == 2);
  CHECK(first.rows[1].count == 3);
  s.grow(0);
  const Pass second = s.next();
  REQUIRE(second.rows.size() == 2);
  CHECK(second.rows[0].sequence == 0);
  CHECK(second.rows[0].first == 3);
  CHECK(second.rows[1].first == 3);
  CHECK(second.rows[1].count == 5);
}

TEST_CASE("the prompt of a group is computed once", "[rollout]") {
  FakeModel m({.tokens = 16, .sequences = 8}, 40, 4);
  m.add(10, {12, 12, 12, 12, 15});
  m.run();
  CHECK(m.computed == 10 + 4 * 1 + 4);
  CHECK(m.scheduler.preemptions() == 0);
}

TEST_CASE("a group begins when there is room for all of it", "[rollout]") {
  Scheduler s({.tokens = 32, .sequences = 8}, 8, 4);
  s.add(8, 12, 1);   // 2 pages
  s.add(12, 16, 4);  // 3 pages and 4: one too many
  s.add(4, 8, 1);    // would fit, but is younger
  CHECK(s.next().rows.size() == 1);
  CHECK(s.running() == 1);
  s.finish(0);
  const Pass pass = s.next();
  REQUIRE(pass.rows.size() == 1);
  CHECK(pass.rows[0].sampled == std::vector<int64_t>{1, 2, 3, 4});
}

TEST_CASE("a group of more samples than there are places begins in parts", "[rollout]") {
  FakeModel m({.tokens = 8, .sequences = 3}, 30, 4);
  m.add(6, {9, 9, 9, 9, 9, 9, 9});
  m.run();
  CHECK(m.computed == 3 * 6 + 7 * 2);
  CHECK(m.finished.size() == 7);
}

TEST_CASE("without a free page the youngest sequence is computed again later", "[rollout]") {
  FakeModel m({.tokens = 16, .sequences = 4}, 5, 4);
  m.add(4, {18});
  m.add(4, {14});
  m.run();
  CHECK(m.scheduler.preemptions() > 0);
  CHECK(m.finished.size() == 2);
}

TEST_CASE("a sequence may need all pages", "[rollout]") {
  FakeModel m({.tokens = 4, .sequences = 4}, 3, 4);
  m.add(10, {12, 12, 12});
  m.add(11, {12});
  m.run();
  CHECK(m.finished.size() == 4);
  CHECK_THROWS_AS(m.scheduler.add(10, 13, 1), Error);
}

TEST_CASE("random loads: every token finds its prefix, no page is left", "[rollout]") {
  std::mt19937_64 random(11);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  int64_t preempted = 0;
  for (int load = 0; load < 300; ++load) {
    INFO("load " << load);
    const int64_t sequences = draw(1, 12), page = draw(1, 9), pages = draw(2, 40);
    const int64_t capacity = page * pages;
    FakeModel m({.tokens = draw(sequences, 40), .sequences = sequences}, pages, page);
    int64_t left = draw(1, 25);
    for (int64_t steps = 0; left > 0 || m.step(); ++steps) {
      REQUIRE(steps < 100000);
      if (left > 0 && draw(0, 2) == 0) {
        const int64_t tokens = draw(1, std::max<int64_t>(1, std::min<int64_t>(30, capacity - 1)));
        std::vector<int64_t> most(static_cast<size_t>(draw(0, 2) == 0 ? draw(1, 9) : 1));
        for (int64_t& n : most) n = draw(tokens, std::min(capacity, tokens + 25));
        m.add(tokens, most);
        --left;
      } else if (left > 0) {
        m.step();
      }
      if (const auto alive = m.alive(); !alive.empty() && draw(0, 30) == 0)
        m.abort(alive[static_cast<size_t>(draw(0, static_cast<int64_t>(alive.size()) - 1))]);
    }
    m.run();
    preempted += m.scheduler.preemptions();
  }
  CHECK(preempted > 100);  // the loads were heavy enough
}
