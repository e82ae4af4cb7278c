// Every instant of the compute row has one cause, so that the parts of a step add up to its wall time.

#include <algorithm>
#include <span>

#include "apps/profile/analyses.h"

namespace nrl::profile {
namespace {

using trace::Event;
using trace::Kind;

constexpr int64_t near_ns = 10'000;  // a stream goes on within this time after what it waited for has ended

bool message(comm::Op op) {
  return op == comm::Op::send || op == comm::Op::recv;
}

class Sweep {
 public:
  Sweep(const Recorded& recorded, const Rows& rows) : recorded_(recorded), rows_(rows) {
    for (size_t i = 0; i < recorded.messages.size(); ++i)
      ended_[message(recorded.messages[i].op)].push_back(static_cast<int>(i));
    for (std::vector<int>& ended : ended_)
      std::stable_sort(ended.begin(), ended.end(), [&](int a, int b) { return ended_ns(a) < ended_ns(b); });
  }

  Split run() {
    std::vector<Piece> compute = rows_.flatten(recorded_.compute_row);
    if (recorded_.on_device) host_ = rows_.flatten(0);
    for (size_t i = 0; i < compute.size(); ++i) {
      if (add(compute[i])) continue;
      if (!recorded_.on_device) {
        ns_.unattributed += length(compute[i]);
        continue;
      }
      // Ranges that begin or end between two kernels do not divide the gap.
      Piece gap = compute[i];
      while (i + 1 < compute.size() && !counts(compute[i + 1])) gap.end = compute[++i].end;
      add_gap(gap, i + 1 < compute.size() ? compute[i + 1].event : -1);
    }
    const double steps = static_cast<double>(recorded_.step_begins.size() - 1);
    const double scale = 1e-9 / steps;
    Split split;
    split.wall = static_cast<double>(rows_.end() - rows_.begin()) * scale;
    for (const auto& [name, part] : split_parts) split.*part = ns_.*part * scale;
    // The wait for other stages is in `bubble` so far.
    const double waited = split.bubble;
    split.bubble = std::min(waited, recorded_.bubble_fraction * split.wall);
    split.imbalance = waited - split.bubble;
    return split;
  }

 private:
  static double length(const Piece& p) { return static_cast<double>(p.end - p.begin); }
  int64_t ended_ns(int i) const { return recorded_.messages[i].ended_ns; }
  const Event* event(const Piece& p) const {
    return p.event < 0 ? nullptr : &recorded_.window.events[p.event];
  }

  bool counts(const Piece& p) const {
    if (p.event < 0) return false;
    switch (event(p)->kind) {
      case Kind::op:
      case Kind::communication:
      case Kind::wait:
      case Kind::message:
      case Kind::copy:
      case Kind::data:
      case Kind::report:
        return true;
      default:
        return false;
    }
  }

  // False: the piece is in none of the kinds of work and waiting.
  bool add(const Piece& p) {
    if (!counts(p)) return false;
    const Event& e = *event(p);
    switch (e.kind) {
      case Kind::op: {
        const Rows::Place place = rows_.place(p.event);
        (place.update ? ns_.update : place.recompute ? ns_.recompute : ns_.compute) += length(p);
        break;
      }
      case Kind::copy:
        ns_.offload += length(p);
        break;
      case Kind::data:
        ns_.data += length(p);
        break;
      case Kind::report:
        ns_.report += length(p);
        break;
      default:
        add_wait(p, e.kind == Kind::message, ended_in(e.kind == Kind::message, e.begin, e.end));
    }
    return true;
  }

  // The operation that ended last in [begin, end], or soon after: it is what was waited for; -1: unknown.
  int ended_in(bool between_stages, int64_t begin, int64_t end) const {
    const std::vector<int>& ended = ended_[between_stages];
    const auto after = std::upper_bound(ended.begin(), ended.end(), end,
                                        [&](int64_t time, int i) { return time < ended_ns(i); });
    if (after != ended.begin() && ended_ns(*(after - 1)) >= begin) return *(after - 1);
    return after != ended.end() && ended_ns(*after) <= end + near_ns ? *after : -1;
  }

  // When the last rank arrived, so that this one waited for it; 0: it did not, or that is unknown.
  int64_t arrival(int i) const {
    if (i < 0 || static_cast<size_t>(i) >= recorded_.last_arrival.size()) return 0;
    const int64_t last = recorded_.last_arrival[i];
    const double late = static_cast<double>(last - recorded_.messages[i].enqueued_ns) * 1e-9;
    return last > 0 && late > recorded_.clock_error ? last : 0;
  }

  void add_wait(const Piece& p, bool between_stages, int operation) {
    int64_t arrived = arrival(operation);
    // A message of an unknown sender: it is late, because bytes between stages take little time.
    if (between_stages && (operation < 0 || recorded_.last_arrival.empty())) arrived = p.end;
    const auto late = static_cast<double>(std::clamp(arrived, p.begin, p.end) - p.begin);
    (between_stages ? ns_.bubble : ns_.late) += late;
    ns_.wire += length(p) - late;
  }

  // The time between two kernels of a device, before the kernel `next`.
  void add_gap(const Piece& gap, int32_t next) {
    // The host's waiting explains it first.
    auto at = std::upper_bound(host_.begin(), host_.end(), gap.begin,
                               [](int64_t time, const Piece& p) { return time < p.end; });
    double rest = length(gap);
    for (; at != host_.end() && at->begin < gap.end; ++at) {
      const Piece part{std::max(at->begin, gap.begin), std::min(at->end, gap.end), at->event};
      if (at->event < 0 || event(part)->kind == Kind::op || !add(part)) continue;
      rest -= length(part);
    }
    const int64_t issued = next < 0 ? 0 : rows_.issued(next);
    if (next < 0 || issued > gap.begin) {
      ns_.host += rest;
      return;
    }
    // Enqueued in time: the stream waited for another one, or for the launch.
    const Piece blocked{gap.end - static_cast<int64_t>(rest), gap.end, -1};
    for (const bool between_stages : {false, true}) {
      const int operation = ended_in(between_stages, gap.end - near_ns, gap.end);
      if (operation < 0) continue;
      add_wait(blocked, between_stages, operation);
      return;
    }
    (copy_ended(gap) ? ns_.offload : ns_.launch) += rest;
  }

  // A copy of another stream ended just before the end of the gap.
  bool copy_ended(const Piece& gap) const {
    if (copies_.empty() && !sought_) {
      sought_ = true;
      for (const Event& e : recorded_.window.events)
        if (e.kind == Kind::copy && e.row != 0 && e.row != recorded_.compute_row) copies_.push_back(e.end);
      std::sort(copies_.begin(), copies_.end());
    }
    const auto at = std::lower_bound(copies_.begin(), copies_.end(), std::max(gap.begin, gap.end - near_ns));
    return at != copies_.end() && *at <= gap.end;
  }

  const Recorded& recorded_;
  const Rows& rows_;
  std::vector<int> ended_[2];  // indices of collectives, and of messages between stages, by their end
  std::vector<Piece> host_;
  Split ns_;
  mutable std::vector<int64_t> copies_;
  mutable bool sought_ = false;
};

}  // namespace

Split split_of(const Recorded& recorded, const Rows& rows) {
  return Sweep(recorded, rows).run();
}

}  // namespace nrl::profile
