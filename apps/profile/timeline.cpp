#include "apps/profile/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <spdlog/fmt/fmt.h>

#include "apps/profile/slices.h"
#include "apps/profile/sweep.h"
#include "core/base/error.h"

namespace nrl::profile {
namespace {

// Index of the step of median duration.
size_t median_step(const Recorded& recorded) {
  std::vector<size_t> order(recorded.step_begins.size() - 1);
  std::iota(order.begin(), order.end(), size_t{0});
  const auto duration = [&](size_t i) { return recorded.step_begins[i + 1] - recorded.step_begins[i]; };
  const auto middle = order.begin() + static_cast<ptrdiff_t>((order.size() - 1) / 2);
  std::nth_element(order.begin(), middle, order.end(),
                   [&](size_t a, size_t b) { return duration(a) < duration(b); });
  return *middle;
}

// Sets the color of a range of the main thread that waits or reports; false for other kinds.
bool paint_of(trace::Kind kind, Paint& paint) {
  switch (kind) {
    case trace::Kind::wait:
      paint = Paint::wait;
      return true;
    case trace::Kind::message:
      paint = Paint::message;
      return true;
    case trace::Kind::copy:
      paint = Paint::copy;
      return true;
    case trace::Kind::data:
      paint = Paint::data;
      return true;
    case trace::Kind::report:
      paint = Paint::phase;
      return true;
    default:
      return false;
  }
}

class Reducer {
 public:
  Reducer(const Recorded& recorded, size_t step)
      : recorded_(recorded), begin_(recorded.step_begins[step]), end_(recorded.step_begins[step + 1]) {}

  std::vector<Lane> lanes() {
    add("phases", phases());
    add(recorded_.on_device ? "compute stream" : "operations", operations());
    add("waiting", waiting());
    communication();
    return std::move(lanes_);
  }

 private:
  Bar bar(int64_t begin, int64_t end, Paint paint, std::string_view name) const {
    const auto seconds = [&](int64_t t) {
      return static_cast<double>(std::clamp(t, begin_, end_) - begin_) * 1e-9;
    };
    return {seconds(begin), seconds(end), paint, std::string(name)};
  }

  // Only what lies in the step; ranges inside of others begin where these were cut.
  void add(std::string name, std::vector<Bar> bars) {
    std::stable_sort(bars.begin(), bars.end(), [](const Bar& a, const Bar& b) { return a.begin < b.begin; });
    Lane lane{std::move(name), {}};
    for (Bar& b : bars) {
      if (!lane.bars.empty()) b.begin = std::max(b.begin, lane.bars.back().end);
      if (b.end > b.begin) lane.bars.push_back(std::move(b));
    }
    if (!lane.bars.empty()) lanes_.push_back(std::move(lane));
  }

  template <class Paints>  // bool(const trace::Event&, Paint&)
  std::vector<Bar> collect(uint16_t row, Paints&& paints) const {
    std::vector<Bar> bars;
    for (const trace::Event& e : recorded_.window.events) {
      Paint paint{};
      if (e.row == row && e.end > begin_ && e.begin < end_ && paints(e, paint))
        bars.push_back(bar(e.begin, e.end, paint, e.name));
    }
    return bars;
  }

  std::vector<Bar> phases() const {
    return collect(0, [](const trace::Event& e, Paint& paint) {
      paint = Paint::phase;
      return e.kind == trace::Kind::phase;
    });
  }

  std::vector<Bar> operations() const {
    const Rows rows(recorded_);
    std::vector<Bar> bars;
    for (const Piece& piece : rows.flatten(recorded_.compute_row)) {
      if (piece.event < 0 || piece.end <= begin_ || piece.begin >= end_) continue;
      const trace::Event& e = recorded_.window.events[piece.event];
      if (e.kind != trace::Kind::op) continue;
      const Rows::Place place = rows.place(piece.event);
      const ops::Work work =
          e.call < recorded_.costs.size() ? recorded_.costs[e.call].work : ops::Work::memory;
      const Paint paint = place.recompute                ? Paint::recompute
                          : place.update                 ? Paint::optimizer
                          : work == ops::Work::gemm      ? Paint::gemm
                          : work == ops::Work::attention ? Paint::attention
                                                         : Paint::memory_bound;
      bars.push_back(bar(piece.begin, piece.end, paint, e.name));
    }
    return bars;
  }

  std::vector<Bar> waiting() const {
    return collect(0, [](const trace::Event& e, Paint& paint) { return paint_of(e.kind, paint); });
  }

  void communication() {
    std::vector<std::vector<Slice>> groups(recorded_.groups.size());
    for (uint32_t i = 0; i < recorded_.messages.size(); ++i) {
      const comm::LogEntry& entry = recorded_.messages[i];
      NRL_CHECK(entry.group < groups.size(), "group {} of {}", entry.group, groups.size());
      const int64_t started = entry.started_ns ? entry.started_ns : entry.enqueued_ns;
      if (entry.ended_ns > begin_ && started < end_)
        groups[entry.group].push_back({started, entry.ended_ns, i});
    }
    for (size_t group = 0; group < groups.size(); ++group)
      for (const auto& slices : lanes_of(std::move(groups[group]))) {
        std::vector<Bar> bars;
        for (const Slice& s : slices) {
          const comm::Op op = recorded_.messages[s.source].op;
          const bool message = op == comm::Op::send || op == comm::Op::recv || op == comm::Op::exchange;
          bars.push_back(
              bar(s.begin, s.end, message ? Paint::message : Paint::communication, comm::name_of(op)));
        }
        add(recorded_.groups[group].label, std::move(bars));
      }
  }

  const Recorded& recorded_;
  int64_t begin_, end_;
  std::vector<Lane> lanes_;
};

// Joins neighbors that are shorter than `resolution`, as the gap between them must be.
std::vector<Bar> joined_bars(const std::vector<Bar>& bars, double resolution) {
  std::vector<Bar> out;
  double longest = 0;  // of the ranges in the last bar
  for (const Bar& b : bars) {
    const double length = b.end - b.begin;
    if (!out.empty() &&
        std::max({length, b.begin - out.back().end, out.back().end - out.back().begin}) < resolution) {
      Bar& last = out.back();
      last.end = b.end;
      last.count += b.count;
      if (length > longest) {
        longest = length;
        last.paint = b.paint;
        last.name = b.name;
      }
      continue;
    }
    out.push_back(b);
    longest = length;
  }
  return out;
}

}  // namespace

Timeline timeline_of(const Recorded& recorded, size_t most) {
  NRL_CHECK(most >= 1000, "{} bars", most);
  Timeline out;
  out.rank = recorded.rank;
  if (recorded.step_begins.size() < 2) return out;
  const size_t step = median_step(recorded);
  out.step = recorded.first_step + static_cast<int64_t>(step);
  out.seconds = static_cast<double>(recorded.step_begins[step + 1] - recorded.step_begins[step]) * 1e-9;
  const std::vector<Lane> lanes = Reducer(recorded, step).lanes();
  out.lanes = lanes;
  // Each lane keeps at least one bar.
  if (out.lanes.size() > 64) out.lanes.resize(64);
  const auto bars = [&] {
    size_t sum = 0;
    for (const Lane& lane : out.lanes) sum += lane.bars.size();
    return sum;
  };
  for (double resolution = out.seconds / 4000; bars() > most; resolution *= 2)
    for (size_t i = 0; i < out.lanes.size(); ++i) out.lanes[i].bars = joined_bars(lanes[i].bars, resolution);
  return out;
}

JsonValue to_json(const Timeline& timeline) {
  std::map<std::string, int64_t> numbers;
  JsonValue::Array lanes, names;
  for (const Lane& lane : timeline.lanes) {
    JsonValue::Array bars;
    for (const Bar& bar : lane.bars) {
      const auto [at, added] = numbers.try_emplace(bar.name, static_cast<int64_t>(names.size()));
      if (added) names.emplace_back(bar.name);
      bars.push_back(
          JsonValue::array({bar.begin, bar.end, static_cast<int>(bar.paint), at->second, bar.count}));
    }
    lanes.push_back(JsonValue::object({{"name", lane.name}, {"bars", std::move(bars)}}));
  }
  return JsonValue::object({{"rank", timeline.rank},
                            {"step", timeline.step},
                            {"seconds", timeline.seconds},
                            {"names", std::move(names)},
                            {"lanes", std::move(lanes)}});
}

Timeline timeline_from(const JsonValue& json) {
  const auto check = [&](bool ok, const char* what) {
    if (!ok) fail(Exit::data, "{}timeline: {}", json.where(), what);
  };
  Timeline out;
  const int64_t rank = json.get_int("rank");
  check(rank >= 0 && rank <= INT32_MAX, "rank is out of range");
  out.rank = static_cast<int>(rank);
  out.step = json.get_int("step");
  out.seconds = json.get_double("seconds");
  check(std::isfinite(out.seconds) && out.seconds >= 0, "seconds is not a duration");
  const JsonValue::Array& names = json.at("names").items();
  size_t bars = 0;
  for (const JsonValue& lane : json.at("lanes").items()) {
    out.lanes.push_back({lane.get_string("name"), {}});
    for (const JsonValue& item : lane.at("bars").items()) {
      const JsonValue::Array& bar = item.items();
      check(bar.size() == 5, "a bar has five values");
      check(++bars <= most_bars, "too many bars");
      const double begin = bar[0].as_double(), end = bar[1].as_double();
      check(begin >= 0 && begin <= end && end <= out.seconds, "a bar is outside of the step");
      const int64_t paint = bar[2].as_int(), name = bar[3].as_int(), count = bar[4].as_int();
      check(paint >= 0 && paint < static_cast<int64_t>(paints.size()), "unknown color");
      check(name >= 0 && name < static_cast<int64_t>(names.size()), "unknown name");
      check(count >= 1, "a bar of no ranges");
      out.lanes.back().bars.push_back(
          {begin, end, static_cast<Paint>(paint), names[name].as_string(), count});
    }
  }
  return out;
}

}  // namespace nrl::profile
