#include "apps/plan/layer_traffic.h"

#include <algorithm>
#include <map>
#include <set>
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
  const std::map<int, BucketRef>& all() const { return buckets_; }

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

/// A pass of a layer over any microbatch.
using LayerPass = std::pair<const model::Layer*, bool>;
LayerPass pass_of(const model::LayerVisit& v) {
  return {v.layer, v.backward};
}

/// By parameter: the pass of a microbatch that completes its gradient.
std::map<int, LayerPass> completing_passes(std::span<const model::LayerVisit> visits) {
  std::set<LayerPass> seen;
  std::map<int, LayerPass> out;
  // The first microbatch stands for all: each has the passes in the same order.
  for (const model::LayerVisit& v : visits)
    if (seen.insert(pass_of(v)).second)
      for (const int p : v.layer->parameters(v.backward).gradients) out[p] = pass_of(v);
  return out;
}

}  // namespace

std::vector<LayerTraffic> layer_traffic(std::span<const model::LayerVisit> visits,
                                        std::span<const ParamGroup> groups, const TrafficOptions& options) {
  std::vector<LayerTraffic> out(visits.size());
  const BucketIndex weights(groups, &ParamGroup::weights_sharded);
  std::vector<Buckets> read;
  for (const model::LayerVisit& v : visits)
    read.push_back(weights.of(v.layer->parameters(v.backward).weights));
  read.emplace_back();
  for (size_t i = 0; i < visits.size(); ++i) {
    out[i].last = visits[i].last;
    out[i].gather = listed(read[i]);
    out[i].release = listed(without(read[i], read[i + 1]));
    if (options.prefetch) out[i].prefetch = listed(without(read[i + 1], read[i]));
  }
  if (!options.gradients) return out;

  const BucketIndex gradients(groups, &ParamGroup::gradients_sharded);
  const auto completing = completing_passes(visits);
  struct Open {
    std::set<int> missing;       // parameters to be completed
    std::set<LayerPass> passes;  // that have contributed
  };
  std::map<BucketRef, Open> open;
  Buckets reducing;  // complete, but not settled
  for (size_t i = 0; i < visits.size(); ++i) {
    const model::LayerVisit& v = visits[i];
    const std::vector<int> written = v.layer->parameters(v.backward).gradients;
    const Buckets touched = gradients.of(written);
    if (!touched.empty() && !v.whole)
      fail(Exit::config,
           "sharded gradients need the whole backward pass of a layer at once, but the pipeline schedule "
           "defers weight gradients. Fix: use distributed.shard_strategy: optim, or another schedule");
    // The sums of earlier visits are waited for at the end of this one.
    Buckets done = std::exchange(reducing, {});
    for (const BucketRef& b : touched) {
      if (!open.contains(b)) {
        out[i].open.push_back(b);
        done.erase(b);  // waited for when it is opened
        for (const auto& [p, bucket] : gradients.all())
          if (bucket == b) open[b].missing.insert(p);
      }
      if (!open[b].passes.insert(pass_of(v)).second)
        fail(Exit::config,
             "sharded gradients are those of one microbatch, but the pipeline schedule begins {} of another "
             "one before they are reduced. Fix: use distributed.shard_strategy: optim, or another schedule",
             v.layer->name());
    }
    for (const int p : written) {
      const auto at = gradients.all().find(p);
      if (at == gradients.all().end() || completing.at(p) != pass_of(v)) continue;
      std::set<int>& missing = open.at(at->second).missing;
      missing.erase(p);
      if (!missing.empty()) continue;
      open.erase(at->second);
      (options.overlap_reduce ? reducing : done).insert(at->second);
    }
    out[i].settle = listed(done);
  }
  NRL_CHECK(open.empty(), "gradients of {} are incomplete at the end of the step",
            groups[static_cast<size_t>(open.begin()->first.group)].name);
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

StepTraffic plan_layer_traffic(const model::Decoder& decoder, std::span<ParamGroup> groups,
                               const TrafficOptions& options, memory::MemoryPlan& memory) {
  StepTraffic out;
  const bool sharded = std::any_of(groups.begin(), groups.end(), [](const ParamGroup& g) {
    return g.weights_sharded || g.gradients_sharded;
  });
  if (!sharded) return out;
  Lifetimes weights, gradients;
  for (const memory::Mode mode : {memory::training, memory::evaluation}) {
    const model::Decoder::Visits visits = decoder.visits(mode);
    TrafficOptions now = options;
    now.gradients = mode == memory::training;
    (mode == memory::training ? out.training : out.evaluation) = layer_traffic(visits.executed, groups, now);
    add_lifetimes(visits.recorded, layer_traffic(visits.recorded, groups, now), weights, gradients);
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
  for (size_t i = 0; i < groups.size(); ++i) {
    ParamGroup& g = groups[i];
    const auto group = static_cast<int>(i);
    if (g.weights_sharded)
      g.gathered = declare(g, group, "gathered weights", memory::Category::weights, weights, g.weight);
    if (g.gradients_sharded)
      g.bucket_gradients = declare(g, group, "gradients", memory::Category::gradients, gradients, g.gradient);
  }
  return out;
}

}  // namespace nrl::plan
