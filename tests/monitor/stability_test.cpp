// Detection of instability: planted faults of every kind, and healthy runs of several shapes.

#include "apps/monitor/stability.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/alerts.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace nrl::monitor {
namespace {

using test::contains;

/// A run with a loss that falls from 10 to 2 and noise of loss and norm.
struct HealthyRun {
  explicit HealthyRun(unsigned seed, double noise = 0.03) : random(seed), size(noise) {}
  StepLoss next() {
    const auto at = static_cast<double>(++step);
    return {.step = step,
            .loss = (2 + 8 * std::exp(-at / 200)) * (1 + size * normal(random)),
            .grad_norm = (0.5 + 4 * std::exp(-at / 50)) * std::exp(0.2 * normal(random))};
  }
  std::mt19937 random;
  std::normal_distribution<double> normal;
  double size;
  int64_t step = 0;
};

/// "KIND STEP" of the findings while `change` alters the steps from 300 on.
std::vector<std::string> found(const std::function<void(StepLoss&)>& change,
                               const StabilityConfig& config = {}, double loss_increase = 0.1) {
  Stability stability(config, loss_increase);
  HealthyRun run(5);
  std::vector<std::string> out;
  for (int i = 0; i < 1200; ++i) {
    StepLoss at = run.next();
    if (at.step >= 300) change(at);
    for (const Finding& f : stability.add(at)) out.push_back(fmt::format("{} {}", name_of(f.kind), f.step));
  }
  return out;
}

using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("every kind of instability is found where it begins, once", "[stability]") {
  CHECK(found([](StepLoss&) {}).empty());
  const auto spike_at_350 = [](StepLoss& at) {
    if (at.step >= 350 && at.step < 360) at.loss *= 2;
  };
  CHECK(found(spike_at_350) == Texts{"loss_spike 350"});
  CHECK(found([](StepLoss& at) {
          if (at.step == 350 || at.step == 700) at.loss *= 2;
        }) == Texts{"loss_spike 350", "loss_spike 700"});
  const auto explosion_at_350 = [](StepLoss& at) {
    if (at.step == 350) at.grad_norm *= 20;
  };
  CHECK(found(explosion_at_350) == Texts{"gradient_explosion 350"});
  // The trend and the noise of the loss need many steps to be seen.
  const Texts noisy = found([](StepLoss& at) { at.loss *= at.step % 2 == 0 ? 1.25 : 0.8; });
  REQUIRE(noisy.size() == 1);
  CHECK(noisy.front().starts_with("loss_noise 3"));
  const Texts drift = found([](StepLoss& at) { at.loss *= 1 + 0.002 * static_cast<double>(at.step - 300); });
  REQUIRE(drift.size() == 1);
  CHECK(drift.front().starts_with("loss_drift"));
}

TEST_CASE("the keys of monitoring.stability decide", "[stability]") {
  const auto spike_at_80 = [](const StabilityConfig& config) {
    Stability stability(config, 0.1);
    HealthyRun run(3);
    for (int i = 0; i < 79; ++i) REQUIRE(stability.add(run.next()).empty());
    StepLoss at = run.next();
    at.loss *= 3;
    return stability.add(at).size();
  };
  CHECK(spike_at_80({}) == 0);  // not before `window` steps
  CHECK(spike_at_80({.window = 50}) == 1);
  const auto explosion = [](StepLoss& at) {
    if (at.step == 350) at.grad_norm *= 20;
  };
  CHECK(found(explosion, {.spike_factor = 100}).empty());
  const auto noise = [](StepLoss& at) { at.loss *= at.step % 2 == 0 ? 1.25 : 0.8; };
  CHECK(found(noise, {.cv_threshold = 0.5}).empty());
  const auto drift = [](StepLoss& at) { at.loss *= 1 + 0.002 * static_cast<double>(at.step - 300); };
  CHECK(found(drift, {}, /*loss_increase=*/10).empty());
}

TEST_CASE("a step that is not finite or was skipped is no finding and leaves the window", "[stability]") {
  const auto with_spike = [](bool others) {
    return found([&](StepLoss& at) {
      if (at.step == 350) at.loss *= 2;
      if (!others) return;
      if (at.step == 340) at.loss = NAN;
      if (at.step == 341) at.grad_norm = INFINITY;
      if (at.step == 342) at = {.step = 342, .loss = 1e9, .grad_norm = 1e9, .skipped = true};
    });
  };
  CHECK(with_spike(true) == with_spike(false));
}

TEST_CASE("limits are where findings begin, and a limited step is an outlier", "[stability]") {
  Stability stability({}, 0.1);
  HealthyRun run(7);
  for (int i = 0; i < 300; ++i) {
    CHECK(stability.limits().has_value() == (i >= 100));
    CHECK(stability.add(run.next()).empty());
  }
  const Stability::Limits limits = *stability.limits();
  const auto findings = [&](double loss, double norm, bool limited) {
    Stability copy = stability;
    const size_t found = copy.add({.step = 301, .loss = loss, .grad_norm = norm, .limited = limited}).size();
    return std::pair(found, copy.limits()->loss == limits.loss);  // outliers do not enter the window
  };
  CHECK(findings(std::nextafter(limits.loss, 0), limits.grad_norm, false) ==
        std::pair<size_t, bool>{0, false});
  CHECK(findings(std::nextafter(limits.loss, 1e9), limits.grad_norm, false) ==
        std::pair<size_t, bool>{1, true});
  CHECK(findings(1, std::nextafter(limits.grad_norm, 1e9), false) == std::pair<size_t, bool>{1, true});
  // The device had the limits of the step before.
  CHECK(findings(std::nextafter(limits.loss, 0), limits.grad_norm, true) == std::pair<size_t, bool>{0, true});
}

TEST_CASE("a level that lasts becomes the normal one", "[stability]") {
  const Texts all = found([](StepLoss& at) {
    at.loss *= 3;
    if (at.step == 900) at.loss *= 2;
  });
  CHECK(all == Texts{"loss_spike 300", "loss_drift 449", "loss_spike 900"});
}

TEST_CASE("healthy runs have no findings", "[stability]") {
  for (const double noise : {0.001, 0.03, 0.15})
    for (const unsigned seed : {1U, 2U, 3U, 4U, 5U}) {
      Stability stability({}, 0.1);
      HealthyRun run(seed, noise);
      for (int i = 0; i < 2000; ++i)
        for (const Finding& f : stability.add(run.next()))
          FAIL_CHECK(noise << " " << seed << " step " << f.step << ": " << f.message);
    }
  // Losses of fine-tuning have a few large values among small ones; a loss that is the same at every step has
  // no deviation.
  Stability rare({}, 0.1), same({}, 0.1);
  std::mt19937 random(4);
  std::lognormal_distribution<double> tail(-3, 0.5);
  for (int64_t step = 1; step <= 2000; ++step) {
    for (const Finding& f : rare.add({step, tail(random), 1})) FAIL_CHECK(f.step << ": " << f.message);
    CHECK(same.add({step, 2.5, 0}).empty());
  }
}

TEST_CASE("the built-in alerts leave spikes and explosions to the guard", "[stability]") {
  MonitoringConfig config;
  config.alerting.enabled = true;
  const auto rules = [&] { return Alerts(config, false).states().size(); };
  const size_t before = rules();
  config.stability.on_instability = OnInstability::warn;
  CHECK(rules() == before - 2);
}

}  // namespace nrl::monitor
