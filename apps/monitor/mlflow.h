#pragma once
// Runs in a file store of MLflow.

#include <memory>
#include <string>

#include "apps/monitor/sink.h"
#include "core/config/config.h"

namespace nrl::monitor {

/// Writes a run to the file store in `directory` (mlflow/store/tracking/file_store.py), which is created if
/// missing, under the experiment `experiment_name`; texts are artifacts. A run that exists is continued:
/// metrics of superseded steps are removed from its files. MLflow 3.13 and later read a file store only with
/// MLFLOW_ALLOW_FILE_STORE=true, or after `mlflow migrate-filestore`.
std::unique_ptr<Sink> mlflow_sink(const std::string& directory, const MlflowConfig& config,
                                  const RunInfo& run);

/// The directory of a file store: `uri` without "file://".
std::string mlflow_directory(const std::string& uri);

}  // namespace nrl::monitor
