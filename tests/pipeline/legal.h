#pragma once
// The rules of schedule.h, checked on the lists themselves, and the sizes that the tests go through.

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "parallel/pipeline/simulate.h"

namespace nrl::pipeline {

inline const std::vector<ScheduleKind> all_kinds = [] {
  std::vector<ScheduleKind> out;
  for (size_t i = 0; i < std::size(EnumNames<ScheduleKind>::names); ++i)
    out.push_back(static_cast<ScheduleKind>(i));
  return out;
}();

inline bool supported(const ScheduleOptions& o) {
  switch (o.kind) {
    case ScheduleKind::single:
      return o.stages == 1;
    case ScheduleKind::forward_only:
      return true;
    case ScheduleKind::interleaved:
      return o.stages > 1 && o.chunks_per_stage > 1;
    default:
      return o.chunks_per_stage == 1;
  }
}

/// All supported sizes up to 6 stages of 4 chunks and 13 microbatches: multiples of P, fewer than
/// P, and others.
inline std::vector<ScheduleOptions> sizes(ScheduleKind kind) {
  std::vector<ScheduleOptions> out;
  for (int p = 1; p <= 6; ++p)
    for (int v = 1; v <= 4; ++v)
      for (int n = 1; n <= 13; ++n)
        if (const ScheduleOptions o{kind, p, v, n}; supported(o)) out.push_back(o);
  return out;
}

/// The same, and those with messages in advance and with groups of microbatches of given sizes.
inline std::vector<ScheduleOptions> all_options(ScheduleKind kind) {
  std::vector<ScheduleOptions> out;
  for (const ScheduleOptions& plain : sizes(kind)) {
    std::vector<int> groups{0};
    if (kind == ScheduleKind::interleaved)
      for (const int group :
           std::set{plain.stages, plain.stages + 1, 2 * plain.stages + 1, plain.microbatches})
        if (const int rest = plain.microbatches % group;
            group >= plain.stages && group <= plain.microbatches && (rest == 0 || rest >= plain.stages))
          groups.push_back(group);
    for (const int group : groups)
      for (const bool overlap : {false, true}) {
        if (overlap && plain.stages == 1) continue;
        ScheduleOptions o = plain;
        o.group = group;
        o.overlap_messages = overlap;
        out.push_back(o);
      }
  }
  return out;
}

inline std::vector<Schedule> all_stages(const ScheduleOptions& o) {
  std::vector<Schedule> out;
  for (int stage = 0; stage < o.stages; ++stage) out.push_back(make_schedule(o, stage));
  return out;
}

inline std::string text(const ScheduleOptions& o) {
  return fmt::format("{} P={} V={} N={} group={}{}", name_of(o.kind), o.stages, o.chunks_per_stage,
                     o.microbatches, o.group, o.overlap_messages ? " overlap" : "");
}

/// The first rule that the stage's list violates; empty: none. Of a merged list, `o` is {.stages = 1}
/// with all chunks.
inline std::string violation(const Schedule& s, const ScheduleOptions& o, int stage, bool training) {
  using Kind = ActionKind;
  using Buffer = std::pair<int /*pool*/, int /*stash*/>;
  using Item = std::pair<int /*chunk*/, int /*microbatch*/>;
  const bool messages = o.stages > 1;
  std::map<std::pair<Kind, int>, int> next;  // per kind and chunk: the microbatch whose turn it is
  std::map<Buffer, Item> activations;        // in each stash
  std::map<Buffer, Item> output, gradient;   // in flight from the stash's buffers
  std::map<Buffer, Item> newest_gradient;    // of a chunk's input, in each stash
  std::set<Item> received, received_gradient, split;
  std::map<Kind, std::vector<Item>> posted;  // and not completed, by kind of the receive
  size_t steps = 0;
  if (s.stashes.chunks() != o.chunks_per_stage) return "stashes of every chunk";
  for (size_t i = 0; i < s.actions.size(); ++i) {
    const Action& a = s.actions[i];
    const auto wrong = [&](const char* rule) { return fmt::format("{} of {}: {}", i, describe(a), rule); };
    if (a.kind == Kind::finish_reduce || a.kind == Kind::step) {
      if (!training || i + 2 - (a.kind == Kind::step ? 1 : 0) != s.actions.size())
        return wrong("only at the end");
      ++steps;
      continue;
    }
    if (a.chunk < 0 || a.chunk >= o.chunks_per_stage || a.microbatch < 0 || a.microbatch >= o.microbatches)
      return wrong("exists");
    const int m = a.microbatch;
    const Buffer buffer{s.stashes.pool(a.chunk), a.stash};
    const Item item{a.chunk, m};
    const bool first = stage == 0 && a.chunk == 0;
    const bool last = stage + 1 == o.stages && a.chunk + 1 == o.chunks_per_stage;
    const bool last_microbatch = training && m + 1 == o.microbatches;
    const auto done = [&](Kind kind) { return next[{kind, a.chunk}] > m; };
    const auto occupy = [&] { return activations.emplace(buffer, item).first->second == item; };
    if (a.stash != s.stashes.of(a.chunk, m)) return wrong("the stash of its microbatch");
    // finish_send stands for two kinds; everything else comes once, in order of microbatches.
    const bool post = a.kind == Kind::post_forward || a.kind == Kind::post_backward;
    if (a.kind != Kind::finish_send && !post && next[{a.kind, a.chunk}]++ != m)
      return wrong("once, in order of microbatches");
    if (post && !messages) return wrong("no messages");
    // A receive completes the oldest one that was posted, or is the only one.
    if (a.kind == Kind::receive_forward || a.kind == Kind::receive_backward) {
      auto& begun = posted[a.kind];
      if (!begun.empty() && begun.front() != item) return wrong("another receive was posted before");
      if (!begun.empty()) begun.erase(begun.begin());
    }
    bool contributes = false;
    switch (a.kind) {
      case Kind::receive_forward:
        if (first) return wrong("nothing to receive");
        if (!occupy()) return wrong("the stash is in use");
        received.insert(item);
        break;
      case Kind::forward:
        if (!first && received.count(item) == 0) return wrong("no input");
        if (!occupy()) return wrong("the stash is in use");
        if (output.count(buffer) != 0) return wrong("overwrites an output that is being sent");
        if (!training && (last || !messages)) activations.erase(buffer);
        contributes = last;
        break;
      case Kind::send_forward:
        if (last || !messages || !done(Kind::forward)) return wrong("nothing to send");
        output[buffer] = item;
        break;
      case Kind::receive_backward:
        if (last || !done(Kind::forward)) return wrong("nothing to receive");
        if (!messages && newest_gradient[{s.stashes.pool(a.chunk + 1), s.stashes.of(a.chunk + 1, m)}] !=
                             Item(a.chunk + 1, m))
          return wrong("the gradient was overwritten before it was handed over");
        received_gradient.insert(item);
        break;
      case Kind::backward:
      case Kind::backward_data:
        if (!training || !done(Kind::forward)) return wrong("before its forward");
        if (!last && received_gradient.count(item) == 0) return wrong("no gradient");
        if (gradient.count(buffer) != 0) return wrong("overwrites a gradient that is being sent");
        if (output.count(buffer) != 0) return wrong("the output is being sent");
        if (a.kind == Kind::backward)
          activations.erase(buffer);
        else
          split.insert(item);
        newest_gradient[buffer] = item;
        contributes = true;
        break;
      case Kind::backward_weight:
        if (split.erase(item) == 0) return wrong("before its data part");
        activations.erase(buffer);
        contributes = true;
        break;
      case Kind::send_backward:
        if (first || !messages || !(done(Kind::backward) || done(Kind::backward_data)))
          return wrong("nothing to send");
        gradient[buffer] = item;
        break;
      case Kind::finish_send:
        if (const auto sent = output.find(buffer); sent != output.end() && sent->second == item)
          output.erase(sent);
        else if (const auto back = gradient.find(buffer); back != gradient.end() && back->second == item)
          gradient.erase(back);
        else
          return wrong("no unfinished send");
        if (!training) activations.erase(buffer);
        break;
      case Kind::post_forward:
        if (first || received.count(item) != 0) return wrong("nothing to receive");
        if (!occupy()) return wrong("the stash is in use");
        posted[Kind::receive_forward].push_back(item);
        break;
      case Kind::post_backward:
        if (last || !done(Kind::forward) || received_gradient.count(item) != 0)
          return wrong("nothing to receive");
        posted[Kind::receive_backward].push_back(item);
        break;
      case Kind::finish_reduce:
      case Kind::step:
        break;
    }
    if (a.last != (contributes && last_microbatch)) return wrong("last");
  }
  if (steps != (training ? 2U : 0U)) return "one reduction and one step, when training";
  for (const auto& [kind, items] : posted)
    if (!items.empty()) return "a posted receive is left over";
  if (!activations.empty() || !output.empty() || !gradient.empty() || !split.empty())
    return "something is left over";
  for (int c = 0; c < o.chunks_per_stage; ++c) {
    const auto count = [&](Kind kind) { return next[{kind, c}]; };
    const bool first = stage == 0 && c == 0, last = stage + 1 == o.stages && c + 1 == o.chunks_per_stage;
    const int n = o.microbatches, back = training ? n : 0;
    if (count(Kind::forward) != n || count(Kind::backward) + count(Kind::backward_data) != back ||
        count(Kind::receive_forward) != (first ? 0 : n) ||
        count(Kind::receive_backward) != (last ? 0 : back) ||
        count(Kind::send_forward) != (last || !messages ? 0 : n) ||
        count(Kind::send_backward) != (first || !messages ? 0 : back))
      return fmt::format("chunk {}: not everything for every microbatch", c);
  }
  return "";
}

}  // namespace nrl::pipeline
