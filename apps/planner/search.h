#pragma once
// nrl-train plan --search: the layouts of a configuration that fit on a number of ranks, the best first by
// their estimated time of a step, its price or its energy.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "apps/planner/layouts.h"
#include "apps/predict/energy.h"
#include "apps/predict/step_time.h"

namespace nrl::planner {

/// The quantity of which a layout should need least: time, price (cluster.cost) or energy of a step without
/// failures.
enum class Objective : uint8_t { time, cost, energy };

/// Why the objective cannot be computed, with the fix; empty if it can.
std::string objective_problem(Objective objective, const Config& config, const machine::DeviceModel& device);

struct Found {
  Layout layout;
  std::vector<std::string> keys = {};  ///< Layout::keys()
  int64_t memory = 0;                  ///< bytes of the rank that needs most
  int64_t tokens = 0;                  ///< of a step
  predict::StepEstimate estimate = {};
  double value = 0;  ///< of a step: seconds, price or kWh
};

/// The best layout that does without something that the first one has.
struct Alternative {
  std::string without;              ///< "pipeline stages"
  std::optional<Found> found = {};  ///< unset: none fits
};

struct Result {
  std::vector<Found> found;  ///< planned layouts that fit, the best first
  std::vector<Alternative> alternatives;
  size_t tried = 0,
         too_large = 0;  ///< layouts that the model and its options allow; of these, that do not fit
  int64_t least_memory = INT64_MAX;  ///< bytes of the smallest one that does not fit
  std::string refused;               ///< why the first layout that a check refuses is; empty: none
  int dry_runs = 0;                  ///< for prices: plans of models with few layers
  int planned = 0;                   ///< layouts planned in full
};

struct Request {
  std::string config;                  ///< file
  std::vector<std::string> overrides;  ///< of the user
  int world = 1;
  double capacity = 0;     ///< bytes that a rank may use
  double expert_load = 1;  ///< predict::estimate_step()
  size_t best = 16;        ///< layouts that are wanted; SIZE_MAX: all that fit
  Objective objective = Objective::time;
  double within = 0;  ///< all that take at most this share longer than the first are wanted too
  std::vector<std::string> fixed = {};  ///< "key=value": layouts with other values are not tried
  /// Threads of this process, on which layouts that may be planned next are planned beside the others. The
  /// result does not depend on their number.
  int threads = 1;
  /// Called before the bound of every layout with the number of those done and of all; may be empty.
  std::function<void(size_t done, size_t total)> progress = {};
};

/// Bounds all candidates() (Pricer::bound()), times the stages of those with the lowest bounds for closer
/// ones, prices what is still cheapest, and plans the cheapest in full, until those that are left cost more
/// than the wanted ones. Of layouts that differ only in sharding and recomputation the cheapest one is
/// planned, then variants() of the best layouts that may be better by their prices.
Result search_layouts(const Request& request, const predict::ModeledDevice& device);

/// The best `shown` layouts as a table, the keys of the first one, and the best layouts without each of its
/// axes. `flops_per_token`: of the model. `trainer`: whose kernels the times are with; empty: ours.
std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown, Objective objective = Objective::time,
                  std::string_view trainer = {});

}  // namespace nrl::planner
