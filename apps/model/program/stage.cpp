#include "apps/model/program/stage.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::model {

using memory::SlotSet;

Stage::Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows)
    : chunks_(std::move(chunks)), rows_(rows) {
  for (const Chunk& chunk : chunks_) {
    offloading_.emplace_back(chunk, recomputations_.emplace_back(chunk));
    auto& keys = buffer_keys_.emplace_back();
    auto& of_layers = forward_buffers_.emplace_back();
    auto& names = trace_names_.emplace_back();
    for (size_t l = 0; l < chunk.size(); ++l) {
      auto& of_slots = of_layers.emplace_back();
      names.push_back(trace::intern(chunk[l]->name()));
      const auto& slots = chunk[l]->table().slots();
      for (size_t s = 0; s < slots.size(); ++s) {
        of_slots.push_back(slots[s].port ? -1 : static_cast<int>(keys.size()));
        if (slots[s].port) continue;
        for (int place = 0; place < places; ++place)
          keys.push_back({.layer = static_cast<int>(l),
                          .slot = static_cast<int>(s),
                          .place = static_cast<Place>(place)});
      }
    }
    const auto link = [&](size_t layer, Slot port, size_t other, Slot slot) {
      if (port && slot)
        of_layers[layer][static_cast<size_t>(port.id)] = of_layers[other][static_cast<size_t>(slot.id)];
    };
    for (size_t l = 0; l < chunk.size(); ++l) {
      const Ports& p = chunk[l]->ports();
      if (l > 0) {
        link(l, p.x, l - 1, chunk[l - 1]->ports().out);
        link(l, p.residual, l - 1, chunk[l - 1]->ports().sum);
      }
      if (l + 1 < chunk.size()) {
        link(l, p.d_out, l + 1, chunk[l + 1]->ports().d_x);
        link(l, p.d_out_amax, l + 1, chunk[l + 1]->ports().d_x_amax);
      }
    }
  }
}

int Stage::add_program(memory::Mode mode, std::vector<int> stashes) {
  NRL_CHECK(stashes.size() == chunks_.size(), "{} stash counts for {} chunks", stashes.size(),
            chunks_.size());
  Program program;
  program.mode = mode;
  for (size_t c = 0; c < chunks_.size(); ++c)
    program.frames.emplace_back(static_cast<size_t>(stashes[c]),
                                Frame{.buffers = std::vector<int>(buffer_keys_[c].size(), -1),
                                      .made = std::vector<SlotSet>(chunks_[c].size()),
                                      .offloaded = std::vector<SlotSet>(chunks_[c].size()),
                                      .fetched = std::vector<SlotSet>(chunks_[c].size())});
  programs_.push_back(std::move(program));
  return static_cast<int>(programs_.size()) - 1;
}

void Stage::begin(int program) {
  program_ = &programs_[static_cast<size_t>(program)];
  if (liveness_) {
    NRL_CHECK(program_->first_tick < 0, "program {} was already recorded", program);
    program_->first_tick = tick_ + 1;
  }
  tick_ = program_->first_tick - 1;
  next_rounds_ = 0;
  next_.reset();
  if (watch_ && !liveness_) watch_->begin_program(program_->mode);
}

void Stage::bind(const memory::MemoryPlan& plan, const std::vector<memory::BufferId>& ids,
                 const memory::Arenas& arenas) {
  for (Program& program : programs_)
    for (size_t c = 0; c < chunks_.size(); ++c)
      for (Frame& frame : program.frames[c]) {
        frame.tensors.assign(frame.buffers.size(), Tensor{});
        for (const auto& layer : chunks_[c])
          frame.host.emplace_back(static_cast<size_t>(layer->host_values()));
        for (size_t b = 0; b < frame.buffers.size(); ++b) {
          if (frame.buffers[b] < 0) continue;
          const BufferKey& key = buffer_keys_[c][b];
          const memory::SlotSpec& spec =
              chunks_[c][static_cast<size_t>(key.layer)]->table().slots()[static_cast<size_t>(key.slot)];
          frame.tensors[b] = make_tensor(arenas.at(plan, ids[static_cast<size_t>(frame.buffers[b])]),
                                         spec.dtype, {rows_[static_cast<size_t>(spec.rows)], spec.width});
        }
      }
  record(nullptr);
  const ops::Exec& e = exec();
  copies_ = memory::HostCopies(e.device, e.stream, e.threads, arenas);
}

Run Stage::run_of(int chunk, int stash, const MicroBatch& batch, Order order) {
  auto& frames = program_->frames[static_cast<size_t>(chunk)];
  NRL_CHECK(stash >= 0 && static_cast<size_t>(stash) < frames.size(), "stash {} of {}", stash, frames.size());
  Run r;
  r.stage_ = this;
  r.frame_ = &frames[static_cast<size_t>(stash)];
  r.batch_ = &batch;
  r.in_flight_ = &in_flight_;
  r.chunk_ = chunk;
  r.mode_ = program_->mode;
  r.first_ = order.first;
  r.last_ = order.last;
  return r;
}

void Stage::visit(Run& r, int index, bool backward, const std::function<void(Layer&)>& work) {
  const trace::Range range(trace_names_[static_cast<size_t>(r.chunk_)][static_cast<size_t>(index)]);
  r.index_ = index;
  r.layer_ = chunks_[static_cast<size_t>(r.chunk_)][static_cast<size_t>(index)].get();
  r.context_ = &r.layer_->context();
  LayerVisit now{.layer = r.layer_,
                 .backward = backward,
                 .dgrad = !backward || r.dgrad_,
                 .wgrad = !backward || r.wgrad_,
                 .first_tick = tick_ + 1};
  if (watch_ && !liveness_) watch_->begin_layer();
  work(*r.layer_);
  NRL_CHECK(in_flight_.empty(), "{} does not wait for all communication", r.layer_->name());
  if (watch_ && !liveness_) watch_->end_layer();
  if (!liveness_) return;
  now.last_tick = std::max(tick_, now.first_tick);
  program_->visits.push_back(now);
}

void Stage::forward(int chunk, int stash, const MicroBatch& batch, Order order) {
  Run r = run_of(chunk, stash, batch, order);
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  for (size_t l = 0; l < layers.size(); ++l) r.frame_->offloaded[l] = r.frame_->fetched[l] = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    prefetch(r, l, {.chunk = chunk, .stash = stash, .parts = {}});
    visit(r, static_cast<int>(l), false, [&](Layer& layer) {
      r.cursor_ = 0;
      r.frame_->made[l] = 0;
      layer.forward(r);
    });
    offload(r, l, stash);
  }
}

void Stage::backward(int chunk, int stash, const MicroBatch& batch, Parts parts, Order order) {
  Run r = run_of(chunk, stash, batch, order);
  r.dgrad_ = parts.dgrad;
  r.wgrad_ = parts.wgrad;
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  for (size_t l = layers.size(); l-- > 0;) {
    fetch(r, l, parts);
    prefetch(r, l, {.backward = true, .chunk = chunk, .stash = stash, .parts = parts});
    if (parts.dgrad)
      for (const Recomputation::Visit& again : recomputation(chunk).before(l)) run_again(r, again);
    visit(r, static_cast<int>(l), true, [&](Layer& layer) {
      r.cursor_ = layer.table().forward_steps();
      r.restored_ = restored(chunk, *r.frame_, l);
      layer.backward(r);
    });
    if (!brief(chunk, l)) finish_offloads();
  }
}

void Stage::run_again(const Run& backward, const Recomputation::Visit& again) {
  Run r = backward;
  r.mode_ = memory::recompute;
  r.dgrad_ = r.wgrad_ = false;
  r.recompute_steps_ = again.steps;
  r.restored_ = restored(r.chunk_, *r.frame_, static_cast<size_t>(again.layer));
  visit(r, again.layer, false, [&](Layer& layer) {
    const trace::Range range("recompute");
    r.frame_->made[static_cast<size_t>(again.layer)] |=
        layer.table().writes_of(again.steps) & layer.policy().recomputed();
    r.cursor_ = 0;
    layer.forward(r);
  });
}

void Stage::recompute(Run& r, SlotSet wanted) {
  SlotSet& made = r.frame_->made[static_cast<size_t>(r.index_)];
  if ((wanted & r.policy().recomputed() & ~made) == 0) return;
  const trace::Range range("recompute");
  Run again = r;
  again.mode_ = memory::recompute;
  again.dgrad_ = again.wgrad_ = false;
  again.recompute_steps_ = r.policy().steps_for(wanted, made);
  again.cursor_ = 0;
  r.layer_->forward(again);
}

SlotSet Stage::remake(Run& r, SlotSet possible) {
  SlotSet& made = r.frame_->made[static_cast<size_t>(r.index_)];
  const SlotSet remade = possible & r.policy().recomputed() & ~made;
  made |= remade;
  return remade;
}

int Stage::forward_buffer(int chunk, int layer, Slot slot) const {
  return forward_buffers_[static_cast<size_t>(chunk)][static_cast<size_t>(layer)]
                         [static_cast<size_t>(slot.id)];
}

int Stage::buffer_index(const Run& r, int slot) const {
  const int first = forward_buffer(r.chunk_, r.index_, Slot{static_cast<int8_t>(slot)});
  return first >= 0 && ((r.restored_ >> slot) & 1) != 0 ? first + restored_to : first;
}

Tensor Stage::with_rows(Tensor t, const memory::SlotSpec& slot, const MicroBatch& batch) const {
  const int64_t tokens = batch.ids.dim(0);
  const int64_t own = tokens * rows_[sequence_rows] / rows_[token_rows];
  if (slot.rows == token_rows) t.shape[0] = tokens;
  if (slot.rows == sequence_rows) t.shape[0] = own;
  if (slot.rows < sent_rows || slot.rows > dispatched_rows_by_128) return t;
  const LayerContext& context = chunks_.front().front()->context();
  t.shape[0] = expert_rows(*context.spec, context.layout, own, program_->mode == memory::generation)
                   .of(static_cast<RowDomain>(slot.rows));
  return t;
}

Tensor Stage::tensor(const Run& r, Slot slot) const {
  const int buffer = buffer_index(r, slot.id);
  if (buffer < 0) return {};
  return with_rows(r.frame_->tensors[static_cast<size_t>(buffer)],
                   r.layer_->table().slots()[static_cast<size_t>(slot.id)], *r.batch_);
}

int Stage::liveness_id(int chunk, Frame& frame, int buffer) {
  int& id = frame.buffers[static_cast<size_t>(buffer)];
  if (id < 0) {
    const auto c = static_cast<size_t>(chunk);
    const BufferKey& key = buffer_keys_[c][static_cast<size_t>(buffer)];
    const Layer& layer = *chunks_[c][static_cast<size_t>(key.layer)];
    const memory::SlotSpec& spec = layer.table().slots()[static_cast<size_t>(key.slot)];
    const bool recomputed = ((layer.policy().recomputed() >> key.slot) & 1) != 0;
    const char* const place = key.place == written   ? ""
                              : key.place == on_host ? " (offloaded)"
                              : recomputed           ? " (recomputed)"
                                                     : " (fetched)";
    id = liveness_->add(fmt::format("{} {}{}", layer.name(), spec.name, place), bytes_of(spec),
                        memory::Category::activations,
                        key.place == on_host ? memory::Tier::host : memory::Tier::device);
  }
  return id;
}

int Stage::next_tick() {
  ++tick_;
  if (at_tick_ && !liveness_) at_tick_(tick_);
  return tick_;
}

void Stage::begin_rounds(const Run& r, Slot carried) {
  ++next_rounds_;
  if (!liveness_) return;
  program_->rounds.emplace_back();
  if (!carried) return;
  const int buffer = buffer_index(r, carried.id);
  liveness_->use(liveness_id(r.chunk_, *r.frame_, buffer), next_tick(), true);
}

void Stage::enter_round(int round, bool descending) {
  if (liveness_) return program_->rounds.back().push_back(tick_);
  if (next_rounds_ > program_->rounds.size()) return;  // the schedule repeats the one that was recorded
  const std::vector<int>& ticks = program_->rounds[next_rounds_ - 1];
  const int last = static_cast<int>(ticks.size()) - 2;
  tick_ = ticks[static_cast<size_t>(descending ? std::max(0, last - round) : std::min(round, last))];
}

void Stage::end_rounds() {
  if (liveness_)
    program_->rounds.back().push_back(tick_);
  else if (next_rounds_ <= program_->rounds.size())
    tick_ = program_->rounds[next_rounds_ - 1].back();
}

bool Stage::tick(Run& r, const memory::Step& step, SlotSet remade) {
  const int now = next_tick();
  if (!liveness_) {
    const memory::LayerTable& table = r.layer_->table();
    if (at_step_) at_step_(table, static_cast<size_t>(&step - table.steps().data()));
    return true;
  }
  const auto id_of = [&](int slot) {
    const int buffer = buffer_index(r, slot);
    return buffer < 0 ? -1 : liveness_id(r.chunk_, *r.frame_, buffer);
  };
  for (SlotSet set = step.reads; set != 0; set &= set - 1)
    if (const int id = id_of(memory::first_slot(set)); id >= 0) liveness_->use(id, now, false);
  // A recomputed step also rewrites slots that were kept, with identical bits; those do not begin a lifetime.
  const SlotSet writes = step.writes | remade;
  const SlotSet begins = writes & ~step.reads & ~r.round_.carried &
                         (r.mode_ == memory::recompute ? r.policy().recomputed() : ~SlotSet{0});
  for (SlotSet set = writes; set != 0; set &= set - 1) {
    const int slot = memory::first_slot(set);
    if (const int id = id_of(slot); id >= 0) liveness_->use(id, now, ((begins >> slot) & 1) != 0);
  }
  for (const memory::TakeOver& t : step.take_over) {
    if ((t.output.bit() & begins) == 0) continue;
    const int input = id_of(t.input.id);
    if (input >= 0) liveness_->may_take_over(id_of(t.output.id), input, now);
  }
  return false;
}

void Stage::receive_forward(int chunk, int stash, int from_stash) {
  copy_between(chunk - 1, from_stash, Boundary::output, chunk, stash, Boundary::input);
}

void Stage::receive_backward(int chunk, int stash, int from_stash) {
  copy_between(chunk + 1, from_stash, Boundary::input_gradient, chunk, stash, Boundary::output_gradient);
}

int Stage::boundary_index(int chunk, Boundary which) const {
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  const Ports &first = layers.front()->ports(), &last = layers.back()->ports();
  const auto at = [&](size_t layer, Slot slot) {
    return forward_buffer(chunk, static_cast<int>(layer), slot);
  };
  switch (which) {
    case Boundary::input:
      return at(0, first.out);
    case Boundary::output:
      return at(layers.size() - 1, last.out);
    case Boundary::output_gradient:
      return at(layers.size() - 1, last.d_x);
    case Boundary::input_gradient:
      break;
  }
  return at(0, first.d_out);
}

const memory::SlotSpec& Stage::slot_of(int chunk, int buffer) const {
  const auto c = static_cast<size_t>(chunk);
  const BufferKey& key = buffer_keys_[c][static_cast<size_t>(buffer)];
  return chunks_[c][static_cast<size_t>(key.layer)]->table().slots()[static_cast<size_t>(key.slot)];
}

Stage::BoundaryBuffer Stage::boundary(int chunk, int stash, Boundary which) {
  const int index = boundary_index(chunk, which);
  return {program_->frames[static_cast<size_t>(chunk)][static_cast<size_t>(stash)], index,
          &slot_of(chunk, index)};
}

int64_t Stage::bytes_of(const memory::SlotSpec& slot) const {
  return rows_[static_cast<size_t>(slot.rows)] * slot.width * size_of(slot.dtype);
}

Tensor Stage::message(int chunk, int stash, Boundary which, const MicroBatch& batch, bool begins) {
  const int now = next_tick();
  const BoundaryBuffer b = boundary(chunk, stash, which);
  if (liveness_) {
    liveness_->use(liveness_id(chunk, b.frame, b.index), now, begins);
    return {};
  }
  return with_rows(b.frame.tensors[static_cast<size_t>(b.index)], *b.spec, batch);
}

void Stage::copy_between(int from_chunk, int from_stash, Boundary from, int to_chunk, int to_stash,
                         Boundary to) {
  const int now = next_tick();
  const BoundaryBuffer in = boundary(from_chunk, from_stash, from), out = boundary(to_chunk, to_stash, to);
  if (liveness_) {
    const int input = liveness_id(from_chunk, in.frame, in.index),
              output = liveness_id(to_chunk, out.frame, out.index);
    liveness_->use(input, now, false);
    liveness_->use(output, now, true);
    liveness_->may_take_over(output, input, now);
    return;
  }
  const Tensor& x = in.frame.tensors[static_cast<size_t>(in.index)];
  const Tensor& y = out.frame.tensors[static_cast<size_t>(out.index)];
  if (x.data != y.data) ops::copy(exec(), x, y);
}

}  // namespace nrl::model
