#include "apps/planner/stage_price.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "apps/machine/call_time.h"
#include "apps/machine/collective_time.h"
#include "apps/model/linear/fp8_state.h"
#include "apps/plan/run_plan.h"

namespace nrl::planner {
namespace {

using comm::Purpose;
using machine::Link;
using predict::Item;

/// Unites the operations of each unit: they travel as one.
template <class Seconds>
std::vector<DataOperation> by_unit(const std::vector<DataOperation>& all, const Seconds& seconds) {
  std::map<int, DataOperation, std::greater<>> units;
  for (const DataOperation& o : all) {
    DataOperation& sum = units[o.first];
    sum.first = sum.last = o.first;
    sum.bytes += o.bytes;
    sum.buffer += o.buffer;
    sum.across += o.across;
    sum.before += o.before;
    sum.after += o.after;
    sum.kept += o.kept;
    sum.copies += o.copies;
  }
  std::vector<DataOperation> out;
  for (auto& [unit, o] : units) {
    o.seconds = seconds(o.bytes);
    out.push_back(o);
  }
  return out;
}

DataGroup data_group(const plan::ParamGroup& g, const std::vector<int>& units,
                     const parallel::ProcessGrid& grid, const machine::Fabric& fabric,
                     const machine::DeviceModel& device) {
  DataGroup out{.gathers_on_use = g.weights_gathered,
                .in_buckets = g.gradient_buckets,
                .every_microbatch = g.gradients_sharded,
                .rounded = g.main_gradient != g.gradient,
                .alone = g.layout.shards() == 1 && g.replicas == 1,
                .late = g.reduce.ends};
  const auto crossing = [&](const parallel::GroupId& id) { return fabric.crossing(grid, id); };
  const auto seconds = [&](const machine::Crossing& c, comm::Op op, double bytes) {
    return machine::collective_seconds(fabric, c, op, bytes).value;
  };
  const int shards = g.layout.shards();
  machine::Crossing shard{}, across{};
  if (shards > 1) shard = crossing(g.shard_group());
  if (g.replicas > 1) across = crossing(g.replica_group());
  out.link = link_of(shard);
  out.across = link_of(across);
  const parallel::ReduceOptions reduce = g.reduce_options(true);
  const bool scatters = g.trainable && g.strategy.optimizer_state;
  const comm::Op op = reduce.sums_parts() ? comm::Op::all_to_all
                      : scatters          ? comm::Op::reduce_scatter
                                          : comm::Op::all_reduce;
  const auto of_sum = [&](double bytes) {
    double s = seconds(shard, op, bytes);
    if (reduce.sums_parts() && !scatters) s += seconds(shard, comm::Op::all_gather, bytes);
    return s;
  };
  const auto of_gather = [&](double bytes) { return seconds(shard, comm::Op::all_gather, bytes); };
  const auto wire = static_cast<double>(size_of(g.wire));
  for (const parallel::Bucket& bucket : g.layout.buckets()) {
    DataOperation o{.first =
                        units[static_cast<size_t>(g.parameters[static_cast<size_t>(bucket.params.front())])]};
    o.last = o.first;
    for (const int p : bucket.params) {
      const int unit = units[static_cast<size_t>(g.parameters[static_cast<size_t>(p)])];
      o.first = std::min(o.first, unit);
      o.last = std::max(o.last, unit);
    }
    const auto size = static_cast<double>(bucket.size), part = size / shards;
    if (shards > 1 || g.replicas > 1 || g.gradient_buckets) {
      DataOperation sum = o, gather = o;
      sum.bytes = size * wire;
      sum.buffer = size * static_cast<double>(size_of(g.gradient));
      sum.seconds = shards > 1 ? of_sum(sum.bytes) : 0;
      const auto copies = [&](Purpose purpose, comm::Op of, double bytes) {
        return machine::copy_seconds(device, purpose, of, bytes, machine::likely);
      };
      if (shards > 1) sum.copies = copies(Purpose::gradients, op, sum.bytes);
      const auto main = static_cast<double>(size_of(g.main_gradient));
      if (g.replicas > 1) sum.across = seconds(across, comm::Op::all_reduce, main * part);
      if (g.wire != DType::f32 && shards > 1) {
        sum.before = machine::memory_seconds(device, "convert", size * (4 + wire));
        sum.after = machine::memory_seconds(device, scatters ? "sum_parts" : "convert",
                                            (scatters ? part : size) * (main + wire));
      } else if (g.gradient_buckets && !out.alone) {
        sum.after =
            machine::memory_seconds(device, "sum_parts", (4 + (g.gradients_sharded ? 2 : 1) * main) * part);
      }
      if (g.gradient_buckets && !g.gradients_sharded)
        sum.kept = machine::memory_seconds(device, "sum_parts", size * (4 + 2 * main));
      gather.bytes = gather.buffer = size * static_cast<double>(size_of(g.read_type()));
      gather.seconds = shards > 1 ? of_gather(gather.bytes) : 0;
      gather.copies = copies(Purpose::weights, comm::Op::all_gather, gather.bytes);
      if (g.trainable) out.reductions.push_back(sum);
      if (shards > 1 && (scatters || g.weights_gathered)) out.gathers.push_back(gather);
    }
  }
  if (out.in_buckets && g.wire == DType::f32 && shards > 1) out.reductions = by_unit(out.reductions, of_sum);
  if (out.gathers_on_use) out.gathers = by_unit(out.gathers, of_gather);
  return out;
}

/// The ends of chunks that receive or send: visits without work.
constexpr int boundary = -1;

/// A pass of a unit.
struct Visit {
  enum class Kind : uint8_t { forward, backward, data, weight };
  Kind kind = Kind::forward;
  int unit = 0, chunk = 0, microbatch = 0;

  bool forward() const { return kind == Kind::forward; }
};

/// Writes the items of a step as the executor of programs issues them (parallel/program/communicate.cpp,
/// parallel/data/grad_reducer.h).
class Items {
 public:
  Items(const StageShape& shape, const StagePieces& pieces, const StageOptions& options)
      : shape_(shape),
        pieces_(pieces),
        options_(options),
        chunks_(shape.chunks.size()),
        run_(static_cast<int>(std::min<int64_t>(options.microbatches, 3))),
        end_(static_cast<int>(3 * chunks_ * static_cast<size_t>(run_))),
        states_(shape.groups.size()) {
    for (const auto& chunk : pieces.blocks) blocks_.insert(blocks_.end(), chunk.begin(), chunk.end());
  }

  predict::StageItems take() {
    const std::vector<Visit> visits = all_visits();
    constexpr size_t beside = 8;  // operations of data-parallel ranks and their waits, about
    size_t items = beside * visits.size();
    for (const Visit& v : visits) items += work_of(v).items.size();
    items_.reserve(items);
    start_gathers();
    for (size_t i = 0; i < visits.size(); ++i)
      visit(visits[i], i > 0 ? &visits[i - 1] : nullptr, i + 1 < visits.size() ? &visits[i + 1] : nullptr);
    finish();
    return {.items = std::move(items_), .slots = static_cast<size_t>(end_) + 1};
  }

 private:
  struct State {
    size_t launched = 0;  // whole gradients: reductions
    std::vector<std::pair<size_t, int>> whole;
    std::vector<std::pair<size_t, int>> reducing, done;  // reductions in flight, operations
    std::vector<int> across;
    std::map<int, int> gathering;  // on use: operation by unit
    std::vector<int> gathers;      // after the update: operation by gather; -1: not started, -2: over
    size_t to_gather = 0;
  };

  int head() const { return static_cast<int>(blocks_.size()) + 1; }
  bool last(const Visit& v) const { return v.microbatch + 1 == run_; }

  std::vector<Visit> all_visits() const {
    std::vector<Visit> out;
    std::vector<int> begins{1};
    for (const auto& chunk : shape_.chunks) begins.push_back(begins.back() + static_cast<int>(chunk.size()));
    const auto n = static_cast<int>(chunks_);
    for (int m = 0; m < run_; ++m)
      for (int c = 0; c < n; ++c) {
        // In the steady state of a pipeline a stage's chunks pass forwards and backwards in turn.
        const auto pass = [&](int chunk, Visit::Kind kind) {
          const bool embedding = shape_.embedding && chunk == 0, head_here = shape_.head && chunk + 1 == n;
          std::vector<int> units;
          units.push_back(embedding ? 0 : boundary);
          for (int u = begins[static_cast<size_t>(chunk)]; u < begins[static_cast<size_t>(chunk) + 1]; ++u)
            units.push_back(u);
          units.push_back(head_here ? head() : boundary);
          if (kind != Visit::Kind::forward) std::reverse(units.begin(), units.end());
          for (const int u : units) out.push_back({kind, u, chunk, m});
        };
        pass(c, Visit::Kind::forward);
        if (!options_.weights_later) {
          pass(n - 1 - c, Visit::Kind::backward);
        } else {
          pass(n - 1 - c, Visit::Kind::data);
          pass(n - 1 - c, Visit::Kind::weight);
        }
      }
    return out;
  }

  const LayerPiece& piece(int unit) const {
    static const LayerPiece none;
    if (unit == boundary) return none;
    if (unit == 0) return pieces_.ends->embedding;
    if (unit == head()) return pieces_.ends->head;
    return *blocks_[static_cast<size_t>(unit) - 1];
  }

  const VisitItems& work_of(const Visit& v) const {
    const LayerPiece& p = piece(v.unit);
    const auto& visits = v.forward() ? p.forward : v.kind == Visit::Kind::weight ? p.weight : p.backward;
    return visits[adds(v) ? 1 : 0];
  }

  int slot(const Visit& v, int pass) const {
    return static_cast<int>((static_cast<size_t>(v.microbatch) * chunks_ + static_cast<size_t>(v.chunk)) *
                            3) +
           pass;
  }
  static int pass_of(const Visit& v) { return v.forward() ? 0 : v.kind == Visit::Kind::weight ? 2 : 1; }

  void call(int slot, double seconds) {
    if (seconds > 0) items_.push_back({.slot = slot, .seconds = seconds});
  }
  void append(const VisitItems& visit, const Visit& v) {
    for (Item item : visit.items) {
      item.slot = slot(v, item.slot);
      if (item.operation >= 0) item.operation += operations_;
      if (item.after >= 0) item.after += operations_;
      items_.push_back(item);
    }
    operations_ += visit.operations;
  }
  int start(int slot, double seconds, Link link, Purpose purpose, int after = -1, double copies = 0) {
    items_.push_back({.kind = Item::Kind::start,
                      .slot = slot,
                      .seconds = seconds,
                      .host = copies,
                      .operation = operations_,
                      .after = after,
                      .link = link,
                      .purpose = purpose});
    return operations_++;
  }
  void wait(int slot, int operation) {
    items_.push_back({.kind = Item::Kind::wait, .slot = slot, .operation = operation});
  }

  const DataGroup& group(size_t g) const { return shape_.groups[g]; }
  bool gathers_after_update(size_t g) const { return !group(g).gathers_on_use && !group(g).gathers.empty(); }

  int start_gather(int slot, const DataOperation& o, Link link) {
    return start(slot, o.seconds, link, Purpose::weights, -1, o.copies);
  }

  // Gathers of updated weights, the first layers first; two in flight.
  void gather_next(size_t g, int slot) {
    State& s = states_[g];
    if (s.to_gather == 0) return;
    --s.to_gather;
    s.gathers[s.to_gather] = start_gather(slot, group(g).gathers[s.to_gather], group(g).link);
  }
  void wait_gather(size_t g, size_t bucket, int slot) {
    State& s = states_[g];
    while (s.to_gather > bucket) gather_next(g, slot);
    if (s.gathers[bucket] < 0) return;
    wait(slot, s.gathers[bucket]);
    s.gathers[bucket] = -1;
    gather_next(g, slot);
  }
  void begin_gathers(size_t g, int slot) {
    State& s = states_[g];
    s.gathers.assign(group(g).gathers.size(), -1);
    s.to_gather = s.gathers.size();
    for (int i = 0; i < 2; ++i) gather_next(g, slot);
  }
  void wait_gathers(size_t g, int slot) {
    for (size_t b = states_[g].gathers.size(); b-- > 0;) wait_gather(g, b, slot);
  }
  void start_gathers() {
    if (!options_.prefetch) return;
    for (size_t g = 0; g < states_.size(); ++g)
      if (gathers_after_update(g)) begin_gathers(g, 0);
  }

  static const DataOperation* of_unit(const std::vector<DataOperation>& operations, int unit) {
    for (const DataOperation& o : operations)
      if (o.first <= unit && unit <= o.last) return &o;
    return nullptr;
  }

  void gather_on_use(size_t g, int unit, int slot) {
    const DataOperation* const o = of_unit(group(g).gathers, unit);
    if (o) states_[g].gathering[unit] = start_gather(slot, *o, group(g).link);
  }

  void visit(const Visit& v, const Visit* before, const Visit* next) {
    const int at = slot(v, pass_of(v));
    for (size_t g = 0; g < states_.size(); ++g) {
      State& s = states_[g];
      if (group(g).gathers_on_use) {
        const bool added = !before || before->unit != v.unit;
        if (added && (!options_.prefetch || !before)) gather_on_use(g, v.unit, at);
        if (options_.prefetch && next && next->unit != v.unit) gather_on_use(g, next->unit, at);
        if (const auto found = s.gathering.find(v.unit); added && found != s.gathering.end()) {
          wait(at, found->second);
          s.gathering.erase(found);
        }
      } else if (v.forward() && v.microbatch == 0) {
        for (size_t b = s.gathers.size(); b-- > 0;)
          if (group(g).gathers[b].first <= v.unit && v.unit <= group(g).gathers[b].last)
            wait_gather(g, b, at);
      }
      s.done = std::exchange(s.reducing, {});
    }
    append(work_of(v), v);
    // The head has its gradients in the forward pass.
    const bool has_gradients = v.unit == head() ? v.forward() : !v.forward() && v.kind != Visit::Kind::data;
    if (has_gradients) complete(v, v.kind == Visit::Kind::backward ? slot(v, 2) : at);
    if (moves(v)) {
      const LayerPiece& p = piece(v.unit);
      if (v.forward()) call(slot(v, 0), p.copies.forward);
      if (!v.forward() && v.kind != Visit::Kind::weight) call(slot(v, 1), p.copies.data);
      if (!v.forward() && v.kind != Visit::Kind::data) call(slot(v, 2), p.copies.weight);
    }
    for (State& s : states_) {
      for (const auto& [operation, id] : s.done) settle(s, operation, id, last(v), at);
      s.done.clear();
    }
  }

  /// Activations that are moved to the host: not those that a backward pass needs at once.
  bool moves(const Visit& v) const { return !shape_.head || v.unit + 1 != head(); }

  /// The gradients of the visit are added to what microbatches before have left.
  bool adds(const Visit& v) const {
    for (const DataGroup& g : shape_.groups)
      if (g.in_buckets) return options_.sums_later;
    return v.microbatch > 0;
  }
  /// A visit's gradients leave the buffers where it wrote them before the next one but one.
  bool by_visit(size_t g) const { return group(g).in_buckets && !options_.sums_later; }

  /// The gradients of the visit's unit are complete.
  void complete(const Visit& v, int at) {
    if (v.unit == boundary) return;
    for (size_t g = 0; g < states_.size(); ++g) {
      State& s = states_[g];
      const std::vector<DataOperation>& all = group(g).reductions;
      if (by_visit(g)) {
        for (size_t o = 0; o < all.size(); ++o) {
          if (all[o].first != v.unit) continue;
          if (options_.microbatches > 1 || group(g).alone) call(at, all[o].kept);
          if (!group(g).every_microbatch && !last(v)) continue;
          const int id = reduce(g, o, last(v) && in_place(g), at);
          (options_.overlap_reduce ? s.reducing : s.done).emplace_back(o, id);
        }
      } else if (last(v) && options_.overlap_reduce && !group(g).late) {
        launch(g, v.unit, at);
      }
    }
  }
  /// Sums are left where they are kept.
  bool in_place(size_t g) const {
    return group(g).every_microbatch && !group(g).rounded && options_.microbatches == 1;
  }
  void launch(size_t g, int unit, int at) {
    State& s = states_[g];
    const std::vector<DataOperation>& all = group(g).reductions;
    for (; s.launched < all.size() && all[s.launched].first >= unit; ++s.launched)
      s.whole.emplace_back(s.launched, reduce(g, s.launched, true, at));
  }
  int reduce(size_t g, size_t o, bool sums_replicas, int at) {
    const DataOperation& of = group(g).reductions[o];
    call(at, of.before);
    const int id = start(at, of.seconds, group(g).link, Purpose::gradients, -1, of.copies);
    if (sums_replicas && of.across > 0)
      states_[g].across.push_back(start(at, of.across, group(g).across, Purpose::gradients, id));
    return id;
  }
  void settle(State& s, size_t operation, int id, bool last_microbatch, int at) {
    const auto g = static_cast<size_t>(&s - states_.data());
    const DataOperation& of = group(g).reductions[operation];
    wait(at, id);
    if (!in_place(g) || of.before > 0) call(at, of.after);
    if (last_microbatch && !in_place(g) && of.across > 0)
      s.across.push_back(start(at, of.across, group(g).across, Purpose::gradients));
  }

  void finish() {
    for (size_t g = 0; g < states_.size(); ++g)
      if (!by_visit(g)) launch(g, 0, end_);
    for (size_t g = 0; g < states_.size(); ++g) {
      State& s = states_[g];
      if (by_visit(g)) {
        for (const auto& [operation, id] : s.reducing) settle(s, operation, id, true, end_);
      } else {
        for (const auto& [operation, id] : s.whole) {
          wait(end_, id);
          call(end_, group(g).reductions[operation].after);
        }
      }
      for (const int id : s.across) wait(end_, id);
      if (options_.prefetch && gathers_after_update(g)) wait_gathers(g, end_);
    }
    wait(end_, start(end_, shape_.norm, Link::none, Purpose::scalars));
    call(end_, pieces_.ends->update * shape_.elements);
    if (options_.prefetch) return;
    for (size_t g = 0; g < states_.size(); ++g)
      if (gathers_after_update(g)) {
        begin_gathers(g, end_);
        wait_gathers(g, end_);
      }
  }

  const StageShape& shape_;
  const StagePieces& pieces_;
  const StageOptions& options_;
  size_t chunks_;
  int run_, end_;
  std::vector<State> states_;
  std::vector<const LayerPiece*> blocks_;  // of the rank
  std::vector<Item> items_;
  int operations_ = 0;
};

}  // namespace

model::ParameterList stage_parameters(const Config& config, const model::ModelSpec& spec,
                                      const plan::GridPosition& position, DeviceType device) {
  model::ParameterList out = model::make_parameters(spec, plan::model_layout(config, spec, position, device));
  model::keep_in_fp8(plan::recipe_for(config, device, spec.layers), out);
  return out;
}

StageShape stage_shape(const Config& config, const model::ModelSpec& spec, const plan::GridPosition& position,
                       const model::ParameterList& parameters, const predict::ModeledDevice& device,
                       const machine::Fabric& fabric) {
  const model::ModelLayout layout = plan::model_layout(config, spec, position, device.type());
  StageShape out{.embedding = layout.first_stage(), .head = layout.last_stage()};
  for (int chunk = 0; chunk < layout.chunks; ++chunk) {
    const model::BlockRange blocks = model::chunk_blocks(layout, spec.layers, layout.model_chunk(chunk));
    out.chunks.emplace_back();
    for (int b = blocks.begin; b < blocks.end; ++b) out.chunks.back().push_back(kind_of(spec, b));
  }
  const precision::Recipe recipe = plan::recipe_for(config, device.type(), spec.layers);
  memory::MemoryPlan memory;
  const std::vector<plan::ParamGroup> groups = plan::make_param_groups(
      parameters,
      [&](const std::string& group) {
        plan::GroupOptions options = plan::group_options(config, position, recipe, group);
        options.updates = false;
        return options;
      },
      memory);
  // Declares the copies of weights that are cached, and scales.
  const model::Fp8State fp8(model::tensor_part(spec, layout), layout, recipe, parameters, memory);
  memory.solve();
  out.state = static_cast<double>(memory.total_bytes());
  // Units are numbered over the whole model; here over this rank.
  std::vector<int> units = parameters.units(), local(static_cast<size_t>(spec.layers) + 2);
  int next = 0;
  for (int chunk = 0; chunk < layout.chunks; ++chunk) {
    const model::BlockRange blocks = model::chunk_blocks(layout, spec.layers, layout.model_chunk(chunk));
    for (int b = blocks.begin; b < blocks.end; ++b) local[static_cast<size_t>(b) + 1] = ++next;
  }
  local.back() = next + 1;
  for (int& unit : units) unit = local[static_cast<size_t>(unit)];
  for (const plan::ParamGroup& g : groups) {
    if (g.trainable) out.elements += static_cast<double>(g.state_elements());
    out.groups.push_back(data_group(g, units, position.grid, fabric, device.model()));
  }
  out.gathered.resize(static_cast<size_t>(next) + 2);
  out.reduced = out.gathered;
  for (const DataGroup& g : out.groups) {
    if (g.gathers_on_use)
      for (const DataOperation& o : g.gathers) out.gathered[static_cast<size_t>(o.first)] += o.buffer;
    if (g.in_buckets)
      for (const DataOperation& o : g.reductions) out.reduced[static_cast<size_t>(o.first)] += o.buffer;
  }
  if (position.ranks() > 1)
    out.norm = machine::collective_seconds(fabric, fabric.crossing(position.grid, parallel::group::all),
                                           comm::Op::all_reduce, 64)
                   .value;
  return out;
}

predict::StageItems stage_items(const StageShape& shape, const StagePieces& pieces,
                                const StageOptions& options) {
  return Items(shape, pieces, options).take();
}

namespace {

/// The most bytes of microbatches in flight. Chunks with equal blocks take their memory from one pool
/// (parallel/pipeline/pool.h).
double in_flight_bytes(const StageShape& shape, const StagePieces& pieces,
                       const pipeline::Schedule& schedule) {
  using pipeline::ActionKind;
  const size_t chunks = shape.chunks.size();
  const bool staged = !shape.embedding || !shape.head;
  std::vector<double> kept(chunks), later(chunks), now(chunks), most(chunks);  // the last two by pool
  std::vector<size_t> pools(chunks);
  for (size_t c = 0; c < chunks; ++c) {
    if (staged) kept[c] = pieces.ends->message;
    for (const LayerPiece* piece : pieces.blocks[c]) {
      kept[c] += piece->kept;
      later[c] += piece->later;
    }
    const auto equal = std::find(pieces.blocks.begin(), pieces.blocks.end(), pieces.blocks[c]);
    pools[c] = static_cast<size_t>(equal - pieces.blocks.begin());
  }
  for (const pipeline::Action& a : schedule.actions) {
    const auto c = static_cast<size_t>(a.chunk);
    double &of_pool = now[pools[c]], &peak = most[pools[c]];
    if (a.kind == ActionKind::forward) of_pool += kept[c];
    if (a.kind == ActionKind::backward) of_pool -= kept[c];
    // Recomputed activations come to those that were kept.
    if (a.kind == ActionKind::backward_data) peak = std::max(peak, of_pool += later[c] - kept[c]);
    if (a.kind == ActionKind::backward_weight) of_pool -= later[c];
    peak = std::max(peak, of_pool);
  }
  return std::accumulate(most.begin(), most.end(), 0.0);
}

}  // namespace

double stage_memory(const StageShape& shape, const StagePieces& pieces, const pipeline::Schedule& schedule,
                    const StageOptions& options) {
  // Buffers of the weights and gradients of layers, of neighbors that overlap.
  const size_t units = shape.gathered.size();
  double most = 0;
  for (size_t unit = shape.embedding ? 0 : 1; unit < units - (shape.head ? 0 : 1); ++unit) {
    double sum = unit + 1 == units ? pieces.ends->with_head : unit == 0 ? 0 : pieces.without_head;
    sum += shape.gathered[unit] + shape.reduced[unit];
    if (options.prefetch && unit > 0) sum += shape.gathered[unit - 1];
    if (options.overlap_reduce && unit + 1 < units) sum += shape.reduced[unit + 1];
    most = std::max(most, sum);
  }
  // Sums that wait for the end leave the gradients of all units whole.
  if (options.sums_later) most += std::accumulate(shape.reduced.begin(), shape.reduced.end(), 0.0);
  return shape.state + in_flight_bytes(shape, pieces, schedule) + most;
}

}  // namespace nrl::planner
