#include "tests/profile/sample_recording.h"

#include <algorithm>

namespace nrl::profile {
namespace {

constexpr int64_t us = 1000, ms = 1000 * us, origin = 864'000'000'123'456;

struct Recorder {
  Recorded& out;
  bool on_device;

  void range(const char* name, trace::Kind kind, int64_t begin, int64_t end, trace::Tag tag) {
    out.window.events.push_back({.name = name, .begin = begin, .end = end, .tag = tag, .kind = kind});
  }
  void op(const char* name, int64_t begin, int64_t end, trace::Tag tag, const ops::Cost& cost) {
    range(name, trace::Kind::op, begin, on_device ? begin + 5 * us : end, tag);
    trace::Event& event = out.window.events.back();
    event.call = static_cast<uint32_t>(out.costs.size());
    out.costs.push_back(cost);
    if (!on_device) return;
    trace::Event device = event;
    device.row = 2;
    device.begin = begin + 50 * us;
    device.end = end + 50 * us;
    out.window.events.push_back(device);
  }
  void message(uint64_t seq, uint32_t group, comm::Op op, int32_t peer, int64_t enqueued, int64_t end,
               int64_t last_arrival) {
    out.messages.push_back({.id = out.messages.size(),
                            .seq = seq,
                            .group = group,
                            .op = op,
                            .dtype = DType::f32,
                            .progress = comm::Progress::done,
                            .peer = peer,
                            .lane = peer < 0 ? -1 : 0,
                            .message = peer < 0 ? -1 : static_cast<int64_t>(seq),
                            .bytes = 1 << 20,
                            .enqueued_ns = enqueued,
                            .started_ns = enqueued + 2 * us,
                            .ended_ns = end,
                            .exposed_ns = 200 * us});
    out.last_arrival.push_back(last_arrival);
  }
};

}  // namespace

Recorded sample_recording(int rank, bool on_device) {
  Recorded out;
  out.rank = rank;
  out.host = "node0";
  out.device = on_device ? "H100" : "cpu";
  out.first_step = 3;
  out.last_step = 4;
  out.on_device = on_device;
  out.compute_row = on_device ? 2 : 0;
  out.window.rows = {"main", "communication"};
  if (on_device) out.window.rows.emplace_back("device stream 1");
  out.groups = {{.name = "dp", .label = "dp[0,1]", .ranks = 2, .members = {0, 1}},
                {.name = "pp", .label = "pp[0,1]", .ranks = 2, .members = {0, 1}}};
  out.peaks = {.f32_flops = 100e9, .copy = 10e9};
  out.arena_bytes = int64_t{5} << 20;
  out.window.begin = origin;
  Recorder r{out, on_device};
  const ops::Cost gemm{
      .work = ops::Work::gemm, .read = 3e5, .written = 1e5, .flops = 2e7, .gemm = {128, 256, 305}};
  const ops::Cost norm{.read = 4e5, .written = 4e5};
  const int64_t late = rank == 1 ? ms : 0;
  for (int step = 3; step <= 4; ++step) {
    const int64_t begin = origin + (step - 3) * 10 * ms;
    out.step_begins.push_back(begin);
    trace::Tag tag{.step = step};
    r.range(step == 3 ? "step_3" : "step_4", trace::Kind::step, begin, begin + 10 * ms, tag);
    r.range("next_batch", trace::Kind::data, begin, begin + 100 * us, tag);
    int32_t tick = 0;
    for (int microbatch = 0; microbatch < 2; ++microbatch) {
      const int64_t start = begin + 200 * us + microbatch * 3200 * us;
      tag.microbatch = microbatch;
      for (const bool forward : {true, false}) {
        const int64_t phase = start + (forward ? 0 : 1600 * us);
        tag.tick = -1;
        tag.layer = -1;
        r.range(forward ? "forward_pass" : "backward_pass", trace::Kind::phase, phase, phase + 1600 * us,
                tag);
        for (int16_t i = 0; i < 4; ++i) {
          const int64_t at = phase + i * 400 * us;
          tag.layer = forward ? i : static_cast<int16_t>(3 - i);
          tag.tick = tick;
          r.range("layer", trace::Kind::layer, at, at + 400 * us, tag);
          r.op(forward ? "norm_forward" : "norm_backward", at, at + 90 * us, tag, norm);
          tag.tick = tick + 1;
          r.op(forward ? "linear_forward" : "linear_backward_data", at + 100 * us, at + 400 * us, tag, gemm);
          tick += 2;
        }
      }
      const auto number = static_cast<uint64_t>(2 * (step - 3) + microbatch);
      r.message(number, 1, rank == 0 ? comm::Op::send : comm::Op::recv, 1 - rank, start + 100 * us,
                start + (rank == 0 ? 150 : 300) * us, 0);
    }
    tag = {.step = step};
    const int64_t reduce = begin + 6600 * us;
    for (int bucket = 0; bucket < 2; ++bucket) {
      const int64_t arrival = reduce + bucket * 300 * us;
      r.message(static_cast<uint64_t>(2 * (step - 3) + bucket), 0, comm::Op::all_reduce, -1, arrival + late,
                arrival + ms + 500 * us, arrival + ms);
    }
    r.range("wait", trace::Kind::wait, reduce + 300 * us + late, reduce + 1800 * us, tag);
    r.range("optimizer_step", trace::Kind::phase, begin + 8500 * us, begin + 9900 * us, tag);
    r.op("adamw", begin + 8600 * us, begin + 9700 * us, tag, {.read = 6e6, .written = 4e6});
  }
  out.window.end = origin + 20 * ms;
  out.step_begins.push_back(out.window.end);
  std::stable_sort(out.window.events.begin(), out.window.events.end(), [](const auto& a, const auto& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  const auto buffer = [&](const char* name, memory::Category category, int64_t bytes, int64_t offset,
                          std::vector<memory::Lifetime> lifetimes) {
    out.buffers.push_back({name, category, memory::Tier::device, bytes, offset, std::move(lifetimes)});
  };
  buffer("weights", memory::Category::weights, 2 << 20, 0, {});
  buffer("layer 0 qkv", memory::Category::activations, 1 << 20, 2 << 20, {{1, 14}, {17, 30}});
  buffer("layer 3 mlp_in", memory::Category::activations, 2 << 20, 3 << 20, {{7, 9}, {23, 25}});
  buffer("scratch", memory::Category::workspace, 1 << 20, 3 << 20, {{10, 15}, {26, 31}});
  return out;
}

}  // namespace nrl::profile
