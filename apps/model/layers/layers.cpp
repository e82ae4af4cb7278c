#include "apps/model/layers/layers.h"

#include <cmath>

#include <spdlog/fmt/fmt.h>

#include "apps/model/layers/boundary.h"
#include "core/base/dtype.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using memory::evaluation;
using memory::generation;
using memory::training;
using precision::Gemm;
using precision::Role;

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

float Embedding::scale(const Run& r) const {
  if (!r.spec().scaled_embedding) return 1;
  const float exact = std::sqrt(static_cast<float>(r.spec().hidden));
  switch (context().parameters[token_table_].weight.dtype) {
    case DType::bf16:
      return static_cast<float>(bf16(exact));
    case DType::f16:
      return static_cast<float>(f16(exact));
    default:
      return exact;
  }
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
                                        .first_id = first_id(),
                                        .scale = scale(r)});
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
                                       .first_id = first_id(),
                                       .scale = scale(r)});
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
