// Rules about parallelism and CUDA graphs. Rules that depend on the model are in apps/check/context.cpp and
// apps/plan/pipeline.cpp.
#include <array>

#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

constexpr const char *exchange = "distributed.cp_comm_type",
                     *levels = "distributed.hierarchical_context_parallel_sizes",
                     *leaf = "cluster.fabric.leaf_ranks", *gathered = "distributed.overlap_param_gather",
                     *chunks = "distributed.virtual_pipeline_size", *order = "distributed.pipeline_schedule";

Verdict judge_chunks(const ConfigResult& r) {
  const int64_t ranks = r.config.distributed.context_parallel_size, chunks = 2 * ranks,
                tokens = r.config.policy.max_total_sequence_length;
  if (ranks == 1 || tokens % chunks == 0) return {};
  return {{fmt::format("{} is {}, but {} {} is not a multiple of {}", key::context, ranks, key::length,
                       tokens, chunks),
           {fmt::format("Fix: a length of {}", std::max<int64_t>(1, tokens / chunks) * chunks)},
           "each rank holds two of the equal chunks of a sample"}};
}

Verdict judge_levels_given(const ConfigResult& r) {
  const DistributedConfig& d = r.config.distributed;
  const auto& sizes = d.hierarchical_context_parallel_sizes;
  if (!sizes || (*sizes)[0] * (*sizes)[1] == d.context_parallel_size) return {};
  return {{fmt::format("{}: {} x {} is not {} {}", levels, (*sizes)[0], (*sizes)[1], key::context,
                       d.context_parallel_size)}};
}

Verdict judge_levels_absent(const ConfigResult& r) {
  const DistributedConfig& d = r.config.distributed;
  const int64_t ranks = d.context_parallel_size, inner = ranks % 2 == 0 ? 2 : ranks;
  const auto& types = d.cp_comm_type;
  if (d.hierarchical_context_parallel_sizes || ranks == 1 ||
      std::find(types.begin(), types.end(), CpCommType::a2a_p2p) == types.end())
    return {};
  return {{fmt::format("cp_comm_type a2a+p2p needs {}", levels),
           {fmt::format("the ranks of the all-to-all and of the ring, for example [{}, {}]", inner,
                        ranks / inner)}}};
}

Verdict judge_model_parallel(const ConfigResult& r) {
  const DistributedConfig& d = r.config.distributed;
  const int64_t ranks = d.tensor_parallel_size * d.pipeline_parallel_size;
  if (!d.model_parallel || *d.model_parallel == (ranks > 1)) return {};
  return {
      {fmt::format(
           "distributed.model_parallel: {}, but tensor_parallel_size {} x pipeline_parallel_size {} = {}: {}",
           *d.model_parallel, d.tensor_parallel_size, d.pipeline_parallel_size, ranks,
           ranks > 1 ? "several ranks hold one copy of the model" : "every rank holds the whole model"),
       {fmt::format("tensor_parallel_size is at {}, pipeline_parallel_size at {}", r.where(key::tensor),
                    r.where(key::stages)),
        ranks > 1 ? "Fix: remove it, or set both sizes to 1"
                  : "Fix: remove it, or set one of the sizes above 1"}}};
}

/// Ways to spread the layers: a layout, sizes of stages, or accounts. The names of keys begin with the way.
Verdict judge_split(const ConfigResult& r) {
  const std::string section = "distributed.";
  const std::vector<std::string> keys =
      set_keys(r.config, {section + "pipeline_layout", section + "num_layers_in_first_pipeline_stage",
                          section + "num_layers_in_last_pipeline_stage",
                          section + "account_for_embedding_in_pipeline_split",
                          section + "account_for_loss_in_pipeline_split"});
  const auto way = [&](const std::string& key) { return key.substr(section.size(), 7); };
  Verdict out;
  for (auto key = keys.begin(); key != keys.end(); ++key) {
    const auto other =
        std::find_if(keys.begin(), key, [&](const std::string& before) { return way(before) != way(*key); });
    if (other != key)
      out.push_back({.reason = fmt::format("{} and {} both spread the layers", *other, *key),
                     .remedy = {filled_in(r, fmt::format("{0} is at <@{0}>; use one of them", *other))},
                     .key = *key});
  }
  return out;
}

Verdict judge_leaf(const ConfigResult& r) {
  const ClusterConfig& c = r.config.cluster;
  if (!r.given(leaf) || !c.gpus_per_node || c.gpus_per_node->size() != 1) return {};
  const int64_t node = c.gpus_per_node->front(), domain = node * c.segment_size.value_or(1);
  if (c.fabric.leaf_ranks % domain == 0) return {};
  return {{fmt::format("{} is {}, which cuts {} of {} ranks", leaf, c.fabric.leaf_ranks,
                       c.segment_size.value_or(1) > 1 ? "NVLink domains" : "nodes", domain),
           {fmt::format("Fix: use a multiple of {}", domain)}}};
}

const ConfigRule parallel_table[] = {
    {{leaf, "cluster.gpus_per_node", "cluster.segment_size"}, judge_leaf},
    row({"cluster.fabric.oversubscription", leaf, "cluster.world_size"},
        [](const Config& c) {
          return c.cluster.fabric.oversubscription > 1 && !c.cluster.fabric.rail_optimized &&
                 c.cluster.world_size.value_or(c.cluster.fabric.leaf_ranks + 1) <=
                     c.cluster.fabric.leaf_ranks;
        },
        {"<:cluster.fabric.oversubscription> limits links between leaf switches, but all "
         "<cluster.world_size> ranks are below one",
         {"<=cluster.fabric.leaf_ranks>", "remove it, or set leaf_ranks to the ranks of a leaf switch"}}),
    row({is(gathered, {"true"}), is("distributed.overlap_grad_reduce", {"false"}),
         is(key::sharding, {"ddp", "optim", "optim_grads"})},
        {"distributed.overlap_param_gather: true needs distributed.overlap_grad_reduce: true"}),
    row({is(gathered, {"true"}), is(key::graph, {"true"}),
         is(key::sharding, {"ddp", "optim", "optim_grads"})},
        {"distributed.overlap_param_gather: true lets communication cross the end of a step, where a CUDA "
         "graph ends",
         {"set it to false, or policy.cuda_graph, at <@policy.cuda_graph>, to false"}}),
    row({is("distributed.grad_reduce_dtype", {"fp8"}),
         is(key::sharding, {"optim_grads", "optim_grads_params", "hsdp"})},
        {"distributed.grad_reduce_dtype: fp8 needs distributed.shard_strategy: ddp or optim; "
         "<distributed.shard_strategy> reduces every microbatch, and its errors would be as large as the "
         "gradients that it does not keep",
         {"use bf16, or another strategy"}}),
    row({is(key::sharding, {"hsdp"}), is("distributed.dp_replicate_size", {"1"})},
        {"distributed.shard_strategy: hsdp needs distributed.dp_replicate_size above 1",
         {"one copy of the shards is shard_strategy: optim_grads_params"}}),
    row({is(key::sharding, {"optim_grads_params", "hsdp"}), is(key::graph, {"true"})},
        {"<:distributed.shard_strategy> releases and gathers parameters layer by layer, which the host "
         "checks in every step; a CUDA graph replays a step without the host",
         {"use optim_grads, or set policy.cuda_graph, at <@policy.cuda_graph>, to false"}}),
    not_empty({exchange}, "", {"give one value, or one for each layer"}),
    {{key::context, key::length}, judge_chunks},
    {{levels, key::context, exchange}, judge_levels_given},
    {{exchange, key::context}, judge_levels_absent},
    row({is(key::graph, {"true"}), is_not(key::stages, "1")},
        {"policy.cuda_graph: true with distributed.pipeline_parallel_size above 1 could deadlock: "
         "neighboring stages must send at the same time, and a CUDA graph does not promise that its kernels "
         "run side by side",
         {"use policy.cuda_graph: false, or tensor parallelism instead of stages"}}),
    row({is("algorithm", {"sft"}), is(key::graph, {"true"})},
        {"algorithm: sft varies the rows of a microbatch from step to step, but a CUDA graph launches its "
         "kernels "
         "for a fixed number",
         {"set policy.cuda_graph, at <@policy.cuda_graph>, to false"}}),
    row({is("data.reset_attention_mask", {"true"}), is(key::graph, {"true"})},
        {"data.reset_attention_mask: true varies the number of sequences from step to step, but a CUDA graph "
         "launches attention for a fixed number",
         {"set it to false, or policy.cuda_graph, at <@policy.cuda_graph>, to false"}}),
    row({is("distributed.tp_comm_overlap", {"ring"}), is(key::sequence, {"false"}), is_not(key::tensor, "1")},
        {"distributed.tp_comm_overlap: ring passes the rows of ranks on, but without sequence parallelism "
         "every rank has all rows",
         {"set distributed.sequence_parallel to true, or use pipelined"}}),
    {{"distributed.model_parallel", key::tensor, key::stages}, judge_model_parallel},
    row({is(order, {"interleaved"}), is(chunks, {"null", "1"}), is_not(key::stages, "1")},
        {"distributed.pipeline_schedule: interleaved needs several chunks per stage",
         {"distributed.virtual_pipeline_size is 1 (<@distributed.virtual_pipeline_size>)",
          "use 1f1b, or set virtual_pipeline_size above 1"}}),
    row({is(order, {"1f1b", "zb_h1"}), is_not(chunks, "null"), is_not(chunks, "1"), is_not(key::stages, "1")},
        {"<:distributed.pipeline_schedule> runs one chunk per stage",
         {"<=distributed.virtual_pipeline_size>", "use interleaved, or set virtual_pipeline_size to 1"}}),
    row({"distributed.microbatch_group_size_per_vp_stage", key::stages, chunks},
        [](const Config& c) {
          const int64_t stages = c.distributed.pipeline_parallel_size;
          return c.distributed.microbatch_group_size_per_vp_stage.value_or(stages) < stages;
        },
        {"<:distributed.microbatch_group_size_per_vp_stage> is less than the pipeline stages",
         {"<=distributed.pipeline_parallel_size>",
          "set it to <distributed.pipeline_parallel_size> or more"}}),
    {{key::stages, chunks}, judge_split},
};

}  // namespace

std::span<const ConfigRule> parallel_rules() {
  return parallel_table;
}

}  // namespace nrl::config_detail
