#include "apps/bench/solo.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "apps/bench/steps.h"
#include "apps/engine/engine.h"
#include "apps/plan/nodes.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/loop/capture.h"
#include "apps/train/loop/lr_schedule.h"
#include "apps/train/start/initial_state.h"
#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/device/cpu/threads.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/libraries.h"

namespace nrl::bench {
namespace {

constexpr int solo_warmup = 2;

/// The device of one rank.
class SoloDevice {
 public:
  SoloDevice(const KernelsConfig& kernels, const train::DeviceChoice& choice, int threads) {
    if (choice.type == DeviceType::cuda) {
      ops::LibraryOptions options;
      options.tf32 = kernels.tf32;
      options.deterministic = kernels.deterministic;
      accelerator_ = train::open_accelerator(0, options);
      exec_ = accelerator_.exec();
      return;
    }
    exec_.kernels = &ops::cpu_kernels(plan::isa_for(kernels));
    exec_.threads = threads;
    cpu::use_threads(threads);
  }
  const ops::Exec& exec() const { return exec_; }
  device::Runtime* runtime() const { return accelerator_.runtime.get(); }

 private:
  train::Accelerator accelerator_;
  ops::Exec exec_;
};

/// A call of a round, in order.
struct Timed {
  ops::Call call;
  int64_t begin, end;  // nanoseconds
};

/// The calls of a window that are not within another one.
std::vector<Timed> calls_of(const profile::Recorded& record) {
  std::vector<Timed> out;
  for (const trace::Event& e : record.window.events) {
    if (e.kind != trace::Kind::op || e.call == trace::no_call || e.row != record.compute_row) continue;
    if (!out.empty() && e.begin < out.back().end) continue;
    out.push_back({{.op = e.name, .cost = record.costs[e.call]}, e.begin, e.end});
  }
  return out;
}

/// The standard deviation of the ranks' times of a step, relative to their mean; over all rounds.
std::optional<double> spread_over_ranks(nrl::comm::Communicator& ranks, const std::vector<double>& steps) {
  const auto n = static_cast<double>(ranks.size());
  if (ranks.size() == 1 || steps.empty()) return std::nullopt;
  std::vector<double> sums = steps, squares;
  ranks.all_reduce(sums);
  for (size_t i = 0; i < steps.size(); ++i) {
    const double away = steps[i] * n / sums[i] - 1;
    squares.push_back(away * away);
  }
  ranks.all_reduce(squares);
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0) /
                   (static_cast<double>(steps.size()) * (n - 1)));
}

/// The n-th call is the n-th of the dry run.
void require_same(const std::vector<ops::Call>& expected, const std::vector<Timed>& calls, int rank) {
  if (calls.size() != expected.size())
    fail(Exit::internal, "rank {} alone makes {} calls in a step, its dry run {}", rank, calls.size(),
         expected.size());
  for (size_t i = 0; i < calls.size(); ++i)
    if (std::string_view(calls[i].call.op) != expected[i].op)
      fail(Exit::internal, "call {} of rank {} alone is {}, in its dry run {}", i, rank, calls[i].call.op,
           expected[i].op);
}

double quartile_range(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) {
    return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
  };
  return at(0.75) - at(0.25);
}

}  // namespace

SoloTimes measure_solo(nrl::comm::World& world, const ConfigResult& config, int ranks, int rank, int rounds,
                       const Sensor& sensor) {
  const Config& c = config.config;
  const train::DeviceChoice choice = train::choose_device(c.device);
  const int local = plan::local_sizes(c, ranks)[static_cast<size_t>(rank)];
  const int threads = train::threads_for(c.kernels, local);
  const plan::GridPosition position = plan::grid_position(c, ranks, rank);
  const SoloDevice device(c.kernels, choice, threads);
  auto plan =
      plan::make_run_plan(c, train::load_model_spec(config), resolve_batch(c, ranks), position, choice.type,
                          threads, {}, train::memory_for_rank(c.kernels, choice.type, choice.memory, local));
  const parallel::Groups groups(position.grid, plan->group_ids, plan->channels, device.runtime());
  engine::Engine engine(std::move(plan), engine::training_options(c), groups, device.exec());
  monitor::StartPhases phases;
  train::load_initial_weights(c, engine, train::verify_all, threads, phases, [&] {
    engine.require_kernels(engine.objective(), device.runtime() ? "the GPU" : "the CPU");
  });
  const std::vector<ops::Call> expected = engine.dry_step(engine.objective(), true).calls;
  const train::LrSchedule schedule =
      train::make_lr_schedule(c.policy, solo_warmup + rounds, engine.plan().batch.global);
  run_steps(world, phases, engine, schedule, solo_warmup, true);

  SoloTimes out;
  std::vector<double> steps, in_calls, gaps;
  struct Sum {
    ops::Cost cost;
    std::vector<double> rounds;  // mean of a round's calls
  };
  std::map<machine::CallKey, Sum> sums;
  for (int round = 0; round < rounds; ++round) {
    world.comm().barrier();
    train::LocalCapture capture(engine.exec(), 1, 1, expected.size());
    run_steps(world, phases, engine, schedule, 1, true, [&] { capture.begin_step(); });
    out.readings.push_back(sensor.read());
    const profile::Recorded record = capture.finish();
    const std::vector<Timed> calls = calls_of(record);
    require_same(expected, calls, rank);
    double total = 0;
    std::map<machine::CallKey, std::pair<double, int>> of_round;
    for (size_t i = 0; i < calls.size(); ++i) {
      const double seconds = static_cast<double>(calls[i].end - calls[i].begin) * 1e-9;
      const machine::CallKey key = machine::key_of(calls[i].call);
      sums[key].cost = calls[i].call.cost;
      of_round[key].first += seconds;
      of_round[key].second += 1;
      total += seconds;
      if (i > 0) gaps.push_back(static_cast<double>(calls[i].begin - calls[i - 1].end) * 1e-9);
    }
    for (const auto& [key, sum] : of_round) sums[key].rounds.push_back(sum.first / sum.second);
    steps.push_back(static_cast<double>(record.step_begins.back() - record.step_begins.front()) * 1e-9);
    in_calls.push_back(total);
  }
  for (const auto& [key, sum] : sums) {
    const double seconds = median(sum.rounds);
    if (seconds <= 0) continue;
    out.calls.push_back({.key = key,
                         .work = sum.cost.work,
                         .flops = sum.cost.flops,
                         .library = sum.cost.library,
                         .seconds = seconds,
                         .rounds = static_cast<int>(sum.rounds.size()),
                         .iqr = quartile_range(sum.rounds)});
  }
  out.spread = spread_over_ranks(world.comm(), steps);
  out.step = median(steps);
  out.in_calls = median(in_calls);
  out.gap = gaps.empty() ? 0 : std::max(median(gaps), 0.0);
  out.calls_of_step = std::ssize(expected);
  return out;
}

}  // namespace nrl::bench
