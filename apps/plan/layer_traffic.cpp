#include "apps/plan/layer_traffic.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/error.h"

namespace nrl::plan {
namespace {

using memory::Lifetime;
using Buckets = std::set<BucketRef>;

/// The buckets of the parameters of sharded groups.
class BucketIndex {
 public:
  BucketIndex(std::span<const ParamGroup> groups, bool ParamGroup::*sharded) {
    for (size_t g = 0; g < groups.size(); ++g) {
      if (!(groups[g].*sharded)) continue;
      for (size_t p = 0; p < groups[g].parameters.size(); ++p)
        buckets_[groups[g].parameters[p]] = {static_cast<int>(g),
                                             groups[g].layout.place(static_cast<int>(p)).bucket};
    }
  }
  Buckets of(const std::vector<int>& parameters) const {
    Buckets out;
    for (const int p : parameters)
      if (const auto at = buckets_.find(p); at != buckets_.end()) out.insert(at->second);
    return out;
  }

 private:
  std::map<int, BucketRef> buckets_;  // by parameter
};

std::vector<BucketRef> listed(const Buckets& set) {
  return {set.begin(), set.end()};
}

Buckets without(Buckets set, const Buckets& others) {
  for (const BucketRef& other : others) set.erase(other);
  return set;
}

/// A pass of a layer over any microbatch: forward, or backward with these kinds of steps.
using LayerPass = std::tuple<const model::Layer*, bool, bool, bool>;
LayerPass pass_of(const model::LayerVisit& v) {
  return {v.layer, v.backward, v.dgrad, v.wgrad};
}

/// The passes of a microbatch that contribute to each bucket. They are complete when there were as many of
/// one as of every other.
std::map<BucketRef, std::map<LayerPass, int>> contributing_passes(std::span<const model::LayerVisit> visits,
                                                                  const BucketIndex& gradients) {
  std::map<BucketRef, std::map<LayerPass, int>> out;
  for (const model::LayerVisit& v : visits)
    for (const BucketRef& b : gradients.of(v.layer->parameters(v.backward).gradients)) out[b][pass_of(v)] = 0;
  return out;
}

}  // namespace

std::vector<LayerTraffic> layer_traffic(std::span<const model::LayerVisit> visits,
                                        std::span<const ParamGroup> groups, const TrafficOptions& options) {
  std::vector<LayerTraffic> out(visits.size());
  const BucketIndex weights(groups, &ParamGroup::weights_gathered);
  std::vector<Buckets> read;
  for (const model::LayerVisit& v : visits)
    read.push_back(weights.of(v.layer->parameters(v.backward).weights));
  read.emplace_back();
  for (size_t i = 0; i < visits.size(); ++i) {
    out[i].gather = listed(read[i]);
    out[i].release = listed(without(read[i], read[i + 1]));
    if (options.prefetch) out[i].prefetch = listed(without(read[i + 1], read[i]));
  }
  if (!options.gradients) return out;

  const BucketIndex gradients(groups, &ParamGroup::gradients_sharded);
  const auto passes = contributing_passes(visits, gradients);
  struct Open {
    size_t visit, entry;  // where it was opened: out[visit].open[entry]
    std::map<LayerPass, int> seen;
  };
  std::map<BucketRef, Open> open;
  std::map<BucketRef, std::pair<size_t, size_t>> newest;  // the visit and entry that opened a bucket last
  Buckets reducing;                                       // complete, but not settled
  for (size_t i = 0; i < visits.size(); ++i) {
    const model::LayerVisit& v = visits[i];
    // The sums of earlier visits are waited for at the end of this one.
    Buckets done = std::exchange(reducing, {});
    for (const BucketRef& b : gradients.of(v.layer->parameters(v.backward).gradients)) {
      if (!open.contains(b)) {
        newest[b] = {i, out[i].open.size()};
        open[b] = {i, out[i].open.size(), passes.at(b)};
        out[i].open.push_back({b});
        done.erase(b);  // waited for when it is opened
      }
      Open& now = open.at(b);
      const int microbatches = ++now.seen.at(pass_of(v));
      if (!std::all_of(now.seen.begin(), now.seen.end(),
                       [&](const auto& pass) { return pass.second == microbatches; }))
        continue;
      out[now.visit].open[now.entry].microbatches = microbatches;
      out[i].reduce.push_back(b);
      open.erase(b);
      (options.overlap_reduce ? reducing : done).insert(b);
    }
    out[i].settle = listed(done);
  }
  NRL_CHECK(open.empty(), "gradients of {} are incomplete at the end of the step",
            groups[static_cast<size_t>(open.begin()->first.group)].name);
  for (const auto& [b, at] : newest) out[at.first].open[at.second].last = true;
  return out;
}

namespace {

/// The intervals in which buffers are in use, by bucket.
using Lifetimes = std::map<BucketRef, std::vector<Lifetime>>;

void add_lifetime(std::vector<Lifetime>& list, Lifetime life) {
  if (!list.empty() && life.first <= list.back().last + 1)
    list.back().last = std::max(list.back().last, life.last);
  else
    list.push_back(life);
}

void add_lifetimes(std::span<const model::LayerVisit> visits, std::span<const LayerTraffic> traffic,
                   Lifetimes& weights, Lifetimes& gradients) {
  std::map<BucketRef, int> gathered, written;  // bucket -> first tick
  for (size_t i = 0; i < visits.size(); ++i) {
    const auto [first, last] = std::pair(visits[i].first_tick, visits[i].last_tick);
    for (const auto* list : {&traffic[i].gather, &traffic[i].prefetch})
      for (const BucketRef& b : *list) gathered.try_emplace(b, first);
    for (const BucketRef& b : traffic[i].open) written.try_emplace(b, first);
    const auto end = [&](const BucketRef& b, std::map<BucketRef, int>& from, Lifetimes& lives, int tick) {
      const auto at = from.find(b);
      NRL_CHECK(at != from.end(), "bucket {} ends before it begins", b.bucket);
      add_lifetime(lives[b], {at->second, tick});
      from.erase(at);
    };
    for (const BucketRef& b : traffic[i].release) end(b, gathered, weights, last);
    for (const BucketRef& b : traffic[i].settle) end(b, written, gradients, last);
  }
  // The rest is reduced at the end of the step.
  for (const auto& [b, first] : written) add_lifetime(gradients[b], {first, visits.back().last_tick});
}

}  // namespace

bool shards(std::span<const ParamGroup> groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const ParamGroup& g) { return g.weights_gathered || g.gradients_sharded; });
}

StepTraffic plan_layer_traffic(const model::Decoder& decoder, std::span<ParamGroup> groups,
                               const TrafficOptions& options, memory::MemoryPlan& memory) {
  StepTraffic out;
  if (!shards(groups)) return out;
  Lifetimes weights, gradients;
  for (const memory::Mode mode : {memory::training, memory::evaluation}) {
    const model::Decoder::Visits visits = decoder.visits(mode);
    TrafficOptions now = options;
    now.gradients = mode == memory::training;
    (mode == memory::training ? out.training : out.evaluation) = layer_traffic(visits.executed, groups, now);
    add_lifetimes(visits.listed, layer_traffic(visits.listed, groups, now), weights, gradients);
  }
  const auto declare = [&](ParamGroup& g, int group, const char* what, memory::Category category,
                           const Lifetimes& lives, DType dtype) {
    std::vector<memory::BufferId> ids;
    for (int b = 0; b < static_cast<int>(g.layout.buckets().size()); ++b) {
      const auto at = lives.find({group, b});
      NRL_CHECK(at != lives.end(), "no layer uses bucket {} of {}", b, g.name);
      ids.push_back(memory.add(fmt::format("{} bucket {} {}", g.name, b, what), category,
                               g.layout.buckets()[static_cast<size_t>(b)].size * size_of(dtype), at->second));
    }
    return ids;
  };
  for (const LayerTraffic& t : out.training)
    for (const OpenBucket& b : t.open)
      if (b.microbatches > 1) groups[static_cast<size_t>(b.group)].add_microbatches();
  for (size_t i = 0; i < groups.size(); ++i) {
    ParamGroup& g = groups[i];
    const auto group = static_cast<int>(i);
    if (g.weights_gathered)
      g.gathered = declare(g, group, "gathered weights", memory::Category::weights, weights, g.read_type());
    if (g.gradients_sharded)
      g.bucket_gradients = declare(g, group, "gradients", memory::Category::gradients, gradients, g.gradient);
  }
  return out;
}

std::string program_text(const model::Decoder& decoder, std::span<const ParamGroup> groups,
                         const TrafficOptions& options) {
  program::Notes notes;
  if (shards(groups))
    for (const LayerTraffic& t : layer_traffic(decoder.visits(memory::training).listed, groups, options)) {
      const auto list = [&](const char* what, const auto& buckets) {
        std::string out;
        for (const BucketRef& b : buckets)
          out += fmt::format("{} {}, bucket {}\n", what, groups[static_cast<size_t>(b.group)].name, b.bucket);
        return out;
      };
      notes.before.push_back(list("gather", t.gather) + list("prefetch", t.prefetch) +
                             list("open gradients", t.open));
      notes.after.push_back(list("reduce", t.reduce) + list("release", t.release) + list("settle", t.settle));
    }
  return decoder.program_text(notes);
}

}  // namespace nrl::plan
