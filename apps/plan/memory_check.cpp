#include "apps/plan/memory_check.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

#include "apps/plan/snapshot.h"
#include "core/base/text.h"
#include "core/ops/optimizer.h"

namespace nrl::plan {

using memory::Category;

namespace {

std::string bytes_text(double bytes) {
  return bytes < 0x1p60 ? human_bytes(static_cast<uint64_t>(bytes)) : fmt::format("{:.1e} bytes", bytes);
}

// The loader's ring of prefetched microbatches: tokens, targets and, if documents are separated,
// positions and bounds.
double prefetch_bytes(const Config& config, const BatchPlan& batch) {
  return static_cast<double>(config.data.prefetch_batches) * static_cast<double>(batch.micro) *
         static_cast<double>(config.policy.max_total_sequence_length) *
         (8 + (config.data.reset_position_ids ? 4 : 0) + (config.data.reset_attention_mask ? 4 : 0));
}

struct Candidate {
  std::string key, value;
  double ratio = 0;    // to a large but common value
  bool number = true;  // that can be lowered
  bool given = false;  // by the user
};

// The keys of the model that the user has written, else the one that names the model.
std::vector<Candidate> model_candidates(const ConfigResult& result, const model::ModelSpec& spec) {
  std::vector<Candidate> out;
  for (const model::ModelSize& size : model::unusual_sizes(spec))
    for (const std::string_view name : {size.key, size.alias})
      if (std::string key = "policy.model." + std::string(name);
          !name.empty() && result.origins.contains(key))
        out.push_back({std::move(key), std::to_string(size.value), size.ratio, true, true});
  if (!out.empty()) return {out.front()};
  const char* const key =
      result.origins.contains("policy.model_name") ? "policy.model_name" : "policy.model.model_type";
  return {{key,
           fmt::format("a {} model of {} parameters", name_of(spec.family),
                       human_count(model::approximate_parameters(spec))),
           0, false, true}};
}

// The keys that determine the size of a category.
std::vector<Candidate> candidates(const ConfigResult& result, const model::ModelSpec& spec,
                                  const BatchPlan& batch, Category category) {
  const PolicyConfig& policy = result.config.policy;
  std::vector<Candidate> out;
  const auto add = [&](std::string key, int64_t value, double usual) {
    const bool given = result.origins.contains(key);
    out.push_back({std::move(key), std::to_string(value), static_cast<double>(value) / usual, true, given});
  };
  const auto global_batch = [&] {
    add("policy.train_global_batch_size", policy.train_global_batch_size, 4096);
  };
  const auto length = [&] {
    add("policy.max_total_sequence_length", policy.max_total_sequence_length, 8192);
  };
  if (category == Category::data) {
    global_batch();
    length();
    add("data.prefetch_batches", result.config.data.prefetch_batches, 64);
    if (result.config.algorithm == Algorithm::distill && generates_rollouts(result.config)) {
      const RolloutConfig& c = result.config.rollout;
      add("distill.topk", result.config.distillation.topk, 1024);
      add("distill.num_prompts_per_step", c.num_prompts_per_step, 512);
      add("distill.num_generations_per_prompt", c.num_generations_per_prompt, 16);
      if (evaluates(result.config) && c.max_val_samples)
        add("distill.max_val_samples", *c.max_val_samples, 512);
    }
    return out;
  }
  out = model_candidates(result, spec);
  if (category == Category::activations || category == Category::workspace) {
    length();
    // If the microbatch is derived from the accumulation, the global batch determines it.
    if (policy.train_micro_batch_size.is_auto() && policy.gradient_accumulation_steps)
      global_batch();
    else
      add("policy.train_micro_batch_size", batch.micro, 64);
  }
  if (const auto& threads = result.config.kernels.num_threads;
      category == Category::workspace && !threads.is_auto())
    add("kernels.num_threads", threads.value(), 128);
  return out;
}

}  // namespace

double total(const CategoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), 0.0);
}

CategoryBytes minimum_memory(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch,
                             DeviceType device) {
  const precision::Recipe recipe = recipe_for(config, device, spec.layers);
  const auto n = [](int64_t x) { return static_cast<double>(x); };
  const double tensor = n(config.distributed.tensor_parallel_size);
  const double stages = n(config.distributed.pipeline_parallel_size);  // at least one has the mean or more
  const double of_experts =
      3 * n(spec.hidden) * n(spec.moe.experts) * n(spec.moe.ffn) * n(spec.expert_layers());
  const double dense = (model::approximate_parameters(spec) - of_experts) / (tensor * stages);
  const double expert_ranks =
      n(config.distributed.expert_parallel_size) * n(config.distributed.expert_tensor_parallel_size);
  const double experts = of_experts / (expert_ranks * stages);
  const double tokens =
      n(batch.micro) * n(example_tokens(config)) / n(config.distributed.context_parallel_size);
  const double element = static_cast<double>(size_of(recipe.activations()));
  const parallel::ShardingStrategy sharding = parallel::sharding_of(config.distributed.shard_strategy);
  const double shards = n(batch.data_parallel) * n(config.distributed.context_parallel_size) /
                        n(config.distributed.dp_replicate_size);
  const double expert_shards = shards * tensor / expert_ranks;
  const auto kept = [&](bool sharded) {
    return sharded ? dense / shards + experts / expert_shards : dense + experts;
  };
  CategoryBytes out{};
  const auto at = [&](Category c) -> double& { return out[static_cast<size_t>(c)]; };
  const double weight = n(size_of(recipe.weights()));
  at(Category::weights) = kept(sharding.parameters) * weight;
  const bool primary = recipe.quantized().primary;
  if (primary)  // layers read one byte, and the optimizer keeps the weights
    at(Category::weights) =
        std::min(at(Category::weights), kept(sharding.parameters) + kept(sharding.optimizer_state) * weight);
  // A lower bound of what is trained: nothing, if a part is frozen.
  const bool trains_all = !spec.trained.adapters && spec.trained.frozen.empty();
  at(Category::gradients) =
      (trains_all ? 1 : 0) * kept(sharding.gradients) *
      n(size_of(sharding.optimizer_state ? recipe.optimizer().main_gradients : recipe.weight_gradients()));
  const precision::OptimizerFormats& formats = recipe.optimizer();
  const int64_t master = !recipe.master_weights()        ? 0
                         : formats.remainders || primary ? size_of(DType::u16)
                                                         : size_of(*recipe.master_weights());
  const auto moment = [&](DType dtype) {
    return n(size_of(dtype)) + (ops::has_moment_scales(dtype) ? 1 / n(ops::moment_block) : 0.0);
  };
  at(Category::optimizer) = (trains_all ? 1 : 0) * (1 - config.policy.offload_optimizer.value) *
                            kept(sharding.optimizer_state) *
                            (moment(formats.exp_avg) + moment(formats.exp_avg_sq) + n(master));
  // Never recomputed but with its layer: q, k and v, in FP8 for attention that has them so. Of layers that
  // are recomputed, one is there, and of the residual stream the inputs of segments.
  const PolicyConfig& policy = config.policy;
  const auto& modules = policy.recompute.modules;
  const bool keeps_mlp = modules.is_auto() || std::find(modules.value().begin(), modules.value().end(),
                                                        BlockModule::mlp) == modules.value().end();
  const bool offloads = policy.offload_activations.value > 0;
  const bool whole = may_recompute_layers(policy) || offloads;
  const double segment =
      n(std::max(policy.checkpoint_every.value_or(1), policy.recompute.num_layers.value_or(1)));
  const double inputs = offloads ? 0 : std::ceil(n(spec.layers) / segment) / stages,
               blocks = whole ? 1 : n(spec.layers) / stages,
               dense_share = n(spec.layers - spec.expert_layers()) / n(spec.layers),
               with_mlp = whole       ? std::floor(dense_share)
                          : keeps_mlp ? blocks * dense_share
                                      : 0;
  const double of_attention = recipe.quantized().attention ? 1 / element : 1;
  at(Category::activations) =
      tokens * element / tensor *
      (inputs * (config.distributed.splits_sequence() ? 1 : tensor) * n(spec.hidden) +
       blocks * of_attention * (n(spec.heads) + 2 * n(spec.kv_heads)) * n(spec.head_dim) +
       with_mlp * n(spec.mlp_in_width()));
  at(Category::data) =
      n(batch.accumulation) * tokens * 8 + (device == DeviceType::cpu ? prefetch_bytes(config, batch) : 0);
  return out;
}

CategoryBytes planned_memory(const Config& config, const RunPlan& plan) {
  CategoryBytes out{};
  for (size_t c = 0; c < out.size(); ++c)
    out[c] = static_cast<double>(plan.memory.bytes(static_cast<Category>(c)));
  if (plan.device == DeviceType::cpu)
    out[static_cast<size_t>(Category::data)] += prefetch_bytes(config, plan.batch);
  if (plan.device == DeviceType::cpu && !config.checkpointing.is_async.is_auto() && wants_snapshot(config))
    out[static_cast<size_t>(Category::optimizer)] += static_cast<double>(snapshot_bytes(config, plan));
  return out;
}

double room_for_snapshot(const Config& config, const RunPlan& plan, double capacity) {
  if (plan.device == DeviceType::cpu) return capacity - total(planned_memory(config, plan));
  return capacity -
         static_cast<double>(plan.memory.bytes(memory::Tier::pinned) + plan.memory.bytes(memory::Tier::host));
}

bool takes_snapshot(const Config& config, const RunPlan& plan, double capacity) {
  if (!wants_snapshot(config)) return false;
  if (!config.checkpointing.is_async.is_auto() || capacity == 0) return true;
  return static_cast<double>(snapshot_bytes(config, plan)) <= room_for_snapshot(config, plan, capacity);
}

std::optional<Diagnostic> memory_shortage(const ConfigResult& result, const model::ModelSpec& spec,
                                          const BatchPlan& batch, const CategoryBytes& need, double capacity,
                                          std::string_view owner) {
  const double sum = total(need);
  if (sum <= capacity) return std::nullopt;
  const auto largest = static_cast<Category>(std::max_element(need.begin(), need.end()) - need.begin());
  std::vector<Candidate> keys = candidates(result, spec, batch, largest);
  // A key that the user has not set is blamed last.
  std::stable_sort(keys.begin(), keys.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.given, a.ratio) > std::pair(b.given, b.ratio);
  });
  std::string categories, lower;
  for (size_t c = 0; c < need.size(); ++c)
    if (need[c] > 0)
      categories += fmt::format("{}{} {}", categories.empty() ? "" : ", ", name_of(static_cast<Category>(c)),
                                bytes_text(need[c]));
  for (const Candidate& k : keys)
    if (k.number) lower += (lower.empty() ? "" : ", ") + fmt::format("{} ({})", k.key, k.value);
  std::vector<std::string> notes{fmt::format("needed per rank: {} = {}; available: {}", categories,
                                             bytes_text(sum), bytes_text(capacity)),
                                 lower.empty() ? "use a smaller model" : "lower " + lower};
  const parallel::ShardingStrategy sharding = parallel::sharding_of(result.config.distributed.shard_strategy);
  const auto suggest = [&](Category category, bool sharded, std::string_view what,
                           std::string_view strategy) {
    if (largest == category && !sharded && batch.data_parallel > 1)
      notes.push_back(
          fmt::format("or shard {} over the ranks: distributed.shard_strategy: {}", what, strategy));
  };
  suggest(Category::optimizer, sharding.optimizer_state, "the optimizer state", "optim");
  suggest(Category::gradients, sharding.gradients, "the gradients", "optim_grads");
  suggest(Category::weights, sharding.parameters, "the parameters", "optim_grads_params");
  Diagnostic d = diagnose(
      result, keys.front().key,
      fmt::format("{}: {} is too large: a rank needs {} of memory, but {} has {} for it", keys.front().key,
                  keys.front().value, bytes_text(sum), owner, bytes_text(capacity)),
      fmt::format("{}: {}", name_of(largest), bytes_text(need[static_cast<size_t>(largest)])),
      std::move(notes));
  d.exit = Exit::out_of_memory;
  return d;
}

std::optional<Diagnostic> share_shortage(const ConfigResult& result, const model::ModelSpec& spec,
                                         const BatchPlan& batch, const CategoryBytes& need, double memory,
                                         std::string_view owner) {
  constexpr std::string_view key = "memory.max_memory";
  const double share = result.config.memory.max_memory;
  const auto shortage = memory_shortage(result, spec, batch, need, share * memory, owner);
  if (!shortage) return std::nullopt;
  Diagnostic d = diagnose(
      result, key,
      fmt::format(
          "{}: {:.3g} leaves a rank {} of the {} that {} has for it, but it needs {} for a microbatch of {} "
          "sequence{}, the least that policy.train_micro_batch_size: auto may take",
          key, share, bytes_text(share * memory), bytes_text(memory), owner, bytes_text(total(need)),
          batch.micro, batch.micro == 1 ? "" : "s"),
      "", {shortage->notes.front(), fmt::format("raise {}, or see nrl-train plan", key)});
  d.exit = shortage->exit;
  return d;
}

void add_changes(Diagnostic& shortage, std::vector<std::string> changes) {
  if (changes.empty()) return;
  shortage.notes.resize(1);
  shortage.notes.insert(shortage.notes.end(), std::make_move_iterator(changes.begin()),
                        std::make_move_iterator(changes.end()));
}

}  // namespace nrl::plan
