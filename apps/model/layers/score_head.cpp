// The head of a reward model: score[n] = v . norm(x[n]). With w = dLoss/dscore,
//
//   d_norm[n] = w[n] v,   dv += sum over n of w[n] norm(x[n])
#include "apps/model/layers/boundary.h"
#include "apps/model/layers/head.h"
#include "core/ops/linear.h"
#include "core/ops/merge.h"
#include "core/ops/optimizer.h"
#include "core/ops/segments.h"

namespace nrl::model {

using memory::evaluation;
using memory::training;

namespace {

/// A vector as a matrix with one column.
Tensor column(const Tensor& x) {
  return make_tensor(x.data, x.dtype, {x.dim(0), 1}, x.device);
}

/// The rows of the residual stream on this rank, `n` of the microbatch.
Tensor own_rows(const Run& r, const Tensor& all, int64_t n) {
  return all.rows(n < r.batch().ids.dim(0) ? n * r.layout().tensor_rank : 0, n);
}

}  // namespace

ScoreHead::ScoreHead(const LayerContext& c, const ParameterList& parameters, const precision::Recipe& recipe,
                     const Ports& below)
    : Layer("loss_computation", c),
      weight_(parameters.head),
      norm_parameters_(present({parameters.final_norm, parameters.final_norm_bias})) {
  const LayerBuilder b = builder(recipe);
  ports_.x = b.port("x", recipe.activations());
  ports_.residual = b.port("residual in", recipe.activations());
  const StreamGradient d_x = input_gradient(b, below);
  ports_.d_x = d_x.slot, ports_.d_x_amax = d_x.amax;
  const Stream in{.x = ports_.x,
                  .residual = ports_.residual,
                  .layer = static_cast<int>(b.spec.layers) - 1,
                  .site = DropoutSite::mlp};
  norm_.emplace(b, in, parameters.final_norm, parameters.final_norm_bias);
  d_score_ = b.gradient("d_score", 1, sequence_rows);
  d_norm_ = b.gradient("d_norm", b.spec.hidden, sequence_rows);
  zero_ = b.add({.name = "zero", .width = 1, .dtype = DType::i32, .rows = one_row});
  factor_ = b.number("loss scale");
  scaled_ = b.add({.name = "scaled weights", .width = 1, .rows = sequence_rows});
  describe();
}

void ScoreHead::forward(Run& r) {
  const Slot hidden = norm_->out;
  norm_->forward(r);
  r.step(training, "loss", reads(hidden), writes(d_score_, zero_, factor_, scaled_, over(d_norm_, hidden)),
         [&] {
           scores(r);
           gradients(r);
         });
  r.step(evaluation, "scores", reads(hidden), writes(), [&] { scores(r); });
}

ParameterUse ScoreHead::parameters(bool backward) const {
  if (backward) return {norm_parameters_, norm_parameters_};
  std::vector<int> read = norm_parameters_;
  read.push_back(weight_);
  return {read, {weight_}};
}

void ScoreHead::backward(Run& r) {
  norm_->backward(r, d_norm_, {}, {ports_.d_x, ports_.d_x_amax});
}

void ScoreHead::scores(Run& r) const {
  const Tensor x = r[norm_->out], all = r.context().results(r.batch().ids.dim(0)).log_prob,
               own = own_rows(r, all, x.dim(0));
  ops::linear_forward(r.exec(), {.x = x, .weight = r.weight(weight_), .out = column(own)});
  if (own.dim(0) < all.dim(0)) r.all_gather_async(own, all).wait();
}

Tensor ScoreHead::weights(const Run& r) const {
  const Dependence d = r.context().loss.dependence;
  if (d == Dependence::none || d == Dependence::batch) return r.batch().loss_weight;
  const int64_t n = r.batch().ids.dim(0);
  call_rule(r, 0, n);
  return r.context().results(n).weight;
}

void ScoreHead::scale_weights(Run& r) const {
  const Tensor d_score = r[d_score_], own = column(own_rows(r, weights(r), d_score.dim(0))),
               scale = r.context().loss_scale;
  if (!scale) return ops::add_rows(r.exec(), {.x = own, .out = d_score});
  // The scale is a double, whose f32 is the value of a segment.
  const auto number = [&](Slot slot) { return make_tensor(r[slot].data, r[slot].dtype, {1}, scale.device); };
  const Tensor zero = number(zero_), factor = number(factor_);
  ops::zero(r.exec(), {.x = zero});
  ops::segment_rows(r.exec(), {.values = scale, .target = zero, .segment = zero, .out = factor});
  ops::linear_forward(r.exec(), {.x = own, .weight = column(factor), .out = r[scaled_]});
  ops::add_rows(r.exec(), {.x = r[scaled_], .out = d_score});
}

void ScoreHead::gradients(Run& r) const {
  scale_weights(r);
  const Tensor x = r[norm_->out], d_score = r[d_score_];
  // The weight gradient reads x first, because d_norm may overwrite x.
  if (r.context().trains(weight_))
    ops::linear_backward_weight(
        r.exec(),
        {.dout = d_score, .x = x, .dweight = r.grad(weight_), .accumulate = r.accumulates(weight_)});
  ops::linear_backward_data(r.exec(), {.dout = d_score, .weight = r.weight(weight_), .dx = r[d_norm_]});
  r.gradient_ready({weight_});
}

}  // namespace nrl::model
