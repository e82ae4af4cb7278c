// Findings of a profile, on both sides of every threshold.

#include "apps/profile/verdicts.h"

#include <algorithm>
#include <string>
#include <vector>

#include "apps/profile/analyze.h"
#include "tests/catch.h"

using namespace nrl;
using profile::Profile;
using profile::Split;
using profile::Verdict;

namespace {

// A step of one second on `device` that computes but for a part.
Profile with(double Split::*part, double seconds, const char* device = "cpu", int world = 1) {
  profile::RankProfile r;
  r.device = device;
  r.host = "node0";
  r.split.wall = 1;
  r.split.compute = 1 - seconds;
  if (part) r.split.*part = seconds;
  profile::RunFacts facts;
  facts.world = world;
  return profile::merge({r}, facts);
}

const Verdict* find(const std::vector<Verdict>& all, const std::string& type) {
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const Verdict& v) { return v.finding.type == type; });
  return at == all.end() ? nullptr : &*at;
}

bool has(const Profile& p, const std::string& type, const Config& config = {}) {
  return find(profile::find_verdicts(p, config), type) != nullptr;
}

std::vector<std::string> overrides(const Profile& p, const std::string& type, const Config& config = {}) {
  const std::vector<Verdict> all = profile::find_verdicts(p, config);
  const Verdict* v = find(all, type);
  REQUIRE(v);
  std::vector<std::string> out;
  for (const profile::Candidate& c : v->candidates)
    out.insert(out.end(), c.overrides.begin(), c.overrides.end());
  return out;
}

profile::GroupTime group(const char* name, const char* operation, double exposed, double busy) {
  profile::GroupTime g;
  g.group = name;
  g.operation = operation;
  g.ranks = 2;
  g.exposed = exposed;
  g.busy = busy;
  return g;
}

}  // namespace

TEST_CASE("a good step has no finding", "[profile]") {
  CHECK(profile::find_verdicts(with(nullptr, 0), {}).empty());
  CHECK(profile::find_verdicts(with(&Split::wire, 0.005), {}).empty());
}

TEST_CASE("shares of the step have thresholds", "[profile]") {
  for (const auto& [part, type, threshold] : {std::tuple{&Split::data, "data_loading", 0.02},
                                              {&Split::bubble, "pipeline_bubble", 0.05},
                                              {&Split::recompute, "recomputation", 0.03},
                                              {&Split::offload, "exposed_offloading", 0.03}}) {
    CAPTURE(type);
    CHECK_FALSE(has(with(part, threshold - 1e-6), type));
    CHECK(has(with(part, threshold + 1e-6), type));
  }
  CHECK_FALSE(has(with(&Split::launch, 0.0499, "H100"), "launch_overhead"));
  CHECK(has(with(&Split::launch, 0.0501, "H100"), "launch_overhead"));
  CHECK_FALSE(has(with(&Split::update, 0.0999, "cpu", 2), "optimizer_step"));
  CHECK(has(with(&Split::update, 0.1001, "cpu", 2), "optimizer_step"));
  CHECK_FALSE(has(with(&Split::update, 0.5), "optimizer_step"));  // one copy of the weights
  Config sharded;
  sharded.distributed.shard_strategy = ShardStrategy::optim;
  CHECK_FALSE(has(with(&Split::update, 0.5, "cpu", 2), "optimizer_step", sharded));
}

TEST_CASE("utilization of a GPU below 80 % and 50 %", "[profile]") {
  const auto severity = [](double idle) {
    const auto all = profile::find_verdicts(with(&Split::host, idle, "H100"), {});
    const Verdict* v = find(all, "low_gpu_utilization");
    return v ? static_cast<int>(v->finding.severity) : -1;
  };
  CHECK(severity(0.1999) == -1);
  CHECK(severity(0.2001) == static_cast<int>(profile::Severity::medium));
  CHECK(severity(0.4999) == static_cast<int>(profile::Severity::medium));
  CHECK(severity(0.5001) == static_cast<int>(profile::Severity::high));
  CHECK_FALSE(has(with(&Split::host, 0.9), "low_gpu_utilization"));  // a CPU
}

TEST_CASE("communication by the kind of its group", "[profile]") {
  for (const auto& [name, operation, type] : {std::tuple{"dp", "all_reduce", "exposed_gradients"},
                                              {"dp", "all_gather", "exposed_weights"},
                                              {"cp-dp", "all_reduce", "exposed_gradients"},
                                              {"tp", "all_gather", "exposed_tensor_parallel"},
                                              {"cp", "all_to_all", "exposed_context_parallel"},
                                              {"ep", "all_to_all_v", "exposed_expert_parallel"}}) {
    CAPTURE(type);
    Profile p = with(nullptr, 0, "cpu", 2);
    p.ranks[0].groups = {group(name, operation, 0.0199, 0.0199)};
    CHECK_FALSE(has(p, type));
    p.ranks[0].groups = {group(name, operation, 0.0201, 0.0201)};
    CHECK(has(p, type));
    CHECK(profile::find_verdicts(p, {}).size() == 1);
  }
  Profile p = with(nullptr, 0, "cpu", 2);
  p.ranks[0].groups = {group("dp", "all_reduce", 0, 0.1999)};
  CHECK_FALSE(has(p, "high_communication_overhead"));
  p.ranks[0].groups = {group("dp", "all_reduce", 0, 0.2001)};  // hidden, but busy
  CHECK(has(p, "high_communication_overhead"));
}

TEST_CASE("candidates follow from the configuration", "[profile]") {
  using Keys = std::vector<std::string>;
  CHECK(overrides(with(&Split::data, 0.1), "data_loading") ==
        Keys{"data.num_workers=2", "data.prefetch_batches=4"});
  Profile p = with(nullptr, 0, "cpu", 2);
  p.ranks[0].groups = {group("dp", "all_reduce", 0.1, 0.1)};
  Config config;
  config.distributed.overlap_grad_reduce = false;
  config.distributed.bucket_size_mb = 32.0;
  CHECK(overrides(p, "exposed_gradients", config) ==
        Keys{"distributed.overlap_grad_reduce=true", "distributed.bucket_size_mb=auto",
             "distributed.bucket_size_mb=16", "distributed.bucket_size_mb=64",
             "distributed.bucket_size_mb=256", "distributed.bucket_size_mb=1024",
             "distributed.bucket_size_mb=4096", "distributed.grad_reduce_dtype=bf16"});
  const auto all = profile::find_verdicts(p, config);
  CHECK(all[0].candidates.back().changes_numbers);
  CHECK_FALSE(all[0].candidates.front().changes_numbers);
  CHECK(overrides(with(&Split::recompute, 0.1), "recomputation") ==
        Keys{"policy.recompute.granularity=none"});
}

TEST_CASE("GEMMs below 60 % of what they could reach", "[profile]") {
  Profile p = with(nullptr, 0);
  p.ranks[0].operations = {{.name = "linear_forward",
                            .part = "layer GEMMs, forward",
                            .calls = 10,
                            .seconds = 0.5,
                            .arithmetic = 0.3001}};
  CHECK_FALSE(has(p, "inefficient_gemms"));
  p.ranks[0].operations[0].attainable = 0.5;  // of so few rows
  p.ranks[0].operations[0].arithmetic = 0.2999;
  CHECK(has(p, "inefficient_gemms"));
  Config config;
  config.policy.train_global_batch_size = 16;
  config.policy.train_micro_batch_size = int64_t{2};
  CHECK(overrides(p, "inefficient_gemms", config) ==
        std::vector<std::string>{"policy.train_micro_batch_size=4", "policy.train_micro_batch_size=8",
                                 "policy.train_micro_batch_size=16"});
  p.ranks[0].starved = 0.01;  // other programs
  CHECK_FALSE(has(p, "inefficient_gemms"));
}

TEST_CASE("threads that read ahead, and how far", "[profile]") {
  Config config;
  config.policy.train_global_batch_size = 8;
  config.policy.train_micro_batch_size = int64_t{4};
  const auto first = [&](double read) {
    Profile p = with(&Split::data, 0.5);
    p.ranks[0].read_seconds = read;
    const auto all = profile::find_verdicts(p, config);
    const Verdict* v = find(all, "data_loading");
    REQUIRE(v);
    return v->candidates.front();
  };
  // Two microbatches a step, which are read while the step before computes for 0.5 s.
  CHECK(first(0.99).overrides == std::vector<std::string>{"data.num_workers=3"});
  CHECK(first(0.99).predicted_s == 0.5);
  CHECK(first(0.45).overrides == std::vector<std::string>{"data.num_workers=2"});  // reading is fast enough
  CHECK(first(0.45).predicted_s == 0);
  // Eight: 6 of them are not read ahead.
  config.policy.train_micro_batch_size = int64_t{1};
  CHECK(first(0.45).overrides == std::vector<std::string>{"data.prefetch_batches=8"});
  CHECK(first(0.45).predicted_s == 0.5);
  CHECK(first(0.99).predicted_s == Approx(0.5 + 5.0 / 8 * 0.99 / 3));
}

TEST_CASE("a stage of a pipeline that works longer than the others", "[profile]") {
  const auto stages = [](double slow, double fast) {
    Profile p = with(nullptr, 0, "cpu", 2);
    p.facts.stages = 2;
    p.ranks.push_back(p.ranks[0]);
    p.ranks[1].rank = 1;
    p.ranks[0].split.imbalance = 1 - slow;
    p.ranks[1].split.imbalance = 1 - fast;
    return p;
  };
  CHECK_FALSE(has(stages(1, 0.9401), "pipeline_imbalance"));
  CHECK(has(stages(1, 0.9399), "pipeline_imbalance"));
  CHECK_FALSE(has(stages(1, 0.5), "straggler"));  // each is the only one of its stage
  CHECK(overrides(stages(1, 0.5), "pipeline_imbalance") ==
        std::vector<std::string>{"distributed.account_for_loss_in_pipeline_split=true",
                                 "distributed.account_for_embedding_in_pipeline_split=true"});
  Config config;
  config.distributed.pipeline_layout = {3, 5};
  config.distributed.account_for_loss_in_pipeline_split = true;
  config.distributed.account_for_embedding_in_pipeline_split = true;
  CHECK(overrides(stages(1, 0.5), "pipeline_imbalance", config) ==
        std::vector<std::string>{"distributed.pipeline_layout=null", "distributed.pipeline_layout=[2,6]",
                                 "distributed.pipeline_layout=[1,7]"});
}

TEST_CASE("slow kernels, unsteady steps and stragglers", "[profile]") {
  Profile p = with(nullptr, 0, "H100");
  p.ranks[0].operations = {{.name = "norm_forward",
                            .part = "norms, forward",
                            .calls = 10,
                            .seconds = 0.00999,
                            .attainable = 0.009}};
  CHECK_FALSE(has(p, "slow_kernels"));
  p.ranks[0].operations[0].seconds = 0.01001;
  CHECK(has(p, "slow_kernels"));

  p = with(nullptr, 0);
  p.ranks[0].step_s.assign(19, 1.0);
  p.ranks[0].step_s.push_back(3);
  CHECK(has(p, "unsteady_steps"));
  p.ranks[0].step_s.back() = 1.1;
  CHECK_FALSE(has(p, "unsteady_steps"));
  p.ranks[0].step_s.back() = 3;
  p.ranks[0].cores = 2;
  p.facts.threads = 4;
  CHECK(overrides(p, "unsteady_steps") == std::vector<std::string>{"kernels.num_threads=2"});

  Profile two = with(nullptr, 0);
  two.ranks.push_back(two.ranks[0]);
  two.ranks[1].rank = 1;
  two.ranks[0].split.wire = 0.0999;
  CHECK_FALSE(has(two, "straggler"));
  two.ranks[0].split.wire = 0.1001;
  CHECK(has(two, "straggler"));
  const auto all = profile::find_verdicts(two, {});
  const Verdict* v = find(all, "straggler");
  CHECK(v->finding.text.find("rank 1 on node0") != std::string::npos);
  REQUIRE(v->candidates.size() == 1);  // no key, but it is known what the step would take without it
  CHECK(v->candidates[0].overrides.empty());
  CHECK(v->candidates[0].predicted_s == Approx(1 - 0.1001));
  CHECK_FALSE(has(two, "starved"));
  two.ranks[1].starved = 0.0501;
  CHECK(has(two, "starved"));
  const auto starved = profile::find_verdicts(two, {});
  CHECK(find(starved, "straggler")->finding.text.find("Fix: end them") != std::string::npos);
  // Only as far as the other ranks do not lack a processor as well.
  const auto predicted = [&](double one, double other) {
    two.ranks[1].starved = one;
    two.ranks[0].starved = other;
    const auto verdicts = profile::find_verdicts(two, {});
    return find(verdicts, "straggler")->candidates[0].predicted_s;
  };
  two.ranks[0].split.wire = 0.5;
  CHECK(predicted(0.6, 0) == Approx(0.5));
  two.ranks[0].split.wire = 0.2;
  two.ranks[1].split.wire = 0.1;
  CHECK(predicted(0.15, 0) == Approx(1 - 0.15));
  CHECK(predicted(0.15, 0.02) == Approx(1 - 0.13));
}

TEST_CASE("findings are sorted by their cost", "[profile]") {
  Profile p = with(&Split::data, 0.1);
  p.split.recompute = 0.2;
  const auto all = profile::find_verdicts(p, {});
  REQUIRE(all.size() == 2);
  CHECK(all[0].finding.type == "recomputation");
  CHECK(all[0].finding.seconds == 0.2);
  CHECK(all[0].finding.severity == profile::Severity::high);
}
