#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace nrl::pipeline {

namespace {

using Kind = ActionKind;
using Computation = std::vector<Action>;

/// One stage; the backward pass of each microbatch follows its forward pass at once.
Computation single(const ScheduleOptions& o, int) {
  Computation out;
  for (int m = 0; m < o.microbatches; ++m) {
    for (int c = 0; c < o.chunks_per_stage; ++c)
      out.push_back({.kind = Kind::forward, .chunk = c, .microbatch = m});
    for (int c = o.chunks_per_stage - 1; c >= 0; --c)
      out.push_back({.kind = Kind::backward, .chunk = c, .microbatch = m});
  }
  return out;
}

/// Sizes of the groups of microbatches; a group passes all chunks of a stage before the next group. A group
/// has at least P microbatches (if N >= P), so that its first one has passed the other stages when the next
/// chunk starts; the remainder of N / P is spread evenly, that of N / group comes last.
std::vector<int> groups(const ScheduleOptions& o) {
  const int n = o.microbatches;
  if (o.group > 0) {
    std::vector<int> sizes(static_cast<size_t>(n / o.group), o.group);
    if (n % o.group > 0) sizes.push_back(n % o.group);
    return sizes;
  }
  const int count = std::max(1, n / o.stages);
  std::vector<int> sizes(static_cast<size_t>(count), n / count);
  for (int g = 0; g < n % count; ++g) ++sizes[g];
  return sizes;
}

/// (chunk, microbatch) in the order of the forward passes.
std::vector<std::pair<int, int>> grouped(const ScheduleOptions& o) {
  std::vector<std::pair<int, int>> out;
  int begin = 0;
  for (const int size : groups(o)) {
    for (int c = 0; c < o.chunks_per_stage; ++c)
      for (int m = begin; m < begin + size; ++m) out.emplace_back(c, m);
    begin += size;
  }
  return out;
}

/// Evaluation.
Computation forward_only(const ScheduleOptions& o, int) {
  Computation out;
  for (const auto& [c, m] : grouped(o)) out.push_back({.kind = Kind::forward, .chunk = c, .microbatch = m});
  return out;
}

/// 1F1B: warm-up of forward passes, then one forward and one backward pass in turn. Bubble (P-1)(f+b),
/// min(N, P-p) stashes.
Computation one_f_one_b(const ScheduleOptions& o, int stage) {
  const int warm_up = std::min(o.stages - 1 - stage, o.microbatches);
  Computation out;
  for (int m = 0; m < warm_up; ++m) out.push_back({.kind = Kind::forward, .chunk = 0, .microbatch = m});
  for (int m = 0; m < o.microbatches; ++m) {
    if (m + warm_up < o.microbatches)
      out.push_back({.kind = Kind::forward, .chunk = 0, .microbatch = m + warm_up});
    out.push_back({.kind = Kind::backward, .chunk = 0, .microbatch = m});
  }
  return out;
}

/// Megatron-LM's interleaved 1F1B over V > 1 chunks per stage, for any N: groups may have more than P
/// microbatches. Bubble (P-1)(f+b)/V, more stashes than 1F1B.
Computation interleaved(const ScheduleOptions& o, int stage) {
  const auto order = grouped(o);
  const int total = static_cast<int>(order.size());
  const int warm_up =
      std::min(total, 2 * (o.stages - 1 - stage) + (o.chunks_per_stage - 1) * groups(o).front());
  Computation out;
  for (int k = 0; k < total + warm_up; ++k) {
    if (k < total) {
      const auto [c, m] = order[k];
      out.push_back({.kind = Kind::forward, .chunk = c, .microbatch = m});
    }
    if (k >= warm_up) {
      const auto [c, m] = order[k - warm_up];
      out.push_back({.kind = Kind::backward, .chunk = o.chunks_per_stage - 1 - c, .microbatch = m});
    }
  }
  return out;
}

/// ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism): 1F1B whose stage p runs wgrad p microbatches late.
/// Every stage then has up to P microbatches in flight, and the deferred wgrads fill the cool-down. Bubble
/// (P-1)(f+d-w), min(N, P) stashes.
Computation zb_h1(const ScheduleOptions& o, int stage) {
  Computation out;
  for (const Action& a : one_f_one_b(o, stage)) {
    out.push_back(a);
    if (a.kind == Kind::forward) continue;
    out.back().kind = Kind::backward_data;
    if (a.microbatch >= stage)
      out.push_back({.kind = Kind::backward_weight, .chunk = 0, .microbatch = a.microbatch - stage});
  }
  for (int m = std::max(0, o.microbatches - stage); m < o.microbatches; ++m)
    out.push_back({.kind = Kind::backward_weight, .chunk = 0, .microbatch = m});
  return out;
}

struct Generator {
  ScheduleKind kind;
  Computation (*computation)(const ScheduleOptions&, int stage);
  /// Why these sizes are not supported; empty when they are.
  std::string_view (*unsupported_reason)(const ScheduleOptions&);
};

std::string_view one_chunk(const ScheduleOptions& o) {
  return o.chunks_per_stage > 1 ? "it runs one chunk per stage. Fix: use interleaved" : "";
}

constexpr Generator generators[] = {
    {ScheduleKind::single, single,
     [](const ScheduleOptions& o) -> std::string_view {
       return o.stages > 1 ? "it runs one stage. Fix: use 1f1b" : "";
     }},
    {ScheduleKind::forward_only, forward_only, [](const ScheduleOptions&) -> std::string_view { return ""; }},
    {ScheduleKind::one_f_one_b, one_f_one_b, one_chunk},
    {ScheduleKind::interleaved, interleaved,
     [](const ScheduleOptions& o) -> std::string_view {
       if (o.stages < 2 || o.chunks_per_stage < 2)
         return "it needs two stages and two chunks per stage. Fix: use 1f1b";
       if (o.group == 0) return "";
       if (o.group < o.stages || o.group > o.microbatches)
         return "a group of microbatches has at least one for each stage, and no more than there are. Fix: "
                "use "
                "another microbatch_group_size_per_vp_stage";
       if (o.microbatches % o.group > 0 && o.microbatches % o.group < o.stages)
         return "the last group of microbatches has fewer than one for each stage. Fix: use another "
                "microbatch_group_size_per_vp_stage";
       return "";
     }},
    {ScheduleKind::zb_h1, zb_h1, one_chunk},
};

const Generator& generator(ScheduleKind kind) {
  for (const Generator& g : generators)
    if (g.kind == kind) return g;
  NRL_CHECK(false, "no generator of schedule {}", static_cast<int>(kind));
  return generators[0];
}

}  // namespace

std::string_view unsupported_reason(const ScheduleOptions& options) {
  return generator(options.kind).unsupported_reason(options);
}

Schedule make_schedule(const ScheduleOptions& o, int stage) {
  NRL_CHECK(o.stages > 0 && o.chunks_per_stage > 0 && o.microbatches > 0 && stage >= 0 && stage < o.stages,
            "{} stages of {} chunks, {} microbatches, stage {}", o.stages, o.chunks_per_stage, o.microbatches,
            stage);
  const Generator& g = generator(o.kind);
  if (const std::string_view why = g.unsupported_reason(o); !why.empty())
    fail(Exit::config, "schedule {} does not support {} stages of {} chunks with {} microbatches: {}",
         name_of(o.kind), o.stages, o.chunks_per_stage, o.microbatches, why);
  return complete_schedule(g.computation(o, stage), o, stage);
}

std::string describe(const Action& action) {
  static constexpr std::string_view names[] = {
      "forward",      "backward",        "backward_data", "backward_weight",
      "send_forward", "receive_forward", "send_backward", "receive_backward",
      "post_forward", "post_backward",   "finish_send",   "finish_reduce",
      "step"};
  return fmt::format("{}(chunk {}, microbatch {})", names[static_cast<size_t>(action.kind)], action.chunk,
                     action.microbatch);
}

}  // namespace nrl::pipeline
