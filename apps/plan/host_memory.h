#pragma once
// Host memory of a rank's process outside its arena: the program and its libraries, their own allocations,
// and the parts of a run around the engine. With the arena it is the peak resident memory of the process
// (scripts/check-memory.sh compares both).

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/data/gpt_dataset.h"
#include "apps/plan/run_plan.h"
#include "apps/plan/traffic.h"

namespace nrl::plan {

struct HostPart {
  std::string name;
  int64_t bytes = 0;
  std::string formula;
  /// Parts with this mark are in use at different times, so only the largest of them counts.
  bool passing = false;
};

struct HostFacts {
  int64_t program = 0;                             ///< train::measure_program()
  int threads = 1;                                 ///< CPU threads of a rank
  const data::DocumentRules* documents = nullptr;  ///< of the samples; null: none
  std::span<const Traffic> traffic = {};           ///< of the rank's step; not used of a single rank
  /// False for steps on random tokens, which read no data, save nothing and report no MFU.
  bool training = true;
  double memory = 0;  ///< bytes of the host's memory that a rank may use (takes_snapshot()); 0: unknown
  std::optional<int64_t> validation_prompts = {};  ///< as for taught_completions()
};

/// The host memory of the plan's rank outside its arena, in the order of a report.
std::vector<HostPart> host_memory(const Config& config, const RunPlan& plan, const HostFacts& facts);

/// Completions whose teacher's numbers a process has at the same time (distillation on policy; else 0): all
/// of a generation, and where the run evaluates also all of a validation, which may come between two steps on
/// the generation. `validation_prompts`: in the validation data; unset: unknown, then distill.max_val_samples
/// counts, and a validation counts nothing if that is not set.
int64_t taught_completions(const Config& config, std::optional<int64_t> validation_prompts);
/// The most bytes of their numbers, which every process has: `topk` ids and logits for each token.
int64_t teacher_number_bytes(const Config& config, std::optional<int64_t> validation_prompts);

/// Bytes that a run with rollouts takes of the memory of the plan's device besides the plan and generation: a
/// reference model of `reference` bytes, and on a CPU the teacher's numbers.
int64_t bytes_beside_plan(const Config& config, const RunPlan& plan, int64_t reference,
                          std::optional<int64_t> validation_prompts);
/// Bytes that are left for the teacher's numbers of `share`, a rank's part of the host's memory: on a CPU by
/// the plan and the reference model, on a GPU by the plan's buffers on the host and the other parts of
/// host_memory(). Negative: these do not fit.
int64_t room_for_teacher_numbers(const Config& config, const RunPlan& plan, const HostFacts& facts,
                                 int64_t reference, int64_t share);

/// The sum of the parts; only the largest passing part counts.
int64_t sum_of(const std::vector<HostPart>& parts);

}  // namespace nrl::plan
