// Which FP8 operands a GPU runs.

#include "apps/plan/fp8_check.h"

#include "apps/model/hf_config.h"
#include "core/config/load.h"
#include "core/config/report.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

TEST_CASE("attention with FP8 operands is checked against the GPU", "[plan]") {
  const auto found = [](const char* gpu, std::vector<std::string> overrides, int head_dim = 64) {
    overrides.insert(overrides.begin(), {"policy.precision=bfloat16", "policy.fp8_cfg.enabled=true",
                                         "policy.fp8_cfg.fp8_dot_product_attention=true"});
    const ConfigResult result = load_config_text(
        "policy: {model: {model_type: llama}, train_global_batch_size: 8, max_total_sequence_length: 128}\n"
        "pretrain: {max_num_steps: 10}\n"
        "data: {train: {data_path: corpus}}\n",
        "t.yaml", overrides);
    INFO(render(result.diagnostics));
    REQUIRE(result.ok());
    const model::ModelSpec spec = model::parse_model_config(
        fmt::format("{{\"model_type\": \"llama\", \"vocab_size\": 61, \"hidden_size\": 64, "
                    "\"intermediate_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
                    "\"head_dim\": {}, \"max_position_embeddings\": 128}}",
                    head_dim),
        "test");
    return render(check_fp8(result, spec, find_device_model("--device", gpu)));
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
  says(found("b200", {"policy.precision=float32"}), "results in f32, not bf16");
  says(found("b200", {"data.reset_attention_mask=true"}), "sequences of different lengths");
}
