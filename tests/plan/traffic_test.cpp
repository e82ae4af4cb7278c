// The communication of tensor-parallel ranks in a step.
#include "apps/engine/engine.h"
#include "apps/engine/step_traffic.h"
#include "apps/model/families/hf_config.h"
#include "apps/plan/dry_rank.h"
#include "apps/plan/run_plan.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

/// Bytes of the operations in layers by operation, of a rank of four with sequence parallelism.
int64_t bytes_in_layers(comm::Op op, const std::vector<std::string>& keys) {
  std::vector<std::string> overrides{"policy.precision=bfloat16", "distributed.tensor_parallel_size=4",
                                     "policy.max_total_sequence_length=512"};
  overrides.insert(overrides.end(), keys.begin(), keys.end());
  const ConfigResult result = load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 4, train_micro_batch_size: 1}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const Config& c = result.config;
  const model::ModelSpec spec = model::parse_model_config(
      R"({"model_type":"llama","vocab_size":512,"hidden_size":512,"intermediate_size":1024,
      "num_hidden_layers":2,"num_attention_heads":8,"max_position_embeddings":2048})",
      "test");
  const ops::DryDevice device =
      plan::usual_device(DeviceType::cuda, 1, plan::recipe_for(c, DeviceType::cuda, spec.layers));
  auto plan =
      plan::make_run_plan(c, spec, resolve_batch(c, 4), plan::grid_position(c, 4, 0), DeviceType::cuda, 1);
  int64_t bytes = 0;
  for (const plan::Traffic& t : engine::step_traffic(plan, engine::training_options(c), device))
    if (t.op == op && t.purpose == comm::Purpose::layers && t.group == parallel::group::tp) bytes += t.bytes;
  return bytes;
}

}  // namespace

TEST_CASE("FP8 layers gather half the bytes of bf16", "[plan][fp8]") {
  // Rows of 512 tokens, 2 layers, 4 microbatches: x of QKV and MLP, dy of both outputs, once each.
  constexpr int64_t numbers = 4 * 2 * 4 * 512 * 512;
  // The embedding's gradient and the LM head's input stay in bf16.
  constexpr int64_t others = 2 * 4 * 512 * 512;
  // Maximum, sum and logit of the target of every token, of four ranks.
  constexpr int64_t losses = 4 * 512 * 3 * 4 * 4;
  const auto gathered = [](const std::vector<std::string>& keys) {
    return bytes_in_layers(comm::Op::all_gather, keys);
  };
  const std::vector<std::string> none{"policy.recompute.granularity=none"};
  const int64_t bf16 = gathered(none);
  for (const char* recipe : {"tensorwise", "delayed", "blockwise"}) {
    CAPTURE(recipe);
    std::vector<std::string> fp8 = none;
    fp8.insert(fp8.end(),
               {"policy.fp8_cfg.enabled=true", std::string("policy.fp8_cfg.fp8_recipe=") + recipe});
    const int64_t bytes = gathered(fp8);
    if (recipe == std::string("blockwise"))
      CHECK(bytes == bf16);
    else
      CHECK(bf16 - bytes == numbers);
    CHECK(bytes_in_layers(comm::Op::reduce_scatter, fp8) == bytes_in_layers(comm::Op::reduce_scatter, none));
  }
  CHECK(bf16 == 2 * (numbers + others) + losses);
}
