#pragma once
// Which number formats a run uses, and the state of scales that they need. The memory plan
// allocates; a recipe only describes.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "core/base/scaling.h"
#include "core/config/enums.h"

namespace nrl::precision {

/// The GEMMs of a decoder by their weight: four in a layer, or with experts in place of an MLP theirs (a
/// grouped GEMM each) and those of the shared expert, and the LM head. Operands of attention are counted as
/// GEMMs: q, k and v as inputs of theirs, and the gradient of its output as that of the last.
enum class Gemm : uint8_t {
  qkv,
  o_proj,
  mlp_in,
  mlp_out,
  experts_in,
  experts_out,
  shared_in,
  shared_out,
  attention_q,
  attention_k,
  attention_v,
  attention_out,
  lm_head,
};
inline constexpr std::array layer_gemms{Gemm::qkv, Gemm::o_proj, Gemm::mlp_in, Gemm::mlp_out};
inline constexpr std::array expert_gemms{Gemm::experts_in, Gemm::experts_out, Gemm::shared_in,
                                         Gemm::shared_out};
inline constexpr std::array attention_operands{Gemm::attention_q, Gemm::attention_k, Gemm::attention_v,
                                               Gemm::attention_out};
constexpr std::string_view name_of(Gemm gemm) {
  constexpr std::string_view names[] = {
      "qkv",        "o_proj",      "mlp_in",      "mlp_out",     "experts_in",    "experts_out", "shared_in",
      "shared_out", "attention q", "attention k", "attention v", "attention out", "lm_head"};
  return names[static_cast<int>(gemm)];
}

/// An operand of y = x W^T and its gradients dx = dy W, dW = dy^T x.
enum class Role : uint8_t { input, weight, gradient };  // x, W, dy
inline constexpr std::array all_roles{Role::input, Role::weight, Role::gradient};
constexpr std::string_view name_of(Role role) {
  constexpr std::string_view names[] = {"input", "weight", "gradient"};
  return names[static_cast<int>(role)];
}

struct Format {
  DType dtype = DType::f32;
  Scaling scaling = Scaling::none;
  bool operator==(const Format&) const = default;
};

/// Operands of the GEMMs of layers [begin, end) in formats of their own, quantized from the activations,
/// weights and gradients that the rest of the model holds.
struct QuantizedGemms {
  Format input, weight, gradient;
  int begin = 0, end = 0;
  int amax_history = 0;      ///< tensor scales follow from the largest of so many steps; 0: from this tensor
  bool most_recent = false;  ///< with a history: of the last step only
  int margin = 0;            ///< tensor scales leave room for numbers 2^margin times as large
  /// Weights are kept in FP8 between steps: the optimizer, which has them in more bits, writes them. Only
  /// with scales that are those of the transposed weight as well: not with mx32.
  bool primary = false;
  /// Both copies of weights that are not kept in FP8 are made once in a step; else for each GEMM.
  bool cached = true;
  bool attention = false;  ///< attention has operands in these formats as well
  bool operator==(const QuantizedGemms&) const = default;
};

/// Scales of whole tensors that outlive a step, for the plan to allocate: one f32 scale, `history` f32 amax
/// values and a copy of the scale for GEMMs (aligned_scale) for each operand of the GEMMs of `layers` layers,
/// of roles, layers and GEMMs in this order. In models with experts all layers have those of experts as well,
/// and then those of attention, if it has FP8 operands.
struct ScaleLayout {
  int layers = 0;  ///< 0: nothing is kept
  int history = 0;
  int gemms = static_cast<int>(layer_gemms.size());
  int first_of_attention = gemms;
  int of_role() const { return layers * gemms; }
  int operands() const { return static_cast<int>(all_roles.size()) * of_role(); }
  int index(int layer, Gemm gemm, Role role) const {
    const bool attention = gemm >= Gemm::attention_q;
    return (static_cast<int>(role) * layers + layer) * gemms + static_cast<int>(gemm) -
           (attention ? static_cast<int>(Gemm::attention_q) - first_of_attention : 0);
  }
  int64_t bytes() const { return int64_t{operands()} * (1 + history + aligned_scale) * 4; }
};

/// How the optimizer's state is kept between steps; updates are in f32 (ops::AdamW).
struct OptimizerFormats {
  DType exp_avg = DType::f32, exp_avg_sq = DType::f32;  ///< f32, bf16, f16 or e4m3
  DType main_gradients = DType::f32;                    ///< in which gradients are kept: f32 or bf16
  /// bf16 weights and the other 16 bits of the f32 numbers instead of f32 master weights.
  bool remainders = false;
  bool master = true;  ///< false: bf16 weights have no master weights, and are rounded at random
  bool operator==(const OptimizerFormats&) const = default;
};

struct RecipeFormats {
  DType weights = DType::f32;           ///< what the layers read
  DType activations = DType::f32;       ///< outputs of forward ops
  DType gradients = DType::f32;         ///< of activations
  DType logits = DType::f32;            ///< the LM head's output in training and evaluation
  DType logits_gradient = DType::f32;   ///< overwrites the logits
  DType weight_gradients = DType::f32;  ///< accumulated over microbatches
  DType master_weights = DType::f32;    ///< what the optimizer updates
  OptimizerFormats optimizer = {};
  QuantizedGemms quantized = {};
  bool operator==(const RecipeFormats&) const = default;
};

/// Everything in f32 unless given.
class Recipe {
 public:
  constexpr Recipe() = default;
  constexpr explicit Recipe(const RecipeFormats& formats) : formats_(formats) {}
  bool operator==(const Recipe&) const = default;

  constexpr DType weights() const { return formats_.weights; }
  constexpr DType activations() const { return formats_.activations; }
  constexpr DType gradients() const { return formats_.gradients; }
  constexpr DType logits() const { return formats_.logits; }
  constexpr DType weight_gradients() const { return formats_.weight_gradients; }
  constexpr const OptimizerFormats& optimizer() const { return formats_.optimizer; }
  /// The same recipe with the optimizer's state in these formats; remainders, or no master weights, only
  /// where weights are bf16.
  constexpr Recipe with_optimizer(const OptimizerFormats& formats) const {
    Recipe r = *this;
    r.formats_.optimizer = formats;
    r.formats_.optimizer.remainders &= formats_.weights == DType::bf16 && formats.master;
    r.formats_.optimizer.master |= formats_.weights != DType::bf16;
    return r;
  }
  /// The same recipe with logits and their gradient in bf16. The loss is still computed in f32.
  constexpr Recipe with_bf16_logits() const {
    Recipe r = *this;
    r.formats_.logits = r.formats_.logits_gradient = DType::bf16;
    return r;
  }
  /// The same recipe with operands of GEMMs in formats of their own.
  constexpr Recipe with_quantized(const QuantizedGemms& quantized) const {
    Recipe r = *this;
    r.formats_.quantized = quantized;
    return r;
  }
  constexpr const QuantizedGemms& quantized() const { return formats_.quantized; }
  /// Of the optimizer's own copy of the weights; none where it updates those that the layers read.
  std::optional<DType> master_weights() const;

  /// The format in which a GEMM reads an operand. `layer` is ignored for the LM head.
  Format of(int layer, Gemm gemm, Role role) const;
  /// Whether a GEMM reads FP8 operands.
  bool quantizes(int layer, Gemm gemm) const { return of(layer, gemm, Role::input).scaling != Scaling::none; }
  /// Whether attention reads FP8 operands.
  bool quantizes_attention(int layer) const { return quantizes(layer, Gemm::attention_q); }
  /// Whether a GEMM's weight is kept in FP8 (QuantizedGemms::primary).
  bool keeps_fp8(int layer, Gemm gemm) const { return formats_.quantized.primary && quantizes(layer, gemm); }
  /// True if a GEMM's weight has FP8 copies through a step (QuantizedGemms::cached).
  bool caches_fp8(int layer, Gemm gemm) const {
    const QuantizedGemms& q = formats_.quantized;
    return q.cached && !q.primary && quantizes(layer, gemm);
  }
  /// Of any layer.
  constexpr bool quantizes_any() const {
    return formats_.quantized.input.scaling != Scaling::none &&
           formats_.quantized.begin < formats_.quantized.end;
  }
  /// The scales that a model of `layers` layers, some of them with experts, keeps between steps.
  ScaleLayout scales(int layers, bool experts = false) const;

 private:
  RecipeFormats formats_;
};

/// Why the ops cannot run a model of `layers` layers with this recipe; empty when they can.
std::string unsupported_reason(const Recipe& recipe, int layers);

inline constexpr Recipe float32;
/// Weights and activations in bf16, f32 accumulation and master weights.
inline constexpr Recipe bfloat16{RecipeFormats{
    .weights = DType::bf16,
    .activations = DType::bf16,
    .gradients = DType::bf16,
    .logits_gradient = DType::bf16,
}};
/// The same on a CPU, whose GEMMs upcast each operand to f32: the gradient of the logits is not rounded.
inline constexpr Recipe bfloat16_storage{RecipeFormats{
    .weights = DType::bf16,
    .activations = DType::bf16,
    .gradients = DType::bf16,
    .logits_gradient = DType::f32,
}};

/// Weights and activations in f16, f32 accumulation and master weights; the loss is scaled, so that gradients
/// stay within the range.
inline constexpr Recipe float16{RecipeFormats{
    .weights = DType::f16,
    .activations = DType::f16,
    .gradients = DType::f16,
    .logits_gradient = DType::f16,
}};
/// The same on a CPU, whose GEMMs upcast each operand to f32: the gradient of the logits is not rounded.
inline constexpr Recipe float16_storage{RecipeFormats{
    .weights = DType::f16,
    .activations = DType::f16,
    .gradients = DType::f16,
    .logits_gradient = DType::f32,
}};

struct Fp8Options {
  Fp8Recipe recipe = Fp8Recipe::tensorwise;
  /// Gradients in e5m2, which has less precision and more range; else everything in e4m3. Of blockwise and
  /// mxfp8, whose scales give the range, always e4m3.
  bool hybrid = true;
  int begin = 0, end = 0;    ///< the layers
  int amax_history = 1;      ///< of delayed
  bool most_recent = false;  ///< of delayed
  int margin = 0;            ///< of delayed and tensorwise
  bool primary = false;      ///< QuantizedGemms::primary; not of mxfp8
  bool cached = true;        ///< QuantizedGemms::cached
  bool attention = false;    ///< of tensorwise and delayed, with gradients in e5m2
};
QuantizedGemms fp8_gemms(const Fp8Options& options);

/// What a dimension of an operand must be a multiple of, given in its format: of tensors 16, with blocks the
/// length of a block.
int64_t dimension_unit(Scaling scaling);

/// For forward passes with stored weights of this type, f32 or bf16.
const Recipe& recipe_for_weights(DType weights);

}  // namespace nrl::precision
