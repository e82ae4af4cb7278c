#include "apps/data/examples/epoch_order.h"

#include <numeric>
#include <span>

#include "apps/data/numpy_random.h"

namespace nrl::data {

int64_t EpochOrder::at(int64_t position) {
  const int64_t epoch = position / size_, index = position % size_;
  if (!shuffle_) return index;
  if (epoch != epoch_) {
    order_.resize(static_cast<size_t>(size_));
    std::iota(order_.begin(), order_.end(), 0);
    // Seeds of neighboring epochs must give unrelated orders, which the seeding of the generator provides.
    NumpyRandomState(static_cast<uint32_t>(seed_ + static_cast<uint64_t>(epoch))).shuffle(std::span(order_));
    epoch_ = epoch;
  }
  return order_[static_cast<size_t>(index)];
}

}  // namespace nrl::data
