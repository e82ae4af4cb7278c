#pragma once
// Numbers of the sequences of training examples, such as a model's log-probabilities.

#include <cstdint>
#include <span>
#include <vector>

#include "apps/data/examples/examples.h"

namespace nrl::data {

class SequenceNumbers {
 public:
  enum class Kind : uint8_t {
    one,     ///< one number of each sequence
    by_row,  ///< one of each row of a sequence (ExampleBatches), that is of every token but the first
  };
  /// All zero.
  SequenceNumbers(const Examples& examples, Kind kind);

  Kind kind() const { return kind_; }
  std::span<double> of(int64_t example, int sequence) {
    const size_t i = index(example, sequence);
    return std::span(values_).subspan(first_[i], first_[i + 1] - first_[i]);
  }
  std::span<const double> of(int64_t example, int sequence) const {
    const size_t i = index(example, sequence);
    return std::span(values_).subspan(first_[i], first_[i + 1] - first_[i]);
  }
  /// All numbers, in the order of the examples.
  std::span<double> all() { return values_; }
  std::span<const double> all() const { return values_; }

 private:
  size_t index(int64_t example, int sequence) const {
    return static_cast<size_t>(example * sequences_ + sequence);
  }

  Kind kind_;
  int sequences_;
  std::vector<size_t> first_{0};  // of each sequence, and the end
  std::vector<double> values_;
};

}  // namespace nrl::data
