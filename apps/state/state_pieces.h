#pragma once
// Optimizer state between the memory of a rank and files, where it is f32 in logical tensors.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "apps/model/spec/parameters.h"
#include "apps/plan/param_groups.h"
#include "core/io/checkpoint_store.h"
#include "core/io/staging.h"
#include "core/ops/optimizer.h"

namespace nrl::train {

/// A tensor of the optimizer state on a rank: f32 or in the formats of ops::AdamW.
struct StateMemory {
  Tensor values;
  Tensor scales = {};   ///< of f16 and e4m3
  Tensor weights = {};  ///< of u16, which are remainders of these

  bool encoded() const { return values.dtype != DType::f32; }
};

/// Elements of a logical tensor that are contiguous in a rank's memory: `count` elements, in runs of `run`
/// elements that are `stride` apart in the logical tensor.
struct StatePiece {
  static constexpr DType dtype = DType::f32;  ///< in files

  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0, count = 0, run = 0, stride = 0;
  const StateMemory* memory = nullptr;
  int64_t element = 0, weight = 0;  ///< the first one in StateMemory's values and weights

  bool flat() const { return run == count; }
  ShardSpec shard() const;
  /// In memory that is not encoded.
  float* data() const { return static_cast<float*>(memory->values.data) + element; }
};

/// Appends the elements of `ranges` that `memory` has, as logical tensors name(part). `memory` must outlive
/// the pieces.
void add_state(const model::ParameterList& parameters, const StateMemory& memory,
               std::span<const plan::OwnedRange> ranges, bool counted_only,
               const std::function<std::string(const model::Part&)>& name, std::vector<StatePiece>& pieces);

/// Elements of encoded state that are converted at a time; whole blocks of scales.
inline constexpr int64_t state_window = 1 << 18;
static_assert(state_window % ops::moment_block == 0);

/// Reads pieces in order as f32 in host memory, each from its beginning on in windows. `staging`: null if the
/// state is in host memory.
class StateReader {
 public:
  StateReader(const std::vector<StatePiece>& pieces, Staging* staging);

  struct Window {
    const float* data;
    int64_t count;
  };
  /// Elements from `at` on; valid until the next call.
  Window next(const StatePiece& piece, int64_t at);

 private:
  int64_t count_at(const StatePiece& piece, int64_t at) const;
  MemoryRange values(const StatePiece& piece, int64_t at) const;
  MemoryRange companion(const StatePiece& piece, int64_t at) const;
  const void* fetch(const MemoryRange& range) { return staging_ ? staging_->next() : range.data; }

  Staging* staging_;
  std::vector<std::byte> companion_;
  std::vector<float> buffer_;
};

/// Writes elements of encoded state, the first of which begins a block.
void write_encoded(const StateMemory& memory, int64_t first, const std::vector<float>& x, Staging* staging);

}  // namespace nrl::train
