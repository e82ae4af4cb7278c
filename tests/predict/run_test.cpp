// Whole runs: failures and checkpoints against simulated runs, energy, and what the keys of
// cluster.reliability and cluster.cost change.

#include <cmath>
#include <limits>
#include <random>

#include "apps/predict/energy.h"
#include "apps/predict/goodput.h"
#include "apps/predict/run_forecast.h"
#include "tests/catch.h"

using namespace nrl;
using predict::BusySeconds;
using predict::Interruptions;

namespace {

/// The elapsed time of `segments` intervals of training, by events: a failure loses all that no complete
/// checkpoint holds.
double simulate(double interval, int segments, const Interruptions& i, std::mt19937_64& random) {
  std::exponential_distribution<double> failure(1 / i.mtbf);
  double elapsed = 0;
  int complete = 0;
  for (;;) {
    // Training resumes from checkpoint `complete`. Checkpoint k is complete after `of(k)` seconds.
    const double next = failure(random);
    const auto of = [&](int k) { return (k - complete) * (interval + i.stall) + i.lag; };
    if (next > of(segments)) return elapsed + of(segments) - i.lag;
    int reached = complete;
    while (of(reached + 1) <= next) ++reached;
    complete = reached;
    elapsed += next;
    for (double again; (again = failure(random)) < i.restart;) elapsed += again;
    elapsed += i.restart;
  }
}

constexpr double infinite = std::numeric_limits<double>::infinity();

const machine::DeviceModel& h100() {
  return machine::find_device_model("--device", "h100");
}

Config run_of(int64_t steps) {
  Config c;
  c.pretrain.max_num_steps = steps;
  return c;
}

predict::RunFacts facts() {
  return {.ranks = 1024,
          .nodes = 128,
          .step = 5,
          .tokens = 4e6,
          .busy = {.gemm = 3, .attention = 0.5, .memory = 0.8, .links = 1},
          .rank_checkpoint = 1e9,
          .snapshots = false};
}

}  // namespace

TEST_CASE("goodput is that of simulated runs", "[predict]") {
  struct Case {
    double interval;
    Interruptions i;
  };
  const Case cases[] = {
      {.interval = 1000, .i = {.mtbf = 10000, .stall = 30, .lag = 0, .restart = 600}},
      {.interval = 1000, .i = {.mtbf = 10000, .stall = 2, .lag = 120, .restart = 600}},
      {.interval = 3000, .i = {.mtbf = 2000, .stall = 100, .lag = 0, .restart = 900}},
      {.interval = 500, .i = {.mtbf = 1500, .stall = 5, .lag = 400, .restart = 300}},
  };
  std::mt19937_64 random(35);
  for (const auto& [interval, i] : cases) {
    constexpr int runs = 100'000, segments = 80;
    double elapsed = 0;
    for (int r = 0; r < runs; ++r) elapsed += simulate(interval, segments, i, random);
    CAPTURE(interval, i.mtbf, i.lag);
    CHECK(predict::goodput(interval, i) == Approx(runs * segments * interval / elapsed).epsilon(0.005));
  }
  const Interruptions none{.mtbf = infinite, .stall = 10, .lag = 0, .restart = 100};
  CHECK(predict::goodput(90, none) == Approx(0.9));
  CHECK(predict::goodput(infinite, none) == 1);
  CHECK(predict::goodput(infinite, {.mtbf = 100, .stall = 1, .lag = 0, .restart = 1}) == 0);
}

TEST_CASE("the best interval is the best of a scan", "[predict]") {
  for (const double stall : {0.01, 1.0, 60.0, 5000.0})
    for (const double mtbf : {1e3, 1e4, 1e6})
      for (const double lag : {0.0, 100.0}) {
        const Interruptions i{.mtbf = mtbf, .stall = stall, .lag = lag, .restart = 300};
        const double best = predict::best_interval(i), there = predict::goodput(best, i);
        CAPTURE(stall, mtbf, best);
        double most = 0;
        for (double t = best / 100; t < 100 * best; t *= 1.001) most = std::max(most, predict::goodput(t, i));
        CHECK(there >= most);
        CHECK(there == Approx(most).epsilon(1e-6));
        if (stall < mtbf / 20)  // Daly's series
          CHECK(best == Approx(std::sqrt(2 * stall * mtbf) *
                                   (1 + std::sqrt(stall / (2 * mtbf)) / 3 + stall / (18 * mtbf)) -
                               stall)
                            .epsilon(0.002));
      }
  CHECK(std::isinf(predict::best_interval({.mtbf = infinite, .stall = 1, .lag = 0, .restart = 1})));
}

TEST_CASE("energy adds up over kinds of work", "[predict]") {
  const predict::PowerModel power = predict::power_of(h100());
  CHECK(power.gemm == 700);
  CHECK(power.idle < power.links);
  machine::Profile profile;
  profile.base = "h100";
  profile.power_w = 560;
  const predict::PowerModel measured = predict::power_of(profile.device(h100()));
  CHECK((measured.gemm == 560 && measured.attention == 560 && measured.memory == 560));
  CHECK((measured.limit == 700 && measured.links == power.links));
  profile.power_w = 900;  // as a GPU's sensor reports for moments
  CHECK(predict::power_of(profile.device(h100())).gemm == 700);
  const BusySeconds busy{.gemm = 3, .attention = 0.5, .memory = 0.8, .links = 1};
  const auto energy = [&](const BusySeconds& b, double pue = 1) {
    return predict::step_energy(power, b, 5, 16, 2, 1500, pue);
  };
  const auto all = energy(busy), nothing = energy({});
  CHECK(nothing.total() == Approx(16 * power.idle * 5 + 2 * 1500 * 5));
  CHECK(energy({.gemm = 5}).total() == Approx(16 * 700 * 5 + 2 * 1500 * 5));
  const double parts = energy({.gemm = busy.gemm}).total() + energy({.attention = busy.attention}).total() +
                       energy({.memory = busy.memory}).total() + energy({.links = busy.links}).total();
  CHECK(all.total() == Approx(parts - 3 * nothing.total()));
  CHECK(all.idle + all.gemm + all.attention + all.memory + all.links + all.nodes + all.building ==
        Approx(all.total()));
  CHECK(energy(busy, 1.3).total() == Approx(1.3 * all.total()));
  // Links beside GEMMs do not take a device beyond its limit.
  const auto both = energy({.gemm = 5, .links = 5});
  CHECK(both.total() == Approx(energy({.gemm = 5}).total()));
  CHECK(both.links > 0);
}

TEST_CASE("cluster.reliability decides how long a run takes", "[predict]") {
  Config c = run_of(100'000);
  const auto estimate = [&] { return predict::forecast_run(c, facts(), h100()); };
  const predict::RunForecast usual = estimate();
  CHECK(usual.mtbf == Approx(3600 / (2e-5 * 1024)));
  CHECK(usual.goodput < usual.best_goodput);
  CHECK(usual.seconds() == Approx(100'000 * 5 / usual.goodput));
  CHECK(usual.total.rank_hours == Approx(usual.seconds() * 1024 / 3600));
  // 1 GB at 0.125 GB/s is a stall of 8 s.
  const double best = std::sqrt(2 * 8 * usual.mtbf) / 5;
  CHECK(static_cast<double>(usual.best_period.value()) == Approx(best).epsilon(0.01));
  c.checkpointing.save_period = *usual.best_period;
  CHECK(estimate().goodput == usual.best_goodput);
  for (const int64_t other : {*usual.best_period - 1, *usual.best_period + 1}) {
    c.checkpointing.save_period = other;
    CHECK(estimate().goodput <= usual.best_goodput);
  }
  c = run_of(100'000);
  c.checkpointing.save_seconds = 500;  // 100 steps
  const double by_seconds = estimate().goodput;
  c.checkpointing.save_seconds.reset();
  c.checkpointing.save_period = 100;
  CHECK(estimate().goodput == by_seconds);
  c.checkpointing.save_period = 0;
  CHECK(estimate().goodput < 0.6);  // all is lost with a failure

  c = run_of(100'000);
  c.cluster.reliability.failures_per_rank_hour = 4e-5;
  CHECK(estimate().mtbf == Approx(usual.mtbf / 2));
  c.cluster.reliability.failures_per_rank_hour = 0;
  CHECK_FALSE(estimate().best_period);
  CHECK(estimate().goodput == Approx(5000.0 / 5008));
  c = run_of(100'000);
  c.cluster.reliability.detect_s = 600;
  CHECK(estimate().goodput == Approx(usual.goodput * std::exp(-540 / usual.mtbf)));
  c = run_of(100'000);
  c.cluster.reliability.restart_s = 900;
  CHECK(estimate().goodput == Approx(usual.goodput * std::exp(-600 / usual.mtbf)));
  c = run_of(100'000);
  c.cluster.reliability.storage_gb_s = 4 * 128;
  CHECK(static_cast<double>(estimate().best_period.value()) == Approx(best / 2).epsilon(0.01));

  // A snapshot takes 18 ms, and its save 8 s.
  c = run_of(100'000);
  predict::RunFacts beside = facts();
  beside.snapshots = true;
  const auto async = predict::forecast_run(c, beside, h100());
  CHECK(async.best_goodput > usual.best_goodput);
  CHECK(static_cast<double>(async.best_period.value()) ==
        Approx(std::sqrt(2 * (1 / 54.5) * usual.mtbf) / 5).epsilon(0.03));
  c.cluster.reliability.storage_gb_s = 1;  // 1,024 s: no save may begin earlier
  CHECK(predict::forecast_run(c, beside, h100()).best_period == 205);
}

TEST_CASE("cluster.cost decides the price of a run", "[predict]") {
  Config c = run_of(1000);
  const auto estimate = [&] { return predict::forecast_run(c, facts(), h100()); };
  const predict::RunForecast usual = estimate();
  CHECK_FALSE(usual.total.price);
  const double joules =
      predict::step_energy(predict::power_of(h100()), facts().busy, 5, 1024, 128, 2000, 1.2).total();
  CHECK(usual.total.kwh.value() == Approx(1000 * joules / 3.6e6 / usual.goodput));
  CHECK(usual.per_token.kwh.value() * 4e6 * 1000 == Approx(usual.total.kwh.value()));
  c.cluster.cost.rank_hour = 2;
  CHECK(estimate().total.price.value() == Approx(2 * usual.total.rank_hours));
  c.cluster.cost.kwh = 0.25;
  CHECK(estimate().total.price.value() ==
        Approx(2 * usual.total.rank_hours + 0.25 * usual.total.kwh.value()));
  c.cluster.cost.pue = 2.4;
  CHECK(estimate().total.kwh.value() == Approx(2 * usual.total.kwh.value()));
  c.cluster.cost = {};
  c.cluster.cost.node_watts = 3000;
  CHECK(estimate().total.kwh.value() - usual.total.kwh.value() ==
        Approx(1.2 * 128 * 1.0 * 1000 * 5 / 3600 / usual.goodput));

  // The power of a CPU is not known.
  const machine::DeviceModel cpu = machine::usual_model(DeviceType::cpu, 1, precision::Recipe{});
  c.cluster.cost = {};
  CHECK_FALSE(predict::forecast_run(c, facts(), cpu).total.kwh);
  c.cluster.cost.node_watts = 100;
  const predict::RunForecast on_cpu = predict::forecast_run(c, facts(), cpu);
  CHECK(on_cpu.total.kwh.value() == Approx(1.2 * 128 * 0.1 * 1000 * 5 / 3600 / on_cpu.goodput));
}

TEST_CASE("the line of a run names its days, failures and costs", "[predict]") {
  Config c = run_of(100'000);
  c.cluster.cost.rank_hour = 2;
  const predict::RunForecast run = predict::forecast_run(c, facts(), h100());
  const std::string text = run.text();
  CAPTURE(text);
  CHECK(text.find("100,000 steps in 5.9 days with goodput 98.2 %") == 0);
  CHECK(text.find("(a failure every 49 h; best save_period 334 steps: 98.8 %)") != std::string::npos);
  CHECK(text.find(" GPU hours ") != std::string::npos);
  CHECK(text.find(" MWh ") != std::string::npos);
  CHECK(text.find(" price ") != std::string::npos);
  CHECK(run.json().at("best_save_period").as_int() == 334);
  CHECK(run.json().at("total").at("price").as_double() == Approx(run.total.price.value()));

  c.pretrain.max_num_steps.reset();
  CHECK(predict::forecast_run(c, facts(), h100()).text().find("10^9 tokens with goodput 9") == 0);
  CHECK(predict::forecast_run(c, facts(), h100()).json().at("days").is_null());
  c.checkpointing.enabled = false;
  CHECK(predict::forecast_run(c, facts(), h100()).text() ==
        "a failure every 49 h and no checkpoint before the end: the run does not end");
}
