#pragma once
// Where the microbatches of steps and evaluations come from.

#include <memory>
#include <vector>

#include "apps/data/examples/example_batches.h"
#include "apps/data/loader.h"
#include "apps/engine/engine.h"
#include "apps/monitor/facts.h"
#include "apps/train/start/run_data.h"

namespace nrl::train {

/// The microbatches of a rank in one global batch after another.
class StepSource {
 public:
  virtual ~StepSource() = default;
  /// Goes to the next global batch. Returns the number of this rank's microbatches, the same on all ranks.
  virtual int64_t begin() = 0;
  struct Item {
    const data::HostMicroBatch& batch;  ///< valid until the next call
    int64_t first_sample = 0;           ///< index of its first sample in the global batch
    float share = 1;                    ///< model::MicroBatch::share of packed sequences
  };
  /// The next microbatch of the global batch.
  virtual Item next() = 0;
  /// Counts of a global batch over all ranks.
  struct Totals {
    int64_t tokens = 0;       ///< inputs, without padding
    int64_t loss_tokens = 0;  ///< targets with a loss
    int64_t examples = 0;     ///< samples, or examples of any lengths
    double efficiency = 1;    ///< tokens relative to those that the microbatches have room for
    double imbalance = 0;     ///< largest work of a data-parallel rank relative to their mean, - 1
    std::vector<monitor::Metric> metrics = {};  ///< to be reported with the step
    bool generated = false;                     ///< its data were generated on the device before it
    engine::LossCounts counts() const {
      return {.tokens = static_cast<double>(loss_tokens), .examples = static_cast<double>(examples)};
    }
  };
  /// After the last microbatch of a global batch. Collective.
  virtual Totals totals() = 0;
  /// False between global batches that belong together: a run neither stops nor saves there.
  virtual bool complete() const { return true; }
};

/// Samples of equal length of token files. `dataset` and `groups` must outlive the source.
class TokenSource final : public StepSource {
 public:
  TokenSource(const data::TokenDataset& dataset, const data::LoaderOptions& loading,
              const parallel::Groups& groups, const plan::RunPlan& plan);
  int64_t begin() override;
  Item next() override;
  Totals totals() override;

 private:
  data::BatchLoader loader_;
  const data::TokenDataset& dataset_;
  const data::LoaderOptions loading_;
  const parallel::Groups& groups_;
  const plan::RunPlan& plan_;
  int64_t next_ = 0;
  plan::BatchCounts counts_;
};

/// Examples of any lengths.
class ExampleSource final : public StepSource {
 public:
  explicit ExampleSource(std::unique_ptr<data::ExampleBatches> batches) : batches_(std::move(batches)) {}
  int64_t begin() override;
  Item next() override;
  Totals totals() override;

 private:
  std::unique_ptr<data::ExampleBatches> batches_;
  data::ExampleStep step_;
};

/// Steps of any examples. `options`: everything that does not follow from configuration and plan.
std::unique_ptr<StepSource> example_source(const Config& config,
                                           std::shared_ptr<const data::Examples> examples,
                                           const plan::RunPlan& plan, data::ExampleBatchOptions options);
/// The steps of a run from `consumed_samples` on; at most `steps` of them are read.
std::unique_ptr<StepSource> training_source(const Config& config, const TrainData& data,
                                            const plan::RunPlan& plan, const parallel::Groups& groups,
                                            int64_t consumed_samples, int64_t steps);
/// The global batches of one evaluation.
std::unique_ptr<StepSource> validation_source(const Config& config, const ValidationData& data,
                                              const plan::RunPlan& plan, const parallel::Groups& groups);
/// All examples once, in their order, packed: steps of `at_once` examples, the last one of fewer.
std::unique_ptr<StepSource> stored_examples_source(const Config& config,
                                                   std::shared_ptr<const data::Examples> examples,
                                                   const plan::RunPlan& plan, int64_t at_once);

/// Sets the microbatches of the engine's next step.
struct FilledStep {
  StepSource::Totals totals;
  double keys = 0;  ///< mean number of keys that a token of this rank attends to
};
FilledStep fill_step(engine::Engine& engine, StepSource& source);

}  // namespace nrl::train
