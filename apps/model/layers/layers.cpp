#include "apps/model/layers/layers.h"

#include <spdlog/fmt/fmt.h>

#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::evaluation;
using memory::generation;
using memory::training;
using precision::Gemm;
using precision::Role;

namespace {

std::vector<int> present(std::initializer_list<int> parameters) {
  std::vector<int> out;
  for (const int p : parameters)
    if (p >= 0) out.push_back(p);
  return out;
}

/// The gradient that a layer passes to the one `below`.
StreamGradient input_gradient(const LayerBuilder& b, const Ports& below) {
  StreamGradient d_x{b.gradient("d_x", b.spec.hidden, sequence_rows)};
  if (below.d_out_amax) d_x.amax = b.number("d_x amax");
  return d_x;
}

}  // namespace

Embedding::Embedding(const LayerContext& c, const ParameterList& parameters, const precision::Recipe& recipe)
    : Layer("embedding", c),
      token_table_(parameters.embedding),
      position_table_(parameters.positions),
      vocabulary_(tensor_slice(c.layout, c.spec->vocab_size)) {
  const LayerBuilder b = builder(recipe);
  ports_.out = b.activation("embedding", b.spec.hidden, sequence_rows);
  ports_.d_out = b.port("d_out", recipe.gradients());
  if (b.spec.embedding_dropout > 0) d_dropped_ = b.gradient("d_embedding", b.spec.hidden, sequence_rows);
  output_.emplace(b, ports_.out, d_dropped_ ? d_dropped_ : ports_.d_out, Boundary{.overlaps = false});
  describe();
}

ParameterUse Embedding::parameters(bool backward) const {
  const std::vector<int> tables = present({token_table_, position_table_});
  return backward ? ParameterUse{{}, tables} : ParameterUse{tables, {}};
}

std::optional<int64_t> Embedding::first_id() const {
  return context().layout.tensor > 1 ? std::optional(vocabulary_.begin) : std::nullopt;
}

void Embedding::forward(Run& r) {
  const auto embed = [&](float dropout) {
    const MicroBatch& mb = r.batch();
    // Like a bias, positions are added on one rank.
    output_->multiply(r, [&](const GemmRows&) {
      ops::embedding_forward(r.exec(), {.ids = mb.ids,
                                        .table = r.weight(token_table_),
                                        .position_table = RowOutput::bias(r, position_table_),
                                        .positions = mb.positions,
                                        .out = r[output_->partial],
                                        .first_id = first_id()});
    });
    const Tensor out = r[ports_.out];
    if (dropout > 0) r.drop(out, {}, out, dropout, -1, DropoutSite::attention);
  };
  const Writes written = writes(output_->partial, ports_.out);
  r.step(training, "embedding", reads(), written, [&] { embed(r.spec().embedding_dropout); });
  r.step(evaluation | generation, "embedding", reads(), written, [&] { embed(0); });
}

void Embedding::backward(Run& r) {
  if (!r.context().trains(token_table_) && !r.context().trains(position_table_)) return;
  const Slot d_out = output_->d_full;
  if (d_dropped_)
    r.dgrad("embedding_dropout", reads(ports_.d_out), writes(over(d_dropped_, ports_.d_out)), [&] {
      r.drop(r[ports_.d_out], {}, r[d_dropped_], r.spec().embedding_dropout, -1, DropoutSite::attention);
    });
  output_->gather(r);
  r.wgrad("embedding", reads(d_out), [&] {
    ops::embedding_backward(r.exec(), {.ids = r.batch().ids,
                                       .dout = r[d_out],
                                       .dtable = r.grad(token_table_),
                                       .positions = r.batch().positions,
                                       .dposition_table = r.grad(position_table_),
                                       .first_id = first_id()});
    r.gradient_ready({token_table_, position_table_});
  });
}

Block::Block(const LayerContext& c, int layer, const LayerParameters& p, const precision::Recipe& recipe,
             bool fuse_gelu, const Ports& below)
    : Layer(fmt::format("layer_{}", layer), c), parameters_(p) {
  const LayerBuilder b = builder(recipe, layer);
  const ModelSpec& m = b.spec;
  ports_.x = b.port("x", recipe.activations());
  ports_.residual = b.port("residual in", recipe.activations());
  ports_.d_out = b.port("d_out", recipe.gradients());
  const Slot d_middle = b.gradient("d_residual", m.hidden, sequence_rows);
  const StreamGradient d_x = input_gradient(b, below);
  ports_.d_x = d_x.slot, ports_.d_x_amax = d_x.amax;
  const Stream in{.x = ports_.x, .residual = ports_.residual, .layer = layer - 1, .site = DropoutSite::mlp};
  attention_ = attention(b, c, p, {.in = in, .d_out = d_middle, .port = false, .d_x = d_x});
  const Sublayer::Ends ends{
      .in = attention_->stream(), .d_out = ports_.d_out, .d_x = {d_middle, attention_->d_out_amax()}};
  mlp_ = m.has_experts(layer)
             ? mixture_of_experts(b, p, ends, m.moe.aux_tokens == AuxLoss::sequence ? c.sequences : 1)
             : mlp(b, p, ends, fuse_gelu);
  ports_.d_out_amax = mlp_->d_out_amax();
  ports_.out = mlp_->stream().x;
  ports_.sum = mlp_->stream().residual;
  describe();
}

ParameterUse Block::parameters(bool backward) const {
  std::vector<int> all = parameters_.all();
  return {all, backward ? all : std::vector<int>{}};
}

void Block::forward(Run& r) {
  attention_->forward(r);
  mlp_->forward(r);
}

void Block::backward(Run& r) {
  mlp_->backward(r);
  attention_->backward(r);
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
  logits_ = slot({.name = "logits of a chunk",
                  .width = bf16_logits ? (columns + aligned - 1) / aligned * aligned : columns,
                  .dtype = recipe.logits(),
                  .rows = head_chunk_rows});
  if (c.layout.tensor > 1)
    statistics_ = slot({.name = "logit statistics", .width = 3 * c.layout.tensor, .rows = head_chunk_rows});
  d_norm_ = b.gradient("d_norm", m.hidden, sequence_rows);
  input_.emplace(b, norm_->out, d_norm_, Boundary{.overlaps = false});
  describe();
}

void Head::forward(Run& r) {
  const Slot hidden = input_->x;
  norm_->forward(r);
  input_->gather(r);
  r.step(training, "loss", reads(hidden), writes(logits_, statistics_, over(input_->d_x, hidden), d_norm_),
         [&] {
           chunks(r, true);
           input_->reduce(r);
         });
  r.step(evaluation, "log_probs", reads(hidden), writes(logits_, statistics_), [&] { chunks(r, false); });
  r.step(generation, "logits", reads(hidden), writes(), [&] {
    const Tensor all = r[hidden];
    ops::linear_forward(
        r.exec(),
        {.x = all.rows(all.dim(0) - 1, 1), .weight = r.weight(weight_), .out = r.context().next_logits});
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

void Head::chunks(Run& r, bool train) const {
  const MicroBatch& mb = r.batch();
  const Tensor hidden = r[input_->x], all_logits = r[logits_];
  const int64_t n = hidden.dim(0);
  for (int64_t begin = 0; begin < n; begin += chunk_tokens_) {
    const int64_t count = std::min(chunk_tokens_, n - begin);
    const Tensor x = hidden.rows(begin, count),
                 logits = all_logits.rows(0, count).columns(0, vocabulary_.count),
                 target = mb.target.rows(begin, count);
    Tensor d_logits = logits;
    const bool shorter = d_logits_dtype_ != logits.dtype;
    if (shorter) {  // stored in the first half of each row of the logits
      d_logits.dtype = d_logits_dtype_;
      d_logits.stride[0] = logits.stride[0] * size_of(logits.dtype) / size_of(d_logits_dtype_);
    }
    ops::linear_forward(r.exec(), {.x = x, .weight = r.weight(weight_), .out = logits});
    const Tensor statistics = gathered_statistics(r, logits, target);
    ops::cross_entropy(r.exec(), {.logits = logits,
                                  .target = target,
                                  .weight = train ? mb.loss_weight.rows(begin, count) : Tensor{},
                                  .loss_scale = train ? r.context().loss_scale : Tensor{},
                                  .log_prob = r.context().log_prob.rows(begin, count),
                                  .dlogits = train && shorter ? d_logits : Tensor{},
                                  .first_column = statistics ? vocabulary_.begin : 0,
                                  .statistics = statistics});
    if (!train) continue;
    // d_logits overwrites the logits. The weight gradient reads x first, because d_norm may overwrite x.
    if (r.context().trains(weight_))
      ops::linear_backward_weight(r.exec(), {.dout = d_logits,
                                             .x = x,
                                             .dweight = r.grad(weight_),
                                             .accumulate = begin > 0 || r.accumulates(weight_)});
    ops::linear_backward_data(
        r.exec(), {.dout = d_logits, .weight = r.weight(weight_), .dx = r[input_->d_x].rows(begin, count)});
  }
  if (train && !tied_) r.gradient_ready({weight_});
}

Tensor Head::gathered_statistics(Run& r, const Tensor& logits, const Tensor& target) const {
  if (!statistics_) return {};
  const int64_t count = logits.dim(0), ranks = r.layout().tensor;
  auto* const data = static_cast<float*>(r[statistics_].data);
  const Tensor own = make_tensor(data + r.layout().tensor_rank * count * 3, DType::f32, {count, 3}),
               all = make_tensor(data, DType::f32, {ranks, count, 3});
  ops::cross_entropy_statistics(
      r.exec(), {.logits = logits, .target = target, .first_column = vocabulary_.begin, .out = own});
  r.all_gather_async(own, all).wait();
  return all;
}

ChunkBegin::ChunkBegin(const LayerContext& c, const precision::Recipe& recipe) : Layer("chunk_begin", c) {
  const LayerBuilder b = builder(recipe);
  ports_.out = b.activation("received", b.spec.hidden, sequence_rows);
  ports_.d_out = b.port("d_out", recipe.gradients());
  describe();
}

ChunkEnd::ChunkEnd(const LayerContext& c, int layer, const precision::Recipe& recipe)
    : Layer("chunk_end", c), layer_(layer) {
  const LayerBuilder b = builder(recipe);
  ports_.x = b.port("x", recipe.activations());
  ports_.residual = b.port("residual in", recipe.activations());
  ports_.out = b.activation("sent", b.spec.hidden, sequence_rows);
  ports_.d_x = b.gradient("received gradient", b.spec.hidden, sequence_rows);
  describe();
}

void ChunkEnd::forward(Run& r) {
  r.step("add_residual", reads(ports_.x, ports_.residual), writes(over(ports_.out, ports_.x)), [&] {
    const Tensor x = r[ports_.x], residual = r[ports_.residual], out = r[ports_.out];
    if (residual)
      r.drop(x, residual, out, r.spec().residual_dropout, layer_, DropoutSite::mlp);
    else if (out.data != x.data)  // a chunk without blocks
      ops::copy(r.exec(), x, out);
  });
}

}  // namespace nrl::model
