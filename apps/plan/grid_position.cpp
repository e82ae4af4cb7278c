#include "apps/plan/grid_position.h"

#include <algorithm>
#include <utility>

#include "apps/model/attention_core/context_parallel.h"
#include "apps/model/spec/parameters.h"
#include "apps/model/spec/rank_groups.h"
#include "apps/plan/loss.h"
#include "apps/plan/pipeline.h"
#include "core/base/error.h"
#include "parallel/pipeline/messages.h"

namespace nrl::plan {

parallel::GridSizes grid_sizes(const Config& config) {
  const DistributedConfig& d = config.distributed;
  return {.tp = static_cast<int>(d.tensor_parallel_size),
          .cp = static_cast<int>(d.context_parallel_size),
          .pp = static_cast<int>(d.pipeline_parallel_size),
          .ep = static_cast<int>(d.expert_parallel_size),
          .etp = static_cast<int>(d.expert_tensor_parallel_size)};
}

GridPosition grid_position(const Config& config, int world, int rank) {
  parallel::ProcessGrid grid(grid_sizes(config), world, rank);
  return {grid.dense().sizes(), grid.dense_point(), std::move(grid)};
}

namespace {

/// How context-parallel ranks exchange tokens for the attention of each block; empty on one rank.
std::vector<parallel::ContextExchange> context_exchanges(const DistributedConfig& d, int64_t layers) {
  std::vector<parallel::ContextExchange> out;
  if (d.context_parallel_size == 1) return out;
  const auto size = static_cast<int>(d.context_parallel_size);
  const auto& sizes = d.hierarchical_context_parallel_sizes;
  const int inner = sizes ? static_cast<int>((*sizes)[0]) : 1;
  const std::vector<CpCommType>& types = d.cp_comm_type;
  NRL_CHECK(types.size() == 1 || types.size() == static_cast<size_t>(layers),
            "the configuration was not checked");
  for (size_t l = 0; l < static_cast<size_t>(layers); ++l)
    out.push_back(parallel::context_exchange(types[types.size() == 1 ? 0 : l], size, inner));
  return out;
}

}  // namespace

TpCommOverlap tp_comm_overlap(const Config& config, DeviceType device) {
  return config.distributed.tp_comm_overlap.value_or(device == DeviceType::cuda ? TpCommOverlap::bulk
                                                                                : TpCommOverlap::none);
}

model::ModelLayout model_layout(const Config& config, const model::ModelSpec& spec,
                                const GridPosition& position, DeviceType device) {
  const model::ModelLayout stages = stages_of(config.distributed);
  const parallel::GridPoint expert = position.grid.expert().coordinates(position.grid.rank());
  return {.tensor = position.sizes.tp,
          .tensor_rank = position.at.tp,
          .sequence_parallel = config.distributed.splits_sequence(),
          .overlap = {.method = tp_comm_overlap(config, device),
                      .splits = config.distributed.tp_comm_overlap_splits.value_or(4)},
          .context = position.sizes.cp,
          .context_rank = position.at.cp,
          .exchanges = context_exchanges(config.distributed, spec.layers),
          .expert = position.grid.expert().sizes().ep,
          .expert_rank = expert.ep,
          .expert_tensor = position.grid.expert().sizes().tp,
          .expert_tensor_rank = expert.tp,
          .stages = position.sizes.pp,
          .stage = position.at.pp,
          .chunks = stages.chunks,
          .split = stages.split};
}

parallel::GroupId reduction_group(std::string_view group) {
  if (group == model::group_name::tensor_partial) return parallel::group::tp_dp_cp;
  if (group == model::group_name::tied) return parallel::group::tied;
  if (group == model::group_name::expert || group == model::group_name::frozen_expert)
    return parallel::group::edp;
  return parallel::group::dp_cp;
}

bool reduced_once(std::string_view group) {
  return group == model::group_name::tied || group == model::group_name::tensor_partial ||
         group == model::group_name::router_bias;
}

parallel::ShardingStrategy group_sharding(const parallel::ShardingStrategy& strategy,
                                          std::string_view group) {
  if (group == model::group_name::router_bias) return parallel::sharding::ddp;
  return reduced_once(group) && (strategy.gradients || strategy.parameters) ? parallel::sharding::optim
                                                                            : strategy;
}

std::vector<parallel::GroupId> needed_groups(const Config& config, const GridPosition& position, bool tied) {
  namespace group = parallel::group;
  const parallel::GridSizes sizes = grid_sizes(config);
  // Groups of the same ranks share a communicator.
  std::vector<parallel::GroupId> out{group::all};
  std::vector<std::string_view> names{model::group_name::dense, model::group_name::expert};
  if (sizes.tp > 1) names.push_back(model::group_name::tensor_partial);
  if (sizes.pp > 1 && tied) names.push_back(model::group_name::tied);
  // Gradients are summed over these, or in slices of them and across the slices.
  const DistributedConfig& d = config.distributed;
  const auto replicas = static_cast<int>(d.dp_replicate_size);
  const parallel::ShardingStrategy strategy = parallel::sharding_of(d.shard_strategy);
  for (const std::string_view name : names) {
    const parallel::GroupId reduce = reduction_group(name);
    parallel::GroupId shards = reduce;
    if (replicas > 1) {
      const int slice = position.grid.group_size(reduce) / replicas;
      shards = reduce.inside(slice);
      out.push_back(reduce.across_slices(slice));
    }
    out.push_back(shards);
    if (d.overlap_param_gather && group_sharding(strategy, name).parameters) out.push_back(shards.on_lane(1));
  }
  if (replicas > 1) out.push_back(model::batch_ranks(sizes.tp));  // of routers; else among the above
  if (sizes.tp > 1) out.push_back(group::tp);
  if (sizes.cp > 1) {
    out.push_back(model::microbatch_ranks(sizes.tp, sizes.cp));  // of routers
    if (loss_needs(config).sequence_values > 0) out.push_back(model::segment_ranks);
    // All types that a layer may have.
    const auto types = static_cast<int64_t>(d.cp_comm_type.size());
    const auto used = model::context_groups(context_exchanges(d, types), sizes.cp);
    out.insert(out.end(), used.begin(), used.end());
  }
  if (sizes.ep * sizes.etp > 1) out.push_back(model::expert_exchange_group);
  if (sizes.etp > 1) out.push_back(model::expert_parts_group);
  if (sizes.pp > 1) out.push_back(group::pp);
  return out;
}

std::vector<parallel::GroupChannels> needed_channels(const Config& config, const GridPosition& position) {
  if (position.sizes.pp == 1) return {};
  return {{parallel::group::pp, pipeline::StageMessages::channel_ends(position.sizes.pp, position.at.pp,
                                                                      stages_of(config.distributed).chunks)}};
}

std::string grid_line(const parallel::GridPoint& sizes, std::string_view strategy,
                      const parallel::GridPoint& experts) {
  const int ranks = parallel::RankGrid(sizes).ranks();
  if (ranks == 1) return "1 rank";
  std::string axes;
  for (const auto& [name, size] : {std::pair("tp", sizes.tp), std::pair("cp", sizes.cp),
                                   std::pair("dp", sizes.dp), std::pair("pp", sizes.pp)})
    if (size > 1) axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", name, size);
  std::string over;
  for (const auto& [name, size] : {std::pair("etp", experts.tp), std::pair("ep", experts.ep)})
    if (size > 1) over += fmt::format("{}{} {}", over.empty() ? ", " : " x ", name, size);
  return fmt::format("{} ranks = {}{}  {}", ranks, axes, over, strategy);
}

std::string grid_line(const GridPosition& position, std::string_view strategy) {
  return grid_line(position.sizes, strategy, position.grid.expert().sizes());
}

std::vector<int> typical_ranks(const Config& config, int world) {
  const auto stages = static_cast<int>(config.distributed.pipeline_parallel_size);
  std::vector<int> ranks{0};
  for (const int stage : {1, stages - 1}) {
    const int first = world / stages * stage;  // stages are the slowest axis
    if (stage < stages && first > ranks.back()) ranks.push_back(first);
  }
  return ranks;
}

}  // namespace nrl::plan
