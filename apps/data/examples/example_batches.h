#pragma once
// Microbatches of training examples: which examples a step has, how they are packed, and their rows.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "apps/data/examples/epoch_order.h"
#include "apps/data/examples/examples.h"
#include "apps/data/loader.h"
#include "apps/data/packing.h"

namespace nrl::data {

struct ExampleStep;

/// The numbers that an objective reads beside the tokens of examples: HostMicroBatch::sequence_values and
/// columns.
class StepNumbers {
 public:
  virtual ~StepNumbers() = default;
  /// Numbers of each row's entry in every column.
  virtual std::vector<int64_t> widths() const = 0;
  /// Numbers of the step that began, to be reported; the same on all ranks.
  virtual std::vector<std::pair<std::string, double>> metrics() const { return {}; }
  /// Called before the microbatches of a step, with its examples.
  virtual void begin_step(std::span<const int64_t> examples, const ExampleStep& step) = 0;
  /// Appends the numbers of a sequence, which has the last `rows` rows of the batch.
  virtual void append(int64_t example, int sequence, int64_t rows, HostMicroBatch& batch) = 0;
};

struct ExampleBatchOptions {
  int64_t global_batch = 1;      ///< examples per step
  int64_t consumed_samples = 0;  ///< position of the first one in the order
  bool shuffle = true;           ///< a new order in every epoch, else the set's order
  uint64_t seed = 0;             ///< of the order, and of packing
  bool repeat = true;            ///< epochs follow each other; else the last step may have fewer examples
  /// Ranks are data-parallel ranks, the capacity belongs to a microbatch; the seed is ignored.
  PackOptions packing = {};
  int rank = 0;                   ///< data-parallel rank
  int64_t most_microbatches = 1;  ///< per step and rank
  /// The least number of microbatches from this one on that a step may have; null: any.
  std::function<int64_t(int64_t microbatches)> rounded_up = {};
  int64_t most_rows = 1;                          ///< of a sequence
  bool pad_to_capacity = false;                   ///< every microbatch has as many rows as fit
  std::function<double(int64_t rows)> work = {};  ///< of a sequence, for balance; null: its rows
  /// Sequences are scored: every token is an input, and the row of the last one has the target 0.
  bool scores = false;
  std::shared_ptr<StepNumbers> numbers = nullptr;  ///< null: there are none
};

/// Counts of a step over all ranks, without padding.
struct ExampleStep {
  int64_t examples = 0;
  int64_t rows = 0;                      ///< input tokens
  int64_t loss_tokens = 0;               ///< targets with a loss
  int64_t microbatches = 0;              ///< of each rank
  double efficiency = 1, imbalance = 0;  ///< Packing
};

/// The steps of one rank. The examples of a step are those at the next positions of the order, whatever the
/// number of ranks and the packing. Every rank knows the counts of all from the lengths in the set, without
/// communication.
///
/// The sequences of an example adjoin in one microbatch. A sequence of n tokens has n - 1 rows: each of its
/// tokens but the last one is an input, whose target is the next token if that is in the loss. Sequences of a
/// microbatch are attention sequences of their own, with positions from 0. Rows of padding follow as
/// sequences of their own, without targets.
class ExampleBatches {
 public:
  ExampleBatches(std::shared_ptr<const Examples> examples, const ExampleBatchOptions& options);

  /// Packs the next step. Must not be called at the end of examples that are not repeated.
  const ExampleStep& begin_step();
  /// The next microbatch of the step, valid until the next call. Throws Error (`data`) that names the record
  /// if a token id is outside the vocabulary.
  const HostMicroBatch& next();
  /// Rows of the microbatch that next() returned which are not padding.
  int64_t rows() const { return rows_; }
  /// StepNumbers::metrics() of the step.
  std::vector<std::pair<std::string, double>> metrics() const;

 private:
  int64_t rows_of(SequenceLength length) const;
  void append(int64_t example, int sequence);

  std::shared_ptr<const Examples> examples_;
  ExampleBatchOptions options_;
  int64_t position_;
  EpochOrder order_;
  std::vector<int64_t> chosen_;  // examples of the step
  Packing packing_;
  ExampleStep step_;
  size_t next_bin_ = 0;
  HostMicroBatch batch_;
  int64_t rows_ = 0;
};

}  // namespace nrl::data
