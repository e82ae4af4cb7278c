#pragma once
// The memory in which a run generates its rollouts (generates_rollouts()), in addition to training.

#include <cstdint>
#include <optional>
#include <string>

#include "apps/model/generation_pass.h"
#include "apps/plan/run_plan.h"

namespace nrl::plan {

struct GenerationPlan {
  model::GenerationLimits limits;
  model::ModelLayout layout;  ///< tensor parallelism alone
  model::GenerationMemory memory;
  int64_t sequence_bytes = 0;  ///< pages of a sequence of the longest length
  bool fits = true;            ///< one such sequence fits into half of the memory that training leaves

  /// "up to 128 sequences at once, 2,176 pages of 16 tokens (408 MiB), buffers 63.1 MiB".
  std::string text() const;
};

/// All sequences that a rank gets at once, if their pages fit into half of `left`, the bytes that training
/// leaves of its memory, else fewer pages, but at least enough for one sequence. `left` unset: unknown.
GenerationPlan plan_generation(const Config& config, const RunPlan& plan, std::optional<int64_t> left);

}  // namespace nrl::plan
