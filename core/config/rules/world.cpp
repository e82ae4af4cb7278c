// Rules about the number of ranks: the section `cluster`, the process grid, and the batch.
#include <numeric>

#include "core/config/rules/tables.h"

namespace nrl {
namespace config_detail {
namespace {

struct World {
  const ConfigResult& result;
  int64_t ranks;
  std::span<const ClusterNode> nodes;  ///< in the launcher's order; empty: unknown
  RankCount count;

  const Config& config() const { return result.config; }
  const DistributedConfig& distributed() const { return result.config.distributed; }
  /// Ranks of one copy of the model, and copies.
  int64_t model_ranks() const { return distributed().model_ranks(); }
  int64_t replicas() const { return ranks / model_ranks(); }
  bool fits() const { return ranks % model_ranks() == 0; }
};
using WorldRule = Rule<World>;

/// "1, 2, 4" : divisors of n, at most `count` of them, nearest to `near`.
std::string divisors_near(int64_t n, int64_t near, size_t count = 6) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    all.push_back(d);
    if (d * d != n) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end(),
            [&](int64_t a, int64_t b) { return std::abs(a - near) < std::abs(b - near); });
  if (all.size() > count) all.resize(count);
  std::sort(all.begin(), all.end());
  return fmt::format("{}", fmt::join(all, ", "));
}

std::string ranks_text(int64_t ranks) {
  return fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
}

/// How to get `ranks` ranks.
std::string with_ranks(int64_t ranks, RankCount count) {
  return fmt::format("{} {}", count == RankCount::planned ? "plan with --world" : "start it with mpirun -n",
                     ranks);
}

Verdict judge_world_size(const World& w) {
  const auto& wanted = w.config().cluster.world_size;
  if (!wanted || *wanted == w.ranks) return {};
  const std::string is = w.count == RankCount::planned ? "the plan is for " + ranks_text(w.ranks)
                                                       : fmt::format("{} {} started", ranks_text(w.ranks),
                                                                     w.ranks == 1 ? "was" : "were");
  return {{fmt::format("cluster.world_size is {}, but {}", *wanted, is), {with_ranks(*wanted, w.count)}}};
}

Verdict judge_num_nodes(const World& w) {
  const auto& wanted = w.config().cluster.num_nodes;
  if (!wanted || w.nodes.empty() || *wanted == std::ssize(w.nodes)) return {};
  return {{fmt::format("cluster.num_nodes is {}, but the ranks run on {}", *wanted, w.nodes.size())}};
}

Verdict judge_gpus_per_node(const World& w) {
  const auto& list = w.config().cluster.gpus_per_node;
  if (!list) return {};
  if (list->empty())
    return {{"cluster.gpus_per_node is an empty list", {"give one number per node, or remove it"}}};
  const bool each = list->size() == 1;
  if (w.nodes.empty()) {
    const int64_t nodes = w.config().cluster.num_nodes.value_or(w.ranks / list->front());
    const int64_t sum =
        each ? nodes * list->front() : std::accumulate(list->begin(), list->end(), int64_t{0});
    if (sum == w.ranks) return {};
    return {{fmt::format("cluster.gpus_per_node: {} of {} ranks do not make {}",
                         each ? fmt::format("{} node{}", nodes, nodes == 1 ? "" : "s") : "nodes",
                         fmt::join(*list, ", "), ranks_text(w.ranks))}};
  }
  if (!each && list->size() != w.nodes.size())
    return {{fmt::format("cluster.gpus_per_node lists {} nodes, but the ranks run on {}", list->size(),
                         w.nodes.size())}};
  for (size_t n = 0; n < w.nodes.size(); ++n) {
    const int64_t wanted = (*list)[each ? 0 : n];
    if (w.nodes[n].ranks == wanted) continue;
    return {{fmt::format("cluster.gpus_per_node is {} for node {} ({}), which has {}", wanted, n,
                         w.nodes[n].name, ranks_text(w.nodes[n].ranks)),
             {each ? fmt::format("start it with mpirun --map-by ppr:{}:node", wanted)
                   : "list the hosts with these numbers of slots in mpirun's --hostfile"}}};
  }
  return {};
}

Verdict judge_segment_size(const World& w) {
  const auto& size = w.config().cluster.segment_size;
  const int64_t nodes = std::ssize(w.nodes);
  if (!size || nodes % *size == 0) return {};
  return {{fmt::format("cluster.segment_size is {}, but {} node{} not a multiple of it", *size, nodes,
                       nodes == 1 ? " is" : "s are")}};
}

Verdict judge_grid(const World& w) {
  const DistributedConfig& d = w.distributed();
  const int64_t model = w.model_ranks(), fitting = w.ranks / model * model;
  if (w.fits()) return {};
  return {{.reason = fmt::format("{} ranks do not fit the grid: tensor {} x pipeline {} x context {} = {}, "
                                 "and {} is not a multiple of {}",
                                 w.ranks, d.tensor_parallel_size, d.pipeline_parallel_size,
                                 d.context_parallel_size, model, w.ranks, model),
           .remedy = {fitting == 0 ? with_ranks(model, w.count)
                                   : fmt::format("{} or {}", with_ranks(fitting, w.count), fitting + model)},
           .key = w.result.given(key::stages) ? key::stages : key::tensor}};
}

Verdict judge_data_parallel(const World& w) {
  const DistributedConfig& d = w.distributed();
  if (d.data_parallel_size.value_or(w.replicas()) == w.replicas()) return {};
  return {{fmt::format("data_parallel_size is {}, but {} / (tensor {} x pipeline {} x context {}) = {}",
                       d.data_parallel_size.value(), ranks_text(w.ranks), d.tensor_parallel_size,
                       d.pipeline_parallel_size, d.context_parallel_size, w.replicas()),
           {fmt::format("remove it (auto), or {}",
                        with_ranks(d.data_parallel_size.value() * w.model_ranks(), w.count))}}};
}

Verdict judge_copies(const World& w) {
  const int64_t copies = w.distributed().dp_replicate_size, dp = w.replicas();
  if (copies == 1 || (dp % copies == 0 && copies < dp)) return {};
  return {{fmt::format("distributed.dp_replicate_size: {} does not divide {} data-parallel rank{} into "
                       "slices of 2 or more",
                       copies, dp, dp == 1 ? "" : "s"),
           {fmt::format("divisors of {}: {}", dp, divisors_near(dp, copies))}}};
}

// Experts are divided over the ranks of a pipeline stage.
Verdict judge_experts(const World& w) {
  const DistributedConfig& d = w.distributed();
  const int64_t stage = w.ranks / d.pipeline_parallel_size;
  const int64_t group = d.expert_parallel_size * d.expert_tensor_parallel_size;
  if (stage % group == 0) return {};
  return {
      {.reason = fmt::format("expert_parallel_size {} x expert_tensor_parallel_size {} = {} does not divide "
                             "the {} of tensor, context and data parallelism",
                             d.expert_parallel_size, d.expert_tensor_parallel_size, group, ranks_text(stage)),
       .remedy = {fmt::format("divisors of {}: {}", stage, divisors_near(stage, group))},
       .key = d.expert_parallel_size > 1 ? "distributed.expert_parallel_size"
                                         : "distributed.expert_tensor_parallel_size"}};
}

Verdict judge_sequence(const World& w) {
  const DistributedConfig& d = w.distributed();
  const int64_t ranks = d.tensor_parallel_size, length = w.config().policy.max_total_sequence_length,
                part = length / d.context_parallel_size;
  if (!d.splits_sequence()) return {};
  const int64_t micro = resolve_batch(w.config(), static_cast<int>(w.ranks)).micro;
  if (part * micro % ranks == 0) return {};
  return {{fmt::format("a microbatch has {} x {} = {} tokens, which {} tensor-parallel ranks cannot divide "
                       "evenly (distributed.sequence_parallel)",
                       micro, part, part * micro, ranks),
           {fmt::format("fits: max_total_sequence_length {} or {}",
                        std::max(length / ranks, int64_t{1}) * ranks, (length / ranks + 1) * ranks),
            fmt::format("or train_micro_batch_size a multiple of {}", ranks / std::gcd(ranks, length)),
            "or distributed.sequence_parallel: false"}}};
}

/// The keys, and the sizes of the grid.
std::vector<std::string> grid_and(std::vector<std::string> keys) {
  keys.insert(keys.end(), {key::tensor, key::stages, key::context});
  return keys;
}
std::vector<std::string> replicas_and(std::vector<std::string> keys) {
  keys.emplace_back("distributed.data_parallel_size");
  return grid_and(std::move(keys));
}

const WorldRule cluster_table[] = {
    {{"cluster.world_size"}, judge_world_size},
    {{"cluster.num_nodes"}, judge_num_nodes},
    {{"cluster.gpus_per_node", "cluster.num_nodes"}, judge_gpus_per_node},
    {{"cluster.segment_size"}, judge_segment_size},
};
const WorldRule grid_table[] = {{grid_and({}), judge_grid}};
const WorldRule replica_table[] = {{replicas_and({}), judge_data_parallel}};
const WorldRule batch_table[] = {
    {replicas_and({"distributed.dp_replicate_size"}), judge_copies},
    {replicas_and({"distributed.expert_parallel_size", "distributed.expert_tensor_parallel_size"}),
     judge_experts},
    {replicas_and({"policy.train_micro_batch_size", "policy.gradient_accumulation_steps"}),
     [](const World& w) { return judge_batch(w.config(), w.replicas()); }},
};
const WorldRule sequence_table[] = {
    {replicas_and(
         {key::length, key::sequence, "policy.train_micro_batch_size", "policy.train_global_batch_size"}),
     judge_sequence}};

}  // namespace

Verdict judge_batch(const Config& config, std::optional<int64_t> replicas) {
  constexpr const char* key = "policy.train_global_batch_size";
  const int64_t global = config.policy.train_global_batch_size, dp = replicas.value_or(1);
  AutoOr<int64_t> micro = config.policy.train_micro_batch_size;
  if (const auto packed = packed_micro_batch(config)) micro = *packed;
  const auto& steps = config.policy.gradient_accumulation_steps;
  const int64_t factor = micro.value_or(1);
  int64_t slice = 0, product = 0;
  if (__builtin_mul_overflow(factor, dp, &slice) ||
      __builtin_mul_overflow(slice, steps.value_or(1), &product))
    return {{"microbatch x data parallel x accumulation is too large"}};
  if (steps && !micro.is_auto() && replicas) {
    if (product == global) return {};
    return {{.reason = fmt::format(
                 "train_global_batch_size {} is not micro {} x data parallel {} x accumulation {} = {}",
                 global, factor, dp, *steps, product),
             .remedy = {fmt::format("fits: train_global_batch_size {}", product),
                        "or remove gradient_accumulation_steps"},
             .key = key}};
  }
  if (global % product == 0) return {};
  std::vector<std::string> factors;
  if (!micro.is_auto()) factors.push_back(fmt::format("micro {}", factor));
  if (replicas) factors.push_back(fmt::format("data parallel {}", dp));
  if (steps) factors.push_back(fmt::format("accumulation {}", *steps));
  const int64_t below = global / product * product;
  std::vector<std::string> fits{fmt::format("fits: train_global_batch_size {}{}",
                                            below > 0 ? fmt::format("{} or ", below) : "", below + product)};
  if (global % dp == 0 && !micro.is_auto() && !steps)
    fits.push_back(fmt::format("or train_micro_batch_size {}", divisors_near(global / dp, factor)));
  return {{.reason = fmt::format("train_global_batch_size {} is not a multiple of {} = {}", global,
                                 fmt::join(factors, " x "), product),
           .remedy = std::move(fits),
           .key = key}};
}

}  // namespace config_detail

Diagnostics validate_for_world(const ConfigResult& result, int world_size, std::span<const ClusterNode> nodes,
                               RankCount count) {
  using namespace config_detail;
  const World world{result, world_size, nodes, count};
  Diagnostics out = judge(cluster_table, world);
  // Host-staged communication is only between several ranks.
  if (world_size > 1 && world.fits() && result.config.distributed.backend == CommBackend::staged &&
      result.sound({"distributed.backend", key::tensor, key::stages, key::context}))
    out += validate_staged(
        {result,
         {.gpu = true,
          .why = filled_in(result, "distributed.backend: staged is at <@distributed.backend>")}});
  out += judge_levels({grid_table, replica_table, batch_table}, world);
  return out.empty() ? judge(sequence_table, world) : out;
}

}  // namespace nrl
