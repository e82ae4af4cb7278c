#pragma once
// Everything that the rules of a run judge, gathered once.

#include <optional>
#include <string>

#include "apps/model/spec/spec.h"
#include "core/base/error.h"
#include "core/config/load.h"

namespace nrl::check {

/// Gathered by train::check_run().
struct Facts {
  const ConfigResult& result;
  const model::ModelSpec* model = nullptr;  ///< unset: not known, or not needed by the level
  bool gpu = false;                         ///< the device of the run on this machine
  std::string why_no_gpu = {};
  int world = 0;                        ///< ranks, which must suit the configuration; 0: not known
  std::optional<Error> documents = {};  ///< why the end tokens of the documents cannot be told

  const Config& config() const { return result.config; }
  const DistributedConfig& distributed() const { return result.config.distributed; }
  const PolicyConfig& policy() const { return result.config.policy; }
  const model::ModelSpec& spec() const { return *model; }
};

}  // namespace nrl::check
