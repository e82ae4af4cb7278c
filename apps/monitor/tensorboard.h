#pragma once
// Event files of TensorBoard.

#include <memory>
#include <string>

#include "apps/monitor/sink.h"

namespace nrl::monitor {

/// Writes scalars, texts and hyperparameters to a new event file in `directory`, which is created if missing.
/// The file begins with a SessionLog START, at which TensorBoard drops the later steps of older files. No
/// other run may write to the directory. Format: tensorboard/compat/proto/event.proto, in TFRecords.
std::unique_ptr<Sink> tensorboard_sink(const std::string& directory, const RunInfo& run);

}  // namespace nrl::monitor
