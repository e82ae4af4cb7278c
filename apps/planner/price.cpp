#include "apps/planner/price.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/machine/collective_time.h"
#include "apps/model/spec/layout.h"
#include "core/config/load.h"

namespace nrl::planner {
namespace {

/// Layers of the same kind have the same calls and buffers.
using LayerSignature = std::tuple<int64_t, size_t, bool>;  // window, RoPE, experts

LayerSignature signature(const model::ModelSpec& spec, int64_t layer) {
  const model::LayerKind kind =
      spec.layer_kinds.empty() ? model::LayerKind{} : spec.layer_kinds[static_cast<size_t>(layer)];
  return {kind.window, kind.rope, spec.has_experts(layer)};
}

/// The model that has only these layers.
model::ModelSpec with_layers(const model::ModelSpec& spec, const std::vector<int64_t>& layers) {
  model::ModelSpec out = spec;
  out.layers = std::ssize(layers);
  out.layer_kinds.clear();
  out.moe.dense.clear();
  for (const int64_t layer : layers) {
    if (!spec.layer_kinds.empty()) out.layer_kinds.push_back(spec.layer_kinds[static_cast<size_t>(layer)]);
    if (!spec.moe.dense.empty()) out.moe.dense.push_back(spec.moe.dense[static_cast<size_t>(layer)]);
  }
  return out;
}

/// The ranks in front, on their nodes.
std::vector<ClusterNode> first_ranks(const std::vector<ClusterNode>& nodes, int ranks) {
  std::vector<ClusterNode> out;
  for (const ClusterNode& node : nodes) {
    if (ranks <= 0) break;
    out.push_back(node);
    out.back().ranks = std::min(node.ranks, ranks);
    ranks -= node.ranks;
  }
  return out;
}

/// Backward passes take about twice as long as forward passes.
constexpr double backward_share = 2.0 / 3;

double exposed(double seconds, double work, double pieces) {
  return std::max(seconds - work, seconds / std::max(pieces, 1.0));
}

}  // namespace

Pricer::Part& Pricer::Part::operator+=(const Part& o) {
  seconds += o.seconds;
  activations += o.activations;
  weights += o.weights;
  gradients += o.gradients;
  optimizer += o.optimizer;
  parameters += o.parameters;
  experts += o.experts;
  return *this;
}

Pricer::Part Pricer::Part::operator*(double f) const {
  return {.seconds = f * seconds,
          .activations = f * activations,
          .weights = f * weights,
          .gradients = f * gradients,
          .optimizer = f * optimizer,
          .parameters = f * parameters,
          .experts = f * experts};
}

Pricer::Pricer(const Config& given, const model::ModelSpec& spec, int world,
               const std::vector<ClusterNode>& nodes, const predict::ModeledDevice& device, double capacity,
               double expert_load, Load load)
    : given_(given),
      spec_(spec),
      world_(world),
      nodes_(nodes),
      device_(device),
      capacity_(capacity),
      expert_load_(expert_load),
      load_(std::move(load)),
      fabric_(given.cluster, device.model(), nodes, world) {}

Pricer::Part Pricer::measure(const Config& config, const Layout& layout, int ranks,
                             const std::vector<int64_t>& layers, int64_t microbatches) {
  ++dry_runs_;
  const int64_t replicas = ranks / layout.tp / layout.cp;
  BatchPlan batch = resolve_batch(config, ranks);
  batch.micro = layout.micro;
  batch.accumulation = microbatches;
  batch.global = layout.micro * replicas * microbatches;
  batch.tokens_per_step = batch.global * config.policy.max_total_sequence_length;
  predict::StagePlans plans;
  plans.stages.push_back(0);
  plans.plans.push_back(plan::make_run_plan(config, with_layers(spec_, layers), batch,
                                            plan::grid_position(config, ranks, 0), device_.type(),
                                            device_.threads()));
  const plan::RunPlan& plan = *plans.plans.front();
  using memory::Category;
  const auto bytes = [&](Category c) { return static_cast<double>(plan.memory.bytes(c)); };
  Part out{.weights = bytes(Category::weights),
           .gradients = bytes(Category::gradients),
           .optimizer = bytes(Category::optimizer),
           .parameters = static_cast<double>(plan.parameters.total())};
  for (const plan::ParamGroup& group : plan.groups)
    if (group.reduce == parallel::group::edp) out.experts += static_cast<double>(group.layout.total());
  out.activations =
      static_cast<double>(plan.memory.total_bytes()) - out.weights - out.gradients - out.optimizer;
  const predict::StepEstimate estimate =
      predict::estimate_step(config, std::move(plans), device_, first_ranks(nodes_, ranks), expert_load_);
  out.seconds = estimate.step - estimate.data;
  return out;
}

const std::optional<Pricer::Pieces>& Pricer::pieces(const Layout& layout, const std::string& recompute) {
  const Key key{layout.tp, layout.cp, layout.ep, layout.micro, recompute};
  if (const auto known = pieces_.find(key); known != pieces_.end()) return known->second;
  std::optional<Pieces>& out = pieces_[key];
  // One pipeline stage, and no more copies than the experts need.
  const int ranks = std::lcm(layout.tp * layout.cp, layout.ep);
  const Layout small{.tp = layout.tp,
                     .cp = layout.cp,
                     .ep = layout.ep,
                     .micro = layout.micro,
                     .recompute = recompute,
                     .strategy = "ddp",
                     .tp_overlap = layout.tp_overlap};
  std::optional<Config> config = load_(small.overrides(), ranks);
  if (!config) return out;
  config->cluster = given_.cluster;
  // One layer of each kind, and one more of each kind in turn.
  std::map<LayerSignature, std::pair<int64_t, int64_t>> kinds;  // first layer, number
  for (int64_t layer = 0; layer < spec_.layers; ++layer)
    ++kinds.try_emplace(signature(spec_, layer), layer, 0).first->second.second;
  std::vector<int64_t> base;
  for (const auto& [kind, layers] : kinds) base.push_back(layers.first);
  if (base.size() == 1) base.push_back(base.front());
  std::sort(base.begin(), base.end());
  const Part least = measure(*config, small, ranks, base, 1);
  double& update = updates_[{layout.tp, layout.ep}];
  if (update == 0) {
    const double twice = measure(*config, small, ranks, base, 2).seconds;
    update = std::max(0.0, 2 * least.seconds - twice) / least.parameters;
  }
  Pieces p{.layers = {}, .ends = least, .update = update};
  for (const auto& [kind, layers] : kinds) {
    std::vector<int64_t> more = base;
    more.insert(std::find(more.begin(), more.end(), layers.first), layers.first);
    Part difference = measure(*config, small, ranks, more, 1);
    difference += least * -1;
    p.layers += difference * static_cast<double>(layers.second);
    p.ends += difference * -static_cast<double>(std::count(base.begin(), base.end(), layers.first));
  }
  for (Part* part : {&p.layers, &p.ends}) part->seconds -= update * part->parameters;
  out = p;
  return out;
}

parallel::ProcessGrid Pricer::grid_of(const Layout& l) const {
  const auto etp = static_cast<int>(given_.distributed.expert_tensor_parallel_size);
  return {{.tp = l.tp, .cp = l.cp, .pp = l.pp, .ep = l.ep, .etp = etp}, world_, 0};
}

double Pricer::data_seconds(const Layout& layout, const Part& stage, double passes,
                            double microbatches) const {
  const parallel::ProcessGrid grid = grid_of(layout);
  const DistributedConfig& d = given_.distributed;
  parallel::GroupId group = parallel::group::dp_cp;
  const int copies = grid.group_size(group);
  if (copies == 1) return 0;
  const double sums = stage.parameters * static_cast<double>(size_of(d.grad_reduce_dtype)),
               weights = stage.weights;
  double across = 0;
  const auto buckets = std::max(1.0, std::ceil(stage.parameters * 4 / (40 << 20)));
  const auto seconds = [&](parallel::GroupId id, comm::Op op, double bytes) {
    return buckets *
           machine::collective_seconds(fabric_, fabric_.crossing(grid, id), op, bytes / buckets).value;
  };
  if (layout.replicas > 1) {
    const int slice = copies / layout.replicas;
    across = seconds(group.across_slices(slice), comm::Op::all_reduce, stage.parameters * 4 / slice);
    group = group.inside(slice);
  }
  const bool whole = layout.strategy == "ddp",
             parameters = layout.strategy == "optim_grads_params" || layout.strategy == "hsdp",
             gradients = parameters || layout.strategy == "optim_grads";
  const double times = gradients ? microbatches : 1;
  const double reduce = whole ? seconds(group, comm::Op::all_reduce, sums)
                              : times * seconds(group, comm::Op::reduce_scatter, sums);
  const double gather =
      whole ? 0 : (parameters ? 2 * microbatches : 1) * seconds(group, comm::Op::all_gather, weights);
  return across +
         (d.overlap_grad_reduce ? exposed(reduce, backward_share * passes * times, buckets) : reduce) +
         (layout.param_gather ? exposed(gather, passes * (parameters ? microbatches : 1), buckets) : gather);
}

Price Pricer::compose(const Layout& layout, const Pieces& pieces) const {
  const double stages = layout.pp, dp = layout.data_parallel(world_), chunks = layout.chunks;
  const auto microbatches =
      static_cast<double>(given_.policy.train_global_batch_size) / dp / static_cast<double>(layout.micro);
  const auto layers = static_cast<double>(spec_.layers), parts = stages * chunks;
  const int64_t units = spec_.layers + (layout.count_ends ? 2 : 0);
  double of_first = 0, of_last = 0, of_most = 0;  // layers of stages
  for (int stage = 0; stage < layout.pp; ++stage) {
    int64_t blocks = 0;
    for (int chunk = 0; chunk < layout.chunks; ++chunk)
      blocks +=
          model::even_part(units, int64_t{layout.pp} * layout.chunks, int64_t{chunk} * layout.pp + stage)
              .count;
    const bool is_first = stage == 0, is_last = stage + 1 == layout.pp;
    if (layout.count_ends) blocks -= (is_first ? 1 : 0) + (is_last ? 1 : 0);
    if (is_first) of_first = static_cast<double>(blocks);
    if (is_last) of_last = static_cast<double>(blocks);
    of_most = std::max(of_most, static_cast<double>(blocks));
  }
  const Part first = pieces.layers * (of_first / layers), last = pieces.layers * (of_last / layers);
  const double head = spec_.tied || layout.pp == 1 ? 1 : 0.5;  // of the ends' parameters, on the last stage
  Part state = last;
  state += pieces.ends * head;
  const Part& larger = state.parameters > first.parameters ? state : first;
  const double layer = pieces.layers.seconds / layers;
  const double t = of_most * layer, t_last = last.seconds + pieces.ends.seconds;
  double seconds = microbatches * t_last;
  if (layout.pp > 1) {
    // The last stage starts when the others have passed the first microbatch on.
    const double others = (layers - of_last) * layer, most = std::max(t, t_last);
    seconds = (microbatches - 1) * most + t_last + others / (layout.schedule == "zb_h1" ? 3 : chunks);
    // Chunks wait for each other unless there is a microbatch for every stage.
    seconds += std::max(0.0, stages - microbatches) * most * (chunks - 1) / chunks;
    const parallel::ProcessGrid grid = grid_of(layout);
    const double tokens =
        static_cast<double>(layout.micro * given_.policy.max_total_sequence_length) / layout.cp / layout.tp;
    const double message =
        machine::collective_seconds(fabric_, fabric_.crossing(grid, parallel::group::pp), comm::Op::send,
                                    2 * tokens * static_cast<double>(spec_.hidden))
            .value;
    seconds += 2 * (parts - 1) * message;
  }
  const double dense_shards = dp * layout.cp / layout.replicas,
               expert_shards =
                   static_cast<double>(grid_of(layout).group_size(parallel::group::edp)) / layout.replicas;
  // The share of a part's state that a rank keeps.
  const auto kept_share = [&](const Part& part) {
    const double experts = part.parameters > 0 ? std::min(1.0, part.experts / part.parameters) : 0;
    return (1 - experts) / dense_shards + experts / expert_shards;
  };
  const bool whole = layout.strategy == "ddp",
             parameters = layout.strategy == "optim_grads_params" || layout.strategy == "hsdp",
             gradients = parameters || layout.strategy == "optim_grads";
  seconds += pieces.update * larger.parameters * (whole ? 1 : kept_share(larger));
  seconds += data_seconds(layout, larger, std::max(t, t_last), microbatches);

  // The first stage has most microbatches in flight, the last one the head.
  const double in_flight =
      layout.pp == 1 ? 1
      : chunks == 1  ? std::min(microbatches, stages)
                     : std::min(microbatches * chunks, 2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks;
  const auto bytes = [&](const Part& part, double flying, double rest) {
    const double at_once = 2 / std::max(2.0, of_most);  // layers that are gathered or reduced
    const auto kept = [&](double of, bool sharded) {
      return sharded ? of * std::min(1.0, kept_share(part) + at_once) : of;
    };
    return kept(part.weights, parameters) + kept(part.gradients, gradients) +
           part.optimizer * (whole ? 1 : kept_share(part)) + flying * part.activations + rest;
  };
  Part embedding = first;
  embedding += pieces.ends * head;
  embedding.activations = first.activations;
  state.activations = last.activations;
  Price out{.seconds = seconds};
  out.memory = bytes(state, 1, pieces.ends.activations);
  if (layout.pp > 1) out.memory = std::max(out.memory, bytes(embedding, in_flight, 0));
  return out;
}

std::optional<Price> Pricer::price(const Layout& layout) {
  if (layout.recompute != "auto") {
    const std::optional<Pieces>& p = pieces(layout, layout.recompute);
    if (!p) return std::nullopt;
    Price out = compose(layout, *p);
    // Weight gradients read what was recomputed, later.
    if (layout.schedule == "zb_h1" && layout.recompute == "full")
      if (const std::optional<Pieces>& kept = pieces(layout, "none"))
        out.memory = compose(layout, *kept).memory;
    return out;
  }
  // auto recomputes as much as it must.
  const std::optional<Pieces>& none = pieces(layout, "none");
  if (!none) return std::nullopt;
  const Price most = compose(layout, *none);
  if (most.memory <= capacity_ || layout.schedule == "zb_h1") return most;  // see above
  const std::optional<Pieces>& full = pieces(layout, "full");
  if (!full) return std::nullopt;
  const Price least = compose(layout, *full);
  if (least.memory >= capacity_ || least.memory >= most.memory) return least;
  const double share = (most.memory - capacity_) / (most.memory - least.memory);
  return Price{.seconds = std::lerp(most.seconds, std::max(most.seconds, least.seconds), share),
               .memory = capacity_};
}

}  // namespace nrl::planner
