// The facts of `nrl-train plan`: its JSON, the same plan with other keys, and measured rates.

#include "apps/planner/planned_run.h"

#include <set>

#include "apps/planner/report.h"
#include "apps/planner/what_if.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::planner;
using namespace nrl::test;

namespace {

constexpr const char* model_yaml = R"(
policy:
  model: {model_type: llama, vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 4,
          num_attention_heads: 16, num_key_value_heads: 8, max_position_embeddings: 4096}
  train_global_batch_size: 16
  train_micro_batch_size: 2
  max_total_sequence_length: 2048
  optimizer: {lr: 1.0e-4}
pretrain: {max_num_steps: 4}
data: {train: {data_path: none}}
)";

class Files : public TemporaryDirectory {
 public:
  Files() { write_file_atomic(*this / "run.yaml", model_yaml); }
  PlanRequest request(const std::string& device = "h100") const {
    return {.config = *this / "run.yaml", .world = 8, .device = device};
  }
  std::string profile(const std::string& text) const {
    write_file_atomic(*this / "profile.json", text);
    return *this / "profile.json";
  }
};

JsonValue planned(const PlanRequest& request) {
  PlannedRun run = prepare(request);
  INFO(render(run.result.diagnostics));
  REQUIRE(run.complete);
  return json_of(run, plan_all(run.result, run.world, run.batch, run.device, run.gpu), estimate_run(run));
}

double step_of(const PlanRequest& request) {
  return planned(request).at("estimate").get_double("step_s");
}

}  // namespace

TEST_CASE("a row of other keys is the plan of these keys", "[planned_run]") {
  const Files files;
  const Variant other =
      variant_of(files.request(), "distributed.tensor_parallel_size=2 policy.train_micro_batch_size=4");
  PlanRequest same = files.request();
  same.overrides = {"distributed.tensor_parallel_size=2", "policy.train_micro_batch_size=4"};
  CHECK(other.json.dump() == planned(same).dump());
  CHECK(other.json.dump() != planned(files.request()).dump());
  CHECK(variant_of(files.request(), "device=h200").json.dump() == planned(files.request("h200")).dump());
  CHECK(variant_of(files.request(), "distributed.tensor_parallel_size=3").refused != "");
  CHECK_THROWS_WITH(variant_of(files.request(), "tensor"), ContainsSubstring("not KEY=VALUE"));
}

TEST_CASE("a plan with the kernels of another trainer differs in its times only", "[planned_run]") {
  const Files files;
  PlanRequest request = files.request();
  const JsonValue ours = planned(request);
  request.trainer = "pytorch";
  const JsonValue theirs = planned(request);
  CHECK(theirs.at("estimate").get_double("step_s") > 1.1 * ours.at("estimate").get_double("step_s"));
  CHECK(theirs.at("estimate").get_string("trainer") == "pytorch");
  CHECK(theirs.at("memory_bytes").dump() == ours.at("memory_bytes").dump());
  CHECK(variant_of(files.request(), "trainer=pytorch").json.dump() == theirs.dump());
  // The facts of a profile count for them as well.
  for (const char* fact : {R"("power_limit": 500)", R"("attention_forward_64": 0.1)"}) {
    INFO(fact);
    request.profile = files.profile(fmt::format(R"({{"device": {{"base": "h100", {}}}}})", fact));
    CHECK(step_of(request) > 1.01 * theirs.at("estimate").get_double("step_s"));
  }
  request.profile.clear();
  request.device = "cpu";
  CHECK_THROWS_WITH(prepare(request), ContainsSubstring("kernels of a GPU"));
  request.device = "h100";
  request.profile = files.profile(
      R"({"device": {"base": "h100"}, "calls": [{"op": "rope", "bytes": 8, "work": "memory", "seconds": 1e-6}]})");
  CHECK_THROWS_WITH(prepare(request), ContainsSubstring("times of our own calls"));
  request.trainer = "tinygrad";
  request.profile.clear();
  CHECK_THROWS_WITH(prepare(request), ContainsSubstring("unknown trainer 'tinygrad'"));
}

TEST_CASE("the parts of an estimate add up, and its members have the documented names", "[planned_run]") {
  const Files files;
  const JsonValue plan = planned(files.request()), &estimate = plan.at("estimate");
  double sum = 0;
  for (const char* part : {"compute", "layers", "pipeline", "data", "update", "host", "spread"})
    sum += estimate.at("parts_s").get_double(part);
  CHECK(sum == Approx(estimate.get_double("step_s")));
  CHECK(estimate.get_double("good_s") < estimate.get_double("step_s"));
  CHECK(estimate.get_double("poor_s") > estimate.get_double("step_s"));
  for (const char* busy : {"processors", "node", "adapter"})
    CHECK(estimate.at("busy_s").get_double(busy) <= estimate.get_double("step_s"));
  for (const char* member :
       {"schema", "world", "device", "model", "grid", "batch", "memory_bytes", "traffic"})
    CHECK(plan.contains(member));
}

TEST_CASE("a profile changes the estimate of its device", "[planned_run]") {
  const Files files;
  PlanRequest request = files.request("auto");
  request.profile = files.profile(R"({"device": {"base": "h100"}})");
  CHECK(step_of(request) == Approx(step_of(files.request())));
  request.profile = files.profile(R"({"device": {"base": "h100", "copy": 1.5e12}})");
  CHECK(step_of(request) > 1.05 * step_of(files.request()));
  request.device = "h200";
  CHECK_THROWS_WITH(prepare(request), ContainsSubstring("is of h100, but the plan is for h200"));
}

TEST_CASE("ranks that hold equal parts are planned once, and need what their own plans need",
          "[planned_run]") {
  const Files files;
  const int stages = GENERATE(1, 2, 4);
  const std::string strategy = GENERATE("ddp", "optim", "optim_grads", "optim_grads_params");
  if (stages > 1 && strategy == "optim_grads_params") return;
  CAPTURE(stages, strategy);
  PlanRequest request = files.request();
  request.world = 16;
  request.overrides = {"distributed.tensor_parallel_size=2",
                       "distributed.pipeline_parallel_size=" + std::to_string(stages),
                       "distributed.shard_strategy=" + strategy, "policy.model.vocab_size=32003",
                       "policy.train_micro_batch_size=1"};
  PlannedRun run = prepare(request);
  INFO(render(run.result.diagnostics));
  REQUIRE(run.complete);
  const RankPlans plans = plan_all(run.result, run.world, run.batch, run.device, run.gpu);
  // The embedding and the head have an odd number of rows.
  CHECK(plans.parts.size() <= static_cast<size_t>(2 * stages));
  std::set<int> all;
  int64_t last = -1;
  for (const auto& [less, ranks] : plans.by_need()) {
    CHECK(less > last);
    last = less;
    for (const int rank : ranks) {
      all.insert(rank);
      const auto own = plan::make_run_plan(
          run.result.config, *run.spec, run.batch, plan::grid_position(run.result.config, run.world, rank),
          run.device.type, plans.parts.front().threads, {}, run.device.memory);
      // Chunk tables of the update differ by a line of 256 bytes.
      const int64_t need = plans.largest().memory.total_bytes() - less;
      CHECK(own->memory.total_bytes() <= need);
      CHECK(own->memory.total_bytes() >= need - 256);
    }
  }
  CHECK(all.size() == static_cast<size_t>(run.world));
}
