// nrl-train plan: what a run would do and allocate, without doing it.

#include <spdlog/fmt/ranges.h>

#include <cstdio>

#include "apps/nrl-train/commands.h"
#include "apps/plan/run_plan.h"
#include "apps/train/model_source.h"
#include "apps/train/session.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

/// Host memory of the sample order. Where it cannot be known, because the data is not on this machine, the
/// reason is in `unknown`.
data::DatasetMemory plan_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                              std::string& unknown) {
  if (config.data.train.data_path.empty()) {
    unknown = "data.train.data_path is not set";
    return {};
  }
  try {
    const train::TrainData train = train::plan_train_data(config, vocab_size, global_batch);
    std::vector<data::DatasetOptions> datasets{train.options};
    if (const auto validation = train::plan_validation_data(config, train, global_batch))
      datasets.push_back(validation->options);
    return data::plan_dataset_memory(datasets);
  } catch (const Error& e) {
    if (e.code() != Exit::no_input) throw;
    unknown = e.what();
    return {};
  }
}

}  // namespace

int run_plan(const PlanArgs& args) {
  ConfigResult result = load_config(args.config.path, args.config.overrides);
  if (result.ok()) {
    const Diagnostics more = validate_for_world(result, args.world);
    result.diagnostics.insert(result.diagnostics.end(), more.begin(), more.end());
  }
  std::fputs(render(result.diagnostics).c_str(), stderr);
  if (!result.ok()) return static_cast<int>(result.exit_code());
  const Config& c = result.config;
  const BatchPlan batch = resolve_batch(c, args.world);
  // A GPU's memory can be planned without one.
  std::string why;
  const DeviceType device = c.device == DeviceKind::cuda ? DeviceType::cuda : train::choose_device(c, why);
  const auto plan =
      plan::make_run_plan(c, train::load_model_spec(result), batch, 0, device, train::threads_for(c, 1));
  const auto& spec = plan->spec;
  log::info("model    {} parameters, {} layers, {:.4f} GFLOP per token in training at length {}",
            grouped(plan->parameters.total()), spec.layers,
            training_flops_per_token(spec, plan->sequence_length) / 1e9, plan->sequence_length);
  log::info("device   {}, weights and activations in {}", device == DeviceType::cuda ? "cuda" : "cpu",
            name_of(plan->recipe.activations));
  log::info("grid     {} = dp {} x tp 1 x pp 1 x cp 1 x ep 1   {}", args.world, batch.data_parallel,
            plan->sharding.name);
  log::info("batch    {} sequences = {} micro x {} accumulate x {} dp = {} tokens per step", batch.global,
            batch.micro, batch.accumulation, batch.data_parallel, grouped(batch.tokens_per_step));
  log::info("buckets  {} of up to {} MiB, {} elements with padding", plan->layout.buckets().size(),
            c.distributed.bucket_size_mb, grouped(plan->layout.total()));
  log::info(
      "layers   every layer: {}",
      plan->recompute_modules.empty()
          ? "all slots kept"
          : "recomputes " + fmt::format("{}", fmt::join(plan->recompute_modules, ", ")) + ", keeps the rest");
  log::info("memory   per rank, in bytes");
  const auto row = [](std::string_view name, int64_t bytes) {
    log::info("  {:<12} {:>16}   {}", name, grouped(bytes), human_bytes(static_cast<uint64_t>(bytes)));
  };
  std::string unknown;
  const data::DatasetMemory order = plan_data(c, spec.vocab_size, batch.global, unknown);
  const int64_t order_bytes = order.order + order.files;
  const bool on_host = device == DeviceType::cpu;
  for (int i = 0; i < memory::category_count; ++i) {
    const auto category = static_cast<memory::Category>(i);
    row(memory::name_of(category),
        plan->memory.bytes(category) + (on_host && category == memory::Category::data ? order_bytes : 0));
  }
  row("total", plan->memory.total_bytes() + (on_host ? order_bytes : 0));
  if (unknown.empty())
    log::info("data     sample order {}, index of the files {} {}; at most {} while the order is made",
              human_bytes(static_cast<uint64_t>(order.order)),
              human_bytes(static_cast<uint64_t>(order.files)),
              on_host ? "(counted under data)" : "in host memory, not counted above",
              human_bytes(static_cast<uint64_t>(order.peak + order.files)));
  else
    log::info("data     the memory of the sample order is not known: {}", unknown);
  if (args.buffers)
    for (const auto& buffer : plan->memory.buffers())
      if (buffer.bytes > 0)
        log::info("  {:<12} {:>14} at {:>14}  {}", memory::name_of(buffer.category), grouped(buffer.bytes),
                  grouped(buffer.offset), buffer.name);
  return 0;
}

}  // namespace nrl::app
