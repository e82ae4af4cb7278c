// A stage has memory for the activations of the microbatches in flight over all its chunks.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include <spdlog/fmt/fmt.h>

#include "apps/model/chunks.h"
#include "apps/model/program/stage.h"
#include "parallel/pipeline/equivalent.h"
#include "tests/catch.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::model;
using pipeline::ScheduleKind;

namespace {

constexpr int64_t tokens = 64, hidden = 32;

/// Bytes of activations: most that are alive at once, and what the plan has for them.
struct Planned {
  int64_t live = 0, arena = 0;
  size_t buffers = 0;
};

/// Plans a stage of a model with `blocks` blocks per chunk.
Planned planned(const pipeline::ScheduleOptions& o, int stage, int blocks) {
  const ModelSpec spec = test::tiny_spec(
      fmt::format(R"({{"model_type":"llama","vocab_size":64,"hidden_size":{},"intermediate_size":96,
                       "num_hidden_layers":{},"num_attention_heads":2,"num_key_value_heads":1,
                       "max_position_embeddings":64,"tie_word_embeddings":false}})",
                  hidden, o.stages * o.chunks_per_stage * blocks),
      {});
  ModelLayout layout;
  layout.stages = o.stages;
  layout.stage = stage;
  layout.chunks = o.chunks_per_stage;
  const ParameterList parameters = make_parameters(spec, layout);
  LayerContext context;
  context.spec = &spec;
  context.layout = layout;
  Stage s(decoder_chunks(context, parameters,
                         {.recipe = precision::float32, .head_chunk_tokens = 2, .layout = layout}),
          std::array<int64_t, row_domains>{tokens, tokens, 2});
  s.add_program(memory::training, pipeline::shortest_equivalent(o, stage), layout);
  memory::MemoryPlan plan;
  s.declare(plan);
  plan.solve();
  std::map<int, int64_t> changes;  // by tick
  for (const memory::MemoryPlan::Buffer& b : plan.buffers())
    for (const memory::Lifetime& life : b.lifetimes) {
      changes[life.first] += b.bytes;
      changes[life.last + 1] -= b.bytes;
    }
  Planned out{.arena = plan.bytes(memory::Category::activations), .buffers = plan.buffers().size()};
  int64_t live = 0;
  for (const auto& [tick, bytes] : changes) out.live = std::max(out.live, live += bytes);
  return out;
}

}  // namespace

// Stages of 1F1B with one chunk give the bytes that are kept of a microbatch and those that live beside.
TEST_CASE("a stage has the activations of what is in flight over all its chunks", "[model][memory]") {
  // Gradients on their way have buffers by their stashes, which are not placed as tightly as they could be.
  constexpr int64_t messages = 8 * tokens * hidden * 4;
  for (const int blocks : {1, 2}) {
    const auto one_chunk = [&](int in_flight) {
      return planned({ScheduleKind::one_f_one_b, in_flight + 1, 1, 3 * in_flight + 3}, 1, blocks).live;
    };
    const int64_t kept = one_chunk(5) - one_chunk(4), rest = one_chunk(4) - 4 * kept;
    REQUIRE(one_chunk(9) == 9 * kept + rest);
    REQUIRE(rest < kept);
    const ScheduleKind f1b1 = ScheduleKind::one_f_one_b, interleaved = ScheduleKind::interleaved;
    for (const auto& [kind, p, v, m] : {std::tuple(f1b1, 4, 1, 4),
                                        {f1b1, 8, 1, 64},
                                        {interleaved, 2, 2, 2},
                                        {interleaved, 2, 2, 16},
                                        {interleaved, 2, 4, 8},
                                        {interleaved, 2, 8, 16},
                                        {interleaved, 3, 2, 10},
                                        {interleaved, 4, 2, 32},
                                        {interleaved, 4, 4, 16},
                                        {interleaved, 4, 8, 8},
                                        {interleaved, 8, 2, 64},
                                        {interleaved, 8, 4, 13},
                                        {interleaved, 8, 8, 16},
                                        {interleaved, 16, 2, 32},
                                        {interleaved, 16, 8, 128}})
      for (const int stage : {0, p / 2, p - 1}) {
        if (blocks == 2 && p * v > 32) continue;
        const pipeline::ScheduleOptions o{kind, p, v, m};
        CAPTURE(static_cast<int>(kind), p, v, m, blocks, stage);
        const int in_flight = pipeline::make_schedule(o, stage).stashes.count(0);
        if (m % p == 0)
          CHECK(in_flight ==
                (v == 1 ? std::min(m, p - stage) : std::min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)));
        const Planned own = planned(o, stage, blocks);
        const int64_t want = in_flight * kept + rest;
        // Long groups delay gradients to the last stage.
        CHECK(own.live <= want + (m % p == 0 ? 0 : messages));
        // With few microbatches no backward pass runs while all are in flight.
        if (m >= 2 * p && in_flight > 3) CHECK(own.live >= want - messages);
        CHECK(static_cast<double>(own.arena - messages) <= 1.01 * static_cast<double>(want));
      }
  }
}

TEST_CASE("equal chunks share the buffers of their pool", "[model][memory]") {
  for (const int stage : {0, 3, 7}) {
    const pipeline::ScheduleOptions o{ScheduleKind::interleaved, 8, 4, 64};
    const int in_flight = pipeline::make_schedule(o, stage).stashes.count(0);
    const Planned one_chunk = planned({ScheduleKind::one_f_one_b, in_flight + 1, 1, 3 * in_flight}, 1, 1);
    // The head has some more.
    CHECK(planned(o, stage, 1).buffers < one_chunk.buffers + static_cast<size_t>(in_flight));
  }
}
