#include "apps/model/spec/trained_part.h"

#include <algorithm>
#include <set>

#include <spdlog/fmt/fmt.h>

#include "apps/model/spec/parameters.h"

namespace nrl::model {

namespace {

/// The whole model without adapters.
ParameterList base_parameters(const ModelSpec& spec) {
  ModelSpec base = spec;
  base.trained = {};
  return make_parameters(base);
}

std::set<int> adaptable(const ParameterList& list) {
  std::set<int> out;
  for (const LayerParameters& layer : list.layers)
    for (const int p : {layer.qkv, layer.o, layer.mlp_in, layer.mlp_out})
      if (p >= 0) out.insert(p);
  return out;
}

/// The modules of matrices, apart by whether they can have adapters.
struct Modules {
  std::vector<std::string> adaptable, others;
};
Modules modules_of(const ParameterList& list) {
  const std::set<int> own = adaptable(list);
  Modules out;
  for (size_t p = 0; p < list.all.size(); ++p) {
    if (list.all[p].shape.size() != 2) continue;
    for (const Part& part : list.all[p].parts)
      (own.contains(static_cast<int>(p)) ? out.adaptable : out.others).emplace_back(module_of(part.name));
  }
  return out;
}

const std::string* find_selected(const std::vector<std::string>& modules, std::string_view pattern) {
  const auto at = std::find_if(modules.begin(), modules.end(),
                               [&](const std::string& name) { return selects(pattern, name); });
  return at == modules.end() ? nullptr : &*at;
}

void add_adapter_problems(const AdapterSpec& a, const ParameterList& list,
                          std::vector<TrainedPartProblem>& out) {
  const Modules modules = modules_of(list);
  constexpr const char *targets = "policy.lora.target_modules", *excludes = "policy.lora.exclude_modules";
  const std::string advice = fmt::format("modules look like {}", modules.adaptable.front());
  for (const std::string& pattern : a.targets) {
    if (pattern == all_linear) continue;
    if (const std::string* other = find_selected(modules.others, pattern))
      out.push_back(
          {targets,
           fmt::format("{}: \"{}\" selects {}, which cannot have an adapter", targets, pattern, *other),
           "adapters belong to the matrices of attention and of dense MLPs; embeddings, the output "
           "projection, routers and experts have none: name those modules, or use all-linear"});
    else if (!find_selected(modules.adaptable, pattern))
      out.push_back(
          {targets, fmt::format("{}: \"{}\" selects no module of this model", targets, pattern), advice});
  }
  for (const std::string& pattern : a.excludes)
    if (!find_selected(modules.adaptable, pattern) && !find_selected(modules.others, pattern))
      out.push_back(
          {excludes, fmt::format("{}: \"{}\" selects no module of this model", excludes, pattern), advice});
  if (out.empty() && std::none_of(modules.adaptable.begin(), modules.adaptable.end(),
                                  [&](const std::string& name) { return a.selects(name); }))
    out.push_back({targets, "no module has an adapter, so that there is nothing to train",
                   "give other policy.lora.target_modules, or fewer exclude_modules"});
}

void add_frozen_problems(const TrainedPart& trained, const ParameterList& list,
                         std::vector<TrainedPartProblem>& out) {
  constexpr const char* key = "policy.freeze";
  for (const std::string& pattern : trained.frozen) {
    const bool any = std::any_of(list.all.begin(), list.all.end(), [&](const Parameter& p) {
      return std::any_of(p.parts.begin(), p.parts.end(), [&](const Part& part) {
        return selects(pattern, part.name) || selects(pattern, module_of(part.name));
      });
    });
    if (!any)
      out.push_back({key, fmt::format("{}: \"{}\" selects no tensor of this model", key, pattern),
                     fmt::format("tensors look like {}", list.all.back().parts.front().name)});
  }
  bool trains = false;
  for (const Parameter& p : list.all) {
    const Part *frozen = nullptr, *free = nullptr;
    for (const Part& part : p.parts) (trained.freezes(part.name) ? frozen : free) = &part;
    trains = trains || (free && p.trainable);
    if (frozen && free)
      out.push_back({key,
                     fmt::format("{} freezes {} but not {}, and both are one matrix here", key, frozen->name,
                                 free->name),
                     "freeze both or neither"});
  }
  if (list.embedding >= 0 && list.positions >= 0) {
    const auto freezes = [&](int p) { return trained.freezes(list.all[p].parts.front().name); };
    if (freezes(list.embedding) && !freezes(list.positions))
      out.push_back({key,
                     fmt::format("{} freezes {} but not {}, whose gradients are computed together", key,
                                 list.all[list.embedding].parts.front().name,
                                 list.all[list.positions].parts.front().name),
                     "freeze both, or the positions alone"});
  }
  if (!trains)
    out.push_back({key, fmt::format("{} freezes the whole model", key), "leave something to train"});
}

}  // namespace

std::vector<TrainedPartProblem> trained_part_problems(const ModelSpec& spec) {
  std::vector<TrainedPartProblem> out;
  const TrainedPart& t = spec.trained;
  if (!t.adapters && t.frozen.empty()) return out;
  const ParameterList list = base_parameters(spec);
  if (t.adapters)
    add_adapter_problems(t.adapters, list, out);
  else
    add_frozen_problems(t, list, out);
  return out;
}

void count_trained(ModelSpec& spec) {
  TrainedPart& t = spec.trained;
  t.frozen_products = t.adapter_products = 0;
  if (!t.adapters && t.frozen.empty()) return;
  const ParameterList list = make_parameters(spec);
  for (size_t p = 0; p < list.all.size(); ++p) {
    const Parameter& parameter = list.all[p];
    // A lookup is no product.
    const bool looked_up = (static_cast<int>(p) == list.embedding && list.head != list.embedding) ||
                           static_cast<int>(p) == list.positions;
    // A scalar head beside adapters is a product of the model.
    const bool head = parameter.adapter && static_cast<int>(p) == list.head;
    if (parameter.shape.size() != 2 || looked_up || head) continue;
    auto elements = static_cast<double>(parameter.numel());
    if (parameter.of_experts)
      elements *= static_cast<double>(spec.moe.rule.top_k) / static_cast<double>(spec.moe.experts);
    if (parameter.adapter)
      t.adapter_products += elements;
    else if (!parameter.trainable)
      t.frozen_products += elements;
  }
}

}  // namespace nrl::model
