#include "apps/train/start/banner.h"

#include <algorithm>
#include <utility>

#include "apps/plan/nodes.h"
#include "apps/state/adapter_files.h"
#include "core/base/text.h"
#include "core/ops/kernel_table.h"
#include "parallel/grid/nodes.h"

namespace nrl::train {

namespace {

std::string_view name_of_state(DType t) {
  return t == DType::f32 ? "fp32" : t == DType::bf16 ? "bf16" : t == DType::f16 ? "fp16" : "fp8";
}

// Formats of weights, arithmetic and optimizer state, and the recipe of FP8 operands.
std::string precision_text(const Config& config, const plan::RunPlan& plan, const ops::Exec& exec) {
  const precision::OptimizerFormats& o = plan.recipe.optimizer();
  const bool upcast = plan.device == DeviceType::cpu && !ops::multiplies_bf16(exec.kernels->bf16_products);
  const bool remainders = o.remainders, half = plan.recipe.weights() == DType::f16;
  std::string text =
      !o.master
          ? (upcast ? "bf16 storage without master weights, fp32 arithmetic" : "bf16 without master weights")
      : !plan.recipe.master_weights() ? "fp32"
      : half ? (plan.device == DeviceType::cpu ? "fp16 storage, fp32 arithmetic and master weights"
                                               : "fp16, fp32 master weights")
      : remainders
          ? (upcast ? "bf16 storage with 16-bit remainders, fp32 arithmetic" : "bf16 with 16-bit remainders")
      : upcast ? "bf16 storage, fp32 arithmetic and master weights"
               : "bf16, fp32 master weights";
  if (o.exp_avg != DType::f32 || o.exp_avg_sq != DType::f32)
    text += fmt::format(", optimizer state {} and {}", name_of_state(o.exp_avg), name_of_state(o.exp_avg_sq));
  if (const std::string fp8 = plan::fp8_text(config, plan); !fp8.empty()) text += " + " + fp8;
  return text;
}

// The nodes, if several, and which ranks the launcher numbers otherwise.
std::string nodes_text(const comm::World& world) {
  const std::vector<ClusterNode> nodes = parallel::nodes_of(world.nodes(), world.hosts());
  if (nodes.size() < 2) return "";
  std::string text = plan::nodes_line(nodes);
  const std::vector<int>& launched = world.launched();
  if (std::is_sorted(launched.begin(), launched.end())) return text;
  text += "; ranks by node, the launcher's";
  constexpr size_t shown = 8;
  for (size_t r = 0; r < std::min(launched.size(), shown); ++r) text += fmt::format(" {}", launched[r]);
  return text + (launched.size() > shown ? " ..." : "");
}

// How the microbatches of examples are made.
std::string microbatches_text(const PolicyConfig& policy, int64_t micro, int64_t tokens) {
  if (policy.sequence_packing.enabled)
    return fmt::format("packed into microbatches of {} tokens", grouped(tokens));
  if (policy.dynamic_batching.enabled)
    return fmt::format("sorted into microbatches of up to {} tokens", grouped(tokens));
  return fmt::format("{} micro", micro);
}

}  // namespace

monitor::RunFacts describe_run(const Run& run, double peak_flops) {
  const plan::RunPlan& plan = run.plan();
  const Config& c = run.config;
  const auto& spec = plan.spec;
  monitor::RunFacts facts;
  facts.title = fmt::format("nrl-train {}", NRL_VERSION);
  auto add = [&](const char* label, std::string text) {
    facts.sections.emplace_back(label, std::move(text));
  };
  add("config", run.config_result.files.empty() ? "-" : run.config_result.files.back());
  for (const Translation& t : run.config_result.translated)
    add("", fmt::format("{} is read as {}", t.given, t.canonical));
  add("grid", plan::grid_line(run.placement.grid_position(), name_of(run.config.distributed.shard_strategy)));
  if (const std::string nodes = nodes_text(run.world); !nodes.empty()) add("nodes", nodes);
  add("device", run.placement.describe(run.kernels) + (c.policy.cuda_graph ? ", steps as a CUDA graph" : ""));
  if (run.placement.device() == DeviceType::cpu)
    add("mfu", fmt::format("of {:.0f} GFLOP/s per rank: the best fp32 matmul rate measured so far{}",
                           peak_flops * 1e-9,
                           native_factor(run.engine->exec(), plan.recipe.activations()) > 1
                               ? ", times the rate of bf16 products"
                               : ""));
  for (const auto& [op, text] : run.library_choices) add(op.c_str(), text);
  add("model", fmt::format("{} {} layers, {} hidden, {}/{} heads, vocab {}   {} parameters{}   {}",
                           name_of(spec.family), spec.layers, spec.hidden, spec.heads, spec.kv_heads,
                           spec.vocab_size, human_count(static_cast<double>(plan.whole().total())),
                           model::head_text(spec), precision_text(c, plan, run.engine->exec())));
  if (const std::string experts = model::experts_text(spec); !experts.empty()) add("experts", experts);
  if (const std::string trained = trained_text(spec); !trained.empty()) add("trains", trained);
  if (run.train.prompts) {
    const RolloutConfig& rollout = c.rollout;
    add("rollouts", fmt::format("{} prompts x {} completions at once: {} steps of {} sequences, {} x {} dp   "
                                "{} steps",
                                rollout.num_prompts_per_step, rollout.num_generations_per_prompt,
                                rollouts_at_once(c) / plan.batch.global, plan.batch.global,
                                microbatches_text(c.policy, plan.batch.micro, plan.microbatch_tokens()),
                                plan.batch.data_parallel, run.max_steps()));
    add("data", run.train.prompts->describe());
  } else if (run.train.examples) {
    const int64_t rows = plan.microbatch_tokens();
    add("batch",
        fmt::format("{} examples of up to {} tokens a step, {} x {} dp   {} steps", plan.batch.global,
                    grouped(plan.sequence_length), microbatches_text(c.policy, plan.batch.micro, rows),
                    plan.batch.data_parallel, run.max_steps()));
    add("data", run.train.examples->describe());
  } else {
    add("batch", fmt::format("{} x {} = {} tokens/step = {} micro x {} accumulate x {} dp   {} steps",
                             plan.batch.global, plan.sequence_length,
                             grouped(plan.batch.global * plan.sequence_length), plan.batch.micro,
                             plan.batch.accumulation, plan.batch.data_parallel, run.max_steps()));
    add("data", run.train.dataset->describe());
  }
  if (const std::string text = plan::precision_choice(c, plan.device); !text.empty()) add("precision", text);
  const std::string recomputed = plan::recompute_text(plan);
  add("memory", plan::memory_line(plan.memory) +
                    (recomputed.empty() ? "" : fmt::format("   (recomputed: {})", recomputed)));
  if (const std::string text = plan::offload_text(plan); !text.empty()) add("offload", text);
  if (!run.saves.empty()) add("saves", run.saves);
  if (!run.resumed_from.empty())
    add("resume", fmt::format("{}, step {}", run.resumed_from, run.position.step));
  if (run.position.recoveries > 0)
    add("rollbacks", fmt::format("{} so far: lr x {:g}", run.position.recoveries, run.position.lr_factor));
  const char* label = "changed";
  for (const std::string& change : run.changes) add(std::exchange(label, ""), change);
  return facts;
}

}  // namespace nrl::train
