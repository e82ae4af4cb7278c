#pragma once
// Whether a GPU multiplies the FP8 operands of a configuration.

#include "apps/model/spec.h"
#include "apps/plan/device_models.h"
#include "core/config/result.h"

namespace nrl::plan {

/// An error if no GPU runs what policy.fp8_cfg gives FP8 operands in this model.
Diagnostics check_fp8_on_gpus(const ConfigResult& result, const model::ModelSpec& spec);

/// The same of `gpu`.
Diagnostics check_fp8(const ConfigResult& result, const model::ModelSpec& spec, const DeviceModel& gpu);

}  // namespace nrl::plan
