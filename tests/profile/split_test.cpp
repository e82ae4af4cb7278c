// The parts of a step, each alone and in pairs: every instant has one cause.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "apps/profile/analyze.h"
#include "apps/profile/sweep.h"
#include "tests/catch.h"
#include "tests/profile/synthetic.h"

using namespace nrl;
using namespace nrl::test;
using profile::Split;
using trace::Kind;

namespace {

constexpr int64_t us = Synthetic::us;

struct Part {
  const char* name;
  std::function<void(Synthetic&, int64_t)> add;
};

const std::vector<Part>& cpu_parts() {
  static const std::vector<Part> parts{
      {"compute", [](Synthetic& s, int64_t t) { s.range("linear_forward", Kind::op, t); }},
      {"update",
       [](Synthetic& s, int64_t t) {
         const size_t phase = s.open("optimizer_step", Kind::phase);
         s.range("adamw", Kind::op, t);
         s.close(phase);
       }},
      {"recompute",
       [](Synthetic& s, int64_t t) {
         const size_t layer = s.open("layer_1", Kind::layer), again = s.open("recompute", Kind::recompute);
         s.range("norm_forward", Kind::op, t);
         s.close(again);
         s.close(layer);
       }},
      {"late", [](Synthetic& s, int64_t t) { s.collective(t, 0); }},
      {"wire", [](Synthetic& s, int64_t t) { s.collective(0, t); }},
      {"imbalance", [](Synthetic& s, int64_t t) { s.receive(t, 0); }},
      {"offload", [](Synthetic& s, int64_t t) { s.range("wait_copies", Kind::copy, t); }},
      {"data", [](Synthetic& s, int64_t t) { s.range("next_batch", Kind::data, t); }},
      {"report", [](Synthetic& s, int64_t t) { s.range("metrics", Kind::report, t); }},
      {"unattributed", [](Synthetic& s, int64_t t) { s.idle(t); }},
  };
  return parts;
}

Split split_of(const Synthetic& s) {
  return profile::analyze(s.recorded).split;
}

void check(const Split& split, std::vector<std::pair<std::string, double>> expected) {
  CHECK(split.parts() == Approx(split.wall).epsilon(1e-9));
  for (const auto& [name, part] : profile::split_parts) {
    double want = 0;
    for (const auto& [key, us_] : expected)
      if (key == name) want += us_ * 1e-6;
    CAPTURE(name);
    CHECK(split.*part == Approx(want).margin(1e-12));
  }
}

}  // namespace

TEST_CASE("each part of a step alone and in pairs", "[profile]") {
  for (const Part& a : cpu_parts()) {
    CAPTURE(a.name);
    Synthetic alone;
    a.add(alone, 70 * us);
    alone.end_step();
    check(split_of(alone), {{a.name, 70}});
    for (const Part& b : cpu_parts()) {
      CAPTURE(b.name);
      Synthetic s(2);
      for (const int64_t scale : {1, 3}) {  // two steps, whose mean is reported
        const size_t step = s.open("step", Kind::step);
        a.add(s, scale * 30 * us);
        b.add(s, scale * 50 * us);
        s.idle(scale * us);
        s.close(step);
        s.end_step();
      }
      check(split_of(s), {{a.name, 60}, {b.name, 100}, {"unattributed", 2}});
    }
  }
}

TEST_CASE("an instant belongs to the innermost range", "[profile]") {
  Synthetic s;
  s.recorded.bubble_fraction = 0.25;
  const size_t phase = s.open("forward_pass", Kind::phase);
  const size_t op = s.open("linear_forward", Kind::op);
  s.idle(10 * us);
  s.range("activation_forward", Kind::op, 5 * us);
  s.collective(2 * us, 3 * us);
  s.close(op);
  s.receive(60 * us, 20 * us);
  s.close(phase);
  s.end_step();
  check(split_of(s), {{"compute", 15}, {"late", 2}, {"wire", 23}, {"bubble", 25}, {"imbalance", 35}});
}

TEST_CASE("ranges that outlive the window or the range around them are cut", "[profile]") {
  Synthetic s;
  s.range("linear_forward", Kind::op, 40 * us);
  s.range("wait_copies", Kind::copy, 10 * us);
  s.end_step();
  s.recorded.window.events[0].begin -= 500 * us;
  s.recorded.window.events[1].end += 500 * us;
  check(split_of(s), {{"compute", 40}, {"offload", 10}});
  s.recorded.window.events[0].end += 5 * us;  // overlaps the next one, most of which is outside
  check(split_of(s), {{"compute", 45}, {"offload", 5}});
}

TEST_CASE("an exchange of a ring is no message between stages", "[profile]") {
  Synthetic s;
  s.message(comm::Op::exchange, 0, 0, s.now + 20 * us, 20 * us);
  s.range("wait", Kind::wait, 20 * us);
  s.range("receive", Kind::message, 30 * us);
  s.end_step();
  s.recorded.bubble_fraction = 1;
  check(split_of(s), {{"wire", 20}, {"bubble", 30}});
}

TEST_CASE("lateness below the error of the clocks is none", "[profile]") {
  Synthetic s;
  s.collective(5 * us, 20 * us);
  s.end_step();
  s.recorded.clock_error = 4.9e-6;
  check(split_of(s), {{"late", 5}, {"wire", 20}});
  s.recorded.clock_error = 5.1e-6;
  check(split_of(s), {{"wire", 25}});
  s.recorded.last_arrival.clear();  // unknown
  check(split_of(s), {{"wire", 25}});
}

TEST_CASE("gaps of a device are the host's if the kernel was issued too late", "[profile]") {
  Synthetic s;
  s.recorded.on_device = true;
  s.recorded.compute_row = 1;
  s.recorded.window.rows = {"main", "device stream 1"};
  const int64_t start = s.now;
  // Kernels: issued at, begins at, ends at.
  struct Call {
    int64_t issued, begin, end;
  };
  std::vector<trace::Event> device;
  for (const auto& [issued, begin, end] :
       {Call{0, 10, 30}, Call{5, 32, 50}, Call{70, 80, 100}, Call{75, 120, 140}, Call{135, 200, 230}}) {
    s.now = start + issued * us;
    const uint32_t call = s.cost(0, 100, 100);
    s.range("norm_forward", Kind::op, 2 * us, call);
    trace::Event e = s.recorded.window.events.back();
    e.begin = start + begin * us;
    e.end = start + end * us;
    e.row = 1;
    device.push_back(e);
  }
  s.now = start + 145 * us;
  s.range("next_batch", Kind::data, 25 * us);  // from 145 to 170, within the last gap
  // A collective of another stream ended 2 us before the fourth kernel.
  s.now = start + 101 * us;
  s.message(comm::Op::all_reduce, 0, start + 111 * us, start + 118 * us, 0);
  s.now = start + 230 * us;
  s.end_step();
  auto& events = s.recorded.window.events;
  events.insert(events.end(), device.begin(), device.end());
  std::stable_sort(events.begin(), events.end(),
                   [](const auto& a, const auto& b) { return a.begin < b.begin; });
  // Before the first kernel 10 us, of which 0 was issued at its begin; 30-32 launch; 50-80 host; 100-120 the
  // collective; 140-200 data 25 and launch 35.
  check(split_of(s), {{"compute", 20 + 18 + 20 + 20 + 30},
                      {"launch", 10 + 2 + 35},
                      {"host", 30},
                      {"late", 11},
                      {"wire", 9},
                      {"data", 25}});
}
