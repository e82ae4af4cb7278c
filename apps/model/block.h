#pragma once
// One decoder block (pre-norm; GPT-2, Llama, Mistral, Qwen2, Qwen3) over named slots.
//
// The table in block.cpp says for every slot who writes it and who reads it; the policy (memory/slots.h) says
// how it reaches the backward pass. Forward and recompute go through the same produce(), so a recomputed slot
// has the same bits.

#include <array>
#include <functional>
#include <span>
#include <vector>

#include "apps/model/parameters.h"
#include "core/ops/attention/attention.h"
#include "core/ops/exec.h"
#include "core/ops/norm/norm.h"
#include "memory/slots.h"
#include "precision/recipe.h"

namespace nrl::model {

/// Activations of a block, in the order they are made.
enum class Slot : uint8_t {
  resid1,
  stats1,
  ln1,
  qkv,
  qk,
  qk_stats,
  attn,
  lse,
  resid2,
  stats2,
  ln2,
  mlp_in,
  act,
  count
};
/// Gradients inside a block's backward pass. The gradient of the residual stream itself runs through all
/// layers.
enum class GradSlot : uint8_t { d_act, d_ln2, d_attn, d_qkv, d_ln1, count };

/// Steps of a block's forward and backward pass, the clock of slot lifetimes.
enum class ForwardStep : uint8_t {
  norm1,
  qkv,
  rope,
  attention,
  o_proj,
  norm2,
  mlp_in,
  activation,
  mlp_out,
  count
};
enum class BackwardStep : uint8_t {
  mlp_out,
  activation,
  mlp_in,
  norm2,
  o_proj,
  attention,
  rope,
  qkv,
  norm1,
  count
};

std::vector<memory::SlotSpec> block_slots(const ModelSpec& spec, const precision::Recipe& recipe);
std::vector<memory::GradientSlotSpec> block_gradient_slots(const ModelSpec& spec,
                                                           const precision::Recipe& recipe, bool fuse_gelu);

/// A parameter as a layer sees it: the weight it reads and the f32 gradient it adds to.
struct ParameterView {
  Tensor weight, grad;
};

/// One microbatch: `sequences` sequences of all together `tokens` tokens, flattened.
struct MicroBatch {
  Tensor ids;             ///< (N) i32
  Tensor target;          ///< (N) i32; < 0: no target
  Tensor positions;       ///< (N) i32, position inside the sequence
  Tensor cu_seqlens;      ///< (S + 1) i32
  Tensor weight;          ///< (N) f32: dLoss/dlog_prob of each token; what training differentiates
  int64_t first_row = 0;  ///< global index of token 0 in the step's batch (dropout masks)
  Tensor step;            ///< (1) i64, the number of the optimizer step (dropout masks)
  bool dropout = true;    ///< false: nothing is dropped, whatever the model says
  ops::SequenceLengths lengths;
};

/// Places of a block where dropout happens; with the layer they name the mask. `attention` and `mlp` lie on
/// the way into the residual stream, where the norm behind them applies it.
enum class DropoutSite : uint8_t { attention, mlp, probabilities };
ops::FusedDropout fused_dropout(const ModelSpec& spec, uint64_t seed, int layer, DropoutSite site,
                                const MicroBatch& mb);

/// Everything a block needs besides its slots.
struct BlockContext {
  ops::Exec* exec = nullptr;
  const ModelSpec* spec = nullptr;
  std::vector<ParameterView> parameters;
  Tensor rope_table;
  uint64_t seed = 0;
  /// GELU in the epilogues of the matrix products around it, where the device gains by that. The activation
  /// is then made together with mlp_in, so its slot must be kept.
  bool fuse_gelu = false;
  /// Called when the gradient of a parameter is complete for this microbatch.
  std::function<void(int parameter)> gradient_ready;
  memory::TickMap ticks;
  std::function<void(int tick)> at_tick;  ///< see Decoder::watch_ticks
  void enter(int tick) const {
    if (at_tick) at_tick(tick);
  }
};

/// Tensors of a block's slots in one phase, looked up by the decoder.
struct BlockTensors {
  std::array<Tensor, static_cast<size_t>(Slot::count)> forward, backward;
  std::array<Tensor, static_cast<size_t>(GradSlot::count)> gradient;
  std::array<memory::Keep, static_cast<size_t>(Slot::count)> keep{};
};

class Block {
 public:
  Block(const BlockContext& context, int layer, const LayerParameters& parameters, BlockTensors tensors)
      : c_(context), layer_(layer), p_(parameters), t_(std::move(tensors)) {}

  /// Writes the output of the MLP into `next`, the slot resid1 of the layer above (or the final residual):
  /// the consumer drops from it and adds resid2() in its norm. Likewise resid1 of this layer is summed with
  /// `previous_resid2` here, if given.
  void forward(const MicroBatch& mb, const Tensor& previous_resid2, const Tensor& next);

  /// `dresid` (N, H) holds the gradient of the layer's output and is replaced by the gradient of its input.
  /// `dropped` (N, H) is scratch, needed with residual dropout only. Runs every step's data part, then its
  /// weight part.
  void backward(const MicroBatch& mb, const Tensor& dresid, const Tensor& dropped);

  /// The two parts of one backward step, for schedules that separate them. A step's weight part may run any
  /// time between its data part and the end of the lifetimes of what it reads (see block_slots).
  void backward_data(BackwardStep step, const MicroBatch& mb, const Tensor& dresid, const Tensor& dropped);
  void backward_weight(BackwardStep step, const MicroBatch& mb, const Tensor& dresid, const Tensor& dropped);

  const Tensor& resid1() const { return t_.forward[static_cast<size_t>(Slot::resid1)]; }
  const Tensor& resid2() const { return t_.forward[static_cast<size_t>(Slot::resid2)]; }

 private:
  enum class Phase : uint8_t { forward, recompute };
  /// The one place where a slot's contents are computed, in either phase.
  void produce(Slot slot, Phase phase, const MicroBatch& mb, const Tensor& residual);
  /// The slot as the backward pass reads it, recomputed first if the policy says so.
  Tensor for_backward(Slot slot, const MicroBatch& mb);
  const Tensor& in(Slot slot) const { return t_.backward[static_cast<size_t>(slot)]; }
  const Tensor& d(GradSlot slot) const { return t_.gradient[static_cast<size_t>(slot)]; }
  /// The gradient of a projection's output: behind dropout it is not the residual gradient itself.
  /// Where the gradient at mlp_in is. Unfused it takes the place of mlp_in, which is dead by then.
  const Tensor& d_mlp_in() const { return c_.fuse_gelu ? d(GradSlot::d_act) : in(Slot::mlp_in); }
  const Tensor& projected(const Tensor& dresid, const Tensor& dropped) const {
    return c_.spec->residual_dropout > 0 ? dropped : dresid;
  }
  Tensor weight(int parameter) const;
  Tensor grad(int parameter) const;
  void linear_weight_gradient(const Tensor& dout, const Tensor& x, int weight, int bias);
  void backward_norm(const Tensor& dout, const Tensor& x, const Tensor& stats, int weight, int bias,
                     const Tensor& dresid);
  void drop(const Tensor& x, const Tensor& out, DropoutSite site, const MicroBatch& mb) const;

  const BlockContext& c_;
  int layer_;
  LayerParameters p_;
  BlockTensors t_;
};

}  // namespace nrl::model
