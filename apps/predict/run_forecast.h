#pragma once
// The cost of a whole run: days with failures and checkpoints, rank hours, energy and price, from the
// estimated time of a step and the keys of cluster.reliability and cluster.cost.

#include <optional>
#include <string>

#include "apps/machine/device_models.h"
#include "apps/plan/run_plan.h"
#include "apps/predict/energy.h"
#include "apps/predict/step_time.h"
#include "core/io/json.h"

namespace nrl::predict {

/// A run, beside its configuration.
struct RunFacts {
  int ranks = 1, nodes = 1;
  double step = 0;             ///< seconds
  double tokens = 0;           ///< of a step
  BusySeconds busy = {};       ///< of a rank in a step
  double rank_checkpoint = 0;  ///< bytes that a rank saves
  bool snapshots = false;      ///< checkpoints are saved beside the next steps
};
/// The nodes that so many ranks of a device usually have.
int usual_nodes(const machine::DeviceModel& device, int ranks);
/// `plan`: of the rank that saves most; all are assumed to save as much. `nodes`: of the ranks; 0:
/// usual_nodes().
RunFacts run_facts(const Config& config, const plan::RunPlan& plan, const machine::DeviceModel& device,
                   int nodes, double step, const BusySeconds& busy);
/// The facts of a run whose step was estimated. `device`: of the stages.
RunFacts run_facts(const Config& config, const DryStages& stages, const ModeledDevice& device, int nodes,
                   const StepEstimate& estimate);

/// Hours of all ranks, energy and price.
struct Spent {
  double rank_hours = 0;
  std::optional<double> kwh = {};    ///< unset: the power is unknown
  std::optional<double> price = {};  ///< unset: no price is configured
};

struct RunForecast {
  bool gpu = false;
  std::optional<int64_t> steps;        ///< unset: the configuration has epochs
  double mtbf = 0;                     ///< seconds; infinite: no failures
  double goodput = 0;                  ///< as configured; 0: the run does not end
  std::optional<int64_t> best_period;  ///< steps between checkpoints; unset: without failures
  double best_goodput = 0;             ///< with best_period
  double seconds_per_step = 0;         ///< with goodput; infinite: the run does not end
  Spent per_token, total;              ///< with goodput; `total` where steps are known

  double seconds() const { return static_cast<double>(steps.value_or(0)) * seconds_per_step; }
  /// The line "run" of `nrl-train plan`, without its name.
  std::string text() const;
  JsonValue json() const;
};

/// Forecasts a run on `device`. Assumed, where the configuration does not say: snapshots are copied over
/// PCIe 4, the storage, and the power of GPUs (power_of()) and nodes.
RunForecast forecast_run(const Config& config, const RunFacts& facts, const machine::DeviceModel& device);

}  // namespace nrl::predict
