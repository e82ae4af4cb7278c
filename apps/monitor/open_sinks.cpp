#include "apps/monitor/open_sinks.h"

#include <string>

#include "apps/monitor/mlflow.h"
#include "apps/monitor/tensorboard.h"
#include "apps/monitor/wandb.h"
#include "core/io/atomic_file.h"

namespace nrl::monitor {

std::vector<std::unique_ptr<Sink>> open_sinks(const LoggerConfig& config, const RunInfo& run,
                                              const Sinks::Warn& warn) {
  std::vector<std::unique_ptr<Sink>> sinks;
  const auto open = [&](std::string_view name, const auto& make) {
    try {
      sinks.push_back(make());
    } catch (const std::exception& e) {
      warn(failure_of(name, e));
    }
  };
  const auto inside = [&](const char* name) { return join_path(config.log_dir, name); };
  if (config.tensorboard_enabled)
    open("tensorboard",
         [&] { return tensorboard_sink(config.tensorboard.log_dir.value_or(inside("tensorboard")), run); });
  if (config.wandb_enabled) open("wandb", [&] { return wandb_sink(inside("wandb"), config.wandb, run); });
  if (config.mlflow_enabled)
    open("mlflow", [&] {
      const std::string uri = config.mlflow.tracking_uri.value_or(inside("mlruns"));
      return mlflow_sink(mlflow_directory(uri), config.mlflow, run);
    });
  return sinks;
}

}  // namespace nrl::monitor
