#pragma once
// Computes the memory of runs, smaller microbatches, and changes of a configuration that fit into memory.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/plan/memory_check.h"
#include "apps/plan/stage_plans.h"

namespace nrl::train {

/// plan::planned_memory(), and of a run that generates its rollouts also, as workspace, the reference model
/// (reference.model_name) and the least that it generates with, one sequence of the longest length at a time;
/// as data, on a CPU, the teacher's numbers, with a validation's if distill.max_val_samples is set. A
/// reference model that cannot be read counts nothing.
plan::CategoryBytes needed_memory(const Config& config, const plan::RunPlan& plan);
/// The reference model beside the policy with this plan; 0: there is none. Throws like
/// load_model_directory().
int64_t reference_bytes(const Config& config, const plan::RunPlan& plan);
/// The same, but 0 of a model that cannot be read: the run says so when it reads it.
int64_t readable_reference_bytes(const Config& config, const plan::RunPlan& plan);

/// The memory of the rank of these that needs most (needed_memory).
plan::CategoryBytes largest_need(const Config& config, const plan::StagePlans& plans);

/// The bytes of largest_need() of plan::plan_stages(); or more than `limit`, without a plan, if even
/// plan::minimum_memory is larger.
double needed_memory(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch, int world,
                     DeviceType device, int threads, double limit, size_t memory = 0);

/// Changes of keys with which a run fits.
struct FittingChange {
  std::vector<std::string> overrides;  ///< "policy.train_micro_batch_size=2"
  double bytes = 0;                    ///< that the largest rank then needs
};

/// Up to `most` changes with which a rank of the run needs at most `capacity` bytes, each checked like a
/// configuration and planned: a smaller microbatch, recomputation, sharding, bf16, more ranks for a model
/// replica, then several of them together, and at last shorter samples, which change the training.
/// `memory`: as for plan::make_run_plan(), by which auto chooses what to recompute.
std::vector<FittingChange> changes_that_fit(const ConfigResult& result, int world, DeviceType device,
                                            int threads, double capacity, size_t memory, size_t most = 3);

/// The notes of a problem: "fits: policy.train_micro_batch_size: 2 (needs 1.3 GiB)".
std::vector<std::string> fitting_notes(std::span<const FittingChange> changes);

/// The same steps with microbatches that are smaller by the least factor (usually 2) with which they remain a
/// multiple of BatchPlan::unit, and more accumulation. Unset if there is none, as for one sequence.
std::optional<BatchPlan> smaller_microbatch(const BatchPlan& batch);

/// Whether the microbatch is auto and follows from no other key, so that it may be made smaller.
bool chooses_microbatch(const Config& config);

}  // namespace nrl::train
