// The kernels that an engine says it needs, compared with those that a step calls, and the workspace.

#include "tests/engine/training.h"

using namespace nrl;
using namespace nrl::test;
using ops::Kernel;
using ops::KernelSet;

namespace {

ops::KernelTable inner;
KernelSet called;

#define NRL_ENTRY(entry, Args)                              \
  void count_##entry(ops::Exec& exec, const ops::Args& a) { \
    called.add(Kernel::entry);                              \
    inner.entry(exec, a);                                   \
  }
NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY

/// The kernels of `table`, each of which notes its call.
ops::KernelTable counting(const ops::KernelTable& table) {
  inner = table;
  ops::KernelTable out;
#define NRL_ENTRY(entry, Args) out.entry = count_##entry;
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  out.bf16_products = table.bf16_products;
  return out;
}

std::string names(const KernelSet& set) {
  std::string text;
#define NRL_ENTRY(entry, Args) \
  if (set.contains(Kernel::entry)) text += #entry " ";
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  return text;
}

ConfigResult config_of(const std::string& device, const std::string& model,
                       std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), "policy.train_global_batch_size=6");
  return test::tiny_config(device, overrides, model);
}

std::unique_ptr<engine::Engine> engine_on(const ops::KernelTable& table, train::Placement& placement,
                                          const ConfigResult& result) {
  const Config& c = result.config;
  ops::Exec exec = placement.exec();
  exec.kernels = &table;
  return std::make_unique<engine::Engine>(
      plan::make_run_plan(c, train::load_model_spec(result), resolve_batch(c, 1), placement.grid_position(),
                          placement.device(), 1),
      engine::training_options(c), placement.groups(), exec);
}

/// The initial weights and a step; returns the result.
engine::StepResult train_once(engine::Engine& engine, const ConfigResult& config) {
  monitor::StartPhases phases;
  train::load_initial_weights(config.config, engine, train::verify_none, 1, phases);
  engine::LanguageModeling objective;
  const BatchPlan& batch = engine.plan().batch;
  for (int64_t m = 0; m < batch.accumulation; ++m)
    engine.fill(m, random_batch(2 * T, static_cast<uint64_t>(m)), m * batch.micro);
  engine.step({.number = 1, .learning_rate = 1e-2, .loss_tokens = batch.tokens_per_step}, objective);
  return engine.collect();
}

struct Family {
  const char *name, *model;
  std::vector<std::string> dropout;
};
const Family families[] = {
    {"llama",
     "{model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, max_position_embeddings: 64}",
     {"policy.model.attention_dropout=0.1"}},
    {"qwen2",
     "{model_type: qwen2, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}",
     {"policy.model.attention_dropout=0.1"}},
    {"qwen3",
     "{model_type: qwen3, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}",
     {"policy.model.attention_dropout=0.1"}},
    {"qwen2_moe",
     "{model_type: qwen2_moe, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
     "num_attention_heads: 2, num_experts: 3, num_experts_per_tok: 2, moe_intermediate_size: 8, "
     "shared_expert_intermediate_size: 16, moe_aux_loss_coeff: 0.1, max_position_embeddings: 64}",
     {"policy.model.attention_dropout=0.1"}},
    {"gpt2",
     "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0, embd_pdrop: 0}",
     {"policy.model.resid_pdrop=0.1", "policy.model.embd_pdrop=0.1"}},
    {"gpt2 with an activation that no library has",
     "{model_type: gpt2, vocab_size: 61, n_embd: 16, n_layer: 2, n_head: 2, n_positions: 64, attn_pdrop: 0, "
     "resid_pdrop: 0, embd_pdrop: 0, activation_function: gelu}",
     {"policy.model.resid_pdrop=0.1"}},
};

}  // namespace

TEST_CASE("the kernels that an engine needs are those that a step calls", "[engine]") {
  for (const std::string device : {"cpu", "cuda"})
    for (const Family& family : families)
      for (const bool dropout : {false, true})
        for (const char* precision : {"float32", "bfloat16"})
          for (const char* strategy : {"ddp", "optim"}) {
            CAPTURE(device, family.name, dropout, precision, strategy);
            std::vector<std::string> overrides{std::string("policy.precision=") + precision,
                                               std::string("distributed.shard_strategy=") + strategy};
            if (dropout) overrides.insert(overrides.end(), family.dropout.begin(), family.dropout.end());
            const ConfigResult config = config_of(device, family.model, overrides);
            const auto world = comm::World::init();
            train::Placement placement(*world, config);
            const ops::KernelTable table = counting(*placement.exec().kernels);
            const auto engine = engine_on(table, placement, config);

            called = {};
            engine::LanguageModeling objective;
            const KernelSet needed = engine->kernels_needed(objective);
            CHECK(names(called).empty());
            const engine::StepResult result = train_once(*engine, config);
            CHECK(names(needed) == names(called));
            CHECK(engine->require_kernels(objective, "the GPU") == needed.size());
            CHECK(engine->dry_step(objective).workspace == engine->exec().workspace.size);

            // Collecting must not change state: a fresh engine computes the same step.
            const auto fresh = engine_on(*placement.exec().kernels, placement, config);
            const engine::StepResult same = train_once(*fresh, config);
            CHECK(result.metrics[0] == same.metrics[0]);
            CHECK(result.grad_norm == same.grad_norm);
            CHECK(bytes_of(*engine, engine->groups().front().weights) ==
                  bytes_of(*fresh, fresh->groups().front().weights));
          }
}

TEST_CASE("a table without a kernel that is needed is refused before the first step", "[engine]") {
  for (const std::string device : {"cpu", "cuda"})
    for (const Family& family : families) {
      CAPTURE(device, family.name);
      const ConfigResult config = config_of(device, family.model, {"policy.precision=bfloat16"});
      const auto world = comm::World::init();
      train::Placement placement(*world, config);
      ops::KernelTable table = *placement.exec().kernels;
      const auto engine = engine_on(table, placement, config);
      engine::LanguageModeling objective;
      const KernelSet needed = engine->kernels_needed(objective);
      const auto refusal = [&]() -> std::string {
        try {
          engine->require_kernels(objective, "the GPU");
        } catch (const Error& e) {
          CHECK(e.code() == Exit::unavailable);
          return e.what();
        }
        return {};
      };
      const ops::KernelTable whole = table;
#define NRL_ENTRY(entry, Args)                                                            \
  table.entry = nullptr;                                                                  \
  CHECK(refusal() == (needed.contains(Kernel::entry)                                      \
                          ? "the model needs kernels that the GPU does not have: " #entry \
                          : ""));                                                         \
  table = whole;
      NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
    }
}
