#pragma once
// Rows in the order of the experts that get them (core/ops/grouped_linear.h).

#include "apps/model/program/layer.h"

namespace nrl::model {

class GroupedRows {
 public:
  virtual ~GroupedRows() = default;

  /// The rows of a slot that are in use.
  virtual Tensor rows(const Run& r, Slot slot) const { return r[slot]; }
  /// (L + 1) i32: the rows of local expert l are [offsets[l], offsets[l + 1]).
  Tensor offsets_of(const Run& r) const {
    return values(r, offsets, offsets_at_ + r.round() * round_values_, offsets_count_);
  }
  int64_t own_experts() const { return offsets_count_ - 1; }  ///< L

  Slot offsets;  ///< named by steps that read offsets_of()

 protected:
  /// Elements [begin, begin + count) of an i32 slot of one row.
  static Tensor values(const Run& r, Slot slot, int64_t begin, int64_t count) {
    return make_tensor(r[slot].ptr<int32_t>() + begin, DType::i32, {count});
  }

  int64_t offsets_at_ = 0, offsets_count_ = 0, round_values_ = 0;  ///< elements of `offsets`
};

/// The rows of a slot that are in use; without groups all of them are.
inline Tensor rows_of(const Run& r, Slot slot, const GroupedRows* groups) {
  return groups ? groups->rows(r, slot) : r[slot];
}

}  // namespace nrl::model
