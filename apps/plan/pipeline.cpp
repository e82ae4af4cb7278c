#include "apps/plan/pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel/pipeline/simulate.h"

namespace nrl::plan {

using pipeline::ScheduleKind;

namespace {

std::vector<pipeline::Schedule> all_stages(const pipeline::ScheduleOptions& options) {
  std::vector<pipeline::Schedule> stages;
  for (int stage = 0; stage < options.stages; ++stage) stages.push_back(make_schedule(options, stage));
  return stages;
}

std::string range_text(const model::BlockRange& blocks) {
  if (blocks.begin == blocks.end) return "none";
  return blocks.end - blocks.begin == 1 ? std::to_string(blocks.begin)
                                        : fmt::format("{}-{}", blocks.begin, blocks.end - 1);
}

}  // namespace

model::ModelLayout stages_of(const DistributedConfig& d) {
  return {.stages = static_cast<int>(d.pipeline_parallel_size),
          .chunks = static_cast<int>(d.virtual_pipeline_size.value_or(1)),
          .split = {.chunks = d.pipeline_layout.value_or(std::vector<int64_t>{}),
                    .first = d.num_layers_in_first_pipeline_stage,
                    .last = d.num_layers_in_last_pipeline_stage,
                    .embedding = d.account_for_embedding_in_pipeline_split,
                    .head = d.account_for_loss_in_pipeline_split}};
}

pipeline::ScheduleOptions schedule_options(const Config& config, const model::ModelLayout& layout,
                                           int64_t microbatches) {
  const ScheduleKind automatic = layout.chunks > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b;
  return {.kind = layout.stages == 1 ? ScheduleKind::single
                                     : config.distributed.pipeline_schedule.value_or(automatic),
          .stages = layout.stages,
          .chunks_per_stage = layout.chunks,
          .microbatches = static_cast<int>(microbatches),
          .group = static_cast<int>(config.distributed.microbatch_group_size_per_vp_stage.value_or(0)),
          .overlap_messages = config.distributed.overlap_p2p_comm};
}

namespace {

/// All that the slots of a block and their policies depend on.
struct BlockKind {
  bool experts = false;
  model::RecomputeRule recompute;
  model::OffloadRule offload;
  std::vector<precision::Format> formats = {};
  std::vector<bool> trains = {};
  bool operator==(const BlockKind&) const = default;
};

}  // namespace

std::vector<int> stash_pools(const model::ModelSpec& spec, const model::ModelLayout& layout,
                             const model::ParameterList& parameters, const precision::Recipe& recipe,
                             std::span<const model::RecomputeRule> recompute,
                             std::span<const model::OffloadRule> offload) {
  const auto kind = [&](int block) {
    const auto b = static_cast<size_t>(block);
    BlockKind out{.experts = spec.has_experts(block), .recompute = recompute[b], .offload = offload[b]};
    for (int gemm = 0; gemm < static_cast<int>(precision::Gemm::lm_head); ++gemm)
      for (const precision::Role role : precision::all_roles)
        out.formats.push_back(recipe.of(block, static_cast<precision::Gemm>(gemm), role));
    for (const int parameter : parameters.layers[b].all())
      out.trains.push_back(parameters.all[static_cast<size_t>(parameter)].trainable);
    return out;
  };
  std::vector<std::vector<BlockKind>> kinds;  // by pool
  std::vector<int> pools;
  for (int c = 0; c < layout.chunks; ++c) {
    const model::BlockRange blocks = chunk_blocks(layout, spec.layers, layout.model_chunk(c));
    std::vector<BlockKind> own;
    for (int b = blocks.begin; b < blocks.end; ++b) own.push_back(kind(b));
    const auto equal = std::find(kinds.begin(), kinds.end(), own);
    pools.push_back(static_cast<int>(equal - kinds.begin()));
    if (equal == kinds.end()) kinds.push_back(std::move(own));
  }
  return pools;
}

double bubble(const pipeline::ScheduleOptions& options) {
  const pipeline::Simulation simulation = simulate(all_stages(options), pipeline::Costs{{}});
  NRL_CHECK(simulation.deadlock.empty(), "{}", simulation.deadlock);
  return *std::max_element(simulation.bubble.begin(), simulation.bubble.end());
}

Diagnostics check_pipeline(const ConfigResult& result, int64_t layers) {
  const Config& config = result.config;
  const model::ModelLayout layout = stages_of(config.distributed);
  const std::string problem = split_problem(layout, layers);
  if (problem.empty() || layout.model_chunks() == 1) return {};
  const DistributedConfig& d = config.distributed;
  const std::string key =
      "distributed." + std::string(d.pipeline_layout ? "pipeline_layout"
                                   : d.num_layers_in_first_pipeline_stage
                                       ? "num_layers_in_first_pipeline_stage"
                                   : d.num_layers_in_last_pipeline_stage ? "num_layers_in_last_pipeline_stage"
                                   : layout.chunks > 1                   ? "virtual_pipeline_size"
                                                                         : "pipeline_parallel_size");
  if (!result.sound(key)) return {};
  return {diagnose(
      result, key,
      fmt::format("{} does not fit the {} layers of the model in {} stage{} of {} chunk{}: {}", key, layers,
                  layout.stages, layout.stages == 1 ? "" : "s", layout.chunks, layout.chunks == 1 ? "" : "s",
                  problem),
      "",
      {d.pipeline_layout ? fmt::format("give {} numbers whose sum is {}", layout.model_chunks(), layers)
                         : "every chunk needs a layer; only the first and the last may have none: use fewer "
                           "stages or chunks, or other numbers of layers"})};
}

std::string pipeline_line(const Config& config, int64_t layers, int64_t microbatches) {
  model::ModelLayout layout = stages_of(config.distributed);
  if (layout.stages == 1) return "";
  std::string stages;
  for (layout.stage = 0; layout.stage < layout.stages; ++layout.stage) {
    stages += layout.stage > 0 ? " | " : "";
    for (int c = 0; c < layout.chunks; ++c)
      stages += (c > 0 ? ", " : "") + range_text(chunk_blocks(layout, layers, layout.model_chunk(c)));
  }
  const pipeline::ScheduleOptions options = schedule_options(config, layout, microbatches);
  return fmt::format("{} of {} microbatches, bubble {:.1f} % with equal stages; layers {}",
                     name_of(options.kind), microbatches, 100 * bubble(options), stages);
}

}  // namespace nrl::plan
