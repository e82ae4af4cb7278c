#include "tests/profile/sample_profile.h"

#include <string>

namespace nrl::profile {

Profile sample_profile(int ranks) {
  Profile p;
  p.facts = {.version = "0.1.0",
             .command = "nrl-train profile run configs/llama-17m.yaml",
             .started = "2026-01-02T03:04:05Z",
             .config = "policy:\n  precision: bfloat16\n  note: <a> & \"b\"\n",
             .world = ranks,
             .nodes = (ranks + 7) / 8,
             .threads = 2,
             .first_step = 5,
             .last_step = 7,
             .tokens_per_step = 65536,
             .flops_per_step = 2.5e13};
  const auto operation = [](const char* name, const char* part, Bound bound, double seconds,
                            double attainable, double flops, double bytes) {
    return Operation{.name = name,
                     .part = part,
                     .calls = 48,
                     .seconds = seconds,
                     .shortest = seconds / 60,
                     .longest = seconds / 30,
                     .flops = flops,
                     .bytes = bytes,
                     .attainable = attainable,
                     .arithmetic = flops / 200e9,
                     .bound = bound,
                     .written = int64_t{1} << 25};
  };
  // At 200 GFLOP/s and 40 GB/s.
  const std::vector<Operation> operations{
      operation("linear_backward_weight", "layer GEMMs, wgrad", Bound::arithmetic, 31.2e-3, 25e-3, 5e9, 2e8),
      operation("linear_forward", "layer GEMMs, forward", Bound::arithmetic, 24.1e-3, 20e-3, 4e9, 2e8),
      operation("attention_backward", "attention, backward", Bound::arithmetic, 9.7e-3, 4e-3, 8e8, 4e7),
      operation("gemv", "head GEMM, forward", Bound::memory, 3e-3, 2.5e-3, 1e8, 1e8),
      operation("norm_backward", "norms, backward", Bound::memory, 2.1e-3, 2e-3, 0, 8e7),
  };
  for (int rank = 0; rank < ranks; ++rank) {
    RankProfile r;
    r.rank = rank;
    r.host = "node" + std::to_string(rank / 8);
    r.device = "cpu";
    const double slower = rank == 1 ? 1.08 : 1;
    r.split = {.wall = 112.4e-3,
               .compute = 74e-3 * slower,
               .update = 4.5e-3,
               .recompute = 3.5e-3,
               .late = 2.5e-3,
               .wire = 17.9e-3,
               .data = 1.3e-3};
    r.split.unattributed = r.split.wall - r.split.parts();
    r.step_s = {0.112, 0.1124, 0.1128};
    r.operations = operations;
    r.layers = {operation("layer 3", "", Bound::memory, 9e-3, 8e-3, 1e9, 2e8)};
    r.groups = {{"dp", "all_reduce", "shared memory", ranks, p.facts.nodes, 8, 67'000'000, 67e6, 21.4e-3,
                 17.9e-3, 2.5e-3, 18.9e-3, 50e-6, 10e9}};
    r.memory.arena = 309 << 20;
    r.memory.peak = 302 << 20;
    r.memory.mean = 250 << 20;
    r.memory.peak_at = 61e-3;
    for (int i = 0; i < 200; ++i) {
      const int64_t up = i < 109 ? i : 200 - i;
      r.memory.curve.push_back(
          {i * 0.56e-3,
           {int64_t{60} << 20, int64_t{40} << 20, int64_t{20} << 20, up << 20, (i % 7) << 20, 0}});
    }
    for (int layer = 11; layer >= 0; --layer)
      r.memory.at_peak.push_back({"layer " + std::to_string(layer) + " mlp_in, microbatch 2",
                                  memory::Category::activations, int64_t{36} << 20, 12.1e-3 + layer * 1e-3,
                                  63e-3});
    r.cpu_seconds = 0.21;
    r.starved = 1e-3;
    r.read_seconds = 2e-3;
    r.cores = 2;
    r.resident_bytes = int64_t{900} << 20;
    r.arrived_last = 3;
    r.caused_waiting = 0.6e-3;
    p.ranks.push_back(r);
  }
  p.split = p.ranks[ranks > 1 ? 1 : 0].split;
  p.operations = operations;
  for (Operation& o : p.operations) {
    for (double* sum : {&o.seconds, &o.attainable, &o.arithmetic, &o.flops, &o.bytes}) *sum *= ranks;
    o.calls *= ranks;
  }
  p.findings = {{.type = "exposed_gradients",
                 .text = "gradient reduction of dp is exposed: 17.9 ms of 112.4 (15.9 %); rank 1 waits",
                 .value = 0.159,
                 .severity = Severity::high,
                 .seconds = 17.9e-3,
                 .overrides = {"distributed.overlap_grad_reduce=true"},
                 .predicted_s = 97.8e-3,
                 .model_error = 0.031},
                {.type = "straggler",
                 .text = "rank 1 works <8 %> longer than the median rank",
                 .seconds = 5e-3,
                 .overrides = {}}};
  return p;
}

}  // namespace nrl::profile
