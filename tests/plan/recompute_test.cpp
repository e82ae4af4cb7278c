// What policy.recompute: auto chooses.
#include "apps/model/hf_config.h"
#include "apps/plan/run_plan.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::plan;

namespace {

const std::string llama =
    R"({"model_type":"llama","vocab_size":512,"hidden_size":64,"intermediate_size":256,
    "num_hidden_layers":8,"num_attention_heads":2,"max_position_embeddings":2048})";

std::unique_ptr<RunPlan> plan_for(DeviceType device, size_t gpu_memory,
                                  const std::vector<std::string>& overrides = {}) {
  const ConfigResult result = load_config_text(
      "policy: {model: {model_type: llama}, train_global_batch_size: 8}\n"
      "pretrain: {max_num_steps: 10}\n"
      "data: {train: {data_path: corpus}}\n",
      "t.yaml", overrides);
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  const Config& c = result.config;
  return make_run_plan(c, model::parse_model_config(llama, "test"), resolve_batch(c, 1),
                       grid_position(c, 1, 0), device, 2, false, gpu_memory);
}

const std::vector<std::string> selective{"norm", "activation"};
constexpr DeviceType host = DeviceType::cpu, gpu = DeviceType::cuda;

}  // namespace

TEST_CASE("on a GPU auto recomputes only if keeping everything takes more than 85 % of its memory",
          "[plan][recompute]") {
  const auto none = plan_for(gpu, 0, {"policy.recompute.granularity=none"});
  const auto some = plan_for(gpu, 0, {"policy.recompute.granularity=selective"});
  CHECK(recompute_text(*none).empty());
  CHECK(recompute_text(*some) == "norm, activation");
  const auto keeping = static_cast<size_t>(none->memory.total_bytes()),
             recomputing = static_cast<size_t>(some->memory.total_bytes());
  REQUIRE(recomputing < keeping);

  // The smallest memory of which `keeping` is at most 85 %, and a byte less.
  const size_t enough = (keeping * 100 + 84) / 85;
  const auto fits = plan_for(gpu, enough), fits_not = plan_for(gpu, enough - 1);
  CHECK(fits->recompute_modules.empty());
  CHECK(static_cast<size_t>(fits->memory.total_bytes()) == keeping);
  CHECK(fits_not->recompute_modules == selective);
  CHECK(static_cast<size_t>(fits_not->memory.total_bytes()) == recomputing);
  CHECK(recompute_text(*fits).starts_with("nothing: within 85 % of the GPU's "));
  CHECK(recompute_text(*fits_not).starts_with("norm, activation: keeping everything takes "));
  CHECK(recompute_text(*fits_not).find(", more than 85 % of the GPU's ") != std::string::npos);

  // Without a GPU the smaller plan, with the memory from which on a run keeps everything.
  const auto unknown = plan_for(gpu, 0);
  CHECK(unknown->recompute_modules == selective);
  CHECK(recompute_text(*unknown).find(", which a run does on a GPU of at least ") != std::string::npos);
  const auto shared = plan_for(gpu, 0, {"kernels.share_device=true"});
  CHECK(shared->recompute_modules == selective);
  CHECK(recompute_text(*shared).ends_with(", and ranks may share the GPU"));
}

TEST_CASE("auto recomputes on a CPU, and nothing is chosen where the configuration says it",
          "[plan][recompute]") {
  constexpr size_t plenty = size_t{1} << 50;
  CHECK(recompute_text(*plan_for(host, 0)) == "norm, activation");
  CHECK(recompute_text(*plan_for(gpu, plenty, {"policy.recompute.granularity=selective"})) ==
        "norm, activation");
  CHECK(recompute_text(*plan_for(gpu, plenty, {"policy.recompute.modules=[norm]"})) == "norm");
  CHECK(recompute_text(*plan_for(gpu, 1, {"policy.recompute.granularity=none"})).empty());
}
