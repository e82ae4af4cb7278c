// nrl-train bench ops: memory-bound kernels at model shapes, relative to the copy bandwidth of the same run.

#include <algorithm>
#include <utility>

#include "apps/bench/machine.h"
#include "apps/bench/op_case.h"
#include "core/base/log.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

/// Minimum fraction of the copy bandwidth that gated kernels must reach on a GPU.
constexpr double minimum = 0.85;

// Llama-3-8B with 8192 tokens; a small model for a CPU; sizes for --quick.
constexpr OpSizes gpu_sizes{.tokens = 8192,
                            .hidden = 4096,
                            .ffn = 14336,
                            .heads = 32,
                            .kv_heads = 8,
                            .head_dim = 128,
                            .vocab = 128256,
                            .logit_rows = 8192,
                            .parameters = 100'000'000};
constexpr OpSizes cpu_sizes{.tokens = 2048,
                            .hidden = 1024,
                            .ffn = 2816,
                            .heads = 16,
                            .kv_heads = 4,
                            .head_dim = 64,
                            .vocab = 32000,
                            .logit_rows = 128,
                            .parameters = 8'000'000};
constexpr OpSizes quick_sizes{.tokens = 16,
                              .hidden = 64,
                              .ffn = 96,
                              .heads = 4,
                              .kv_heads = 2,
                              .head_dim = 16,
                              .vocab = 512,
                              .logit_rows = 8,
                              .parameters = 20'000};

/// The bytes of the ops' own formulas (core/ops/cost.h).
double bytes_of_call(ops::Exec& exec, const std::function<void()>& run) {
  ops::KernelSet needed;
  std::vector<ops::Call> calls;
  exec.needed = &needed;
  exec.calls = &calls;
  run();
  exec.needed = nullptr;
  exec.calls = nullptr;
  double bytes = 0;
  for (const ops::Call& call : calls) bytes += call.cost.bytes();
  return bytes;
}

class OpCases {
 public:
  OpCases(Machine& machine, const OpSizes& sizes, DType activations)
      : e_(machine.exec()), k_(*machine.exec().kernels), s_(sizes), a_(activations) {
    machine.need_workspace(
        std::max({ops::norm_backward_workspace(std::max(s_.hidden, s_.head_dim), e_.partials()),
                  ops::qk_norm_rope_workspace(s_.head_dim, e_.partials()),
                  ops::sum_of_squares_workspace(s_.parameters), ops::policy_loss_workspace(e_.partials()),
                  machine.gpu() ? std::max(ops::gpu_linear_workspace(s_.hidden, e_.partials()),
                                           ops::embedding_backward_workspace(s_.tokens, s_.hidden))
                                : ops::linear_workspace(s_.tokens, s_.hidden, s_.hidden, a_, e_.threads,
                                                        e_.kernels->bf16_products)}));
    norms();
    heads();
    activations_();
    embeddings();
    loss();
    objectives();
    distillation();
    for (OpCase& c : generation_op_cases(machine, s_, a_)) all.push_back(std::move(c));
    optimizer();
    fp8();
    experts();
    rest();
  }

  std::vector<OpCase> all;

 private:
  using Run = std::function<void()>;

  void add(std::string name, bool gated, bool present, std::function<Run(Tensors&)> make) {
    all.push_back({.name = std::move(name), .gated = gated, .present = present, .make = std::move(make)});
  }

  void norms() {
    const int64_t n = s_.tokens, d = s_.hidden;
    for (const auto kind : {ops::NormKind::rms, ops::NormKind::layer}) {
      const bool layer = kind == ops::NormKind::layer;
      const std::string name = layer ? "layer_norm" : "rms_norm";
      auto forward = [this, kind, layer, n, d](Tensors& m, bool residual) -> Run {
        ops::NormForward f;
        f.kind = kind;
        f.x = m.normal(a_, {n, d});
        if (residual) {
          f.residual = m.normal(a_, {n, d});
          f.sum = m.normal(a_, {n, d});
        }
        f.weight = m.constant(a_, {d}, 1);
        if (layer) f.bias = m.constant(a_, {d}, 0);
        if (layer) f.mean = m.constant(DType::f32, {n}, 0);
        f.out = m.normal(a_, {n, d});
        f.rstd = m.constant(DType::f32, {n}, 1);
        return [this, f] { ops::norm_forward(e_, f); };
      };
      add(name + "_forward", true, k_.norm_forward, [forward](Tensors& m) { return forward(m, false); });
      add(name + "_forward_residual", true, k_.norm_forward,
          [forward](Tensors& m) { return forward(m, true); });
      add(name + "_backward", true, k_.norm_backward, [this, kind, layer, n, d](Tensors& m) -> Run {
        ops::NormBackward b;
        b.kind = kind;
        b.dout = m.normal(a_, {n, d});
        b.x = m.normal(a_, {n, d});
        b.weight = m.constant(a_, {d}, 1);
        if (layer) b.mean = m.constant(DType::f32, {n}, 0);
        b.rstd = m.constant(DType::f32, {n}, 1);
        b.dresidual = m.normal(a_, {n, d});
        b.dx = m.normal(a_, {n, d});
        b.dweight = m.constant(DType::f32, {d}, 0);
        if (layer) b.dbias = m.constant(DType::f32, {d}, 0);
        return [this, b] { ops::norm_backward(e_, b); };
      });
    }
  }

  // The heads of q and k are columns of a fused qkv tensor.
  void heads() {
    const int64_t n = s_.tokens, qk = s_.heads + s_.kv_heads, d = s_.head_dim;
    auto view = [this, n, qk, d](Tensors& m) {
      return m.normal(a_, {n, (qk + s_.kv_heads) * d}).columns(0, qk * d).split_heads(qk, d);
    };
    auto table = [this, n, d](Tensors& m) {
      ops::RopeSpec spec;
      spec.rotary_dim = d;
      const auto values = ops::rope_table(spec, n, n);
      return m.copy_of(DType::f32, {n, d}, values.data());
    };
    add("rope", true, k_.rope, [this, view, table, n](Tensors& m) -> Run {
      const ops::Rope r{.x = view(m), .table = table(m), .positions = m.arithmetic(n, 0, 1)};
      return [this, r] { ops::rope(e_, r); };
    });
    add("qk_norm_rope_forward", true, k_.qk_norm_rope_forward,
        [this, view, table, n, qk, d](Tensors& m) -> Run {
          ops::QkNormRopeForward f;
          f.x = view(m);
          f.out = m.normal(a_, {n, qk, d});
          f.heads = s_.heads;
          f.q_weight = m.constant(a_, {d}, 1);
          f.k_weight = m.constant(a_, {d}, 1);
          f.rstd = m.constant(DType::f32, {n * qk}, 1);
          f.table = table(m);
          f.positions = m.arithmetic(n, 0, 1);
          return [this, f] { ops::qk_norm_rope_forward(e_, f); };
        });
    add("qk_norm_rope_backward", true, k_.qk_norm_rope_backward,
        [this, view, table, n, qk, d](Tensors& m) -> Run {
          ops::QkNormRopeBackward b;
          b.dout = b.dx = m.normal(a_, {n, qk, d}, 1e-3);
          b.x = view(m);
          b.heads = s_.heads;
          b.q_weight = m.constant(a_, {d}, 1);
          b.k_weight = m.constant(a_, {d}, 1);
          b.rstd = m.constant(DType::f32, {n * qk}, 1);
          b.table = table(m);
          b.positions = m.arithmetic(n, 0, 1);
          b.dq_weight = m.constant(DType::f32, {d}, 0);
          b.dk_weight = m.constant(DType::f32, {d}, 0);
          return [this, b] { ops::qk_norm_rope_backward(e_, b); };
        });
  }

  void activations_() {
    const int64_t n = s_.tokens, f = s_.ffn;
    const struct {
      const char* name;
      ops::Activation kind;
      bool gated;
    } kinds[] = {{"swiglu", ops::Activation::silu, true},
                 {"geglu", ops::Activation::gelu_tanh, true},
                 {"gelu", ops::Activation::gelu_tanh, false},
                 {"gelu_erf", ops::Activation::gelu_erf, false}};
    for (const auto& kind : kinds) {
      const int64_t in = kind.gated ? 2 : 1;
      const ops::Activation function = kind.kind;
      const bool gated = kind.gated;
      add(std::string(kind.name) + "_forward", true, k_.activation_forward, [=, this](Tensors& m) -> Run {
        const ops::ActivationForward a{
            .kind = function, .gated = gated, .x = m.normal(a_, {n, in * f}), .out = m.normal(a_, {n, f})};
        return [this, a] { ops::activation_forward(e_, a); };
      });
      add(std::string(kind.name) + "_backward", true, k_.activation_backward, [=, this](Tensors& m) -> Run {
        const ops::ActivationBackward a{.kind = function,
                                        .gated = gated,
                                        .dout = m.normal(a_, {n, f}),
                                        .x = m.normal(a_, {n, in * f}),
                                        .dx = m.normal(a_, {n, in * f})};
        return [this, a] { ops::activation_backward(e_, a); };
      });
    }
  }

  void embeddings() {
    const int64_t n = s_.tokens, h = s_.hidden, v = s_.vocab;
    add("embedding_forward", false, k_.embedding_forward, [=, this](Tensors& m) -> Run {
      ops::EmbeddingForward f;
      f.ids = m.integers({n}, v);
      f.table = m.normal(a_, {v, h});
      f.out = m.normal(a_, {n, h});
      return [this, f] { ops::embedding_forward(e_, f); };
    });
    add("embedding_backward", false, k_.embedding_backward, [=, this](Tensors& m) -> Run {
      ops::EmbeddingBackward b;
      b.ids = m.integers({n}, v);
      b.dout = m.normal(a_, {n, h}, 1e-3);
      b.dtable = m.constant(DType::f32, {v, h}, 0);
      return [this, b] { ops::embedding_backward(e_, b); };
    });
  }

  void loss() {
    const int64_t n = s_.logit_rows, v = s_.vocab;
    auto arguments = [=, this](Tensors& m) {
      ops::CrossEntropy c;
      c.logits = m.normal(a_ == DType::f16 ? DType::f32 : a_, {n, v});  // no logits are f16
      c.target = m.integers({n}, v);
      c.log_prob = m.constant(DType::f32, {n}, 0);
      return c;
    };
    add("cross_entropy", false, k_.cross_entropy, [this, arguments](Tensors& m) -> Run {
      const ops::CrossEntropy c = arguments(m);
      return [this, c] { ops::cross_entropy(e_, c); };
    });
    // As in the head: the gradient overwrites the logits.
    add("cross_entropy_with_gradient", true, k_.cross_entropy, [=, this](Tensors& m) -> Run {
      ops::CrossEntropy c = arguments(m);
      c.weight = m.constant(DType::f32, {n}, -1e-3);
      return [this, c] { ops::cross_entropy(e_, c); };
    });
    for (const bool entropy : {false, true}) {
      const char* suffix = entropy ? "_entropy" : "";
      if (entropy)
        add(std::string("cross_entropy") + suffix, false, k_.cross_entropy, [=, this](Tensors& m) -> Run {
          ops::CrossEntropy c = arguments(m);
          c.entropy = m.constant(DType::f32, {n}, 0);
          return [this, c] { ops::cross_entropy(e_, c); };
        });
      add(std::string("cross_entropy_gradient") + suffix, false, k_.cross_entropy_gradient,
          [=, this](Tensors& m) -> Run {
            const ops::CrossEntropy c = arguments(m);
            ops::CrossEntropyGradient g{.logits = c.logits,
                                        .target = c.target,
                                        .lse = m.constant(DType::f32, {n}, 10),
                                        .weight = m.constant(DType::f32, {n}, -1e-3)};
            if (entropy) g.entropy = m.constant(DType::f32, {n}, 5);
            if (entropy) g.entropy_weight = m.constant(DType::f32, {n}, 1e-3);
            return [this, g] { ops::cross_entropy_gradient(e_, g); };
          });
    }
  }

  /// The losses of sequences of 256 tokens, and sums over them. They read little beside the head: their time
  /// counts, not their bandwidth.
  void objectives() {
    const int64_t n = s_.tokens, length = std::min<int64_t>(n, 256),
                  sequences = std::max<int64_t>(n / length, 2);
    const auto segments = [=](Tensors& m) {
      std::vector<int32_t> segment(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) segment[i] = static_cast<int32_t>(std::min(i / length, sequences - 1));
      return m.copy_of(DType::i32, {n}, segment.data());
    };
    const auto numbers = [=](Tensors& m, std::initializer_list<int64_t> shape, double value) {
      const std::vector<double> all(static_cast<size_t>(make_tensor(nullptr, DType::f64, shape).numel()),
                                    value);
      return m.copy_of(DType::f64, shape, all.data());
    };
    const auto log_probs = [=](Tensors& m) { return m.normal(DType::f32, {n}, 0.1); };
    add("segment_sum", false, k_.segment_sum, [=, this](Tensors& m) -> Run {
      const ops::SegmentSum s{.x = log_probs(m),
                              .minus = log_probs(m),
                              .target = m.integers({n}, s_.vocab),
                              .segment = segments(m),
                              .out = numbers(m, {sequences}, 0)};
      return [this, s] { ops::segment_sum(e_, s); };
    });
    add("segment_rows", false, k_.segment_rows, [=, this](Tensors& m) -> Run {
      const ops::SegmentRows s{.values = numbers(m, {sequences}, 1),
                               .target = m.integers({n}, s_.vocab),
                               .segment = segments(m),
                               .out = log_probs(m)};
      return [this, s] { ops::segment_rows(e_, s); };
    });
    add("pair_loss", false, k_.pair_loss, [=, this](Tensors& m) -> Run {
      const int64_t paired = sequences / 2 * 2;
      const ops::PairLoss p{.sums = numbers(m, {paired}, -300),
                            .values = numbers(m, {paired, ops::PairValue::count}, 1),
                            .options = {},
                            .gradient = numbers(m, {paired}, 0),
                            .metrics = numbers(m, {ops::PairMetric::count}, 0)};
      return [this, p] { ops::pair_loss(e_, p); };
    });
    for (const bool metrics : {false, true})
      add(metrics ? "policy_loss_metrics" : "policy_loss", false, k_.policy_loss,
          [=, this](Tensors& m) -> Run {
            ops::PolicyLoss p{.log_prob = log_probs(m),
                              .target = m.integers({n}, s_.vocab),
                              .normalizer = m.constant(DType::f32, {n}, 1e-3),
                              .advantage = m.normal(DType::f32, {n}),
                              .old = log_probs(m),
                              .reference = log_probs(m),
                              .options = {.kl_penalty = 0.01},
                              .weight = log_probs(m)};
            if (metrics) p.metrics = numbers(m, {ops::PolicyMetric::count}, 0);
            return [this, p] { ops::policy_loss(e_, p); };
          });
  }

  /// With 64 ids per row, or all tokens.
  void distillation() {
    const int64_t n = s_.logit_rows, v = s_.vocab, k = std::min<int64_t>(64, v);
    const DType dtype = a_ == DType::f16 ? DType::f32 : a_;  // no logits are f16
    const auto ids = [=](Tensors& m) {                       // distinct in a row
      std::vector<int32_t> all;
      for (int64_t i = 0; i < n * k; ++i) all.push_back(static_cast<int32_t>((i / k + i % k * (v / k)) % v));
      return m.copy_of(DType::i32, {n, k}, all.data());
    };
    const auto at_ids = [=](Tensors& m) { return m.normal(DType::f32, {n, k}); };
    const auto rows = [=](Tensors& m, float x) { return m.constant(DType::f32, {n}, x); };
    add("top_columns", false, k_.top_columns, [=, this](Tensors& m) -> Run {
      const ops::TopColumns a{.logits = m.normal(dtype, {n, v}), .ids = ids(m), .values = at_ids(m)};
      return [this, a] { ops::top_columns(e_, a); };
    });
    add("gather_columns", false, k_.gather_columns, [=, this](Tensors& m) -> Run {
      const ops::GatherColumns a{.logits = m.normal(dtype, {n, v}), .ids = ids(m), .out = at_ids(m)};
      return [this, a] { ops::gather_columns(e_, a); };
    });
    add("topk_kl", false, k_.topk_kl, [=, this](Tensors& m) -> Run {
      const Tensor target = m.integers({n}, v), logits = at_ids(m), teacher = at_ids(m), weight = rows(m, 1);
      const ops::TopkKl a{logits, teacher, target, {}, {}, weight, {}, rows(m, 0), at_ids(m)};
      return [this, a] { ops::topk_kl(e_, a); };
    });
    add("scatter_columns", false, k_.scatter_columns, [=, this](Tensors& m) -> Run {
      const Tensor rest = m.constant(DType::f32, {n, 2}, 1e-3), logits = m.normal(dtype, {n, v});
      const ops::ScatterColumns a{logits, ids(m), at_ids(m), rest, rows(m, 12)};
      return [this, a] { ops::scatter_columns(e_, a); };
    });
  }

  /// Zeros of any type.
  static Tensor bytes_as(Tensors& m, DType dtype, int64_t n) {
    const Tensor words = m.constant(DType::f32, {(n * size_of(dtype) + 3) / 4}, 0);
    return make_tensor(words.data, dtype, {n});
  }

  /// An update without weights and state.
  ops::AdamW update(Tensors& m) {
    const int64_t n = s_.parameters;
    ops::AdamW a;
    a.grad = m.normal(DType::f32, {n}, 1e-3);
    a.rates[0].weight_decay = 0.1f;
    const ops::AdamWRange range{.count = n};
    const auto chunks = ops::adamw_chunks(std::span(&range, 1));
    a.chunks = m.copy_of(DType::i64, {static_cast<int64_t>(chunks.size()) / 4, 4}, chunks.data());
    double scalars[ops::StepScalar::count] = {};
    scalars[ops::StepScalar::learning_rate] = 1e-5;
    scalars[ops::StepScalar::updates] = 100;
    scalars[ops::StepScalar::grad_scale] = 1;
    scalars[ops::StepScalar::correction1] = scalars[ops::StepScalar::correction2] = 0.9;
    a.scalars = m.copy_of(DType::f64, {ops::StepScalar::count}, scalars);
    return a;
  }

  void optimizer() {
    const int64_t n = s_.parameters;
    add("adamw", true, k_.adamw, [=, this](Tensors& m) -> Run {
      ops::AdamW a = update(m);
      a.param = m.normal(DType::f32, {n}, 0.02);
      a.exp_avg = m.normal(DType::f32, {n}, 1e-3);
      a.exp_avg_sq = m.constant(DType::f32, {n}, 1e-6);
      if (a_ != DType::f32) a.param_bf16 = m.normal(a_, {n}, 0.02);
      return [this, a] { ops::adamw(e_, a); };
    });
    // bf16 weights with remainders, and state in fewer bits.
    for (const DType moments : {DType::bf16, DType::e4m3})
      add(fmt::format("adamw_remainder_{}", name_of(moments)), false, k_.adamw, [=, this](Tensors& m) -> Run {
        ops::AdamW a = update(m);
        a.param_bf16 = m.normal(DType::bf16, {n}, 0.02);
        a.remainder = bytes_as(m, DType::u16, n);
        a.exp_avg = bytes_as(m, moments, n);
        a.exp_avg_sq = bytes_as(m, moments, n);
        if (ops::has_moment_scales(moments)) {
          a.exp_avg_scales = bytes_as(m, DType::u8, ops::moment_blocks(n));
          a.exp_avg_sq_scales = bytes_as(m, DType::u8, ops::moment_blocks(n));
        }
        return [this, a] { ops::adamw(e_, a); };
      });
    add("sum_of_squares", false, k_.add_sum_of_squares, [=, this](Tensors& m) -> Run {
      const double zero = 0;
      ops::SumOfSquares a;
      a.x = m.normal(DType::f32, {n});
      a.out = m.copy_of(DType::f64, {1}, &zero);
      return [this, a] { ops::add_sum_of_squares(e_, a); };
    });
    for (const DType type : {DType::f32, DType::bf16})
      add(fmt::format("hash_{}", name_of(type)), false, k_.add_hash, [=, this](Tensors& m) -> Run {
        const int64_t zero = 0;
        ops::AddHash a;
        a.x = m.normal(type, {n});
        a.out = m.copy_of(DType::i64, {1}, &zero);
        return [this, a] { ops::add_hash(e_, a); };
      });
  }

  /// An FP8 matrix (rows, columns) with scales; of a tensor with those of `like`.
  static Tensor codes(Tensors& m, Scaling scaling, int64_t rows, int64_t columns, const Tensor& like = {}) {
    Tensor t = make_tensor(bytes_as(m, DType::e4m3, rows * columns).data, DType::e4m3, {rows, columns});
    const ScaleMatrix at = scale_matrix(scaling, rows, columns);
    void* const scales = scaling == Scaling::tensor && like ? like.scales.data
                                                            : m.constant(DType::f32, {at.bytes / 4}, 1).data;
    t.scales = {.data = scales, .kind = scaling, .row_step = at.row_step, .column_step = at.column_step};
    return t;
  }

  /// Rounding to FP8, a copy by rows and one by columns: of a matrix, of SwiGLU's result and of its gradient.
  void fp8() {
    const int64_t unit = row_unit(Scaling::row128), n = (s_.tokens + unit - 1) / unit * unit,
                  h = s_.hidden / unit * unit > 0 ? s_.hidden / unit * unit : unit,
                  f = s_.ffn / unit * unit > 0 ? s_.ffn / unit * unit : unit;
    const DType type = a_ == DType::f32 && !e_.device ? DType::f32 : DType::bf16;  // a GPU rounds bf16 only
    const auto source = [=](Tensors& m, bool activation, bool gradient) {
      ops::QuantizeSource x{.x = m.normal(type, {n, activation ? 2 * f : h})};
      if (activation) x.activation = ops::Activation::silu, x.gated = true;
      if (gradient) x.dout = m.normal(type, {n, f});
      return x;
    };
    struct Kind {
      const char* name;
      bool activation, gradient;
    };
    for (const Kind kind :
         {Kind{"", false, false}, {"_swiglu", true, false}, {"_swiglu_gradient", true, true}}) {
      const int64_t columns = !kind.activation ? h : kind.gradient ? 2 * f : f;
      for (const auto& [name, scaling] : {std::pair{"tensor", Scaling::tensor}, {"row128", Scaling::row128}})
        add(fmt::format("quantize_{}{}", name, kind.name), false, k_.quantize, [=, this](Tensors& m) -> Run {
          const Tensor row = codes(m, scaling, n, columns);
          const ops::Quantize q{.source = source(m, kind.activation, kind.gradient),
                                .row = row,
                                .column = codes(m, scaling, columns, n, row)};
          return [this, q] { ops::quantize(e_, q); };
        });
      add(fmt::format("largest_magnitude{}", kind.name), false, k_.largest_magnitude,
          [=, this](Tensors& m) -> Run {
            const ops::LargestMagnitude l{.source = source(m, kind.activation, kind.gradient),
                                          .amax = m.constant(DType::f32, {1}, 0)};
            return [this, l] { ops::largest_magnitude(e_, l); };
          });
    }
    add("transpose_fp8", false, k_.transpose, [=, this](Tensors& m) -> Run {
      const Tensor x = codes(m, Scaling::tensor, n, h);
      const ops::Transpose t{.x = x, .out = codes(m, Scaling::tensor, h, n, x)};
      return [this, t] { ops::transpose(e_, t); };
    });
  }

  /// Rows of tokens to experts, eight for each token, and back. The sort reads and writes little: its time
  /// counts, not its bandwidth.
  void experts() {
    const int64_t n = s_.tokens, k = 8, count = 64, rows = n * k, h = s_.hidden / 2, f = s_.ffn / 16;
    // Entry i of a token goes to an expert of its own, so that they differ.
    const auto choices = [=](Tensors& m) {
      std::vector<int32_t> expert(static_cast<size_t>(rows));
      for (int64_t i = 0; i < rows; ++i)
        expert[i] = static_cast<int32_t>((i / k * 37 + i % k * (count / k)) % count);
      return m.copy_of(DType::i32, {n, k}, expert.data());
    };
    // Entry i in row i, as if tokens had come in the order of experts.
    const auto in_order = [=](Tensors& m) { return m.arithmetic(rows, 0, 1); };
    const auto rows_of_choices = [=](Tensors& m) {
      return make_tensor(in_order(m).data, DType::i32, {n, k});
    };
    add("dispatch_sort", false, k_.dispatch_sort, [=, this](Tensors& m) -> Run {
      const ops::DispatchSort d{.expert = choices(m),
                                .offsets = m.arithmetic(count + 1, 0, 0),
                                .row = rows_of_choices(m),
                                .source = in_order(m)};
      return [this, d] { ops::dispatch_sort(e_, d); };
    });
    add("permute", false, k_.permute, [=, this](Tensors& m) -> Run {
      const ops::Permute p{
          .x = m.normal(a_, {n, h}), .source = in_order(m), .top_k = k, .out = m.normal(a_, {rows, h})};
      return [this, p] { ops::permute(e_, p); };
    });
    add("unpermute", false, k_.unpermute, [=, this](Tensors& m) -> Run {
      const ops::Unpermute u{.x = m.normal(a_, {rows, h}),
                             .row = rows_of_choices(m),
                             .prob = m.normal(DType::f32, {n, k}),
                             .out = m.normal(a_, {n, h})};
      return [this, u] { ops::unpermute(e_, u); };
    });
    add("gate_backward", false, k_.gate_backward, [=, this](Tensors& m) -> Run {
      const Tensor dact = m.normal(a_, {rows, f}), act = m.normal(a_, {rows, f});
      const ops::GateBackward g{.dact = dact,
                                .act = act,
                                .prob = m.normal(DType::f32, {n, k}),
                                .row = rows_of_choices(m),
                                .dprob = m.normal(DType::f32, {n, k}),
                                .dact_out = dact,
                                .act_out = act};
      return [this, g] { ops::gate_backward(e_, g); };
    });
  }

  void rest() {
    const int64_t n = s_.tokens, h = s_.hidden, p = s_.parameters;
    add("dropout", false, k_.dropout, [=, this](Tensors& m) -> Run {
      ops::Dropout d;
      d.x = m.normal(a_, {n, h});
      d.out = m.normal(a_, {n, h});
      d.p = 0.1f;
      return [this, d] { ops::dropout(e_, d); };
    });
    add("column_sums", false, k_.column_sums, [=, this](Tensors& m) -> Run {
      const ops::ColumnSums c{.x = m.normal(a_, {n, h}), .out = m.constant(DType::f32, {h}, 0)};
      return [this, c] { ops::column_sums(e_, c); };
    });
    for (const auto& [name, from, to] :
         {std::tuple("convert", DType::f32, DType::bf16), {"convert_to_f32", DType::bf16, DType::f32}})
      add(name, false, k_.convert, [=, this](Tensors& m) -> Run {
        const ops::Convert c{.x = m.normal(from, {p}), .out = m.normal(to, {p})};
        return [this, c] { ops::convert(e_, c); };
      });
    add("zero", false, k_.zero, [=, this](Tensors& m) -> Run {
      const ops::Zero z{.x = m.normal(DType::f32, {p})};
      return [this, z] { ops::zero(e_, z); };
    });
  }

  ops::Exec& e_;
  const ops::KernelTable& k_;
  OpSizes s_;
  DType a_;
};

}  // namespace

int ops(const Args& args) {
  Machine machine(args.device, args.quick);
  Report report(args, machine.describe());
  const double copy = machine.copy_bandwidth();
  report.set("copy_bytes_per_s", copy);
  report.set("minimum", minimum);
  const DType activations = precision_of(args, machine);
  log::info("{}; activations {}; copy {:.1f} GB/s", machine.name(), name_of(activations), copy * 1e-9);
  log::info("{:<28} {:>10} {:>10} {:>8}   minimum", "kernel", "us", "GB/s", "of copy");
  OpSizes sizes = args.quick ? quick_sizes : machine.gpu() ? gpu_sizes : cpu_sizes;
  if (args.tokens > 0) sizes.tokens = args.tokens;
  report.set("tokens", sizes.tokens);
  OpCases cases(machine, sizes, activations);
  for (const OpCase& c : cases.all) {
    if (!selected(args, c.name)) continue;
    if (!c.present) {
      report.add_failure(c.name, "not implemented for this device");
      continue;
    }
    try {
      Tensors memory(machine);
      std::vector<std::function<void()>> runs{c.make(memory)};
      const double bytes = bytes_of_call(machine.exec(), runs.front());
      const int count = machine.sets(bytes);
      while (static_cast<int>(runs.size()) < count) runs.push_back(c.make(memory));
      const double t = machine.seconds([&](int i) { runs[i % count](); }, count);
      ops::synchronize(machine.exec());
      const double fraction = bytes / t / copy;
      const bool judged = c.gated && machine.gpu() && !args.quick;
      const char* verdict = !judged ? "" : fraction >= minimum ? "met" : "below 85 %";
      log::info("{:<28} {:>10.1f} {:>10.1f} {:>6.1f} %   {}", c.name, t * 1e6, bytes / t * 1e-9,
                fraction * 100, verdict);
      report.add(JsonValue::object({{"name", c.name},
                                    {"seconds", t},
                                    {"bytes", bytes},
                                    {"bytes_per_s", bytes / t},
                                    {"fraction_of_copy", fraction},
                                    {"gated", c.gated}}));
    } catch (const Error& error) {
      report.add_failure(c.name, error.what());
    }
  }
  return report.finish();
}

}  // namespace nrl::bench
