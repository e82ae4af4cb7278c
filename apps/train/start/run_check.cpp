#include "apps/train/start/run_check.h"

#include <optional>
#include <utility>

#include "apps/check/check.h"
#include "apps/plan/memory_check.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/start/document_rules.h"

namespace nrl::train {
namespace {

/// Why document_rules() fails; unset where it does not.
std::optional<Error> document_problem(const ConfigResult& result) {
  for (const char* key : {"data.train.data_path", "data.validation.data_path", "policy.tokenizer.name"})
    if (!result.sound(key)) return std::nullopt;
  try {
    document_rules(result.config);
  } catch (const Error& e) {
    return e;
  }
  return std::nullopt;
}

}  // namespace

std::optional<model::ModelSpec> check_but_memory(ConfigResult& result, const RunSetting& setting) {
  if (setting.grid && setting.world > 0)
    result.add(validate_for_world(result, setting.world, setting.nodes, setting.count));
  const ModelCheck model = check_model(result);
  result.add(model.problems);
  const DeviceChoice device = choose_device(result.config.device);
  check::Facts facts{.result = result,
                     .model = model.spec ? &*model.spec : nullptr,
                     .gpu = device.type == DeviceType::cuda,
                     .why_no_gpu = device.why_no_gpu,
                     .world = setting.world,
                     .documents = document_problem(result)};
  result.add(check::check_inputs(facts, setting.files, setting.training));
  if (!facts.model) return std::nullopt;
  if (!setting.grid) facts.world = 0;
  result.add(check::check_model(facts));
  if (!result.ok() || facts.world == 0) return model.spec;
  result.add(check::check_ranks(facts));
  if (!result.ok()) return model.spec;
  // Sizes beyond this cannot even be planned.
  constexpr double any_machine = 0x1p50;
  const BatchPlan batch = resolve_batch(result.config, facts.world);
  if (auto shortage = plan::memory_shortage(
          result, *facts.model, batch, plan::minimum_memory(result.config, *facts.model, batch, device.type),
          any_machine, "any machine"))
    result.add({std::move(*shortage)});
  return model.spec;
}

}  // namespace nrl::train
