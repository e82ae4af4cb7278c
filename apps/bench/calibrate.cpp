#include <algorithm>
#include <cmath>
#include <ctime>
#include <memory>
#include <numeric>
#include <set>

#include "apps/bench/bench.h"
#include "apps/bench/links.h"
#include "apps/bench/sensor.h"
#include "apps/bench/solo.h"
#include "apps/bench/steps.h"
#include "apps/plan/nodes.h"
#include "apps/train/launch/agreed.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/start/run_check.h"
#include "core/base/log.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/device/runtime.h"
#include "core/io/atomic_file.h"

namespace nrl::bench {
namespace {

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

/// Bytes/s of a large copy to page-locked memory and back, the slower way.
double measure_host_link(device::Runtime& gpu) {
  constexpr size_t bytes = size_t{64} << 20;
  constexpr int copies = 5;
  const device::Memory there(gpu, device::Memory::Kind::device, bytes),
      here(gpu, device::Memory::Kind::pinned, bytes);
  const device::Stream stream(gpu);
  const device::Event begin(gpu, device::EventKind::timed), end(gpu, device::EventKind::timed);
  double slower = HUGE_VAL;
  for (const device::CopyKind kind : {device::CopyKind::device_to_host, device::CopyKind::host_to_device}) {
    double best = 0;
    for (int i = 0; i < copies; ++i) {
      begin.record(stream.get());
      if (kind == device::CopyKind::device_to_host)
        gpu.copy(here.data(), there.data(), bytes, kind, stream.get());
      else
        gpu.copy(there.data(), here.data(), bytes, kind, stream.get());
      end.record(stream.get());
      stream.synchronize();
      best = std::max(best, bytes / std::max(gpu.elapsed_ms(begin.get(), end.get()) * 1e-3, 1e-9));
    }
    slower = std::min(slower, best);
  }
  return slower;
}

/// The name of the device in profiles, and facts that are measured: of a CPU, and of the link to a GPU.
std::unique_ptr<Sensor> describe(machine::Profile& profile, const train::DeviceChoice& choice, int local,
                                 int threads) {
  if (choice.type == DeviceType::cuda) {
    const auto gpu = train::accelerator_backend().open(0);
    const device::Properties found = gpu->properties();
    const machine::DeviceModel* model = machine::model_of_device(found);
    if (found.simulated) model = &machine::find_device_model("--device", "h100");
    if (!model)
      fail(Exit::unavailable,
           "bench calibrate: {} is not in the table of GPUs ({}). Fix: write a profile by hand over the "
           "nearest "
           "one (docs/planner.md)",
           found.name, machine::device_model_names());
    profile.base = model->name;
    profile.facts["host_bandwidth"] = measure_host_link(*gpu);
    auto sensor = std::make_unique<Sensor>(found.uuid);
    profile.driver = sensor->driver();
    return sensor;
  }
  const machine::DeviceModel cpu = machine::measure_cpu_model(local, threads);
  profile.base = "cpu";
  profile.facts = {{"copy", cpu.copy},
                   {"f32_flops", cpu.f32_flops},
                   {"tf32_flops", cpu.tf32_flops},
                   {"memory", cpu.memory},
                   {"node_bandwidth", cpu.node.bandwidth},
                   {"node_latency", cpu.node.latency},
                   {"host_bandwidth", cpu.host.bandwidth}};
  return std::make_unique<Sensor>("");
}

/// Names the calls whose times are spread over more than `unsteady`, at most three kinds.
void warn_of_spread(const std::vector<machine::MeasuredCall>& calls) {
  constexpr size_t most = 3;
  std::vector<machine::MeasuredCall> flagged;
  for (const machine::MeasuredCall& call : calls)
    if (call.unsteady()) flagged.push_back(call);
  if (flagged.empty()) return;
  std::sort(flagged.begin(), flagged.end(),
            [](const auto& a, const auto& b) { return a.iqr / a.seconds > b.iqr / b.seconds; });
  std::string names;
  for (size_t i = 0; i < std::min(flagged.size(), most); ++i)
    names += fmt::format("{}{} ({:.0f} %)", i > 0 ? ", " : "", flagged[i].key.op,
                         100 * flagged[i].iqr / flagged[i].seconds);
  log::warn(
      "{} of {} kinds of calls vary by more than {:.0f} % between rounds: {}{}. Something else uses the "
      "device. Fix: "
      "calibrate again when it is idle",
      flagged.size(), calls.size(), 100 * machine::unsteady_call, names,
      flagged.size() > most ? ", ..." : "");
}

/// Refuses clocks that a plan would refuse in the file.
void add_readings(machine::Profile& profile, const std::vector<Reading>& readings) {
  std::vector<double> watts;
  for (const Reading& r : readings) {
    if (r.clock_mhz) profile.clocks_mhz.push_back(*r.clock_mhz);
    if (r.power_w) watts.push_back(*r.power_w);
  }
  if (!watts.empty())
    profile.power_w = std::accumulate(watts.begin(), watts.end(), 0.0) / static_cast<double>(watts.size());
}

/// Times the ranks of the first, a middle and the last pipeline stage in turn.
void add_calls(machine::Profile& profile, nrl::comm::World& world, const ConfigResult& config, int ranks,
               int rounds, const Sensor& sensor) {
  const int stages = static_cast<int>(config.config.distributed.pipeline_parallel_size);
  const std::set<int> chosen{0, stages / 2, stages - 1};
  std::vector<double> gaps, spreads;
  std::vector<machine::Profile> parts;
  for (const int stage : chosen) {
    const int rank = ranks / stages * stage;
    const SoloTimes times = measure_solo(world, config, ranks, rank, rounds, sensor);
    log::info("rank {:<6} {} calls, {:.2f} ms in {:.2f} ms of a step", rank, grouped(times.calls_of_step),
              times.in_calls * 1e3, times.step * 1e3);
    warn_of_spread(times.calls);
    add_readings(profile, times.readings);
    machine::Profile& part = parts.emplace_back();
    part.base = profile.base;
    part.calls = times.calls;
    gaps.push_back(times.gap);
    if (times.spread) spreads.push_back(*times.spread);
  }
  machine::Profile all = machine::merged(std::move(parts));
  profile.calls = std::move(all.calls);
  profile.host_gap_s = *std::max_element(gaps.begin(), gaps.end());
  if (!spreads.empty()) profile.spread = median(spreads);
}

}  // namespace

int calibrate(nrl::comm::World& world, const Args& args) {
  if (args.out.empty()) fail(Exit::usage, "bench calibrate writes a profile. Fix: add --out FILE");
  if (args.config.empty() && !args.links)
    fail(Exit::usage,
         "bench calibrate measures the calls of a configuration, or --links. Fix: add one of them");
  if (args.links && world.size() == 1)
    fail(Exit::usage,
         "--links measures communication between ranks, and there is one. Fix: start it with mpirun");
  if (args.config.empty() && args.ranks)
    fail(Exit::usage, "--world has no effect without a configuration. Fix: add one, or leave --world out");
  const int ranks = args.ranks.value_or(world.size());
  std::vector<std::string> overrides = args.overrides;
  if (args.device != "auto") overrides.push_back("device=" + args.device);
  const int rounds = args.quick ? 1 : args.steps.value_or(5);
  machine::Profile profile;
  profile.build = NRL_VERSION;
  profile.date = now_text();
  if (args.config.empty()) {
    const train::DeviceChoice choice =
        train::choose_device(args.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu);
    (void)describe(profile, choice, world.local_size(), train::threads_for({}, world.local_size()));
  } else {
    for (const std::string& key : random_token_overrides(rounds)) overrides.push_back(key);
    ConfigResult config = load_config(args.config, overrides);
    train::check_but_memory(config, {.world = ranks, .count = RankCount::planned, .files = false});
    if (!config.ok()) {
      if (world.rank() == 0) std::fputs(render(config.diagnostics).c_str(), stderr);
      return static_cast<int>(config.exit_code());
    }
    const Config& c = config.config;
    const int local = plan::local_sizes(c, ranks).front();
    const std::unique_ptr<Sensor> sensor =
        describe(profile, train::choose_device(c.device), local, train::threads_for(c.kernels, local));
    add_calls(profile, world, config, ranks, rounds, *sensor);
  }
  if (args.links) {
    LinkRates rates = measure_links(world, args, rounds);
    profile.links = std::move(rates.operations);
    profile.overlap = std::move(rates.overlap);
  }
  train::run_collectively(world, [&] {
    const std::string problem = machine::unsteady_clocks(profile.clocks_mhz);
    if (!problem.empty()) fail(Exit::unavailable, "bench calibrate: the clock in MHz: {}", problem);
  });
  log::info("profile    {} of {}: {} of calls, {} of links, {} of both at once", args.out, profile.base,
            counted(static_cast<int64_t>(profile.calls.size()), "time"),
            counted(static_cast<int64_t>(profile.links.size()), "time"),
            counted(static_cast<int64_t>(profile.overlap.size()), "time"));
  if (world.rank() == 0) write_file_atomic(args.out, machine::to_json(profile));
  world.comm().barrier();
  return 0;
}

}  // namespace nrl::bench
