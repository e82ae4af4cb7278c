#pragma once
// The teacher's log-probabilities as columns of the rows of examples (algorithm distill).

#include <memory>

#include "apps/data/examples/example_batches.h"

namespace nrl::train {

/// model::TeacherColumn of examples that have at least `topk` ids per token: the most probable `topk` of
/// them, in the order of the examples.
std::shared_ptr<data::StepNumbers> teacher_numbers(std::shared_ptr<const data::Examples> examples,
                                                   int64_t topk);

}  // namespace nrl::train
