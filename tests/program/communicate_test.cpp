// Gathers of sharded weights and reductions of sharded gradients, as steps of programs without a model.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/pipeline/equivalent.h"
#include "parallel/program/live_ranges.h"
#include "parallel/program/lower.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::program;
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::Schedule;

namespace {

/// Layers with a step each for forward, dgrad and wgrad, one below the other in one chunk.
class Toy {
 public:
  struct Of {
    std::string name;
    std::array<Buckets, 2> weights, gradients;
  };
  explicit Toy(const std::vector<Of>& of) {
    const memory::Slot x = table_.add({.name = "x", .width = 1, .port = true}),
                       out = table_.add({.name = "out", .width = 1}),
                       d_out = table_.add({.name = "d_out", .width = 1, .port = true}),
                       d_x = table_.add({.name = "d_x", .width = 1});
    table_.add({.name = "work", .pass = memory::Pass::forward, .reads = x.bit(), .writes = out.bit()});
    table_.add({.name = "work", .pass = memory::Pass::data, .reads = d_out.bit(), .writes = d_x.bit()});
    table_.add({.name = "work", .pass = memory::Pass::weight, .reads = out.bit(), .writes = 0});
    policy_ = std::make_unique<memory::LayerPolicy>(table_, 0);
    std::vector<Layer> all;
    for (const Of& layer : of)
      all.push_back({.name = layer.name,
                     .table = &table_,
                     .policy = policy_.get(),
                     .later = policy_.get(),
                     .ports = {x, {}, out, {}, d_out, d_x, {}, {}},
                     .weights = layer.weights,
                     .gradients = layer.gradients});
    layers = Layers(std::move(all), [](const memory::SlotSpec&) { return 256; });
    layers.groups = {"dense", "experts"};
  }

  Program lowered(const Schedule& schedule, memory::Mode mode = memory::training) const {
    // On one of several stages there are messages.
    const bool alone = std::none_of(schedule.actions.begin(), schedule.actions.end(), [](const Action& a) {
      return a.kind == ActionKind::send_forward || a.kind == ActionKind::send_backward;
    });
    return lower(schedule, layers, mode, alone, false);
  }
  Program communicating(const Schedule& schedule, bool prefetch, bool overlap,
                        memory::Mode mode = memory::training) const {
    return reduce_when_complete(gather_on_use(lowered(schedule, mode), layers, prefetch), layers, overlap);
  }
  RangesOfBuckets ranges(const Program& p) const {
    RangesOfBuckets out;
    add_bucket_ranges(p, layers, 0, out);
    return out;
  }
  /// The text of a program without the steps of layers.
  std::string text(const Program& p) const {
    std::string out, all = program::text(p, layers);
    for (size_t at = 0, end = 0; at < all.size(); at = end + 1) {
      end = all.find('\n', at);
      if (all[at] != ' ') out += all.substr(at, end - at + 1);
    }
    return out;
  }

  Layers layers;

 private:
  memory::LayerTable table_;
  std::unique_ptr<memory::LayerPolicy> policy_;
};

constexpr BucketId b0{0, 0}, b1{0, 1}, b2{0, 2}, b3{0, 3}, e0{1, 0};

/// An embedding, which reads no weights backward, a block with buckets of two groups, and a head, which adds
/// to a gradient in its forward pass.
Toy three_layers() {
  return Toy({{"embedding", {{{b0}, {}}}, {{{}, {b0}}}},
              {"block", {{{b1, b2, e0}, {b1, b2, e0}}}, {{{}, {b1, b2, e0}}}},
              {"head", {{{b3}, {b3}}}, {{{b3}, {b3}}}}});
}

/// A schedule of these passes, with its end.
Schedule schedule_of(std::vector<Action> passes, int stashes) {
  int microbatches = 0;
  for (Action& a : passes) {
    a.stash = a.microbatch % stashes;
    microbatches = std::max(microbatches, a.microbatch + 1);
  }
  passes.push_back({ActionKind::finish_reduce});
  passes.push_back({ActionKind::step});
  return {.actions = std::move(passes), .stashes = pipeline::Stashes::in_turn({stashes}, microbatches)};
}
Schedule one_by_one(int microbatches) {
  return pipeline::make_schedule({.microbatches = microbatches}, 0);
}

}  // namespace

TEST_CASE("weights are gathered before they are read, in one operation for each group", "[program]") {
  const Toy toy = three_layers();
  const Program p = toy.communicating(one_by_one(1), false, true, memory::evaluation);
  CHECK(toy.text(p).starts_with(R"(gather: [dense bucket 0]
wait for gather: [dense bucket 0]
microbatch 0, embedding: forward
release: [dense bucket 0]
gather: [dense bucket 1] [dense bucket 2]
gather: [experts bucket 0]
wait for gather: [dense bucket 1] [dense bucket 2]
wait for gather: [experts bucket 0]
microbatch 0, block: forward
release: [dense bucket 1] [dense bucket 2]
release: [experts bucket 0]
gather: [dense bucket 3]
wait for gather: [dense bucket 3]
microbatch 0, head: forward
)"));
}

TEST_CASE("gathers for a visit start before the one that precedes it", "[program]") {
  const Toy toy = three_layers();
  const Program p = toy.communicating(one_by_one(1), true, true);
  CHECK(toy.text(p) == R"(gather: [dense bucket 0]
gather: [dense bucket 1] [dense bucket 2]
gather: [experts bucket 0]
wait for gather: [dense bucket 0]
microbatch 0, embedding: forward
release: [dense bucket 0]
gather: [dense bucket 3]
wait for gather: [dense bucket 1] [dense bucket 2]
wait for gather: [experts bucket 0]
microbatch 0, block: forward
release: [dense bucket 1] [dense bucket 2]
release: [experts bucket 0]
wait for gather: [dense bucket 3]
open gradients: [dense bucket 3]
microbatch 0, head: forward
gather: [dense bucket 1] [dense bucket 2]
gather: [experts bucket 0]
microbatch 0, head: backward
reduce: [dense bucket 3]
release: [dense bucket 3]
wait for gather: [dense bucket 1] [dense bucket 2]
wait for gather: [experts bucket 0]
open gradients: [dense bucket 1]
open gradients: [dense bucket 2]
open gradients: [experts bucket 0]
microbatch 0, block: backward
reduce: [dense bucket 1] [dense bucket 2]
reduce: [experts bucket 0]
wait for reduce: [dense bucket 3]
release: [dense bucket 1] [dense bucket 2]
release: [experts bucket 0]
open gradients: [dense bucket 0]
microbatch 0, embedding: backward
reduce: [dense bucket 0]
wait for reduce: [dense bucket 1] [dense bucket 2]
wait for reduce: [experts bucket 0]
wait for reduce
update
)");
}

TEST_CASE("without overlap sums are waited for at once", "[program]") {
  const Toy toy({{"layer", {}, {{{}, {b0}}}}});
  CHECK(toy.text(toy.communicating(one_by_one(2), false, false)) == R"(microbatch 0, layer: forward
open gradients: [dense bucket 0]
microbatch 0, layer: backward
reduce: [dense bucket 0]
wait for reduce: [dense bucket 0]
microbatch 1, layer: forward
open gradients: [dense bucket 0]
microbatch 1, layer: backward
reduce: [dense bucket 0]
wait for reduce: [dense bucket 0]
wait for reduce
update
)");
}

TEST_CASE("a bucket that is being reduced is waited for before it is opened again", "[program]") {
  const Toy toy({{"layer", {}, {{{b0}, {}}}}});  // the gradient is complete with the forward pass
  const Schedule schedule = schedule_of({{ActionKind::forward, 0, 0}, {ActionKind::forward, 0, 1}}, 2);
  CHECK(toy.text(toy.communicating(schedule, false, true)) == R"(open gradients: [dense bucket 0]
microbatch 0, layer: forward
reduce: [dense bucket 0]
wait for reduce: [dense bucket 0]
open gradients: [dense bucket 0]
microbatch 1, layer: forward
reduce: [dense bucket 0]
wait for reduce
update
)");
}

TEST_CASE("gradients stay open until no microbatch has a part to come", "[program]") {
  const Toy toy = three_layers();
  struct Opened {
    int times = 0, most = 0;
    bool operator==(const Opened&) const = default;
  };
  // By bucket: how often it is opened, and for how many microbatches at most.
  const auto opened = [&](const Schedule& schedule) {
    std::map<BucketId, Opened> out;
    std::map<BucketId, int> microbatches, last;
    const Program p = toy.communicating(schedule, true, true);
    toy.ranges(p);
    for (const Step& s : p.steps) {
      if (s.kind != StepKind::open) continue;
      const BucketId b{s.index, p.buckets_of(s)[0]};
      CHECK(last[b] == 0);
      microbatches[b] += s.microbatches;
      last[b] += s.last;
      out[b] = {out[b].times + 1, std::max(out[b].most, s.microbatches)};
    }
    CHECK(out.size() == 5);
    for (const auto& [b, o] : out) CHECK((microbatches[b] == 2 && last[b] == 1));
    return out;
  };
  using enum ActionKind;
  for (const auto& [b, o] : opened(one_by_one(2))) CHECK(o == Opened{2, 1});
  // The head adds to its gradient in the forward pass of the second microbatch before the backward pass of
  // the first one.
  for (const auto& [b, o] :
       opened(schedule_of({{forward, 0, 0}, {forward, 0, 1}, {backward, 0, 0}, {backward, 0, 1}}, 2)))
    CHECK(o == (b == b3 ? Opened{1, 2} : Opened{2, 1}));
  // Zero-bubble schedules defer weight gradients.
  for (const auto& [b, o] : opened(schedule_of({{forward, 0, 0},
                                                {backward_data, 0, 0},
                                                {forward, 0, 1},
                                                {backward_data, 0, 1},
                                                {backward_weight, 0, 0},
                                                {backward_weight, 0, 1}},
                                               2)))
    CHECK(o == Opened{1, 2});
}

TEST_CASE("steps of buckets in a period are those of the whole list", "[program]") {
  const Toy toy = three_layers();
  constexpr int microbatches = 40;
  int throughout = 0;
  for (const auto& [kind, stages] : {std::pair(ScheduleKind::single, 1), {ScheduleKind::zb_h1, 3}})
    for (int stage = 0; stage < stages; ++stage)
      for (const bool prefetch : {false, true})
        for (const bool overlap : {false, true}) {
          const pipeline::ScheduleOptions options{
              .kind = kind, .stages = stages, .microbatches = microbatches};
          const Schedule schedule = pipeline::shortest_equivalent(options, stage);
          REQUIRE(schedule.period.times > 0);
          const Program list = toy.communicating(schedule, prefetch, overlap);
          CHECK(toy.text(unrolled(list)) ==
                toy.text(toy.communicating(pipeline::make_schedule(options, stage), prefetch, overlap)));
          toy.ranges(list);
          throughout += std::any_of(list.steps.begin(), list.steps.end(),
                                    [](const Step& s) { return s.microbatches == microbatches; });
        }
  CHECK(throughout > 0);
}

TEST_CASE("a program that communicates too little, too early or too late is refused", "[program]") {
  const Toy toy = three_layers();
  for (const bool prefetch : {false, true})
    for (const bool overlap : {false, true}) {
      const Program whole = toy.communicating(one_by_one(2), prefetch, overlap);
      const auto ranges = toy.ranges(whole);
      const auto rearranged = [&](const std::vector<size_t>& order) {
        Program p{.mode = whole.mode, .stashes = whole.stashes};
        for (const size_t i : order) p.take(whole, whole.steps[i]);
        return p;
      };
      int refused = 0;
      for (size_t i = 0; i < whole.steps.size(); ++i) {
        const Step& s = whole.steps[i];
        if (s.buckets == 0) continue;
        std::vector<size_t> others;
        for (size_t k = 0; k < whole.steps.size(); ++k)
          if (k != i) others.push_back(k);
        INFO(prefetch << overlap << " step " << i << "\n" << toy.text(whole));
        // Sums that are never waited for end with the step: legal where the bucket is not opened again, but
        // its buffer is in use for longer.
        const BucketId bucket{s.index, whole.buckets_of(s)[0]};
        bool opens_again = false;
        for (size_t k = i; k < whole.steps.size(); ++k)
          opens_again |= whole.steps[k].kind == StepKind::open &&
                         bucket == BucketId{whole.steps[k].index, whole.buckets_of(whole.steps[k])[0]};
        if (s.kind == StepKind::wait && s.of == StepKind::reduce && !opens_again)
          // A step less: ticks are one less after it.
          CHECK(toy.ranges(rearranged(others)).at(bucket).gradients.back().last + 1 >
                ranges.at(bucket).gradients.back().last);
        else
          CHECK_THROWS(toy.ranges(rearranged(others)));
        ++refused;
        // Before the visit that precedes it, or after the one that follows.
        const bool early = s.kind == StepKind::release || s.kind == StepKind::reduce;
        const bool late = s.kind == StepKind::open || (s.kind == StepKind::wait && s.of == StepKind::gather);
        const auto visit = [&](size_t k) { return whole.steps[k].begins_visit(); };
        size_t to = i;
        if (early)
          while (!visit(--to)) {
          }
        else if (late) {
          while (!visit(to)) ++to;
          to = whole.visit_end(to) - 1;
        } else {
          continue;
        }
        others.insert(others.begin() + static_cast<std::ptrdiff_t>(to), i);
        CHECK_THROWS(toy.ranges(rearranged(others)));
        ++refused;
      }
      CHECK(refused > 40);
    }
}

TEST_CASE("a period that ends with other weights than it begins with is refused", "[program]") {
  const Toy toy = three_layers();
  Program p = toy.communicating(pipeline::shortest_equivalent({.microbatches = 40}, 0), true, true);
  toy.ranges(p);
  while (p.steps[p.period.begin].kind != StepKind::gather) ++p.period.begin;
  ++p.period.begin;
  CHECK_THROWS_WITH(toy.ranges(p), ContainsSubstring("the period of the program ends with other"));
}
