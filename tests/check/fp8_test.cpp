// Which FP8 operands a GPU runs.

#include "apps/check/check.h"
#include "apps/model/families/hf_config.h"
#include "core/config/load.h"
#include "core/config/report.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::check;

namespace {

/// The problems of a small Llama with FP8 operands on this GPU. `always`: overrides that come before
/// `overrides`; `hidden`: hidden and intermediate size; `field`: one more field of the model.
std::string problems(const char* gpu, const std::vector<std::string>& always,
                     const std::vector<std::string>& overrides, int hidden, const std::string& field) {
  std::vector<std::string> all{"policy.precision=bfloat16", "policy.fp8_cfg.enabled=true"};
  all.insert(all.end(), always.begin(), always.end());
  all.insert(all.end(), overrides.begin(), overrides.end());
  const ConfigResult result = load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8, max_total_sequence_length: 128}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", all);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const model::ModelSpec spec = model::parse_model_config(
      fmt::format("{{\"model_type\": \"llama\", \"vocab_size\": 61, \"hidden_size\": {0}, "
                  "\"intermediate_size\": {0}, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
                  "{1}, \"max_position_embeddings\": 128}}",
                  hidden, field),
      "test");
  return render(check_fp8_on_gpu(result, spec, machine::find_device_model("--device", gpu)));
}

}  // namespace

TEST_CASE("a refused recipe names values that the GPU runs", "[plan]") {
  const auto found = [](const char* gpu, const std::vector<std::string>& overrides) {
    return problems(gpu, {}, overrides, 128, "\"attention_bias\": true");
  };
  const auto says = [](const std::string& text, const std::string& part) {
    CAPTURE(text, part);
    CHECK(text.find(part) != std::string::npos);
    for (const char* internal : {"mx32", "row128", "block128"})
      CHECK(text.find(internal) == std::string::npos);
  };
  const std::string recipe = "policy.fp8_cfg.fp8_recipe: ";
  for (const char* runs : {"tensorwise", "delayed", "mxfp8"})
    CHECK(found("b200", {std::string("policy.fp8_cfg.fp8_recipe=") + runs}).empty());
  const std::string blockwise = found("b200", {"policy.fp8_cfg.fp8_recipe=blockwise"});
  says(blockwise,
       recipe + "blockwise does not run on B200: scales of 128 numbers need compute capability 9.0");
  says(blockwise, "B200 runs " + recipe + "tensorwise, delayed, mxfp8");
  const std::string mxfp8 = found("h100", {"policy.fp8_cfg.fp8_recipe=mxfp8"});
  says(mxfp8, recipe + "mxfp8 does not run on H100: scales of 32 numbers need compute capability 10.0");
  says(mxfp8, "H100 runs " + recipe + "tensorwise, delayed, blockwise");
  // Values with which other keys would be refused are not named.
  CHECK(found("b200", {"policy.fp8_cfg.fp8_recipe=blockwise", "policy.fp8_cfg.fp8_param=true"})
            .find("B200 runs " + recipe + "tensorwise, delayed\n") != std::string::npos);
  CHECK(found("a100", {}).find("A100 runs") == std::string::npos);
}

TEST_CASE("FP8 operands of activations in f32 are for CPUs", "[plan]") {
  const auto found = [](const char* gpu, const std::vector<std::string>& overrides) {
    return problems(gpu, {}, overrides, 128, "\"attention_bias\": false");
  };
  for (const char* gpu : {"h100", "b200"})
    for (const char* recipe : {"tensorwise", "delayed", "blockwise", "mxfp8"}) {
      const std::string text =
          found(gpu, {"policy.precision=float32", std::string("policy.fp8_cfg.fp8_recipe=") + recipe});
      CAPTURE(gpu, recipe, text);
      CHECK(text.find("policy.precision: float32 does not run on a GPU with policy.fp8_cfg.enabled: true") !=
            std::string::npos);
      CHECK(text.find("set policy.precision to bfloat16") != std::string::npos);
    }
  for (const char* precision : {"auto", "fastest", "bfloat16"})
    CHECK(found("h100", {std::string("policy.precision=") + precision}).empty());
  CHECK(found("h100", {"policy.precision=float32", "policy.fp8_cfg.enabled=false"}).empty());
}

TEST_CASE("attention with FP8 operands is checked against the GPU", "[plan]") {
  const auto found = [](const char* gpu, const std::vector<std::string>& overrides, int head_dim = 64) {
    return problems(gpu, {"policy.fp8_cfg.fp8_dot_product_attention=true"}, overrides, 64,
                    fmt::format("\"head_dim\": {}", head_dim));
  };
  const auto says = [](const std::string& text, const std::string& part) {
    CAPTURE(text, part);
    CHECK(text.find("policy.fp8_cfg.fp8_dot_product_attention") != std::string::npos);
    CHECK(text.find(part) != std::string::npos);
  };
  CHECK(found("b200", {}).empty());
  CHECK(found("b200", {"policy.fp8_cfg.fp8_recipe=delayed"}).empty());
  CHECK(found("h100", {"policy.fp8_cfg.fp8_dot_product_attention=false"}).empty());
  says(found("h100", {}),
       "attention with FP8 operands does not run on H100: it takes compute capability 10.x");
  says(found("b200", {}, 40), "a head dimension of 40, not a multiple of 16 up to 128");
  says(found("b200", {}, 192), "a head dimension of 192");
  says(found("b200", {"data.reset_attention_mask=true"}), "sequences of different lengths");
}
