#pragma once
// The sublayers of a decoder block: attention, and an MLP or a mixture of experts. Each begins with its own
// norm, and its output is added to the residual stream by the next one. They add their slots and steps to the
// table of the layer that owns them.
//
// Shapes: n tokens of this rank's residual stream (sequence_rows), H hidden size.

#include "apps/model/linear/linear.h"

namespace nrl::model {

class Sublayer {
 public:
  struct Ends {
    Stream in;
    Slot d_out;               ///< (n, H): gradient of the sublayer's output
    bool port = true;         ///< another layer writes d_out
    StreamGradient d_x = {};  ///< gradient of the incoming stream
  };
  virtual ~Sublayer() = default;
  virtual void forward(Run& r) = 0;
  virtual void backward(Run& r) = 0;
  /// Layer::host_values()
  virtual int64_t host_values() const { return 0; }

  virtual Stream stream() const = 0;
  /// The producer of d_out writes its amax here; unset if the sublayer does not need it.
  Slot d_out_amax() const { return d_out_amax_; }

 protected:
  Sublayer(const LayerBuilder& b, const Ends& ends, DropoutSite site)
      : spec_(b.spec), layer_(b.layer), site_(site), ends_(ends) {}
  /// Adds out_ and, with dropout, its gradient under the name `gradient`. `norm`: the parameter of the norm
  /// that follows it; -1: none.
  void add_output(const LayerBuilder& b, std::string_view name, std::string_view gradient, int norm = -1);
  /// d_out_amax_, if `last`, the layer that writes out_, needs it.
  void add_amax(const LayerBuilder& b, const Linear& last);
  Stream stream_after(const PreNorm& norm) const {
    return {.x = normed_ ? normed_ : out_, .residual = norm.sum, .layer = layer_, .site = site_};
  }
  /// The last step of the forward pass: the norm of out_, if there is one.
  void normalize_output(Run& r) const;
  /// The gradient of out_: the first steps of the backward pass.
  Value output_gradient(Run& r, std::string_view step) const;

  const ModelSpec& spec_;
  const int layer_;
  const DropoutSite site_;
  const Ends ends_;
  Slot out_;  ///< (n, H), not yet added to the residual stream
  Slot d_y_;  ///< (n, H): gradient of out_; d_out without dropout and norm
  Slot d_out_amax_;

 private:
  int norm_weight_ = -1;
  Slot normed_, rstd_;  ///< (n, H) and (n, 1) f32: of out_; unset without norm
  Slot d_normed_;       ///< (n, H): d_out without dropout
  Slot d_y_amax_;       ///< of the gradient that the norm writes, if it is needed
};

/// softmax(q k^T) v of all heads, with the projections before and after it.
std::unique_ptr<Sublayer> attention(const LayerBuilder& b, const LayerContext& context,
                                    const LayerParameters& p, const Sublayer::Ends& ends);
/// Two linear layers with an activation between them. `fuse_gelu`: GELU is computed in the epilogues of the
/// GEMMs, which changes the list of steps; not where a GEMM reads FP8.
std::unique_ptr<Sublayer> mlp(const LayerBuilder& b, const LayerParameters& p, const Sublayer::Ends& ends,
                              bool fuse_gelu);
/// A mixture of experts (moe.cpp). `segments`: parts of a microbatch in which the router is balanced.
std::unique_ptr<Sublayer> mixture_of_experts(const LayerBuilder& b, const LayerParameters& p,
                                             const Sublayer::Ends& ends, int64_t segments);

}  // namespace nrl::model
