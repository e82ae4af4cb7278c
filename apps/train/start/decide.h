#pragma once
// Decides what a configuration leaves to the memory of the ranks: the sequences of a microbatch
// (policy.train_micro_batch_size: auto, memory.on_oom: reduce_batch).

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "apps/plan/memory_check.h"
#include "apps/plan/stage_plans.h"
#include "apps/train/start/placement.h"

namespace nrl::train {

/// The facts that a decision depends on; the same on all ranks.
struct DecisionFacts {
  const ConfigResult& result;  ///< valid but for its memory; outlives the facts, as does `spec`
  const model::ModelSpec& spec;
  int world = 1;
  DeviceType device = DeviceType::cpu;
  int threads = 1;      ///< CPU threads of a rank
  size_t memory = 0;    ///< memory_for_rank()
  double capacity = 0;  ///< bytes that a rank may use, the most of all ranks
  std::string owner;    ///< owns the capacity: "the GPU"
};

/// The facts of a run that is planned on this machine, whose memory `local` ranks share if they do not
/// compute on GPUs, which have `gpu_memory` bytes each.
DecisionFacts planned_facts(const ConfigResult& result, const model::ModelSpec& spec, int world, int local,
                            size_t gpu_memory);

/// The memory that the rank with the least room needs, and may use.
struct Need {
  plan::CategoryBytes bytes = {};  ///< plan::planned_memory()
  double capacity = 0;
  int rank = 0;
};

/// Plans a microbatch.
using Planned = std::function<Need(const BatchPlan&)>;

struct Decision {
  BatchPlan configured;  ///< resolve_batch()
  BatchPlan batch;       ///< the largest microbatch that fits, else the least that may be taken
  bool fits = false;
  Need before = {},
       need = {};        ///< of both; a lower bound where no plan was needed to see that it does not fit
  std::string why = {};  ///< "rank 1: ...": why memory that was planned could not be allocated
  bool reduced() const { return batch.micro != configured.micro; }
};

/// The first microbatch that fits, from the configured one on; smaller ones only where they may be taken.
Decision decide(const DecisionFacts& facts, const Planned& planned);
/// The same below `failed`, whose memory could not be allocated because of `why`. Unset if there is no
/// smaller microbatch to take.
std::optional<Decision> decide_below(const DecisionFacts& facts, const Planned& planned, Decision failed,
                                     std::string why);
/// decide() without the ranks, by plan::plan_stages(). `last`: gets the plans that were made last if it is
/// not null; none if no plan was needed.
Decision decide_alone(const DecisionFacts& facts, plan::StagePlans* last = nullptr);

/// The warning that a decision took a smaller microbatch, or the problem (exit 71) that nothing fits, with
/// changes of the configuration that do; empty if the run is as configured.
Diagnostics explain(const DecisionFacts& facts, const Decision& decision);

/// Refuses a memory.max_memory that limits no choice of a run. Where that is a warning, it gets its default.
void check_memory_limit(ConfigResult& result);

/// The configuration with another microbatch and, where it is given, accumulation: to try it, or to repeat a
/// run that took it.
ConfigResult with_microbatch(ConfigResult result, const BatchPlan& batch);

/// The plan of this rank for a microbatch.
std::unique_ptr<plan::RunPlan> plan_rank(const ConfigResult& result, const model::ModelSpec& spec,
                                         const BatchPlan& batch, const Placement& placement);

/// Decides on all ranks of a run, and plans what was decided.
class RankDecision {
 public:
  /// Collective. Ends in AgreedExit if nothing fits. The arguments outlive the decision.
  RankDecision(comm::World& world, const ConfigResult& result, const Placement& placement);

  const Decision& decision() const { return decision_; }
  /// This rank's plan, until it is taken.
  const plan::RunPlan& plan() const { return *plan_; }
  /// The same; an equal one if it was taken.
  std::unique_ptr<plan::RunPlan> take();
  Diagnostics warnings() const { return explain(facts_, decision_); }

  /// Collective: decide_below(), after a rank could not allocate its memory. False if there is no smaller
  /// microbatch to take.
  bool take_less(std::string why);
  /// "A microbatch of one sequence cannot be made smaller"; empty if smaller ones may not be taken.
  std::string no_less() const;
  /// Changes of the configuration with which a rank needs at most `capacity` bytes, as notes.
  std::vector<std::string> changes(double capacity) const;

 private:
  Need try_plan(const BatchPlan& batch);
  void require();

  comm::World& world_;
  const Placement& placement_;
  const model::ModelSpec spec_;
  const DecisionFacts facts_;
  std::unique_ptr<plan::RunPlan> plan_;
  Decision decision_;
};

}  // namespace nrl::train
