#include "apps/monitor/statistics.h"

#include <algorithm>
#include <cmath>

#include "apps/monitor/kernel_times.h"
#include "apps/monitor/timers.h"
#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::monitor;

TEST_CASE("running statistics are exact inside the window", "[report]") {
  RunningStats stats(100);
  for (double v : {2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0}) stats.add(v);
  REQUIRE(stats.count() == 8);
  REQUIRE(stats.mean() == Approx(5));
  REQUIRE(stats.stddev() == Approx(2));
}

TEST_CASE("running statistics forget what is long past", "[report]") {
  RunningStats stats(10);
  for (int i = 0; i < 50; ++i) stats.add(100 + i % 2);
  for (int i = 0; i < 200; ++i) stats.add(1 + i % 2);
  REQUIRE(stats.mean() == Approx(1.5).margin(0.1));
  REQUIRE(stats.stddev() == Approx(0.5).margin(0.1));
}

TEST_CASE("outliers are marked with their distance", "[report]") {
  OutlierDetector detector;
  PhiloxStream stream(3, "noise");
  int marked = 0;
  for (uint64_t i = 0; i < 100; ++i) marked += detector.add(10 + stream.normal(i)) != 0;
  REQUIRE(marked == 0);
  const double distance = detector.add(30);
  REQUIRE(distance > 15);
  REQUIRE(detector.add(-10) < -4);  // one outlier does not hide the next
  REQUIRE(detector.add(10.5) == 0);
  REQUIRE(std::isnan(detector.add(INFINITY)));
  REQUIRE(detector.add(10.5) == 0);  // which left no trace
}

TEST_CASE("the first values and a constant stream have no outliers", "[report]") {
  OutlierDetector detector;
  REQUIRE(detector.add(1) == 0);
  REQUIRE(detector.add(1e6) == 0);
  OutlierDetector constant;
  for (int i = 0; i < 200; ++i) REQUIRE(constant.add(0.1) == 0);
}

TEST_CASE("marks", "[report]") {
  REQUIRE(outlier_mark(0).empty());
  REQUIRE(outlier_mark(4.21) == "!(+4.2s)");
  REQUIRE(outlier_mark(-5) == "!(-5.0s)");
  REQUIRE(outlier_mark(NAN) == "!");
}

TEST_CASE("the histogram's mean is exact and its quantiles are within half a percent", "[report]") {
  Histogram h;
  REQUIRE(h.median() == 0);
  REQUIRE(h.mean() == 0);
  for (int i = 1; i <= 1001; ++i) h.add(i * 1000.0);
  REQUIRE(h.count() == 1001);
  REQUIRE(h.mean() == Approx(501000));
  REQUIRE(std::abs(h.median() / 501000 - 1) <= 0.005);
  REQUIRE(std::abs(h.quantile(0.9) / 901000 - 1) <= 0.005);
  REQUIRE(h.quantile(0) == Approx(1000).epsilon(0.005));
  REQUIRE(h.quantile(1) == Approx(1001000).epsilon(0.005));
}

TEST_CASE("the histogram takes the whole range and leaves out what is no positive number", "[report]") {
  Histogram h;
  for (double v : {0.0, -1.0, double(NAN), double(INFINITY)}) h.add(v);
  REQUIRE(h.count() == 0);
  for (double v : {1e-300, 1e-9, 1e15, 1e300}) h.add(v);
  REQUIRE(h.count() == 4);
  REQUIRE(h.quantile(0) >= 1e-300);
  REQUIRE(h.quantile(1) <= 1e300);
  Histogram one;
  one.add(412300);
  REQUIRE(one.median() == 412300);
}

namespace {
double fake_time = 0;
double fake_clock() {
  return fake_time;
}
}  // namespace

TEST_CASE("a second belongs to one section only", "[report]") {
  fake_time = 100;
  Timers timers(fake_clock);
  fake_time += 1;  // other
  {
    auto compute = timers.time(RunSection::compute);
    fake_time += 10;
    const SectionTimes before = timers.times();
    {
      auto comm = timers.time(RunSection::comm);
      fake_time += 3;
    }
    fake_time += 10;
    const SectionTimes during = timers.times() - before;
    REQUIRE(during[RunSection::compute] == Approx(10));
    REQUIRE(during[RunSection::comm] == Approx(3));
  }
  { auto data = timers.time(RunSection::data); }
  timers.move(RunSection::compute, RunSection::comm, 2);
  const SectionTimes times = timers.times();
  REQUIRE(times[RunSection::compute] == Approx(18));
  REQUIRE(times[RunSection::comm] == Approx(5));
  REQUIRE(times[RunSection::data] == 0);
  REQUIRE(times[RunSection::other] == Approx(1));
  REQUIRE(times.total() == Approx(24));
}

TEST_CASE("a peak that is measured takes the best of spaced tries", "[report]") {
  std::vector<double> tries = {90, 120, 80};
  size_t taken = 0;
  PeakEstimate peak(100, [&] { return tries.at(taken++); });
  peak.add_step(50, 0.5);
  REQUIRE(taken == 0);  // a short run measures once only
  peak.add_step(50, 1.5);
  REQUIRE(peak.flops() == 100);
  peak.add_step(50, 2.5);
  REQUIRE(taken == 1);
  peak.add_step(50, 3);
  REQUIRE(peak.flops() == 120);
  peak.add_step(50, 9);
  REQUIRE(peak.flops() == 120);
  REQUIRE(taken == 3);
}

TEST_CASE("the peak is unknown while a step was faster than every measurement", "[report]") {
  int taken = 0;
  PeakEstimate busy(100, [&] { return ++taken, 10.0; });
  for (int i = 0; i <= 20000; ++i) {
    busy.add_step(90 + i, i);
    REQUIRE(busy.flops() == (90 + i <= 100 ? 100 : 0));  // no figure of 100 %
  }
  REQUIRE(taken == 16);

  double rate = 10;
  PeakEstimate peak(100, [&] { return rate; });
  peak.add_step(150, 0.5);
  REQUIRE(peak.flops() == 0);
  peak.add_step(50, 1.5);
  REQUIRE(peak.flops() == 0);  // the faster step counts, not the last one
  rate = 200;
  peak.add_step(50, 2);
  REQUIRE(peak.flops() == 0);
  peak.add_step(50, 2.6);  // a second after the last try
  REQUIRE(peak.flops() == 200);
}

TEST_CASE("kernels count in steps only, however often the totals are cleared", "[report]") {
  KernelTimes times;
  CHECK(times.step({{"linear", 2}, {"norm", 1}}, 4) == KernelTimes::Totals{{"linear", 2}, {"norm", 1}});
  times.skip({{"linear", 10}, {"norm", 1.5}});  // an evaluation
  CHECK(times.step({{"linear", 13}, {"norm", 2}}, 4) == KernelTimes::Totals{{"linear", 3}, {"norm", 0.5}});
  times.restart();  // a trace begins
  times.step({{"adamw", 1}, {"linear", 2}}, 4);
  times.restart();  // and ends
  times.step({{"linear", 2}}, 4);
  CHECK(times.kernels() ==
        std::vector<std::pair<std::string, double>>{{"linear", 9}, {"norm", 1.5}, {"adamw", 1}});
  CHECK(times.seconds() == 16);
}

TEST_CASE("a peak from a data sheet stays", "[report]") {
  PeakEstimate peak(100);
  peak.add_step(130, 1e6);
  REQUIRE(peak.flops() == 100);
}
