#include "apps/plan/forward_plan.h"

#include "core/ops/step.h"

namespace nrl::plan {

using memory::Category;

std::unique_ptr<RunPlan> make_forward_plan(model::ModelSpec spec, const ForwardPlanOptions& options) {
  auto plan = std::make_unique<RunPlan>();
  RunPlan& p = *plan;
  p.spec = std::move(spec);
  p.parameters = p.whole = model::make_parameters(p.spec);
  p.batch = {.micro = options.micro_batch,
             .global = options.micro_batch,
             .tokens_per_step = options.micro_batch * options.sequence_length};
  p.batch.accumulation = 1;
  p.sequence_length = options.sequence_length;
  p.device = options.device;
  p.partials = options.device == DeviceType::cpu ? options.threads : ops::gpu_partials;
  p.products = options.products;
  p.recipe = options.recipe;
  for (model::Parameter& parameter : p.parameters.all) parameter.trainable = false;  // weights only
  p.groups = make_param_groups(
      p.parameters,
      [&](const std::string&) {
        return GroupOptions{.strategy = parallel::sharding::ddp, .bucket_elements = 0, .recipe = p.recipe};
      },
      p.memory);
  p.evaluation = p.memory.add("evaluation sums", Category::data, ops::StepScalar::max_metrics * 8);
  add_staging(p);
  p.tensors =
      std::make_unique<BatchTensors>(p.memory, BatchShape{.sequences = options.micro_batch,
                                                          .length = options.sequence_length,
                                                          .staged = options.device == DeviceType::cuda});
  model::DecoderOptions decoder;
  decoder.tokens = options.micro_batch * options.sequence_length;
  decoder.max_sequence = options.sequence_length;
  decoder.recipe = p.recipe;
  decoder.device = options.device;
  p.decoder = std::make_unique<model::Decoder>(p.spec, p.parameters, decoder, p.memory);
  add_workspace(p);
  p.memory.solve();
  return plan;
}

}  // namespace nrl::plan
