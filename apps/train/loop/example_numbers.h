#pragma once
// The numbers that each algorithm's objective reads beside the tokens of examples, with its normalizers.

#include <memory>

#include "apps/data/examples/example_batches.h"
#include "apps/data/examples/sequence_numbers.h"
#include "core/config/config.h"

namespace nrl::train {

/// Null if the objective reads tokens only. `reference` may be null: its numbers are then 0. All counts that
/// normalizers divide by are of a global batch, so that a step does not depend on how it is divided.
/// `old`: by row, the log-probabilities of rollouts before the update; null: the examples have them.
std::shared_ptr<data::StepNumbers> example_numbers(
    const Config& config, std::shared_ptr<const data::Examples> examples,
    std::shared_ptr<const data::SequenceNumbers> reference,
    std::shared_ptr<const data::SequenceNumbers> old = nullptr);

}  // namespace nrl::train
