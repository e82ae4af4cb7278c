#pragma once
// Windows of known answers: ranges are laid one after the other on the main thread.

#include <string>
#include <utility>

#include "apps/profile/recorded.h"

namespace nrl::test {

class Synthetic {
 public:
  static constexpr int64_t us = 1000;

  profile::Recorded recorded;
  int64_t now = 1'000'000;

  explicit Synthetic(int64_t steps = 1) {
    recorded.first_step = 1;
    recorded.last_step = steps;
    recorded.step_begins = {now};
    recorded.peaks = {.f32_flops = 1e9, .bf16_flops = 2e9, .copy = 1e9};
    recorded.groups = {{.name = "dp", .label = "dp[0,1]", .ranks = 2},
                       {.name = "pp", .label = "pp[0,1]", .ranks = 2}};
    recorded.window.rows = {"main"};
  }

  size_t range(const char* name, trace::Kind kind, int64_t length, uint32_t call = trace::no_call) {
    const size_t at = open(name, kind, call);
    now += length;
    close(at);
    return at;
  }
  size_t open(const char* name, trace::Kind kind, uint32_t call = trace::no_call, int32_t tick = -1) {
    trace::Event e{.name = name, .begin = now, .end = now, .tag = {}, .call = call, .row = 0, .kind = kind};
    e.tag.step = static_cast<int32_t>(recorded.step_begins.size());
    e.tag.tick = tick;
    recorded.window.events.push_back(e);
    return recorded.window.events.size() - 1;
  }
  void close(size_t at) { recorded.window.events[at].end = now; }
  void idle(int64_t length) { now += length; }
  void end_step() { recorded.step_begins.push_back(now); }

  uint32_t cost(double flops, double read, double written, DType type = DType::f32) {
    ops::Cost c;
    c.work = flops > 0 ? ops::Work::gemm : ops::Work::memory;
    c.flops = flops;
    c.read = read;
    c.written = written;
    c.operands = type;
    recorded.costs.push_back(c);
    return static_cast<uint32_t>(recorded.costs.size() - 1);
  }

  /// Waits for a collective: `late` until its last rank arrives, then `wire`.
  void collective(int64_t late, int64_t wire) {
    message(comm::Op::all_reduce, 0, now + late, now + late + wire, late + wire);
    range("wait", trace::Kind::wait, late + wire);
  }
  /// Receives from another stage, which sends after `late`.
  void receive(int64_t late, int64_t wire) {
    message(comm::Op::recv, 1, now + late, now + late + wire, late + wire);
    range("receive", trace::Kind::message, late + wire);
  }
  void message(comm::Op op, uint32_t group, int64_t arrived, int64_t ended, int64_t exposed) {
    comm::LogEntry m;
    m.op = op;
    m.group = group;
    m.bytes = 4000;
    m.enqueued_ns = m.started_ns = now;
    m.ended_ns = ended;
    m.exposed_ns = exposed;
    recorded.messages.push_back(m);
    recorded.last_arrival.push_back(arrived);
    recorded.waited.push_back(arrived - now);
  }

  void buffer(std::string name, memory::Category category, int64_t bytes,
              std::vector<memory::Lifetime> lives = {}, memory::Tier tier = memory::Tier::device) {
    recorded.buffers.push_back({.name = std::move(name),
                                .category = category,
                                .tier = tier,
                                .bytes = bytes,
                                .lifetimes = std::move(lives)});
  }
};

}  // namespace nrl::test
