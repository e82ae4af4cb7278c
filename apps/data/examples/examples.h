#pragma once
// Training examples of post-training: token ids and which of them have a loss.

#include <cstdint>
#include <span>
#include <string>

#include "apps/data/examples/example_counts.h"

namespace nrl::data {

/// Immutable; any number of threads may use one concurrently.
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
};

}  // namespace nrl::data
