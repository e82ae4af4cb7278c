#pragma once
// The part of a model that a run trains: everything, everything but frozen tensors, or low-rank adapters
// (LoRA) of a frozen model.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::model {

/// Selects all matrices that can have an adapter.
inline constexpr std::string_view all_linear = "all-linear";
/// Adapters' tensors are named as PEFT names them: this prefix, the module, ".lora_A.weight" or
/// ".lora_B.weight".
inline constexpr std::string_view adapter_prefix = "base_model.model.";

/// y = x W^T + scale() drop(x) A^T B^T, with A (rank, in) and B (out, rank), for every matrix that `targets`
/// select and `excludes` do not. Everything else is frozen.
struct AdapterSpec {
  int64_t rank = 0;  ///< 0: no adapters
  double alpha = 0;
  bool rank_stabilized = false;
  float dropout = 0;    ///< of the adapter's input, in training
  bool xavier = false;  ///< A begins with Xavier's normal numbers, else with Kaiming's uniform ones
  std::vector<std::string> targets = {}, excludes = {};  ///< patterns of modules; see selects()

  explicit operator bool() const { return rank > 0; }
  /// alpha / rank, or alpha / sqrt(rank) if rank_stabilized.
  float scale() const;
  /// True if the module ("model.layers.0.self_attn.q_proj") has an adapter, if it can have one.
  bool selects(std::string_view module) const;
};

/// The part of a model that a run trains.
struct TrainedPart {
  AdapterSpec adapters = {};
  std::vector<std::string> frozen = {};  ///< patterns of tensors and modules; see selects()
  // Set by count_trained() (trained_part.h), for the FLOPs of a step: elements of matrices by which a token
  // is multiplied.
  double frozen_products = 0;   ///< of frozen matrices
  double adapter_products = 0;  ///< of adapters

  /// True if the tensor ("model.norm.weight") or its module is frozen by a pattern.
  bool freezes(std::string_view tensor) const;
};

/// True if `pattern`, in which * stands for any text, is `name` or the last of its components.
bool selects(std::string_view pattern, std::string_view name);

/// The module of a tensor: its name without ".weight".
std::string_view module_of(std::string_view tensor);

}  // namespace nrl::model
