#include "apps/predict/replay.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace nrl::predict {
namespace {

using machine::Link;
using Resource = Span::Resource;

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
      if (o.link == Link::none) continue;
      double from = o.begin;
      for (const auto& [begin, end] : o.shared) {
        note(Resource::link, from, begin, o.source, o.link);
        from = end;
      }
      note(Resource::link, from, o.end, o.source, o.link);
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
    Link link = Link::none;
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
    issued_ += item.issue;
    const double before = item.host + std::max(0.0, issued_ - now_);
    slot.host += before;
    now_ += before;
    const double begin = now_;
    std::erase_if(in_flight_, [&](size_t o) { return store_[o].end <= now_; });
    double left = item.seconds;
    while (left > 0) {
      // The next time at which an operation starts or ends. Those behind one in flight are delayed with it.
      const Operation* active = nullptr;
      double until = std::numeric_limits<double>::infinity();
      std::array<bool, machine::link_count> occupied{};
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
        occupied[line_of(o.link)] = true;
      }
      for (const size_t index : in_flight_) {
        const Operation& o = store_[index];
        if (o.begin > now_ && !occupied[line_of(o.link)]) until = std::min(until, o.begin);
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
    note(Resource::processors, begin, now_, item.source);
    if (item.host_waits) issued_ = now_;
  }

  /// Operations in flight end later, because a call runs beside them for `passed` seconds from now on, and
  /// those behind them on their links start later.
  void delay(machine::Overlap::Row row, double passed) {
    std::array<double, machine::link_count> late{};
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
      double& of_line = late[line_of(o.link)];
      of_line = std::max(of_line, by);
    }
    if (std::all_of(late.begin(), late.end(), [](double by) { return by == 0; })) return;
    for (const size_t index : in_flight_) {
      Operation& o = store_[index];
      const double by = late[line_of(o.link)];
      if (o.begin <= now_ || by == 0) continue;
      o.begin += by;
      o.end += by;
      for (auto& [begin, end] : o.shared) begin += by, end += by;
    }
    for (size_t i = 0; i < late.size(); ++i)
      if (lines_[i].layers_free > now_) lines_[i].layers_free += late[i];
  }

  static size_t line_of(Link link) { return static_cast<size_t>(link); }
  /// Operations of groups run in kernels, which slow others down; copies to and from the host do not.
  static bool shares_processors(Link link) { return link == Link::node || link == Link::adapter; }

  void start(const Item& item) {
    out_.slots[item.slot].exposed[static_cast<size_t>(item.purpose)] += item.host;
    now_ += item.host;
    issued_ += item.issue;
    Operation o;
    o.begin = std::max(now_, issued_);
    o.purpose = item.purpose;
    o.op = item.op;
    if (const Operation* before = open(item.after)) o.begin = std::max(o.begin, before->end);
    if (item.link != Link::none) {
      occupy(lines_[line_of(item.link)], o, item.seconds, item.beside || of_data(item.purpose));
      o.source = item.source;
      o.link = item.link;
      out_.slots[item.slot].busy.of(item.link) += item.seconds;
    } else {
      o.end = o.begin + item.seconds;
    }
    if (item.operation >= 0) {
      const auto number = static_cast<size_t>(item.operation);
      if (number >= operations_.size()) operations_.resize(number + 1, none);
      operations_[number] = store_.size();
    }
    if (overlap_.any() && shares_processors(item.link) && overlap_.shares(item.purpose))
      in_flight_.push_back(store_.size());
    store_.push_back(std::move(o));
  }

  /// Operations of one kind, layers' or data's, follow each other. Data on the link when an operation of a
  /// layer starts shares it: both advance at half the rate, as operations of two communicators do. Data
  /// starts after operations of layers that are in flight.
  void occupy(Line& line, Operation& o, double seconds, bool data) {
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
    note(Resource::waits, now_, o.end, item.source);
    now_ = o.end;
  }

  void until(const Item& item) {
    if (item.seconds > now_) {
      out_.slots[item.slot].exposed[static_cast<size_t>(item.purpose)] += item.seconds - now_;
      note(Resource::waits, now_, item.seconds, item.source);
      now_ = item.seconds;
    }
    out_.reached.push_back(now_);
  }

  void note(Resource resource, double begin, double end, int source, Link link = Link::none) {
    if (wants_spans_ && end > begin) out_.spans.push_back({resource, link, begin, end, source});
  }

  const machine::Overlap& overlap_;
  bool wants_spans_;
  Replay out_;
  double now_ = 0, issued_ = 0;
  std::array<Line, machine::link_count> lines_;  // by Link
  std::vector<Operation> store_;
  static constexpr size_t none = std::numeric_limits<size_t>::max();
  std::vector<size_t> operations_;  // in store_, by number; none: not open
  std::vector<size_t> in_flight_;   // in store_; some have ended
};

}  // namespace

double SlotTime::total() const {
  return compute + host + std::accumulate(exposed.begin(), exposed.end(), 0.0);
}

double Busy::most() const {
  return std::max(processors, *std::max_element(links.begin(), links.end()));
}

void Busy::raise(const Busy& other) {
  processors = std::max(processors, other.processors);
  for (size_t i = 0; i < links.size(); ++i) links[i] = std::max(links[i], other.links[i]);
}

Busy& Busy::operator+=(const Busy& other) {
  processors += other.processors;
  for (size_t i = 0; i < links.size(); ++i) links[i] += other.links[i];
  return *this;
}

SlotTime SlotTime::operator*(double factor) const {
  SlotTime out = *this;
  for (double* x : {&out.compute, &out.host, &out.busy.processors}) *x *= factor;
  for (double& x : out.busy.links) x *= factor;
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
