#pragma once
// A configuration as `nrl-train plan` takes it: loaded, checked and decided for a number of ranks that need
// not be there, and the estimated time of its steps.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/machine/profile.h"
#include "apps/model/spec/spec.h"
#include "apps/plan/stage_plans.h"
#include "apps/planner/report.h"
#include "apps/predict/run_forecast.h"
#include "apps/predict/step_time.h"
#include "apps/train/launch/device_choice.h"
#include "core/config/load.h"
#include "core/io/json.h"

namespace nrl::planner {

struct PlanRequest {
  std::string config;  ///< file
  std::vector<std::string> overrides = {};
  int world = 1;
  /// auto: as configured; cpu, cuda, or the name of a GPU (machine::find_device_model()).
  std::string device = "auto";
  std::string profile = {};  ///< file of measured rates (machine::Profile); empty: none
  std::string trainer = {};  ///< whose kernels are estimated (machine::find_trainer()); empty: ours
  bool of_search = false;    ///< the layout is one of a search, in which some properties have no effect
};

struct PlannedRun {
  std::vector<std::string> overrides = {};  ///< of the request, and its device
  ConfigResult result;                      ///< with the diagnostics of all checks
  std::optional<model::ModelSpec> spec = {};
  int world = 1;
  const machine::DeviceModel* gpu = nullptr;  ///< the GPU that the request names, or its profile is of
  std::shared_ptr<const machine::Profile> profile = {};
  std::string trainer = {};  ///< of the request
  /// `gpu` with the facts of the profile and the kernels of the trainer.
  std::shared_ptr<const machine::DeviceModel> described = {};
  train::DeviceChoice device = {};
  BatchPlan batch = {};         ///< as decided
  plan::StagePlans plans = {};  ///< with this batch, if one was decided by them, until estimate_run()
  bool complete = false;        ///< all checks but the one of the memory passed, so that it can be planned
};

/// Reads and checks a configuration. What is wrong with it is in PlannedRun::result; only bad options fail
/// (Exit::usage). `layouts`: for a search, which chooses the layout: nothing is decided.
PlannedRun prepare(const PlanRequest& request, bool layouts = false);

/// The time of a step of a planned run.
struct RunEstimate {
  predict::StepEstimate likely = {};
  double good = 0, poor = 0;      ///< seconds of a step at good and poor rates (machine::Scenario)
  double tokens = 0;              ///< of a step
  double flops = 0;               ///< of the model per token: recomputation excluded
  double peak = 0;                ///< FLOP/s of all ranks together
  predict::RunForecast run = {};  ///< of all steps
  bool gpu = false;
  bool fp8 = false;  ///< some FLOPs have FP8 operands; `peak` is of bf16 all the same
  int world = 1;
  std::string trainer = {};               ///< whose kernels they are; empty: ours
  std::string unknown = {};               ///< why there is no estimate; empty: there is one
  std::vector<std::string> without = {};  ///< work of a step that the times do not contain

  double tokens_per_second() const { return tokens / likely.step; }
  double mfu() const { return tokens_per_second() * flops / peak; }
  /// Hours of all ranks for 10^9 tokens.
  double rank_hours() const { return 1e9 / tokens_per_second() * world / 3600; }
};

/// The dry runs that an estimate is from; empty where there is none.
struct EstimatedStages {
  std::unique_ptr<predict::ModeledDevice> device;
  std::unique_ptr<predict::DryStages> stages;
};

/// The rates of the run's device, with the facts of its profile; unset, with the reason in `unknown`, if
/// there is no model of it. A CPU's are measured once per process, which takes about 50 ms. `threads`: of a
/// rank.
std::optional<machine::DeviceModel> model_of(const PlannedRun& run, int threads, std::string& unknown);

/// `run` must be complete; uses up its plans. A CPU's rates are measured once per process, which takes about
/// 50 ms. `kept`: gets the dry runs if it is not null.
RunEstimate estimate_run(PlannedRun& run, EstimatedStages* kept = nullptr);

/// The lines `estimate` and `run` of a plan, without the last line break.
std::string text_of(const RunEstimate& estimate);
/// Its members are described in docs/planner.md; null if there is no estimate.
JsonValue json_of(const RunEstimate& estimate);
/// All that is known of a run in numbers, as docs/planner.md describes it.
JsonValue json_of(const PlannedRun& run, const RankPlans& plans, const RunEstimate& estimate);
/// The parts and the busy time of resources, in seconds.
JsonValue json_of(const predict::StepEstimate& estimate);

}  // namespace nrl::planner
