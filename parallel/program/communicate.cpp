#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "parallel/program/list.h"
#include "parallel/program/lower.h"

namespace nrl::program {

namespace {

/// Adds the step once for each group that has some of the buckets.
void add(Program& to, Step step, const Buckets& buckets) {
  std::vector<int> of_group;
  for (auto b = buckets.begin(); b != buckets.end();) {
    of_group.push_back(b->bucket);
    step.index = static_cast<int16_t>(b->group);
    if (++b != buckets.end() && b->group == step.index) continue;
    to.add(step, {}, {}, of_group);
    of_group.clear();
  }
}

Step for_visit(StepKind kind, const Step& visit) {
  return {.kind = kind,
          .backward = visit.backward || visit.again,
          .chunk = visit.chunk,
          .microbatch = visit.microbatch};
}

Buckets without(Buckets set, const Buckets& others) {
  for (const BucketId& other : others) set.erase(other);
  return set;
}

/// Takes a program with what before(visit) and after(visit) add to `out` around its visits.
template <class Before, class After>
void around_visits(const Program& p, Program& out, const Before& before, const After& after) {
  for (size_t i = 0; i < p.steps.size();) {
    take_period(out, p.period, i);
    const Step& s = p.steps[i];
    if (!s.begins_visit()) {
      out.take(p, p.steps[i++]);
      continue;
    }
    before(s);
    for (const size_t end = p.visit_end(i); i < end; ++i) out.take(p, p.steps[i]);
    after(s);
  }
}

/// A pass of a layer over any microbatch: forward, or backward with dgrad, wgrad or both.
using Pass = std::tuple<int, bool, bool, bool>;
Pass pass_of(const Step& s) {
  return {s.layer, s.backward, s.dgrad, s.wgrad};
}

}  // namespace

Program gather_on_use(const Program& program, const Layers& layers, bool prefetch) {
  const Buckets none;
  std::vector<const Buckets*> read{&none};  // by visit, between two that read nothing
  for (const Step& s : program.steps)
    if (s.begins_visit()) read.push_back(&layers.of(s.layer).weights[s.backward]);
  read.push_back(&none);
  size_t now = 0;
  Program out = extension_of(program);
  const auto before = [&](const Step& visit) {
    ++now;
    const Step gather = for_visit(StepKind::gather, visit);
    const Buckets added = without(*read[now], *read[now - 1]);
    if (!prefetch || now == 1) add(out, gather, added);
    if (prefetch) add(out, gather, without(*read[now + 1], *read[now]));
    add(out, wait_for(gather), added);
  };
  const auto after = [&](const Step& visit) {
    add(out, for_visit(StepKind::release, visit), without(*read[now], *read[now + 1]));
  };
  around_visits(program, out, before, after);
  return out;
}

Program reduce_when_complete(const Program& program, const Layers& layers, bool overlap) {
  if (program.mode != memory::training) return program;
  Program out = extension_of(program);
  // The passes that add to a bucket. Its gradients are complete when there were as many of each.
  std::map<BucketId, std::map<Pass, int>> passes;
  for (const Step& s : program.steps)
    if (s.begins_visit())
      for (const BucketId& b : layers.of(s.layer).gradients[s.backward]) passes[b][pass_of(s)] = 0;
  std::map<BucketId, size_t> opened;  // the step that opened a bucket last
  Buckets open, reducing, done;       // reducing: sums in flight; done: those to wait for after this visit
  const auto before = [&](const Step& visit) {
    done = std::exchange(reducing, {});
    for (const BucketId& b : layers.of(visit.layer).gradients[visit.backward]) {
      if (!open.insert(b).second) continue;
      if (done.erase(b) > 0) add(out, wait_for(for_visit(StepKind::reduce, visit)), {b});
      opened[b] = out.steps.size();
      add(out, for_visit(StepKind::open, visit), {b});
    }
  };
  const auto after = [&](const Step& visit) {
    Buckets complete;
    for (const BucketId& b : layers.of(visit.layer).gradients[visit.backward]) {
      const int microbatches = ++passes[b][pass_of(visit)];
      if (std::any_of(passes[b].begin(), passes[b].end(),
                      [&](const auto& pass) { return pass.second != microbatches; }))
        continue;
      for (auto& [pass, count] : passes[b]) count = 0;
      // A bucket that is open throughout the period has the microbatches of all its repetitions.
      Step& begin = out.steps[opened[b]];
      begin.throughout = out.period.times > 0 && opened[b] < out.period.begin;
      begin.microbatches = microbatches + (begin.throughout ? out.period.times * out.period.microbatches : 0);
      open.erase(b);
      complete.insert(b);
    }
    add(out, for_visit(StepKind::reduce, visit), complete);
    (overlap ? reducing : done).merge(complete);
    add(out, wait_for(for_visit(StepKind::reduce, visit)), done);
  };
  around_visits(program, out, before, after);
  NRL_CHECK(open.empty(), "gradients of {} are incomplete at the end of the step",
            layers.name(*open.begin()));
  for (const auto& [b, step] : opened) out.steps[step].last = true;
  return out;
}

}  // namespace nrl::program
