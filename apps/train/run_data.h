#pragma once
// The training and validation data of a run.

#include <memory>
#include <optional>

#include "apps/data/gpt_dataset.h"
#include "apps/data/loader.h"
#include "apps/plan/grid_place.h"
#include "core/config/load.h"

namespace nrl::train {

/// The training data of a run: what the step loop reads and `data show` prints.
struct TrainData {
  data::DatasetOptions options;  ///< with open files
  int64_t samples = 0;           ///< the data order is made for
  int64_t epoch_samples = 0;     ///< of one pass over the data
  int64_t max_steps = 0;         ///< of the run, from pretrain.max_num_steps and max_num_epochs
  std::unique_ptr<data::TokenDataset> dataset;  ///< null when only planned
};
/// All but the dataset itself. `at_least`: samples that are needed whatever max_steps says (a run that
/// resumes after its batch was changed).
TrainData plan_train_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                          int64_t at_least = 1);
TrainData open_train_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                          int64_t at_least = 1);

/// The validation data of a run that evaluates.
struct ValidationData {
  data::DatasetOptions options;  ///< with open files, those of the training data where they are the same
  int64_t batches = 0;           ///< global batches of an evaluation
  int64_t epoch_samples = 0;     ///< of one pass over the data
  std::unique_ptr<data::TokenDataset> dataset;  ///< null when only planned
};
/// Nothing when the run does not evaluate. All but the dataset itself.
std::optional<ValidationData> plan_validation_data(const Config& config, const TrainData& train,
                                                   int64_t global_batch);

/// Which samples the rank at `place` reads: its share by the data-parallel coordinate, so that ranks that
/// share a model replica read the same ones. The caller sets steps and consumed_samples.
data::LoaderOptions make_loader_options(const Config& config, const BatchPlan& batch,
                                        const plan::GridPlace& place);

}  // namespace nrl::train
