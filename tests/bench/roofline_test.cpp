// The roofline of a step: which kernels it times, and how its table adds up.

#include "apps/bench/roofline.h"

#include <string>
#include <tuple>

#include "apps/bench/steps.h"
#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;
using bench::Roofline;
using ops::Call;
using ops::TimedCall;
using ops::Work;

namespace {

Call gemm(const char* op, double rows, const char* range = "layer_0", DType type = DType::f32) {
  ops::Cost cost{.work = Work::gemm, .read = 40, .written = 60};
  cost.flops = 2000 * rows;
  cost.operands = type;
  cost.gemm = {static_cast<int64_t>(rows), 10, 100};
  return {.op = op, .range = range, .cost = cost};
}

// Steps of six samples or examples in microbatches of two.
ConfigResult six_samples(const std::string& algorithm, const std::string& model, const std::string& precision,
                         const std::string& recompute) {
  ConfigResult result =
      load_config_text("algorithm: " + algorithm + "\ndevice: cpu\npolicy:\n  model: " + model +
                           "\n  precision: " + precision + "\n  recompute: {granularity: " + recompute +
                           "}\n  train_global_batch_size: 6\n"
                           "  train_micro_batch_size: 2\n"
                           "  max_total_sequence_length: 8\n" +
                           algorithm +
                           ": {max_num_steps: 4, seed: 7}\n"
                           "data: {train: {data_path: none}}\n"
                           "kernels: {num_threads: 1}\n",
                       "tiny.yaml", {});
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result;
}

}  // namespace

TEST_CASE("a roofline puts equal calls together, the largest loss first", "[roofline]") {
  const std::vector<TimedCall> calls{
      {gemm("linear_forward", 4), 10},
      {{.op = "norm_forward", .range = "layer_0", .cost = {.read = 300, .written = 100}}, 3},
      {gemm("linear_forward", 4), 14},
      {gemm("linear_forward", 4, "loss_computation"), 10},
      {gemm("linear_forward", 4, "layer_0", DType::bf16), 1}};
  const Roofline roofline({.f32_flops = 1000, .bf16_flops = 8000, .copy = 200}, calls, 41);
  const auto& rows = roofline.rows();
  REQUIRE(rows.size() == 4);
  CHECK(rows[0].part == "layer GEMMs, forward");
  CHECK(rows[0].kernel == "linear_forward 4 x 10 x 100");
  CHECK(rows[0].calls == 3);
  CHECK(rows[0].seconds == 25);
  CHECK(rows[0].flops == 24000);
  CHECK(rows[0].attainable == 17);  // 8 + 8 of arithmetic in f32, 1 in bf16
  CHECK(rows[0].arithmetic());
  CHECK(rows[1].part == "head GEMM, forward");
  CHECK(rows[1].lost() == 2);
  CHECK(rows[2].kernel == "norm_forward");
  CHECK(rows[2].attainable == 2);  // 400 bytes
  CHECK_FALSE(rows[2].arithmetic());
  CHECK(rows[3].part == "between kernels");
  CHECK(rows[3].seconds == 3);
  CHECK(rows[3].lost() == 3);
  CHECK(roofline.text().find("sum") != std::string::npos);
}

TEST_CASE("the timed kernels of a step are the calls of its dry run", "[roofline]") {
  const char* const experts =
      "{model_type: qwen3_moe, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: "
      "2,\n"
      "          num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64,\n"
      "          num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}";
  for (const char* model : {tiny_llama, experts})
    for (const auto& [algorithm, precision, recompute] : {std::tuple("pretrain", "float32", "none"),
                                                          {"pretrain", "float32", "full"},
                                                          {"pretrain", "bfloat16", "none"},
                                                          {"sft", "float32", "none"}}) {
      CAPTURE(model, algorithm, precision, recompute);
      const ConfigResult config = six_samples(algorithm, model, precision, recompute);
      const std::unique_ptr<comm::World> world = comm::World::init();
      train::Placement placement(*world, config);
      const auto engine = make_engine(placement, config);
      const train::LrSchedule schedule = train::make_lr_schedule(config.config.policy, 4, 6);
      ops::KernelTimer timer(engine->exec());
      monitor::StartPhases phases;
      double seconds = bench::run_steps(*world, phases, *engine, schedule, 1).front().ms * 1e-3;
      const std::vector<TimedCall> timed = timer.take();
      const std::vector<Call> dry = engine->dry_step(engine->objective(), true).calls;
      REQUIRE(timed.size() == dry.size());
      double sum = 0;
      for (size_t i = 0; i < dry.size(); ++i) {
        CAPTURE(i, dry[i].op, dry[i].range);
        CHECK(std::string(timed[i].call.op) == dry[i].op);
        CHECK(std::string(timed[i].call.range) == dry[i].range);
        CHECK(timed[i].call.cost.flops == dry[i].cost.flops);
        if (model == tiny_llama) CHECK(timed[i].call.cost.bytes() == dry[i].cost.bytes());
        CHECK(timed[i].seconds >= 0);
        sum += timed[i].seconds;
      }
      CHECK(sum <= seconds);
      CHECK(timer.take().empty());
    }
}
