#include "parallel/program/live_ranges.h"

#include "core/base/error.h"

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
    for (const memory::TakeOver& t : layers_.of(s.layer).table->steps()[s.index].take_over) {
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
    const SlotInfo& info = layers_.slots[slot];
    const bool recomputed = (layers_.of(info.layer).policy->recomputed() & info.slot.bit()) != 0;
    return buffer(out_.device, 2, at, slot,
                  at % 2 == 0  ? ""
                  : recomputed ? " (recomputed)"
                               : " (fetched)",
                  memory::Tier::device);
  }
  int host(SlotId slot, int microbatch) {
    return buffer(out_.host, 1, places_.index(slot, microbatch), slot, " (offloaded)", memory::Tier::host);
  }
  /// The buffer `at`. The buffers of the other stashes are `stride` apart.
  int buffer(std::vector<int>& ids, size_t stride, size_t at, SlotId slot, const char* what,
             memory::Tier tier) {
    if (ids[at] >= 0) return ids[at];
    const std::string name = layers_.name(slot) + what;
    const int64_t bytes = layers_.slots[slot].bytes;
    constexpr memory::Category category = memory::Category::activations;
    if (!p_.period.exchanges_stashes) return ids[at] = liveness_.add(name, bytes, category, tier);
    const int stashes = p_.stashes.count(layers_.chunk_of(slot));
    const size_t first = stride * places_.index_in(slot, 0) + at % stride;
    const int family = liveness_.add_family(name, bytes, category, tier, stashes);
    for (int i = 0; i < stashes; ++i) ids[first + stride * static_cast<size_t>(i)] = family + i;
    return ids[at];
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

namespace {

class BucketRecorder {
 public:
  BucketRecorder(const Program& program, const Layers& layers, int first_tick, RangesOfBuckets& to)
      : p_(program), layers_(layers), first_tick_(first_tick), to_(to) {}

  void all() {
    std::array<States, 2> at_begin;
    for (size_t i = 0; i < p_.steps.size(); ++i) {
      if (i == p_.period.begin) at_begin = states_;
      NRL_CHECK(p_.period.times == 0 || i != p_.period.end || at_begin == states_,
                "the period of the program ends with other weights or gradients than it begins with");
      tick_ = first_tick_ + static_cast<int>(i);
      step(p_.steps[i]);
    }
    NRL_CHECK(states_ == (std::array<States, 2>{}), "weights or gradients are in use at the program's end");
  }

 private:
  enum class State : uint8_t {
    unused,   // others may use its buffer
    started,  // weights: being gathered; gradients: being summed
    ready,    // weights can be read, gradients be added to
  };
  enum Kind : uint8_t { weights, gradients };
  using States = std::map<BucketId, State>;  // without unused ones

  void step(const Step& s) {
    const bool waits = s.kind == StepKind::wait;
    if (s.begins_visit()) visit(s);
    if (waits && s.of == StepKind::reduce && s.buckets == 0)
      while (!states_[gradients].empty())
        move(gradients, states_[gradients].begin()->first, State::started, State::unused);
    for (const int bucket : p_.buckets_of(s)) {
      const BucketId b{s.index, bucket};
      if (s.kind == StepKind::gather) {
        move(weights, b, State::unused, State::started);
      } else if (waits && s.of == StepKind::gather) {
        move(weights, b, State::started, State::ready);
      } else if (s.kind == StepKind::release) {
        move(weights, b, State::ready, State::unused);
      } else if (s.kind == StepKind::open) {
        move(gradients, b, State::unused, State::ready);
        to_[b].microbatches = std::max(to_[b].microbatches, s.microbatches);
      } else if (waits) {
        move(gradients, b, State::started, State::unused);
      } else {
        move(gradients, b, State::ready, State::started);
      }
    }
  }

  void visit(const Step& s) {
    const Layer& layer = layers_.of(s.layer);
    for (const BucketId& b : layer.weights[s.backward])
      NRL_CHECK(is(weights, b, State::ready), "{} reads weights that are not gathered: {}", layer.name,
                layers_.name(b));
    if (p_.mode != memory::training) return;
    for (const BucketId& b : layer.gradients[s.backward])
      NRL_CHECK(is(gradients, b, State::ready), "{} adds to gradients that are not open: {}", layer.name,
                layers_.name(b));
  }

  bool is(Kind kind, BucketId b, State state) const {
    const auto at = states_[kind].find(b);
    return state == (at == states_[kind].end() ? State::unused : at->second);
  }
  void move(Kind kind, BucketId b, State from, State to) {
    NRL_CHECK(is(kind, b, from), "a step of {} comes too early or too late", layers_.name(b));
    std::vector<memory::Lifetime>& lives = kind == weights ? to_[b].weights : to_[b].gradients;
    states_[kind][b] = to;
    if (from == State::unused) lives.push_back({tick_, tick_});
    if (to != State::unused) return;
    lives.back().last = tick_;
    states_[kind].erase(b);
  }

  const Program& p_;
  const Layers& layers_;
  const int first_tick_;
  int tick_ = 0;
  std::array<States, 2> states_;  // by Kind
  RangesOfBuckets& to_;
};

}  // namespace

void add_bucket_ranges(const Program& program, const Layers& layers, int first_tick, RangesOfBuckets& to) {
  BucketRecorder(program, layers, first_tick, to).all();
}

}  // namespace nrl::program
