// nrl-train plan: what a run would do and allocate, without doing it.

#include <spdlog/fmt/ranges.h>

#include <cstdio>

#include "apps/nrl-train/commands.h"
#include "apps/plan/run_plan.h"
#include "apps/train/model_source.h"
#include "apps/train/session.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {

int run_plan(const PlanArgs& args) {
  ConfigResult result = load_config(args.config.path, args.config.overrides);
  if (result.ok()) {
    const Diagnostics more = validate_for_world(result, args.world);
    result.diagnostics.insert(result.diagnostics.end(), more.begin(), more.end());
  }
  std::fputs(render(result.diagnostics).c_str(), stderr);
  if (!result.ok()) return static_cast<int>(result.exit_code());
  const Config& c = result.config;
  const BatchPlan batch = resolve_batch(c, args.world);
  // A GPU's memory can be planned without one.
  std::string why;
  const DeviceType device = c.device == DeviceKind::cuda ? DeviceType::cuda : train::choose_device(c, why);
  const auto plan =
      plan::make_run_plan(c, train::load_model_spec(result), batch, 0, device, train::threads_for(c, 1));
  const auto& spec = plan->spec;
  log::info("model    {} parameters, {} layers, {:.4f} GFLOP per token in training at length {}",
            grouped(plan->parameters.total()), spec.layers,
            training_flops_per_token(spec, plan->sequence_length) / 1e9, plan->sequence_length);
  log::info("device   {}, weights and activations in {}", device == DeviceType::cuda ? "cuda" : "cpu",
            name_of(plan->recipe.activations));
  log::info("grid     {} = dp {} x tp 1 x pp 1 x cp 1 x ep 1   {}", args.world, batch.data_parallel,
            plan->sharding.name);
  log::info("batch    {} sequences = {} micro x {} accumulate x {} dp = {} tokens per step", batch.global,
            batch.micro, batch.accumulation, batch.data_parallel, grouped(batch.tokens_per_step));
  log::info("buckets  {} of up to {} MiB, {} elements with padding", plan->layout.buckets().size(),
            c.distributed.bucket_size_mb, grouped(plan->layout.total()));
  log::info(
      "layers   every layer: {}",
      plan->recompute_modules.empty()
          ? "all slots kept"
          : "recomputes " + fmt::format("{}", fmt::join(plan->recompute_modules, ", ")) + ", keeps the rest");
  log::info("memory   per rank, in bytes");
  for (int i = 0; i < memory::category_count; ++i) {
    const auto category = static_cast<memory::Category>(i);
    log::info("  {:<12} {:>16}   {}", memory::name_of(category), grouped(plan->memory.bytes(category)),
              human_bytes(static_cast<uint64_t>(plan->memory.bytes(category))));
  }
  log::info("  {:<12} {:>16}   {}", "total", grouped(plan->memory.total_bytes()),
            human_bytes(static_cast<uint64_t>(plan->memory.total_bytes())));
  if (args.buffers)
    for (const auto& buffer : plan->memory.buffers())
      if (buffer.bytes > 0)
        log::info("  {:<12} {:>14} at {:>14}  {}", memory::name_of(buffer.category), grouped(buffer.bytes),
                  grouped(buffer.offset), buffer.name);
  return 0;
}

}  // namespace nrl::app
