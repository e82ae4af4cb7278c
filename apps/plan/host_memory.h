#pragma once
// Host memory of a rank's process outside its arena: the program and its libraries, their own allocations,
// and the parts of a run around the engine. With the arena it is the peak resident memory of the process
// (scripts/check-memory.sh compares both).

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
};

/// The host memory of the plan's rank outside its arena, in the order of a report.
std::vector<HostPart> host_memory(const Config& config, const RunPlan& plan, const HostFacts& facts);

/// Bytes of the teacher's numbers of all completions of a generation, which every process has (distillation
/// on policy): `topk` ids and logits for each token. 0: there are none.
int64_t teacher_number_bytes(const Config& config);

/// The sum of the parts; only the largest passing part counts.
int64_t sum_of(const std::vector<HostPart>& parts);

}  // namespace nrl::plan
