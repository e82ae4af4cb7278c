// Programs: the period of a list, and what happens when a list is wrong.
#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "apps/model/chunks.h"
#include "apps/model/program/stage.h"
#include "parallel/pipeline/equivalent.h"
#include "parallel/program/live_ranges.h"
#include "parallel/program/lower.h"
#include "tests/catch.h"
#include "tests/model/poison.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::model;
using pipeline::ScheduleKind;
using program::Program;
using program::Step;
using program::StepKind;
using program::Use;
using test::TinyModel;

namespace {

const std::string config = R"({"model_type":"llama","vocab_size":67,"hidden_size":16,"intermediate_size":24,
                               "num_hidden_layers":6,"num_attention_heads":2,"num_key_value_heads":1,
                               "max_position_embeddings":64,"tie_word_embeddings":false})";

ModelLayout layout_of(const pipeline::ScheduleOptions& options, int stage) {
  ModelLayout out;
  out.stages = options.stages;
  out.stage = stage;
  out.chunks = options.chunks_per_stage;
  return out;
}

/// The layers of a stage of the model.
std::unique_ptr<Stage> make_stage(TinyModel& m, LayerContext& context, const ModelLayout& layout,
                                  const RecomputePolicy& recompute, const OffloadPolicy& offload,
                                  ShardedParameters sharded = {}) {
  context.exec = &m.exec_;
  context.spec = &m.spec_;
  context.layout = layout;
  return std::make_unique<Stage>(decoder_chunks(context, m.parameters_,
                                                {.recipe = precision::float32,
                                                 .head_chunk_tokens = 10,
                                                 .layout = layout,
                                                 .recompute = recompute,
                                                 .offload = offload}),
                                 std::array<int64_t, row_domains>{TinyModel::tokens, TinyModel::tokens, 10},
                                 std::move(sharded));
}

bool same(const Program& a, const Program& b) {
  const auto equal = [&](const Step& x, const Step& y) {
    const auto codes = [](std::span<const Use> uses) {
      std::vector<uint32_t> out;
      for (const Use& u : uses) out.push_back(u.code);
      return out;
    };
    const auto fields = [](const Step& s) {
      return std::tuple(s.kind, s.of, s.backward, s.dgrad, s.wgrad, s.again, s.nested, s.last, s.round,
                        s.chunk, s.layer, s.index, s.microbatch, s.microbatches);
    };
    const auto buckets = a.buckets_of(x), others = b.buckets_of(y);
    return fields(x) == fields(y) &&
           std::equal(buckets.begin(), buckets.end(), others.begin(), others.end()) &&
           codes(a.reads(x)) == codes(b.reads(y)) && codes(a.writes(x)) == codes(b.writes(y));
  };
  return a.stashes == b.stashes &&
         std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(), equal);
}

RecomputePolicy some_recomputed(unsigned seed) {
  return [seed](int block, const memory::LayerTable& t) {
    std::mt19937 random(seed + static_cast<unsigned>(block));
    return t.recomputable() & memory::SlotSet(random());
  };
}
OffloadPolicy some_offloaded(unsigned seed) {
  return [seed](int block, const memory::LayerTable& t) {
    std::mt19937 random(seed + 100 * static_cast<unsigned>(block));
    return t.offloadable() & memory::SlotSet(random());
  };
}

/// Parameters in random buckets of two groups, of which one has sharded weights.
ShardedParameters some_sharded(unsigned seed, const ParameterList& parameters) {
  std::mt19937 random(seed);
  ShardedParameters out{
      .groups = {"a", "b"}, .prefetch = random() % 2 == 0, .overlap_reduce = random() % 2 == 0};
  for (int p = 0; p < static_cast<int>(parameters.all.size()); ++p) {
    // Most buckets are of one layer, some of layers that are far apart.
    const program::BucketId bucket{static_cast<int>(random() % 2),
                                   random() % 8 == 0 ? static_cast<int>(random() % 3) : p / 6};
    if (bucket.group == 0) out.weights[p] = bucket;
    out.gradients[p] = bucket;
  }
  return out;
}

/// The losses and gradients of a program of two microbatches in memory planned for it and poisoned outside of
/// planned lives.
std::vector<std::vector<float>> results_of(TinyModel& m, Stage& stage, LayerContext& context,
                                           const Program& program) {
  constexpr int microbatches = 2;
  stage.add_program(program);
  memory::MemoryPlan plan;
  stage.declare(plan);
  const auto log_prob = plan.add("log-probabilities", memory::Category::data, 4 * TinyModel::tokens);
  plan.solve();
  const memory::Arenas arenas(plan);
  context.head.log_prob = make_tensor(arenas.at(plan, log_prob), DType::f32, {TinyModel::tokens});
  std::vector<float> rope = ops::rope_table(m.spec_.rope(0), 12, 12);
  context.rope_tables = {make_tensor(rope.data(), DType::f32, {12, m.spec_.rope(0).rotary_dim})};
  std::vector<std::vector<float>> out;
  for (size_t i = 0; i < m.parameters_.all.size(); ++i) out.emplace_back(m.weights_[i].size());
  for (size_t i = 0; i < out.size(); ++i) {
    const std::vector<int64_t>& shape = m.parameters_.all[i].shape;
    const auto view = [&](float* data) {
      return shape.size() == 1 ? make_tensor(data, DType::f32, {shape[0]})
                               : make_tensor(data, DType::f32, {shape[0], shape[1]});
    };
    context.parameters.push_back({view(m.weights_[i].data()), view(out[i].data())});
  }
  stage.bind(plan, arenas);
  test::Poison poison(plan, arenas);
  stage.watch_ticks([&](int tick) { poison.enter(tick); });
  std::vector<float> losses;
  const std::vector<MicroBatch> batches = m.batches(microbatches);
  const StepHooks hooks{.log_probs_ready = [&](int) {
    losses.push_back(static_cast<float>(m.weighted(context.head.log_prob)));
  }};
  stage.execute(0, {.batches = batches, .hooks = &hooks});
  out.push_back(losses);
  return out;
}

}  // namespace

TEST_CASE("a program with a period has the steps of the whole one", "[model][program]") {
  constexpr int microbatches = 36;
  TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1, test::TinyOptions{});
  int folded = 0, moving = 0, throughout = 0;
  for (const auto& [kind, stages, chunks] : {std::tuple(ScheduleKind::single, 1, 1),
                                             {ScheduleKind::single, 1, 2},
                                             {ScheduleKind::one_f_one_b, 2, 1},
                                             {ScheduleKind::one_f_one_b, 3, 1},
                                             {ScheduleKind::zb_h1, 3, 1},
                                             {ScheduleKind::interleaved, 2, 2}})
    for (const bool overlap : {false, true})
      for (int stage = 0; stage < stages; ++stage)
        for (unsigned seed = 0; seed < 4; ++seed) {
          const pipeline::ScheduleOptions options{.kind = kind,
                                                  .stages = stages,
                                                  .chunks_per_stage = chunks,
                                                  .microbatches = microbatches,
                                                  .overlap_messages = overlap && stages > 1};
          CAPTURE(static_cast<int>(kind), stages, chunks, overlap, stage, seed);
          const ModelLayout layout = layout_of(options, stage);
          LayerContext context;
          const auto s = make_stage(m, context, layout, seed > 0 ? some_recomputed(seed) : RecomputePolicy{},
                                    seed % 2 == 1 ? some_offloaded(seed) : OffloadPolicy{},
                                    seed > 1 ? some_sharded(seed, m.parameters_) : ShardedParameters{});
          const pipeline::Schedule schedule = pipeline::shortest_equivalent(options, stage);
          const Program list = s->lowered(memory::training, schedule, layout);
          folded += list.period.times > 0;
          moving += std::any_of(list.steps.begin(), list.steps.end(),
                                [](const Step& x) { return x.kind == StepKind::fetch; });
          const Program whole = s->lowered(memory::training, pipeline::make_schedule(options, stage), layout);
          CHECK(same(program::unrolled(list), whole));
          throughout += std::any_of(list.steps.begin(), list.steps.end(),
                                    [](const Step& x) { return x.microbatches == microbatches; });
        }
  CHECK(folded > 60);
  CHECK(moving > 20);
  CHECK(throughout > 0);
}

// The whole list says which buffers are alive together; the plan of the short one says where they lie.
TEST_CASE("memory of a list whose stashes are exchanged serves the whole one", "[model][program][memory]") {
  TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1, test::TinyOptions{});
  int exchanged = 0;
  for (const auto& [stages, chunks, microbatches] :
       {std::tuple(2, 3, 120), {3, 2, 120}, {3, 2, 96}, {6, 1, 200}, {2, 2, 120}})
    for (const bool overlap : {false, true})
      for (int stage = 0; stage < stages; ++stage)
        for (unsigned seed = 0; seed < 3; ++seed) {
          const pipeline::ScheduleOptions options{
              .kind = chunks > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b,
              .stages = stages,
              .chunks_per_stage = chunks,
              .microbatches = microbatches,
              .overlap_messages = overlap};
          CAPTURE(stages, chunks, microbatches, overlap, stage, seed);
          const ModelLayout layout = layout_of(options, stage);
          LayerContext context;
          const auto s = make_stage(m, context, layout, seed > 0 ? some_recomputed(seed) : RecomputePolicy{},
                                    seed == 1 ? some_offloaded(seed) : OffloadPolicy{});
          const pipeline::Schedule shorter = pipeline::shortest_equivalent(options, stage);
          if (!shorter.period.exchanges_stashes) continue;
          ++exchanged;
          struct Planned {
            memory::MemoryPlan plan = {};
            program::Buffers buffers = {};
            std::vector<memory::BufferId> ids = {};

            const memory::MemoryPlan::Buffer& of(size_t device) const {
              return plan.buffers()[static_cast<size_t>(ids[static_cast<size_t>(buffers.device[device])])];
            }
          };
          const auto plan_of = [&](const pipeline::Schedule& schedule) {
            const Program list = s->lowered(memory::training, schedule, layout);
            Planned out;
            memory::Liveness liveness;
            int last_tick = -1;
            out.buffers = program::live_ranges(list, s->all_layers(), liveness, last_tick);
            out.ids = liveness.declare(out.plan);
            out.plan.solve();
            return out;
          };
          const Planned few = plan_of(shorter), all = plan_of(pipeline::make_schedule(options, stage));
          std::vector<size_t> used;
          for (size_t i = 0; i < all.buffers.device.size(); ++i)
            if (all.buffers.device[i] >= 0) used.push_back(i);
          for (const size_t a : used) {
            REQUIRE(few.buffers.device[a] >= 0);
            const memory::MemoryPlan::Buffer &here = few.of(a), &alive = all.of(a);
            for (const size_t b : used) {
              const memory::MemoryPlan::Buffer& other = few.of(b);
              if (b <= a || &all.of(b) == &alive || here.offset + here.bytes <= other.offset ||
                  other.offset + other.bytes <= here.offset)
                continue;
              const std::vector<memory::Lifetime>& others = all.of(b).lifetimes;
              size_t next = 0;
              for (const memory::Lifetime& life : alive.lifetimes) {
                while (next < others.size() && others[next].last < life.first) ++next;
                INFO(here.name << " and " << other.name << " at tick " << life.first);
                REQUIRE((next == others.size() || others[next].first > life.last));
              }
            }
          }
          // Only chunks with equal rules have one pool in a run.
          const auto bytes = static_cast<double>(few.plan.total_bytes());
          CHECK((seed > 0 || bytes <= 1.05 * static_cast<double>(all.plan.total_bytes())));
        }
  CHECK(exchanged > 10);
}

TEST_CASE("microbatches of a period have the losses and gradients of the whole list",
          "[model][program][memory]") {
  constexpr int microbatches = 19;
  const pipeline::ScheduleOptions options{.microbatches = microbatches};
  std::map<int, double> losses[2];
  std::vector<std::vector<float>> gradients[2];
  for (const bool folded : {false, true}) {
    const pipeline::Schedule schedule =
        folded ? pipeline::shortest_equivalent(options, 0) : pipeline::make_schedule(options, 0);
    REQUIRE((schedule.period.times > 0) == folded);
    test::TinyOptions tiny;
    tiny.schedule = schedule;
    tiny.recompute = some_recomputed(3);
    TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1, tiny);
    m.decoder_.train(m.batches(microbatches),
                     {.log_probs_ready = [&](int i) { losses[folded][i] = m.loss_of_last(); }});
    gradients[folded] = m.gradients_;
  }
  REQUIRE(losses[0].size() == microbatches);
  CHECK(losses[0] == losses[1]);
  CHECK(gradients[0] == gradients[1]);
}

// A run may have fewer rounds than the list: a gradient that is on its way after the first round must not
// share memory with anything until the step after the rounds has read it.
TEST_CASE("what is read after backward rounds lives on from each of them", "[model][program][memory]") {
  using memory::Pass;
  memory::LayerTable table;
  const auto slot = [&](const char* name, bool port = false) {
    return table.add({.name = name, .width = 1, .port = port});
  };
  const memory::Slot x = slot("x", true), kept = slot("kept"), rows = slot("rows"), out = slot("out"),
                     d_out = slot("d_out", true), d_rows = slot("d_rows"), d_x = slot("d_x");
  const auto step = [&](const char* name, Pass pass, memory::SlotSet reads, memory::SlotSet writes) {
    table.add({.name = name, .pass = pass, .reads = reads, .writes = writes});
  };
  step("keep", Pass::forward, x.bit(), kept.bit() | out.bit());
  table.begin_rounds(4, {});
  step("rows", Pass::forward, kept.bit(), rows.bit());
  table.end_rounds();
  table.begin_rounds(4, {});
  step("arrive", Pass::data, d_out.bit(), d_rows.bit());
  step("leave", Pass::data, d_out.bit(), d_rows.bit());
  step("wgrad", Pass::weight, rows.bit(), 0);
  table.end_rounds();
  step("sum", Pass::data, d_rows.bit(), d_x.bit());

  const memory::LayerPolicy policy(table, rows.bit());
  const program::Layers layers({{.name = "layer",
                                 .table = &table,
                                 .policy = &policy,
                                 .later = &policy,
                                 .ports = {x, {}, out, {}, d_out, d_x, {}, {}}}},
                               [](const memory::SlotSpec&) { return 256; });
  const Program p = program::add_recompute(
      program::lower(pipeline::make_schedule({.microbatches = 1}, 0), layers, memory::training, true, false),
      layers);
  memory::Liveness liveness;
  int last_tick = -1;
  const program::Buffers buffers = program::live_ranges(p, layers, liveness, last_tick);
  memory::MemoryPlan plan;
  liveness.declare(plan);
  const auto found = std::find_if(plan.buffers().begin(), plan.buffers().end(),
                                  [](const auto& b) { return b.name == "layer d_rows"; });
  REQUIRE(found != plan.buffers().end());
  const auto ticks = [&](std::string_view name) {
    std::vector<int> found_at;
    for (size_t i = 0; i < p.steps.size(); ++i)
      if (p.steps[i].kind == StepKind::compute && table.steps()[p.steps[i].index].name == name)
        found_at.push_back(buffers.first_tick + static_cast<int>(i));
    return found_at;
  };
  REQUIRE(ticks("leave").size() == 3);
  REQUIRE(ticks("sum").size() == 1);
  for (const int leaves : ticks("leave"))
    CHECK(std::any_of(found->lifetimes.begin(), found->lifetimes.end(), [&](const memory::Lifetime& l) {
      return l.first <= leaves && ticks("sum")[0] <= l.last;
    }));
  // Between a round's arrival and its departure the contents are dead in the first round only.
  CHECK(found->lifetimes.size() == 2);
}

// Every single entry of a step of a short program, removed: the plan or the run must fail, or the poisoned
// memory show.
TEST_CASE("a slot that a step of the program does not name is noticed", "[model][program][memory]") {
  TinyModel m(config, ops::cpu_kernels(cpu::best_isa()), 1, test::TinyOptions{});
  std::map<bool, std::pair<int, int>> found;  // by writes: detected, all
  const pipeline::Schedule schedule = pipeline::make_schedule({.microbatches = 2}, 0);
  LayerContext context;
  const auto stage = make_stage(m, context, {}, some_recomputed(1), {});
  const Program whole = stage->lowered(memory::training, schedule, {});
  const auto without = [&](size_t step, size_t entry) {
    Program p{.mode = whole.mode, .stashes = whole.stashes};
    for (size_t i = 0; i < whole.steps.size(); ++i) {
      const auto reads = whole.reads(whole.steps[i]), writes = whole.writes(whole.steps[i]);
      std::vector<Use> read(reads.begin(), reads.end()), written(writes.begin(), writes.end());
      if (i == step && entry < read.size())
        read.erase(read.begin() + static_cast<long>(entry));
      else if (i == step)
        written.erase(written.begin() + static_cast<long>(entry - reads.size()));
      p.add(whole.steps[i], read, written);
    }
    return p;
  };
  const auto attempt = [&](const Program& p) {
    LayerContext own;
    const auto s = make_stage(m, own, {}, some_recomputed(1), {});
    return results_of(m, *s, own, p);
  };
  const auto want = attempt(whole);
  for (size_t i = 0; i < whole.steps.size(); i += 3)
    for (size_t e = 0; e < size_t{whole.steps[i].reads} + whole.steps[i].writes; ++e) {
      const Step& step = whole.steps[i];
      // A slot that is read and written is still named by the other entry; its contents then begin anew,
      // which shows unless the step writes all of it, as one that runs again does.
      const auto reads = whole.reads(step), writes = whole.writes(step);
      if (e < reads.size() ? step.again && names(writes, reads[e].slot())
                           : names(reads, writes[e - reads.size()].slot()))
        continue;
      // Without a slot that a backward step writes for recomputation, the contents of the forward pass are
      // kept.
      if (e >= reads.size() && !step.again && writes[e - reads.size()].second()) continue;
      bool seen = false;
      try {
        seen = attempt(without(i, e)) != want;
      } catch (const Error&) {
        seen = true;
      }
      auto& [detected, all] = found[e >= reads.size()];
      detected += seen;
      ++all;
      INFO("step " << step.index << (step.backward ? " backward" : "") << " of "
                   << stage->all_layers().of(step.layer).name << ", entry " << e);
      CHECK(seen);
    }
  CHECK(found[false].second > 50);
  CHECK(found[true].second > 50);
}
