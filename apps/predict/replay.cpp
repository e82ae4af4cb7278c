#include "apps/predict/replay.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace nrl::predict {
namespace {

class Rank {
 public:
  Rank(size_t slots, const machine::Overlap& overlap, bool spans) : overlap_(overlap), wants_spans_(spans) {
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
    for (const Operation& o : store_) {
      if (o.resource == Span::Resource::waits) continue;
      double from = o.begin;
      for (const auto& [begin, end] : o.shared) {
        note(o.resource, from, begin, o.source);
        from = end;
      }
      note(o.resource, from, o.end, o.source);
    }
    std::stable_sort(out_.spans.begin(), out_.spans.end(),
                     [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (const SlotTime& slot : out_.slots) out_.busy += slot.busy;
    return std::move(out_);
  }

 private:
  struct Operation {
    double begin = 0, end = 0;
    comm::Purpose purpose = comm::Purpose::layers;
    comm::Op op = comm::Op::all_reduce;
    Span::Resource resource = Span::Resource::waits;  // waits: no link
    int source = -1;
    std::vector<std::pair<double, double>> shared;  // with operations of layers
  };
  /// A link.
  struct Line {
    double layers_free = 0;    // the end of the last operation of a layer
    std::vector<size_t> data;  // operations for gradients and weights, in store_, in order
    size_t first = 0;          // those before have ended
  };

  void call(const Item& item) {
    SlotTime& slot = out_.slots[item.slot];
    slot.host += item.host;
    now_ += item.host;
    const double begin = now_;
    std::erase_if(in_flight_, [&](size_t o) { return store_[o].end <= now_; });
    double left = item.seconds;
    while (left > 0) {
      // The next time at which an operation starts or ends. Those behind one in flight are delayed with it.
      const Operation* active = nullptr;
      double until = std::numeric_limits<double>::infinity();
      std::array<bool, 2> occupied{};
      for (const size_t index : in_flight_) {
        Operation& o = store_[index];
        if (o.begin > now_ || o.end <= now_) continue;
        const double end = now_ + (o.end - now_) * overlap_.of(item.row, o.op).operation;
        if (end <= now_) {  // the rest is too short for a time
          o.end = now_;
          continue;
        }
        if (!active) active = &o;
        until = std::min(until, end);
        occupied[line_of(o)] = true;
      }
      for (const size_t index : in_flight_) {
        const Operation& o = store_[index];
        if (o.begin > now_ && !occupied[line_of(o)]) until = std::min(until, o.begin);
      }
      const double rate = active ? 1 / overlap_.of(item.row, active->op).call : 1;
      const bool done = (until - now_) * rate >= left;
      const double passed = done ? left / rate : until - now_;
      if (active) slot.exposed[static_cast<size_t>(active->purpose)] += passed * (1 - rate);
      left = done ? 0 : left - passed * rate;
      if (active) delay(item.row, passed);
      now_ = done ? now_ + passed : until;
    }
    slot.compute += item.seconds;
    slot.busy.processors += item.seconds;
    note(Span::Resource::processors, begin, now_, item.source);
  }

  /// Operations in flight end later, because a call runs beside them for `passed` seconds from now on, and
  /// those behind them on their links start later.
  void delay(machine::Overlap::Row row, double passed) {
    std::array<double, 2> late{};
    for (const size_t index : in_flight_) {
      Operation& o = store_[index];
      if (o.begin > now_ || o.end <= now_) continue;
      const double factor = overlap_.of(row, o.op).operation;
      const bool ends = (o.end - now_) * factor <= passed;
      const double by = ends ? now_ + passed - o.end : passed * (1 - 1 / factor);
      if (by <= 0) continue;
      o.end += by;
      for (auto& [begin, end] : o.shared) {
        if (begin > now_) begin += by;
        if (end > now_) end += by;
      }
      double& of_line = late[line_of(o)];
      of_line = std::max(of_line, by);
    }
    if (late[0] + late[1] == 0) return;
    for (const size_t index : in_flight_) {
      Operation& o = store_[index];
      const double by = late[line_of(o)];
      if (o.begin <= now_ || by == 0) continue;
      o.begin += by;
      o.end += by;
      for (auto& [begin, end] : o.shared) begin += by, end += by;
    }
    for (size_t i = 0; i < late.size(); ++i)
      if (lines_[i].layers_free > now_) lines_[i].layers_free += late[i];
  }

  static size_t line_of(const Operation& o) { return o.resource == Span::Resource::adapter ? 1 : 0; }

  void start(const Item& item) {
    out_.slots[item.slot].exposed[static_cast<size_t>(item.purpose)] += item.host;
    now_ += item.host;
    Operation o;
    o.begin = now_;
    o.purpose = item.purpose;
    o.op = item.op;
    if (const Operation* before = open(item.after)) o.begin = std::max(o.begin, before->end);
    if (item.link != machine::Link::none) {
      const bool adapter = item.link == machine::Link::adapter;
      occupy(lines_[adapter ? 1 : 0], o, item.seconds);
      o.source = item.source;
      o.resource = adapter ? Span::Resource::adapter : Span::Resource::node;
      Busy& busy = out_.slots[item.slot].busy;
      (adapter ? busy.adapter : busy.node) += item.seconds;
    } else {
      o.end = o.begin + item.seconds;
    }
    if (item.operation >= 0) {
      const auto number = static_cast<size_t>(item.operation);
      if (number >= operations_.size()) operations_.resize(number + 1, none);
      operations_[number] = store_.size();
    }
    if (overlap_.any() && item.link != machine::Link::none) in_flight_.push_back(store_.size());
    store_.push_back(std::move(o));
  }

  /// Operations of one kind, layers' or data's, follow each other. Data on the link when an operation of a
  /// layer starts shares it: both advance at half the rate, as operations of two communicators do. Data
  /// starts after operations of layers that are in flight.
  void occupy(Line& line, Operation& o, double seconds) {
    const bool data = o.purpose == comm::Purpose::gradients || o.purpose == comm::Purpose::weights ||
                      o.purpose == comm::Purpose::scalars;
    o.begin = std::max(o.begin, line.layers_free);
    if (data) {
      if (!line.data.empty()) o.begin = std::max(o.begin, store_[line.data.back()].end);
      o.end = o.begin + seconds;
      line.data.push_back(store_.size());
      return;
    }
    while (line.first < line.data.size() && store_[line.data[line.first]].end <= o.begin) ++line.first;
    double at = o.begin, left = seconds;
    for (size_t i = line.first; i < line.data.size(); ++i) {
      Operation& other = store_[line.data[i]];
      if (i > line.first) {  // behind one that takes longer now
        const double late = std::max(0.0, store_[line.data[i - 1]].end - other.begin);
        other.begin += late;
        other.end += late;
      }
      if (left <= 0) continue;
      if (other.begin > at) {
        const double alone = std::min(left, other.begin - at);
        at += alone;
        left -= alone;
        if (left <= 0) continue;
      }
      const double both = std::min(left, other.end - at);
      other.shared.emplace_back(at, at + 2 * both);
      other.end += both;
      at += 2 * both;
      left -= both;
    }
    o.end = at + left;
    line.layers_free = o.end;
  }

  /// An operation that was started and not waited for; else null.
  const Operation* open(int operation) const {
    const auto number = static_cast<size_t>(operation);
    if (operation < 0 || number >= operations_.size() || operations_[number] == none) return nullptr;
    return &store_[operations_[number]];
  }

  void wait(const Item& item) {
    const Operation* const waited = open(item.operation);
    if (!waited) return;
    const Operation& o = *waited;
    operations_[static_cast<size_t>(item.operation)] = none;
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

  const machine::Overlap& overlap_;
  bool wants_spans_;
  Replay out_;
  double now_ = 0;
  std::array<Line, 2> lines_;  // node, adapter
  std::vector<Operation> store_;
  static constexpr size_t none = std::numeric_limits<size_t>::max();
  std::vector<size_t> operations_;  // in store_, by number; none: not open
  std::vector<size_t> in_flight_;   // in store_; some have ended
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

Replay replay(std::span<const Item> items, size_t slots, const machine::Overlap& overlap, bool spans) {
  Rank rank(slots, overlap, spans);
  for (const Item& item : items) rank.execute(item);
  return rank.finish();
}

}  // namespace nrl::predict
