// Rules about layers and modules that recomputation and offloading name.
#include <algorithm>

#include "apps/check/rule.h"
#include "apps/model/chunks.h"

namespace nrl::check {
namespace {

using Layers = std::optional<std::vector<int64_t>>;
constexpr const char *recomputed = "policy.recompute.modules", *offloaded = "policy.offload_modules",
                     *granularity = "policy.recompute.granularity";

std::vector<BlockModule> recomputed_modules(const PolicyConfig& p) {
  return p.recompute.modules.value_or({});
}
std::vector<BlockModule> offloaded_modules(const PolicyConfig& p) {
  return p.offload_modules;
}

/// Every module that a key names exists in some layer.
Rule matches(const char* key, std::vector<BlockModule> (*modules_of)(const PolicyConfig&)) {
  return {
      {key}, [=](const Facts& f) {
        const std::vector<BlockModule> modules = modules_of(f.policy());
        const auto has = [&](BlockModule m) {
          return std::find(modules.begin(), modules.end(), m) != modules.end();
        };
        Verdict out;
        if (f.spec().moe.experts == 0 && has(BlockModule::moe))
          out.push_back({fmt::format("{}: moe matches nothing: a {} model has no experts", key,
                                     name_of(f.spec().family))});
        if (f.spec().expert_layers() == f.spec().layers && has(BlockModule::mlp))
          out.push_back({fmt::format("{}: mlp matches nothing: all layers of the model have experts", key)});
        return out;
      }};
}

Rule layers_exist(const char* key, const Layers PolicyConfig::*named) {
  return {{key}, [=](const Facts& f) {
            Verdict out;
            for (const int64_t layer : (f.policy().*named).value_or(std::vector<int64_t>{}))
              if (layer >= f.spec().layers)
                out.push_back({fmt::format("{} has layer {}, but the model has {} layers: 0 to {}", key,
                                           layer, f.spec().layers, f.spec().layers - 1)});
            return out;
          }};
}

/// A key of the layers that are not recomputed whole, where checkpoint_layers names all.
Rule needs_other_layers(const char* key, bool (*is_set)(const RecomputeConfig&)) {
  return {{key}, [=](const Facts& f) -> Verdict {
            const Layers& named = f.policy().checkpoint_layers;
            if (!named || std::ssize(*named) != f.spec().layers || !is_set(f.policy().recompute)) return {};
            return {{fmt::format("{} has no effect: policy.checkpoint_layers names all {} layers", key,
                                 f.spec().layers)}};
          }};
}

Rule at_most_layers(const char* key, std::optional<int64_t> (*count_of)(const PolicyConfig&)) {
  return {{key}, [=](const Facts& f) -> Verdict {
            const std::optional<int64_t> count = count_of(f.policy());
            if (!count || *count <= f.spec().layers) return {};
            return {{fmt::format("{} is {}, but the model has {} layers", key, *count, f.spec().layers)}};
          }};
}

/// An activation in the epilogue of a GEMM, where there is none.
Verdict judge_fused_activation(const Facts& f) {
  const AutoOr<bool>& fused = f.policy().fusions.bias_activation;
  const model::ModelSpec& m = f.spec();
  if (fused.is_auto() || model::has_fused_activation(m, f.gpu ? DeviceType::cuda : DeviceType::cpu))
    return {};
  const std::string where = !f.gpu    ? "on a CPU"
                            : m.gated ? "in MLPs with gates"
                                      : "for activations other than gelu_tanh";
  return {{.reason = fmt::format("policy.fusions.bias_activation: {} has no effect: {} the activation is a "
                                 "kernel of its own",
                                 fused.value(), where),
           .severity = fused.value() ? Severity::warning : Severity::error}};
}

const Rule layer_table[] = {
    {{"policy.fusions.bias_activation"}, judge_fused_activation},
    matches(recomputed, recomputed_modules),
    layers_exist("policy.checkpoint_layers", &PolicyConfig::checkpoint_layers),
    needs_other_layers(recomputed, [](const RecomputeConfig& r) { return !r.modules.is_auto(); }),
    needs_other_layers(
        granularity,
        [](const RecomputeConfig& r) { return r.granularity != RecomputeGranularity::automatic; }),
    matches(offloaded, offloaded_modules),
    layers_exist("policy.offload_layers", &PolicyConfig::offload_layers),
    at_most_layers("policy.checkpoint_every", [](const PolicyConfig& p) { return p.checkpoint_every; }),
    at_most_layers("policy.recompute.num_layers",
                   [](const PolicyConfig& p) { return p.recompute.num_layers; }),
};

}  // namespace

std::span<const Rule> layer_rules() {
  return layer_table;
}

}  // namespace nrl::check
