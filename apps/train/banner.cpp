#include "apps/train/banner.h"

#include <utility>

#include "core/base/text.h"

namespace nrl::train {

RunFacts describe_run(Session& session, double peak_flops) {
  const plan::RunPlan& plan = session.plan();
  const Config& c = session.config();
  const auto& spec = plan.spec;
  RunFacts facts;
  facts.title = fmt::format("nrl-train {}", NRL_VERSION);
  auto add = [&](const char* label, std::string text) {
    facts.sections.emplace_back(label, std::move(text));
  };
  add("config", session.config_result().files.empty() ? "-" : session.config_result().files.back());
  for (const Translation& t : session.config_result().translated)
    add("", fmt::format("{} is read as {}", t.given, t.canonical));
  add("grid", plan::describe_grid(plan, session.world().size()));
  add("device", session.describe_device() + (c.policy.cuda_graph ? ", steps as a CUDA graph" : ""));
  if (!session.exec().device)
    add("mfu", fmt::format(
                   "of {:.0f} GFLOP/s per rank: best fp32 matmul rate so far, raised by a faster try or step",
                   peak_flops * 1e-9));
  if (!session.attention().empty()) add("attention", session.attention());
  add("model",
      fmt::format("{} {} layers, {} hidden, {}/{} heads, vocab {}   {} parameters{}   {}",
                  name_of(spec.family), spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.vocab_size,
                  human_count(static_cast<double>(plan.parameters.total())), spec.tied ? " (tied)" : "",
                  !plan.recipe.master_weights()    ? "fp32"
                  : plan.device == DeviceType::cpu ? "bf16 storage, fp32 arithmetic and master weights"
                                                   : "bf16, fp32 master weights"));
  add("batch",
      fmt::format("{} x {} = {} tokens/step = {} micro x {} accumulate x {} dp   {} steps", plan.batch.global,
                  plan.sequence_length, grouped(plan.batch.global * plan.sequence_length), plan.batch.micro,
                  plan.batch.accumulation, plan.batch.data_parallel, session.max_steps()));
  add("data", session.train_data().describe());
  std::string rules;
  for (const std::string& rule : plan.recompute_modules) rules += (rules.empty() ? "" : ", ") + rule;
  add("memory",
      plan::memory_line(plan.memory) + (rules.empty() ? "" : fmt::format("   (recomputed: {})", rules)));
  if (!session.resumed_from().empty())
    add("resume", fmt::format("{}, step {}", session.resumed_from(), session.position().step));
  const char* label = "changed";
  for (const std::string& change : session.changes()) add(std::exchange(label, ""), change);
  return facts;
}

}  // namespace nrl::train
