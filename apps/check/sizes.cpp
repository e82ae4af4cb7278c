// Rules about sizes of the model: its positions, the parts of tensor-parallel ranks, and the data's
// vocabulary.
#include <algorithm>
#include <numeric>

#include "apps/check/check.h"
#include "apps/check/rule.h"
#include "apps/data/manifest.h"
#include "apps/plan/grid_position.h"
#include "apps/plan/run_plan.h"
#include "core/base/text.h"

namespace nrl::check {
namespace {

Verdict judge_length(const Facts& f) {
  const int64_t length = f.policy().max_total_sequence_length;
  if (!f.spec().learned_positions || length <= f.spec().max_positions) return {};
  return {{fmt::format("policy.max_total_sequence_length is {}, but the model has {} positions", length,
                       f.spec().max_positions)}};
}

Verdict judge_tensor_parallel(const Facts& f) {
  const model::ModelSpec& spec = f.spec();
  const int64_t ranks = f.distributed().tensor_parallel_size;
  std::string reasons;
  int64_t common = 0;
  const bool dense = spec.expert_layers() < spec.layers;
  for (const auto& [what, size] :
       {std::pair("attention heads", spec.heads), std::pair("key/value heads", spec.kv_heads),
        std::pair("columns of the MLP", dense ? spec.ffn : 0),
        std::pair("columns of the shared expert", spec.moe.shared_ffn)}) {
    common = std::gcd(common, size);
    if (size % ranks != 0) reasons += fmt::format("{}{} {}", reasons.empty() ? "" : ", ", size, what);
  }
  if (ranks > spec.vocab_size)
    reasons += fmt::format("{}{} tokens", reasons.empty() ? "" : ", ", spec.vocab_size);
  if (reasons.empty()) return {};
  std::string fitting;
  for (int64_t n = 1; n <= std::min(common, spec.vocab_size); ++n)
    if (common % n == 0) fitting += fmt::format("{}{}", fitting.empty() ? "" : ", ", n);
  return {{fmt::format("distributed.tensor_parallel_size is {}, which does not divide the model: it has {}",
                       ranks, reasons),
           {fmt::format("fits: {}", fitting)}}};
}

Verdict judge_vocabulary(const Facts& f, const DatasetConfig& set) {
  Verdict out;
  for (const std::string& prefix : set.data_path) {
    try {
      const auto manifest = data::read_manifest(prefix);
      if (!manifest || manifest->vocab_size <= f.spec().vocab_size) continue;
      const std::string size = "policy.model.vocab_size";
      out.push_back(
          {.reason = fmt::format("the vocabulary of the data has {} tokens, but that of the model only {}",
                                 manifest->vocab_size, f.spec().vocab_size),
           .remedy = {fmt::format("set {} to {} or more, or prepare the data with the model's tokenizer",
                                  size, manifest->vocab_size)},
           .label = fmt::format("{} was made with {} tokens", clipped(prefix), manifest->vocab_size),
           .key = f.result.given(size) ? size : ""});
    } catch (const Error& e) {
      out.push_back({.reason = e.what(), .exit = e.code()});
    }
  }
  return out;
}

/// The most elements of optimizer state that one of these ranks has; 0 if one of them moves some of it.
int64_t state_that_stays(const Facts& f) {
  const Config& c = f.config();
  const DeviceType device = f.gpu ? DeviceType::cuda : DeviceType::cpu;
  const precision::Recipe recipe = plan::recipe_for(c, device, f.spec().layers);
  int64_t most = 0;
  for (const int rank : plan::typical_ranks(c, f.world)) {
    const plan::GridPosition position = plan::grid_position(c, f.world, rank);
    model::ParameterList parameters =
        model::make_parameters(f.spec(), plan::model_layout(c, f.spec(), position, device));
    // Groups take long to make where there are many parameters, of which any share is enough.
    constexpr double most_groups = 16;
    double held = 0;
    for (const model::Parameter& p : parameters.all) held += static_cast<double>(p.numel());
    if (c.policy.offload_optimizer.value * held / f.world / most_groups >=
        static_cast<double>(plan::offload_unit))
      return 0;
    model::keep_in_fp8(recipe, parameters);
    memory::MemoryPlan memory;
    int64_t state = 0;
    for (const plan::ParamGroup& group : plan::make_param_groups(
             parameters,
             [&](const std::string& name) { return plan::group_options(c, position, recipe, name); },
             memory)) {
      if (group.offloaded_elements > 0) return 0;
      state += group.state_elements();
    }
    most = std::max(most, state);
  }
  return most;
}

Verdict judge_offloaded_share(const Facts& f) {
  const double share = f.policy().offload_optimizer.value;
  const int64_t state = share == 0 ? 0 : state_that_stays(f);
  if (state == 0) return {};
  const auto elements = static_cast<double>(state), unit = static_cast<double>(plan::offload_unit);
  return {{fmt::format("policy.offload_optimizer: {} moves nothing: that is {:.3g} of {} elements of a rank, "
                       "and is rounded down to a multiple of {}",
                       share, share * elements, grouped(state), plan::offload_unit),
           {fmt::format("Fix: {:.2g} or more, or false", std::min(1.0, 1.05 * unit / elements))}}};
}

const Rule size_table[] = {
    {{"policy.max_total_sequence_length"}, judge_length},
    {{"distributed.tensor_parallel_size"}, judge_tensor_parallel},
    {{"data.train.data_path"}, [](const Facts& f) { return judge_vocabulary(f, f.config().data.train); }},
    {{"data.validation.data_path"},
     [](const Facts& f) { return judge_vocabulary(f, f.config().data.validation); }},
};
const Rule rank_table[] = {{{"policy.offload_optimizer"}, judge_offloaded_share}};

}  // namespace

std::span<const Rule> size_rules() {
  return size_table;
}

Diagnostics check_ranks(const Facts& facts) {
  return judge(rank_table, facts);
}

}  // namespace nrl::check
