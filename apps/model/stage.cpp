#include "apps/model/stage.h"

#include <bit>

#include <spdlog/fmt/fmt.h>

#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::model {

using memory::SlotSet;

Stage::Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows)
    : chunks_(std::move(chunks)), rows_(rows) {
  for (const Chunk& chunk : chunks_) {
    auto& places = places_.emplace_back();
    auto& of_layers = slot_place_.emplace_back();
    auto& names = trace_names_.emplace_back();
    for (size_t l = 0; l < chunk.size(); ++l) {
      auto& of_slots = of_layers.emplace_back();
      names.push_back(trace::intern(chunk[l]->name()));
      const auto& slots = chunk[l]->table().slots();
      for (size_t s = 0; s < slots.size(); ++s) {
        of_slots.push_back(slots[s].port ? -1 : static_cast<int>(places.size()));
        if (slots[s].port) continue;
        for (const bool again : {false, true})
          places.push_back({.layer = static_cast<int>(l), .slot = static_cast<int>(s), .again = again});
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
      if (l + 1 < chunk.size()) link(l, p.d_out, l + 1, chunk[l + 1]->ports().d_x);
    }
  }
}

int Stage::add_program(memory::Mode mode, std::vector<int> stashes) {
  NRL_CHECK(stashes.size() == chunks_.size(), "{} counts of stashes for {} chunks", stashes.size(),
            chunks_.size());
  Program program{mode, {}};
  for (size_t c = 0; c < chunks_.size(); ++c)
    program.frames.emplace_back(static_cast<size_t>(stashes[c]),
                                Frame{.buffers = std::vector<int>(places_[c].size(), -1),
                                      .made = std::vector<SlotSet>(chunks_[c].size())});
  programs_.push_back(std::move(program));
  return static_cast<int>(programs_.size()) - 1;
}

void Stage::begin(int program) {
  program_ = &programs_[static_cast<size_t>(program)];
  if (liveness_) {
    NRL_CHECK(program_->first_tick < 0, "program {} is recorded twice", program);
    program_->first_tick = tick_ + 1;
  }
  tick_ = program_->first_tick - 1;
}

void Stage::bind(const memory::MemoryPlan& plan, const std::vector<memory::BufferId>& ids,
                 const memory::Arenas& arenas) {
  for (Program& program : programs_)
    for (size_t c = 0; c < chunks_.size(); ++c)
      for (Frame& frame : program.frames[c]) {
        frame.tensors.assign(frame.buffers.size(), Tensor{});
        for (size_t p = 0; p < frame.buffers.size(); ++p) {
          if (frame.buffers[p] < 0) continue;
          const Place& place = places_[c][p];
          const memory::SlotSpec& spec =
              chunks_[c][static_cast<size_t>(place.layer)]->table().slots()[static_cast<size_t>(place.slot)];
          frame.tensors[p] = make_tensor(arenas.at(plan, ids[static_cast<size_t>(frame.buffers[p])]),
                                         spec.dtype, {rows_[static_cast<size_t>(spec.rows)], spec.width});
        }
      }
  record(nullptr);
}

Run Stage::run_of(int chunk, int stash, const MicroBatch& batch) {
  auto& frames = program_->frames[static_cast<size_t>(chunk)];
  NRL_CHECK(stash >= 0 && static_cast<size_t>(stash) < frames.size(), "stash {} of {}", stash, frames.size());
  Run r;
  r.stage_ = this;
  r.frame_ = &frames[static_cast<size_t>(stash)];
  r.batch_ = &batch;
  r.chunk_ = chunk;
  r.mode_ = program_->mode;
  return r;
}

void Stage::enter_layer(Run& r, int index) {
  r.index_ = index;
  r.layer_ = chunks_[static_cast<size_t>(r.chunk_)][static_cast<size_t>(index)].get();
  r.context_ = &r.layer_->context();
}

void Stage::forward(int chunk, int stash, const MicroBatch& batch, bool last) {
  Run r = run_of(chunk, stash, batch);
  r.last_ = last;
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  for (size_t l = 0; l < layers.size(); ++l) {
    const trace::Range range(trace_names_[static_cast<size_t>(chunk)][l]);
    enter_layer(r, static_cast<int>(l));
    r.cursor_ = 0;
    r.frame_->made[l] = 0;
    layers[l]->forward(r);
  }
}

void Stage::backward(int chunk, int stash, const MicroBatch& batch, Parts parts) {
  Run r = run_of(chunk, stash, batch);
  r.data_ = parts.data;
  r.weight_ = parts.weight;
  r.last_ = parts.last;
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  for (size_t l = layers.size(); l-- > 0;) {
    const trace::Range range(trace_names_[static_cast<size_t>(chunk)][l]);
    enter_layer(r, static_cast<int>(l));
    r.cursor_ = layers[l]->table().forward_steps();
    r.again_ = layers[l]->policy().recomputed();
    layers[l]->backward(r);
  }
}

void Stage::recompute(Run& r, SlotSet wanted) {
  SlotSet& made = r.frame_->made[static_cast<size_t>(r.index_)];
  if ((wanted & r.again_ & ~made) == 0) return;
  Run again = r;
  again.mode_ = memory::recompute;
  again.data_ = again.weight_ = false;
  again.only_ = r.layer_->policy().steps_for(wanted, made);
  again.cursor_ = 0;
  r.layer_->forward(again);
}

int Stage::place(const Run& r, int slot) const {
  const int first =
      slot_place_[static_cast<size_t>(r.chunk_)][static_cast<size_t>(r.index_)][static_cast<size_t>(slot)];
  return first >= 0 && ((r.again_ >> slot) & 1) != 0 ? first + 1 : first;
}

Tensor Stage::tensor(const Run& r, Slot slot) const {
  const int p = place(r, slot.id);
  if (p < 0) return {};
  Tensor t = r.frame_->tensors[static_cast<size_t>(p)];
  if (r.layer_->table().slots()[static_cast<size_t>(slot.id)].rows == token_rows)
    t.shape[0] = r.batch_->ids.dim(0);
  return t;
}

int Stage::buffer(int chunk, Frame& frame, int place) {
  int& number = frame.buffers[static_cast<size_t>(place)];
  if (number < 0) {
    const auto c = static_cast<size_t>(chunk);
    const Place& of = places_[c][static_cast<size_t>(place)];
    const Layer& layer = *chunks_[c][static_cast<size_t>(of.layer)];
    const memory::SlotSpec& spec = layer.table().slots()[static_cast<size_t>(of.slot)];
    number = liveness_->add(fmt::format("{} {}{}", layer.name(), spec.name, of.again ? " (recomputed)" : ""),
                            rows_[static_cast<size_t>(spec.rows)] * spec.width * size_of(spec.dtype),
                            memory::Category::activations);
  }
  return number;
}

int Stage::next_tick() {
  ++tick_;
  if (at_tick_ && !liveness_) at_tick_(tick_);
  return tick_;
}

bool Stage::tick(Run& r, const memory::Step& step) {
  const int now = next_tick();
  if (!liveness_) return true;
  const auto number = [&](int slot) {
    const int p = place(r, slot);
    return p < 0 ? -1 : buffer(r.chunk_, *r.frame_, p);
  };
  for (SlotSet set = step.reads; set != 0; set &= set - 1)
    if (const int b = number(std::countr_zero(set)); b >= 0) liveness_->use(b, now, false);
  // In a recomputation a step also writes slots that were kept, with the same bits.
  const SlotSet begins = step.writes & ~step.reads & (r.mode_ == memory::recompute ? r.again_ : ~SlotSet{0});
  for (SlotSet set = step.writes; set != 0; set &= set - 1) {
    const int slot = std::countr_zero(set);
    if (const int b = number(slot); b >= 0) liveness_->use(b, now, ((begins >> slot) & 1) != 0);
  }
  for (const memory::TakeOver& t : step.take_over) {
    if ((t.output.bit() & begins) == 0) continue;
    const int input = number(t.input.id);
    if (input >= 0) liveness_->may_take_over(number(t.output.id), input, now);
  }
  return false;
}

int Stage::place_of(int chunk, int layer, Slot slot) const {
  return slot_place_[static_cast<size_t>(chunk)][static_cast<size_t>(layer)][static_cast<size_t>(slot.id)];
}

void Stage::receive_forward(int chunk, int stash, int from_stash) {
  const Chunk& before = chunks_[static_cast<size_t>(chunk - 1)];
  hand_over(chunk - 1, from_stash,
            place_of(chunk - 1, static_cast<int>(before.size()) - 1, before.back()->ports().out), chunk,
            stash, place_of(chunk, 0, chunks_[static_cast<size_t>(chunk)].front()->ports().out));
}

void Stage::receive_backward(int chunk, int stash, int from_stash) {
  const Chunk& here = chunks_[static_cast<size_t>(chunk)];
  const Chunk& behind = chunks_[static_cast<size_t>(chunk + 1)];
  hand_over(chunk + 1, from_stash, place_of(chunk + 1, 0, behind.front()->ports().d_out), chunk, stash,
            place_of(chunk, static_cast<int>(here.size()) - 1, here.back()->ports().d_x));
}

void Stage::hand_over(int from_chunk, int from_stash, int from_place, int to_chunk, int to_stash,
                      int to_place) {
  const int now = next_tick();
  Frame& from = program_->frames[static_cast<size_t>(from_chunk)][static_cast<size_t>(from_stash)];
  Frame& to = program_->frames[static_cast<size_t>(to_chunk)][static_cast<size_t>(to_stash)];
  if (liveness_) {
    const int input = buffer(from_chunk, from, from_place), output = buffer(to_chunk, to, to_place);
    liveness_->use(input, now, false);
    liveness_->use(output, now, true);
    liveness_->may_take_over(output, input, now);
    return;
  }
  const Tensor& x = from.tensors[static_cast<size_t>(from_place)];
  const Tensor& y = to.tensors[static_cast<size_t>(to_place)];
  const Layer& layer = *chunks_[static_cast<size_t>(to_chunk)].front();
  if (x.data != y.data) ops::copy(*layer.context().exec, x, y);
}

}  // namespace nrl::model
