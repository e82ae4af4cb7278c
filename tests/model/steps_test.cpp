// Layers as steps: whatever is recomputed or offloaded, however many microbatches are in flight, however late
// weight parts run, and into however many chunks the model is cut, losses and gradients have the same bits.
// Memory outside of planned lives is full of NaN in all of it.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "parallel/pipeline/simulate.h"
#include "tests/catch.h"
#include "tests/model/poison.h"
#include "tests/model/tiny_model.h"
#include "tests/sim/ops.h"

using namespace nrl;
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::ScheduleKind;
using test::Poison;
using test::TinyModel;
using test::TinyOptions;

namespace {

constexpr int microbatches = 5;

// Four blocks, so that chunks can have one or several. Untied: a tied weight gets sums from both ends of the
// model, whose order is the schedule's.
const std::map<std::string, std::string>& models() {
  static const std::map<std::string, std::string> all{
      {"gpt2 with dropout",
       R"({"model_type":"gpt2","vocab_size":61,"n_embd":16,"n_layer":4,"n_head":2,"n_positions":32,
           "tie_word_embeddings":false,"resid_pdrop":0.2,"embd_pdrop":0.1,"attn_pdrop":0.3})"},
      {"llama", R"({"model_type":"llama","vocab_size":67,"hidden_size":16,"intermediate_size":24,
                    "num_hidden_layers":4,"num_attention_heads":2,"num_key_value_heads":1,
                    "max_position_embeddings":64})"},
      {"qwen3", R"({"model_type":"qwen3","vocab_size":67,"hidden_size":16,"intermediate_size":24,
                    "num_hidden_layers":4,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,
                    "max_position_embeddings":64,"tie_word_embeddings":false})"},
      {"gemma3_text", R"({"model_type":"gemma3_text","vocab_size":67,"hidden_size":16,"intermediate_size":24,
                    "num_hidden_layers":4,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,
                    "max_position_embeddings":64,"sliding_window":4,"sliding_window_pattern":2,
                    "tie_word_embeddings":false})"},
      {"qwen2_moe", R"({"model_type":"qwen2_moe","vocab_size":67,"hidden_size":16,"intermediate_size":24,
                    "num_hidden_layers":4,"num_attention_heads":2,"num_key_value_heads":1,
                    "max_position_embeddings":64,"num_experts":5,"num_experts_per_tok":2,
                    "moe_intermediate_size":12,"shared_expert_intermediate_size":20,"mlp_only_layers":[2],
                    "tie_word_embeddings":false,"moe_aux_loss_coeff":0.3,"moe_z_loss_coeff":0.05})"},
  };
  return all;
}

struct Backend {
  const ops::KernelTable& kernels;
  int threads;
  DeviceType device;
  precision::Recipe recipe;
};
Backend cpu_backend(precision::Recipe recipe) {
  return {ops::cpu_kernels(cpu::best_isa()), 1, DeviceType::cpu, recipe};
}
Backend gpu_backend() {
  return {ops::sim_kernels(), ops::gpu_partials, DeviceType::cuda, precision::bfloat16};
}

struct Result {
  std::map<int, double> losses;  // by microbatch
  std::vector<std::vector<float>> gradients;
  bool operator==(const Result&) const = default;
};

Result run(const std::string& config, const Backend& b, pipeline::Schedule schedule,
           model::RecomputePolicy recompute, int64_t head_chunk = 0, bool overwrite = true,
           model::OffloadPolicy offload = {}) {
  TinyModel m(config, b.kernels, b.threads,
              TinyOptions{b.recipe, b.device, std::move(recompute), std::move(schedule), head_chunk,
                          overwrite, std::move(offload)});
  Poison poison(m.plan_, m.arenas_);
  m.decoder_.watch_ticks([&](int tick) { poison.enter(tick); });
  Result result;
  m.decoder_.train(m.batches(microbatches), {.log_probs_ready = [&](int microbatch) {
                     result.losses[microbatch] = m.loss_of_last();
                   }});
  result.gradients = m.gradients_;
  std::vector<int> ready = m.ready_;
  std::sort(ready.begin(), ready.end());
  REQUIRE(ready.size() == m.gradients_.size());  // every parameter once, with the last microbatch
  REQUIRE(std::adjacent_find(ready.begin(), ready.end()) == ready.end());
  return result;
}

Result plain(const std::string& config, const Backend& b) {
  const Result r = run(config, b, pipeline::make_schedule({.microbatches = microbatches}, 0), {});
  REQUIRE(r.losses.size() == microbatches);
  REQUIRE(std::isfinite(r.losses.at(microbatches - 1)));
  return r;
}

memory::SlotSet random_bits(std::mt19937& random) {
  memory::SlotSet bits = 0;
  for (size_t i = 0; i < memory::max_slots; i += 32) bits = bits << 32 | memory::SlotSet(random());
  return bits;
}

/// Every slot of every block offloaded or not, at random.
model::OffloadPolicy random_offload(std::mt19937& random) {
  return [&random](int, const memory::LayerTable& table) {
    const memory::SlotSet bits = random_bits(random);
    return table.offloadable() & bits;
  };
}

/// Every slot of every block recomputed or not, at random.
model::RecomputePolicy random_policy(std::mt19937& random) {
  return [&random](int, const memory::LayerTable& table) {
    const memory::SlotSet bits = random_bits(random);
    return table.recomputable() & bits;
  };
}

/// Any legal order of forward passes, data parts and weight parts with at most `stashes` in flight
/// in a chunk.
pipeline::Schedule random_schedule(std::mt19937& random, int chunks, int stashes) {
  const auto count = static_cast<size_t>(chunks);
  std::vector<int> forward(count), data(count), weight(count);
  std::vector<Action> actions;
  while (*std::min_element(weight.begin(), weight.end()) < microbatches) {
    std::vector<Action> legal;
    for (size_t c = 0; c < count; ++c) {
      const int chunk = static_cast<int>(c);
      if (forward[c] < (c == 0 ? microbatches : forward[c - 1]) && forward[c] - weight[c] < stashes)
        legal.push_back({ActionKind::forward, chunk, forward[c]});
      if (data[c] < (c + 1 == count ? forward[c] : data[c + 1])) {
        legal.push_back({ActionKind::backward_data, chunk, data[c]});
        if (data[c] == weight[c]) legal.push_back({ActionKind::backward, chunk, data[c]});
      }
      if (weight[c] < data[c]) legal.push_back({ActionKind::backward_weight, chunk, weight[c]});
    }
    REQUIRE(!legal.empty());
    const Action a = legal[random() % legal.size()];
    const auto c = static_cast<size_t>(a.chunk);
    forward[c] += a.kind == ActionKind::forward;
    data[c] += a.kind == ActionKind::backward_data || a.kind == ActionKind::backward;
    weight[c] += a.kind == ActionKind::backward_weight || a.kind == ActionKind::backward;
    actions.push_back(a);
  }
  return pipeline::complete_schedule(actions, {.chunks_per_stage = chunks, .microbatches = microbatches}, 0);
}

void check_random(const std::string& config, const Backend& b, unsigned seed, int cases) {
  const Result want = plain(config, b);
  std::mt19937 random(seed);
  for (int i = 0; i < cases; ++i) {
    const int chunks = 1 << i % 3, stashes = 1 + static_cast<int>(random() % 4);
    INFO("case " << i << ", " << chunks << " chunks, " << stashes << " stashes");
    const pipeline::Schedule schedule = random_schedule(random, chunks, stashes);
    REQUIRE(run(config, b, schedule, random_policy(random)) == want);
    REQUIRE(run(config, b, schedule, random_policy(random), 0, true, random_offload(random)) == want);
    REQUIRE(run(config, b, schedule, {}, 0, true, random_offload(random)) == want);
  }
}

/// The schedule of all stages on one rank.
pipeline::Schedule merged(const pipeline::ScheduleOptions& o) {
  std::vector<pipeline::Schedule> stages;
  for (int stage = 0; stage < o.stages; ++stage) stages.push_back(pipeline::make_schedule(o, stage));
  const pipeline::Simulation simulation = pipeline::simulate(stages, pipeline::Costs{{}});
  REQUIRE(simulation.deadlock.empty());
  return pipeline::merge(stages, simulation);
}

}  // namespace

// Zeros may differ in their sign: 0 + -0 is 0.
TEST_CASE("the first gradients of a step overwrite what was there", "[model][sim]") {
  for (const auto& [name, config] : models())
    for (const Backend& b :
         {cpu_backend(precision::float32), cpu_backend(precision::bfloat16_storage), gpu_backend()})
      for (const int64_t head_chunk : {0, 8}) {
        INFO(name << (b.device == DeviceType::cuda ? " on a GPU" : " on a CPU") << ", chunks of "
                  << head_chunk);
        for (const pipeline::Schedule& schedule :
             {pipeline::make_schedule({.microbatches = microbatches}, 0),
              merged({.kind = pipeline::ScheduleKind::zb_h1, .stages = 2, .microbatches = microbatches})})
          REQUIRE(run(config, b, schedule, {}, head_chunk, true) ==
                  run(config, b, schedule, {}, head_chunk, false));
      }
}

TEST_CASE("random policies, orders, stashes and chunks change no bit", "[model][memory]") {
  for (const auto& [name, config] : models()) {
    INFO(name);
    check_random(config, cpu_backend(precision::float32), 1, 40);
    check_random(config, cpu_backend(precision::bfloat16_storage), 2, 40);
  }
}

TEST_CASE("random policies, orders, stashes and chunks change no bit on a GPU", "[model][memory][sim]") {
  for (const auto& [name, config] : models()) {
    INFO(name);
    check_random(config, gpu_backend(), 3, 6);
  }
}

TEST_CASE("every slot of every layer can be recomputed alone and together", "[model][memory]") {
  for (const auto& [name, config] : models()) {
    INFO(name);
    const Backend b = cpu_backend(precision::bfloat16_storage);
    const Result want = plain(config, b);
    const auto check = [&](const model::RecomputePolicy& policy) {
      REQUIRE(run(config, b, pipeline::make_schedule({.microbatches = microbatches}, 0), policy) == want);
    };
    size_t slots = 0;
    for (int layer = 0; layer < 4; ++layer)
      for (size_t s = 0; s < memory::max_slots; ++s) {
        bool exists = false;
        const model::RecomputePolicy one = [&](int block, const memory::LayerTable& table) {
          const memory::SlotSet set = block == layer ? table.recomputable() & memory::SlotSet{1} << s : 0;
          exists = exists || set != 0;
          return set;
        };
        INFO("layer " << layer << " slot " << s);
        check(one);
        slots += exists;
      }
    CHECK(slots >= 4 * 12);
    check([](int, const memory::LayerTable& table) { return table.recomputable(); });
  }
}

TEST_CASE("all schedules give the same bits with every rule of recomputation", "[model][memory]") {
  using Rules = std::vector<model::RecomputeRule>;
  const model::RecomputeRule all{.all = true}, with_input{.all = true, .input = true};
  const std::vector<Rules> every{{4, {.modules = {"norm", "activation"}}},
                                 {4, {.modules = {"core_attn", "mlp", "moe"}}},
                                 {4, all},
                                 {all, {}, all, {}},
                                 {all, with_input, all, with_input},
                                 {all, with_input, with_input, with_input},
                                 {{}, with_input, {.modules = {"norm"}}, with_input}};
  for (const std::string name : {"gpt2 with dropout", "qwen2_moe"}) {
    const std::string& config = models().at(name);
    const Backend b = cpu_backend(precision::float32);
    const Result want = plain(config, b);
    for (const Rules& rules : every)
      for (const auto& [kind, stages, chunks] : {std::tuple{ScheduleKind::single, 1, 2},
                                                 {ScheduleKind::single, 1, 4},
                                                 {ScheduleKind::one_f_one_b, 2, 1},
                                                 {ScheduleKind::one_f_one_b, 4, 1},
                                                 {ScheduleKind::interleaved, 2, 2},
                                                 {ScheduleKind::zb_h1, 2, 1},
                                                 {ScheduleKind::zb_h1, 4, 1}}) {
        INFO(name << ", " << name_of(kind) << " of " << stages << " stages and " << chunks << " chunks");
        const pipeline::Schedule schedule = merged(
            {.kind = kind, .stages = stages, .chunks_per_stage = chunks, .microbatches = microbatches});
        REQUIRE(run(config, b, schedule, model::recompute_by_block(rules)) == want);
      }
  }
}
