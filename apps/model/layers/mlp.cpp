#include "apps/model/layers/activation.h"
#include "apps/model/layers/sublayer.h"

namespace nrl::model {
namespace {

using precision::Gemm;

// N tokens of the microbatch, F this rank's part of the inner size.
class Mlp final : public Sublayer {
 public:
  Mlp(const LayerBuilder& b, const LayerParameters& p, const Ends& ends, bool fuse_gelu)
      : Sublayer(b, ends, DropoutSite::mlp),
        up_(b, {.name = "mlp_in",
                .gemm = Gemm::mlp_in,
                .weight = p.mlp_in,
                .bias = p.mlp_in_bias,
                .adapter = p.mlp_in_adapter,
                .in = b.spec.hidden,
                .out = b.spec.mlp_in_width(),
                .rules = "norm"}),
        down_(b, {.name = "mlp_out",
                  .gemm = Gemm::mlp_out,
                  .weight = p.mlp_out,
                  .bias = p.mlp_out_bias,
                  .adapter = p.mlp_out_adapter,
                  .in = b.spec.ffn,
                  .out = b.spec.hidden,
                  .split = Split::inputs,
                  .rules = "activation mlp"}),
        norm_(b, ends.in, p.norm2, p.norm2_bias, up_.reads_x()) {
    const ModelSpec& m = b.spec;
    Activation& a = activation_;
    a = {.kind = m.activation, .gated = m.gated, .remakes = true};
    a.fused = fuse_gelu && up_.fuses_activation() && down_.fuses_activation();
    a.in = b.activation("mlp_in", m.mlp_in_width(), token_rows, "mlp");
    if (down_.reads_x()) a.out = b.activation("activation mlp", m.ffn, token_rows, "activation mlp");
    add_output(b, "mlp_out", "d_mlp_out", p.post_norm2);
    if (!a.fused) a.d_out = b.gradient("d_activation", m.ffn, token_rows);
    if (!up_.computes_d_y(m.gated)) a.d_in = b.gradient("d_mlp_in", m.mlp_in_width(), token_rows);
    d_norm_ = b.gradient("d_norm2", m.hidden, sequence_rows);
    const LinearEnds::Fused gelu = a.fused ? LinearEnds::Fused{a.kind, a.in} : LinearEnds::Fused{};
    up_.connect(b,
                {.x = norm_.out, .y = a.fused ? a.out : a.in, .d_y = a.d_in, .d_x = d_norm_, .y_of = gelu});
    down_.connect(b, {.x = a.out, .y = out_, .d_y = d_y_, .d_x = a.fused ? a.d_in : a.d_out, .d_x_of = gelu});
    add_amax(b, down_);
  }

  Stream stream() const override { return stream_after(norm_); }

  void forward(Run& r) override {
    up_.forward(r, norm_.forward(r, up_.x_amax()));
    activation_.forward(r);
    down_.forward(r, activation_.output());
    normalize_output(r);
  }

  void backward(Run& r) override {
    down_.dgrad(r, output_gradient(r, "mlp_dropout"));
    // Before the activation, whose gradient may take the memory of its input; after it where it writes the
    // activation again.
    if (!activation_.out) down_.wgrad(r);
    activation_.backward(r);
    if (activation_.out) down_.wgrad(r);
    up_.backward(r, activation_.gradient());
    norm_.backward(r, d_norm_, ends_.d_out, ends_.d_x);
  }

 private:
  Linear up_, down_;
  Activation activation_;
  PreNorm norm_;
  Slot d_norm_;  ///< (n, H)
};

}  // namespace

std::unique_ptr<Sublayer> mlp(const LayerBuilder& b, const LayerParameters& p, const Sublayer::Ends& ends,
                              bool fuse_gelu) {
  return std::make_unique<Mlp>(b, p, ends, fuse_gelu);
}

}  // namespace nrl::model
