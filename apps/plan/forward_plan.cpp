#include "apps/plan/forward_plan.h"

#include <algorithm>
#include <utility>

#include "core/ops/step.h"

namespace nrl::plan {

using memory::Category;

std::unique_ptr<RunPlan> make_forward_plan(model::ModelSpec spec, const ForwardPlanOptions& options,
                                           const Config& config, const GridPosition& position) {
  auto plan = std::make_unique<RunPlan>();
  RunPlan& p = *plan;
  p.spec = std::move(spec);
  p.layout = model_layout(config, p.spec, position, options.device);
  p.position = position;
  if (position.ranks() > 1) {
    p.group_ids = needed_groups(config, position, p.spec.tied);
    p.channels = needed_channels(config, position);
  }
  p.parameters = model::make_parameters(p.spec, p.layout);
  const int64_t tokens = options.micro_batch * options.sequence_length;
  p.batch = {.data_parallel = position.sizes.dp,
             .micro = options.micro_batch,
             .global = options.micro_batch * position.sizes.dp,
             .tokens_per_step = tokens * position.sizes.dp};
  p.batch.accumulation = 1;
  p.sequence_length = options.sequence_length;
  p.device = options.device;
  p.partials = options.device == DeviceType::cpu ? options.threads : ops::gpu_partials;
  p.products = options.products;
  p.recipe = options.recipe;
  for (model::Parameter& parameter : p.parameters.all) parameter.trainable = false;  // weights only
  p.groups = make_param_groups(
      p.parameters,
      [&](const std::string& group) { return group_options(config, position, p.recipe, group); }, p.memory);
  const model::ShardedParameters sharded = sharded_parameters(p.groups);
  const int64_t at_once = p.layout.stages > 1 && !sharded.any() ? options.at_once : 1;
  p.evaluation = p.memory.add("evaluation sums", Category::data, ops::StepScalar::max_metrics * 8);
  add_staging(p);
  p.tensors = std::make_unique<BatchTensors>(
      p.memory, BatchShape{.microbatches = at_once,
                           .sequences = options.packed ? 1 : options.micro_batch,
                           .length = options.packed ? tokens : options.sequence_length,
                           .packed = options.packed ? options.sequence_length : 0,
                           .positions = options.packed,
                           .bounds = options.packed,
                           .staged = options.device == DeviceType::cuda,
                           .context = p.layout.context,
                           .context_rank = p.layout.context_rank,
                           .context_kinds = model::context_kinds(p.spec, p.layout)});
  p.decoder = std::make_unique<model::Decoder>(
      p.spec, p.parameters,
      model::DecoderOptions{
          .tokens = p.tensors->shape().tokens(),
          .max_sequence = options.sequence_length,
          .sequences = p.tensors->shape().sequences,
          .recipe = p.recipe,
          .device = options.device,
          .layout = p.layout,
          .evaluated = static_cast<int>(at_once),
          .sharded = sharded,
          .loss = {.inverse_temperature = options.inverse_temperature, .top_k = options.top_k}},
      p.memory);
  add_workspace(p);
  declare_buckets(p.groups, p.decoder->buckets(), p.memory);
  p.memory.solve();
  return plan;
}

std::unique_ptr<RunPlan> make_reference_plan(model::ModelSpec spec, const Config& config,
                                             const RunPlan& policy) {
  const int64_t longest = config.policy.max_total_sequence_length, layers = spec.layers;
  return make_forward_plan(std::move(spec),
                           {.micro_batch = std::max<int64_t>(policy.tensors->shape().length / longest, 1),
                            .sequence_length = longest,
                            .packed = true,
                            .inverse_temperature = policy.decoder->options().loss.inverse_temperature,
                            .top_k = config.algorithm == Algorithm::distill ? config.distillation.topk : 0,
                            .recipe = recipe_for(config, policy.device, layers),
                            .device = policy.device,
                            .threads = policy.device == DeviceType::cpu ? policy.partials : 1,
                            .products = policy.products},
                           config, policy.position);
}

}  // namespace nrl::plan
