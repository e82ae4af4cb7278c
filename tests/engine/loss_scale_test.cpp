// Steps that are skipped: loss scales that adapt, with overflows of one rank, growth and resuming; limits.
#include <cmath>
#include <limits>

#include "core/ops/step.h"
#include "parallel/comm/mpi/mpi_session.h"
#include "tests/comm/world_fixture.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;

namespace {

// Shards, so that every rank judges gradients of its own.
ConfigResult config_on(const std::string& device, const std::string& scaling, const std::string& precision) {
  return tiny_config(
      device, {"distributed.shard_strategy=optim", "policy.train_micro_batch_size=1",
               fmt::format("policy.train_global_batch_size={}", test_world().size()),
               "policy.max_grad_norm=0.05", "policy.loss_scaling=" + scaling, "policy.precision=" + precision,
               "kernels.share_device=" + std::string(device == "cuda" ? "true" : "false")});
}

class Rank {
 public:
  explicit Rank(const std::string& device, const std::string& scaling = "auto", int64_t growth_interval = 3,
                const std::string& precision = "auto")
      : config_(config_on(device, scaling, precision)), placement_(test_world(), config_) {
    const Config& c = config_.config;
    auto plan = plan::make_run_plan(c, train::load_model_spec(config_), resolve_batch(c, test_world().size()),
                                    placement_.grid_position(), placement_.device(), 1);
    engine::TrainingOptions options = engine::training_options(c);
    if (options.loss_scale.growth_interval > 0) options.loss_scale.growth_interval = growth_interval;
    engine_ =
        std::make_unique<engine::Engine>(std::move(plan), options, placement_.groups(), placement_.exec());
    monitor::StartPhases phases;
    train::load_initial_weights(c, *engine_, train::verify_none, 1, phases);
    engine_->require_kernels(objective_, "the device");
  }

  /// `poisoned`: a gradient of the first rank becomes infinite.
  engine::StepResult step(int64_t number, bool poisoned = false, const engine::StepBounds& bounds = {}) {
    const int rank = test_world().rank(), ranks = test_world().size();
    engine_->fill(0, random_batch(T, static_cast<uint64_t>(100 * number + rank)), rank);
    engine::StepInput input{
        .number = number, .learning_rate = 1e-2, .loss_tokens = T * ranks, .bounds = bounds};
    if (poisoned && rank == 0)
      input.gradients_reduced = [&] {
        const float infinity = std::numeric_limits<float>::infinity();
        const engine::GroupTensors& t = engine_->groups().front();
        ops::upload(engine_->exec(), t.gradients.rows(t.group->owned.at(0).gradient, 1), &infinity);
      };
    engine_->step(input, objective_);
    const engine::StepResult result = engine_->collect();
    engine_->finish_gathers();
    return result;
  }

  std::vector<char> weights() { return bytes_of(*engine_, engine_->groups().front().weights); }
  engine::Engine& engine() { return *engine_; }

 private:
  ConfigResult config_;
  train::Placement placement_;
  engine::LanguageModeling objective_;
  std::unique_ptr<engine::Engine> engine_;
};

}  // namespace

TEST_CASE("all ranks skip a step that overflows on one, halve the scale and train on", "[loss_scale]") {
  for (const std::string device : {"cpu", "cuda"}) {
    CAPTURE(device);
    Rank scaled(device, "dynamic"), plain(device);
    const double first = ops::initial_loss_scale;
    double want = first;
    int64_t clean = 0;
    for (int64_t step = 1; step <= 9; ++step) {
      CAPTURE(step);
      const bool poisoned = step == 2 || step == 3;
      const engine::StepResult result = scaled.step(step, poisoned);
      REQUIRE(result.used_loss_scale == want);
      REQUIRE(result.overflow == poisoned);
      REQUIRE(result.skipped == poisoned);
      REQUIRE(result.skipped_in_a_row == 0);
      if (poisoned) {
        clean = 0;
        want /= 2;
      } else {
        // Powers of two change no bit of a gradient.
        const engine::StepResult unscaled = plain.step(step);
        REQUIRE(result.grad_norm == unscaled.grad_norm);
        REQUIRE(result.metrics[0] == unscaled.metrics[0]);
        REQUIRE(result.updates == unscaled.updates);
        if (++clean == 3) {
          clean = 0;
          want *= 2;
        }
      }
      REQUIRE(result.loss_scale == want);
      REQUIRE(result.clean_steps == clean);
      REQUIRE(scaled.weights() == plain.weights());
    }
    REQUIRE(want == first);  // halved twice and doubled twice
  }
}

TEST_CASE("a loss scale is restored from its counters, and only where it adapts", "[loss_scale]") {
  Rank rank("cpu", "dynamic"), fixed("cpu", "2**10");
  const engine::StepCounters counters{.updates = 4, .loss_scale = 512, .clean_steps = 2};
  rank.engine().restore(counters);
  fixed.engine().restore(counters);
  const engine::StepResult result = rank.step(5), other = fixed.step(5);
  REQUIRE(result.used_loss_scale == 512);
  REQUIRE(result.updates == 5);
  REQUIRE(result.loss_scale == 1024);  // the third step without overflow
  REQUIRE(other.used_loss_scale == 1024);
  REQUIRE(other.loss_scale == 1024);
  REQUIRE(result.grad_norm == other.grad_norm);
}

TEST_CASE("float16 finds the scale at which its gradients do not overflow", "[loss_scale]") {
  for (const std::string device : {"cpu", "cuda"}) {
    CAPTURE(device);
    Rank half(device, "auto", 1000, "float16"), full(device, "auto", 3, "float32");
    // Far beyond what gradients in float16 can be multiplied by; the weights stay as they are until one fits.
    double scale = 0x1p40;
    half.engine().restore({.loss_scale = scale});
    const std::vector<char> before = half.weights();
    int64_t overflows = 0;
    engine::StepResult result;
    for (;; ++overflows, scale /= 2) {
      REQUIRE(overflows < 40);
      result = half.step(1);
      REQUIRE(result.used_loss_scale == scale);
      REQUIRE(std::isfinite(result.metrics[0]));
      if (!result.overflow) break;
      REQUIRE(result.skipped);
      REQUIRE(result.skipped_in_a_row == 0);
      REQUIRE(result.loss_scale == scale / 2);
      REQUIRE(half.weights() == before);
    }
    REQUIRE(overflows > 8);
    REQUIRE(scale >= 1024);
    REQUIRE(half.weights() != before);
    const engine::StepResult exact = full.step(1);
    REQUIRE(std::fabs(result.metrics[0] / exact.metrics[0] - 1) < 1e-3);
    REQUIRE(std::fabs(result.grad_norm / exact.grad_norm - 1) < 5e-3);
  }
}

TEST_CASE("a fixed scale, and the smallest one, do not excuse gradients that are not finite",
          "[loss_scale]") {
  Rank fixed("cpu", "1024"), smallest("cpu", "dynamic");
  smallest.engine().restore({.loss_scale = 1, .clean_steps = 1});
  for (Rank* rank : {&fixed, &smallest}) {
    const engine::StepResult result = rank->step(1, true);
    REQUIRE(result.skipped);
    REQUIRE(!result.overflow);
    REQUIRE(result.skipped_in_a_row == 1);
  }
}

TEST_CASE("a finite step beyond a limit changes nothing and ends a row of skipped ones", "[loss_scale]") {
  for (const std::string device : {"cpu", "cuda"}) {
    CAPTURE(device);
    Rank rank(device);
    const engine::StepResult first = rank.step(1);
    REQUIRE(!first.skipped);
    const double factor = -1.0 / static_cast<double>(T * test_world().size());
    const double loss = factor * first.metrics[0];
    const engine::StepBounds wide{.loss_factor = factor, .loss = 2 * loss, .grad_norm = 2 * first.grad_norm};
    const engine::StepBounds low_loss{.loss_factor = factor, .loss = 0.5 * loss};
    const engine::StepBounds low_norm{.grad_norm = 1e-3 * first.grad_norm};
    CHECK(!rank.step(2, false, wide).skipped);
    const engine::StepResult bad = rank.step(3, true, wide);
    CHECK((bad.skipped && !bad.limited && bad.skipped_in_a_row == 1));
    const std::vector<char> before = rank.weights();
    for (const engine::StepBounds& bounds : {low_loss, low_norm}) {
      const engine::StepResult result = rank.step(4, false, bounds);
      CHECK((result.skipped && result.limited && !result.overflow));
      CHECK(result.skipped_in_a_row == 0);
      CHECK(result.updates == 2);
      CHECK(rank.weights() == before);
    }
    CHECK(rank.step(5, false, wide).updates == 3);
    CHECK(rank.weights() != before);
  }
}
