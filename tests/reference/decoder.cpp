#include "tests/reference/decoder.h"

#include <algorithm>
#include <numbers>

#include "tests/reference/attention.h"

namespace reference {
namespace {

using std::numbers::pi;

// ---- Normalization. y = x_hat * (weight + offset) + bias, with x_hat = x / sqrt(mean(x^2) + eps) (RMSNorm),
// or (x - mean(x)) / sqrt(var(x) + eps) (LayerNorm).

struct Normalized {
  Tensor x_hat, y;
  std::vector<double> rstd;  // of each row
};

Normalized norm(const Tensor& x, const Tensor& weight, double offset, const Tensor* bias, double eps,
                bool centered) {
  Normalized n{x, x, {}};
  const auto count = static_cast<double>(x.columns);
  for (size_t r = 0; r < x.rows; ++r) {
    double mean = 0, square = 0;
    if (centered)
      for (size_t i = 0; i < x.columns; ++i) mean += x(r, i) / count;
    for (size_t i = 0; i < x.columns; ++i) square += (x(r, i) - mean) * (x(r, i) - mean) / count;
    n.rstd.push_back(1 / std::sqrt(square + eps));
    for (size_t i = 0; i < x.columns; ++i) {
      n.x_hat(r, i) = (x(r, i) - mean) * n.rstd[r];
      n.y(r, i) = n.x_hat(r, i) * (weight[i] + offset) + (bias ? (*bias)[i] : 0);
    }
  }
  return n;
}

// dx = rstd * (g - x_hat * mean(g * x_hat) [- mean(g)]) with g = dy * (weight + offset).
Tensor norm_backward(const Tensor& dy, const Normalized& n, const Tensor& weight, double offset,
                     bool centered, Tensor& dweight, Tensor* dbias) {
  Tensor dx = zeros_like(dy);
  const auto count = static_cast<double>(dy.columns);
  for (size_t r = 0; r < dy.rows; ++r) {
    double mean_g = 0, mean_gx = 0;
    for (size_t i = 0; i < dy.columns; ++i) {
      const double g = dy(r, i) * (weight[i] + offset);
      if (centered) mean_g += g / count;
      mean_gx += g * n.x_hat(r, i) / count;
      dweight[i] += dy(r, i) * n.x_hat(r, i);
      if (dbias) (*dbias)[i] += dy(r, i);
    }
    for (size_t i = 0; i < dy.columns; ++i)
      dx(r, i) = n.rstd[r] * (dy(r, i) * (weight[i] + offset) - mean_g - n.x_hat(r, i) * mean_gx);
  }
  return dx;
}

// ---- Activation of the MLP and its derivative.

double activate(const std::string& kind, double x) {
  if (kind == "silu") return x / (1 + std::exp(-x));
  if (kind == "gelu_erf") return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)));  // gelu_tanh
}

double activate_slope(const std::string& kind, double x) {
  if (kind == "silu") {
    const double s = 1 / (1 + std::exp(-x));
    return s + x * s * (1 - s);
  }
  if (kind == "gelu_erf")
    return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-x * x / 2) / std::sqrt(2 * pi);
  const double t = std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x);
}

// ---- Heads. A tensor (tokens, heads * head_dim) as (tokens * heads, head_dim), to normalize each head.

Tensor reshaped(Tensor t, size_t columns) {
  t.rows = t.size() / columns;
  t.columns = columns;
  return t;
}

// Rotates the pairs (i, i + rotary_dim / 2) of every head by the angles of its position; `direction` -1 is
// the transpose, for the backward pass.
void rotate(Tensor& x, const Tensor& table, const std::vector<size_t>& positions, size_t head_dim,
            double direction) {
  const size_t half = table.columns / 2;
  for (size_t t = 0; t < x.rows; ++t)
    for (size_t head = 0; head < x.columns; head += head_dim)
      for (size_t i = 0; i < half; ++i) {
        double &a = x(t, head + i), &b = x(t, head + half + i);
        const size_t at = positions[t];
        const double c = table(at, i), s = direction * table(at, half + i), a0 = a;
        a = a0 * c - b * s;
        b = b * c + a0 * s;
      }
}

// ---- The decoder.

// What the backward pass of a layer needs.
struct Layer {
  Normalized norm1, norm2, q_norm, k_norm, post_norm1, post_norm2;
  Tensor q, k, v;  // as attention takes them
  Attention attention;
  Tensor gate, up, hidden;
  ExpertLayer experts;
};

class Decoder {
 public:
  Decoder(const Config& config, const Tensors& weights, const Tokens& tokens, size_t rope_length,
          const Layout& layout = {})
      : c_(config), w_(weights), tokens_(tokens), layout_(layout) {
    if (layout.positions.empty())
      for (size_t t = 0; t < tokens.size(); ++t) layout_.positions.push_back(t);
    if (layout.first.empty()) layout_.first.assign(tokens.size(), 0);
    if (!c_.gpt2())
      for (size_t i = 0; i < c_.layers; ++i)
        rope_.push_back(
            rope_table(c_.rope_of(i), tokens.size(), rope_length > 0 ? rope_length : tokens.size()));
    forward();
  }

  const Tensor& logits() const { return logits_; }

  double router_losses() const {
    double sum = 0;
    for (size_t i = 0; i < c_.layers; ++i)
      if (c_.has_experts(i)) sum += router_loss(c_.experts, layers_[i].experts);
    return sum;
  }

  void backward(const Tensor& dlogits, Tensors& g, double router_scale) {
    g_ = &g;
    router_scale_ = router_scale;
    Tensor dx = linear_backward(dlogits, final_norm_.y, w_.at(head()), g.at(head()), nullptr);
    dx = norm_backward("final_norm", dx, final_norm_, c_.gpt2());
    for (size_t i = c_.layers; i-- > 0;) dx = layer_backward(i, dx);
    for (size_t t = 0; t < tokens_.size(); ++t)
      for (size_t i = 0; i < c_.hidden; ++i) {
        g.at("embedding.weight")(static_cast<size_t>(tokens_[t]), i) += embedding_scale() * dx(t, i);
        if (c_.gpt2()) g.at("positions.weight")(layout_.positions[t], i) += dx(t, i);
      }
  }

 private:
  double embedding_scale() const { return c_.gemma() ? std::sqrt(static_cast<double>(c_.hidden)) : 1; }
  double norm_offset() const { return c_.gemma() ? 1 : 0; }
  size_t window(size_t layer) const { return c_.windowed(layer) ? c_.window : 0; }
  std::string head() const { return c_.tied ? "embedding.weight" : "head.weight"; }
  static std::string prefix(size_t layer) { return "layers." + std::to_string(layer) + "."; }
  const Tensor* bias(const std::string& name) const {
    const auto found = w_.find(name + ".bias");
    return found == w_.end() ? nullptr : &found->second;
  }
  Tensor* bias_gradient(const std::string& name) { return bias(name) ? &g_->at(name + ".bias") : nullptr; }

  Tensor linear(const std::string& name, const Tensor& x) const {
    return reference::linear(x, w_.at(name + ".weight"), bias(name));
  }
  Tensor linear_backward(const std::string& name, const Tensor& dy, const Tensor& x) {
    return linear_backward(dy, x, w_.at(name + ".weight"), g_->at(name + ".weight"), bias_gradient(name));
  }
  static Tensor linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw, Tensor* db) {
    return reference::linear_backward(dy, x, w, dw, db);
  }
  Normalized norm(const std::string& name, const Tensor& x, bool centered) const {
    return reference::norm(x, w_.at(name + ".weight"), norm_offset(), bias(name), c_.norm_eps, centered);
  }
  Tensor norm_backward(const std::string& name, const Tensor& dy, const Normalized& n, bool centered) {
    return reference::norm_backward(dy, n, w_.at(name + ".weight"), norm_offset(), centered,
                                    g_->at(name + ".weight"), bias_gradient(name));
  }

  void forward() {
    Tensor x(tokens_.size(), c_.hidden);
    for (size_t t = 0; t < x.rows; ++t)
      for (size_t i = 0; i < c_.hidden; ++i) {
        x(t, i) = embedding_scale() * w_.at("embedding.weight")(static_cast<size_t>(tokens_[t]), i);
        if (c_.gpt2()) x(t, i) += w_.at("positions.weight")(layout_.positions[t], i);
      }
    for (size_t i = 0; i < c_.layers; ++i) layer_forward(i, x);
    final_norm_ = norm("final_norm", x, c_.gpt2());
    logits_ = reference::linear(final_norm_.y, w_.at(head()), nullptr);
  }

  // x += attention(norm(x)); x += mlp(norm(x)). Gemma: x += norm(attention(norm(x))), the MLP likewise.
  void layer_forward(size_t index, Tensor& x) {
    const std::string at = prefix(index);
    Layer l;
    l.norm1 = norm(at + "attention_norm", x, c_.gpt2());
    l.q = linear(at + "q", l.norm1.y);
    l.k = linear(at + "k", l.norm1.y);
    l.v = linear(at + "v", l.norm1.y);
    if (c_.qk_norm) {
      l.q_norm = norm(at + "q_norm", reshaped(l.q, c_.head_dim), false);
      l.k_norm = norm(at + "k_norm", reshaped(l.k, c_.head_dim), false);
      l.q = reshaped(l.q_norm.y, l.q.columns);
      l.k = reshaped(l.k_norm.y, l.k.columns);
    }
    if (!c_.gpt2()) {
      rotate(l.q, rope_[index], layout_.positions, c_.head_dim, 1);
      rotate(l.k, rope_[index], layout_.positions, c_.head_dim, 1);
    }
    l.attention = attention(c_, window(index), layout_, l.q, l.k, l.v);
    add(x, post_norm(at + "attention_post_norm", linear(at + "o", l.attention.out), l.post_norm1));

    l.norm2 = norm(at + "mlp_norm", x, c_.gpt2());
    if (c_.has_experts(index)) {
      add(x, experts_forward(c_.experts, w_, at, l.norm2.y, l.experts));
      layers_.push_back(std::move(l));
      return;
    }
    l.up = linear(at + "up", l.norm2.y);
    l.hidden = l.up;
    if (c_.gpt2()) {
      for (double& h : l.hidden.values) h = activate(c_.activation, h);
    } else {
      l.gate = linear(at + "gate", l.norm2.y);
      for (size_t i = 0; i < l.hidden.size(); ++i) l.hidden[i] *= activate(c_.activation, l.gate[i]);
    }
    add(x, post_norm(at + "mlp_post_norm", linear(at + "down", l.hidden), l.post_norm2));
    layers_.push_back(std::move(l));
  }

  Tensor post_norm(const std::string& name, const Tensor& x, Normalized& n) const {
    if (!c_.gemma()) return x;
    n = norm(name, x, false);
    return n.y;
  }
  Tensor post_norm_backward(const std::string& name, const Tensor& dy, const Normalized& n) {
    return c_.gemma() ? norm_backward(name, dy, n, false) : dy;
  }

  Tensor layer_backward(size_t index, Tensor dx) {
    const std::string at = prefix(index);
    const Layer& l = layers_[index];
    const Tensor dnorm2 = c_.has_experts(index) ? experts_backward(c_.experts, w_, at, l.norm2.y, dx,
                                                                   l.experts, router_scale_, *g_)
                                                : mlp_backward(at, l, dx);
    add(dx, norm_backward(at + "mlp_norm", dnorm2, l.norm2, c_.gpt2()));

    const Tensor dattention = linear_backward(
        at + "o", post_norm_backward(at + "attention_post_norm", dx, l.post_norm1), l.attention.out);
    Tensor dq = zeros_like(l.q), dk = zeros_like(l.k), dv = zeros_like(l.v);
    attention_backward(c_, window(index), layout_, dattention, l.attention, l.q, l.k, l.v, dq, dk, dv);
    if (!c_.gpt2()) {
      rotate(dq, rope_[index], layout_.positions, c_.head_dim, -1);
      rotate(dk, rope_[index], layout_.positions, c_.head_dim, -1);
    }
    if (c_.qk_norm) {
      dq = reshaped(norm_backward(at + "q_norm", reshaped(dq, c_.head_dim), l.q_norm, false), dq.columns);
      dk = reshaped(norm_backward(at + "k_norm", reshaped(dk, c_.head_dim), l.k_norm, false), dk.columns);
    }
    Tensor dnorm1 = linear_backward(at + "q", dq, l.norm1.y);
    add(dnorm1, linear_backward(at + "k", dk, l.norm1.y));
    add(dnorm1, linear_backward(at + "v", dv, l.norm1.y));
    add(dx, norm_backward(at + "attention_norm", dnorm1, l.norm1, c_.gpt2()));
    return dx;
  }

  Tensor mlp_backward(const std::string& at, const Layer& l, const Tensor& dx) {
    const Tensor dhidden =
        linear_backward(at + "down", post_norm_backward(at + "mlp_post_norm", dx, l.post_norm2), l.hidden);
    Tensor dup = dhidden, dnorm2;
    if (c_.gpt2()) {
      for (size_t i = 0; i < dup.size(); ++i) dup[i] *= activate_slope(c_.activation, l.up[i]);
      dnorm2 = linear_backward(at + "up", dup, l.norm2.y);
    } else {
      Tensor dgate = dhidden;
      for (size_t i = 0; i < dup.size(); ++i) {
        dup[i] *= activate(c_.activation, l.gate[i]);
        dgate[i] *= l.up[i] * activate_slope(c_.activation, l.gate[i]);
      }
      dnorm2 = linear_backward(at + "up", dup, l.norm2.y);
      add(dnorm2, linear_backward(at + "gate", dgate, l.norm2.y));
    }
    return dnorm2;
  }

  const Config& c_;
  const Tensors& w_;
  const Tokens& tokens_;
  Layout layout_;
  Tensors* g_ = nullptr;
  double router_scale_ = 0;
  std::vector<Tensor> rope_;  // by layer
  std::vector<Layer> layers_;
  Normalized final_norm_;
  Tensor logits_;
};

// The softmax of row t of the logits; returns -log of its entry at `target`.
double softmax(const Tensor& logits, size_t t, int32_t target, std::vector<double>& p) {
  double largest = -INFINITY, sum = 0;
  p.resize(logits.columns);
  for (size_t i = 0; i < p.size(); ++i) largest = std::max(largest, logits(t, i));
  for (size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits(t, i) - largest);
  for (double& x : p) x /= sum;
  return std::log(sum) + largest - logits(t, static_cast<size_t>(target));
}

}  // namespace

Tensor logits(const Config& config, const Tensors& weights, const Tokens& tokens, size_t rope_length) {
  return Decoder(config, weights, tokens, rope_length).logits();
}

double loss(const Config& config, const Tensors& weights, const Tokens& tokens, const Tokens& targets,
            const Layout& layout) {
  const Tensor y = Decoder(config, weights, tokens, 0, layout).logits();
  std::vector<double> p;
  double sum = 0;
  for (size_t t = 0; t < y.rows; ++t)
    if (targets[t] >= 0) sum += softmax(y, t, targets[t], p);
  return sum;
}

// d(-log p[target]) / dlogits = p - onehot(target).
double loss_and_gradient(const Config& config, const Tensors& weights, const Tokens& tokens,
                         const Tokens& targets, double scale, Tensors& gradients, const Layout& layout,
                         double router_scale) {
  Decoder decoder(config, weights, tokens, 0, layout);
  Tensor dlogits = zeros_like(decoder.logits());
  std::vector<double> p;
  double sum = 0;
  for (size_t t = 0; t < dlogits.rows; ++t) {
    if (targets[t] < 0) continue;
    sum += softmax(decoder.logits(), t, targets[t], p);
    for (size_t i = 0; i < p.size(); ++i) dlogits(t, i) = scale * p[i];
    dlogits(t, static_cast<size_t>(targets[t])) -= scale;
  }
  decoder.backward(dlogits, gradients, router_scale);
  return sum;
}

double router_losses(const Config& config, const Tensors& weights, const Tokens& tokens,
                     const Layout& layout) {
  return Decoder(config, weights, tokens, 0, layout).router_losses();
}

Tokens greedy(const Config& config, const Tensors& weights, Tokens tokens, size_t count) {
  for (; count > 0; --count) {
    const Tensor y = logits(config, weights, tokens);
    const auto last = y.values.end() - static_cast<std::ptrdiff_t>(config.vocab_size);
    tokens.push_back(static_cast<int32_t>(std::max_element(last, y.values.end()) - last));
  }
  return tokens;
}

}  // namespace reference
