#pragma once
// Finds the first tensor of a step that is not finite, on one rank: in its weights, or by repeating the step
// (Engine::inspect()).

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "apps/engine/engine.h"
#include "core/config/enums.h"
#include "core/io/json.h"

namespace nrl::engine {

/// A tensor with values that are not finite.
struct BadTensor {
  /// The least is the first one over all ranks: weights before the passes; then microbatch,
  /// forward before backward, depth in the model, and the step of the layer.
  std::array<int64_t, 5> order{};
  std::string name = {};                     ///< "layer_1 act", "the gradient of NAME", "the weights NAME"
  std::string operation = {};                ///< the step of the layer that wrote it; may be empty
  int64_t microbatch = -1;                   ///< from 0; -1: of none
  std::string pass = {};                     ///< "forward", "backward" or "evaluation"; empty: in none
  int64_t bad = 0, count = 0;                ///< values that are not finite, and all
  std::string bad_input = {};                ///< an input of the step that is not finite; empty: all are
  std::optional<double> largest_input = {};  ///< largest |value| of its inputs; unset: not known

  bool operator==(const BadTensor&) const = default;
};

JsonValue to_json(const BadTensor& bad);
/// Throws Error(Exit::data) with the place for anything else.
BadTensor bad_tensor_from(const JsonValue& json);

/// Values of a tensor in host memory.
struct TensorNumbers {
  int64_t count = 0, bad = 0;
  double largest = 0;  ///< |value| of finite ones
};
/// Unset for types other than f32, bf16 and f16.
std::optional<TensorNumbers> numbers_of(const Tensor& t);
/// The same of a tensor in the memory of the exec's device, after the work enqueued so far. Blocks.
std::optional<TensorNumbers> numbers_of(ops::Exec& exec, const Tensor& t);

/// The first weight that is not finite among those that this rank keeps.
std::optional<BadTensor> find_bad_weight(Engine& engine);

/// Repeats the last step. `level`: `all` looks at every slot that a step of a layer writes, the
/// log-probabilities and the gradients of parameters, `grads` at the latter two. Slots whose rows belong to
/// experts, and slots in FP8, are not looked at: the next one that depends on them is found instead.
/// Collective; preconditions of Engine::inspect().
std::optional<BadTensor> find_bad_tensor(Engine& engine, Objective& objective, NanCheck level);

}  // namespace nrl::engine
