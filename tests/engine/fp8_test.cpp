// GEMMs with FP8 operands: what recipes and their options do to the numbers, that recomputation does nothing
// to them, and the state of scales. tests/layouts compares layouts with one rank.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/ops/kernel_table.h"
#include "core/ops/quantize.h"
#include "tests/catch.h"
#include "tests/engine/layouts.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Keys = std::vector<std::string>;

Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const std::string llama =
    "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, max_position_embeddings: 64, "
    "initializer_range: 0.2, attention_bias: true, mlp_bias: true}";
const std::string gpt2 =
    "{model_type: gpt2, vocab_size: 61, n_embd: 64, n_layer: 2, n_head: 4, n_positions: 64, "
    "resid_pdrop: 0.1, initializer_range: 0.2}";
/// For blocks of 128.
const std::string wide =
    "{model_type: llama, vocab_size: 61, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64, max_position_embeddings: 64, "
    "initializer_range: 0.1}";

/// With experts, a shared one behind a gate, and a dense layer.
const std::string experts =
    "{model_type: qwen2_moe, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, max_position_embeddings: 64, "
    "initializer_range: 0.2, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 64, "
    "shared_expert_intermediate_size: 64, norm_topk_prob: true, mlp_only_layers: [0]}";
const std::string wide_experts =
    "{model_type: qwen2_moe, vocab_size: 61, hidden_size: 128, intermediate_size: 128, num_hidden_layers: 1, "
    "num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64, initializer_range: 0.1, "
    "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 256, shared_expert_intermediate_size: "
    "256, norm_topk_prob: true}";

struct Recipe {
  std::string name, model, length;
};
const Recipe recipes[] = {
    {"tensorwise", llama, "16"}, {"delayed", llama, "16"}, {"blockwise", wide, "64"}, {"mxfp8", wide, "64"}};

const Recipe of_experts[] = {{"tensorwise", experts, "16"},
                             {"delayed", experts, "16"},
                             {"blockwise", wide_experts, "64"},
                             {"mxfp8", wide_experts, "64"}};

Keys fp8(const std::string& recipe, const std::string& length) {
  Keys keys{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=" + recipe,
            "policy.max_total_sequence_length=" + length};
  if (recipe == "delayed") keys.push_back("policy.fp8_cfg.fp8_amax_history_len=2");
  return keys;
}

Learned learn(const std::string& device, const std::string& model, const Keys& keys, int steps = 3) {
  const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
  return Trainee(*alone, device, tiny_config(device, keys, model)).learn(steps);
}

/// What a microbatch recomputes of its blocks.
int64_t recomputed_bytes(const std::string& model, const Keys& keys) {
  const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
  Trainee trainee(*alone, "cpu", tiny_config("cpu", keys, model));
  int64_t bytes = 0;
  for (const auto& block : trainee.engine().plan().decoder->block_bytes()) bytes += block.recomputed;
  return bytes;
}

bool same(const Learned& a, const Learned& b) {
  return a.numbers == b.numbers && a.elements == b.elements;
}

double farthest(const Learned& a, const Learned& b) {
  double difference = 0;
  for (size_t i = 0; i < a.numbers.size(); ++i)
    difference = std::max(difference, std::fabs(a.numbers[i] - b.numbers[i]) / std::fabs(b.numbers[i]));
  return difference;
}

}  // namespace

TEST_CASE("every recipe learns nearly what fp32 learns", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  for (const Recipe& r : recipes) {
    const Learned exact = learn("cpu", r.model, {"policy.max_total_sequence_length=" + r.length});
    const Learned got = learn("cpu", r.model, fp8(r.name, r.length));
    // Delayed scales begin at 1, with which the gradients of the first step lose their small numbers.
    const double limit = r.name == "delayed" ? 0.3 : 0.1;
    CAPTURE(r.name, farthest(got, exact));
    CHECK_FALSE(same(got, exact));
    CHECK(farthest(got, exact) < limit);
    // The same over bf16.
    const Keys bf16 = fp8(r.name, r.length) + Keys{"policy.precision=bfloat16"};
    CHECK(farthest(learn("cpu", r.model, bf16), exact) < limit);
  }
}

namespace {

/// Blocks with a slot for the output of a norm.
int stored_norms(Trainee& trainee) {
  int count = 0;
  for (const auto& block : trainee.engine().plan().decoder->blocks())
    for (const memory::SlotSpec& slot : block.table->slots()) count += slot.name == "norm";
  return count;
}

}  // namespace

TEST_CASE("a norm that is rounded as it is computed gives the numbers of one that is stored",
          "[engine][fp8]") {
  // With sequence parallelism ranks gather what norms have stored, or with scales of tensors their codes.
  if (test_world().size() != 2) return;
  for (const Recipe& r : {recipes[0], recipes[1], recipes[2], recipes[3], Recipe{"tensorwise", gpt2, "16"}})
    for (const std::string precision : {"float32", "bfloat16"}) {
      CAPTURE(r.name, precision);
      const Keys keys =
          fp8(r.name, r.length) + Keys{"policy.precision=" + precision, "distributed.tensor_parallel_size=2",
                                       "distributed.sequence_parallel="};
      const auto trainee = [&](const std::string& sequence_parallel) {
        Keys layout = keys;
        layout.back() += sequence_parallel;
        return Trainee(test_world().comm(), "cpu", tiny_config("cpu", layout, r.model));
      };
      Trainee stored = trainee("true"), computed = trainee("false");
      CHECK(stored_norms(stored) == (r.model == wide ? 4 : 0));
      CHECK(stored_norms(computed) == 0);
      CHECK(stored.learn(1).numbers[0] == computed.learn(1).numbers[0]);
    }
}

namespace {

bool has_slot(Trainee& trainee, std::string_view name) {
  const auto slots = trainee.engine().plan().decoder->blocks().front().table->slots();
  return std::any_of(slots.begin(), slots.end(), [&](const memory::SlotSpec& s) { return s.name == name; });
}

}  // namespace

// Sequence parallelism changes the order of no sum that a gradient of these matrices comes from. Ranks that
// gather the values themselves (scales of blocks, a gradient that a bias needs) are checked as well.
TEST_CASE("ranks that gather FP8 codes make the numbers of ranks with all rows", "[engine][fp8]") {
  comm::Communicator& world = test_world().comm();
  if (world.size() == 1) return;
  const auto tensor = [&](const std::string& sequence_parallel) {
    return Keys{"policy.max_grad_norm=null", fmt::format("distributed.tensor_parallel_size={}", world.size()),
                "distributed.sequence_parallel=" + sequence_parallel};
  };
  struct Case {
    Recipe recipe;
    bool input, gradient;  // that codes are gathered
    std::string device = "cpu";
  };
  const std::string small =
      "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
      "num_attention_heads: 4, head_dim: 16, max_position_embeddings: 64, initializer_range: 0.2}";
  std::vector<Case> cases{{{"tensorwise", small, "16"}, true, true, "cuda"},
                          {{"tensorwise", wide, "64"}, true, true},
                          {{"delayed", wide, "64"}, true, true},
                          {{"tensorwise", gpt2, "64"}, true, false},
                          {{"delayed", llama, "64"}, true, false}};
  if (world.size() == 2) cases.push_back({{"blockwise", wide, "64"}, false, false});
  for (const auto& [r, input, gradient, device] : cases)
    for (const std::string precision : {"float32", "bfloat16"}) {
      if (device == "cuda" && precision == "float32") continue;  // refused
      CAPTURE(r.name, r.model, device, precision);
      const Keys keys = fp8(r.name, r.length) + Keys{"policy.precision=" + precision};
      Trainee whole(world, device, tiny_config(device, keys + tensor("false"), r.model)),
          parts(world, device, tiny_config(device, keys + tensor("true"), r.model));
      CHECK(has_slot(parts, "gathered") != input);
      CHECK(has_slot(parts, "gathered d_out") != gradient);
      const Learned want = whole.learn(1), got = parts.learn(1);
      CHECK(got.numbers[0] == want.numbers[0]);
      int compared = 0;
      for (const auto& [name, elements] : got.elements) {
        if (!name.starts_with("g/") || !(name.ends_with("proj.weight") || name.ends_with("c_attn.weight") ||
                                         name.ends_with("c_fc.weight") || name.ends_with("c_proj.weight")))
          continue;
        CAPTURE(name);
        CHECK(elements == want.elements.at(name));
        ++compared;
      }
      CHECK(compared == (r.model == gpt2 ? 8 : 14));
    }
}

// Rows that are divided among GEMMs have the same products, and two ranks add in one order only.
TEST_CASE("communication beside FP8 GEMMs is the same bytes and the same bits", "[engine][fp8]") {
  comm::Communicator& world = test_world().comm();
  if (world.size() == 1) return;
  struct Case {
    Recipe recipe;
    bool divides;
    Keys keys = {};
    std::string device = "cpu";
  };
  const Keys again{"policy.recompute.modules=[gather]"};
  std::vector<Case> cases{{{"tensorwise", wide, "64"}, true},
                          {{"tensorwise", wide, "64"}, true, again},
                          {{"delayed", wide, "64"}, true, again},
                          {{"tensorwise", gpt2, "64"}, true},
                          {{"tensorwise", gpt2, "64"}, true, {}, "cuda"}};
  if (world.size() == 2) cases.push_back({{"blockwise", wide, "64"}, false, again});
  for (const auto& [r, divides, more, device] : cases)
    for (const bool sequence : {false, true}) {
      if (!sequence && !more.empty()) continue;  // nothing is gathered
      const Keys keys =
          fp8(r.name, r.length) + more +
          Keys{"policy.precision=bfloat16", fmt::format("distributed.tensor_parallel_size={}", world.size()),
               fmt::format("distributed.sequence_parallel={}", sequence)};
      const auto outcome = [&](const std::string& overlap) {
        Trainee trainee(world, device,
                        tiny_config(device, keys + Keys{"distributed.tp_comm_overlap=" + overlap}, r.model));
        comm::CollectiveLog& log = *trainee.groups()[parallel::group::tp].collective_log();
        log.reset_totals();
        Learned learned = trainee.learn(2);
        double sent = 0;
        for (const comm::LogTotal& total : log.totals()) sent += total.wire();
        return std::pair(std::move(learned), sent);
      };
      const auto [want, bytes] = outcome("none");
      for (const std::string overlap : {"bulk", "pipelined", "ring"}) {
        if (overlap != "bulk" && (!divides || (overlap == "ring" && !sequence))) continue;
        CAPTURE(r.name, r.model, device, more, sequence, overlap);
        const auto [got, sent] = outcome(overlap);
        CHECK(sent == bytes);
        if (overlap == "ring" && world.size() > 2) {
          CHECK(std::abs(got.numbers[0] / want.numbers[0] - 1) < 1e-3);  // of sums that are rounded again
          continue;
        }
        CHECK(got.numbers == want.numbers);
        CHECK(got.elements == want.elements);
      }
    }
}

TEST_CASE("FP8 codes are gathered again bit by bit", "[engine][fp8][experts]") {
  comm::Communicator& world = test_world().comm();
  if (world.size() != 2) return;
  for (const Recipe& r :
       {Recipe{"tensorwise", wide, "16"}, {"delayed", wide, "16"}, {"tensorwise", experts, "16"}}) {
    CAPTURE(r.name, r.model);
    const auto trainee = [&](const Keys& recompute) {
      const Keys keys = fp8(r.name, r.length) + Keys{"distributed.tensor_parallel_size=2"} + recompute;
      return Trainee(world, "cpu", tiny_config("cpu", keys, r.model));
    };
    const auto saved = [](Trainee& t) {
      int64_t bytes = 0;
      for (const auto& block : t.engine().plan().decoder->block_bytes()) bytes += block.kept;
      return bytes;
    };
    Trainee keeps = trainee({"policy.recompute.granularity=none"});
    const int64_t bytes = saved(keeps);
    const Learned kept = keeps.learn(2);
    for (const std::string modules : {"[gather]", "[norm, gather]", "[mlp]"}) {
      Trainee again =
          trainee({"policy.recompute.granularity=selective", "policy.recompute.modules=" + modules});
      CHECK(saved(again) < bytes);
      CHECK(same(again.learn(2), kept));
    }
    CHECK(same(trainee({"policy.checkpoint_every=1"}).learn(2), kept));
    CHECK(
        same(trainee({"policy.offload_activations=true", "policy.offload_modules=[gather]"}).learn(2), kept));
  }
}

// The gradient of a bias is a sum of the stored gradient. A bias of 0 changes no other number.
TEST_CASE(
    "an activation's gradient that is rounded as it is computed gives the numbers of one that is stored",
    "[engine][fp8]") {
  if (test_world().size() > 1) return;
  const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
  for (const std::string recipe : {"tensorwise", "delayed", "blockwise", "mxfp8"})
    for (const std::string precision : {"float32", "bfloat16"}) {
      if (precision == "float32" && recipe != "tensorwise") continue;
      CAPTURE(recipe, precision);
      const auto trainee = [&](const std::string& bias) {
        const Keys keys =
            fp8(recipe, "64") + Keys{"policy.precision=" + precision, "policy.max_grad_norm=null",
                                     "policy.model.mlp_bias=" + bias};
        return Trainee(*alone, "cpu", tiny_config("cpu", keys, wide));
      };
      Trainee stored = trainee("true"), computed = trainee("false");
      CHECK(has_slot(stored, "d_mlp_in"));
      CHECK_FALSE(has_slot(computed, "d_mlp_in"));
      const Learned want = stored.learn(1), got = computed.learn(1);
      CHECK(got.numbers[0] == want.numbers[0]);
      for (const auto& [name, elements] : got.elements)
        if (name.starts_with("g/")) {
          CAPTURE(name);
          CHECK(elements == want.elements.at(name));
        }
    }
  // A tile of scales would have columns of gate and of up.
  Trainee narrow(*alone, "cpu",
                 tiny_config("cpu", fp8("mxfp8", "64") + Keys{"policy.model.intermediate_size=160"}, wide));
  CHECK(has_slot(narrow, "d_mlp_in"));
  CHECK_FALSE(narrow.train_step().skipped);
}

TEST_CASE("experts learn with every recipe nearly what they learn in fp32", "[engine][fp8][experts]") {
  if (test_world().size() > 1) return;
  for (const Recipe& r : of_experts) {
    const Keys length{"policy.max_total_sequence_length=" + r.length};
    const Learned exact = learn("cpu", r.model, length);
    const Learned got = learn("cpu", r.model, fp8(r.name, r.length));
    CAPTURE(r.name, farthest(got, exact));
    CHECK_FALSE(same(got, exact));
    // Among the numbers is the load of the busiest expert, which changes with near ties of the router.
    const double limit = r.name == "delayed" ? 0.3 : 0.2;
    CHECK(farthest(got, exact) < limit);
    const Keys bf16 = fp8(r.name, r.length) + Keys{"policy.precision=bfloat16"};
    CHECK(farthest(learn("cpu", r.model, bf16), exact) < limit);
  }
}

TEST_CASE("FP8 copies of experts are recomputed bit by bit", "[engine][fp8][experts]") {
  if (test_world().size() > 1) return;
  for (const Recipe& r : of_experts) {
    CAPTURE(r.name);
    const Keys keys = fp8(r.name, r.length);
    const Learned kept = learn("cpu", r.model, keys + Keys{"policy.recompute.granularity=none"}, 2);
    for (const std::string modules : {"[norm]", "[activation]", "[moe]", "[norm, activation, moe]"})
      CHECK(same(
          learn("cpu", r.model,
                keys + Keys{"policy.recompute.granularity=selective", "policy.recompute.modules=" + modules},
                2),
          kept));
    CHECK(same(learn("cpu", r.model, keys + Keys{"policy.checkpoint_every=1"}, 2), kept));
    // The transposed copies with their inputs.
    const auto bytes = [&](const std::string& modules) {
      return recomputed_bytes(r.model, keys + Keys{"policy.recompute.granularity=selective",
                                                   "policy.recompute.modules=" + modules});
    };
    CHECK(bytes("[norm]") > 0);
    CHECK(bytes("[moe]") > bytes("[activation]"));
  }
}

namespace {

int64_t roundings = 0, passes = 0, other_scales = 0;
const ops::KernelTable* counted = nullptr;

}  // namespace

TEST_CASE("an evaluation rounds the weights to FP8 once", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  for (const Recipe& r : recipes) {
    CAPTURE(r.name);
    const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
    Trainee trainee(*alone, "cpu", tiny_config("cpu", fp8(r.name, r.length), r.model));
    engine::Engine& engine = trainee.engine();
    counted = engine.exec().kernels;
    ops::KernelTable counting = *counted;
    counting.quantize = [](ops::Exec& e, const ops::Quantize& q) {
      ++roundings;
      counted->quantize(e, q);
    };
    engine.exec().kernels = &counting;
    const data::HostMicroBatch batch =
        random_batch(engine.plan().batch.micro * engine.plan().sequence_length, 5);
    const auto evaluate = [&](int64_t count) {
      roundings = 0;
      return engine.evaluate(count, [&]() -> const data::HostMicroBatch& { return batch; }).front();
    };
    const double one = evaluate(1);
    const int64_t of_one = roundings;
    CHECK(evaluate(3) == one + one + one);
    // The weights and inputs of the four GEMMs of two layers.
    CHECK(of_one == 8 + 8);
    CHECK(roundings == 8 + 3 * 8);
    // What an update changes is rounded again.
    trainee.train_step();
    CHECK(evaluate(1) != one);
    CHECK(roundings == of_one);
    engine.exec().kernels = counted;
  }
}

TEST_CASE("tensorwise scales of gradients are those of their largest numbers, which norms measure",
          "[engine][fp8][experts]") {
  if (test_world().size() > 1) return;
  // Passes over weights, then over operands of a microbatch: gpt2 drops gradients of the residual stream.
  const std::string half_rotated =
      std::string(wide).replace(wide.size() - 1, 1, ", partial_rotary_factor: 0.5}");
  const std::string few_values =
      "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
      "num_attention_heads: 6, num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}";
  for (const auto& [model, of_weights, of_operands] :
       {std::tuple(wide, 8, 8), {half_rotated, 8, 8}, {few_values, 8, 8}, {gpt2, 8, 12}, {experts, 10, 15}}) {
    CAPTURE(model);
    const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
    Trainee trainee(*alone, "cpu", tiny_config("cpu", fp8("tensorwise", "16"), model));
    ops::Exec& exec = trainee.engine().exec();
    counted = exec.kernels;
    ops::KernelTable counting = *counted;
    counting.largest_magnitude = [](ops::Exec& e, const ops::LargestMagnitude& a) {
      ++passes;
      counted->largest_magnitude(e, a);
    };
    counting.quantize = [](ops::Exec& e, const ops::Quantize& q) {
      const Tensor& copy = q.row ? q.row : q.column;
      counted->quantize(e, q);
      if (copy.dtype == DType::e5m2) {
        float amax = 0, scale = 0;
        counted->largest_magnitude(
            e, {.source = q.source, .amax = make_tensor(&amax, DType::f32, {1}), .offsets = q.offsets});
        counted->update_scales(e, {.amax = make_tensor(&amax, DType::f32, {1, 1}),
                                   .scale = make_tensor(&scale, DType::f32, {1}),
                                   .format = copy.dtype});
        other_scales += scale != *static_cast<const float*>(copy.scales.data);
      }
    };
    exec.kernels = &counting;
    passes = other_scales = 0;
    trainee.train_step();
    CHECK(other_scales == 0);
    CHECK(passes == of_weights + trainee.engine().plan().batch.accumulation * of_operands);
    exec.kernels = counted;
  }
}

namespace {

/// The largest relative difference between a step of the GPU's kernels and of the CPU's emulation: loss,
/// gradient norm, evaluation, and of each gradient the root mean square.
double device_difference(const Recipe& r, int seed) {
  const Keys keys =
      fp8(r.name, r.length) + Keys{"policy.precision=bfloat16", "policy.logits_dtype=bfloat16",
                                   "policy.optimizer.eps=1e-3", fmt::format("pretrain.seed={}", seed)};
  const Learned want = learn("cpu", r.model, keys, 1), got = learn("cuda", r.model, keys, 1);
  double worst = farthest(got, want);
  for (const auto& [name, elements] : got.elements) {
    if (!name.starts_with("g/")) continue;
    double difference = 0, squares = 1e-24;
    for (const auto& [element, value] : elements) {
      const double wanted = want.elements.at(name).at(element);
      difference += std::pow(value - wanted, 2);
      squares += std::pow(wanted, 2);
    }
    const double of_tensor = std::sqrt(difference / squares);
    if (!(of_tensor <= worst)) worst = std::isfinite(of_tensor) ? of_tensor : INFINITY;
  }
  return worst;
}

}  // namespace

// The same numbers are rounded to bf16 and FP8 with the same scales, but for those in the middle of two,
// where the order of a sum decides, and what follows from them. How many there are depends on the seed: of 16
// seeds 11 (tensorwise), 13 (delayed) and 16 (blockwise) differ by less than the limit, the nearest by 1e-6,
// 1e-7 and 4e-4, the farthest by 0.15. With scales that are off by 1 % all differ by 0.4 and more; with
// scales of the first expert's weights for all of them 3 agree, where those happen to be the same powers of
// two. Heads of 8 columns have probabilities in f32 on a GPU as well, and with logits in f32 a CPU would not
// round their gradient.
TEST_CASE("experts on a GPU make the FP8 step of the CPU's emulation", "[engine][fp8][experts]") {
  if (test_world().size() > 1) return;
  const auto mixtral = [](int hidden, int columns, int layers) {
    return fmt::format(
        "{{model_type: mixtral, vocab_size: 61, hidden_size: {}, intermediate_size: {}, "
        "num_hidden_layers: {}, num_attention_heads: {}, head_dim: 8, max_position_embeddings: 64, "
        "initializer_range: 0.2, num_local_experts: 4, num_experts_per_tok: 2}}",
        hidden, columns, layers, hidden / 8);
  };
  for (const Recipe& r : {Recipe{"tensorwise", mixtral(32, 48, 2), "16"},
                          {"delayed", mixtral(32, 48, 2), "16"},
                          {"blockwise", mixtral(128, 128, 1), "64"}}) {
    constexpr int wanted = 5;
    std::vector<double> differences;
    const auto near = [&] {
      return std::count_if(differences.begin(), differences.end(), [](double d) { return d < 1.2e-2; });
    };
    for (int seed = 1; seed <= 16 && near() < wanted; ++seed)
      differences.push_back(device_difference(r, seed));
    CAPTURE(r.name, differences);
    CHECK(near() == wanted);
  }
}

TEST_CASE("the options of recipes matter", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  const auto differ = [](const Keys& common, const Keys& a, const Keys& b) {
    CAPTURE(common, a, b);
    CHECK_FALSE(same(learn("cpu", llama, common + a), learn("cpu", llama, common + b)));
  };
  const Keys tensorwise = fp8("tensorwise", "16"), delayed = fp8("delayed", "16");
  differ(tensorwise, {"policy.fp8_cfg.fp8=hybrid"}, {"policy.fp8_cfg.fp8=e4m3"});
  differ(tensorwise, {}, {"policy.fp8_cfg.num_first_layers_in_bf16=1"});
  differ(tensorwise, {"policy.fp8_cfg.num_first_layers_in_bf16=1"},
         {"policy.fp8_cfg.num_last_layers_in_bf16=1"});
  differ(tensorwise, {"policy.fp8_cfg.fp8_margin=0"}, {"policy.fp8_cfg.fp8_margin=8"});
  differ(delayed, {"policy.fp8_cfg.fp8_margin=0"}, {"policy.fp8_cfg.fp8_margin=8"});
  differ(delayed, {"policy.fp8_cfg.fp8_amax_compute_algo=most_recent"},
         {"policy.fp8_cfg.fp8_amax_compute_algo=max"});
  differ(delayed + Keys{"policy.fp8_cfg.fp8_amax_compute_algo=max"},
         {"policy.fp8_cfg.fp8_amax_history_len=1"}, {"policy.fp8_cfg.fp8_amax_history_len=3"});
}

namespace {

const Keys attention{"policy.fp8_cfg.fp8_dot_product_attention=true"};
/// QK norm writes q and k beside v, and heads share keys.
const std::string qwen3 =
    "{model_type: qwen3, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 64, "
    "initializer_range: 0.2}";

}  // namespace

TEST_CASE("attention with FP8 operands learns nearly what fp32 learns", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  for (const std::string recipe : {"tensorwise", "delayed"})
    for (const std::string& model : {llama, qwen3, experts}) {
      const Learned exact = learn("cpu", model, {"policy.max_total_sequence_length=16"});
      const Learned gemms = learn("cpu", model, fp8(recipe, "16"));
      const Learned got = learn("cpu", model, fp8(recipe, "16") + attention);
      const double limit = recipe == "delayed" ? 0.3 : model == experts ? 0.2 : 0.1;
      CAPTURE(recipe, model, farthest(got, exact));
      CHECK_FALSE(same(got, gemms));
      CHECK(farthest(got, exact) < limit);
      const Keys bf16 = fp8(recipe, "16") + attention + Keys{"policy.precision=bfloat16"};
      CHECK(farthest(learn("cpu", model, bf16), exact) < limit);
    }
}

TEST_CASE("attention with FP8 operands keeps FP8 for the backward pass and recomputes it bit by bit",
          "[engine][fp8]") {
  if (test_world().size() > 1) return;
  for (const std::string recipe : {"tensorwise", "delayed"})
    for (const std::string& model : {llama, qwen3}) {
      CAPTURE(recipe, model);
      const Keys keys = fp8(recipe, "16") + attention;
      const Learned kept = learn("cpu", model, keys + Keys{"policy.recompute.granularity=none"}, 2);
      for (const std::string modules : {"[norm]", "[core_attn]", "[norm, activation, core_attn]"})
        CHECK(same(learn("cpu", model,
                         keys + Keys{"policy.recompute.granularity=selective",
                                     "policy.recompute.modules=" + modules},
                         2),
                   kept));
      CHECK(same(learn("cpu", model, keys + Keys{"policy.checkpoint_every=1"}, 2), kept));
      CHECK(same(learn("cpu", model,
                       keys + Keys{"policy.offload_activations=true", "policy.offload_modules=[qkv]"}, 2),
                 kept));
      const auto saved = [&](const Keys& with) {
        const auto alone = test_world().comm().split(test_world().rank(), 0, "alone");
        Trainee trainee(*alone, "cpu", tiny_config("cpu", with, model));
        int64_t bytes = 0;
        for (const auto& block : trainee.engine().plan().decoder->block_bytes()) bytes += block.kept;
        return bytes;
      };
      // One byte for each number of q, k and v in place of 4; with QK norm these are read behind it as well.
      const Keys none = fp8(recipe, "16") + Keys{"policy.recompute.granularity=none"};
      if (model == llama) CHECK(saved(none + attention) < saved(none));
    }
}

TEST_CASE("attention with FP8 operands leaves layers out, and evaluation leaves its scales alone",
          "[engine][fp8]") {
  if (test_world().size() > 1) return;
  const Keys tensorwise = fp8("tensorwise", "16") + attention;
  CHECK_FALSE(same(learn("cpu", llama, tensorwise),
                   learn("cpu", llama, tensorwise + Keys{"policy.fp8_cfg.num_first_layers_in_bf16=1"})));
  const auto alone = test_world().comm().split(0, 0, "alone");
  Trainee trainee(*alone, "cpu", tiny_config("cpu", fp8("delayed", "16") + attention, llama));
  engine::Engine& e = trainee.engine();
  const model::DelayedScales& s = e.plan().decoder->fp8().delayed();
  const auto scale = [&](precision::Gemm gemm, precision::Role role) {
    return s.scale.ptr<float>()[s.layout.index(1, gemm, role)];
  };
  using precision::Gemm, precision::Role;
  trainee.train_step();
  const std::vector<std::pair<Gemm, Role>> operands{{Gemm::attention_q, Role::input},
                                                    {Gemm::attention_k, Role::input},
                                                    {Gemm::attention_v, Role::input},
                                                    {Gemm::attention_out, Role::gradient}};
  std::vector<float> after;
  for (const auto& [gemm, role] : operands) {
    after.push_back(scale(gemm, role));
    CHECK(after.back() > 0);
    CHECK(after.back() < 0.1f);  // from 1
    for (size_t i = 0; i + 1 < after.size(); ++i) CHECK(after[i] != after.back());
  }
  const data::HostMicroBatch batch = random_batch(e.plan().batch.micro * e.plan().sequence_length, 5);
  e.evaluate(1, [&]() -> const data::HostMicroBatch& { return batch; });
  for (size_t i = 0; i < operands.size(); ++i)
    CHECK(scale(operands[i].first, operands[i].second) == after[i]);
}

TEST_CASE("attention with FP8 operands is refused on a GPU without a library for it", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  const Keys keys = fp8("tensorwise", "16") + attention + Keys{"policy.precision=bfloat16"};
  const std::string no_bias =
      "{model_type: llama, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
      "num_attention_heads: 2, head_dim: 16, max_position_embeddings: 64}";
  const auto alone = test_world().comm().split(0, 0, "alone");
  const ConfigResult config = tiny_config("cuda", keys, no_bias);
  try {  // the dry run that plans the memory of the engine asks for the kernel
    const Trainee trainee(*alone, "cuda", config);
    FAIL("not refused");
  } catch (const Error& error) {
    CAPTURE(std::string(error.what()));
    CHECK(error.code() == Exit::config);
    CHECK(std::string(error.what()).find("fp8_dot_product_attention: true needs cuDNN") != std::string::npos);
  }
}

TEST_CASE("FP8 activations are recomputed bit by bit", "[engine][fp8]") {
  if (test_world().size() > 1) return;
  for (const std::string device : {"cpu", "cuda"})
    for (const Recipe& r : recipes) {
      if (device == "cuda" && r.model == wide) continue;  // sim: minutes
      for (const std::string& model : {r.model, gpt2}) {
        if (model == gpt2 && r.model == wide) continue;
        CAPTURE(device, r.name, model);
        const Keys keys = fp8(r.name, r.length);
        const Learned kept = learn(device, model, keys + Keys{"policy.recompute.granularity=none"}, 2);
        for (const std::string modules : {"[norm]", "[activation]", "[norm, activation]"})
          CHECK(same(learn(device, model,
                           keys + Keys{"policy.recompute.granularity=selective",
                                       "policy.recompute.modules=" + modules},
                           2),
                     kept));
        CHECK(recomputed_bytes(model, keys + Keys{"policy.recompute.granularity=selective",
                                                  "policy.recompute.modules=[activation]"}) > 0);
      }
    }
}

// Microbatches of several ranks are one to the experts, whose largest numbers set the scale of all: single
// elements of a gradient differ as FP8 rounds them, the loss and the norm of the gradient hardly.
TEST_CASE("FP8 experts that get tokens of several microbatches make nearly the step of one rank",
          "[engine][fp8][experts]") {
  comm::Communicator& world = test_world().comm();
  if (world.size() == 1) return;
  for (const Recipe& r : of_experts)
    for (const std::string axis : {"expert_parallel_size", "expert_tensor_parallel_size"}) {
      // The configuration refuses parts of experts that are smaller than a block of scales.
      if (axis == "expert_tensor_parallel_size" && r.model == wide_experts && world.size() > 2) continue;
      const Keys keys = fp8(r.name, r.length) + Keys{"policy.train_global_batch_size=8"};
      const Learned want = learn("cpu", r.model, keys, 1);
      const Keys layout{fmt::format("distributed.{}={}", axis, world.size())};
      const Learned got = Trainee(world, "cpu", tiny_config("cpu", keys + layout, r.model)).learn(1);
      CAPTURE(r.name, axis, farthest(got, want));
      CHECK(farthest(got, want) < 0.1);
    }
}

TEST_CASE("delayed scales follow the largest numbers, and neither spikes nor NaN stay in them",
          "[engine][fp8]") {
  if (test_world().size() > 1) return;
  const auto alone = test_world().comm().split(0, 0, "alone");
  Trainee trainee(*alone, "cpu",
                  tiny_config("cpu", fp8("delayed", "16") + Keys{"pretrain.on_nonfinite=skip"}, llama));
  engine::Engine& e = trainee.engine();
  const model::DelayedScales& s = e.plan().decoder->fp8().delayed();
  const int at = s.layout.index(0, precision::Gemm::mlp_in, precision::Role::weight);
  const auto scale = [&] { return static_cast<double>(s.scale.ptr<float>()[at]); };
  const auto weight = [&]() -> float& {
    return *e.weights()[e.plan().parameters.layers[0].mlp_in].ptr<float>();
  };
  CHECK(scale() == 1);
  trainee.train_step();
  trainee.train_step();
  const double usual = scale();
  CHECK(usual < 0.1);
  // A spike saturates in its step and sets the scale of the next two, as many as the history has.
  const float before = weight();
  weight() = 100.0f;
  CHECK_FALSE(trainee.train_step().skipped);
  CHECK(std::fabs(scale() - 100.0 / 448) < 1e-3);
  weight() = before;
  trainee.train_step();
  CHECK(scale() < 0.1);  // most_recent
  // NaN and infinity reach the gradients, so that the step is skipped, and leave the scale as it is.
  for (const float bad : {NAN, INFINITY}) {
    const float good = weight();
    const double kept = scale();
    weight() = bad;
    CHECK(trainee.train_step().skipped);
    CHECK(scale() == kept);
    weight() = good;
    CHECK_FALSE(trainee.train_step().skipped);
    CHECK(scale() < 0.1);
  }
}
