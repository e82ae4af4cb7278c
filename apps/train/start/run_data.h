#pragma once
// The training and validation data of a run.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/data/examples/example_set.h"
#include "apps/data/examples/examples.h"
#include "apps/data/examples/prompts.h"
#include "apps/data/examples/sequence_numbers.h"
#include "apps/data/gpt_dataset.h"
#include "apps/data/loader.h"
#include "apps/plan/batch.h"
#include "apps/plan/grid_position.h"
#include "core/config/load.h"
#include "parallel/grid/groups.h"

namespace nrl::train {

/// The training data of a run, as the step loop reads it and `data show` prints it.
struct TrainData {
  data::DatasetOptions options;  ///< with open files
  int64_t samples = 0;           ///< number of samples in the data order
  int64_t epoch_samples = 0;     ///< samples per epoch
  int64_t max_steps = 0;         ///< of the run, from pretrain.max_num_steps and max_num_epochs
  std::unique_ptr<data::TokenDataset> dataset;  ///< null after plan_train_data()
  /// With an algorithm that trains on examples, instead of dataset and options.
  std::shared_ptr<const data::Examples> examples;
  std::shared_ptr<const data::SequenceNumbers> reference;  ///< of the examples, if the objective needs one
  /// With a policy that generates its rollouts (generates_rollouts()), instead of examples.
  std::shared_ptr<const data::Prompts> prompts;
};
/// Everything except the dataset. Of token files only.
TrainData plan_train_data(const Config& config, int64_t vocab_size, int64_t global_batch);
/// How examples are tokenized that are not in their cache.
struct ExampleOpening {
  int threads = 1;
  std::function<void(const data::ExampleProgress&)> progress = {};
  /// Called with every set: "data.train" or "data.validation".
  std::function<void(std::string_view key, const data::ExampleSet&)> opened = {};
};
TrainData open_train_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                          const ExampleOpening& opening = {});
/// The options of the examples of the training or validation data.
data::ExampleOptions example_options(const Config& config, bool validation, int64_t vocab_size);
/// Replaces the order by one of `samples` samples, regardless of max_steps (for a run that resumes with
/// another batch size). Keeps the files open.
void extend_train_data(TrainData& train, int64_t samples);

/// The validation data of a run that evaluates.
struct ValidationData {
  data::DatasetOptions options;  ///< with open files, shared with the training data where they are the same
  int64_t batches = 0;           ///< global batches per evaluation
  int64_t epoch_samples = 0;     ///< samples per epoch
  std::unique_ptr<data::TokenDataset> dataset;     ///< null after plan_validation_data()
  std::shared_ptr<const data::Examples> examples;  ///< see TrainData
  std::shared_ptr<const data::SequenceNumbers> reference;
  std::shared_ptr<const data::Prompts> prompts;
};
/// Everything except the dataset; unset if the run does not evaluate. Of token files only.
std::optional<ValidationData> plan_validation_data(const Config& config, const TrainData& train,
                                                   int64_t global_batch);
std::optional<ValidationData> open_validation_data(const Config& config, const TrainData& train,
                                                   int64_t vocab_size, int64_t global_batch,
                                                   const ExampleOpening& opening = {});

/// Selects the samples of the rank at `position` by its data-parallel coordinate, so that all ranks of a
/// model replica read the same ones. The caller sets steps and consumed_samples.
data::LoaderOptions make_loader_options(const Config& config, const BatchPlan& batch,
                                        const plan::GridPosition& position);

/// Overrides for steps on random tokens: no file need exist, and nothing is evaluated.
std::vector<std::string> random_token_overrides();

/// Overrides for a run of `steps` steps and nothing else: no evaluations, text samples or checkpoints.
std::vector<std::string> steps_only_overrides(int64_t steps);

/// Tokens with a loss in a global batch of `tokens_per_step` tokens, at least 1. `mine`: the sum over this
/// rank's microbatches. Collective over the data-parallel ranks if documents mask losses.
int64_t loss_tokens_of_all(const data::TokenDataset& dataset, int64_t tokens_per_step,
                           const plan::BatchCounts& mine, const parallel::Groups& ranks,
                           const model::ModelLayout& layout);

}  // namespace nrl::train
