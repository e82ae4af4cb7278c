#include "apps/monitor/leak_detector.h"

#include "tests/catch.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

constexpr int64_t mb = 1000 * 1000;

/// The step and text of every warning for a series of totals in bytes. All growth is in the part "heap".
struct Warnings {
  std::vector<int64_t> steps;
  std::vector<std::string> texts;
  std::vector<int64_t> growth;
};

template <class Total>
Warnings watch(const MemoryLeakConfig& limits, int64_t steps, const Total& total, int64_t stride = 1) {
  LeakDetector detector("resident memory", limits);
  Warnings out;
  for (int64_t step = 1; step <= steps; step += stride) {
    const auto bytes = static_cast<int64_t>(total(step));
    const auto warning = detector.add(
        {.step = step, .total = bytes, .parts = {{"arena", 100 * mb}, {"heap", bytes - 100 * mb}}});
    if (!warning) continue;
    out.steps.push_back(step);
    out.texts.push_back(warning->text);
    out.growth.push_back(warning->growth);
  }
  return out;
}

MemoryLeakConfig only(std::optional<double> slope, std::optional<double> ratio, std::optional<double> rise) {
  MemoryLeakConfig limits;
  limits.slope_mb_per_step = slope;
  limits.ratio = ratio;
  limits.step_increase_gb = rise;
  return limits;
}

}  // namespace

TEST_CASE("constant memory is no leak", "[leak]") {
  CHECK(watch({}, 1000, [](int64_t) { return 500 * mb; }).steps.empty());
  // Nor is memory that varies around a level, or that shrinks.
  CHECK(watch({}, 1000, [](int64_t s) { return 500 * mb + (s * 7919 % 23) * 4 * mb; }).steps.empty());
  CHECK(watch({}, 300, [](int64_t s) { return (900 - s) * mb; }).steps.empty());
}

TEST_CASE("the slope decides at its limit", "[leak]") {
  const MemoryLeakConfig limits = only(1, {}, {});
  CHECK(watch(limits, 100, [](int64_t s) { return 500 * mb + s * (mb - 1); }).steps.empty());
  const Warnings leak = watch(limits, 100, [](int64_t s) { return 500 * mb + s * (mb + 1); });
  REQUIRE(leak.steps.size() == 1);             // once
  CHECK(leak.growth.front() == 9 * (mb + 1));  // in steps 1 to 10
  CHECK(leak.steps.front() == 10);             // as soon as there are min_samples
  CHECK(leak.texts.front() ==
        "resident memory grows by 1 MB per step (monitoring.memory_leak.slope_mb_per_step: 1): heap grew by "
        "8.58 MiB in steps 1 to 10, now 486 MiB");
  // Per step, not per sample.
  CHECK(watch(
            limits, 1000, [](int64_t s) { return 500 * mb + s * (mb - 1); }, 7)
            .steps.empty());
  CHECK(watch(
            limits, 1000, [](int64_t s) { return 500 * mb + s * (mb + 1); }, 7)
            .steps.front() == 64);
  // A cache that is filled once is no leak, however large.
  CHECK(watch(limits, 200, [](int64_t s) { return (s < 30 ? 500 : 800) * mb; }).steps.empty());
  // Again when the memory has doubled.
  CHECK(watch(limits, 600, [](int64_t s) { return 100 * mb + s * 2 * mb; }).steps.size() == 4);
}

TEST_CASE("noise does not hide a leak", "[leak]") {
  CHECK(!watch(only(1, {}, {}), 100, [](int64_t s) {
           return 500 * mb + s * 3 * mb + (s * 7919 % 23) * mb;
         }).steps.empty());
}

TEST_CASE("the ratio of late to early memory decides at its limit", "[leak]") {
  const MemoryLeakConfig limits = only({}, 1.5, {});
  const auto jump = [](int64_t to) { return [to](int64_t s) { return (s <= 10 ? 400 : to) * mb; }; };
  CHECK(watch(limits, 100, jump(600)).steps.empty());
  const Warnings leak = watch(limits, 100, jump(601));
  REQUIRE(leak.steps.size() == 1);
  CHECK(leak.steps.front() == 20);
  CHECK(leak.texts.front() ==
        "resident memory is 1.50 times what it was after step 1 (monitoring.memory_leak.ratio: 1.5): heap "
        "grew by 192 MiB, now 573 MiB");
  MemoryLeakConfig longer = limits;
  longer.min_samples = 40;
  CHECK(watch(longer, 79, jump(4000)).steps.empty());
}

TEST_CASE("the rise within one step decides at its limit", "[leak]") {
  const MemoryLeakConfig limits = only({}, {}, 1.0);
  const auto jump = [](int64_t by) { return [by](int64_t s) { return 500 * mb + (s < 5 ? 0 : by); }; };
  CHECK(watch(limits, 10, jump(1000 * mb)).steps.empty());
  const Warnings leak = watch(limits, 10, jump(1000 * mb + 1));
  REQUIRE(leak.steps.size() == 1);
  CHECK(leak.steps.front() == 5);
  CHECK(leak.texts.front().find("rose by 1 GB in step 5") != std::string::npos);
  CHECK(leak.texts.front().find("heap grew by 954 MiB") != std::string::npos);
  // Per step: the same rise between samples that are two steps apart is half as much.
  CHECK(watch(limits, 11, jump(1900 * mb), 2).steps.empty());
}

TEST_CASE("a test without a limit is off", "[leak]") {
  CHECK(watch(only({}, {}, {}), 200, [](int64_t s) { return s * 5000 * mb; }).steps.empty());
}

TEST_CASE("numbers of things have limits of their own", "[leak]") {
  const auto warnings = [](const auto& total) {
    LeakDetector detector = LeakDetector::of_counts("the number of open files");
    std::vector<std::string> out;
    for (int64_t step = 1; step <= 100; ++step) {
      const auto count = static_cast<int64_t>(total(step));
      if (auto warning = detector.add({.step = step, .total = count, .parts = {{"sockets", count - 10}}}))
        out.push_back(warning->text);
    }
    return out;
  };
  CHECK(warnings([](int64_t) { return 20; }).empty());
  CHECK(warnings([](int64_t s) { return 20 + s / 20; }).empty());  // one in 20 steps
  const auto one_a_step = warnings([](int64_t s) { return 20 + s; });
  REQUIRE(!one_a_step.empty());
  CHECK(one_a_step.front() ==
        "the number of open files grows by 1 per step: sockets grew by 9 in steps 1 to 10, now 30");
  CHECK(warnings([](int64_t s) { return s < 50 ? 20 : 34; }).empty());  // more than 1.5 times, but few
  const auto risen = warnings([](int64_t s) { return s < 50 ? 20 : 40; });
  REQUIRE(risen.size() == 1);
  CHECK(risen.front() ==
        "the number of open files is 2.00 times what it was after step 1: sockets grew by 20, now 40");
}
