#include "apps/plan/run_plan.h"

#include <algorithm>

#include "core/base/text.h"
#include "core/ops/optimizer/optimizer.h"
#include "core/ops/step/step.h"

namespace nrl::plan {

using memory::Category;

namespace {

std::vector<std::string> recompute_rules(const RecomputeConfig& config) {
  if (config.granularity == RecomputeGranularity::none) return {};
  // auto: what costs one pass over memory to make again and frees the most (half of a block's activations).
  if (config.modules.is_auto()) return {"norm", "activation"};
  std::vector<std::string> rules;
  for (RecomputeModule m : config.modules.value()) rules.emplace_back(name_of(m));
  return rules;
}

// What one update covers: ranges that lie behind each other with the same decay together.
std::vector<int64_t> update_chunks(const RunPlan& p) {
  auto owned = p.owned;
  std::sort(owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.flat < b.flat; });
  std::vector<ops::AdamWRange> ranges;
  for (const OwnedRange& r : owned) {
    const int rates = p.parameters.all[static_cast<size_t>(r.parameter)].decay ? 1 : 0;
    if (!ranges.empty()) {
      ops::AdamWRange& last = ranges.back();
      const int64_t gap = r.flat - (last.flat + last.count);
      // The padding between parameters is zero and stays zero.
      if (last.rates == rates && gap < FlatBuckets::kParamAlign &&
          r.state - (last.state + last.count) == gap) {
        last.count += gap + r.count;
        continue;
      }
    }
    ranges.push_back({r.flat, r.state, r.count, rates});
  }
  return ops::adamw_chunks(ranges);
}

}  // namespace

Tensor RunPlan::parameter(const Tensor& flat, size_t i) const {
  const auto& shape = parameters.all[i].shape;
  char* data = static_cast<char*>(flat.data) + layout.place(static_cast<int>(i)).start * size_of(flat.dtype);
  return shape.size() == 1 ? make_tensor(data, flat.dtype, {shape[0]})
                           : make_tensor(data, flat.dtype, {shape[0], shape[1]});
}

precision::Recipe recipe_for(const Config& config, DeviceType device) {
  if (config.policy.precision == Precision::automatic)
    return device == DeviceType::cpu ? precision::float32 : precision::bfloat16;
  return config.policy.precision == Precision::bfloat16 ? precision::bfloat16 : precision::float32;
}

std::unique_ptr<RunPlan> make_run_plan(const Config& config, model::ModelSpec spec, const BatchPlan& batch,
                                       const GridPlace& place, DeviceType device, int threads) {
  auto plan = std::make_unique<RunPlan>();
  RunPlan& p = *plan;
  p.spec = std::move(spec);
  p.parameters = model::make_parameters(p.spec);
  p.batch = batch;
  p.sequence_length = config.policy.max_total_sequence_length;
  p.device = device;
  p.threads = device == DeviceType::cpu ? threads : ops::gpu_partials;
  NRL_CHECK(!p.spec.learned_positions || p.sequence_length <= p.spec.max_positions,
            "the configuration was not checked");
  p.recipe = recipe_for(config, device);
  p.recompute_modules = recompute_rules(config.policy.recompute);
  const ShardingStrategy* sharding = find_sharding(name_of(config.distributed.shard_strategy));
  NRL_CHECK(sharding && !sharding->gradients, "strategy {} passed the validator",
            name_of(config.distributed.shard_strategy));
  p.sharding = *sharding;

  std::vector<ParamSpec> specs;
  for (const model::Parameter& parameter : p.parameters.all)
    specs.push_back({parameter.name, parameter.numel()});
  const auto bucket_elements = static_cast<int64_t>(config.distributed.bucket_size_mb * (1 << 20) / 4);
  p.layout = FlatBuckets(std::move(specs), bucket_elements, static_cast<int>(batch.data_parallel));
  if (p.sharding.optimizer_state) {
    for (const ShardPiece& piece : p.layout.pieces(place.shard_rank()))
      p.owned.push_back(
          {piece.param, piece.in_param.begin, piece.in_param.size(), piece.in_flat, piece.in_shard});
  } else {
    for (int i = 0; i < static_cast<int>(p.parameters.all.size()); ++i) {
      const int64_t start = p.layout.place(i).start;
      p.owned.push_back({i, 0, p.parameters.all[static_cast<size_t>(i)].numel(), start, start});
    }
  }

  const int64_t total = p.layout.total(), state = p.state_elements();
  p.weights = p.memory.add("weights", Category::weights, total * size_of(p.recipe.weights));
  p.gradients = p.memory.add("gradients", Category::gradients, total * 4);
  p.exp_avg = p.memory.add("exp_avg", Category::optimizer, state * 4);
  p.exp_avg_sq = p.memory.add("exp_avg_sq", Category::optimizer, state * 4);
  if (p.recipe.master_weights()) p.master = p.memory.add("master weights", Category::optimizer, state * 4);
  p.scalars = p.memory.add("step scalars", Category::data, ops::StepScalar::count * 8);
  p.evaluation = p.memory.add("evaluation sum", Category::data, 8);
  p.chunk_table = update_chunks(p);
  p.chunks = p.memory.add("update chunks", Category::data, static_cast<int64_t>(p.chunk_table.size()) * 8);
  p.tensors =
      std::make_unique<BatchTensors>(p.memory, BatchShape{.microbatches = batch.accumulation,
                                                          .sequences = batch.micro,
                                                          .length = p.sequence_length,
                                                          .positions = config.data.reset_position_ids,
                                                          .bounds = config.data.reset_attention_mask});
  const model::DecoderOptions options{
      .tokens = batch.micro * p.sequence_length,
      .max_sequence = p.sequence_length,
      .recipe = p.recipe,
      .recompute = model::recompute_modules(p.recompute_modules),
      .threads = p.threads,
      .seed = static_cast<uint64_t>(config.pretrain.seed),
      .device = device,
      .optimizer_workspace = ops::sum_of_squares_workspace(total),
      .training = pipeline::make_schedule({.microbatches = static_cast<int>(batch.accumulation)}, 0)};
  p.decoder = std::make_unique<model::Decoder>(p.spec, p.parameters, options, p.memory);
  p.memory.solve();
  return plan;
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
