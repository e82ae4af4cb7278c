// Values that follow from several keys: the learning-rate schedule of a run, and its batch.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"
#include "core/config/fp8_recipes.h"
#include "core/config/load.h"

namespace nrl {
namespace {

constexpr int64_t auto_micro_tokens = 8192;

// The shortest schedule of at least `steps` with room for the warm-up and the final decay.
int64_t schedule_with_room(const SchedulerConfig& s, int64_t steps) {
  const int64_t decay = s.final_decay();
  if (warmup_steps(s, steps) <= steps - decay) return steps;
  if (!s.warmup_ratio) return s.lr_warmup_iters + decay;
  // ratio * steps + decay <= steps, and rounding to an integer keeps that.
  constexpr double longest = 0x1p62;
  return static_cast<int64_t>(
      std::min(longest, std::ceil(static_cast<double>(decay) / (1 - *s.warmup_ratio))));
}

int64_t microbatch_unit(const Config& config) {
  const DistributedConfig& d = config.distributed;
  const Fp8Config& fp8 = config.policy.fp8_cfg;
  const int64_t rows = std::lcm(fp8.enabled ? row_unit(rules_of(fp8.fp8_recipe).input) : 1,
                                d.splits_sequence() ? d.tensor_parallel_size : 1);
  return rows / std::gcd(rows, example_tokens(config) / d.context_parallel_size);
}

// The largest divisor of `all` up to `most` that is a multiple of `unit`; else the least such one, else the
// largest up to `most`.
int64_t choose_microbatch(int64_t all, int64_t most, int64_t unit) {
  int64_t divisor = most;
  if (all % unit == 0) {
    const int64_t units = all / unit;
    divisor = std::max<int64_t>(most / unit, 1);
    while (units % divisor != 0) --divisor;
    return divisor * unit;
  }
  while (all % divisor != 0) --divisor;
  return divisor;
}

}  // namespace

int64_t warmup_steps(const SchedulerConfig& s, int64_t decay_steps) {
  return s.warmup_ratio ? std::llround(*s.warmup_ratio * static_cast<double>(decay_steps))
                        : s.lr_warmup_iters;
}

int64_t decay_end(const SchedulerConfig& scheduler, int64_t steps) {
  return scheduler.lr_decay_iters.value_or(schedule_with_room(scheduler, steps));
}

std::string schedule_beyond_run(const Config& config, int64_t steps) {
  const SchedulerConfig& s = config.policy.scheduler;
  if (s.lr_warmup_iters > steps)
    return fmt::format(
        "the warm-up ({} steps) is longer than the run ({}): the schedule is unchanged, so the last step "
        "uses {} % "
        "of lr and there is no decay",
        s.lr_warmup_iters, steps, 100 * steps / s.lr_warmup_iters);
  if (s.ends() && decay_end(s, steps) > steps)
    return fmt::format(
        "the schedule ({} steps) is longer than the run ({}): it is unchanged, so the run ends before "
        "min_lr is reached",
        decay_end(s, steps), steps);
  return "";
}

BatchPlan resolve_batch(const Config& config, int world_size) {
  BatchPlan plan;
  plan.unit = microbatch_unit(config);
  plan.data_parallel = world_size / config.distributed.model_ranks();
  plan.global = config.policy.train_global_batch_size;
  const int64_t per_replica = plan.global / plan.data_parallel;
  const int64_t sequence = example_tokens(config);
  if (!config.policy.train_micro_batch_size.is_auto()) {
    plan.micro = config.policy.train_micro_batch_size.value();
  } else if (const auto packed = packed_micro_batch(config)) {
    plan.micro = *packed;
  } else if (config.policy.gradient_accumulation_steps) {
    plan.micro = per_replica / *config.policy.gradient_accumulation_steps;
  } else {
    // Four microbatches per stage leave a bubble of less than a fifth.
    const int64_t stages = config.distributed.pipeline_parallel_size;
    const int64_t most = stages == 1 ? per_replica : std::max<int64_t>(per_replica / (4 * stages), 1);
    plan.micro =
        choose_microbatch(per_replica, std::clamp<int64_t>(auto_micro_tokens / sequence, 1, most), plan.unit);
  }
  plan.accumulation = per_replica / plan.micro;
  plan.tokens_per_step = plan.global * sequence;
  NRL_CHECK(plan.micro * plan.accumulation * plan.data_parallel == plan.global,
            "batch arithmetic was not validated");
  return plan;
}

}  // namespace nrl
