// Offloaded slots of a stage. Every step of their way has a tick, so that the dry run plans the buffers with
// what the copies need, and the run makes the same copies.
#include <algorithm>

#include "apps/model/program/stage.h"
#include "core/trace/trace.h"

namespace nrl::model {

using memory::SlotSet;

Frame& Stage::frame_of(int chunk, int stash) {
  return program_->frames[static_cast<size_t>(chunk)][static_cast<size_t>(stash)];
}

SlotSet Stage::restored(int chunk, const Frame& frame, size_t layer) const {
  const SlotSet below = layer > 0 ? frame.offloaded[layer - 1] : 0;
  return recomputation(chunk).recomputed(layer) | frame.offloaded[layer] |
         Offloading::ports_of(layers(chunk), layer, below);
}

bool Stage::brief(int chunk, size_t layer) const {
  const Chunk& layers = chunks_[static_cast<size_t>(chunk)];
  // The embedding, or the ends of a chunk that receive and send; not the head, which passes nothing on.
  return layer == 0 || (layer + 1 == layers.size() && layers[layer]->ports().out);
}

size_t Stage::last_block(int chunk) const {
  size_t layer = layers(chunk).size() - 1;
  while (layer > 0 && (brief(chunk, layer) || !layers(chunk)[layer]->ports().out)) --layer;
  return layer;
}

void Stage::offload(const Run& r, size_t layer, int stash) {
  // Layers that move nothing hide copies too, except the last one, after which most slots are kept.
  const bool moves = offloading_[static_cast<size_t>(r.chunk_)].of(layer) != 0;
  if (!brief(r.chunk_, layer) && (moves || layer + 1 >= last_block(r.chunk_))) finish_offloads();
  if (program_->mode != memory::training) return;
  const Offloading& offloading = offloading_[static_cast<size_t>(r.chunk_)];
  SlotSet slots = offloading.of(layer);
  if (next_ && next_->backward && next_->chunk == r.chunk_ && next_->stash == stash)
    slots &= ~offloading.first_used(layer, next_->parts.dgrad, next_->parts.wgrad);
  if (slots == 0) return;
  r.frame_->offloaded[layer] = slots;
  start({.to_host = true,
         .chunk = r.chunk_,
         .frame = r.frame_,
         .layer = static_cast<int>(layer),
         .slots = slots});
}

void Stage::fetch(const Run& r, size_t layer, Parts parts) {
  const auto& uses = offloading_[static_cast<size_t>(r.chunk_)].uses(layer, parts.dgrad, parts.wgrad);
  if (uses.empty()) return;
  start_fetch(r.chunk_, *r.frame_, layer, parts);
  for (const Copies& copies : fetches_) finish(copies);
  fetches_.clear();
}

void Stage::prefetch(const Run& r, size_t layer, const Pass& pass) {
  if (program_->mode != memory::training || !fetches_.empty()) return;
  // Fetches for the next layer or, if it needs nothing and `far`, for the next lower one that does. Returns
  // whether there is a next layer.
  const auto from = [&](const Pass& p, size_t layers, bool far) {
    bool any = false;
    for (size_t l = layers; l-- > 0;) {
      if (brief(p.chunk, l)) continue;
      any = true;
      start_fetch(p.chunk, frame_of(p.chunk, p.stash), l, p.parts);
      if (!far || !fetches_.empty()) break;
    }
    return any;
  };
  if (pass.backward) {
    // Slots fetched early occupy memory that the blocks above have released.
    if (from(pass, layer, layer < last_block(r.chunk_))) return;
  } else {
    for (size_t l = layer + 1; l < layers(r.chunk_).size(); ++l)
      if (!brief(r.chunk_, l)) return;
  }
  if (next_ && next_->backward) from(*next_, layers(next_->chunk).size(), false);
}

void Stage::start_fetch(int chunk, Frame& frame, size_t layer, Parts parts) {
  for (const Offloading::Use& use :
       offloading_[static_cast<size_t>(chunk)].uses(layer, parts.dgrad, parts.wgrad)) {
    const auto l = static_cast<size_t>(use.layer);
    const SlotSet slots = use.slots & frame.offloaded[l] & ~frame.fetched[l];
    if (slots == 0) continue;
    const bool leaving = std::any_of(offloads_.begin(), offloads_.end(), [&](const Copies& c) {
      return c.frame == &frame && c.layer == use.layer;
    });
    if (leaving) finish_offloads();
    frame.fetched[l] |= slots;
    start({.to_host = false, .chunk = chunk, .frame = &frame, .layer = use.layer, .slots = slots});
  }
}

template <class F>
void Stage::for_each_buffer(const Copies& c, bool begins, F&& work) {
  const int now = next_tick();
  for (SlotSet set = c.slots; set != 0; set &= set - 1) {
    const int first = forward_buffer(c.chunk, c.layer, Slot{static_cast<int8_t>(memory::first_slot(set))});
    const int on_device = first + (c.to_host ? written : restored_to), host = first + on_host;
    const int from = c.to_host ? on_device : host, to = c.to_host ? host : on_device;
    if (liveness_) {
      liveness_->use(liveness_id(c.chunk, *c.frame, from), now, false);
      liveness_->use(liveness_id(c.chunk, *c.frame, to), now, begins);
    } else {
      work(from, to);
    }
  }
}

void Stage::start(Copies c) {
  list_.clear();
  for_each_buffer(c, true, [&](int from, int to) {
    list_.push_back({.to = c.frame->tensors[static_cast<size_t>(to)].data,
                     .from = c.frame->tensors[static_cast<size_t>(from)].data,
                     .bytes = static_cast<size_t>(bytes_of(slot_of(c.chunk, from)))});
  });
  if (!liveness_ && !exec().needed) {
    const trace::Range range(c.to_host ? "offload" : "fetch");
    c.ticket =
        copies_.start(list_, c.to_host ? device::CopyKind::device_to_host : device::CopyKind::host_to_device);
  }
  (c.to_host ? offloads_ : fetches_).push_back(c);
}

void Stage::finish(const Copies& c) {
  for_each_buffer(c, false, [](int, int) {});
  if (c.ticket >= 0) copies_.finish(c.ticket);
}

void Stage::finish_offloads() {
  for (const Copies& copies : offloads_) finish(copies);
  offloads_.clear();
}

void Stage::end() {
  finish_offloads();
  NRL_CHECK(fetches_.empty(), "offloaded activations were fetched and not used");
}

}  // namespace nrl::model
