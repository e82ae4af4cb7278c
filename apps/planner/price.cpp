#include "apps/planner/price.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "apps/machine/collective_time.h"
#include "apps/plan/grid_position.h"
#include "apps/plan/pipeline.h"
#include "apps/predict/spread.h"
#include "core/base/error.h"

namespace nrl::planner {
namespace {

using pipeline::ScheduleKind;

/// The share of a model's layers whose activations are moved to the host.
double moved_layers(const PolicyConfig& p, int64_t layers) {
  if (!p.offload_layers) return p.offload_activations.value;
  return static_cast<double>(p.offload_layers->size()) / static_cast<double>(layers);
}

/// Rewrites keys that name layers of a model with `layers` of them, for one that has few: as many in
/// proportion, but it moves the activations of all layers to the host if the model moves some.
void count_layers(Config& config, int64_t layers) {
  PolicyConfig& p = config.policy;
  if (p.checkpoint_layers) {
    p.checkpoint_ratio = static_cast<double>(p.checkpoint_layers->size()) / static_cast<double>(layers);
    p.checkpoint_layers.reset();
  }
  p.offload_activations.value = moved_layers(p, layers) > 0 ? 1 : 0;
  p.offload_layers.reset();
  p.fp8_cfg.num_first_layers_in_bf16 = p.fp8_cfg.num_last_layers_in_bf16 = 0;
  config.distributed.cp_comm_type.resize(1);
}

/// Changes the pieces of a model that moves the activations of all layers to the host, for one that moves a
/// share of them. `none`: the pieces of a model that moves none.
void move_share(Pieces& all, const Pieces& none, double share) {
  const auto between = [&](double& x, double without) { x = without + share * (x - without); };
  between(all.with_head, none.with_head);
  between(all.without_head, none.without_head);
  for (auto& [kind, piece] : all.layers) {
    between(piece.kept, none.layers.at(kind).kept);
    planner::move_share(piece, share);
  }
}

/// The pieces of a stage whose first `recomputed` blocks recompute as `more`, the others as `less`.
StagePieces stage_pieces(const StageShape& shape, const Pieces& less, const Pieces& more, size_t recomputed) {
  StagePieces out{.ends = &less, .without_head = (recomputed > 0 ? more : less).without_head};
  size_t block = 0;
  for (const auto& chunk : shape.chunks) {
    out.blocks.emplace_back();
    for (const LayerKind& kind : chunk)
      out.blocks.back().push_back(&(block++ < recomputed ? more : less).layers.at(kind));
  }
  return out;
}

/// Calls `use` with the pieces of a chunk.
template <class Use>
void for_each_piece(const StageShape& shape, const StagePieces& pieces, size_t chunk, const Use& use) {
  if (shape.embedding && chunk == 0) use(pieces.ends->embedding);
  for (const LayerPiece* piece : pieces.blocks[chunk]) use(*piece);
  if (shape.head && chunk + 1 == shape.chunks.size()) use(pieces.ends->head);
}

Passes chunk_passes(const StageShape& shape, const StagePieces& pieces, size_t chunk) {
  Passes out;
  for_each_piece(shape, pieces, chunk, [&](const LayerPiece& p) { out += p.seconds; });
  return out;
}

/// A schedule of so many microbatches has as many in flight as one of `all`.
int enough_microbatches(int all, int stages) {
  return all <= 3 * stages ? all : 2 * stages + all % stages;
}

}  // namespace

Pricer::Pricer(const Config& given, const model::ModelSpec& spec, int world,
               const std::vector<ClusterNode>& nodes, const predict::ModeledDevice& device, double capacity,
               double expert_load, Load load)
    : given_(given),
      spec_(spec),
      world_(world),
      nodes_(nodes),
      device_(device),
      capacity_(capacity),
      load_(std::move(load)),
      fabric_(given.cluster, device.model(), nodes, world),
      overlap_(predict::overlap_of(device, fabric_.domain_ranks())),
      maker_(spec, nodes, device, expert_load) {
  if (device.profile()) fabric_.set_measured(device.profile()->links);
}

const std::optional<Pieces>& Pricer::pieces(const Layout& layout, const std::string& recompute) {
  const Fp8Config& fp8 = given_.policy.fp8_cfg;
  const bool rounds = fp8.enabled && !fp8.fp8_param;
  const bool caches = rounds && plan::caches_fp8_weights(layout.applied(given_));
  const auto key = [&](bool later) {
    return Key{layout.tp, layout.cp, layout.ep, layout.micro, recompute, layout.tp_overlap, later, caches};
  };
  const bool later = layout.schedule == "zb_h1";
  if (const auto known = pieces_.find(key(later)); known != pieces_.end()) return known->second;
  // No more copies than the experts need.
  const PieceSizes sizes{.ranks = std::lcm(layout.tp * layout.cp, layout.ep), .micro = layout.micro};
  Layout small{.tp = layout.tp,
               .cp = layout.cp,
               .ep = layout.ep,
               .micro = layout.micro,
               .recompute = recompute,
               .strategy = "ddp",
               .tp_overlap = layout.tp_overlap};
  std::vector<std::string> overrides = small.overrides();
  // With another type, in which ddp is refused, pieces would differ in the update only: it would read 2 bytes
  // less of about 26.
  if (given_.policy.optimizer.main_grads_dtype != DType::f32)
    overrides.emplace_back("policy.optimizer.main_grads_dtype=fp32");
  if (rounds) overrides.push_back(fmt::format("policy.fp8_cfg.cache_weights={}", caches));
  std::optional<Config> config = load_(overrides, sizes.ranks);
  if (config) {
    config->cluster = given_.cluster;
    count_layers(*config, spec_.layers);
  }
  small.pp = PieceMaker::stages;
  if (!pieces_.contains(key(false))) {
    std::optional<Pieces> made;
    if (config) made = maker_.make(*config, small.applied(*config), sizes);
    if (const double share = moved_layers(given_.policy, spec_.layers); config && share > 0 && share < 1) {
      config->policy.offload_activations.value = 0;
      move_share(*made, maker_.make(*config, small.applied(*config), sizes), share);
      config->policy.offload_activations.value = 1;
    }
    pieces_[key(false)] = std::move(made);
  }
  const std::optional<Pieces>& simple = pieces_[key(false)];
  if (!later) return simple;
  small.schedule = "zb_h1";
  std::optional<Pieces>& out = pieces_[key(true)];
  if (!simple) return out;
  out = maker_.with_weights_later(*simple, small.applied(*config), sizes);
  if (const double share = moved_layers(given_.policy, spec_.layers); share > 0)
    for (auto& [kind, piece] : out->layers) move_share(piece, share);
  // Between its passes a recomputed layer holds as much as others do: few layers do not show it beside what
  // recomputation takes.
  if (recompute != "none")
    if (const std::optional<Pieces>& others = pieces(layout, "none"))
      for (auto& [kind, piece] : out->layers)
        piece.later = std::max(piece.later, others->layers.at(kind).later);
  return out;
}

std::vector<std::pair<int, std::shared_ptr<const StageShape>>> Pricer::shapes(const Layout& layout) {
  Layout shape = layout;
  shape.micro = 1;
  shape.recompute.clear();
  shape.schedule = "auto";
  shape.param_gather = shape.messages = false;
  shape.tp_overlap = "auto";
  const auto [known, added] = shapes_.try_emplace(shape);
  if (!added) return known->second;
  const Config config = shape.applied(given_);
  for (const int stage : {0, 1, layout.pp - 1}) {
    if (stage >= layout.pp || (!known->second.empty() && stage <= known->second.back().first)) continue;
    const plan::GridPosition position = plan::grid_position(config, world_, world_ / layout.pp * stage);
    auto& [of, parameters] = parameters_[stage == 0 ? 0 : stage + 1 == layout.pp ? 2 : 1];
    if (const StageKey key{shape.tp, shape.cp, shape.ep, shape.pp, shape.chunks, shape.count_ends};
        of != key) {
      parameters = stage_parameters(config, spec_, position, device_.type());
      of = key;
    }
    known->second.emplace_back(stage, std::make_shared<const StageShape>(stage_shape(
                                          config, spec_, position, parameters, device_, fabric_)));
  }
  return known->second;
}

const pipeline::Schedule& Pricer::schedule_of(const pipeline::ScheduleOptions& options, int stage) {
  pipeline::ScheduleOptions few = options;
  few.microbatches = enough_microbatches(few.microbatches, few.stages);
  const auto [known, added] = schedules_.try_emplace({few, stage});
  if (added) known->second = make_schedule(few, stage);
  return known->second;
}

std::optional<Pricer::Composition> Pricer::compose(const Layout& layout) {
  // auto recomputes as much as it must. Weight gradients that come later read what was recomputed.
  const bool open = layout.recompute == "auto", more = open && layout.schedule != "zb_h1";
  static constexpr const char* kinds[] = {"none", "selective", "full"};
  const auto choice = [&](size_t i) -> const std::optional<Pieces>& {
    return pieces(layout, open ? kinds[i] : layout.recompute);
  };
  if (!choice(0)) return std::nullopt;
  const Config config = layout.applied(given_);
  const model::ModelLayout model{.stages = layout.pp, .chunks = layout.chunks};
  const int64_t microbatches =
      given_.policy.train_global_batch_size / layout.data_parallel(world_) / layout.micro;
  Composition out{
      .schedule = plan::schedule_options(config, model, microbatches), .options = {}, .stages = {}};
  out.options = {.microbatches = microbatches,
                 .prefetch = layout.param_gather,
                 .overlap_reduce = given_.distributed.overlap_grad_reduce,
                 .weights_later = layout.schedule == "zb_h1"};
  for (const auto& [stage, shape] : shapes(layout)) {
    const pipeline::Schedule& held = schedule_of(out.schedule, stage);
    Stage s{.stage = stage, .shape = shape, .pieces = {}, .options = out.options};
    s.options.sums_later = out.options.weights_later && stage > 0;
    const auto fits = [&](const Pieces& less, const Pieces& with_more, size_t recomputed) {
      s.pieces = stage_pieces(*shape, less, with_more, recomputed);
      s.memory = stage_memory(*shape, s.pieces, held, s.options);
      return s.memory <= capacity_;
    };
    size_t blocks = 0;
    for (const auto& chunk : shape->chunks) blocks += chunk.size();
    const Pieces* less = &*choice(0);
    bool enough = fits(*less, *less, 0);
    for (size_t i = 1; more && i < std::size(kinds) && !enough; ++i) {
      if (!choice(i)) continue;
      const Pieces& next = *choice(i);
      enough = fits(*less, next, blocks);
      if (enough) {
        // The fewest blocks.
        size_t least = 0, most = blocks;
        while (most - least > 1) {
          const size_t middle = (least + most) / 2;
          (fits(*less, next, middle) ? most : least) = middle;
        }
        fits(*less, next, most);
      }
      less = &next;
    }
    out.stages.push_back(std::move(s));
  }
  return out;
}

double Pricer::with_spread(double seconds) const {
  const double spread = device_.profile() ? device_.profile()->spread.value_or(predict::assumed_spread)
                                          : predict::assumed_spread;
  return seconds * (1 + spread * predict::expected_maximum(world_));
}

Price Pricer::summary(const Composition& c) const {
  Price out;
  for (size_t i = 0; i < c.stages.size(); ++i) {
    const Stage& s = c.stages[i];
    out.memory = std::max(out.memory, s.memory);
    const int until = i + 1 < c.stages.size() ? c.stages[i + 1].stage : c.schedule.stages;
    const double times = static_cast<double>(c.options.microbatches) * (until - s.stage) / c.schedule.stages;
    for (size_t chunk = 0; chunk < s.shape->chunks.size(); ++chunk)
      for_each_piece(*s.shape, s.pieces, chunk, [&](const LayerPiece& p) {
        out.busy.gemm += times * p.busy.gemm;
        out.busy.attention += times * p.busy.attention;
        out.busy.memory += times * p.busy.memory;
        out.busy.links += times * p.busy.links;
      });
  }
  return out;
}

std::optional<Price> Pricer::bound(const Layout& layout) {
  // The state alone may be too large.
  double state = 0;
  for (const auto& [stage, shape] : shapes(layout)) state = std::max(state, shape->state);
  if (state > capacity_) return Price{.memory = state, .state_only = true};
  const std::optional<Composition> c = compose(layout);
  if (!c) return std::nullopt;
  Price out = summary(*c);
  double before = 0, update = 0;  // passes of the stages before that are on the way of the first microbatch
  for (size_t i = 0; i < c->stages.size(); ++i) {
    const Stage& s = c->stages[i];
    update = std::max(update, s.pieces.ends->update * s.shape->elements);
    double busy = 0;
    for (size_t chunk = 0; chunk < s.shape->chunks.size(); ++chunk)
      busy += chunk_passes(*s.shape, s.pieces, chunk).total();
    out.seconds = std::max(out.seconds, static_cast<double>(c->options.microbatches) * busy + before);
    const Passes first = chunk_passes(*s.shape, s.pieces, 0);
    const int until = i + 1 < c->stages.size() ? c->stages[i + 1].stage : layout.pp;
    before += (until - s.stage) * (c->options.weights_later ? first.forward : first.total());
  }
  out.seconds = with_spread(out.seconds + update);
  return out;
}

double Pricer::makespan(const pipeline::ScheduleOptions& options, const pipeline::MicrobatchCosts& costs) {
  std::vector<double> key{static_cast<double>(options.kind), static_cast<double>(options.microbatches),
                          static_cast<double>(options.overlap_messages)};
  for (const pipeline::Costs* of : {&costs.first, &costs.middle, &costs.last})
    for (const pipeline::ChunkCosts& c : *of)
      key.insert(key.end(), {c.forward, c.backward_data, c.backward_weight, c.message});
  const auto [known, added] = makespans_.try_emplace(std::move(key));
  if (!added) return known->second;
  const auto with = [&](int microbatches) {
    pipeline::ScheduleOptions few = options;
    few.microbatches = microbatches;
    std::vector<pipeline::Schedule> schedules;
    for (int stage = 0; stage < few.stages; ++stage) schedules.push_back(make_schedule(few, stage));
    return pipeline::makespan(schedules, costs);
  };
  const int all = options.microbatches, few = enough_microbatches(all, options.stages);
  double& out = known->second;
  out = with(few);
  // In the steady state every further microbatch takes as long.
  if (few < all) {
    const double more = with(few + options.stages);
    out = more + (more - out) / options.stages * (all - few - options.stages);
  }
  return out;
}

std::vector<predict::StageTime> Pricer::times(const Layout& layout, const Composition& c) const {
  double message = 0;
  if (layout.pp > 1) {
    const Config config = layout.applied(given_);
    const plan::GridPosition position = plan::grid_position(config, world_, 0);
    message = machine::collective_seconds(fabric_, fabric_.crossing(position.grid, parallel::group::pp),
                                          comm::Op::send, c.stages.front().pieces.ends->message)
                  .value;
  }
  std::vector<predict::StageTime> out;
  for (const Stage& s : c.stages) {
    predict::StageItems items = stage_items(*s.shape, s.pieces, s.options);
    items.message = message;
    out.push_back(stage_time(items, layout.chunks, s.options.microbatches, overlap_));
  }
  return out;
}

template <class Makespan>
Price Pricer::price_with(const Layout& layout, const Composition& c,
                         const std::vector<predict::StageTime>& times, const Makespan& makespan) const {
  Price out = summary(c);
  pipeline::MicrobatchCosts costs;
  for (pipeline::Costs* of : {&costs.first, &costs.middle, &costs.last})
    of->resize(static_cast<size_t>(layout.pp) * static_cast<size_t>(layout.chunks));
  double alone = 0, afterwards = 0;
  predict::Busy busy;
  for (size_t i = 0; i < c.stages.size(); ++i) {
    const predict::StageTime& time = times[i];
    alone = std::max(alone, time.total());
    afterwards = std::max(afterwards, time.end.total() + time.outside);
    busy.raise(time.busy);
    const int until = i + 1 < c.stages.size() ? c.stages[i + 1].stage : layout.pp;
    set_costs(time, c.stages[i].stage, until, layout.pp, costs);
  }
  out.seconds = alone;
  if (layout.pp > 1) out.seconds = makespan(costs) + afterwards;
  out.seconds = with_spread(std::max(out.seconds, busy.most()));
  if (moved_layers(given_.policy, spec_.layers) > 0) out.margin = 0.15;
  return out;
}

Price Pricer::price(const Layout& layout, const Composition& c,
                    const std::vector<predict::StageTime>& times) {
  return price_with(layout, c, times,
                    [&](const pipeline::MicrobatchCosts& costs) { return makespan(c.schedule, costs); });
}

Price Pricer::bound(const Layout& layout, const Composition& c,
                    const std::vector<predict::StageTime>& times) const {
  return price_with(layout, c, times, [&](const pipeline::MicrobatchCosts& costs) {
    return pipeline::least_makespan(c.schedule, costs);
  });
}

std::optional<Price> Pricer::price(const Layout& layout) {
  const std::optional<Composition> c = compose(layout);
  if (!c) return std::nullopt;
  return price(layout, *c, times(layout, *c));
}

}  // namespace nrl::planner
