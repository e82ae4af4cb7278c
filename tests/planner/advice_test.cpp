// The overrides that a finding is given, and what they are said to gain.

#include "apps/planner/advice.h"

#include <algorithm>
#include <string>

#include "apps/profile/analyze.h"
#include "tests/catch.h"

using namespace nrl;
using profile::Finding;
using profile::Profile;
using profile::Split;

namespace {

// A step on H100s that computes but for `seconds` of a part.
Profile measured(const std::string& policy, const std::string& distributed, double Split::*part,
                 double seconds, int64_t micro = 2) {
  profile::RankProfile r;
  r.device = "NVIDIA H100 80GB HBM3";
  r.host = "node0";
  r.split.wall = 1;
  r.split.compute = 1 - seconds;
  r.split.*part = seconds;
  if (part == &Split::wire) {
    profile::GroupTime g;
    g.group = "dp";
    g.operation = "all_reduce";
    g.ranks = 2;
    g.exposed = g.busy = g.wire = seconds;
    g.wire_bytes = 2e9;
    r.groups.push_back(g);
  }
  profile::RunFacts facts;
  facts.world = 2;
  facts.threads = 1;
  facts.config = "policy:\n  model: {model_type: llama, vocab_size: 32000" +
                 std::string(
                     ", hidden_size: 2048, intermediate_size: 5632,\n"
                     "    num_hidden_layers: 8, num_attention_heads: 16, num_key_value_heads: 8,\n"
                     "    max_position_embeddings: 8192}\n"
                     "  train_global_batch_size: 32\n  train_micro_batch_size: ") +
                 std::to_string(micro) +
                 "\n"
                 "  max_total_sequence_length: 2048\n" +
                 policy + "pretrain: {max_num_steps: 4}\ndata: {train: {data_path: none}}\ndevice: cuda\n" +
                 distributed;
  return profile::merge({r}, facts);
}

const Finding* find(const Profile& p, const std::string& type) {
  const auto at =
      std::find_if(p.findings.begin(), p.findings.end(), [&](const Finding& f) { return f.type == type; });
  return at == p.findings.end() ? nullptr : &*at;
}

}  // namespace

TEST_CASE("layers that are computed again need not be if memory is free", "[advice]") {
  Profile p = measured("  recompute: {granularity: full}\n", "", &Split::recompute, 0.2);
  REQUIRE(find(p, "recomputation"));
  CHECK(find(p, "recomputation")->overrides.empty());  // not priced yet
  planner::advise(p);
  const Finding* f = find(p, "recomputation");
  REQUIRE(f);
  CHECK(f->overrides == std::vector<std::string>{"policy.recompute.granularity=none"});
  // A forward pass of a third of the rest.
  CHECK(f->predicted_s > 0.70);
  CHECK(f->predicted_s < 0.85);
  CHECK_FALSE(f->changes_numbers);
}

TEST_CASE("what does not fit is not advised", "[advice]") {
  const auto advised = [](const std::string& memory) {
    Profile p = measured("  recompute: {granularity: full}\n", "memory: {max_memory: " + memory + "}\n",
                         &Split::recompute, 0.2, 16);
    planner::advise(p);
    REQUIRE(find(p, "recomputation"));
    return !find(p, "recomputation")->overrides.empty();
  };
  CHECK(advised("0.9"));
  CHECK_FALSE(advised("0.3"));
}

TEST_CASE("gradients that no computation hides", "[advice]") {
  Profile p = measured("  recompute: {granularity: none}\n", "distributed: {overlap_grad_reduce: false}\n",
                       &Split::wire, 0.1);
  planner::advise(p);
  const Finding* f = find(p, "exposed_gradients");
  REQUIRE(f);
  CHECK(f->overrides == std::vector<std::string>{"distributed.overlap_grad_reduce=true"});
  CHECK(f->predicted_s < 0.99);
  CHECK(f->predicted_s > 0.5);
}

TEST_CASE("less than one percent is not advised, and what the model lacks is not predicted", "[advice]") {
  // Overlapped already: what is left is the last bucket, of which bf16 would save a fraction of a percent.
  Profile p = measured("  recompute: {granularity: none}\n", "", &Split::wire, 0.05);
  planner::advise(p);
  REQUIRE(find(p, "exposed_gradients"));
  CHECK(find(p, "exposed_gradients")->overrides.empty());
  p = measured("  recompute: {granularity: none}\n", "", &Split::data, 0.05);
  planner::advise(p);
  const Finding* f = find(p, "data_loading");
  REQUIRE(f);
  CHECK(f->overrides == std::vector<std::string>{"data.num_workers=2"});
  CHECK(f->predicted_s == 0);
  // Unless it is known how long reading takes.
  p.ranks[0].read_seconds = 0.97;
  p.ranks[0].split.data = p.split.data = 0.1;
  planner::advise(p);
  f = find(p, "data_loading");
  REQUIRE(f);
  CHECK(f->overrides.front() == "data.num_workers=2");
  CHECK(f->predicted_s < 0.95);
}

TEST_CASE("no gain is larger than what the cause costs, and the largest comes first", "[advice]") {
  Profile p = measured("  recompute: {granularity: full}\n", "", &Split::recompute, 0.05);
  p.ranks[0].split.data = p.split.data = 0.03;
  planner::advise(p);
  REQUIRE(p.findings.size() >= 2);
  CHECK(p.findings[0].type == "recomputation");
  CHECK(p.findings[0].predicted_s >= 0.95);
  CHECK(p.findings[1].type == "data_loading");
}

TEST_CASE("the time of a few bytes says nothing of the bandwidth of links", "[advice]") {
  const auto predicted = [](bool scalars) {
    Profile p =
        measured("  recompute: {granularity: none}\n",
                 "distributed: {pipeline_parallel_size: 2, pipeline_layout: [6, 2]}\n", &Split::bubble, 0.01);
    p.facts.stages = 2;
    p.ranks.push_back(p.ranks[0]);
    p.ranks[1].rank = 1;
    p.ranks[1].split.imbalance = 0.6;
    profile::GroupTime g;
    g.group = "world";
    g.operation = "all_reduce";
    g.ranks = 2;
    g.calls = 1;
    g.wire = g.busy = 0.01;
    g.wire_bytes = 136;
    if (scalars) p.ranks[0].groups = {g};
    planner::advise(p);
    const Finding* f = find(p, "pipeline_imbalance");
    REQUIRE(f);
    CHECK(f->overrides.front().starts_with("distributed.pipeline_layout="));
    return f->predicted_s;
  };
  CHECK(predicted(true) == predicted(false));
}

TEST_CASE("buckets so small that their operations cost more than their bytes", "[advice]") {
  profile::RankProfile r;
  r.device = "cpu";
  r.split = {.wall = 0.04, .compute = 0.03};
  r.split.wire = 0.01;
  profile::GroupTime g;
  g.group = "dp";
  g.operation = "all_reduce";
  g.ranks = 2;
  g.calls = 75;
  g.exposed = g.busy = g.wire = 0.01;
  g.wire_bytes = 7e6;
  g.latency = 1e-4;
  r.groups = {g};
  profile::RunFacts facts;
  facts.world = 2;
  facts.threads = 1;
  facts.config =
      "policy:\n  model: {model_type: llama, vocab_size: 272, hidden_size: 64, intermediate_size: 160,\n"
      "    num_hidden_layers: 24, num_attention_heads: 4, num_key_value_heads: 4,\n"
      "    max_position_embeddings: 256}\n  train_global_batch_size: 4\n  train_micro_batch_size: 2\n"
      "  max_total_sequence_length: 128\n  recompute: {granularity: none}\n"
      "pretrain: {max_num_steps: 4}\ndata: {train: {data_path: none}}\ndevice: cpu\n"
      "distributed: {bucket_size_mb: 0.02}\n";
  Profile p = profile::merge({r}, facts);
  planner::advise(p);
  REQUIRE(!p.findings.empty());
  CHECK(p.findings[0].type == "exposed_gradients");
  REQUIRE(!p.findings[0].overrides.empty());
  CHECK(p.findings[0].overrides[0].starts_with("distributed.bucket_size_mb="));
  CHECK(p.findings[0].predicted_s < 0.037);
}

TEST_CASE("a configuration that does not load keeps its findings", "[advice]") {
  Profile p = measured("", "", &Split::data, 0.05);
  p.facts.config = "no_such_key: 1\n";
  const size_t before = p.findings.size();
  planner::advise(p);
  CHECK(p.findings.size() == before);
}
