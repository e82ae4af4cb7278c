#include "apps/plan/run_plan.h"

#include <algorithm>
#include <map>

#include "apps/plan/dry_rank.h"
#include "apps/plan/loss.h"
#include "apps/plan/nodes.h"
#include "apps/plan/pipeline.h"
#include "apps/plan/recompute_choice.h"
#include "core/base/text.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/kernel_table.h"
#include "core/ops/optimizer.h"
#include "core/ops/step.h"
#include "parallel/pipeline/equivalent.h"

namespace nrl::plan {

using memory::Category;

namespace {

std::string bytes_text(int64_t bytes) {
  return human_bytes(static_cast<uint64_t>(bytes));
}

}  // namespace

cpu::Isa isa_for(const KernelsConfig& kernels) {
  return kernels.isa.is_auto() ? ops::cpu_choice().isa : kernels.isa.value();
}

namespace {

precision::OptimizerFormats optimizer_formats(const OptimizerConfig& o) {
  if (!o.use_precision_aware_optimizer) return {};
  return {.exp_avg = o.exp_avg_dtype,
          .exp_avg_sq = o.exp_avg_sq_dtype,
          .main_gradients = o.main_grads_dtype,
          .remainders = o.store_param_remainders.value_or(true),
          .master = o.main_params_dtype == DType::f32};
}

ops::Bf16Products products_for(const Config& config) {
  return ops::bf16_products(isa_for(config.kernels));
}

precision::Recipe recipe_of_precision(const Config& config, DeviceType device) {
  const bool cpu = device == DeviceType::cpu;
  const bool upcast = cpu && !ops::multiplies_bf16(products_for(config));
  switch (config.policy.precision) {
    case Precision::automatic:
      return cpu ? precision::float32 : precision::bfloat16;
    case Precision::bfloat16:
      return upcast ? precision::bfloat16_storage : precision::bfloat16;
    case Precision::fastest:
      return upcast ? precision::float32 : precision::bfloat16;
    case Precision::float32:
      return precision::float32;
    case Precision::float16:
      break;
  }
  return cpu ? precision::float16_storage : precision::float16;
}

precision::QuantizedGemms fp8_gemms(const Config& config, int layers) {
  const Fp8Config& c = config.policy.fp8_cfg;
  return precision::fp8_gemms({.recipe = c.fp8_recipe,
                               .hybrid = c.fp8 == Fp8Format::hybrid,
                               .begin = static_cast<int>(c.num_first_layers_in_bf16),
                               .end = layers - static_cast<int>(c.num_last_layers_in_bf16),
                               .amax_history = static_cast<int>(c.fp8_amax_history_len),
                               .most_recent = c.fp8_amax_compute_algo == AmaxAlgorithm::most_recent,
                               .margin = static_cast<int>(c.fp8_margin),
                               .primary = c.fp8_param,
                               .cached = caches_fp8_weights(config),
                               .attention = c.fp8_dot_product_attention});
}

}  // namespace

bool caches_fp8_weights(const Config& config) {
  return config.policy.fp8_cfg.cache_weights.value_or(
      !parallel::sharding_of(config.distributed.shard_strategy).parameters);
}

precision::Recipe recipe_for(const Config& config, DeviceType device, int64_t layers) {
  precision::Recipe recipe =
      recipe_of_precision(config, device).with_optimizer(optimizer_formats(config.policy.optimizer));
  if (config.policy.fp8_cfg.enabled)
    recipe = recipe.with_quantized(fp8_gemms(config, static_cast<int>(layers)));
  const LogitsDType logits = config.policy.logits_dtype;
  // A CPU, whose GEMMs upcast to f32, gains nothing from bf16 logits. Differences of log-probabilities lose
  // more than losses.
  const bool choose_bf16 =
      device == DeviceType::cuda && recipe.activations() == DType::bf16 && !compares_log_probs(config);
  return logits == LogitsDType::bfloat16 || (logits == LogitsDType::automatic && choose_bf16)
             ? recipe.with_bf16_logits()
             : recipe;
}

std::string precision_choice(const Config& config, DeviceType device) {
  const bool fastest = config.policy.precision == Precision::fastest;
  if (device == DeviceType::cpu && config.policy.precision == Precision::float16)
    return "float16, upcast to fp32 for arithmetic: a CPU multiplies none natively";
  if (!fastest && config.policy.precision != Precision::bfloat16) return {};
  if (device == DeviceType::cuda) return fastest ? "fastest: bfloat16 on a GPU" : "";
  const bool native = ops::multiplies_bf16(products_for(config));
  const std::string why = config.kernels.isa.is_auto()
                              ? ops::bf16_reason(ops::cpu_choice())
                              : fmt::format("kernels.isa is {}", name_of(config.kernels.isa.value()));
  if (fastest) return fmt::format("fastest: {}, {}", native ? "bfloat16" : "float32", why);
  return fmt::format("bfloat16, {}: {}", native ? "multiplied natively" : "upcast to fp32 for arithmetic",
                     why);
}

GroupOptions group_options(const Config& config, const GridPosition& position,
                           const precision::Recipe& recipe, std::string_view group) {
  const DistributedConfig& d = config.distributed;
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
  std::optional<int64_t> bucket_elements;
  if (!d.bucket_size_mb.is_auto())
    bucket_elements = static_cast<int64_t>(d.bucket_size_mb.value() * (1 << 20) / 4);
  return {.reduce = reduce,
          .strategy = group_sharding(parallel::sharding_of(d.shard_strategy), group),
          .shards = shards,
          .shard_rank = rank % shards,
          .replicas = replicas,
          .replica = rank / shards,
          .wire = d.grad_reduce_dtype,
          .fp32_sums = d.grad_reduce_fp32_accumulation,
          .error_feedback = d.grad_reduce_error_feedback,
          .overlap_gather = d.overlap_param_gather,
          .bucket_elements = bucket_elements,
          .recipe = recipe,
          .main_gradients = reduced_once(group) ? DType::f32 : recipe.optimizer().main_gradients,
          .first_tp = position.at.tp == 0,
          .offloaded = config.policy.offload_optimizer.value};
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

PlannedRank planned_rank(const RunPlan& p) {
  return {.decoder = *p.decoder,
          .grid = p.position.grid,
          .group_ids = p.group_ids,
          .channels = p.channels,
          .parameters = p.parameters,
          .groups = p.groups,
          .recipe = p.recipe,
          .device = p.device,
          .partials = p.partials,
          .products = p.products,
          .batch = p.tensors->shape()};
}

void add_workspace(RunPlan& plan) {
  size_t bytes = needed_workspace(planned_rank(plan));
  if (plan.layer_sums >= 0 && plan.device == DeviceType::cuda)
    bytes = std::max(bytes, ops::sum_of_squares_workspace(plan.microbatch_tokens() * plan.spec.hidden));
  plan.decoder->add_workspace(plan.memory, bytes);
}

namespace {

using Rules = std::vector<model::RecomputeRule>;

void add_reference(RunPlan& p) {
  constexpr int64_t at_once = int64_t{16} << 20;
  int64_t bytes = 0, largest = 0;
  for (const ParamGroup& g : p.groups) {
    const int64_t of_group = g.trainable ? g.weight_elements() * size_of(g.weight) : 0;
    bytes += of_group;
    largest = std::max(largest, of_group);
  }
  p.reference = p.memory.add("weights of the reference", Category::weights, bytes);
  p.reference_exchange =
      p.memory.add("exchange of the reference", Category::data, std::min(largest, at_once));
}

void add_offload_staging(RunPlan& p, const KernelsConfig& kernels, int threads) {
  for (const ParamGroup& g : p.groups) {
    if (g.offloaded_elements == 0) continue;
    const int64_t elements = std::min(offload_piece, g.offloaded_elements);
    const auto aligned = [&](DType dtype) {
      constexpr int64_t unit = memory::MemoryPlan::alignment;
      return (elements * size_of(dtype) + unit - 1) / unit * unit;
    };
    p.offload_slot_bytes = std::max(p.offload_slot_bytes, aligned(g.main_gradient) + aligned(g.weight));
  }
  if (p.offload_slot_bytes == 0) return;
  p.offload_staging =
      p.memory.add("offload staging buffers", Category::data,
                   offload_slots * p.offload_slot_bytes + ops::StepScalar::count * 8, memory::Tier::pinned);
  p.host_isa = isa_for(kernels);
  p.host_threads = threads;
}

/// The schedules of a pipeline stage.
class StageSchedules {
 public:
  struct Set {
    pipeline::Schedule training;
    std::vector<pipeline::Schedule> fewer;  ///< of packed examples
  };
  StageSchedules(const Config& config, const BatchPlan& batch, int stage)
      : options_(schedule_options(config, stages_of(config.distributed), batch.accumulation)),
        packed_(trains_on_examples(config)),
        stage_(stage) {}

  /// `pools`: stash_pools(), which depend on what is recomputed.
  const Set& with(std::vector<int> pools) {
    const auto [at, added] = sets_.try_emplace(std::move(pools));
    options_.pools = at->first;
    if (added) at->second.training = pipeline::shortest_equivalent(options_, stage_);
    if (added && packed_) at->second.fewer = pipeline::equivalents_of_fewer(options_, stage_);
    return at->second;
  }
  const pipeline::ScheduleOptions& options() const { return options_; }

 private:
  pipeline::ScheduleOptions options_;
  const bool packed_;
  const int stage_;
  std::map<std::vector<int>, Set> sets_;
};

std::unique_ptr<RunPlan> plan_with(const std::optional<Rules>& recompute, const Config& config,
                                   model::ModelSpec spec, const BatchPlan& batch,
                                   const GridPosition& position, DeviceType device, int threads,
                                   const model::LossNeeds& loss, StageSchedules& schedules) {
  auto plan = std::make_unique<RunPlan>();
  RunPlan& p = *plan;
  p.spec = std::move(spec);
  p.layout = model_layout(config, p.spec, position, device);
  p.position = position;
  p.group_ids = needed_groups(config, position, p.spec.tied);
  p.channels = needed_channels(config, position);
  // Rounds of experts keep nothing for weight gradients that are computed later.
  if (schedules.options().kind == pipeline::ScheduleKind::zb_h1) p.spec.moe.row_slack = 0;
  p.parameters = model::make_parameters(p.spec, p.layout);
  p.batch = batch;
  p.sequence_length = config.policy.max_total_sequence_length;
  p.device = device;
  p.offload_directory = config.memory.offload_dir.value_or("");
  p.partials = device == DeviceType::cpu ? threads : ops::gpu_partials;
  if (device == DeviceType::cpu) p.products = products_for(config);
  NRL_CHECK(!p.spec.learned_positions || p.sequence_length <= p.spec.max_positions,
            "the configuration was not checked");
  p.recipe = recipe_for(config, device, p.spec.layers);
  model::keep_in_fp8(p.recipe, p.parameters);
  if (p.recipe.quantizes_any()) {
    const int64_t rows = batch.micro * example_tokens(config) / p.layout.context;
    NRL_CHECK(rows % row_unit(p.recipe.quantized().input.scaling) == 0,
              "a microbatch of {} tokens was not checked against the scales of FP8", rows);
  }
  p.recompute = recompute ? *recompute : configured_recompute(config.policy, p.layout, p.spec.layers);
  p.offload = configured_offload(config.policy, p.spec.layers);
  p.groups = make_param_groups(
      p.parameters,
      [&](const std::string& group) { return group_options(config, position, p.recipe, group); }, p.memory);

  if (keeps_reference(config)) add_reference(p);
  const bool gpu = device == DeviceType::cuda;
  p.scalars = p.memory.add("step scalars", Category::data, ops::StepScalar::count * 8);
  if (gpu)
    p.host_scalars = p.memory.add("step scalars, host copies", Category::data,
                                  max_steps_in_flight * ops::StepScalar::count * 8, memory::Tier::pinned);
  p.evaluation = p.memory.add("evaluation sums", Category::data, ops::StepScalar::max_metrics * 8);
  if (config.logger.layer_stats_period > 0)
    p.layer_sums =
        p.memory.add("layer statistics", Category::data, (p.spec.layers + 2) * layer_sum_kinds * 8);
  if (gpu) add_offload_staging(p, config.kernels, threads);
  add_staging(p);
  const bool packed = trains_on_examples(config);
  p.tensors = std::make_unique<BatchTensors>(
      p.memory, BatchShape{.microbatches = batch.accumulation,
                           .sequences = packed ? 1 : batch.micro,
                           .length = packed ? batch.micro * example_tokens(config) : p.sequence_length,
                           .packed = packed ? p.sequence_length : 0,
                           .positions = packed || config.data.reset_position_ids,
                           .bounds = packed || config.data.reset_attention_mask,
                           .loss_weights = loss.dependence == model::Dependence::batch,
                           .columns = loss.columns,
                           .sequence_values = loss.sequence_values,
                           .staged = gpu,
                           .context = p.layout.context,
                           .context_rank = p.layout.context_rank,
                           .context_kinds = model::context_kinds(p.spec, p.layout),
                           .dropout = p.spec.residual_dropout > 0 || p.spec.embedding_dropout > 0 ||
                                      p.spec.attention_dropout > 0 || p.spec.trained.adapters.dropout > 0,
                           .share = static_cast<float>(batch.micro) /
                                    static_cast<float>(config.policy.train_global_batch_size)});
  // The buffers of sharded parameters are planned for evaluation of one microbatch at a time.
  model::ShardedParameters sharded = sharded_parameters(p.groups);
  sharded.prefetch = config.distributed.overlap_param_gather;
  sharded.overlap_reduce = config.distributed.overlap_grad_reduce;
  const StageSchedules::Set& stage =
      schedules.with(stash_pools(p.spec, p.layout, p.parameters, p.recipe, p.recompute, p.offload));
  const model::DecoderOptions options{
      .tokens = p.microbatch_tokens() / p.layout.context,
      .max_sequence = p.sequence_length,
      .sequences = p.tensors->shape().sequences,
      .recipe = p.recipe,
      .recompute = model::recompute_by_block(p.recompute),
      .offload = model::offload_by_block(p.offload),
      .seed = static_cast<uint64_t>(resolved_loop(config).seed),
      .device = device,
      .fuse_activation = config.policy.fusions.bias_activation.value_or(true),
      .layout = p.layout,
      .training = stage.training,
      .fewer = stage.fewer,
      .evaluated = p.layout.stages > 1 && !sharded.any() ? schedules.options().microbatches : 1,
      .sharded = sharded,
      .loss = loss};
  p.decoder = std::make_unique<model::Decoder>(p.spec, p.parameters, options, p.memory);
  add_workspace(p);
  declare_buckets(p.groups, p.decoder->buckets(), p.memory);
  p.memory.solve();
  return plan;
}

/// The rank of the same pipeline stage that decides for all of them what is recomputed: what one of them
/// communicates again, all must.
GridPosition first_of_stage(const Config& config, const GridPosition& position) {
  parallel::GridPoint at = position.at;
  at.tp = at.cp = at.dp = 0;
  if (at == position.at) return position;
  return grid_position(config, position.ranks(), parallel::RankGrid(position.sizes).rank_at(at));
}

}  // namespace

std::unique_ptr<RunPlan> make_run_plan(const Config& config, const model::ModelSpec& spec,
                                       const BatchPlan& batch, const GridPosition& position,
                                       DeviceType device, int threads,
                                       const std::optional<model::LossNeeds>& given_loss, size_t memory) {
  const model::LossNeeds loss = given_loss ? *given_loss : loss_needs(config);
  StageSchedules schedules(config, batch, position.at.pp);
  const auto make = [&](const GridPosition& at, const std::optional<Rules>& recompute) {
    return plan_with(recompute, config, spec, batch, at, device, threads, loss, schedules);
  };
  const bool gpu = device == DeviceType::cuda;
  if (!recompute_is_open(config.policy)) return make(position, {});
  const double budget = config.memory.max_memory * static_cast<double>(memory);
  const GridPosition decides = first_of_stage(config, position);
  // Norms and activations cost a CPU next to nothing, and its memory is not the run's alone.
  Rules rules = configured_recompute(config.policy, model_layout(config, spec, decides, device), spec.layers,
                                     /*with_open=*/!gpu);
  auto first = make(decides, rules);
  const int64_t need = first->memory.total_bytes();
  const auto fits = [&](const RunPlan& plan) {
    return static_cast<double>(plan.memory.total_bytes()) <= budget;
  };
  const std::string limit = fmt::format("{:.3g} % of the {}'s {}", 100 * config.memory.max_memory,
                                        gpu ? "GPU" : "rank", human_bytes(memory));
  const auto finish = [&](std::unique_ptr<RunPlan> plan, std::string reason) {
    if (!(decides.at == position.at)) plan = make(position, rules);
    plan->recompute_reason = std::move(reason);
    return plan;
  };
  const std::string otherwise = fmt::format(
      "keeping {} takes {}", gpu && !recompute_is_configured(config.policy) ? "everything" : "all else",
      bytes_text(need));
  if (memory == 0) {
    if (!gpu) return finish(std::move(first), "");
    rules = configured_recompute(config.policy, first->layout, spec.layers);
    return finish(make(decides, rules),
                  config.kernels.share_device
                      ? otherwise + ", and ranks may share the GPU"
                      : fmt::format("{}, which a run does on a GPU of at least {}", otherwise,
                                    bytes_text(static_cast<int64_t>(static_cast<double>(need) /
                                                                    config.memory.max_memory))));
  }
  if (fits(*first)) return finish(std::move(first), gpu ? "within " + limit : "");

  // The same rates on all ranks, whatever each of them measures, and in the plan of a run.
  const machine::DeviceModel rates = machine::usual_model(device, first->partials, first->recipe);
  const machine::Fabric fabric(config.cluster, rates, configured_nodes(config, position.ranks()),
                               position.ranks());
  const StepTimes times = forward_step_times(planned_rank(*first), rates, fabric);
  const bool whole = auto_recomputes_layers(config.policy);
  const std::vector<RecomputeChoice> choices =
      recompute_choices(*first->decoder, times, rules, first->offload, whole);
  const Rules base = rules;
  // `of_last`: blocks of the last choice that recompute it.
  const auto set_rules = [&](size_t count, size_t of_last) {
    rules = base;
    for (size_t i = 0; i < count; ++i)
      for (size_t b = 0; b < choices[i].blocks.size(); ++b)
        if (i + 1 < count || b < of_last) rules[choices[i].blocks[b]] = choices[i].rule;
  };
  constexpr size_t all = SIZE_MAX;
  // The fewest choices that fit. Few plans are made: what the others need follows from the stashes in flight.
  const std::vector<model::Decoder::BlockBytes> kept = first->decoder->block_bytes();
  const auto stash_bytes = [&](size_t count, size_t of_last) {
    set_rules(count, of_last);
    const pipeline::Stashes& stashes = schedules
                                           .with(stash_pools(first->spec, first->layout, first->parameters,
                                                             first->recipe, rules, first->offload))
                                           .training.stashes;
    return bytes_in_flight(stashes, first->layout, spec.layers, kept, {choices.data(), count}, of_last);
  };
  const double all_bytes = stash_bytes(0, all);
  double factor = 1;  // of bytes that a plan saves, by those that the stashes save
  double known = static_cast<double>(need), known_bytes = all_bytes;  // of the last plan
  const auto predicted = [&](size_t count, size_t of_last) {
    return known + factor * (stash_bytes(count, of_last) - known_bytes);
  };
  // Predictions are wrong where something else than stashes needs most.
  constexpr double certain = 1.02, trusted = 0.2;
  const auto too_large = [&](size_t count, size_t of_last) {
    return std::abs(factor - 1) < trusted && predicted(count, of_last) > certain * budget;
  };
  const auto try_with = [&](size_t count, size_t of_last) {
    const double bytes = stash_bytes(count, of_last);
    set_rules(count, of_last);
    auto plan = make(decides, rules);
    known = static_cast<double>(plan->memory.total_bytes());
    known_bytes = bytes;
    if (bytes < all_bytes) factor = std::max(1e-9, (static_cast<double>(need) - known) / (all_bytes - bytes));
    return plan;
  };
  // The fewest of [begin, end) that are predicted to fit, or `end`.
  const auto fewest = [&](size_t begin, size_t end, const auto& predict) {
    while (begin < end) {
      const size_t middle = (begin + end) / 2;
      if (predict(middle) <= budget)
        end = middle;
      else
        begin = middle + 1;
    }
    return begin;
  };
  size_t least = choices.empty() ? 0 : 1, most = choices.size();
  int guesses = 4;                // then bisection
  std::unique_ptr<RunPlan> plan;  // with `most` choices, if it is known to fit
  while (least < most) {
    const size_t guess = fewest(least, most, [&](size_t count) { return predicted(count, all); });
    if (guess == most && too_large(most - 1, all)) {
      least = most;
      break;
    }
    const size_t count = guesses-- > 0 ? std::min(guess, most - 1) : (least + most) / 2;
    auto tried = try_with(count, all);
    if (fits(*tried)) {
      most = count;
      plan = std::move(tried);
    } else {
      least = count + 1;
    }
  }
  if (!plan) plan = try_with(least, all);
  // Fewer blocks of the last choice may do, though their chunks then have a pool of their own.
  size_t of_last = least > 0 && fits(*plan) ? choices[least - 1].blocks.size() : all;
  for (size_t too_few = 0; of_last != all && too_few + 1 < of_last;) {
    const size_t guess =
        fewest(too_few + 1, of_last, [&](size_t blocks) { return predicted(least, blocks); });
    if (guess == of_last && too_large(least, of_last - 1)) break;
    const size_t blocks = guesses-- > 0 ? std::min(guess, of_last - 1) : (too_few + of_last) / 2;
    auto tried = try_with(least, blocks);
    if (fits(*tried)) {
      of_last = blocks;
      plan = std::move(tried);
    } else {
      too_few = blocks;
    }
  }
  set_rules(least, of_last);
  double again = 0;
  for (size_t i = 0; i < least; ++i)
    again += choices[i].seconds *
             (i + 1 < least || of_last == all
                  ? 1
                  : static_cast<double>(of_last) / static_cast<double>(choices[i].blocks.size()));
  std::string reason = fmt::format("{}, more than {}", otherwise, limit);
  if (!fits(*plan))
    reason +=
        fmt::format("; so does recomputing {}, with {}", whole ? "everything" : "every part of these layers",
                    bytes_text(plan->memory.total_bytes()));
  reason += fmt::format("; chosen by bytes saved per predicted time: {:.2g} % of a forward pass again",
                        100 * again / forward_seconds(times));
  return finish(std::move(plan), std::move(reason));
}

const model::ParameterList& RunPlan::whole() const {
  if (!whole_) whole_ = std::make_unique<model::ParameterList>(model::make_parameters(spec));
  return *whole_;
}

}  // namespace nrl::plan
