// A step that never ends is an error, and an exception inside a capture leaves a usable engine.
#include "apps/engine/step_watch.h"

#include <chrono>
#include <thread>

#include "parallel/comm/self/self_comm.h"
#include "tests/engine/training.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// The error of a step that never finishes, after `finished` steps that did. `after_pause`: the host waited
/// for all steps before it began.
std::string error_of_stuck_step(bool graph, int finished, bool after_pause,
                                const engine::StepLimits& limits = {
                                    .medians = 0, .graph_seconds = 0.125, .seconds = 0.25}) {
  const auto runtime = device::open_sim();
  const device::Stream stream(*runtime);
  const device::Event done(*runtime), done_before(*runtime);
  const auto group = comm::make_self("dp", 0, nullptr);
  engine::StepWatch watch(limits);
  int64_t step = 0;
  watch.begin(++step, graph);
  for (int i = 1; i < finished; ++i) {
    done.record(stream.get());
    watch.begin(++step, graph);
    watch.wait(done, *group);
  }
  done_before.record(stream.get());
  if (after_pause) watch.wait(done_before, *group);
  watch.begin(++step, graph);
  device::sim_stall(*runtime, stream.get());
  done.record(stream.get());
  if (!after_pause) watch.wait(done_before, *group);
  try {
    watch.wait(done, *group);
  } catch (const engine::StepStuck& e) {
    CHECK(e.code() == Exit::internal);  // there is no peer to lose
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Throws when it is asked for metrics for the n-th time.
class ThrowingObjective final : public engine::Objective {
 public:
  explicit ThrowingObjective(int n) : left_(n) {}
  std::span<const engine::MetricSpec> metrics() const override { return inner_.metrics(); }
  void add_metrics(ops::Exec& exec, const model::MicroBatch& batch, const model::HeadOutput& out,
                   const Tensor& sums) override {
    if (--left_ == 0) fail(Exit::internal, "thrown inside");
    inner_.add_metrics(exec, batch, out, sums);
  }

 private:
  engine::LanguageModeling inner_;
  int left_;
};

}  // namespace

TEST_CASE("a step that does not end is an error that names rank, step and limit", "[engine]") {
  const std::string graph = error_of_stuck_step(true, 5, false);
  INFO(graph);
  CHECK(contains(graph, "step 6 did not finish on rank 0 within 0.125 s; median step: "));
  CHECK(contains(graph, "a kernel or the driver hangs. Fix: look at dmesg"));
  // Longer limits where ranks may be late, or a watchdog sees every operation.
  CHECK(contains(error_of_stuck_step(true, 5, true), "within 0.25 s"));
  CHECK(contains(error_of_stuck_step(false, 5, false), "within 0.25 s"));
  CHECK(contains(error_of_stuck_step(true, 2, false), "step 3 did not finish on rank 0 within 0.25 s: a"));
}

TEST_CASE("a rank without peers does not wait for late ones", "[engine]") {
  const engine::StepLimits limits{.medians = 0, .seconds = 1000, .alone_seconds = 0.25};
  CHECK(contains(error_of_stuck_step(false, 1, false, limits), "within 0.25 s"));
  CHECK(engine::StepLimits().alone_seconds < engine::StepLimits().seconds);
}

TEST_CASE("a step may take a multiple of the median step", "[engine]") {
  const auto runtime = device::open_sim();
  const device::Stream stream(*runtime);
  const device::Event done(*runtime);
  const auto group = comm::make_self("dp", 0, nullptr);
  engine::StepWatch watch({.medians = 10, .graph_seconds = 0, .seconds = 1000});
  constexpr auto step_time = std::chrono::milliseconds(20);
  watch.begin(1, true);
  for (int64_t step = 2; step < 8; ++step) {
    done.record(stream.get());
    watch.begin(step, true);
    std::this_thread::sleep_for(step_time);
    CHECK_NOTHROW(watch.wait(done, *group));
  }
  device::sim_stall(*runtime, stream.get());
  done.record(stream.get());
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(watch.wait(done, *group), engine::StepStuck);
  CHECK(std::chrono::steady_clock::now() - begin > 5 * step_time);
}

TEST_CASE("an engine reports a step that never ends", "[engine]") {
  const ConfigResult config = tiny_config("cuda");
  const auto world = comm::World::init();
  train::Placement placement(*world, config);
  engine::TrainingOptions options = engine::training_options(config.config);
  options.limits.seconds = 0.2;
  const auto engine = make_engine(placement, config, options);
  const BatchPlan& batch = engine->plan().batch;
  for (int64_t m = 0; m < batch.accumulation; ++m)
    engine->fill(m, random_batch(batch.micro * T, static_cast<uint64_t>(m)), m * batch.micro);
  device::sim_stall(*placement.exec().device, placement.exec().stream);
  engine::LanguageModeling objective;
  engine->step({.number = 12, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
  CHECK_THROWS_AS(engine->collect(), engine::StepStuck);
}

TEST_CASE("an exception while a step is captured leaves the stream usable", "[engine]") {
  const ConfigResult config = tiny_config("cuda", {"policy.cuda_graph=true"});
  const auto world = comm::World::init();
  train::Placement placement(*world, config);
  const auto engine = make_engine(placement, config);
  const BatchPlan& batch = engine->plan().batch;
  const auto step = [&](int64_t number, engine::Objective& objective) {
    for (int64_t m = 0; m < batch.accumulation; ++m)
      engine->fill(m, random_batch(batch.micro * T, static_cast<uint64_t>(10 * number + m)), m * batch.micro);
    engine->step({.number = number, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
  };
  // Two steps run immediately, the third one is captured.
  ThrowingObjective objective(static_cast<int>(2 * batch.accumulation + 1));
  for (int64_t number = 1; number <= 2; ++number) {
    step(number, objective);
    engine->collect();
  }
  const data::HostMicroBatch probe = random_batch(batch.micro * T, 5);
  const std::vector<char> before = bytes_of(*engine, engine->log_probs(probe));
  CHECK_THROWS_WITH(step(3, objective), "thrown inside");
  CHECK(!placement.exec().device->capturing(placement.exec().stream));
  CHECK(bytes_of(*engine, engine->log_probs(probe)) == before);
}
