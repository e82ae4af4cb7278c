#include "apps/predict/step_timeline.h"

#include <algorithm>
#include <array>
#include <map>
#include <span>

#include "core/base/error.h"

namespace nrl::predict {
namespace {

using pipeline::ActionKind;

bool is_pass(ActionKind kind) {
  return kind == ActionKind::forward || kind == ActionKind::backward || kind == ActionKind::backward_data ||
         kind == ActionKind::backward_weight;
}

/// The items of a dry run by pass, as indices.
class Templates {
 public:
  /// `splits`: weight gradients have passes of their own.
  Templates(const StageItems& from, int chunks, int microbatches, bool splits)
      : chunks_(static_cast<size_t>(chunks)),
        splits_(splits),
        run_(microbatches),
        passes_(static_cast<size_t>(microbatches) * chunks_ * pass_count) {
    // Calls say where a pass begins and ends. Operations before its first call belong to the pass before,
    // except those for itself; in between there are also some for later passes.
    std::vector<int> next(from.items.size() + 1, -1);  // slot of the next call of a pass
    for (size_t i = from.items.size(); i-- > 0;) {
      const int slot = slot_of(from, static_cast<int>(i));
      next[i] = slot >= 0 && from.items[i].kind == Item::Kind::call ? slot : next[i + 1];
    }
    int current = -1;
    for (size_t i = 0; i < from.items.size(); ++i) {
      const int slot = slot_of(from, static_cast<int>(i));
      if (slot >= 0 && slot == next[i]) current = slot;
      if (next[i] < 0 && slot < 0) current = -1;
      std::vector<int>& to = current >= 0  ? passes_[static_cast<size_t>(current)]
                             : next[i] < 0 ? after
                                           : before;
      to.push_back(static_cast<int>(i));
    }
  }

  const std::vector<int>& of(const PassSpan& pass, int microbatch) const {
    const Pass kind = pass.kind == ActionKind::forward                      ? Pass::forward
                      : splits_ && pass.kind == ActionKind::backward_weight ? Pass::backward_weight
                                                                            : Pass::backward_data;
    return passes_[(static_cast<size_t>(microbatch) * chunks_ + static_cast<size_t>(pass.chunk)) *
                       pass_count +
                   static_cast<size_t>(kind)];
  }
  /// The dry-run microbatch for one of the step's `count`.
  int microbatch(int m, int64_t count) const {
    const int from_end = static_cast<int>(count) - 1 - m;
    if (run_ == count || m == 0) return m;
    if (from_end == 0 || run_ < 3) return run_ - 1;
    if (m < run_ - 1 && m < from_end) return m;
    if (from_end < run_ - 1) return run_ - 1 - from_end;
    return 1 + (m - 1) % (run_ - 2);
  }
  /// Microbatches by which the items after the passes are later than in the dry run.
  int shift_after(int64_t count) const { return static_cast<int>(count) - run_; }

  std::vector<int> before, after;  ///< the passes

 private:
  /// Slot of the item's pass; -1: the item is outside of all passes.
  int slot_of(const StageItems& from, int item) const {
    const int slot = from.items[item].slot;
    if (slot + 1 == static_cast<int>(from.slots)) return -1;
    const bool weight = static_cast<size_t>(slot) % pass_count == static_cast<size_t>(Pass::backward_weight);
    return !splits_ && weight ? slot - 1 : slot;
  }

  size_t chunks_;
  bool splits_;
  int run_;
  std::vector<std::vector<int>> passes_;
};

/// Times of one kind of rank.
struct DryRank {
  const engine::DryStep& step;
  const StageItems& items;
  Templates templates;
  std::vector<machine::Source> sources = {};             // by call
  std::map<int, const plan::TrafficEvent*> starts = {};  // by operation
};

class StageReplay {
 public:
  StageReplay(const DryRank& rank, StageTimeline& stage, int64_t microbatches,
              const machine::Overlap& overlap)
      : rank_(rank), out_(stage), microbatches_(microbatches), overlap_(overlap) {}

  void run() {
    const size_t passes = out_.passes.size();
    std::vector<size_t> marks(passes);
    add(rank_.templates.before, 0, -1);
    for (size_t p = 0; p < passes; ++p) {
      const int m = rank_.templates.microbatch(out_.passes[p].microbatch, microbatches_);
      const std::vector<int>& of_pass = rank_.templates.of(out_.passes[p], m);
      if (p >= out_.hidden.first && p < out_.hidden.second) {
        for (const int i : of_pass)
          if (rank_.items.items[i].kind == Item::Kind::call)
            out_.hidden_compute += rank_.items.items[i].seconds;
        continue;
      }
      marks[p] = until_;
      until(out_.passes[p].begin);
      add(of_pass, out_.passes[p].microbatch - m, static_cast<int>(p));
      until(0);
    }
    if (out_.hidden.second == passes && out_.hidden.first < passes) until(out_.passes.back().end);
    add(rank_.templates.after, rank_.templates.shift_after(microbatches_), -1);
    const Replay replayed = replay(items_, 1, overlap_, true);
    out_.end = replayed.end;
    for (size_t p = 0; p < passes; ++p) {
      if (p >= out_.hidden.first && p < out_.hidden.second) continue;
      out_.passes[p].begin = replayed.reached[marks[p]];
      out_.passes[p].end = replayed.reached[marks[p] + 1];
    }
    for (const Span& span : replayed.spans)
      if (span.source >= 0) out_.work.push_back(work_of(span));
  }

 private:
  struct Origin {
    int pass, item;
  };

  void until(double time) {
    items_.push_back(
        {.kind = Item::Kind::until, .seconds = time, .purpose = comm::Purpose::messages, .source = -1});
    ++until_;
  }

  /// `shift`: microbatches by which the items are later than in the dry run. An operation that starts in one
  /// pass and ends in another keeps its identity where both have the same shift.
  void add(const std::vector<int>& items, int shift, int pass) {
    const auto id = [&](int operation) {
      if (operation < 0) return -1;
      return ids_.try_emplace({operation, shift}, static_cast<int>(ids_.size())).first->second;
    };
    for (const int i : items) {
      Item item = rank_.items.items[i];
      item.slot = 0;
      item.operation = id(item.operation);
      item.after = id(item.after);
      item.source = static_cast<int>(origins_.size());
      origins_.push_back({pass, i});
      items_.push_back(item);
    }
  }

  WorkSpan work_of(const Span& span) const {
    const Origin& origin = origins_[span.source];
    const Item& item = rank_.items.items[origin.item];
    WorkSpan out{.span = span, .pass = origin.pass, .source = rank_.items.links};
    if (item.kind == Item::Kind::call) {
      out.call = &rank_.step.calls[item.source];
      out.source = rank_.sources[item.source];
    } else {
      out.event = rank_.starts.at(rank_.step.events[item.source].what.operation);
    }
    if (item.kind != Item::Kind::wait) out.alone = item.seconds;
    return out;
  }

  const DryRank& rank_;
  StageTimeline& out_;
  int64_t microbatches_;
  const machine::Overlap& overlap_;
  std::vector<Item> items_;
  std::vector<Origin> origins_;
  std::map<std::pair<int, int>, int> ids_;
  size_t until_ = 0;
};

/// The passes of the schedules at the times of the simulation.
void add_passes(const StepDerivation& from, int64_t microbatches, int64_t shown, StepTimeline& out) {
  for (const pipeline::Simulation::Completed& c : from.simulation.order) {
    const pipeline::Action& a = from.schedules[c.stage].actions[c.action];
    if (is_pass(a.kind))
      out.stages[c.stage].passes.push_back({a.kind, a.chunk, a.microbatch, c.begin, c.end});
  }
  for (StageTimeline& stage : out.stages) {
    const size_t n = stage.passes.size();
    size_t first = 0, second = n;
    for (size_t p = 0; p < n; ++p)
      if (stage.passes[p].microbatch < shown) first = p + 1;
    for (size_t p = n; p-- > 0;)
      if (stage.passes[p].microbatch >= microbatches - shown) second = p;
    stage.hidden = first < second ? std::pair(first, second) : std::pair(n, n);
  }
}

/// Puts hidden passes between those around them, which may be longer than in the simulation.
void fit_hidden(StageTimeline& stage) {
  double now = stage.hidden.first > 0 ? stage.passes[stage.hidden.first - 1].end : 0;
  const double until =
      stage.hidden.second < stage.passes.size() ? stage.passes[stage.hidden.second].begin : stage.end;
  for (size_t p = stage.hidden.first; p < stage.hidden.second; ++p) {
    PassSpan& pass = stage.passes[p];
    pass.begin = std::clamp(pass.begin, now, std::max(now, until));
    pass.end = std::clamp(pass.end, pass.begin, std::max(now, until));
    now = pass.end;
  }
}

void add_messages(int stages, int chunks, int64_t microbatches, std::span<const double> seconds,
                  StepTimeline& out) {
  const auto key = [&](int model_chunk, bool backward, int microbatch) {
    return (static_cast<size_t>(model_chunk) * 2 + (backward ? 1 : 0)) * static_cast<size_t>(microbatches) +
           static_cast<size_t>(microbatch);
  };
  const int model_chunks = stages * chunks;
  std::vector<int> receivers(key(model_chunks, false, 0), -1);
  const auto hidden = [](const StageTimeline& s, size_t pass) {
    return pass >= s.hidden.first && pass < s.hidden.second;
  };
  for (const StageTimeline& s : out.stages)
    for (size_t p = 0; p < s.passes.size(); ++p)
      if (!hidden(s, p) && s.passes[p].kind != ActionKind::backward_weight)
        receivers[key(s.passes[p].chunk * stages + s.stage, s.passes[p].backward(), s.passes[p].microbatch)] =
            static_cast<int>(p);
  for (const StageTimeline& s : out.stages) {
    std::array<double, 2> free{};
    for (size_t p = 0; p < s.passes.size(); ++p) {
      const PassSpan& pass = s.passes[p];
      if (hidden(s, p) || pass.kind == ActionKind::backward_weight) continue;
      const int to = pass.chunk * stages + s.stage + (pass.backward() ? -1 : 1);
      if (to < 0 || to >= model_chunks || stages == 1) continue;
      const int receiver = receivers[key(to, pass.backward(), pass.microbatch)];
      if (receiver < 0) continue;
      double& link = free[pass.backward() ? 1 : 0];
      const double begin = std::max(link, pass.end);
      link = begin + seconds[s.dry];
      out.messages.push_back({.from = s.stage,
                              .to = to % stages,
                              .sender = p,
                              .receiver = static_cast<size_t>(receiver),
                              .begin = begin,
                              .end = link});
    }
  }
}

}  // namespace

std::vector<PassIndex> longest_path(const StepTimeline& timeline) {
  std::map<PassIndex, const MessageSpan*> arrivals;
  for (const MessageSpan& m : timeline.messages) arrivals[{m.to, m.receiver}] = &m;
  const PassSpan* last = nullptr;
  PassIndex at;
  size_t count = 0;
  for (const StageTimeline& stage : timeline.stages) {
    count += stage.passes.size();
    if (stage.passes.empty() || (last && stage.passes.back().end <= last->end)) continue;
    last = &stage.passes.back();
    at = {static_cast<int>(&stage - timeline.stages.data()), stage.passes.size() - 1};
  }
  std::vector<PassIndex> out;
  while (last && out.size() < count) {
    out.push_back(at);
    const auto message = arrivals.find(at);
    const PassSpan* const before = at.pass > 0 ? &timeline.stages[at.stage].passes[at.pass - 1] : nullptr;
    if (message != arrivals.end() && (!before || message->second->end >= before->end))
      at = {message->second->from, message->second->sender};
    else if (before)
      --at.pass;
    else
      break;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

StepTimeline step_timeline(const DryStages& stages, int64_t shown, Detail detail) {
  StepDerivation derivation;
  StepTimeline out{.estimate = stages.estimate(machine::likely, &derivation)};
  const int count = stages.layout().stages, chunks = stages.layout().chunks;
  const bool splits =
      std::any_of(derivation.schedules.begin(), derivation.schedules.end(), [](const pipeline::Schedule& s) {
        return std::any_of(s.actions.begin(), s.actions.end(),
                           [](const auto& a) { return a.kind == ActionKind::backward_weight; });
      });
  out.stages.resize(static_cast<size_t>(count));
  for (int s = 0; s < count; ++s) out.stages[s].stage = s;
  add_passes(derivation, stages.microbatches(), shown, out);
  const machine::CallTimes calls = stages.call_times();
  const machine::Overlap overlap = stages.rates(calls).overlap;
  std::vector<double> messages;
  for (size_t d = 0; d < stages.stages().size(); ++d) {
    const DryStages::Stage& dry = stages.stages()[d];
    const StageItems& items = derivation.items[d];
    DryRank rank{.step = dry.step,
                 .items = items,
                 .templates = Templates(items, chunks, dry.step.microbatches, splits)};
    for (const ops::Call& call : dry.step.calls) rank.sources.push_back(calls.of(call).source);
    for (const plan::TrafficEvent& e : dry.step.events)
      if (!e.what.wait) rank.starts[e.what.operation] = &e;
    messages.push_back(items.message);
    const int until = d + 1 < stages.stages().size() ? stages.stages()[d + 1].stage : count;
    for (int s = dry.stage; s < until; ++s) {
      StageTimeline& stage = out.stages[s];
      stage.dry = d;
      if (detail == Detail::all || (detail == Detail::dry_run && s == dry.stage))
        StageReplay(rank, stage, stages.microbatches(), overlap).run();
      else
        stage.end = stage.passes.back().end;
      fit_hidden(stage);
      out.end = std::max(out.end, stage.end);
    }
  }
  add_messages(count, chunks, stages.microbatches(), messages, out);
  return out;
}

}  // namespace nrl::predict
