#include "apps/plan/run_plan.h"

#include <algorithm>

#include "apps/plan/pipeline.h"
#include "core/base/text.h"
#include "core/ops/optimizer.h"
#include "core/ops/step.h"
#include "parallel/pipeline/equivalent.h"

namespace nrl::plan {

using memory::Category;

namespace {

std::vector<std::string> recompute_rules(const RecomputeConfig& config) {
  if (config.granularity == RecomputeGranularity::none) return {};
  // auto: memory-bound ops, which are cheap to recompute and free half of a block's activations.
  if (config.modules.is_auto()) return {"norm", "activation"};
  std::vector<std::string> rules;
  for (RecomputeModule m : config.modules.value()) rules.emplace_back(name_of(m));
  return rules;
}

std::string bytes_text(int64_t bytes) {
  return human_bytes(static_cast<uint64_t>(bytes));
}

}  // namespace

namespace {

// e4m3 with a scale per block loses half of what e5m2 loses, whose range the scales make needless
// (tests/comm/reducer_test.cpp measures it).
DType wire_of(ReduceDType dtype) {
  switch (dtype) {
    case ReduceDType::fp32:
      return DType::f32;
    case ReduceDType::bf16:
      return DType::bf16;
    case ReduceDType::fp8:
      break;
  }
  return DType::e4m3;
}

DType dtype_of_state(StateDType type) {
  switch (type) {
    case StateDType::fp32:
      return DType::f32;
    case StateDType::bf16:
      return DType::bf16;
    case StateDType::fp16:
      return DType::f16;
    case StateDType::fp8:
      break;
  }
  return DType::e4m3;
}

precision::OptimizerFormats optimizer_formats(const OptimizerConfig& o) {
  if (!o.use_precision_aware_optimizer) return {};
  return {.exp_avg = dtype_of_state(o.exp_avg_dtype),
          .exp_avg_sq = dtype_of_state(o.exp_avg_sq_dtype),
          .remainders = o.store_param_remainders};
}

precision::Recipe recipe_of_precision(const Config& config, DeviceType device) {
  const bool cpu = device == DeviceType::cpu;
  switch (config.policy.precision) {
    case Precision::automatic:
      return cpu ? precision::float32 : precision::bfloat16;
    case Precision::bfloat16:
      return cpu ? precision::bfloat16_storage : precision::bfloat16;
    case Precision::float32:
      return precision::float32;
    case Precision::float16:
      break;
  }
  NRL_CHECK(false, "policy.precision: {} passed the validator", name_of(config.policy.precision));
}

}  // namespace

precision::Recipe recipe_for(const Config& config, DeviceType device) {
  const precision::Recipe recipe =
      recipe_of_precision(config, device).with_optimizer(optimizer_formats(config.policy.optimizer));
  const LogitsDType logits = config.policy.logits_dtype;
  // A CPU, whose GEMMs upcast to f32, gains nothing from bf16 logits.
  const bool choose_bf16 = device == DeviceType::cuda && recipe.activations() == DType::bf16;
  return logits == LogitsDType::bfloat16 || (logits == LogitsDType::automatic && choose_bf16)
             ? recipe.with_bf16_logits()
             : recipe;
}

GroupOptions group_options(const Config& config, const GridPosition& position,
                           const precision::Recipe& recipe, std::string_view group) {
  const DistributedConfig& d = config.distributed;
  const parallel::ShardingStrategy* sharding = parallel::find_sharding(name_of(d.shard_strategy));
  NRL_CHECK(sharding, "no strategy {}", name_of(d.shard_strategy));
  const parallel::GroupId reduce = reduction_group(group);
  const std::vector<int> ranks = position.grid.members(reduce);
  const auto own = std::find(ranks.begin(), ranks.end(), position.grid.rank());
  NRL_CHECK(own != ranks.end(), "this rank has parameters of group {}, but is not in {}", group,
            parallel::name_of(reduce));
  const auto replicas = static_cast<int>(d.dp_replicate_size);
  if (static_cast<int>(ranks.size()) % replicas != 0)
    fail(Exit::config,
         "distributed.dp_replicate_size: {} does not divide the {} ranks of the {} parameters. Fix: use a "
         "divisor",
         replicas, ranks.size(), group);
  const int shards = static_cast<int>(ranks.size()) / replicas, rank = static_cast<int>(own - ranks.begin());
  return {.reduce = reduce,
          .strategy = group_sharding(*sharding, group),
          .shards = shards,
          .shard_rank = rank % shards,
          .replicas = replicas,
          .replica = rank / shards,
          .wire = wire_of(d.grad_reduce_dtype),
          .fp32_sums = d.grad_reduce_fp32_accumulation,
          .error_feedback = d.grad_reduce_error_feedback,
          .overlap_gather = d.overlap_param_gather,
          .bucket_elements = static_cast<int64_t>(d.bucket_size_mb * (1 << 20) / 4),
          .recipe = recipe,
          .first_tp = position.at.tp == 0};
}

void add_staging(RunPlan& p) {
  if (p.device != DeviceType::cuda) return;
  constexpr int64_t most = int64_t{16} << 20;  // long enough for the full bandwidth of a copy
  int64_t largest = 0;
  for (const model::Parameter& parameter : p.parameters.all)
    for (const model::Part& part : parameter.parts) largest = std::max(largest, part.numel());
  // Rounded here, so that both halves are aligned.
  constexpr int64_t unit = memory::MemoryPlan::alignment;
  const int64_t bytes = std::min((largest * size_of(DType::f32) + unit - 1) / unit * unit, most);
  p.staging = p.memory.add("checkpoint staging buffers", Category::data, 2 * bytes, memory::Tier::pinned);
}

namespace {

std::unique_ptr<RunPlan> plan_with(std::vector<std::string> recompute, const Config& config,
                                   model::ModelSpec spec, const BatchPlan& batch,
                                   const GridPosition& position, DeviceType device, int threads,
                                   bool own_loss_weights) {
  auto plan = std::make_unique<RunPlan>();
  RunPlan& p = *plan;
  p.spec = std::move(spec);
  p.layout = model_layout(config, p.spec, position);
  p.parameters = model::make_parameters(p.spec, p.layout);
  p.whole = model::make_parameters(p.spec);
  p.batch = batch;
  p.sequence_length = config.policy.max_total_sequence_length;
  p.device = device;
  p.partials = device == DeviceType::cpu ? threads : ops::gpu_partials;
  NRL_CHECK(!p.spec.learned_positions || p.sequence_length <= p.spec.max_positions,
            "the configuration was not checked");
  p.recipe = recipe_for(config, device);
  p.recompute_modules = std::move(recompute);
  p.groups = make_param_groups(
      p.parameters,
      [&](const std::string& group) { return group_options(config, position, p.recipe, group); }, p.memory);
  int64_t largest = 0;
  for (const ParamGroup& g : p.groups) largest = std::max(largest, g.layout.total());

  const bool gpu = device == DeviceType::cuda;
  p.scalars = p.memory.add("step scalars", Category::data, ops::StepScalar::count * 8);
  if (gpu)
    p.host_scalars = p.memory.add("step scalars, host copies", Category::data,
                                  max_steps_in_flight * ops::StepScalar::count * 8, memory::Tier::pinned);
  p.evaluation = p.memory.add("evaluation sum", Category::data, 8);
  add_staging(p);
  if (const int64_t bytes = p.recipe.scales(static_cast<int>(p.spec.layers)).bytes(); bytes > 0)
    p.memory.add("scales", Category::optimizer, bytes);
  p.tensors = std::make_unique<BatchTensors>(
      p.memory, BatchShape{.microbatches = batch.accumulation,
                           .sequences = batch.micro,
                           .length = p.sequence_length,
                           .positions = config.data.reset_position_ids,
                           .bounds = config.data.reset_attention_mask,
                           .loss_weights = own_loss_weights,
                           .staged = gpu,
                           .context = p.layout.context,
                           .context_rank = p.layout.context_rank,
                           .exchanges = model::distinct_exchanges(p.layout),
                           .window = p.spec.window,
                           .dropout = p.spec.residual_dropout > 0 || p.spec.embedding_dropout > 0 ||
                                      p.spec.attention_dropout > 0});
  const pipeline::ScheduleOptions schedule = schedule_options(config, p.layout, batch.accumulation);
  // The buffers of sharded parameters are planned for evaluation of one microbatch at a time.
  const bool sharded = std::any_of(p.groups.begin(), p.groups.end(), [](const ParamGroup& g) {
    return g.weights_sharded || g.gradients_sharded;
  });
  const model::DecoderOptions options{
      .tokens = batch.micro * p.sequence_length / p.layout.context,
      .max_sequence = p.sequence_length,
      .sequences = batch.micro,
      .batch_share =
          static_cast<float>(batch.micro) / static_cast<float>(config.policy.train_global_batch_size),
      .recipe = p.recipe,
      .recompute = model::recompute_modules(p.recompute_modules),
      .partials = p.partials,
      .seed = static_cast<uint64_t>(resolved_loop(config).seed),
      .device = device,
      .optimizer_workspace = ops::sum_of_squares_workspace(largest),
      .layout = p.layout,
      .training = pipeline::make_schedule(schedule, p.layout.stage),
      .dry_run = pipeline::shortest_equivalent(schedule, p.layout.stage),
      .evaluated = p.layout.stages > 1 && !sharded ? schedule.microbatches : 1};
  p.decoder = std::make_unique<model::Decoder>(p.spec, p.parameters, options, p.memory);
  p.traffic = plan_layer_traffic(*p.decoder, p.groups,
                                 {.prefetch = config.distributed.overlap_param_gather,
                                  .overlap_reduce = config.distributed.overlap_grad_reduce},
                                 p.memory);
  p.memory.solve();
  return plan;
}

}  // namespace

std::unique_ptr<RunPlan> make_run_plan(const Config& config, model::ModelSpec spec, const BatchPlan& batch,
                                       const GridPosition& position, DeviceType device, int threads,
                                       bool own_loss_weights, size_t gpu_memory) {
  const auto make = [&](std::vector<std::string> recompute) {
    return plan_with(std::move(recompute), config, spec, batch, position, device, threads, own_loss_weights);
  };
  const RecomputeConfig& recompute = config.policy.recompute;
  const bool choose = recompute.granularity == RecomputeGranularity::automatic &&
                      recompute.modules.is_auto() && device == DeviceType::cuda;
  if (!choose) return make(recompute_rules(recompute));
  auto keeping = make({});
  const int64_t need = keeping->memory.total_bytes();
  const auto percent = static_cast<int>(100 * keep_all_share);
  if (static_cast<double>(need) <= keep_all_share * static_cast<double>(gpu_memory)) {
    keeping->recompute_reason = fmt::format("within {} % of the GPU's {}", percent, human_bytes(gpu_memory));
    return keeping;
  }
  auto plan = make(recompute_rules(recompute));
  const std::string otherwise = fmt::format("keeping everything takes {}", bytes_text(need));
  if (config.kernels.share_device)
    plan->recompute_reason = otherwise + ", and ranks may share the GPU";
  else if (gpu_memory == 0)
    plan->recompute_reason =
        fmt::format("{}, which a run does on a GPU of at least {}", otherwise,
                    bytes_text(static_cast<int64_t>(static_cast<double>(need) / keep_all_share)));
  else
    plan->recompute_reason =
        fmt::format("{}, more than {} % of the GPU's {}", otherwise, percent, human_bytes(gpu_memory));
  return plan;
}

std::string recompute_text(const RunPlan& plan) {
  std::string text = plan.recompute_modules.empty() && !plan.recompute_reason.empty() ? "nothing" : "";
  for (const std::string& rule : plan.recompute_modules) text += (text.empty() ? "" : ", ") + rule;
  return text + (plan.recompute_reason.empty() ? "" : ": " + plan.recompute_reason);
}

std::string memory_line(const memory::MemoryPlan& plan) {
  std::string text;
  for (int c = 0; c < memory::category_count; ++c) {
    const auto category = static_cast<Category>(c);
    if (plan.bytes(category) > 0)
      text +=
          fmt::format("{} {}  ", name_of(category), human_bytes(static_cast<uint64_t>(plan.bytes(category))));
  }
  return text + "= " + human_bytes(static_cast<uint64_t>(plan.total_bytes()));
}

}  // namespace nrl::plan
