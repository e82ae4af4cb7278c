// Tables of a profile.

#include "apps/profile/text.h"

#include <sstream>
#include <string>

#include "apps/profile/analyze.h"
#include "tests/catch.h"

using namespace nrl;
using profile::Profile;

namespace {

Profile sample() {
  std::vector<profile::RankProfile> ranks(2);
  for (int r = 0; r < 2; ++r) {
    profile::RankProfile& p = ranks[r];
    p.rank = r;
    p.host = "node0";
    p.device = "cpu";
    p.split.wall = 0.1;
    p.split.compute = 0.07 + 0.01 * r;
    p.split.wire = 0.02 - 0.01 * r;
    p.split.data = 0.0099;
    p.split.report = 0.0001;
    p.step_s = {0.098, 0.1, 0.102};
    p.operations = {{.name = "linear_forward",
                     .part = "layer GEMMs, forward",
                     .calls = 24,
                     .seconds = 0.05,
                     .flops = 2e10,
                     .bytes = 1e9,
                     .attainable = 0.04,
                     .bound = profile::Bound::arithmetic},
                    {.name = "linear_forward",
                     .part = "head GEMM, forward",
                     .calls = 1,
                     .seconds = 0.01,
                     .flops = 2e9,
                     .bytes = 1e8,
                     .attainable = 0.005},
                    {.name = "norm_forward",
                     .part = "norms, forward",
                     .calls = 24,
                     .seconds = 0.0024,
                     .bytes = 1e8,
                     .attainable = 0.002}};
    p.groups = {{.group = "dp",
                 .operation = "all_reduce",
                 .algorithm = "shared memory",
                 .ranks = 2,
                 .calls = 8,
                 .bytes = 64 << 20,
                 .wire_bytes = 64 << 20,
                 .busy = 0.02,
                 .exposed = 0.016,
                 .late = 0.004,
                 .wire = 0.016,
                 .link = 1e10}};
    p.memory.arena = 310 << 20;
    p.memory.peak = 300 << 20;
    p.memory.mean = 200 << 20;
    p.memory.peak_at = 0.0612;
    p.memory.at_peak = {{.name = "layer 5 mlp_in",
                         .category = memory::Category::activations,
                         .bytes = 36 << 20,
                         .from = 0.0121,
                         .to = 0.063}};
    p.arrived_last = 3 + r;
    p.caused_waiting = 0.0006;
  }
  profile::RunFacts facts;
  facts.tokens_per_step = 4096;
  return profile::merge(std::move(ranks), facts);
}

}  // namespace

TEST_CASE("no line of a profile is longer than 100 columns", "[profile]") {
  Profile p = sample();
  p.findings.push_back({.type = "exposed_gradients",
                        .text =
                            "the reduction of gradients of dp is exposed: 17.9 ms of 112.4 (15.9 %); most of "
                            "it after the backward pass",
                        .seconds = 0.0179,
                        .overrides = {"distributed.overlap_grad_reduce=true"},
                        .predicted_s = 0.087,
                        .model_error = 0.031});
  p.ranks[0].dropped = 1204;
  for (const auto by : {profile::OperationView::By::name, profile::OperationView::By::part}) {
    std::istringstream lines(profile::text(p, {.by = by}));
    for (std::string line; std::getline(lines, line);) {
      CAPTURE(line);
      CHECK(line.size() <= 100);
    }
  }
}

TEST_CASE("the split names every part of half a percent and more", "[profile]") {
  Profile p = sample();
  const std::string text = profile::split_text(p);
  CHECK(text.find("100.0 ms  (p50 100.0, p95 101.8, p99 102.0 of 3 steps)  40,960 tokens/s") !=
        std::string::npos);
  CHECK(text.find("compute 80.0 %  wire 10.0 %  data 9.9 %  rest 0.1 %") != std::string::npos);
  CHECK(text.find("warning") == std::string::npos);
  p.split.unattributed = 0.00199;
  CHECK(profile::split_text(p).find("warning") == std::string::npos);
  p.split.unattributed = 0.00201;
  CHECK(profile::split_text(p).find("2.0 % of the step have no recorded cause; expected at most 2 %") !=
        std::string::npos);
  p.ranks[1].dropped = 1204;
  CHECK(profile::split_text(p).find("1,204 ranges were not recorded") != std::string::npos);
}

TEST_CASE("operations are means over the ranks, by the time lost", "[profile]") {
  const Profile p = sample();
  const std::string by_name = profile::operations_text(p);
  CHECK(by_name ==
        "operation       calls    ms   share  mean us  TFLOP/s  GB/s       bound  of limit  lost ms\n"
        "linear_forward     25  60.0  60.0 %   2400.0     0.37  18.3  arithmetic      75 %     15.0\n"
        "norm_forward       24   2.4   2.4 %    100.0        -  41.7      memory      83 %      0.4\n");
  const std::string slow = profile::operations_text(p, {.threshold_ms = 0.2});
  CHECK(slow.find("norm_forward") == std::string::npos);
  CHECK(profile::operations_text(p, {.top = 1}).find("and 1 more") != std::string::npos);
  CHECK(profile::operations_text(p, {.by = profile::OperationView::By::part}).find("head GEMM, forward") !=
        std::string::npos);
  Profile layers = p;
  layers.layers.resize(1);
  layers.layers[0].name = "layer 3";
  layers.layers[0].calls = 6;
  layers.layers[0].seconds = 0.02;
  CHECK(profile::operations_text(layers, {.by = profile::OperationView::By::layer})
            .find("\nlayer 3      3  10.0 ") != std::string::npos);
}

TEST_CASE("memory, communication and ranks", "[profile]") {
  const Profile p = sample();
  CHECK(profile::memory_text(p) ==
        "memory    rank 0: peak 300 MiB of 310 MiB arena at 61.2 ms of the step, mean 200 MiB\n"
        "buffer at the peak  category         size  from ms  to ms\n"
        "layer 5 mlp_in      activations  36.0 MiB     12.1   63.0\n");
  CHECK(
      profile::groups_text(p) ==
      "group  operation   ranks  calls     bytes  busy ms  late  wire  exposed  hidden  GB/s   bus    link\n"
      "dp     all_reduce      2      8  64.0 MiB     20.0   4.0  16.0     16.0    20 %  4.19  4.19  41.9 %\n"
      "carried by dp all_reduce: shared memory\n");
  CHECK(profile::ranks_text(p) ==
        "rank  own work ms  score  last  caused ms  cores busy  switches  longer than the median in\n"
        "   0         80.0   1.00     3        0.6           -         0\n"
        "   1         90.0   0.89     4        0.6           -         0  compute +5.0 ms, on node0\n");
}
