#include "apps/profile/sweep.h"

#include <algorithm>

#include "core/base/error.h"

namespace nrl::profile {

using trace::Event;
using trace::Kind;

namespace {

// A range within one that ends before it is cut to it, or is taken to begin at its end if that keeps more of
// it: the times of a device need not nest.
bool within(const Event& e, int64_t end) {
  return e.end <= end || 2 * (end - e.begin) >= e.end - e.begin;
}

}  // namespace

Rows::Rows(const Recorded& recorded)
    : recorded_(recorded),
      parents_(recorded.window.events.size(), -1),
      host_of_call_(recorded.costs.size(), -1) {
  NRL_CHECK(recorded.step_begins.size() >= 2, "a window of {} step marks", recorded.step_begins.size());
  const std::vector<Event>& events = recorded.window.events;
  std::vector<std::vector<int32_t>> open;  // by row: the ranges around the present one
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& e = events[i];
    if (e.row >= open.size()) open.resize(size_t{e.row} + 1);
    std::vector<int32_t>& around = open[e.row];
    while (!around.empty() && (event(around.back()).end <= e.begin || !within(e, event(around.back()).end)))
      around.pop_back();
    if (!around.empty()) parents_[i] = around.back();
    if (e.end > e.begin) around.push_back(static_cast<int32_t>(i));
    if (e.row == 0 && e.kind == Kind::op && e.call < host_of_call_.size())
      host_of_call_[e.call] = static_cast<int32_t>(i);
  }
}

std::vector<Piece> Rows::flatten(uint16_t row) const {
  struct Open {
    int32_t event;
    int64_t end;
  };
  std::vector<Piece> pieces;
  std::vector<Open> open;
  int64_t now = begin();
  const auto advance = [&](int64_t to) {
    if (to <= now) return;
    const int32_t innermost = open.empty() ? -1 : open.back().event;
    if (!pieces.empty() && pieces.back().event == innermost)
      pieces.back().end = to;
    else
      pieces.push_back({now, to, innermost});
    now = to;
  };
  const auto close_until = [&](int64_t time) {
    while (!open.empty() && open.back().end <= time) {
      advance(open.back().end);
      open.pop_back();
    }
  };
  const std::vector<Event>& events = recorded_.window.events;
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& e = events[i];
    if (e.row != row || e.end <= begin() || e.begin >= end()) continue;
    close_until(e.begin);
    while (!open.empty() && !within(e, open.back().end)) close_until(open.back().end);
    advance(e.begin);
    const int64_t last = std::min(e.end, open.empty() ? end() : open.back().end);
    if (last > e.begin) open.push_back({static_cast<int32_t>(i), last});
  }
  close_until(end());
  advance(end());
  return pieces;
}

int32_t Rows::host_event(int32_t index) const {
  const Event& e = event(index);
  if (e.row == 0 || e.call >= host_of_call_.size()) return -1;
  return host_of_call_[e.call];
}

int64_t Rows::issued(int32_t index) const {
  const int32_t host = host_event(index);
  return host < 0 ? 0 : event(host).begin;
}

Rows::Place Rows::place(int32_t index) const {
  const int32_t host = host_event(index);
  Place place;
  for (int32_t at = parents_[host < 0 ? index : host]; at >= 0; at = parents_[at]) {
    const Event& e = event(at);
    if (place.range.empty() && e.kind != Kind::op) place.range = e.name;
    if (e.kind == Kind::recompute) place.recompute = true;
    if (e.kind == Kind::phase && std::string_view(e.name) == "optimizer_step") place.update = true;
  }
  if (place.recompute) place.range = "recompute";
  return place;
}

}  // namespace nrl::profile
