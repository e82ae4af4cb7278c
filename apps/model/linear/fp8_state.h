#pragma once
// The FP8 state of a rank's layers beyond a step: copies of weights, or weights that are kept in FP8, and the
// scales of weights and of operands. Layers read it (Linear, QuantizedValue), the decoder plans and updates
// it, the optimizer writes the weights that are kept in FP8, and checkpoints have its scales.
//
// Where scales come from, by the scaling of the recipe:
//
//   of tensors, found as they are rounded   one scale per weight here; operands keep theirs in their layer
//   of tensors, delayed                     DelayedScales: scales of all operands, from the amax of steps
//   of blocks                               with the codes; of a weight that is kept in FP8 here

#include <span>
#include <vector>

#include "apps/model/spec/layout.h"
#include "apps/model/spec/parameters.h"
#include "core/ops/exec.h"
#include "memory/plan.h"
#include "parallel/grid/groups.h"
#include "precision/recipe.h"

namespace nrl::model {

/// The FP8 copies of a weight (ops::Quantize), made in the first microbatch of a step or an evaluation.
/// Copies that are not cached are slots of the layer, and the tensors here have no more than their scale. A
/// weight that is kept in FP8 is its own row copy; its column copy is a slot.
struct QuantizedWeight {
  Tensor row, column;
  Tensor amax;  ///< (1) f32: for a scale of the whole tensor that is computed from the weight itself
};

/// Scales of the weights that are kept in FP8 (precision::QuantizedGemms::primary), for the update that
/// writes them.
struct WeightScales {
  /// By parameter: index of its scale in the tensors, or of its first block's scale (ops::MatrixPart); -1:
  /// not kept in FP8.
  std::vector<int64_t> index;
  Scaling scaling = Scaling::tensor;  ///< or block128
  /// (n) f32. `amax` gets the amax of the weights: with delayed scaling the scales of later steps follow from
  /// it, else this update's scales do, and it is left 0.
  Tensor scale, amax;
  Tensor aligned = {};  ///< scales of tensors that are not delayed, as in DelayedScales
  bool delayed = false;
  int margin = 0;
};

/// Scales of FP8 tensors that follow from earlier steps (precision::ScaleLayout); empty with other recipes.
struct DelayedScales {
  precision::ScaleLayout layout;
  Tensor scale;    ///< (operands) f32
  Tensor amax;     ///< (history, operands) f32: the first row is of this step
  Tensor aligned;  ///< (operands, aligned_scale) f32: the scales again, for GEMMs
};

class Fp8State {
 public:
  /// Declares its buffers in the plan; none if the recipe has no FP8. `spec`: of the rank's part of the model
  /// (tensor_part()).
  Fp8State(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe,
           const ParameterList& parameters, memory::MemoryPlan& plan);
  /// Assigns the planned memory. `weights`: by parameter, what layers read.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec,
            std::span<const Tensor> weights);

  /// The copies of a parameter that GEMMs read in FP8; else empty.
  const QuantizedWeight& weight(int parameter) const { return weights_[parameter]; }
  const DelayedScales& delayed() const { return delayed_; }
  const WeightScales& kept() const { return kept_; }

  /// Copies the scales that were loaded, or found after the last step, to where GEMMs read them.
  void align(ops::Exec& exec) const;
  /// After the passes of a step: the scales of the next one, from what all ranks have measured. Only with
  /// scales that outlive a step; `groups`: null for a layout of one rank.
  void update(ops::Exec& exec, const parallel::Groups* groups) const;

 private:
  /// A weight that GEMMs read in FP8.
  struct Buffers {
    int parameter;
    precision::Format format;
    int64_t rows, columns;
    int64_t experts;               ///< matrices below each other in the weight and in both copies
    int scale;                     ///< delayed scaling: index in DelayedScales
    bool kept;                     ///< the weight itself is in FP8
    memory::BufferId row, column;  ///< the copies; -1: not cached
    /// Number of its scales in WeightScales: one per tensor, or one per block of a weight that is kept.
    int64_t scales() const;
  };
  /// Sum of Buffers::scales(), and how many of them are aligned.
  int64_t own_scales() const;
  int64_t aligned_scales() const;
  void bind_scales(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec);

  precision::QuantizedGemms gemms_;
  std::vector<Buffers> buffers_;
  memory::BufferId delayed_buffer_ = -1, kept_buffer_ = -1;
  std::vector<QuantizedWeight> weights_;
  DelayedScales delayed_;
  WeightScales kept_;
};

/// Bytes of one FP8 copy (rows, columns): codes, then scales of blocks.
int64_t quantized_bytes(Scaling scaling, int64_t rows, int64_t columns);
/// The copy in such memory, without a scale of the whole tensor.
Tensor quantized_tensor(void* data, const precision::Format& format, int64_t rows, int64_t columns,
                        Device device);

}  // namespace nrl::model
