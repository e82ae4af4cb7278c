#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {
std::string complaints(std::vector<std::string> overrides, int world,
                       const std::vector<ClusterNode>& nodes = {}, RankCount count = RankCount::started) {
  const ConfigResult result = load_base(std::move(overrides));
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return render(validate_for_world(result, world, nodes, count));
}
}  // namespace

TEST_CASE("the batch is checked against the ranks", "[config]") {
  CHECK(complaints({}, 1).empty());
  CHECK(complaints({}, 32).empty());
  const std::string three = complaints({}, 3);
  CHECK(contains(three, "train_global_batch_size 32 is not a multiple of data parallel 3 = 3"));
  CHECK(contains(three, "fits: train_global_batch_size 30 or 33"));
  const std::string micro = complaints({"policy.train_micro_batch_size=8"}, 8);
  CHECK(contains(micro, "is not a multiple of micro 8 x data parallel 8 = 64"));
  CHECK(contains(micro, "or train_micro_batch_size 1, 2, 4"));
  CHECK(contains(complaints({"policy.train_micro_batch_size=4", "policy.gradient_accumulation_steps=8"}, 2),
                 "is not micro 4 x data parallel 2 x accumulation 8 = 64"));
  // The place is that of the key, in the file or on the command line.
  CHECK(contains(complaints({"policy.train_global_batch_size=10"}, 4),
                 "--> command line: policy.train_global_batch_size=10"));
}

TEST_CASE("tensor-parallel ranks must divide the tokens of a microbatch", "[config]") {
  const std::vector<std::string> odd{"distributed.tensor_parallel_size=4",
                                     "policy.max_total_sequence_length=1022",
                                     "policy.train_micro_batch_size=1"};
  const auto with = [&](const std::string& more) {
    std::vector<std::string> all = odd;
    all.push_back(more);
    return complaints(all, 4);
  };
  const std::string refused = complaints(odd, 4);
  CHECK(contains(refused, "a microbatch has 1 x 1022 = 1022 tokens, which 4 tensor-parallel ranks"));
  CHECK(contains(refused, "fits: max_total_sequence_length 1020 or 1024"));
  CHECK(contains(refused, "or train_micro_batch_size a multiple of 2"));
  CHECK(with("policy.train_micro_batch_size=2").empty());
  CHECK(with("distributed.sequence_parallel=false").empty());
  CHECK(contains(complaints(odd, 6), "6 ranks do not fit the grid"));
}

TEST_CASE("the cluster section is checked against the job", "[config]") {
  CHECK(
      contains(complaints({"cluster.world_size=4"}, 2), "cluster.world_size is 4, but 2 ranks were started"));
  CHECK(
      contains(complaints({"cluster.world_size=2"}, 4), "cluster.world_size is 2, but 4 ranks were started"));
  CHECK(complaints({"cluster.world_size=4"}, 4).empty());
  // Ranks of a run are started, those of a plan are not.
  const auto planned = [](const std::string& key, int world) {
    return complaints({key}, world, {}, RankCount::planned);
  };
  CHECK(contains(complaints({"cluster.world_size=24"}, 8), "start it with mpirun -n 24"));
  CHECK(
      contains(planned("cluster.world_size=24", 8), "cluster.world_size is 24, but the plan is for 8 ranks"));
  CHECK(contains(planned("cluster.world_size=24", 8), "plan with --world 24"));
  CHECK(contains(complaints({"distributed.tensor_parallel_size=8"}, 6), "start it with mpirun -n 8\n"));
  CHECK(contains(planned("distributed.tensor_parallel_size=4", 6), "plan with --world 4 or 8"));
  CHECK(
      contains(planned("distributed.data_parallel_size=16", 8), "remove it (auto), or plan with --world 16"));
  CHECK(contains(complaints({"cluster.num_nodes=2"}, 2, {{"a", 2}}),
                 "cluster.num_nodes is 2, but the ranks run on 1"));
  CHECK(complaints({"cluster.num_nodes=2"}, 2).empty());
  CHECK(
      contains(complaints({"distributed.data_parallel_size=4"}, 2), "data_parallel_size is 4, but 2 ranks"));
  CHECK(
      contains(complaints({"distributed.data_parallel_size=2"}, 4), "data_parallel_size is 2, but 4 ranks"));
  CHECK(complaints({"distributed.data_parallel_size=4"}, 4).empty());
}

TEST_CASE("the copies of the shards divide the data-parallel ranks", "[config]") {
  const auto copies = [](int n, int world) {
    return complaints({"distributed.shard_strategy=hsdp", fmt::format("distributed.dp_replicate_size={}", n)},
                      world);
  };
  CHECK(copies(2, 4).empty());
  CHECK(copies(4, 32).empty());
  CHECK(contains(copies(3, 4), "dp_replicate_size: 3 does not divide 4 data-parallel ranks"));
  CHECK(contains(copies(2, 2), "into slices of 2 or more"));
  CHECK(contains(copies(2, 1), "1 data-parallel rank "));
}

TEST_CASE("the nodes of the cluster section are checked against the job", "[config]") {
  const std::vector<ClusterNode> two = {{"a", 4}, {"b", 4}}, mixed = {{"a", 4}, {"b", 8}, {"c", 4}};
  CHECK(complaints({"cluster.gpus_per_node=4"}, 8, two).empty());
  CHECK(complaints({"cluster.gpus_per_node=[4,8,4]"}, 16, mixed).empty());
  CHECK(contains(complaints({"cluster.gpus_per_node=8"}, 8, two),
                 "cluster.gpus_per_node is 8 for node 0 (a), which has 4 ranks"));
  CHECK(
      contains(complaints({"cluster.gpus_per_node=4"}, 16, mixed), "is 4 for node 1 (b), which has 8 ranks"));
  CHECK(contains(complaints({"cluster.gpus_per_node=[4,4,8]"}, 16, mixed), "is 4 for node 1 (b)"));
  CHECK(contains(complaints({"cluster.gpus_per_node=[8,8]"}, 16, mixed),
                 "lists 2 nodes, but the ranks run on 3"));
  CHECK(contains(complaints({"cluster.segment_size=2"}, 16, mixed),
                 "cluster.segment_size is 2, but 3 nodes are not a multiple"));
  CHECK(complaints({"cluster.segment_size=2"}, 8, two).empty());
  // For a plan, whose nodes nobody has seen, the section must agree with itself.
  CHECK(complaints({"cluster.gpus_per_node=4"}, 8).empty());
  CHECK(complaints({"cluster.gpus_per_node=[4,8,4]"}, 16).empty());
  CHECK(contains(complaints({"cluster.gpus_per_node=8"}, 4), "0 nodes of 8 ranks do not make 4 ranks"));
  CHECK(contains(complaints({"cluster.gpus_per_node=4", "cluster.num_nodes=3"}, 8),
                 "3 nodes of 4 ranks do not make 8 ranks"));
  CHECK(contains(complaints({"cluster.gpus_per_node=[4,2]"}, 8), "nodes of 4, 2 ranks do not make 8 ranks"));
}

TEST_CASE("the batch is resolved", "[config]") {
  auto plan = [](std::vector<std::string> overrides, int world) {
    const ConfigResult result = load_base(std::move(overrides));
    REQUIRE(validate_for_world(result, world).empty());
    return resolve_batch(result.config, world);
  };
  const BatchPlan fixed = plan({"policy.train_micro_batch_size=2"}, 4);
  CHECK(fixed.data_parallel == 4);
  CHECK(fixed.micro == 2);
  CHECK(fixed.accumulation == 4);
  CHECK(fixed.tokens_per_step == 32 * 1024);
  CHECK(plan({}, 1).micro == 8);  // 8192 tokens of 1024
  CHECK(plan({"policy.train_global_batch_size=21"}, 1).micro == 7);
  CHECK(plan({"policy.max_total_sequence_length=100000"}, 1).micro == 1);
  CHECK(plan({"policy.gradient_accumulation_steps=2"}, 4).micro == 4);
  CHECK(plan({"distributed.pipeline_parallel_size=2"}, 2).accumulation == 8);  // four per stage
  CHECK(plan({"distributed.pipeline_parallel_size=4", "policy.train_global_batch_size=4"}, 4).micro == 1);
}

TEST_CASE("auto takes microbatches of whole blocks of FP8 scales and of all ranks of a sequence",
          "[config]") {
  const auto plan = [](const std::string& recipe, int64_t length, int64_t global,
                       std::vector<std::string> more = {}, int world = 1) {
    more.insert(more.end(), {"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=" + recipe,
                             fmt::format("policy.max_total_sequence_length={}", length),
                             fmt::format("policy.train_global_batch_size={}", global)});
    const ConfigResult result = load_base(std::move(more));
    INFO(render(result.diagnostics));
    REQUIRE(validate_for_world(result, world).empty());
    return resolve_batch(result.config, world);
  };
  CHECK(plan("tensorwise", 8, 12).unit == 2);
  CHECK(plan("tensorwise", 8, 12).micro == 12);
  CHECK(plan("delayed", 4, 12).unit == 4);
  CHECK(plan("mxfp8", 32, 24).unit == 4);
  CHECK(plan("blockwise", 32, 24).unit == 4);
  CHECK(plan("blockwise", 1024, 24).unit == 1);
  CHECK(plan("mxfp8", 1088, 60).unit == 2);
  CHECK(plan("mxfp8", 1088, 60).micro == 6);   // 7 sequences have 8192 tokens at most
  CHECK(plan("mxfp8", 8200, 48).micro == 16);  // more than the usual tokens, because less has no whole blocks
  CHECK(plan("mxfp8", 32, 6).micro == 6);      // no multiple divides the batch: refused with the model
  // A share of a sequence is a multiple of less.
  CHECK(plan("mxfp8", 128, 12, {"distributed.context_parallel_size=2"}, 2).unit == 2);
  const std::vector<std::string> tensor{"distributed.tensor_parallel_size=4"};
  CHECK(plan("tensorwise", 1022, 24, tensor, 4).unit == 8);
  CHECK(plan("tensorwise", 1022, 24, tensor, 4).micro == 8);
}
