#include "apps/train/trainer.h"

#include <optional>
#include <utility>

#include "apps/train/launch/gpu_watch.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/run_records.h"
#include "apps/train/launch/stop_signal.h"
#include "apps/train/loop/reference.h"
#include "apps/train/loop/step_loop.h"
#include "apps/train/start/run_setup.h"
#include "core/device/cpu/memory.h"

namespace nrl::train {

Exit train(comm::World& world, const ConfigResult& config) {
  const double start = monitor::Timers::steady_seconds();
  const LoggerConfig& logger = config.config.logger;
  const bool first = world.rank() == 0;
  monitor::TerminalOptions options;
  options.active = first;
  options.progress = logger.progress;
  options.log_interval = logger.log_interval;
  monitor::Terminal terminal(options);
  monitor::StartPhases::Print show;
  if (first)
    show = [&](std::string_view phase, double seconds) {
      terminal.note(fmt::format("starting: {} ({:.0f} s so far)", phase, seconds));
    };
  monitor::StartPhases phases(show);
  const std::unique_ptr<Run> run = set_up_run(world, config, phases);
  prepare_references(*run, phases);
  std::unique_ptr<TextSamples> samples;
  std::optional<RunReport> report;
  run_collectively(world, [&] {
    if (logger.sample_period > 0 && first)
      samples = std::make_unique<TextSamples>(config.config, *run->engine,
                                              run->train.examples && run->train.examples->rendered(),
                                              run->placement.host_threads());
    report.emplace(*run, terminal, phases, start);
  });
  phases.end();
  cpu::release_free_heap();  // of the set-up: the plan does not count it
  cpu::arrange_heap();
  stop::handle_in_steps();
  std::unique_ptr<GpuWatch> gpu;
  if (const device::Runtime* device = run->engine->exec().device) gpu = watch_gpu(device->properties().uuid);
  RunRecords records(world, logger.log_dir, report->run_file().run_id, report->run_file().attempt());
  return records.keep([&] {
    try {
      return StepLoop(*run, *report, samples.get()).run();
    } catch (const AgreedExit&) {
      // All ranks are here: a save in flight ends.
      if (AsyncSaver* saver = run->saver->async(); saver && saver->in_flight()) saver->join();
      throw;
    }
  });
}

}  // namespace nrl::train
