// Times of steps with the kernels of other trainers.

#include "apps/machine/trainer_kernels.h"
#include "apps/model/linear/linear.h"
#include "apps/predict/step_time.h"
#include "tests/predict/planned.h"

using namespace nrl;
using namespace nrl::predict;
using namespace nrl::test;

TEST_CASE("GEMMs of Hopper take twice as long beside an operation, others as much as it takes of the GPU",
          "[predict]") {
  const auto factor = [](const char* gpu, const char* trainer, ops::Work work, comm::Purpose purpose) {
    machine::DeviceModel model = machine::find_device_model("--device", gpu);
    if (trainer) model = machine::find_trainer(trainer, {.norm = ops::NormKind::rms}).on(model);
    const machine::Overlap overlap = overlap_of(ModeledDevice(model, false, 1), 8);
    return overlap.shares(purpose) ? overlap.of(overlap.row("op", work), comm::Op::all_gather).call : 1;
  };
  using enum ops::Work;
  using comm::Purpose;
  for (const char* gpu : {"h100", "h200"}) CHECK(factor(gpu, nullptr, gemm, Purpose::weights) == 2);
  CHECK(factor("h100", nullptr, memory, Purpose::weights) == Approx(1 + 16.0 / 132));
  CHECK(factor("a100", nullptr, gemm, Purpose::weights) == Approx(1 + 16.0 / 108));
  CHECK(factor("b200", nullptr, gemm, Purpose::weights) == Approx(1 + 16.0 / 148));
  // Userbuffers of TransformerEngine leave multiprocessors to GEMMs, the sums of gradients do not.
  CHECK(factor("h100", nullptr, gemm, Purpose::layers) == 2);
  CHECK(factor("h100", "megatron", gemm, Purpose::layers) == 1);
  CHECK(factor("h100", "megatron", gemm, Purpose::gradients) == 2);
}

TEST_CASE("Rows of experts travel beside another microbatch, or once to each node, as a trainer does",
          "[predict]") {
  const std::string mixture =
      "{model_type: qwen3_moe, vocab_size: 32000, hidden_size: 2048, intermediate_size: 6144, "
      "moe_intermediate_size: 768, "
      "num_experts: "
      "64, num_experts_per_tok: 8, num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8, "
      "head_dim: 128, max_position_embeddings: 8192}";
  const ConfigResult config = configured(16, {"distributed.expert_parallel_size=16"}, mixture);
  const model::ModelSpec spec = train::load_model_spec(config);
  machine::DeviceModel gpu = h100();
  gpu.major = 10;  // whose GEMMs lose no more than others beside an operation
  const auto of = [&](const char* trainer) {
    const ModeledDevice device(
        machine::find_trainer(trainer, {.norm = spec.norm, .experts = true, .exchanges = true}).on(gpu),
        false, 1);
    return DryStages(config.config, plan_stages(config.config, spec, 16, device, 70e9), device,
                     std::vector<ClusterNode>{{"a", 8}, {"b", 8}})
        .estimate();
  };
  const StepEstimate alone = of("megatron"), once = of("megatron+deepep"), beside = of("megatron+overlap");
  CHECK(alone.layers > 0.4 * alone.step);
  CHECK(once.busy.adapter() < 0.4 * alone.busy.adapter());
  CHECK(once.layers < 0.4 * alone.layers);
  // The adapters are busy as long, and limit the step.
  CHECK(beside.busy.adapter() == Approx(alone.busy.adapter()));
  CHECK(beside.step >= beside.busy.adapter());
  CHECK(beside.step < 0.8 * alone.step);
  CHECK(beside.layers < 0.1 * alone.layers);
}

TEST_CASE("Inputs that Megatron gathers again arrive beside another GEMM", "[predict]") {
  const auto of = [&](const char* trainer, const char* modules) {
    const std::vector<std::string> keys{
        "distributed.tensor_parallel_size=2", "distributed.sequence_parallel=true",
        "distributed.tp_comm_overlap=none", "policy.recompute.granularity=selective",
        std::string("policy.recompute.modules=") + modules};
    const ConfigResult config = load_config_text(yaml_of(llama), "model.yaml", keys);
    INFO(render(config.diagnostics));
    REQUIRE(config.ok());
    const model::ModelSpec spec = train::load_model_spec(config);
    machine::DeviceModel model = h100();
    if (trainer) model = machine::find_trainer(trainer, {.norm = spec.norm}).on(model);
    const ModeledDevice device(model, false, 1);
    return DryStages(config.config, plan_stages(config.config, spec, 2, device, 70e9), device,
                     std::vector<ClusterNode>{{"a", 2}})
        .estimate();
  };
  for (const char* trainer : {static_cast<const char*>(nullptr), "pytorch-compile", "megatron"}) {
    const StepEstimate once = of(trainer, "[norm]"), again = of(trainer, "[norm,gather]");
    CAPTURE(trainer ? trainer : "ours");
    CHECK(again.busy.node() > 1.2 * once.busy.node());
    const bool hidden = trainer && std::string_view(trainer) == "megatron";
    CHECK((again.layers < 1.05 * once.layers) == hidden);
  }
}

TEST_CASE("TransformerEngine copies weights in FP8 once a step", "[predict]") {
  /// By microbatch.
  const auto seconds = [&](const char* trainer, bool keeps) {
    const std::vector<std::string> keys{
        "policy.precision=bfloat16", "policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
        keeps ? "policy.fp8_cfg.fp8_param=true" : "policy.fp8_cfg.cache_weights=false",
        "policy.train_micro_batch_size=4"};
    const ConfigResult config = configured(1, keys);
    const model::ModelSpec spec = train::load_model_spec(config);
    machine::DeviceModel model = h100();
    if (trainer)
      model = machine::find_trainer(trainer, {.norm = spec.norm, .fp8 = Fp8Recipe::delayed}).on(model);
    const ModeledDevice device(model, false, 1);
    const DryStages stages(config.config, plan_stages(config.config, spec, 1, device, 70e9), device, {});
    const auto& stage = stages.stages().front();
    const model::Decoder& decoder = *stage.engine->plan().decoder;
    const machine::CallTimes calls(model, nullptr);
    const StageItems items =
        stage_items(stage.step, decoder, stage.engine->plan().position.grid, stages.rates(calls));
    std::vector<double> out(static_cast<size_t>(stage.step.microbatches));
    for (const Item& item : items.items) {
      if (item.kind != Item::Kind::call) continue;
      const ops::Call& call = stage.step.calls[static_cast<size_t>(item.source)];
      if (call.microbatch < 0 || call.step < 0) continue;
      const program::Step& step = decoder.program(memory::training).steps[static_cast<size_t>(call.step)];
      if (step.kind == program::StepKind::compute && model::copies_weight(decoder.step(step).name))
        out[static_cast<size_t>(call.microbatch)] += item.seconds;
    }
    return out;
  };
  for (const bool keeps : {true, false})
    for (const char* trainer : {static_cast<const char*>(nullptr), "pytorch-compile", "megatron"}) {
      CAPTURE(keeps, trainer ? trainer : "ours");
      const std::vector<double> copies = seconds(trainer, keeps);
      REQUIRE(copies.size() > 2);
      CHECK(copies[0] > 0);
      const bool cached = trainer && std::string_view(trainer) == "megatron";
      for (size_t m = 1; m < copies.size(); ++m) {
        CAPTURE(m);
        CHECK(cached == (copies[m] == 0));
        if (!cached) CHECK(copies[m] == Approx(copies[0]));
      }
    }
}
