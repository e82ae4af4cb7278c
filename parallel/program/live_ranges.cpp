#include "parallel/program/live_ranges.h"

namespace nrl::program {

namespace {

class Recorder {
 public:
  Recorder(const Program& program, const Layers& layers, memory::Liveness& liveness, int first_tick)
      : p_(program), layers_(layers), liveness_(liveness), places_(program, layers) {
    out_.device.assign(places_.buffers(), -1);
    out_.host.assign(places_.buffers() / 2, -1);
    out_.first_tick = first_tick;
  }

  Buffers all() {
    for (size_t i = 0; i < p_.steps.size(); ++i) {
      const Step& s = p_.steps[i];
      places_.enter(p_, s);
      tick_ = out_.first_tick + static_cast<int>(i);
      const StepKind kind = s.kind == StepKind::wait ? s.of : s.kind;
      if (kind == StepKind::offload || kind == StepKind::fetch)
        moves(s, kind == StepKind::offload, s.kind != StepKind::wait);
      else
        accesses(s);
    }
    return std::move(out_);
  }

 private:
  void accesses(const Step& s) {
    const auto reads = p_.reads(s), writes = p_.writes(s);
    for (const Use& u : reads) liveness_.use(device(u.slot(), s.microbatch), tick_, false);
    for (const Use& u : writes)
      liveness_.use(device(u.slot(), s.microbatch), tick_,
                    s.kind != StepKind::wait && !names(reads, u.slot()));
    if (s.kind == StepKind::copy) may_take_over(writes[0].slot(), reads[0].slot(), s.microbatch);
    if (s.kind != StepKind::compute) return;
    for (const memory::TakeOver& t :
         layers_.of(s.layer).table->steps()[static_cast<size_t>(s.index)].take_over) {
      const SlotId output = layers_.slot(s.layer, t.output), input = layers_.slot(s.layer, t.input);
      if (output >= 0 && input >= 0 && names(writes, output) && !names(reads, output))
        may_take_over(output, input, s.microbatch);
    }
  }

  void may_take_over(SlotId output, SlotId input, int microbatch) {
    liveness_.may_take_over(device(output, microbatch), device(input, microbatch), tick_);
  }

  void moves(const Step& s, bool to_host, bool begins) {
    for (const Use& u : to_host ? p_.reads(s) : p_.writes(s)) {
      if (to_host) {
        liveness_.use(device(u.slot(), s.microbatch), tick_, false);
        liveness_.use(host(u.slot(), s.microbatch), tick_, begins);
      } else {
        liveness_.use(host(u.slot(), s.microbatch), tick_, false);
        liveness_.use(device(u.slot(), s.microbatch), tick_, begins);
      }
    }
  }

  int device(SlotId slot, int microbatch) {
    const size_t at = places_.at(slot, microbatch);
    const SlotInfo& info = layers_.slots[static_cast<size_t>(slot)];
    const bool recomputed = (layers_.of(info.layer).policy->recomputed() & info.slot.bit()) != 0;
    return buffer(out_.device[at], slot,
                  at % 2 == 0  ? ""
                  : recomputed ? " (recomputed)"
                               : " (fetched)",
                  memory::Tier::device);
  }
  int host(SlotId slot, int microbatch) {
    return buffer(out_.host[places_.index(slot, microbatch)], slot, " (offloaded)", memory::Tier::host);
  }
  int buffer(int& id, SlotId slot, const char* what, memory::Tier tier) {
    if (id < 0)
      id = liveness_.add(layers_.name(slot) + what, layers_.slots[static_cast<size_t>(slot)].bytes,
                         memory::Category::activations, tier);
    return id;
  }

  const Program& p_;
  const Layers& layers_;
  memory::Liveness& liveness_;
  Places places_;
  Buffers out_;
  int tick_ = 0;
};

}  // namespace

Buffers live_ranges(const Program& program, const Layers& layers, memory::Liveness& liveness,
                    int& last_tick) {
  Buffers out = Recorder(program, layers, liveness, last_tick + 1).all();
  last_tick += static_cast<int>(program.steps.size());
  return out;
}

}  // namespace nrl::program
