// Windows of steps that are recorded: exact figures, the shape of the record, and a run that does not notice.

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include <pthread.h>

#include "apps/monitor/start_phases.h"
#include "apps/train/loop/capture.h"
#include "apps/train/loop/evaluation.h"
#include "apps/train/loop/step_profile.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/run_setup.h"
#include "core/trace/trace.h"
#include "tests/train/training_run.h"

namespace nrl::test {
namespace {

using trace::Event;
using trace::Kind;

/// Runs `steps` steps, of which all but the first are recorded; `check` gets the record and the run.
template <class Check>
void record_steps(const Workbench& bench, const std::vector<std::string>& overrides, int64_t steps,
                  const Check& check) {
  const std::string file = bench / "window.yaml";
  std::ofstream(file) << bench.yaml("window");
  const auto world = comm::World::init();
  std::vector<std::string> keys = overrides;
  keys.push_back(fmt::format("loop.max_num_steps={}", steps));
  monitor::StartPhases phases;
  const auto run = train::set_up_run(*world, train::load_config_collectively(*world, file, keys), phases);
  engine::Engine& engine = *run->engine;
  const auto calls = engine.dry_step(engine.objective(), true).calls;
  const auto source = train::training_source(run->config, run->train, run->plan(), run->placement.groups(), 0,
                                             run->max_steps());
  std::unique_ptr<train::Capture> capture;
  for (int64_t s = 1; s <= steps; ++s) {
    if (s == 2)
      capture = std::make_unique<train::Capture>(train::recording(*run), s, steps - 1, calls.size());
    if (capture) capture->begin_step();
    const trace::TagScope tag({.step = static_cast<int32_t>(s)});
    const train::FilledStep filled = train::fill_step(engine, *source);
    engine.step({.number = s, .learning_rate = 1e-3, .loss_tokens = filled.totals.loss_tokens},
                engine.objective());
    train::collect_step(*world, engine);
  }
  check(capture->finish(), calls);
  engine.finish_gathers();
}

void check_record(const profile::Recorded& record, const std::vector<ops::Call>& calls, int64_t steps) {
  CHECK(record.first_step == 2);
  CHECK(record.last_step == steps);
  REQUIRE(record.step_begins.size() == static_cast<size_t>(steps));
  CHECK(record.window.dropped == 0);
  CHECK(record.window.begin <= record.step_begins.front());
  CHECK(record.step_begins.back() <= record.window.end);
  // Every call of the steps is there with its cost, once.
  std::map<std::string, std::pair<int64_t, double>> dry, seen;  // calls and FLOPs by op
  double dry_bytes = 0, bytes = 0;
  for (const ops::Call& call : calls) {
    dry[call.op].first += steps - 1;
    dry[call.op].second += static_cast<double>(steps - 1) * call.cost.flops;
    dry_bytes += static_cast<double>(steps - 1) * call.cost.bytes();
  }
  std::vector<bool> counted(record.costs.size());
  std::vector<int64_t> open;
  for (const Event& e : record.window.events) {
    if (e.row != 0) continue;
    while (!open.empty() && open.back() <= e.begin) open.pop_back();
    if (!open.empty()) REQUIRE(e.end <= open.back());
    open.push_back(e.end);
    if (e.kind != Kind::op) continue;
    REQUIRE(e.call < record.costs.size());
    REQUIRE_FALSE(counted[e.call]);
    counted[e.call] = true;
    const ops::Cost& cost = record.costs[e.call];
    seen[e.name].first += 1;
    seen[e.name].second += cost.flops;
    bytes += cost.bytes();
    CHECK(e.tag.step >= 2);
    CHECK(e.tag.step <= steps);
  }
  CHECK(std::find(counted.begin(), counted.end(), false) == counted.end());
  CHECK(seen == dry);
  CHECK(bytes == Approx(dry_bytes));
  CHECK(record.buffers.size() > 0);
  CHECK(record.arena_bytes > 0);
  CHECK(record.peaks.f32_flops > 0);
  CHECK(record.peaks.copy > 0);
  CHECK(record.counters.cpu_seconds > 0);
  CHECK(record.counters.cores >= 1);
}

TEST_CASE("a window has the calls, FLOPs and bytes of its steps exactly") {
  Workbench bench;
  SECTION("llama") {}
  SECTION("GPT-2") {
    bench.model =
        "{model_type: gpt2, vocab_size: 272, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, "
        "max_position_embeddings: 64}";
  }
  record_steps(bench, {}, 3, [](const profile::Recorded& record, const std::vector<ops::Call>& calls) {
    check_record(record, calls, 3);
  });
}

TEST_CASE("ranges of a window have the step, the microbatch, the layer and the tick") {
  const Workbench bench;
  record_steps(bench, {}, 2, [](const profile::Recorded& record, const auto&) {
    std::map<std::string, int64_t> layers;
    int last_tick = -1;
    for (const Event& e : record.window.events) {
      if (e.kind == Kind::layer) {
        ++layers[e.name];
        CHECK(e.tag.layer >= 0);
        CHECK(e.tag.chunk == 0);
        CHECK(e.tag.microbatch >= 0);
        CHECK(e.tag.microbatch < 2);
        CHECK(e.tag.tick >= last_tick);
        last_tick = e.tag.tick;
      }
      if (e.kind == Kind::phase && std::string(e.name) == "optimizer_step") CHECK(e.tag.microbatch == -1);
    }
    CHECK(layers.at("loss_computation") > 0);
    CHECK(last_tick > 0);
  });
  record_steps(bench, {"policy.recompute.granularity=full"}, 2,
               [](const profile::Recorded& record, const auto&) {
                 CHECK(std::any_of(record.window.events.begin(), record.window.events.end(),
                                   [](const Event& e) { return e.kind == Kind::recompute; }));
               });
}

TEST_CASE("a window changes no bit of a run, on one rank and on two") {
  const Workbench bench;
  const std::vector<std::string> profiled{"profiling.enabled=true", "profiling.steps=2:4"};
  const auto weights = [&](const std::string& name) { return bench.weights(name, 4); };
  const Finished plain = bench.run("plain", {}), traced = bench.run("traced", profiled);
  INFO(traced.err);
  REQUIRE(plain.code == Exit::ok);
  REQUIRE(traced.code == Exit::ok);
  CHECK(bench.values("plain", "loss") == bench.values("traced", "loss"));
  CHECK(bench.values("plain", "grad_norm") == bench.values("traced", "grad_norm"));
  CHECK(weights("plain") == weights("traced"));
  CHECK_FALSE(std::filesystem::exists(bench / "plain/logs/profile"));

  const Finished two = bench.run_ranks(NRL_TWO_RANKS, "two", {"distributed.shard_strategy=optim"});
  const Finished traced_two = bench.run_ranks(NRL_TWO_RANKS, "traced-two",
                                              {"distributed.shard_strategy=optim", "profiling.enabled=true",
                                               "profiling.steps=2:4", "profiling.ranks=1"});
  INFO(traced_two.err);
  REQUIRE(two.code == Exit::ok);
  REQUIRE(traced_two.code == Exit::ok);
  CHECK(bench.values("two", "loss") == bench.values("traced-two", "loss"));
  CHECK(weights("two") == weights("traced-two"));
  CHECK_FALSE(std::filesystem::exists(bench / "traced-two/logs/profile/step-2/rank-0.pftrace"));
  CHECK(std::filesystem::exists(bench / "traced-two/logs/profile/step-2/rank-1.pftrace"));
}

TEST_CASE("windows repeat, are cut at the end of the run, and go on after a resume") {
  const Workbench bench;
  const auto windows = [&](const std::string& name) {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(bench / (name + "/logs/profile")))
      out.push_back(entry.path().filename());
    std::sort(out.begin(), out.end());
    return out;
  };
  using Names = std::vector<std::string>;
  const std::vector<std::string> often{"profiling.enabled=true", "profiling.steps=2:4", "profiling.every=3",
                                       "loop.max_num_steps=8"};
  REQUIRE(bench.run("often", often).code == Exit::ok);
  CHECK(windows("often") == Names{"history.jsonl", "step-2", "step-5", "step-8"});
  CHECK_FALSE(std::filesystem::exists(bench / "often/logs/profile/step-5/rank-0.pftrace"));
  CHECK(std::filesystem::exists(bench / "often/logs/profile/step-8/rank-0.pftrace"));
  const std::vector<std::string> long_window{"profiling.enabled=true", "profiling.steps=3:100"};
  REQUIRE(bench.run("cut", long_window).code == Exit::ok);
  CHECK(windows("cut") == Names{"step-3"});
  // Four steps again, resumed in the middle of the window.
  std::vector<std::string> more = long_window;
  more.push_back("loop.max_num_steps=6");
  REQUIRE(bench.run("cut", more).code == Exit::ok);
  CHECK(windows("cut") == Names{"step-3", "step-5"});
  const Finished beyond = bench.run("beyond", {"profiling.enabled=true", "profiling.steps=9:10"});
  CHECK(beyond.code == Exit::ok);
  CHECK_FALSE(std::filesystem::exists(bench / "beyond/logs/profile"));
}

std::atomic<int> delays = 0;
void delay(int) {
  delays.fetch_add(1, std::memory_order_relaxed);
  usleep(20000);
}

TEST_CASE("a window that is slower than the first one is an alert") {
  const Workbench bench;
  const std::vector<std::string> keys{"profiling.enabled=true",
                                      "profiling.steps=2:5",
                                      "profiling.every=3",
                                      "loop.max_num_steps=13",
                                      "monitoring.alerting.enabled=true",
                                      "monitoring.analysis.performance_regression=true"};
  // From the end of the first window on, signals interrupt the training thread.
  struct sigaction act {
  }, before{};
  act.sa_handler = delay;
  act.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &act, &before);
  std::atomic<bool> over = false;
  const pthread_t training = pthread_self();
  std::thread disturb([&] {
    while (!over && !std::filesystem::exists(bench / "slow/logs/profile/step-2/profile.json")) usleep(200);
    while (!over) {
      pthread_kill(training, SIGALRM);
      usleep(21000);
    }
  });
  const Finished slow = bench.run("slow", keys);
  over = true;
  disturb.join();
  sigaction(SIGALRM, &before, nullptr);
  INFO(slow.err);
  CHECK(slow.code == Exit::ok);
  CHECK(delays > 0);
  std::stringstream alerts;
  alerts << std::ifstream(bench / "slow/logs/alerts.jsonl").rdbuf();
  INFO(alerts.str());
  CHECK(alerts.str().find("performance_regression") != std::string::npos);
  CHECK(alerts.str().find("in the first window (+") != std::string::npos);
}

TEST_CASE("steps are selected by range and period") {
  const train::ProfiledSteps none;
  CHECK_FALSE(none.contains(1));
  const train::ProfiledSteps once{.range = {3, 5}};
  const train::ProfiledSteps often{.range = {3, 5}, .every = 10};
  for (int64_t step = 1; step < 40; ++step) {
    CHECK(once.contains(step) == (step == 3 || step == 4));
    CHECK(often.contains(step) == (step % 10 == 3 || step % 10 == 4));
  }
  CHECK(once.from(3) == 2);
  CHECK(once.from(4) == 1);
  CHECK(often.from(13) == 2);
  CHECK(often.from(24) == 1);
}

}  // namespace
}  // namespace nrl::test
