#pragma once
// A planned run of a small model on H100s.

#include <string>
#include <vector>

#include "apps/planner/planned_run.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace nrl::test {

inline constexpr const char* planned_yaml = R"(
policy:
  model: {model_type: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 8,
          num_attention_heads: 16, num_key_value_heads: 8, max_position_embeddings: 4096}
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  optimizer: {lr: 1.0e-4}
pretrain: {max_num_steps: 4}
data: {train: {data_path: none}}
)";

class Planned : public TemporaryDirectory {
 public:
  Planned(int world, const std::vector<std::string>& keys) {
    write_file_atomic(*this / "run.yaml", planned_yaml);
    planner::PlannedRun run =
        planner::prepare({.config = *this / "run.yaml", .overrides = keys, .world = world, .device = "h100"});
    INFO(render(run.result.diagnostics));
    REQUIRE(run.complete);
    estimate = planner::estimate_run(run, &kept);
    REQUIRE(estimate.unknown.empty());
    plans = planner::plan_all(run.result, world, run.batch, run.device, run.gpu);
    by_stage = plans.by_stage(kept.stages->layout().stages);
  }
  planner::EstimatedStages kept;
  planner::RunEstimate estimate;
  planner::RankPlans plans;
  std::vector<const plan::RunPlan*> by_stage;
};

}  // namespace nrl::test
