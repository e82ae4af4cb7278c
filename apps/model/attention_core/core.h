#pragma once
// Attention between the projections of a block: out = softmax(q k^T * scale) v for every head, on this rank
// alone or over the ranks that split every sequence.
//
// Shapes: N tokens of the microbatch, D head size; heads and kv_heads count this rank's part (tensor_part()).

#include <memory>

#include "apps/model/program/layer.h"

namespace nrl::model {

/// The slots between which attention lies. q and k are the first columns of `keys`; v follows them in
/// `values`, which is the same slot or has unread columns in their place.
struct AttentionEnds {
  Slot keys, values;  ///< (N, qkv_width), or (N, q_width + kv_width) if only q and k are in it
  Slot out, d_out;    ///< (N, heads * D)
  Slot d_qkv;         ///< (N, qkv_width)
};

class AttentionCore {
 public:
  virtual ~AttentionCore() = default;

  /// The steps of `out`.
  void forward(Run& r) const;
  /// The steps of d_qkv.
  virtual void backward(Run& r) const = 0;

 protected:
  AttentionCore(const LayerBuilder& b, const AttentionEnds& ends)
      : spec_(b.spec), layer_(b.layer), ends_(ends) {}
  /// The steps of training and evaluation.
  virtual void attend(Run& r) const = 0;

  /// Views by head.
  struct Heads {
    Tensor q, k, v;
  };
  Heads heads(const Run& r) const;
  Heads gradients(const Run& r) const;
  /// A tensor (N, heads * D) as (N, heads, D).
  Tensor by_head(const Tensor& t) const { return t.split_heads(spec_.heads, spec_.head_dim); }
  ops::FusedDropout dropout(const Run& r) const {
    return r.dropout(spec_.attention_dropout, layer_, DropoutSite::probabilities);
  }

  const ModelSpec& spec_;
  const int layer_;
  const AttentionEnds ends_;

 private:
  void attend_to_cache(Run& r) const;
};

/// The attention of block `b.layer`, in the layout of `context`.
std::unique_ptr<AttentionCore> attention_core(const LayerBuilder& b, const LayerContext& context,
                                              const AttentionEnds& ends);

// Its two kinds (local.cpp, across_ranks.cpp).
std::unique_ptr<AttentionCore> local_attention(const LayerBuilder& b, const AttentionEnds& ends);
/// `context.share` must be set.
std::unique_ptr<AttentionCore> attention_across_ranks(const LayerBuilder& b, const LayerContext& context,
                                                      const AttentionEnds& ends);

}  // namespace nrl::model
