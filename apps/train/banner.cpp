#include "apps/train/banner.h"

#include <utility>

#include "core/base/text.h"

namespace nrl::train {

RunFacts describe_run(const Run& run, double peak_flops) {
  const plan::RunPlan& plan = run.plan();
  const Config& c = run.config;
  const auto& spec = plan.spec;
  RunFacts facts;
  facts.title = fmt::format("nrl-train {}", NRL_VERSION);
  auto add = [&](const char* label, std::string text) {
    facts.sections.emplace_back(label, std::move(text));
  };
  add("config", run.config_result.files.empty() ? "-" : run.config_result.files.back());
  for (const Translation& t : run.config_result.translated)
    add("", fmt::format("{} is read as {}", t.given, t.canonical));
  add("grid", plan::grid_line(run.placement.grid_position().sizes, plan.groups.front().strategy.name));
  add("device", run.placement.describe(run.kernels) + (c.policy.cuda_graph ? ", steps as a CUDA graph" : ""));
  if (run.placement.device() == DeviceType::cpu)
    add("mfu", fmt::format("of {:.0f} GFLOP/s per rank: the best fp32 matmul rate measured so far",
                           peak_flops * 1e-9));
  for (const auto& [op, text] : run.library_choices) add(op.c_str(), text);
  add("model",
      fmt::format("{} {} layers, {} hidden, {}/{} heads, vocab {}   {} parameters{}   {}",
                  name_of(spec.family), spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.vocab_size,
                  human_count(static_cast<double>(plan.whole.total())), spec.tied ? " (tied)" : "",
                  !plan.recipe.master_weights()    ? "fp32"
                  : plan.device == DeviceType::cpu ? "bf16 storage, fp32 arithmetic and master weights"
                                                   : "bf16, fp32 master weights"));
  add("batch",
      fmt::format("{} x {} = {} tokens/step = {} micro x {} accumulate x {} dp   {} steps", plan.batch.global,
                  plan.sequence_length, grouped(plan.batch.global * plan.sequence_length), plan.batch.micro,
                  plan.batch.accumulation, plan.batch.data_parallel, run.max_steps()));
  add("data", run.train.dataset->describe());
  const std::string recomputed = plan::recompute_text(plan);
  add("memory", plan::memory_line(plan.memory) +
                    (recomputed.empty() ? "" : fmt::format("   (recomputed: {})", recomputed)));
  if (!run.resumed_from.empty())
    add("resume", fmt::format("{}, step {}", run.resumed_from, run.position.step));
  const char* label = "changed";
  for (const std::string& change : run.changes) add(std::exchange(label, ""), change);
  return facts;
}

}  // namespace nrl::train
