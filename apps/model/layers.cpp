#include "apps/model/layers.h"

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

}  // namespace

Embedding::Embedding(const LayerContext& c, const ParameterList& parameters, const precision::Recipe& recipe)
    : Layer("embedding", c), token_table_(parameters.embedding), position_table_(parameters.positions) {
  const int64_t hidden = c.spec->hidden;
  ports_.out = slot({.name = "embedding", .width = hidden, .dtype = recipe.activations()});
  ports_.d_out = slot({.name = "d_out", .width = hidden, .dtype = recipe.gradients(), .port = true});
  if (c.spec->embedding_dropout > 0)
    d_dropped_ = slot({.name = "d_embedding", .width = hidden, .dtype = recipe.gradients()});
  describe();
}

ParameterUse Embedding::parameters(bool backward) const {
  const std::vector<int> tables = present({token_table_, position_table_});
  return backward ? ParameterUse{{}, tables} : ParameterUse{tables, {}};
}

void Embedding::forward(Run& r) {
  const auto embed = [&](float dropout) {
    const MicroBatch& mb = r.batch();
    const Tensor out = r[ports_.out];
    ops::embedding_forward(r.exec(), {.ids = mb.ids,
                                      .table = r.weight(token_table_),
                                      .position_table = r.weight(position_table_),
                                      .positions = mb.positions,
                                      .out = out});
    if (dropout > 0) r.drop(out, {}, out, dropout, -1, DropoutSite::attention);
  };
  r.step(training, "embedding", reads(), writes(ports_.out), [&] { embed(r.spec().embedding_dropout); });
  r.step(evaluation | generation, "embedding", reads(), writes(ports_.out), [&] { embed(0); });
}

void Embedding::backward(Run& r) {
  const Slot d_out = d_dropped_ ? d_dropped_ : ports_.d_out;
  if (d_dropped_)
    r.dgrad("embedding_dropout", reads(ports_.d_out), writes(over(d_dropped_, ports_.d_out)), [&] {
      r.drop(r[ports_.d_out], {}, r[d_dropped_], r.spec().embedding_dropout, -1, DropoutSite::attention);
    });
  r.wgrad("embedding", reads(d_out), [&] {
    ops::embedding_backward(r.exec(), {.ids = r.batch().ids,
                                       .dout = r[d_out],
                                       .dtable = r.grad(token_table_),
                                       .positions = r.batch().positions,
                                       .dposition_table = r.grad(position_table_)});
    r.gradient_ready({token_table_, position_table_});
  });
}

Block::Block(const LayerContext& c, int layer, const LayerParameters& p, const precision::Recipe& recipe,
             bool fuse_gelu)
    : Layer(fmt::format("layer_{}", layer), c),
      parameters_(p),
      add_([this](const memory::SlotSpec& s) { return slot(s); }) {
  const ModelSpec& m = *c.spec;
  ports_.x = slot({.name = "x", .width = m.hidden, .dtype = recipe.activations(), .port = true});
  ports_.residual =
      slot({.name = "residual in", .width = m.hidden, .dtype = recipe.activations(), .port = true});
  ports_.d_out = slot({.name = "d_out", .width = m.hidden, .dtype = recipe.gradients(), .port = true});
  d_middle_ = slot({.name = "d_residual", .width = m.hidden, .dtype = recipe.gradients()});
  ports_.d_x = slot({.name = "d_x", .width = m.hidden, .dtype = recipe.gradients()});
  const Stream in{.x = ports_.x, .residual = ports_.residual, .layer = layer - 1, .site = DropoutSite::mlp};
  attention_.emplace(m, recipe, add_, layer, p, in, d_middle_, ports_.d_x);
  mlp_.emplace(m, recipe, add_, layer, p, attention_->stream(), fuse_gelu, ports_.d_out, d_middle_);
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
           int64_t chunk_tokens)
    : Layer("loss_computation", c),
      weight_(parameters.head),
      norm_parameters_(present({parameters.final_norm, parameters.final_norm_bias})),
      tied_(parameters.head == parameters.embedding),
      d_logits_dtype_(recipe.of(0, Gemm::lm_head, Role::gradient).dtype),
      chunk_tokens_(chunk_tokens) {
  const ModelSpec& m = *c.spec;
  ports_.x = slot({.name = "x", .width = m.hidden, .dtype = recipe.activations(), .port = true});
  ports_.residual =
      slot({.name = "residual in", .width = m.hidden, .dtype = recipe.activations(), .port = true});
  ports_.d_x = slot({.name = "d_x", .width = m.hidden, .dtype = recipe.gradients()});
  const Stream in{.x = ports_.x,
                  .residual = ports_.residual,
                  .layer = static_cast<int>(m.layers) - 1,
                  .site = DropoutSite::mlp};
  norm_.emplace(
      m, recipe, [this](const memory::SlotSpec& s) { return slot(s); }, in, parameters.final_norm,
      parameters.final_norm_bias, recipe.of(0, Gemm::lm_head, Role::input));
  // GEMMs on bf16 rows that are not 16-byte aligned are slow.
  constexpr int64_t aligned = 8;
  const bool bf16_logits = recipe.logits() == DType::bf16;
  logits_ = slot({.name = "logits of a chunk",
                  .width = bf16_logits ? (m.vocab_size + aligned - 1) / aligned * aligned : m.vocab_size,
                  .dtype = recipe.logits(),
                  .rows = head_chunk_rows});
  d_norm_ = slot({.name = "d_norm", .width = m.hidden, .dtype = recipe.gradients()});
  describe();
}

void Head::forward(Run& r) {
  const Slot hidden = norm_->out;
  norm_->forward(r);
  r.step(training, "loss", reads(hidden), writes(logits_, over(d_norm_, hidden)), [&] { chunks(r, true); });
  r.step(evaluation, "log_probs", reads(hidden), writes(logits_), [&] { chunks(r, false); });
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
  norm_->backward(r, d_norm_, {}, ports_.d_x);
}

void Head::chunks(Run& r, bool train) const {
  const MicroBatch& mb = r.batch();
  const Tensor hidden = r[norm_->out], all_logits = r[logits_];
  const int64_t n = hidden.dim(0);
  for (int64_t begin = 0; begin < n; begin += chunk_tokens_) {
    const int64_t count = std::min(chunk_tokens_, n - begin);
    const Tensor x = hidden.rows(begin, count),
                 logits = all_logits.rows(0, count).columns(0, r.spec().vocab_size);
    Tensor d_logits = logits;
    const bool shorter = d_logits_dtype_ != logits.dtype;
    if (shorter) {  // stored in the first half of each row of the logits
      d_logits.dtype = d_logits_dtype_;
      d_logits.stride[0] = logits.stride[0] * size_of(logits.dtype) / size_of(d_logits_dtype_);
    }
    ops::linear_forward(r.exec(), {.x = x, .weight = r.weight(weight_), .out = logits});
    ops::cross_entropy(r.exec(), {.logits = logits,
                                  .target = mb.target.rows(begin, count),
                                  .weight = train ? mb.loss_weight.rows(begin, count) : Tensor{},
                                  .log_prob = r.context().log_prob.rows(begin, count),
                                  .dlogits = train && shorter ? d_logits : Tensor{}});
    if (!train) continue;
    // d_logits overwrites the logits. The weight gradient reads x first, because d_norm may overwrite x.
    ops::linear_backward_weight(r.exec(), {.dout = d_logits,
                                           .x = x,
                                           .dweight = r.grad(weight_),
                                           .accumulate = begin > 0 || r.accumulates(weight_)});
    ops::linear_backward_data(
        r.exec(), {.dout = d_logits, .weight = r.weight(weight_), .dx = r[d_norm_].rows(begin, count)});
  }
  if (train && !tied_) r.gradient_ready({weight_});
}

ChunkBegin::ChunkBegin(const LayerContext& c, const precision::Recipe& recipe) : Layer("chunk_begin", c) {
  ports_.out = slot({.name = "received", .width = c.spec->hidden, .dtype = recipe.activations()});
  ports_.d_out = slot({.name = "d_out", .width = c.spec->hidden, .dtype = recipe.gradients(), .port = true});
  describe();
}

ChunkEnd::ChunkEnd(const LayerContext& c, int layer, const precision::Recipe& recipe)
    : Layer("chunk_end", c), layer_(layer) {
  const int64_t hidden = c.spec->hidden;
  ports_.x = slot({.name = "x", .width = hidden, .dtype = recipe.activations(), .port = true});
  ports_.residual =
      slot({.name = "residual in", .width = hidden, .dtype = recipe.activations(), .port = true});
  ports_.out = slot({.name = "sent", .width = hidden, .dtype = recipe.activations()});
  ports_.d_x = slot({.name = "received gradient", .width = hidden, .dtype = recipe.gradients()});
  describe();
}

void ChunkEnd::forward(Run& r) {
  r.step("add_residual", reads(ports_.x, ports_.residual), writes(over(ports_.out, ports_.x)), [&] {
    r.drop(r[ports_.x], r[ports_.residual], r[ports_.out], r.spec().residual_dropout, layer_,
           DropoutSite::mlp);
  });
}

}  // namespace nrl::model
