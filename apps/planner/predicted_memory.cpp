#include "apps/planner/predicted_memory.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/base/error.h"

namespace nrl::planner {
namespace {

using Bytes = std::array<int64_t, memory::category_count>;

constexpr double nanosecond = 1e-9;

int64_t total(const Bytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

/// Live bytes at each step of the training program, whose ticks begin at 0: the decoder declares it before
/// the programs of evaluations.
std::vector<Bytes> live_bytes(const memory::MemoryPlan& plan, size_t steps) {
  std::vector<Bytes> out(steps + 1, Bytes{});
  for (const memory::MemoryPlan::Buffer& b : plan.buffers()) {
    if (b.tier != memory::Tier::device) continue;
    const auto category = static_cast<size_t>(b.category);
    if (b.always()) out.front()[category] += b.bytes;
    for (const memory::Lifetime& life : b.lifetimes) {
      if (life.first >= static_cast<int>(steps)) continue;
      out[life.first][category] += b.bytes;
      out[std::min<size_t>(static_cast<size_t>(life.last) + 1, steps)][category] -= b.bytes;
    }
  }
  for (size_t i = 1; i < out.size(); ++i)
    for (size_t c = 0; c < out[i].size(); ++c) out[i][c] += out[i - 1][c];
  return out;
}

/// The steps of the program in which a pass begins, in the order of execution, and the end of its part.
struct PassSteps {
  size_t begin, end;
};
std::vector<PassSteps> pass_steps(const program::Program& list) {
  std::vector<PassSteps> out;
  list.period.for_each_part(list.steps.size(), [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      const program::Step& s = list.steps[i];
      if (s.begins_visit() && s.starts && !s.again)
        out.push_back({i, i + 1});
      else if (!out.empty())
        out.back().end = std::max(out.back().end, i + 1);
    }
  });
  return out;
}

/// When a pass of `steps` steps gets to one of them. `calls`: the first one of each step, by time. A pass of
/// another microbatch may be elsewhere in the program, so that only the distance from its begin counts.
double time_of(const predict::PassSpan& pass, const std::vector<std::pair<int, double>>& calls, size_t step,
               size_t steps) {
  if (calls.empty())
    return pass.begin + static_cast<double>(step) / static_cast<double>(steps) * (pass.end - pass.begin);
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const auto& c) {
    return c.first - calls.front().first >= static_cast<int>(step);
  });
  return found == calls.end() ? calls.back().second : found->second;
}

/// Equal parts of a pass that the curve has a point of.
size_t memory_points(const predict::StageTimeline& stage) {
  constexpr size_t most = 1024, most_of_pass = 64;
  const size_t shown = stage.passes.size() - (stage.hidden.second - stage.hidden.first);
  return std::clamp<size_t>(most / std::max<size_t>(shown, 1), 1, most_of_pass);
}

}  // namespace

const plan::RunPlan* plan_of(const predict::DryStages& stages, std::span<const plan::RunPlan* const> others,
                             const predict::StageTimeline& stage) {
  const predict::DryStages::Stage& dry = stages.stages()[stage.dry];
  if (dry.stage == stage.stage) return &dry.engine->plan();
  return static_cast<size_t>(stage.stage) < others.size() ? others[stage.stage] : nullptr;
}

profile::MemoryUse predicted_memory(const plan::RunPlan& plan, const predict::StageTimeline& stage) {
  const size_t points = memory_points(stage);
  const program::Program& list = plan.decoder->program(memory::training);
  const std::vector<Bytes> live = live_bytes(plan.memory, list.steps.size());
  const std::vector<PassSteps> steps = pass_steps(list);
  NRL_CHECK(steps.size() == stage.passes.size(), "a program of {} passes for a schedule of {}", steps.size(),
            stage.passes.size());
  // The first call of each step of the program, by pass.
  std::vector<std::vector<std::pair<int, double>>> calls(stage.passes.size());
  for (const predict::WorkSpan& w : stage.work)
    if (w.pass >= 0 && w.call && w.call->step >= 0) calls[w.pass].emplace_back(w.call->step, w.span.begin);
  profile::MemoryUse out;
  out.arena = plan.memory.total_bytes();
  const auto add = [&](double time, const Bytes& bytes) {
    if (!out.curve.empty() && time < out.curve.back().first + nanosecond) {
      // The point with most memory counts at each time.
      time = out.curve.back().first;
      if (total(bytes) <= total(out.curve.back().second)) return;
      out.curve.pop_back();
    }
    if (total(bytes) > out.peak) {
      out.peak = total(bytes);
      out.peak_at = time;
    }
    if (!out.curve.empty() && out.curve.back().second == bytes) return;
    out.curve.emplace_back(time, bytes);
  };
  for (size_t p = 0; p < steps.size(); ++p) {
    const auto [begin, end] = steps[p];
    const predict::PassSpan& pass = stage.passes[p];
    add(pass.begin, live[begin]);
    const size_t parts = std::min(points, end - begin);
    for (size_t part = 0; part < parts; ++part) {
      const size_t from = begin + (end - begin) * part / parts,
                   to = begin + (end - begin) * (part + 1) / parts;
      size_t most = from;
      for (size_t i = from; i < to; ++i)
        if (total(live[i]) > total(live[most])) most = i;
      add(time_of(pass, calls[p], most - begin, end - begin), live[most]);
    }
  }
  if (!stage.passes.empty()) add(stage.passes.back().end, live[list.steps.size() - 1]);
  double mean = 0;
  for (size_t i = 0; i + 1 < out.curve.size(); ++i)
    mean += static_cast<double>(total(out.curve[i].second)) * (out.curve[i + 1].first - out.curve[i].first);
  if (!out.curve.empty()) {
    mean += static_cast<double>(total(out.curve.back().second)) * (stage.end - out.curve.back().first);
    out.mean = stage.end > 0 ? static_cast<int64_t>(mean / stage.end) : 0;
  }
  return out;
}

}  // namespace nrl::planner
