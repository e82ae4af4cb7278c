#include "apps/monitor/rows.h"

#include <algorithm>

#include "apps/monitor/layers.h"

namespace nrl::monitor {
namespace {

// A '/' would be a directory of the file of another metric in MLflow: "val_loss" and "val_loss/code".
std::string validation_name(std::string name) {
  std::replace(name.begin(), name.end(), '/', '_');
  return "validation/" + name;
}

}  // namespace

Row sink_row(const StepFacts& f) {
  Row row{.step = f.step, .time = time_or_now(f.time)};
  row.values.reserve(32);
  const auto add = [&](std::string name, double value) { row.values.emplace_back(std::move(name), value); };
  add("train/loss", f.loss);
  add("train/grad_norm", f.grad_norm);
  add("train/lr", f.lr);
  add("train/tokens", static_cast<double>(f.tokens));
  add("train/skipped", f.skipped ? 1 : 0);
  if (f.loss_scale) add("train/loss_scale", *f.loss_scale);
  if (f.router) {
    if (f.router->aux_loss) add("train/router_aux_loss", *f.router->aux_loss);
    add("train/router_z_loss", f.router->z_loss);
    add("train/expert_load", f.router->load);
  }
  for (const Metric& metric : f.metrics) add("train/" + metric.name, metric.value);
  if (f.layers)
    for (auto& [name, value] : flat(*f.layers)) add(std::move(name), value);

  add("perf/tokens_per_s", f.tokens_per_s);
  if (f.mfu) add("perf/mfu", *f.mfu);
  add("perf/step_ms", f.step_ms);
  add("perf/data_ms", f.data_ms);
  add("perf/exposed_ms", f.comm_ms);
  add("perf/gemm_ms", f.gemm_ms);
  add("perf/attention_ms", f.attention_ms);
  if (f.straggler_ratio) add("perf/straggler_ratio", *f.straggler_ratio);

  const double seconds = f.step_ms * 1e-3;
  const double valid =
      f.examples && seconds > 0 ? static_cast<double>(f.examples->loss_tokens) / seconds : f.tokens_per_s;
  add("timing/train/total_step_time", seconds);
  add("timing/train/policy_training", seconds - f.data_ms * 1e-3);
  add("timing/train/valid_tokens_per_sec_per_gpu", valid / f.world_size);

  double allocated = 0;
  for (const auto& [category, bytes] : f.memory) {
    const double gb = static_cast<double>(bytes) * 1e-9;
    allocated += gb;
    add("memory/" + category + "_gb", gb);
  }
  add("memory/allocated_gb", allocated);
  if (f.mem_bytes > 0) add("memory/max_allocated_gb", static_cast<double>(f.mem_bytes) * 1e-9);
  return row;
}

Row sink_row(const EvalFacts& f) {
  Row row{.step = f.step, .time = time_or_now(f.time)};
  for (const auto& [name, loss] : f.losses) row.values.emplace_back(validation_name(name), loss);
  for (const Metric& metric : f.metrics) row.values.emplace_back(validation_name(metric.name), metric.value);
  row.values.emplace_back("timing/validation/total_validation_time", f.seconds);
  return row;
}

}  // namespace nrl::monitor
