#include "apps/model/inference.h"

#include <algorithm>
#include <cstring>

#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

constexpr int64_t chunk_tokens = 128;  // of the prompt at a time

// Hands out parts of one block: first counts, then, with memory, gives addresses.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  Tensor take(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(base_ ? base_ + used_ : nullptr, dtype, shape);
    used_ += static_cast<size_t>((t.bytes() + 255) / 256 * 256);
    return t;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace

Inference::Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                     ops::Exec& exec, int64_t max_tokens)
    : spec_(spec), parameters_(parameters), views_(std::move(views)), exec_(exec), max_tokens_(max_tokens) {
  NRL_CHECK(max_tokens > 0);
  if (spec.learned_positions && max_tokens > spec.max_positions)
    fail(Exit::usage, "this model has {} positions; {} tokens do not fit", spec.max_positions, max_tokens);
  dtype_ = views_[static_cast<size_t>(parameters.embedding)].weight.dtype;
  const int64_t n = std::min(chunk_tokens, max_tokens);
  size_t workspace =
      ops::attention_workspace(n, spec.heads, spec.kv_heads, spec.head_dim, max_tokens, exec.threads);
  for (const Parameter& p : parameters.all)
    if (p.shape.size() == 2)
      workspace = std::max(workspace, ops::linear_workspace(n, p.shape[0], p.shape[1], dtype_, exec.threads));
  for (int pass = 0; pass < 2; ++pass) {
    Carver c(memory_.data());
    keys_.clear();
    values_.clear();
    for (int64_t i = 0; i < spec.layers; ++i) {
      keys_.push_back(c.take(dtype_, {max_tokens, spec.kv_width()}));
      values_.push_back(c.take(dtype_, {max_tokens, spec.kv_width()}));
    }
    ids_ = c.take(DType::i32, {n});
    positions_ = c.take(DType::i32, {n});
    cu_ = c.take(DType::i32, {2, 2});
    resid_ = c.take(dtype_, {n, spec.hidden});
    out_ = c.take(dtype_, {n, spec.hidden});
    norm_ = c.take(dtype_, {n, spec.hidden});
    qkv_ = c.take(dtype_, {n, spec.qkv_width()});
    attn_ = c.take(dtype_, {n, spec.q_width()});
    mlp_ = c.take(dtype_, {n, spec.mlp_in_width()});
    act_ = c.take(dtype_, {n, spec.ffn});
    logits_ = c.take(DType::f32, {1, spec.vocab_size});
    if (spec.use_rope) rope_table_ = c.take(DType::f32, {max_tokens, spec.rope.rotary_dim});
    const Tensor scratch = c.take(DType::u8, {static_cast<int64_t>(workspace)});
    exec.workspace = {static_cast<std::byte*>(scratch.data), workspace};
    if (pass == 0) memory_ = cpu::HostMemory(c.used());
  }
  if (spec.use_rope) {
    const auto table = ops::rope_table(spec.rope, max_tokens, max_tokens);
    std::memcpy(rope_table_.data, table.data(), table.size() * sizeof(float));
  }
}

std::span<const float> Inference::append(std::span<const int32_t> tokens) {
  NRL_CHECK(!tokens.empty() && length_ + static_cast<int64_t>(tokens.size()) <= max_tokens_);
  while (!tokens.empty()) {
    const auto now = std::min<size_t>(tokens.size(), chunk_tokens);
    append_chunk(tokens.first(now));
    tokens = tokens.subspan(now);
  }
  return {logits_.ptr<float>(), static_cast<size_t>(spec_.vocab_size)};
}

void Inference::append_chunk(std::span<const int32_t> tokens) {
  const ModelSpec& m = spec_;
  const auto n = static_cast<int64_t>(tokens.size());
  auto weight = [&](int p) { return p < 0 ? Tensor{} : views_[static_cast<size_t>(p)].weight; };
  std::copy(tokens.begin(), tokens.end(), ids_.ptr<int32_t>());
  for (int64_t i = 0; i < n; ++i) positions_.ptr<int32_t>()[i] = static_cast<int32_t>(length_ + i);
  int32_t* cu = cu_.ptr<int32_t>();
  cu[0] = cu[2] = 0, cu[1] = static_cast<int32_t>(n), cu[3] = static_cast<int32_t>(length_ + n);
  const Tensor cu_q = make_tensor(cu, DType::i32, {2}), cu_k = make_tensor(cu + 2, DType::i32, {2});
  const Tensor ids = ids_.rows(0, n), positions = positions_.rows(0, n), resid = resid_.rows(0, n),
               out = out_.rows(0, n), norm = norm_.rows(0, n), qkv = qkv_.rows(0, n), attn = attn_.rows(0, n),
               mlp = mlp_.rows(0, n), act = act_.rows(0, n);
  // resid = x (+ resid), normalised into norm
  auto normalise = [&](const Tensor& x, bool add, int w, int b) {
    ops::norm_forward(exec_, {m.norm,
                              m.norm_eps,
                              x,
                              add ? resid : Tensor{},
                              add ? resid : Tensor{},
                              weight(w),
                              weight(b),
                              norm,
                              {},
                              {}});
  };
  ops::embedding_forward(
      exec_, {ids, weight(parameters_.embedding), weight(parameters_.positions), positions, resid});
  for (size_t l = 0; l < parameters_.layers.size(); ++l) {
    const LayerParameters& p = parameters_.layers[l];
    normalise(l ? out : resid, l > 0, p.norm1, p.norm1_bias);
    ops::linear_forward(exec_, {norm, weight(p.qkv), weight(p.qkv_bias), qkv});
    auto qk_norm = [&](int64_t first, int64_t heads, int w) {
      const Tensor x = m.heads_of(qkv, first, heads);
      ops::norm_forward(exec_, {ops::NormKind::rms, m.norm_eps, x, {}, {}, weight(w), {}, x, {}, {}});
    };
    if (m.qk_norm) {
      qk_norm(0, m.heads, p.q_norm);
      qk_norm(m.q_width(), m.kv_heads, p.k_norm);
    }
    if (m.use_rope)
      ops::rope(exec_, {m.heads_of(qkv, 0, m.heads + m.kv_heads), rope_table_, positions, false});
    const int64_t row = m.kv_width() * size_of(dtype_);
    for (int64_t i = 0; i < n; ++i) {
      const Tensor k = qkv.rows(i, 1).columns(m.q_width(), m.kv_width()),
                   v = qkv.rows(i, 1).columns(m.q_width() + m.kv_width(), m.kv_width());
      std::memcpy(static_cast<char*>(keys_[l].data) + (length_ + i) * row, k.data, static_cast<size_t>(row));
      std::memcpy(static_cast<char*>(values_[l].data) + (length_ + i) * row, v.data,
                  static_cast<size_t>(row));
    }
    ops::AttentionForward a;
    a.q = m.heads_of(qkv, 0, m.heads);
    a.k = keys_[l].rows(0, length_ + n).split_heads(m.kv_heads, m.head_dim);
    a.v = values_[l].rows(0, length_ + n).split_heads(m.kv_heads, m.head_dim);
    a.out = attn.split_heads(m.heads, m.head_dim);
    a.cu_q = cu_q, a.cu_k = cu_k;
    a.scale = m.attention_scale();
    a.window = m.window;
    ops::attention_forward(exec_, a);
    ops::linear_forward(exec_, {attn, weight(p.o), weight(p.o_bias), out});
    normalise(out, true, p.norm2, p.norm2_bias);
    if (m.gated) {
      ops::linear_forward(exec_, {norm, weight(p.mlp_in), weight(p.mlp_in_bias), mlp});
      ops::activation_forward(exec_, {m.activation, true, mlp, act});
    } else {
      ops::linear_forward(exec_, {norm, weight(p.mlp_in), weight(p.mlp_in_bias), act, m.activation});
    }
    ops::linear_forward(exec_, {act, weight(p.mlp_out), weight(p.mlp_out_bias), out});
  }
  normalise(out, true, parameters_.final_norm, parameters_.final_norm_bias);
  ops::linear_forward(exec_, {norm.rows(n - 1, 1), weight(parameters_.head), {}, logits_});
  length_ += n;
}

}  // namespace nrl::model
