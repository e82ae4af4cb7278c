#pragma once
// nrl-train plan --search: the layouts of a configuration that fit on a number of ranks, fastest first by
// their estimated time of a step.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "apps/predict/step_time.h"

namespace nrl::planner {

/// The choices of the search; everything else is as configured.
struct Layout {
  int tp = 1, cp = 1, ep = 1, pp = 1;
  int chunks = 1;                  ///< of a pipeline stage
  std::string schedule = "auto";   ///< distributed.pipeline_schedule
  int64_t micro = 1;               ///< policy.train_micro_batch_size
  std::string recompute = {};      ///< policy.recompute.granularity; empty: as configured
  std::string strategy = "optim";  ///< distributed.shard_strategy

  /// "tp 2 x dp 4  optim  micro 4".
  std::string name(int world) const;
  /// "key=value" of all of these, and of keys that only suit the configured layout.
  std::vector<std::string> overrides() const;
  /// The keys to add to the configuration `given`: the keys of overrides() that this layout needs, or that
  /// `given` has otherwise than `config`, which is `given` with overrides().
  std::vector<std::string> keys(const Config& given, const Config& config) const;
};

struct Found {
  Layout layout;
  std::vector<std::string> keys = {};  ///< Layout::keys()
  int64_t memory = 0;                  ///< bytes of the rank that needs most
  int64_t tokens = 0;                  ///< of a step
  predict::StepEstimate estimate = {};
};

struct Result {
  std::vector<Found> found;      ///< layouts that fit, fastest first
  int tried = 0, too_large = 0;  ///< layouts that the model and its options allow; of these, that do not fit
  int64_t least_memory = INT64_MAX;  ///< bytes of the smallest one that does not fit
};

struct Request {
  std::string config;                  ///< file
  std::vector<std::string> overrides;  ///< of the user
  int world = 1;
  double capacity = 0;     ///< bytes that a rank may use
  double expert_load = 1;  ///< predict::estimate_step()
  /// Called before every grid, schedule and microbatch with the number of those done and of all; may be
  /// empty.
  std::function<void(size_t done, size_t total)> progress = {};
};

/// Tries every grid whose tensor-parallel ranks are on one node; pipelines with 1F1B, zb_h1 and two and four
/// chunks per stage; context parallelism where a rank keeps at least 2048 tokens of a sequence; expert
/// parallelism; microbatches of powers of two; recomputation, unless it is configured, and sharding of
/// gradients and parameters only where without them the layout does not fit.
Result search_layouts(const Request& request, const predict::ModeledDevice& device);

/// The best `shown` layouts as a table, and the keys of the first one. `flops_per_token`: of the model.
std::string table(const Result& result, const predict::ModeledDevice& device, int world,
                  double flops_per_token, size_t shown);

}  // namespace nrl::planner
