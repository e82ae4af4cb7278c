// Predictions: what a dry run finds, the assumed rates, and the table.

#include <map>
#include <sstream>

#include "apps/machine/call_time.h"
#include "apps/plan/parts.h"
#include "apps/predict/estimate_text.h"
#include "core/device/dry_run.h"
#include "core/ops/coverage.h"
#include "core/ops/dry_run.h"
#include "core/ops/libraries.h"
#include "core/trace/device_timeline.h"
#include "core/trace/trace.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;
using ops::Call;
using ops::Work;
using predict::Prediction;

namespace {

const machine::DeviceModel& h200() {
  return machine::find_device_model("--predict", "h200");
}

/// An engine on a GPU that is not there.
struct DryEngine {
  explicit DryEngine(const ConfigResult& result, int major = 9)
      : libraries(ops::open_dry_run_libraries(major, {})),
        runtime(device::open_dry_run(h200().properties())) {
    const Config& c = result.config;
    ops::Exec exec;
    exec.kernels = &no_kernels;
    exec.reduction_blocks = ops::gpu_partials;
    exec.device = runtime.get();
    exec.multiprocessors = h200().multiprocessors;
    exec.libraries = libraries.get();
    const plan::GridPosition position = plan::grid_position(c, 1, 0);
    ranks.emplace(position.grid, world->comm(), plan::needed_groups(c, position, false));
    engine.emplace(plan::make_run_plan(c, train::load_model_spec(result), resolve_batch(c, 1), position,
                                       DeviceType::cuda, 1),
                   engine::training_options(c), *ranks, exec);
    calls = engine->dry_step(objective, true).calls;
  }
  double flops(const std::function<bool(const Call&)>& selected) const {
    double sum = 0;
    for (const Call& call : calls)
      if (selected(call)) sum += call.cost.flops;
    return sum;
  }

  std::unique_ptr<comm::World> world = comm::World::init();
  std::optional<parallel::Groups> ranks;
  std::unique_ptr<ops::Libraries> libraries;
  std::unique_ptr<device::Runtime> runtime;
  ops::KernelTable no_kernels;
  engine::LanguageModeling objective;
  std::optional<engine::Engine> engine;
  std::vector<Call> calls;
};

struct Family {
  const char *name, *model;
};
const Family families[] = {
    {"llama",
     "{model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, max_position_embeddings: 64}"},
    {"mistral with a window",
     "{model_type: mistral, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 3, "
     "num_attention_heads: 2, num_key_value_heads: 1, sliding_window: 3, max_position_embeddings: 64}"},
    {"qwen3",
     "{model_type: qwen3, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}"},
    {"gpt2",
     "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0.1, embd_pdrop: 0.1}"},
    {"gpt2 with an activation that no library has",
     "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0, embd_pdrop: 0, activation_function: gelu}"},
};

}  // namespace

TEST_CASE("the FLOPs of a dry run are those of the model's formula", "[predict]") {
  for (const Family& family : families)
    for (const char* recompute : {"none", "selective"})
      for (const int batch : {2, 6}) {  // one and three microbatches
        CAPTURE(family.name, recompute, batch);
        const ConfigResult config = tiny_config("cuda",
                                                {fmt::format("policy.train_global_batch_size={}", batch),
                                                 std::string("policy.recompute.granularity=") + recompute},
                                                family.model);
        const DryEngine dry(config);
        const plan::RunPlan& plan = dry.engine->plan();
        // The formula counts the backward pass of attention as twice the forward pass; the kernels compute
        // the scores again. Recomputed GEMMs do not count.
        const double gemms = dry.flops(
            [](const Call& c) { return c.cost.work == Work::gemm && c.range != std::string("recompute"); });
        const double attention =
            dry.flops([](const Call& c) { return c.op == std::string("attention_forward"); });
        const double backward =
            dry.flops([](const Call& c) { return c.op == std::string("attention_backward"); });
        CHECK(gemms + 3 * attention ==
              Approx(static_cast<double>(plan.batch.tokens_per_step) *
                     model::training_flops_per_token(plan.spec, plan.sequence_length))
                  .epsilon(1e-12));
        CHECK(backward == Approx(2.5 * attention).epsilon(1e-12));
        CHECK(attention > 0);
      }
}

TEST_CASE("the FLOPs of all ranks are those of the model's formula, however experts are divided",
          "[predict]") {
  constexpr int world = 8;
  const ops::DryDevice device(h200().properties(), {});
  for (const std::string& layout :
       {std::string("distributed.expert_parallel_size=1"), std::string("distributed.expert_parallel_size=2"),
        std::string("distributed.expert_parallel_size=4"), std::string("distributed.expert_parallel_size=8"),
        std::string("distributed.expert_parallel_size=2 distributed.tensor_parallel_size=2"),
        std::string("distributed.expert_parallel_size=2 distributed.expert_tensor_parallel_size=2"),
        std::string("distributed.expert_parallel_size=4 distributed.pipeline_parallel_size=2")})
    for (const char* slack : {"0", "1.25"}) {
      CAPTURE(layout, slack);
      std::vector<std::string> overrides{
          "policy.train_global_batch_size=32", "policy.train_micro_batch_size=2",
          "policy.max_total_sequence_length=32", "policy.recompute.granularity=none",
          std::string("policy.model.moe_row_slack=") + slack};
      std::istringstream keys(layout);
      for (std::string key; keys >> key;) overrides.push_back(key);
      const ConfigResult result = tiny_config(
          "cuda", std::move(overrides),
          "{model_type: qwen3_moe, vocab_size: 64, hidden_size: 32, intermediate_size: 64, "
          "moe_intermediate_size: 16, num_experts: 8, num_experts_per_tok: 2, num_hidden_layers: 2, "
          "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64}");
      const Config& c = result.config;
      double flops = 0, formula = 0;
      for (int rank = 0; rank < world; ++rank) {
        auto plan =
            plan::make_run_plan(c, train::load_model_spec(result), resolve_batch(c, world),
                                plan::grid_position(c, world, rank), DeviceType::cuda, device.exec().threads);
        formula = static_cast<double>(plan->batch.tokens_per_step) *
                  model::training_flops_per_token(plan->spec, plan->sequence_length);
        engine::Engine engine(std::move(plan), engine::training_options(c), device.exec());
        for (const Call& call : engine.dry_step(engine.objective(), true).calls) {
          if (call.cost.work == Work::gemm) flops += call.cost.flops;
          if (call.op == std::string("attention_forward")) flops += 3 * call.cost.flops;
        }
      }
      CHECK(flops == Approx(formula).epsilon(1e-9));
    }
}

TEST_CASE("attention with FP8 operands runs where the library takes it, and is refused elsewhere",
          "[predict]") {
  const auto config = [](const std::string& attention) {
    return tiny_config(
        "cuda",
        {"policy.precision=bfloat16", "policy.fp8_cfg.enabled=true", "policy.max_total_sequence_length=32",
         "policy.fp8_cfg.fp8_dot_product_attention=" + attention},
        "{model_type: qwen3, vocab_size: 61, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
        "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 64}");
  };
  const DryEngine dry(config("true"), 10), bf16(config("false"), 10);
  const auto attention = [](const DryEngine& e) {
    std::vector<Call> calls;
    for (const Call& call : e.calls)
      if (call.cost.work == Work::attention) calls.push_back(call);
    return calls;
  };
  const std::vector<Call> fp8 = attention(dry), other = attention(bf16);
  REQUIRE(fp8.size() == other.size());
  REQUIRE_FALSE(fp8.empty());
  for (size_t i = 0; i < fp8.size(); ++i) {
    CHECK(fp8[i].cost.operands == DType::e4m3);
    CHECK(other[i].cost.operands == DType::bf16);
    CHECK(fp8[i].cost.library);
    CHECK(fp8[i].cost.flops == other[i].cost.flops);
    CHECK(fp8[i].cost.read < other[i].cost.read);
    CHECK(fp8[i].cost.written == other[i].cost.written);
    // There is no rate of FP8 attention.
    CHECK(machine::estimate(h200(), fp8[i], {}).arithmetic ==
          machine::estimate(h200(), other[i], {}).arithmetic);
  }
  for (const int major : {9, 12}) try {
      const DryEngine refused(config("true"), major);
      FAIL("not refused");
    } catch (const Error& error) {
      CHECK(error.code() == Exit::config);
      CHECK(std::string(error.what()).find("compute capability 10.x") != std::string::npos);
    }
}

TEST_CASE("a dry run finds the calls that a step makes", "[predict]") {
  for (const Family& family : families) {
    CAPTURE(family.name);
    const ConfigResult config = tiny_config(
        "cuda", {"policy.train_global_batch_size=6", "policy.recompute.granularity=selective"}, family.model);
    const auto world = comm::World::init();
    train::Placement placement(*world, config);  // the simulated device
    const auto engine = make_engine(placement, config);
    engine::LanguageModeling objective;
    const std::vector<char> before = bytes_of(*engine, engine->groups().front().weights);
    std::map<std::pair<std::string, std::string>, int64_t> expected, counted;
    for (const Call& call : engine->dry_step(objective, true).calls)
      if (!plan::part_of(call.op, call.range).empty()) ++expected[{call.op, call.range}];
    CHECK(bytes_of(*engine, engine->groups().front().weights) == before);
    CHECK(std::string(trace::innermost()).empty());

    const ops::Exec& exec = engine->exec();
    trace::start(trace::Mode::totals);
    trace::attach_device(*exec.device, exec.stream);
    for (int64_t m = 0; m < 3; ++m) engine->fill(m, random_batch(2 * T, static_cast<uint64_t>(m)), m * 2);
    engine->step({.number = 1, .learning_rate = 1e-2, .loss_tokens = 6 * T}, objective);
    engine->collect();
    exec.device->synchronize();
    trace::collect_device();
    for (const trace::Total& total : trace::device_totals_by_parent())
      if (!plan::part_of(total.name, total.parent).empty()) counted[{total.name, total.parent}] = total.count;
    trace::detach_device();
    trace::start(trace::Mode::off);
    // An activation behind a GEMM of the same op has no range of its own.
    if (std::string(family.name).find("no library") != std::string::npos)
      for (auto* calls : {&expected, &counted})
        std::erase_if(*calls, [](const auto& c) { return c.first.first.starts_with("activation"); });
    CHECK(expected == counted);
  }
}

TEST_CASE("every kernel belongs to a part of a step", "[predict]") {
  for (const ops::KernelEntry& entry : ops::kernel_entries({})) {
    CAPTURE(entry.name);
    CHECK_FALSE(plan::part_of(entry.name, "layer_3").empty());
    CHECK(plan::part_of(entry.name, "recompute") == "recomputed");
  }
  CHECK(plan::part_of("linear_backward_weight", "layer_0") == "layer GEMMs, wgrad");
  CHECK(plan::part_of("linear_backward_weight", "loss_computation") == "head GEMM, wgrad");
  CHECK(plan::part_of("norm_backward", "loss_computation") == "norms, backward");
  CHECK(plan::part_of("layer_3", "backward_pass").empty());
}

TEST_CASE("arguments of ops show in the prediction", "[predict]") {
  const auto of = [](std::vector<std::string> overrides) {
    return DryEngine(tiny_config("cuda", std::move(overrides), tiny_llama));
  };
  const auto calls = [](const DryEngine& dry, const std::string& range) {
    return std::count_if(dry.calls.begin(), dry.calls.end(), [&](const Call& c) { return c.range == range; });
  };
  const DryEngine none = of({"policy.recompute.granularity=none"}),
                  norms = of({"policy.recompute.granularity=selective", "policy.recompute.modules=[norm]"});
  CHECK(calls(none, "recompute") == 0);
  CHECK(calls(norms, "recompute") == 2 * 2 * 2);  // microbatches, layers, norms
  CHECK(calls(none, "loss_computation") == calls(norms, "loss_computation"));
  // In f32 no library of fused attention runs; in bf16 cuDNN is assumed.
  for (const char* precision : {"float32", "bfloat16"}) {
    const DryEngine dry = of({std::string("policy.precision=") + precision});
    for (const Call& call : dry.calls)
      if (call.cost.work == Work::attention)
        CHECK(call.cost.library == (precision == std::string("bfloat16")));
  }
}

TEST_CASE("an unknown GPU is refused with the names that there are", "[predict]") {
  try {
    machine::find_device_model("--predict", "v100");
    FAIL("accepted");
  } catch (const Error& e) {
    CHECK(e.code() == Exit::usage);
    CHECK(std::string(e.what()).starts_with(
        "--predict: unknown GPU 'v100'; expected one of: " + machine::device_model_names() + ". Fix: "));
  }
  for (const char* name : {"h200", "h100", "b200", "a100"}) {
    CHECK(machine::find_device_model("--predict", name).bf16_flops() > 3e14);
    CHECK(machine::find_device_model("--predict", name).properties().memory > size_t{70} << 30);
  }
}

TEST_CASE("a call takes the longer of its arithmetic and its memory traffic", "[predict]") {
  const auto gemm = [](int64_t rows, int64_t columns, int64_t inner) {
    Call call{.op = "linear_forward"};
    call.cost.work = Work::gemm;
    call.cost.operands = DType::bf16;
    call.cost.gemm = {rows, columns, inner};
    call.cost.flops = ops::linear_flops(rows, columns, inner);
    return call;
  };
  const auto rate = [&](const Call& call) {
    return call.cost.flops / machine::estimate(h200(), call, machine::likely).seconds() / h200().bf16_flops();
  };
  // Large GEMMs come near the assumed fraction, never above; a last wave with few tiles costs a whole one.
  CHECK(rate(gemm(132 * 128, 256 * 4, 1 << 20)) == Approx(h200().gemm).epsilon(1e-3));
  CHECK(rate(gemm(128 * 12 * 11, 256, 1 << 20)) == Approx(h200().gemm).epsilon(1e-3));
  CHECK(rate(gemm(128 * 133, 256, 4096)) < 0.85 * h200().gemm);
  CHECK(rate(gemm(8192, 8192, 128)) < 0.51 * h200().gemm);
  CHECK(rate(gemm(128, 128, 1 << 20)) > 0.3 * h200().gemm);  // the inner dimension is split
  CHECK(rate(gemm(128, 128, 256)) < 0.02 * h200().gemm);
  Call traffic = gemm(8192, 8192, 8192);
  const double alone = machine::estimate(h200(), traffic, machine::likely).seconds();
  traffic.cost.epilogue = h200().copy * 1e-3;
  CHECK(machine::estimate(h200(), traffic, machine::likely).seconds() - alone == Approx(0.6e-3));
  traffic.cost.read = h200().copy;
  CHECK(machine::estimate(h200(), traffic, machine::likely).seconds() == Approx(1 / 0.85));

  Call norm{.op = "norm_forward"};
  norm.cost.read = 0.5 * h200().copy;
  norm.cost.written = 0.2 * h200().copy;
  norm.cost.scratch = 0.15 * h200().copy;
  CHECK(machine::estimate(h200(), norm, machine::likely).seconds() == Approx(0.85 / 0.88));
  CHECK(machine::estimate(h200(), norm, machine::poor).seconds() == Approx(0.85 / 0.88 / 0.88));
  norm.op = "qk_norm_rope_backward";
  CHECK(machine::estimate(h200(), norm, machine::likely).seconds() > 1.1);
  norm.op = "add_rows";  // not measured
  CHECK(machine::estimate(h200(), norm, machine::likely).seconds() == Approx(1));

  // f32 operands do not run at the rate of bf16, TF32 between both.
  Call f32 = gemm(8192, 8192, 8192), tf32 = f32;
  f32.cost.operands = tf32.cost.operands = DType::f32;
  tf32.cost.tf32 = true;
  const double slow = machine::estimate(h200(), f32, machine::likely).seconds(),
               middle = machine::estimate(h200(), tf32, machine::likely).seconds();
  CHECK(slow / alone == Approx(989.0 / 67));
  CHECK(middle / alone == Approx(989.0 / 494));

  Call attention{.op = "attention_forward"};
  attention.cost.work = Work::attention;
  attention.cost.operands = DType::bf16;
  attention.cost.flops = 1e15;
  attention.cost.head_dim = 128;
  attention.cost.keys = 256;
  attention.cost.library = true;
  CHECK(machine::estimate(h200(), attention, machine::likely).seconds() ==
        Approx(1e15 / (989e12 * h200().forward.d128 / 2)));
  attention.cost.library = false;
  const double own = machine::estimate(h200(), attention, machine::likely).seconds();
  attention.cost.library = attention.cost.backward = true;
  CHECK(own > machine::estimate(h200(), attention, machine::likely).seconds());
}

TEST_CASE("measured times stand beside the estimates of the same parts", "[predict]") {
  Call gemm{.op = "linear_forward", .range = "layer_0"}, head = gemm,
                                                         norm{.op = "norm_forward", .range = "recompute"};
  head.range = "loss_computation";
  gemm.cost.work = head.cost.work = Work::gemm;
  gemm.cost.gemm = head.cost.gemm = {8192, 8192, 8192};
  gemm.cost.flops = head.cost.flops = ops::linear_flops(8192, 8192, 8192);
  gemm.cost.operands = head.cost.operands = DType::bf16;
  norm.cost.read = 1e9;
  const std::vector<Call> calls{gemm, gemm, head, norm};
  Prediction prediction(h200(), calls,
                        {.tokens = 8192, .flops_per_token = 1e9, .planned_bytes = int64_t{1} << 40});
  const auto part = [&](std::string_view name) {
    for (const predict::PredictedPart& p : prediction.parts())
      if (p.name == name) return p;
    FAIL("no part " << name);
    return predict::PredictedPart{};
  };
  CHECK(prediction.parts().size() == 4);
  CHECK(part("layer GEMMs, forward").calls == 2);
  CHECK(part("layer GEMMs, forward").seconds == Approx(2 * part("head GEMM, forward").seconds));
  CHECK(part("recomputed").seconds == Approx(1e9 / (4.3e12 * 0.88)));
  CHECK(part("between kernels").calls == 4);
  double sum = 0;
  for (const predict::PredictedPart& p : prediction.parts()) sum += p.seconds;
  CHECK(prediction.seconds() == Approx(sum));
  CHECK(prediction.mfu(1) == Approx(8192e9 / 989e12));
  CHECK_THAT(prediction.text(), ContainsSubstring("does not fit"));
  CHECK_THAT(prediction.text(), !ContainsSubstring("measured"));

  prediction.add({.step = 0.1,
                  .parts = {{"linear_forward", "layer_0", 1, 0.02},
                            {"linear_forward", "layer_1", 1, 0.03},
                            {"linear_forward", "loss_computation", 1, 0.01},
                            {"norm_forward", "recompute", 1, 0.005},
                            {"dropout", "layer_1", 1, 0.001},  // not predicted
                            {"layer_1", "forward_pass", 1, 0.06}}});
  CHECK(part("layer GEMMs, forward").measured == Approx(0.05));
  CHECK(part("head GEMM, forward").measured == Approx(0.01));
  CHECK(part("dropout").measured == Approx(0.001));
  CHECK(part("between kernels").measured == Approx(0.1 - 0.066));
  CHECK(prediction.parts().back().name == "between kernels");
  const std::string text = prediction.text();
  CHECK_THAT(text, ContainsSubstring("measured ms"));
  // All rows of the table end their columns at the same place.
  const size_t header = text.find("part of a step"), ratio = text.find("ratio", header) - header;
  for (const char* row : {"layer GEMMs, forward", "head GEMM, forward", "recomputed", "between kernels"}) {
    CAPTURE(row);
    const size_t at = text.find(std::string("\n") + row) + 1;
    CHECK(std::isdigit(text[at + ratio + 4]));
    CHECK(text[at + ratio + 5] == ' ');
  }
}
