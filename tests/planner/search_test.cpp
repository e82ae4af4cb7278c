// The search for layouts: what it tries, and what the estimate of a step consists of.

#include "apps/planner/search.h"

#include <set>

#include "apps/planner/progress.h"
#include "apps/state/model_source.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::planner;
using namespace nrl::test;

namespace {

// Large enough that its GEMMs fill a GPU.
constexpr const char* model_yaml = R"(
policy:
  model: {model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 8,
          num_attention_heads: 16, num_key_value_heads: 8, max_position_embeddings: 8192}
  train_global_batch_size: 32
  max_total_sequence_length: 2048
  optimizer: {lr: 1.0e-4}
pretrain: {max_num_steps: 4}
data: {train: {data_path: none}}
device: cuda
)";

const machine::DeviceModel& h100() {
  return machine::find_device_model("--device", "h100");
}

struct Estimated {
  predict::StepEstimate estimate = {};
  int64_t memory = 0;
};

Estimated estimated(int world, std::vector<std::string> overrides, const std::vector<ClusterNode>& nodes = {},
                    double expert_load = 1) {
  overrides.emplace_back("policy.recompute.granularity=none");
  const ConfigResult config = load_config_text(model_yaml, "model.yaml", overrides);
  INFO(render(config.diagnostics));
  REQUIRE(config.ok());
  REQUIRE(validate_for_world(config, world).empty());
  const predict::ModeledDevice device(h100(), false, 1);
  plan::StagePlans plans =
      predict::plan_stages(config.config, train::load_model_spec(config), world, device, 70e9);
  Estimated out{.memory = plans.memory()};
  out.estimate = predict::estimate_step(config.config, std::move(plans), device, nodes, expert_load);
  const predict::StepEstimate& e = out.estimate;
  CHECK(e.step == Approx(e.computing() + e.layers + e.pipeline + e.data + e.spread));
  return out;
}

Result searched(int world, double capacity, const std::vector<std::string>& overrides = {},
                size_t best = SIZE_MAX) {
  const TemporaryDirectory directory;
  const std::string file = directory / "model.yaml";
  write_file_atomic(file, model_yaml);
  const predict::ModeledDevice device(h100(), false, 1);
  return search_layouts(
      {.config = file, .overrides = overrides, .world = world, .capacity = capacity, .best = best}, device);
}

}  // namespace

TEST_CASE("Data-parallel ranks share the computation and reduce gradients", "[search]") {
  const std::string micro = "policy.train_micro_batch_size=4";
  const Estimated one = estimated(1, {micro}),
                  four = estimated(4, {micro, "distributed.shard_strategy=optim"});
  CHECK(one.estimate.data == 0);
  CHECK(four.estimate.compute == Approx(one.estimate.compute / 4).epsilon(0.05));
  CHECK(four.estimate.data > 0);
  CHECK(four.memory < one.memory);  // a quarter of the optimizer state

  SECTION("over a network for longer") {
    const std::vector<ClusterNode> nodes{{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}}, pairs{{"a", 2}, {"b", 2}};
    const Estimated paired = estimated(4, {micro, "distributed.shard_strategy=optim"}, pairs);
    const Estimated apart = estimated(4, {micro, "distributed.shard_strategy=optim"}, nodes);
    CHECK(apart.estimate.data > 4 * four.estimate.data);
    CHECK(paired.estimate.data < 0.6 * apart.estimate.data);  // two adapters
    CHECK(apart.estimate.compute == four.estimate.compute);
  }
  SECTION("and hide what they can") {
    const Estimated exposed =
        estimated(4, {micro, "distributed.shard_strategy=optim", "distributed.overlap_grad_reduce=false"});
    CHECK(exposed.estimate.data > four.estimate.data);
  }
}

TEST_CASE("Layers stay within a GPU's node where nothing describes the nodes", "[search]") {
  const Result result = searched(512, 70e9, {"policy.train_global_batch_size=2048"}, 8);
  REQUIRE_FALSE(result.found.empty());
  for (const Found& f : result.found) CHECK(f.layout.tp <= h100().node_ranks);
  // The capacity is far too small: all layouts are priced for the one that needs least.
  CHECK(searched(512, 1e7, {"policy.train_global_batch_size=2048"}, 1).found.empty());
}

TEST_CASE("A search finds the same with any number of threads", "[search]") {
  const TemporaryDirectory directory;
  const std::string file = directory / "model.yaml";
  write_file_atomic(file, model_yaml);
  const predict::ModeledDevice device(h100(), false, 1);
  const auto with = [&](int threads) {
    return search_layouts(
        {.config = file, .overrides = {}, .world = 8, .capacity = 12e9, .best = 6, .threads = threads},
        device);
  };
  const Result one = with(1);
  REQUIRE(one.found.size() > 6);
  for (const int threads : {2, 5}) {
    const Result several = with(threads);
    REQUIRE(several.found.size() == one.found.size());
    for (size_t i = 0; i < one.found.size(); ++i) {
      CHECK(several.found[i].keys == one.found[i].keys);
      CHECK(several.found[i].memory == one.found[i].memory);
      CHECK(several.found[i].value == one.found[i].value);
    }
    CHECK(several.tried == one.tried);
    CHECK(several.planned == one.planned);
    CHECK(several.dry_runs == one.dry_runs);
  }
}

TEST_CASE("A search prices layouts of a model whose layers are named", "[search]") {
  const TemporaryDirectory directory;
  const std::string file = directory / "model.yaml";
  write_file_atomic(file, model_yaml);
  const predict::ModeledDevice device(h100(), false, 1);
  using Keys = std::vector<std::string>;
  for (const Keys& keys : {Keys{"policy.checkpoint_layers=[5]"},
                           Keys{"policy.offload_layers=[4, 5]", "policy.offload_activations=true"}}) {
    INFO(keys.front());
    const Result result =
        search_layouts({.config = file, .overrides = keys, .world = 8, .capacity = 20e9, .best = 6}, device);
    CHECK(result.found.size() >= 6);
    CHECK(result.dry_runs > 0);
    CHECK(result.planned < static_cast<int>(result.tried) / 4);
  }
}

TEST_CASE("A rank whose experts get more rows computes and receives them in rounds", "[search]") {
  const auto with_load = [](double load, const std::string& slack) {
    return estimated(8,
                     {"policy.model.model_type=qwen3_moe", "policy.model.num_experts=64",
                      "policy.model.num_experts_per_tok=8", "policy.model.moe_intermediate_size=768",
                      "policy.model.moe_row_slack=" + slack, "distributed.expert_parallel_size=8"},
                     {}, load);
  };
  const Estimated balanced = with_load(1, "1.25"), twice = with_load(2, "1.25"), whole = with_load(2, "0");
  CHECK(with_load(1, "0").memory > 2 * balanced.memory);
  CHECK(twice.memory == balanced.memory);
  CHECK(twice.estimate.layers > 1.5 * balanced.estimate.layers);
  CHECK(twice.estimate.compute > 1.2 * balanced.estimate.compute);
  // The second round is computed again in the backward pass.
  CHECK(twice.estimate.compute > 1.02 * whole.estimate.compute);
}

TEST_CASE("Tensor-parallel ranks communicate in every layer", "[search]") {
  const std::string micro = "policy.train_micro_batch_size=4";
  const Estimated one = estimated(1, {micro}),
                  two = estimated(2, {micro, "distributed.tensor_parallel_size=2"});
  CHECK(one.estimate.layers == 0);
  CHECK(two.estimate.layers > 0);
  CHECK(two.estimate.compute < 0.65 * one.estimate.compute);
  const std::vector<ClusterNode> nodes{{"a", 1}, {"b", 1}};
  CHECK(estimated(2, {micro, "distributed.tensor_parallel_size=2"}, nodes).estimate.layers >
        4 * two.estimate.layers);
}

TEST_CASE("Pipeline stages wait for each other as their schedule says", "[search]") {
  const auto stages = [](const char* schedule, int micro, const char* chunks) {
    return estimated(4, {"distributed.pipeline_parallel_size=4",
                         fmt::format("distributed.pipeline_schedule={}", schedule),
                         fmt::format("distributed.virtual_pipeline_size={}", chunks),
                         fmt::format("policy.train_micro_batch_size={}", micro)})
        .estimate;
  };
  const predict::StepEstimate few = stages("1f1b", 4, "null"), many = stages("1f1b", 1, "null");
  // 8 microbatches: 3 of 11 parts of a step for equal stages; less for the last one, which has the head too.
  CHECK(few.pipeline / few.step > 0.15);
  CHECK(few.pipeline / few.step < 3.0 / 11);
  CHECK(many.pipeline / many.step < 0.6 * few.pipeline / few.step);
  CHECK(stages("zb_h1", 4, "null").pipeline < few.pipeline);
  CHECK(stages("interleaved", 4, "2").pipeline < few.pipeline);
}

TEST_CASE("The search returns valid layouts, fastest first", "[search]") {
  const Result result = searched(4, 70e9);
  REQUIRE(result.found.size() > 10);
  CHECK(result.too_large == 0);
  CHECK(result.planned >= static_cast<int>(result.found.size()));
  std::set<std::string> names;
  for (size_t i = 0; i < result.found.size(); ++i) {
    const Found& f = result.found[i];
    INFO(f.layout.name(4));
    CHECK(names.insert(f.layout.name(4)).second);
    CHECK(f.memory > 0);
    CHECK(f.tokens == 32 * 2048);
    CHECK(f.layout.recompute == "none");  // everything fits
    if (i > 0) CHECK(f.estimate.step >= result.found[i - 1].estimate.step);
    // The keys to copy stand for all overrides.
    const ConfigResult config = load_config_text(model_yaml, "model.yaml", f.keys);
    REQUIRE(config.ok());
    CHECK(validate_for_world(config, 4).empty());
  }
  CHECK(names.contains("dp 4  optim  micro 8  gathers overlapped"));
  CHECK(names.contains("tp 2 x pp 2  zb_h1  ddp  micro 1"));
  CHECK(names.contains("dp 2 x pp 2  2 chunks  optim  micro 4  gathers overlapped"));
  const std::string text = table(result, predict::ModeledDevice(h100(), false, 1), 4, 1e9, 3);
  CHECK(text.find(result.found[0].layout.name(4)) != std::string::npos);
  CHECK(text.find(result.found[3].layout.name(4) + " ") == std::string::npos);
}

TEST_CASE("The search reports how far it is", "[search]") {
  const TemporaryDirectory directory;
  const std::string file = directory / "model.yaml";
  write_file_atomic(file, model_yaml);
  std::vector<size_t> done;
  size_t of = 0;
  const Result result = search_layouts({.config = file,
                                        .overrides = {},
                                        .world = 2,
                                        .capacity = 70e9,
                                        .progress =
                                            [&](size_t d, size_t total) {
                                              done.push_back(d);
                                              of = total;
                                            }},
                                       predict::ModeledDevice(h100(), false, 1));
  CHECK(of == done.size());
  CHECK(of >= result.found.size());
  for (size_t i = 0; i < done.size(); ++i) CHECK(done[i] == i);

  // Nothing in the first second, then a line every five seconds, or a line that is redrawn.
  std::string out;
  const auto write = [&](std::string_view text) { out += text; };
  SearchProgress plain(0, write), terminal(24, write);
  for (const double seconds : {0.1, 0.9, 1.125, 3.0, 6.0, 6.25})
    plain(static_cast<size_t>(seconds * 10), 80, seconds);
  plain.finish();
  CHECK(out == "searching: 11 of 80 layouts, 1s so far\nsearching: 62 of 80 layouts, 6s so far\n");
  out.clear();
  terminal(2, 80, 0.5);
  terminal.finish();
  CHECK(out.empty());
  terminal(9, 80, 1.5);
  terminal(10, 80, 1.6);
  terminal.finish();
  CHECK(out == "\r\033[Ksearching: 9 of 80 layo\r\033[K");
}

TEST_CASE("The search recomputes and shards only what does not fit otherwise", "[search]") {
  const Result roomy = searched(4, 70e9);
  int64_t least = INT64_MAX, most = 0;
  for (const Found& f : roomy.found) {
    least = std::min(least, f.memory);
    most = std::max(most, f.memory);
  }
  const Result tight = searched(4, static_cast<double>(least + most) / 2);
  CHECK(tight.too_large > 0);
  bool recomputed = false;
  for (const Found& f : tight.found) {
    CHECK(f.memory <= (least + most) / 2);
    recomputed = recomputed || f.layout.recompute == "auto";
  }
  CHECK(recomputed);

  // Four copies of the model need most: their optimizer state is already divided.
  const auto copies = std::find_if(roomy.found.begin(), roomy.found.end(), [](const Found& f) {
    return f.layout.name(4) == "dp 4  optim  micro 1  gathers overlapped";
  });
  REQUIRE(copies != roomy.found.end());
  const Result small = searched(4, 0.75 * static_cast<double>(copies->memory));
  bool sharded = false;
  for (const Found& f : small.found) sharded = sharded || f.layout.strategy == "optim_grads_params";
  CHECK(sharded);

  const Result none = searched(4, 1e6);
  CHECK(none.found.empty());
  CHECK(none.tried == none.too_large);
  CHECK(none.least_memory > 1'000'000);
  CHECK(none.least_memory < least);
}

TEST_CASE("The search keeps what is configured", "[search]") {
  for (const Found& f : searched(2, 70e9, {"policy.recompute.granularity=selective"}).found) {
    CHECK(f.layout.recompute.empty());
    for (const std::string& key : f.keys) CHECK(key.find("recompute") == std::string::npos);
  }
  // A layout that is configured does not stay: other grids need other keys.
  const Result result =
      searched(2, 70e9, {"distributed.pipeline_parallel_size=2", "distributed.pipeline_layout=[5,3]"});
  CHECK(result.found.size() == searched(2, 70e9).found.size());
}

TEST_CASE("The keys of a layout, added to any configuration, give it", "[search]") {
  const std::string few = "policy.model.num_hidden_layers=4";
  for (std::vector<std::string> given : std::vector<std::vector<std::string>>{
           {"distributed.context_parallel_size=2"},
           {"distributed.pipeline_parallel_size=2", "distributed.pipeline_schedule=zb_h1"},
           {"distributed.pipeline_parallel_size=2", "distributed.virtual_pipeline_size=2"},
           {"distributed.pipeline_parallel_size=2", "distributed.pipeline_layout=[1,3]"},
           {"distributed.pipeline_parallel_size=2", "distributed.num_layers_in_first_pipeline_stage=1"},
           {"distributed.shard_strategy=hsdp", "distributed.dp_replicate_size=2"},
           {"distributed.data_parallel_size=4", "policy.gradient_accumulation_steps=2"}}) {
    given.push_back(few);
    for (const Found& f : searched(4, 70e9, given, 8).found) {
      std::vector<std::string> all = given, whole = given;
      all.insert(all.end(), f.keys.begin(), f.keys.end());
      for (std::string& key : f.layout.overrides()) whole.push_back(std::move(key));
      INFO(fmt::format("{}", fmt::join(all, " ")));
      const ConfigResult used = load_config_text(model_yaml, "model.yaml", all),
                         wanted = load_config_text(model_yaml, "model.yaml", whole);
      REQUIRE(used.ok());
      CHECK(validate_for_world(used, 4).empty());
      const Config applied = f.layout.applied(load_config_text(model_yaml, "model.yaml", given).config);
      CHECK(applied.distributed == wanted.config.distributed);
      CHECK(applied.policy.train_micro_batch_size == wanted.config.policy.train_micro_batch_size);
      for (const std::string& setting : f.layout.overrides()) {
        const std::string key = setting.substr(0, setting.find('='));
        CHECK(value_text(used.config, key) == value_text(wanted.config, key));
      }
    }
  }
}

TEST_CASE("Layouts are ranked by time, price or energy", "[search]") {
  const TemporaryDirectory directory;
  const std::string file = directory / "model.yaml";
  write_file_atomic(file, model_yaml);
  const predict::ModeledDevice device(h100(), false, 1);
  const auto ranked = [&](Objective objective, const std::vector<std::string>& overrides) {
    return search_layouts({.config = file,
                           .overrides = overrides,
                           .world = 4,
                           .capacity = 70e9,
                           .best = 8,
                           .objective = objective},
                          device)
        .found;
  };
  const std::vector<Found> time = ranked(Objective::time, {});
  REQUIRE(!time.empty());
  CHECK(time.front().value == time.front().estimate.step);
  // Ranks have a price per hour, so that the fastest layout is the cheapest.
  const std::vector<Found> cost = ranked(Objective::cost, {"cluster.cost.rank_hour=2"});
  CHECK(cost.front().layout == time.front().layout);
  CHECK(cost.front().value == Approx(2 * 4 * time.front().estimate.step / 3600));
  // Energy: at most the power limit and the node's, at least idle GPUs.
  const std::vector<Found> energy = ranked(Objective::energy, {});
  for (size_t i = 0; i < energy.size(); ++i) {
    if (i > 0) CHECK(energy[i].value >= energy[i - 1].value);
    const double watts = energy[i].value * 3.6e6 / energy[i].estimate.step / 1.2;
    CHECK(watts > 4 * h100().idle_power + 2000);
    CHECK(watts <= 4 * h100().power_limit + 2001);
  }
  // Failures and checkpoints make no difference.
  CHECK(ranked(Objective::energy, {"cluster.reliability.failures_per_rank_hour=0.01"}).front().value ==
        Approx(energy.front().value));

  const auto problem = [&](Objective objective, const std::vector<std::string>& overrides,
                           const machine::DeviceModel& of) {
    return objective_problem(objective, load_config_text(model_yaml, "model.yaml", overrides).config, of);
  };
  machine::DeviceModel cpu;
  CHECK(problem(Objective::time, {}, cpu).empty());
  CHECK(problem(Objective::cost, {}, h100()).find("cluster.cost.rank_hour") != std::string::npos);
  CHECK(problem(Objective::cost, {"cluster.cost.kwh=0.2"}, h100()).empty());
  CHECK(problem(Objective::cost, {"cluster.cost.kwh=0.2"}, cpu).find("node_watts") != std::string::npos);
  CHECK(problem(Objective::energy, {}, cpu).find("node_watts") != std::string::npos);
  CHECK(problem(Objective::energy, {"cluster.cost.node_watts=400"}, cpu).empty());
}
