#include "apps/train/start/memory_fit.h"

#include <algorithm>

#include "apps/plan/forward_plan.h"
#include "apps/plan/generation.h"
#include "apps/plan/host_memory.h"
#include "apps/plan/loss.h"
#include "apps/state/model_source.h"
#include "apps/state/resume.h"
#include "apps/train/start/run_check.h"
#include "core/base/text.h"

namespace nrl::train {
namespace {

using Overrides = std::vector<std::string>;

class Search {
 public:
  Search(const ConfigResult& result, int world, DeviceType device, int threads, double capacity,
         size_t memory)
      : text_(dump_resolved(result)),
        world_(world),
        device_(device),
        threads_(threads),
        capacity_(capacity),
        memory_(memory) {}

  /// The bytes that the run needs with these changes; unset if it is refused or does not fit.
  std::optional<double> fits(const Overrides& overrides) const {
    ConfigResult changed = load_config_text(text_, "changed.yaml", overrides);
    if (!changed.ok()) return std::nullopt;
    const auto spec = check_but_memory(changed, {.world = world_, .files = false});
    if (!changed.ok()) return std::nullopt;
    const double need = needed_memory(changed.config, *spec, resolve_batch(changed.config, world_), world_,
                                      device_, threads_, capacity_, memory_);
    return need <= capacity_ ? std::optional(need) : std::nullopt;
  }

 private:
  std::string text_;
  int world_;
  DeviceType device_;
  int threads_;
  double capacity_;
  size_t memory_;
};

Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

int64_t reference_bytes(const Config& config, const plan::RunPlan& plan) {
  if (!config.loss_fn.reference_model || !plan::needs_reference(config)) return 0;
  model::ModelSpec spec = load_model_directory(*config.loss_fn.reference_model, verify_none);
  return plan::make_reference_plan(std::move(spec), config, plan)->memory.total_bytes();
}

int64_t readable_reference_bytes(const Config& config, const plan::RunPlan& plan) {
  try {
    return reference_bytes(config, plan);
  } catch (const Error&) {
    return 0;
  }
}

plan::CategoryBytes needed_memory(const Config& config, const plan::RunPlan& plan) {
  plan::CategoryBytes need = plan::planned_memory(config, plan);
  if (!generates_rollouts(config)) return need;
  double& workspace = need[static_cast<size_t>(memory::Category::workspace)];
  workspace += static_cast<double>(plan::plan_generation(config, plan, 0).memory.total());
  const int64_t reference = readable_reference_bytes(config, plan),
                others = plan::bytes_beside_plan(config, plan, reference, std::nullopt);
  workspace += static_cast<double>(reference);
  need[static_cast<size_t>(memory::Category::data)] += static_cast<double>(others - reference);
  return need;
}

plan::CategoryBytes largest_need(const Config& config, const plan::StagePlans& plans) {
  plan::CategoryBytes most = {};
  for (const auto& plan : plans.plans)
    if (const plan::CategoryBytes need = needed_memory(config, *plan); plan::total(need) > plan::total(most))
      most = need;
  return most;
}

double needed_memory(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch, int world,
                     DeviceType device, int threads, double limit, size_t memory) {
  const double least = plan::total(plan::minimum_memory(config, spec, batch, device));
  if (least > limit) return least;
  return plan::total(
      largest_need(config, plan::plan_stages(config, spec, batch, world, device, threads, memory)));
}

std::vector<FittingChange> changes_that_fit(const ConfigResult& result, int world, DeviceType device,
                                            int threads, double capacity, size_t memory, size_t most) {
  const Config& c = result.config;
  const Search search(result, world, device, threads, capacity, memory);
  std::vector<FittingChange> found;
  const auto try_change = [&](const Overrides& change) {
    if (found.size() >= most) return true;
    const auto bytes = search.fits(change);
    if (bytes) found.push_back({change, *bytes});
    return bytes.has_value();
  };

  const BatchPlan batch = resolve_batch(c, world);
  const auto with_micro = [&](const BatchPlan& b) {
    Overrides change{fmt::format("policy.train_micro_batch_size={}", b.micro)};
    if (c.policy.gradient_accumulation_steps)
      change.push_back(fmt::format("policy.gradient_accumulation_steps={}", b.accumulation));
    return change;
  };
  Overrides least_micro;
  bool smaller_fits = false;
  for (auto b = smaller_microbatch(batch); b; b = smaller_microbatch(*b)) {
    least_micro = with_micro(*b);
    if (!smaller_fits) smaller_fits = try_change(least_micro);
  }

  Overrides most_recompute, most_sharding, bf16;
  if (const auto& modules = c.policy.recompute.modules;
      c.distributed.splits_sequence() && !modules.is_auto() &&
      std::find(modules.value().begin(), modules.value().end(), BlockModule::gather) ==
          modules.value().end()) {
    std::string list;
    for (const BlockModule m : modules.value()) list += fmt::format("{}, ", name_of(m));
    try_change({fmt::format("policy.recompute.modules=[{}{}]", list, name_of(BlockModule::gather))});
  }
  const std::vector<std::string> granularities = allowed_values("policy.recompute.granularity");
  for (const char* value : {"auto", "selective", "full"}) {
    if (std::find(granularities.begin(), granularities.end(), value) == granularities.end() ||
        value == name_of(c.policy.recompute.granularity))
      continue;
    most_recompute = {fmt::format("policy.recompute.granularity={}", value)};
    if (std::string_view(value) == "auto" && !c.policy.recompute.modules.is_auto())
      most_recompute.emplace_back("policy.recompute.modules=auto");
    if (try_change(most_recompute)) break;
  }
  // FP8 copies of weights: none beside weights in FP8, or for the duration of a GEMM.
  if (const Fp8Config& fp8 = c.policy.fp8_cfg; fp8.enabled && !fp8.fp8_param) {
    Overrides keeps{"policy.fp8_cfg.fp8_param=true"};
    if (!fp8.cache_weights.is_auto()) keeps.emplace_back("policy.fp8_cfg.cache_weights=auto");
    if (!try_change(keeps) && plan::caches_fp8_weights(c)) try_change({"policy.fp8_cfg.cache_weights=false"});
  }
  if (batch.data_parallel > 1) {
    const std::string_view now = name_of(c.distributed.shard_strategy);
    bool above = false, fits = false;
    for (const std::string_view value : {"ddp", "optim", "optim_grads", "optim_grads_params"}) {
      if (above) {
        most_sharding = {fmt::format("distributed.shard_strategy={}", value)};
        fits = fits || try_change(most_sharding);
      }
      above = above || value == now;
    }
  }
  if (c.policy.offload_optimizer.value < 1) try_change({"policy.offload_optimizer=true"});
  if (plan::recipe_for(c, device, load_model_spec(result).layers).weights() == DType::f32) {
    bf16 = {"policy.precision=bfloat16"};
    try_change(bf16);
  }
  for (const char* key : {"distributed.tensor_parallel_size", "distributed.pipeline_parallel_size"})
    for (int size = 2; size <= world; size *= 2)
      if (try_change({fmt::format("{}={}", key, size)})) break;

  // A larger microbatch than one that fits alone, with one of the other changes.
  for (auto b = std::optional(batch); b && search.fits(with_micro(*b)) == std::nullopt;
       b = smaller_microbatch(*b)) {
    if (b->micro == batch.micro) continue;
    for (const Overrides& other : {most_recompute, most_sharding, bf16})
      if (!other.empty()) try_change(with_micro(*b) + other);
  }

  // No change alone is enough, or few are: together, the most of each.
  for (const Overrides& several :
       {least_micro + most_recompute, least_micro + most_sharding,
        least_micro + most_recompute + most_sharding, least_micro + most_recompute + most_sharding + bf16}) {
    const bool needless = std::any_of(found.begin(), found.end(), [&](const FittingChange& f) {
      return std::all_of(f.overrides.begin(), f.overrides.end(), [&](const std::string& o) {
        const std::string key = o.substr(0, o.find('=') + 1);
        return std::any_of(several.begin(), several.end(),
                           [&](const std::string& s) { return s.starts_with(key); });
      });
    });
    if (several.size() > 1 && !needless) try_change(several);
  }
  for (int64_t length = c.policy.max_total_sequence_length / 2; length >= 64; length /= 2)
    if (try_change({fmt::format("policy.max_total_sequence_length={}", length)})) break;
  return found;
}

std::vector<std::string> fitting_notes(std::span<const FittingChange> changes) {
  std::vector<std::string> notes;
  for (const FittingChange& change : changes) {
    std::string text;
    for (const std::string& o : change.overrides) {
      const size_t equals = o.find('=');
      text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", o.substr(0, equals), o.substr(equals + 1));
    }
    notes.push_back(
        fmt::format("fits: {} (a rank needs {})", text, human_bytes(static_cast<uint64_t>(change.bytes))));
  }
  return notes;
}

std::optional<BatchPlan> smaller_microbatch(const BatchPlan& batch) {
  if (batch.micro <= batch.unit || batch.micro % batch.unit != 0) return std::nullopt;
  const int64_t units = batch.micro / batch.unit;
  int64_t factor = 2;
  while (units % factor != 0) ++factor;
  BatchPlan out = batch;
  out.micro /= factor;
  out.accumulation *= factor;
  return out;
}

bool chooses_microbatch(const Config& config) {
  return config.policy.train_micro_batch_size.is_auto() && !config.policy.gradient_accumulation_steps;
}

}  // namespace nrl::train
