#include "apps/planner/pieces.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "apps/plan/grid_position.h"
#include "apps/plan/run_plan.h"
#include "core/base/error.h"

namespace nrl::planner {
namespace {

/// Every kind of layer occurs so often in the model with few layers: the middle one has neighbors on both
/// sides, as most layers have.
constexpr int occurrences = 3;

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

/// The first `ranks` ranks on their nodes, `times` times.
std::vector<ClusterNode> first_ranks(const std::vector<ClusterNode>& nodes, int ranks, int times) {
  std::vector<ClusterNode> out;
  for (int i = 0; i < times; ++i) {
    int left = ranks;
    for (const ClusterNode& node : nodes) {
      if (left <= 0) break;
      out.push_back(node);
      out.back().ranks = std::min(node.ranks, left);
      left -= node.ranks;
    }
  }
  return out;
}

double state_bytes(const memory::MemoryPlan& plan) {
  using memory::Category;
  double sum = 0;
  for (const Category c : {Category::weights, Category::gradients, Category::optimizer})
    sum += static_cast<double>(plan.bytes(c));
  return sum;
}

}  // namespace

LayerKind kind_of(const model::ModelSpec& spec, int64_t layer) {
  const model::LayerKind kind =
      spec.layer_kinds.empty() ? model::LayerKind{} : spec.layer_kinds[static_cast<size_t>(layer)];
  return {kind.window, kind.rope, spec.has_experts(layer)};
}

Passes& Passes::operator+=(const Passes& o) {
  forward += o.forward;
  data += o.data;
  weight += o.weight;
  return *this;
}

void move_share(LayerPiece& piece, double share) {
  for (double Passes::*pass : {&Passes::forward, &Passes::data, &Passes::weight}) {
    // The copies of a layer that is moved have the time of those that are not, too.
    const double others = piece.seconds.*pass - piece.copies.*pass;
    piece.copies.*pass = std::max(0.0, share * piece.seconds.*pass - others);
    piece.seconds.*pass = others + piece.copies.*pass;
  }
}

namespace {

/// Adds an item, a call to the call before it if both are of one pass, equally slowed by operations, and
/// their host is never late.
void add(std::vector<predict::Item>& to, const predict::Item& item) {
  constexpr auto call = predict::Item::Kind::call;
  if (item.kind == call && !to.empty() && to.back().kind == call && to.back().slot == item.slot &&
      to.back().row == item.row && item.issue == 0) {
    to.back().host += item.host;
    to.back().seconds += item.seconds;
  } else {
    to.push_back(item);
  }
}

}  // namespace

struct PieceMaker::Small {
  std::unique_ptr<plan::RunPlan> plan;

  /// Bytes of a microbatch's activations, and all that is not state.
  double beside_state() const {
    return static_cast<double>(plan->memory.total_bytes()) - state_bytes(plan->memory);
  }
};

PieceMaker::PieceMaker(const model::ModelSpec& spec, const std::vector<ClusterNode>& nodes,
                       const predict::ModeledDevice& device, double expert_load)
    : spec_(spec), nodes_(nodes), device_(device), expert_load_(expert_load) {
  std::vector<int64_t> firsts;
  std::map<LayerKind, size_t> known;
  for (int64_t layer = 0; layer < spec.layers; ++layer)
    if (known.try_emplace(kind_of(spec, layer), firsts.size()).second) firsts.push_back(layer);
  std::vector<int64_t> layers;
  for (int i = 0; i < occurrences; ++i)
    for (const int64_t layer : firsts) {
      places_[kind_of(spec, layer)].push_back(layers.size());
      layers.push_back(layer);
    }
  few_ = with_layers(spec, layers);
  layers.resize(layers.size() - firsts.size());
  fewer_ = with_layers(spec, layers);
}

PieceMaker::Small PieceMaker::plan(const Config& config, const model::ModelSpec& few, int ranks, int stage,
                                   const PieceSizes& sizes, int64_t microbatches) {
  ++dry_runs_;
  const plan::GridPosition position = plan::grid_position(config, ranks, stage * sizes.ranks);
  BatchPlan batch = resolve_batch(config, ranks);
  batch.micro = sizes.micro;
  batch.accumulation = microbatches;
  batch.global = sizes.micro * batch.data_parallel * microbatches;
  batch.tokens_per_step = batch.global * config.policy.max_total_sequence_length;
  return {plan::make_run_plan(config, few, batch, position, device_.type(), device_.threads())};
}

std::vector<LayerPiece> PieceMaker::pieces(const Config& config, Small small, int stages, double* update) {
  const int ranks = small.plan->position.ranks();
  plan::StagePlans plans;
  plans.plans.push_back(std::move(small.plan));
  const std::vector<ClusterNode> nodes = first_ranks(nodes_, ranks / stages, stages);
  const predict::DryStages dry(config, std::move(plans), device_, nodes, expert_load_);
  const predict::DryStages::Stage& of = dry.stages().front();
  const model::Decoder& decoder = *of.engine->plan().decoder;
  const machine::CallTimes calls(device_.model(), device_.profile());
  const predict::Rates rates = dry.rates(calls);
  predict::StageItems items = stage_items(of.step, decoder, of.engine->plan().position.grid, rates);
  // The same items with a slot for each pass of each layer.
  const program::Program& program = decoder.program(memory::training);
  const size_t layers = decoder.all_layers().layers.size(), of_microbatch = predict::pass_count * layers;
  const auto microbatches = static_cast<size_t>(of.step.microbatches);
  const size_t end = of_microbatch * microbatches;
  std::erase_if(items.items, [](const predict::Item& i) {
    return i.kind == predict::Item::Kind::start && predict::of_data(i.purpose);
  });
  for (predict::Item& item : items.items) {
    const auto source = static_cast<size_t>(item.source);
    const bool call = item.kind == predict::Item::Kind::call;
    const int step = call ? of.step.calls[source].step : of.step.events[source].step,
              microbatch = call ? of.step.calls[source].microbatch : of.step.events[source].microbatch;
    item.slot = static_cast<int>(end);
    if (step < 0 || microbatch < 0) continue;
    const program::Step& s = program.steps[static_cast<size_t>(step)];
    item.slot = static_cast<int>(of_microbatch) * microbatch +
                static_cast<int>(predict::pass_count) * s.layer +
                static_cast<int>(predict::pass_of(decoder, s));
  }
  // The seconds are of a host that is never late: how late it is depends on the order of all passes.
  std::vector<predict::Item> started = items.items;
  for (predict::Item& item : started) item.issue = 0;
  const predict::Replay replayed = predict::replay(started, end + 1, rates.overlap);
  std::vector<LayerPiece> out(layers);
  const double each = 1.0 / static_cast<double>(microbatches);
  const bool later =
      config.distributed.pipeline_schedule.value_or(ScheduleKind::single) == ScheduleKind::zb_h1;
  std::map<std::pair<const VisitItems*, int>, int> operations;  // numbers in a visit
  for (predict::Item item : items.items) {
    const auto slot = static_cast<size_t>(item.slot);
    if (slot >= end) continue;
    const size_t microbatch = slot / of_microbatch, pass = slot % predict::pass_count;
    LayerPiece& piece = out[slot % of_microbatch / predict::pass_count];
    if (item.kind == predict::Item::Kind::call)
      piece.busy.of(of.step.calls[static_cast<size_t>(item.source)].cost.work) += each * item.seconds;
    else if (item.kind == predict::Item::Kind::start && item.link != machine::Link::none)
      piece.busy.links += each * item.seconds;
    if (microbatch > 1 || item.purpose == comm::Purpose::offload) continue;
    VisitItems& visit = (pass == 0            ? piece.forward
                         : pass == 2 && later ? piece.weight
                                              : piece.backward)[microbatch];
    const auto number = [&](int operation) {
      const auto found = operations.find({&visit, operation});
      return found == operations.end() ? -1 : found->second;
    };
    item.slot = static_cast<int>(pass);
    item.after = number(item.after);
    if (item.kind == predict::Item::Kind::start) operations[{&visit, item.operation}] = visit.operations++;
    if (item.kind != predict::Item::Kind::call) item.operation = number(item.operation);
    if (item.kind != predict::Item::Kind::wait || item.operation >= 0) add(visit.items, item);
  }
  for (size_t l = 0; l < layers; ++l) {
    const auto least = [&](size_t pass) -> const predict::SlotTime& {
      const auto of = [&](size_t microbatch) -> const predict::SlotTime& {
        return replayed.slots[of_microbatch * microbatch + predict::pass_count * l + pass];
      };
      return microbatches > 1 && of(1).total() < of(0).total() ? of(1) : of(0);
    };
    out[l].seconds = {least(0).total(), least(1).total(), least(2).total()};
    out[l].copies = {least(0).offload(), least(1).offload(), least(2).offload()};
    if (microbatches > 1) continue;
    for (auto* visits : {&out[l].forward, &out[l].backward, &out[l].weight}) (*visits)[1] = (*visits)[0];
  }
  if (update) *update = replayed.slots[end].total();
  return out;
}

Pieces PieceMaker::make(const Config& whole, const Config& staged, const PieceSizes& sizes) {
  Pieces out;
  const auto blocks = static_cast<size_t>(few_.layers);
  Small one = plan(whole, few_, sizes.ranks, 0, sizes, 2);
  double elements = 0;
  for (const plan::ParamGroup& g : one.plan->groups)
    if (g.trainable) elements += static_cast<double>(g.state_elements());
  std::vector<double> kept(blocks);
  double all_kept = 0;
  for (const model::Decoder::BlockBytes& b : one.plan->decoder->block_bytes())
    all_kept += kept[static_cast<size_t>(b.block)] = static_cast<double>(b.kept);
  // A layer of every kind keeps as much as they add to the plan.
  const double of_kinds = one.beside_state() - plan(whole, fewer_, sizes.ranks, 0, sizes, 2).beside_state();
  const double share = all_kept > 0 ? occurrences * of_kinds / all_kept : 0;
  out.with_head = one.beside_state() - occurrences * of_kinds;
  double update = 0;
  const std::vector<LayerPiece> all = pieces(whole, std::move(one), 1, &update);
  NRL_CHECK(all.size() == blocks + 2, "{} layers for {} blocks", all.size(), blocks);
  out.embedding = all.front();
  out.head = all.back();
  out.update = elements > 0 ? update / elements : 0;
  for (const auto& [kind, places] : places_) {
    const size_t middle = places[places.size() / 2];
    out.layers[kind] = all[middle + 1];
    out.layers[kind].kept = share * kept[middle];
  }
  // The second of several stages, with two microbatches in flight.
  const Small inner = plan(staged, few_, stages * sizes.ranks, 1, sizes, stages);
  const model::DecoderOptions& options = inner.plan->decoder->options();
  out.message = static_cast<double>(options.layout.own_tokens(options.tokens) * few_.hidden *
                                    size_of(options.recipe.activations()));
  out.without_head = inner.beside_state() - 2 * (of_kinds + out.message);
  return out;
}

Pieces PieceMaker::with_weights_later(Pieces out, const Config& staged, const PieceSizes& sizes) {
  // On the second stage two microbatches wait for their backward pass, then also one for its weight
  // gradients.
  const double two = plan(staged, few_, stages * sizes.ranks, 1, sizes, 2).beside_state();
  Small several = plan(staged, few_, stages * sizes.ranks, 1, sizes, stages);
  double later = std::max(0.0, several.beside_state() - two), kept = 0, factor = 1;
  for (const auto& [kind, piece] : out.layers) kept += piece.kept;
  const double each = (two - out.without_head) / 2 - out.message;
  // Layers that recompute keep more from their backward passes to the weight gradients than before.
  if (staged.policy.recompute.granularity == RecomputeGranularity::none)
    factor = kept > 0 ? each / kept : 1;
  else
    later = std::max(later, each);
  const std::vector<LayerPiece> inner = pieces(staged, std::move(several), stages, nullptr);
  NRL_CHECK(inner.size() == places_.size() + 2, "{} layers of {} kinds", inner.size(), places_.size());
  for (auto& [kind, piece] : out.layers) {
    const LayerPiece& here = inner[places_.at(kind).front() + 1];
    piece.seconds = here.seconds;
    piece.copies = here.copies;
    piece.forward = here.forward;
    piece.backward = here.backward;
    piece.weight = here.weight;
    piece.kept *= factor;
    piece.later = later / static_cast<double>(places_.size());
  }
  return out;
}

}  // namespace nrl::planner
