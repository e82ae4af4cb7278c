#pragma once
// Training examples of post-training: token ids, which of them have a loss, and numbers of theirs.

#include <cstdint>
#include <span>
#include <string>

#include "apps/data/examples/example_counts.h"
#include "apps/data/examples/example_numbers.h"

namespace nrl::data {

/// Immutable; any number of threads may use one concurrently. Spans are valid as long as the examples.
class Examples {
 public:
  virtual ~Examples() = default;
  virtual int64_t size() const = 0;
  virtual int sequences_per_example() const = 0;  ///< 1; 2 for preferences, the chosen one first
  virtual SequenceLength length(int64_t example, int sequence) const = 0;
  virtual std::span<const int32_t> ids(int64_t example, int sequence) const = 0;
  /// True if token `token` is predicted, from those before it, with loss; never the first token.
  virtual bool in_loss(int64_t example, int sequence, int64_t token) const = 0;
  virtual std::string where(int64_t example) const = 0;  ///< "FILE:line" of the record
  virtual bool rendered() const = 0;                     ///< a chat template made them of conversations
  /// For the log: number, source, lengths.
  virtual std::string describe() const = 0;

  /// The numbers that examples have. Columns of tokens and groups need sequences_per_example() == 1.
  virtual ExampleColumns columns() const { return {}; }
  /// 0 without such a column.
  virtual double value(int64_t /*example*/, ExampleValue /*value*/) const { return 0; }
  /// [tokens]: the natural logarithm of the probability with which `kind` predicts each token from those
  /// before it; 0 for tokens without a loss. Empty without such a column.
  virtual std::span<const float> log_probs(int64_t /*example*/, TokenLogProbs /*kind*/) const { return {}; }
  /// Examples with the same number, which are consecutive, are completions of one prompt. The first group
  /// is 0, the next one 1. Without groups each example is one.
  virtual int64_t group(int64_t example) const { return example; }
  /// [loss_tokens * columns().top_k]: for each token with a loss, in order, the teacher's most probable ids
  /// in its place and the natural logarithms of their probabilities. Ids are distinct in each token. Empty
  /// without a teacher.
  virtual std::span<const int32_t> top_ids(int64_t /*example*/) const { return {}; }
  virtual std::span<const float> top_log_probs(int64_t /*example*/) const { return {}; }
};

}  // namespace nrl::data
