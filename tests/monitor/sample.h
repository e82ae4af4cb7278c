#pragma once
// A step as in the documentation's example.

#include <cstdlib>
#include <ctime>

#include "apps/monitor/facts.h"

namespace nrl::monitor {

inline constexpr double sample_time = 1700017949.25;  // 2023-11-15 03:12:29 UTC

inline void use_utc() {
  ::setenv("TZ", "UTC0", 1);
  ::tzset();
}

inline StepFacts sample_step() {
  StepFacts f;
  f.step = 120;
  f.max_steps = 20000;
  f.time = sample_time;
  f.loss = 6.231;
  f.lr = 1.71e-4;
  f.grad_norm = 0.842;
  f.tokens = 62914560;
  f.tokens_per_s = 412300;
  f.mfu = 0.47;
  f.mem_bytes = 44667659878;  // 41.6 GiB
  f.step_ms = 1272;
  f.data_ms = 4;
  f.comm_ms = 83;
  f.gemm_ms = 910;
  f.attention_ms = 120.5;
  f.eta_s = 7 * 3600 + 60;
  f.memory = {{"params", 2469606195}, {"grads", 2469606195}};
  return f;
}

}  // namespace nrl::monitor
