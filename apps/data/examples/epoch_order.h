#pragma once
// The order in which examples or prompts are taken, epoch by epoch.

#include <cstdint>
#include <vector>

namespace nrl::data {

class EpochOrder {
 public:
  /// An order of `size` things, at least 1. shuffle: another one in every epoch, by the seed.
  EpochOrder(int64_t size, bool shuffle, uint64_t seed) : size_(size), shuffle_(shuffle), seed_(seed) {}
  /// The thing at a position, counted over all epochs.
  int64_t at(int64_t position);

 private:
  int64_t size_;
  bool shuffle_;
  uint64_t seed_;
  int64_t epoch_ = -1;
  std::vector<int32_t> order_;  // of epoch_
};

}  // namespace nrl::data
