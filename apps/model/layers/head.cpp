#include "apps/model/layers/head.h"

#include <algorithm>

#include "apps/model/layers/boundary.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/dispatch.h"
#include "core/ops/distillation.h"
#include "core/ops/linear.h"

namespace nrl::model {

using memory::evaluation;
using memory::generation;
using memory::training;
using precision::Gemm;
using precision::Role;

void call_rule(const Run& r, int64_t begin, int64_t count) {
  const LayerContext& c = r.context();
  NRL_CHECK(c.rule || r.exec().needed, "the engine has no objective");
  if (c.rule) c.rule->weights(r.exec(), r.batch(), c.results(r.batch().ids.dim(0)), begin, count);
}

Head::Head(const LayerContext& c, const ParameterList& parameters, const precision::Recipe& recipe,
           int64_t chunk_tokens, const Ports& below)
    : Layer("loss_computation", c),
      weight_(parameters.head),
      norm_parameters_(present({parameters.final_norm, parameters.final_norm_bias})),
      tied_(parameters.head == parameters.embedding),
      d_logits_dtype_(recipe.of(0, Gemm::lm_head, Role::gradient).dtype),
      chunk_tokens_(chunk_tokens),
      vocabulary_(tensor_slice(c.layout, c.spec->vocab_size)) {
  const LayerBuilder b = builder(recipe);
  const ModelSpec& m = b.spec;
  ports_.x = b.port("x", recipe.activations());
  ports_.residual = b.port("residual in", recipe.activations());
  const StreamGradient d_x = input_gradient(b, below);
  ports_.d_x = d_x.slot, ports_.d_x_amax = d_x.amax;
  const Stream in{.x = ports_.x,
                  .residual = ports_.residual,
                  .layer = static_cast<int>(m.layers) - 1,
                  .site = DropoutSite::mlp};
  norm_.emplace(b, in, parameters.final_norm, parameters.final_norm_bias);
  // GEMMs on bf16 rows that are not 16-byte aligned are slow.
  constexpr int64_t aligned = 8;
  const bool bf16_logits = recipe.logits() == DType::bf16;
  const int64_t columns = vocabulary_.count;
  const int64_t unused = bf16_logits ? (aligned - columns % aligned) % aligned : 0;
  logits_ = slot({.name = "logits of a chunk",
                  .width = columns + unused,
                  .dtype = recipe.logits(),
                  .rows = head_chunk_rows,
                  .unused = unused});
  if (c.layout.tensor > 1)
    statistics_ = slot(
        {.name = "logit statistics", .width = statistics_width() * c.layout.tensor, .rows = head_chunk_rows});
  if (c.loss.divergence) {
    at_ids_ = slot({.name = "logits at the teacher's ids",
                    .width = c.loss.columns[TeacherColumn::ids].width,
                    .rows = head_chunk_rows});
    if (c.loss.divergence->zero_outside)
      rest_ = slot({.name = "gradient at other ids", .width = 2, .rows = head_chunk_rows});
  }
  if (c.loss.top_k > 0 && c.layout.tensor > 1)
    largest_ = slot({.name = "largest logits of each rank",
                     .width = 2 * c.loss.top_k * c.layout.tensor,
                     .rows = head_chunk_rows});
  d_norm_ = b.gradient("d_norm", m.hidden, sequence_rows);
  sampled_ = slot(
      {.name = "sampled rows", .width = m.hidden, .dtype = recipe.activations(), .rows = head_chunk_rows});
  input_.emplace(b, norm_->out, d_norm_, Boundary{.overlaps = false});
  describe();
}

void Head::forward(Run& r) {
  const Slot hidden = input_->x;
  norm_->forward(r);
  input_->gather(r);
  r.step(training, "loss", reads(hidden),
         writes(logits_, statistics_, at_ids_, rest_, over(input_->d_x, hidden), d_norm_), [&] {
           train(r);
           input_->reduce(r);
         });
  r.step(evaluation, "log_probs", reads(hidden), writes(logits_, statistics_, at_ids_, largest_), [&] {
    const LossNeeds& loss = r.context().loss;
    for_each_chunk(r, [&](const Rows& rows) {
      compute_logits(r, rows);
      loss.top_k > 0    ? select_largest(r, rows)
      : loss.divergence ? compute_divergence(r, rows)
                        : compute_log_probs(r, rows);
    });
  });
  r.step(generation, "logits", reads(hidden), writes(sampled_), [&] {
    const Tensor& rows = r.batch().cache->sampled_rows;
    if (rows.dim(0) == 0) return;
    const Tensor x = r[sampled_].rows(0, rows.dim(0));
    ops::permute(r.exec(), {.x = r[hidden], .source = rows, .top_k = 1, .out = x});
    ops::linear_forward(
        r.exec(), {.x = x, .weight = r.weight(weight_), .out = r.context().next_logits.rows(0, rows.dim(0))});
  });
}

// The gradient of the weight is computed in the forward pass.
ParameterUse Head::parameters(bool backward) const {
  if (backward) return {norm_parameters_, norm_parameters_};
  std::vector<int> read = norm_parameters_;
  read.push_back(weight_);
  return {read, {weight_}};
}

void Head::backward(Run& r) {
  norm_->backward(r, d_norm_, {}, {ports_.d_x, ports_.d_x_amax});
}

template <class F>
void Head::for_each_chunk(Run& r, F&& work) const {
  const Tensor hidden = r[input_->x], all_logits = r[logits_];
  const int64_t n = hidden.dim(0);
  for (int64_t begin = 0; begin < n; begin += chunk_tokens_) {
    const int64_t count = std::min(chunk_tokens_, n - begin);
    Rows rows{.begin = begin,
              .count = count,
              .x = hidden.rows(begin, count),
              .logits = all_logits.rows(0, count).columns(0, vocabulary_.count),
              .target = r.batch().target.rows(begin, count)};
    rows.d_logits = rows.logits;
    if (d_logits_dtype_ != rows.logits.dtype) {
      rows.d_logits.dtype = d_logits_dtype_;
      rows.d_logits.stride[0] = rows.logits.stride[0] * size_of(rows.logits.dtype) / size_of(d_logits_dtype_);
    }
    work(rows);
  }
}

void Head::train(Run& r) const {
  const int64_t n = r.batch().ids.dim(0);
  switch (r.context().loss.dependence) {
    case Dependence::none:
    case Dependence::batch:
      for_each_chunk(r, [&](const Rows& rows) {
        compute_logits(r, rows);
        r.context().loss.divergence ? compute_divergence(r, rows) : fused_gradient(r, rows);
        gradients(r, rows);
      });
      break;
    case Dependence::token:
      for_each_chunk(r, [&](const Rows& rows) {
        compute_logits(r, rows);
        compute_log_probs(r, rows);
        call_rule(r, rows.begin, rows.count);
        gradient_of_logits(r, rows);
        gradients(r, rows);
      });
      break;
    case Dependence::sequence:
      for_each_chunk(r, [&](const Rows& rows) {
        compute_logits(r, rows);
        compute_log_probs(r, rows);
      });
      call_rule(r, 0, n);
      for_each_chunk(r, [&](const Rows& rows) {
        if (rows.count < n) compute_logits(r, rows);  // a single chunk still has them
        gradient_of_logits(r, rows);
        gradients(r, rows);
      });
      break;
  }
  if (!tied_) r.gradient_ready({weight_});
}

void Head::compute_logits(Run& r, const Rows& rows) const {
  ops::linear_forward(r.exec(), {.x = rows.x, .weight = r.weight(weight_), .out = rows.logits});
}

Tensor Head::separate_gradient(const Rows& rows) const {
  return d_logits_dtype_ != rows.logits.dtype ? rows.d_logits : Tensor{};
}

void Head::fused_gradient(Run& r, const Rows& rows) const {
  const LayerContext& c = r.context();
  const Tensor statistics = gathered_statistics(r, rows);
  ops::cross_entropy(r.exec(), {.logits = rows.logits,
                                .target = rows.target,
                                .weight = r.batch().loss_weight.rows(rows.begin, rows.count),
                                .loss_scale = c.loss_scale,
                                .log_prob = c.head.log_prob.rows(rows.begin, rows.count),
                                .dlogits = separate_gradient(rows),
                                .first_column = statistics ? vocabulary_.begin : 0,
                                .statistics = statistics});
}

void Head::compute_log_probs(Run& r, const Rows& rows) const {
  const LayerContext& c = r.context();
  const Tensor statistics = gathered_statistics(r, rows);
  const auto part = [&](const Tensor& t) { return t ? t.rows(rows.begin, rows.count) : Tensor{}; };
  ops::cross_entropy(r.exec(), {.logits = rows.logits,
                                .target = rows.target,
                                .log_prob = part(c.head.log_prob),
                                .lse = r.trains() || c.loss.divergence ? part(c.lse) : Tensor{},
                                .entropy = part(c.head.entropy),
                                .inverse_temperature = static_cast<float>(c.loss.inverse_temperature),
                                .first_column = statistics ? vocabulary_.begin : 0,
                                .statistics = statistics});
}

void Head::compute_divergence(Run& r, const Rows& rows) const {
  const LayerContext& c = r.context();
  const ops::TopkKl::Options& options = *c.loss.divergence;
  const auto part = [&](const Tensor& t) { return t ? t.rows(rows.begin, rows.count) : Tensor{}; };
  const auto column = [&](TeacherColumn::Index i) {
    const Tensor t = part(r.batch().columns[i]);  // (rows) if a token has one id
    return make_tensor(t.data, t.dtype, {rows.count, c.loss.columns[i].width});
  };
  // Computes log-sum-exp and entropy; the scores overwrite the log-probabilities.
  if (options.zero_outside) compute_log_probs(r, rows);
  const Tensor at_ids = r[at_ids_].rows(0, rows.count);
  ops::gather_columns(r.exec(), {.logits = rows.logits,
                                 .ids = column(TeacherColumn::ids),
                                 .out = at_ids,
                                 .first_column = vocabulary_.begin});
  r.all_reduce_async(at_ids).wait();
  ops::TopkKl kl{.student = at_ids,
                 .teacher = column(TeacherColumn::log_probs),
                 .target = rows.target,
                 .lse = part(c.lse),
                 .entropy = part(c.head.entropy),
                 .score = part(c.head.log_prob),
                 .options = options};
  if (!r.trains()) return ops::topk_kl(r.exec(), kl);
  kl.weight = part(r.batch().loss_weight);
  kl.loss_scale = c.loss_scale;
  kl.gradient = at_ids;
  if (rest_) kl.rest = r[rest_].rows(0, rows.count);
  ops::topk_kl(r.exec(), kl);
  ops::scatter_columns(r.exec(), {.logits = rows.logits,
                                  .ids = column(TeacherColumn::ids),
                                  .gradient = at_ids,
                                  .rest = kl.rest,
                                  .lse = kl.rest ? kl.lse : Tensor{},
                                  .dlogits = separate_gradient(rows),
                                  .first_column = vocabulary_.begin,
                                  .inverse_temperature = static_cast<float>(c.loss.inverse_temperature)});
}

void Head::select_largest(Run& r, const Rows& rows) const {
  const LayerContext& c = r.context();
  const Tensor ids = c.head.top_ids.rows(rows.begin, rows.count),
               logits = c.head.top_logits.rows(rows.begin, rows.count);
  if (!largest_) return ops::top_columns(r.exec(), {.logits = rows.logits, .ids = ids, .values = logits});
  const int64_t ranks = r.layout().tensor, k = c.loss.top_k, each = rows.count * k;
  auto* const data = static_cast<float*>(r[largest_].data);
  const auto parts = [&](int64_t first, int64_t count, DType dtype) {
    return make_tensor(data + first * each, dtype, {count, rows.count, k});
  };
  const auto own = [&](int64_t first, DType dtype) {
    return make_tensor(data + (first + r.layout().tensor_rank) * each, dtype, {rows.count, k});
  };
  ops::top_columns(r.exec(), {.logits = rows.logits,
                              .ids = own(0, DType::i32),
                              .values = own(ranks, DType::f32),
                              .first_column = vocabulary_.begin});
  for (const auto& [first, dtype] : {std::pair(int64_t{0}, DType::i32), std::pair(ranks, DType::f32)})
    r.all_gather_async(own(first, dtype), parts(first, ranks, dtype)).wait();
  ops::top_columns(r.exec(), {.part_ids = parts(0, ranks, DType::i32),
                              .part_values = parts(ranks, ranks, DType::f32),
                              .ids = ids,
                              .values = logits});
}

void Head::gradient_of_logits(Run& r, const Rows& rows) const {
  const LayerContext& c = r.context();
  const auto part = [&](const Tensor& t) { return t ? t.rows(rows.begin, rows.count) : Tensor{}; };
  ops::cross_entropy_gradient(r.exec(),
                              {.logits = rows.logits,
                               .target = rows.target,
                               .lse = part(c.lse),
                               .weight = part(c.head.weight),
                               .entropy = c.head.entropy_weight ? part(c.head.entropy) : Tensor{},
                               .entropy_weight = part(c.head.entropy_weight),
                               .loss_scale = c.loss_scale,
                               .dlogits = separate_gradient(rows),
                               .first_column = vocabulary_.begin,
                               .inverse_temperature = static_cast<float>(c.loss.inverse_temperature)});
}

void Head::gradients(Run& r, const Rows& rows) const {
  // The weight gradient reads x first, because d_norm may overwrite x.
  if (r.context().trains(weight_))
    ops::linear_backward_weight(r.exec(), {.dout = rows.d_logits,
                                           .x = rows.x,
                                           .dweight = r.grad(weight_),
                                           .accumulate = rows.begin > 0 || r.accumulates(weight_)});
  ops::linear_backward_data(r.exec(), {.dout = rows.d_logits,
                                       .weight = r.weight(weight_),
                                       .dx = r[input_->d_x].rows(rows.begin, rows.count)});
}

Tensor Head::gathered_statistics(Run& r, const Rows& rows) const {
  if (!statistics_) return {};
  const int64_t width = statistics_width(), ranks = r.layout().tensor, first = vocabulary_.begin;
  auto* const data = static_cast<float*>(r[statistics_].data);
  const Tensor own = make_tensor(data + r.layout().tensor_rank * rows.count * width, DType::f32,
                                 {rows.count, width}),
               all = make_tensor(data, DType::f32, {ranks, rows.count, width});
  ops::cross_entropy_statistics(
      r.exec(), {.logits = rows.logits,
                 .target = rows.target,
                 .first_column = first,
                 .out = own,
                 .inverse_temperature = static_cast<float>(r.context().loss.inverse_temperature)});
  r.all_gather_async(own, all).wait();
  return all;
}

}  // namespace nrl::model
