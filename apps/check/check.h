#pragma once
// All refusals of a run that need more facts than its configuration has, in levels: inputs and model, then
// ranks. A level reports all its problems together and is judged only if those before it have no errors.

#include <string>

#include "apps/check/facts.h"
#include "apps/machine/device_models.h"

namespace nrl::check {

/// The inputs: files that the configuration names (`files`), variables of the environment (`training`: also
/// those that only a training run would ignore), and the ends of documents.
Diagnostics check_inputs(const Facts& facts, bool files, bool training);
/// The configuration against the model.
Diagnostics check_model(const Facts& facts);
/// The configuration against the ranks. It must have no other problems.
Diagnostics check_ranks(const Facts& facts);
/// FP8 operands against a GPU.
Diagnostics check_fp8_on_gpu(const ConfigResult& result, const model::ModelSpec& spec,
                             const machine::DeviceModel& gpu);

/// Why smaller microbatches would change the training of this model; empty where they do not.
std::string microbatch_dependence(const model::ModelSpec& spec);

}  // namespace nrl::check
