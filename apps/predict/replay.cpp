#include "apps/predict/replay.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace nrl::predict {
namespace {

class Rank {
 public:
  Rank(size_t slots, double slowdown, bool spans) : slowdown_(slowdown), wants_spans_(spans) {
    out_.slots.resize(slots);
  }

  void execute(const Item& item) {
    switch (item.kind) {
      case Item::Kind::call:
        return call(item);
      case Item::Kind::start:
        return start(item);
      case Item::Kind::wait:
        return wait(item);
      case Item::Kind::until:
        return until(item);
    }
  }

  Replay finish() {
    out_.end = now_;
    for (const SlotTime& slot : out_.slots) out_.busy += slot.busy;
    return std::move(out_);
  }

 private:
  struct Operation {
    double begin = 0, end = 0;
    comm::Purpose purpose = comm::Purpose::layers;
  };

  void call(const Item& item) {
    SlotTime& slot = out_.slots[item.slot];
    slot.host += item.host;
    now_ += item.host;
    const double begin = now_;
    std::erase_if(in_flight_, [&](const Operation& o) { return o.end <= now_; });
    double left = item.seconds;
    while (left > 0) {
      // The next time at which an operation starts or ends.
      const Operation* active = nullptr;
      double until = std::numeric_limits<double>::infinity();
      for (const Operation& o : in_flight_) {
        if (o.begin <= now_ && o.end > now_) {
          if (!active) active = &o;
          until = std::min(until, o.end);
        } else if (o.begin > now_) {
          until = std::min(until, o.begin);
        }
      }
      const double rate = active ? 1 / (1 + slowdown_) : 1;
      const bool done = (until - now_) * rate >= left;
      const double passed = done ? left / rate : until - now_;
      if (active) slot.exposed[static_cast<size_t>(active->purpose)] += passed * (1 - rate);
      left = done ? 0 : left - passed * rate;
      now_ = done ? now_ + passed : until;
    }
    slot.compute += item.seconds;
    slot.busy.processors += item.seconds;
    note(Span::Resource::processors, begin, now_, item.source);
  }

  void start(const Item& item) {
    out_.slots[item.slot].exposed[static_cast<size_t>(item.purpose)] += item.host;
    now_ += item.host;
    Operation o{.begin = now_, .purpose = item.purpose};
    if (const auto before = operations_.find(item.after); before != operations_.end())
      o.begin = std::max(o.begin, before->second.end);
    if (item.link != machine::Link::none) {
      const bool adapter = item.link == machine::Link::adapter;
      double& free = free_[adapter ? 1 : 0];
      o.begin = std::max(o.begin, free);
      free = o.begin + item.seconds;
      Busy& busy = out_.slots[item.slot].busy;
      (adapter ? busy.adapter : busy.node) += item.seconds;
      note(adapter ? Span::Resource::adapter : Span::Resource::node, o.begin, free, item.source);
    }
    o.end = o.begin + item.seconds;
    operations_[item.operation] = o;
    if (slowdown_ > 0 && item.seconds > 0) in_flight_.push_back(o);
  }

  void wait(const Item& item) {
    const auto found = operations_.find(item.operation);
    if (found == operations_.end()) return;
    const Operation o = found->second;
    operations_.erase(found);
    if (o.end <= now_) return;
    out_.slots[item.slot].exposed[static_cast<size_t>(o.purpose)] += o.end - now_;
    note(Span::Resource::waits, now_, o.end, item.source);
    now_ = o.end;
  }

  void until(const Item& item) {
    if (item.seconds > now_) {
      out_.slots[item.slot].exposed[static_cast<size_t>(item.purpose)] += item.seconds - now_;
      note(Span::Resource::waits, now_, item.seconds, item.source);
      now_ = item.seconds;
    }
    out_.reached.push_back(now_);
  }

  void note(Span::Resource resource, double begin, double end, int source) {
    if (wants_spans_ && end > begin) out_.spans.push_back({resource, begin, end, source});
  }

  double slowdown_;
  bool wants_spans_;
  Replay out_;
  double now_ = 0;
  std::array<double, 2> free_{};  // node, adapter
  std::unordered_map<int, Operation> operations_;
  std::vector<Operation> in_flight_;  // some have ended
};

}  // namespace

double SlotTime::total() const {
  return compute + host + std::accumulate(exposed.begin(), exposed.end(), 0.0);
}

Busy& Busy::operator+=(const Busy& other) {
  processors += other.processors;
  node += other.node;
  adapter += other.adapter;
  return *this;
}

SlotTime SlotTime::operator*(double factor) const {
  SlotTime out = *this;
  for (double* x : {&out.compute, &out.host, &out.busy.processors, &out.busy.node, &out.busy.adapter})
    *x *= factor;
  for (double& x : out.exposed) x *= factor;
  return out;
}

SlotTime& SlotTime::operator+=(const SlotTime& other) {
  compute += other.compute;
  host += other.host;
  busy += other.busy;
  for (size_t i = 0; i < exposed.size(); ++i) exposed[i] += other.exposed[i];
  return *this;
}

Replay replay(std::span<const Item> items, size_t slots, double slowdown, bool spans) {
  Rank rank(slots, slowdown, spans);
  for (const Item& item : items) rank.execute(item);
  return rank.finish();
}

}  // namespace nrl::predict
