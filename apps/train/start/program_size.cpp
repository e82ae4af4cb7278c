#include "apps/train/start/program_size.h"

#include <array>

#include "apps/engine/engine.h"
#include "apps/state/model_source.h"
#include "apps/train/start/initial_state.h"
#include "core/config/load.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/peak.h"
#include "parallel/comm/self/self_comm.h"

namespace nrl::train {
namespace {

constexpr const char* tiny_run =
    "device: cpu\n"
    "policy:\n"
    "  model: {model_type: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 128,\n"
    "          num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 64}\n"
    "  train_global_batch_size: 2\n"
    "  train_micro_batch_size: 1\n"
    "  max_total_sequence_length: 64\n"
    "pretrain: {max_num_steps: 2}\n"
    "data: {train: {data_path: none}}\n";

void train_tiny_model(const Config& config, int threads) {
  const ConfigResult result =
      load_config_text(tiny_run, "tiny.yaml",
                       std::array{fmt::format("policy.precision={}", name_of(config.policy.precision))});
  NRL_CHECK(result.ok(), "{}", render(result.diagnostics));
  const Config& c = result.config;
  const plan::GridPosition position = plan::grid_position(c, 1, 0);
  const auto self = comm::make_self("program", 0, nullptr);
  const parallel::Groups groups(position.grid, *self, plan::needed_groups(c, position, false));
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec.threads = threads;
  const BatchPlan batch = resolve_batch(c, 1);
  engine::Engine engine(
      plan::make_run_plan(c, load_model_spec(result), batch, position, DeviceType::cpu, threads),
      engine::training_options(c), groups, exec);
  monitor::StartPhases phases;
  load_initial_weights(c, engine, verify_none, 1, phases);
  data::HostMicroBatch samples;
  for (int64_t i = 0; i < batch.micro * c.policy.max_total_sequence_length; ++i) {
    samples.tokens.push_back(static_cast<int32_t>(i % 256));
    samples.targets.push_back(static_cast<int32_t>((i + 1) % 256));
  }
  for (int64_t step = 1; step <= 2; ++step) {
    for (int64_t m = 0; m < batch.accumulation; ++m) engine.fill(m, samples, m * batch.micro);
    engine.step({.number = step, .learning_rate = 1e-3, .loss_tokens = batch.tokens_per_step},
                engine.objective());
    engine.collect();
  }
}

}  // namespace

int64_t measure_program(const Config& config, int threads) {
  train_tiny_model(config, threads);
  ops::measure_gemm_peak(threads, 0);
  cpu::release_free_heap();
  return static_cast<int64_t>(cpu::resident_bytes());
}

}  // namespace nrl::train
