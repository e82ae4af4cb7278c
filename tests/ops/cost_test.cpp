// The cost formulas of the ops, against counts: bytes by which elements a kernel reads and writes, FLOPs by
// loops.

#include "core/ops/cost.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/philox.h"
#include "core/ops/kernel_table.h"
#include "tests/catch.h"

namespace {

using namespace nrl;
using namespace nrl::ops;

/// Tensors of one call, and which of their elements it reads and writes. An element is written if the call
/// changes it, and read if another value of it changes a result. Index tensors are not varied and count as
/// read.
class Counted {
 public:
  Counted() : exec_{} {
    exec_.kernels = &cpu_kernels(cpu::Isa::baseline);
    workspace_.resize(1 << 20);
    exec_.workspace = {workspace_.data(), workspace_.size()};
  }

  Tensor random(DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor t = allocate(dtype, shape);
    for (int64_t i = 0; i < t.numel(); ++i) set(t, i, 0.25 + 1.5 * random_.uniform(next_++));
    varied_.push_back(t);
    return t;
  }
  /// `count`: whether the formula counts them.
  Tensor indices(std::vector<int32_t> values, bool count = true) {
    const Tensor t = allocate(DType::i32, {static_cast<int64_t>(values.size())});
    std::memcpy(t.data, values.data(), values.size() * 4);
    if (count) index_bytes_ += static_cast<double>(t.bytes());
    return t;
  }
  Exec& exec() { return exec_; }

  /// `not_read`, `not_written`: bytes that the formula counts although no result depends on them, or although
  /// the call adds 0 to them.
  template <class Arguments>
  void check(void (*op)(Exec&, const Arguments&), const Arguments& a, double not_read = 0,
             double not_written = 0) {
    const std::vector<std::byte> before = snapshot();
    op(exec_, a);
    const std::vector<std::byte> after = snapshot();
    double read = index_bytes_ + not_read, written = not_written;
    for (const Tensor& t : varied_)
      for (int64_t i = 0; i < t.numel(); ++i) {
        const size_t at = offset(t, i), size = static_cast<size_t>(size_of(t.dtype));
        const bool changed = std::memcmp(&before[at], &after[at], size) != 0;
        written += changed ? static_cast<double>(size) : 0;
        restore(before);
        set(t, i, get(t, i) + 1.75);
        op(exec_, a);
        std::vector<std::byte> varied = snapshot();
        // An element that is not written keeps the other value.
        if (!changed) std::memcpy(&varied[at], &after[at], size);
        read += varied != after ? static_cast<double>(size) : 0;
      }
    restore(before);
    const Cost formula = cost(exec_, a);
    CHECK(formula.read == read);
    CHECK(formula.written == written);
    CHECK(formula.bytes() == read + written);
    CHECK(formula.scratch >= 0);
    CHECK(formula.launches >= 1);
  }

 private:
  Tensor allocate(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = make_tensor(nullptr, dtype, shape);
    blocks_.push_back(std::make_unique<std::vector<std::byte>>(static_cast<size_t>(t.bytes())));
    t.data = blocks_.back()->data();
    return t;
  }
  static void set(const Tensor& t, int64_t i, double value) {
    switch (t.dtype) {
      case DType::f32:
        t.ptr<float>()[i] = static_cast<float>(value);
        break;
      case DType::bf16:
        t.ptr<bf16>()[i] = bf16(static_cast<float>(value));
        break;
      default:
        t.ptr<double>()[i] = value;
    }
  }
  static double get(const Tensor& t, int64_t i) {
    return t.dtype == DType::f32    ? t.ptr<float>()[i]
           : t.dtype == DType::bf16 ? static_cast<float>(t.ptr<bf16>()[i])
                                    : t.ptr<double>()[i];
  }
  std::vector<std::byte> snapshot() const {
    std::vector<std::byte> all;
    for (const auto& block : blocks_) all.insert(all.end(), block->begin(), block->end());
    return all;
  }
  void restore(const std::vector<std::byte>& all) {
    size_t at = 0;
    for (const auto& block : blocks_) {
      std::memcpy(block->data(), all.data() + at, block->size());
      at += block->size();
    }
  }
  size_t offset(const Tensor& t, int64_t i) const {
    size_t at = 0;
    for (const auto& block : blocks_) {
      if (block->data() == t.data) return at + static_cast<size_t>(i * size_of(t.dtype));
      at += block->size();
    }
    throw Error(Exit::internal, "no such tensor");
  }

  Exec exec_;
  std::vector<std::byte> workspace_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> blocks_;
  std::vector<Tensor> varied_;
  double index_bytes_ = 0;
  PhiloxStream random_{1, "cost test"};
  uint64_t next_ = 0;
};

constexpr DType types[] = {DType::f32, DType::bf16};

/// Not accessed.
Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
  static std::byte some{};
  return make_tensor(&some, dtype, shape);
}

TEST_CASE("the bytes of the norms are those that their kernels touch", "[cost]") {
  for (const DType dtype : types)
    for (const NormKind kind : {NormKind::rms, NormKind::layer})
      for (const bool residual : {false, true}) {
        CAPTURE(name_of(dtype), static_cast<int>(kind), residual);
        const bool layer = kind == NormKind::layer;
        const int64_t n = 3, d = 6;
        {
          Counted c;
          NormForward a{
              .kind = kind, .x = c.random(dtype, {n, d}), .weight = c.random(dtype, {d}), .out = {}};
          if (residual) a.residual = c.random(dtype, {n, d}), a.sum = c.random(dtype, {n, d});
          if (layer) a.bias = c.random(dtype, {d}), a.mean = c.random(DType::f32, {n});
          a.out = c.random(dtype, {n, d});
          if (residual) a.rstd = c.random(DType::f32, {n});
          c.check(norm_forward, a);
          if (!residual) continue;
          a.out = {};
          c.check(norm_forward, a);
        }
        Counted c;
        NormBackward a{.kind = kind,
                       .dout = c.random(dtype, {n, d}),
                       .x = c.random(dtype, {n, d}),
                       .weight = c.random(dtype, {d}),
                       .rstd = c.random(DType::f32, {n}),
                       .dx = c.random(dtype, {n, d})};
        if (layer) a.mean = c.random(DType::f32, {n}), a.dbias = c.random(DType::f32, {d});
        if (residual) a.dresidual = c.random(dtype, {n, d});
        a.dweight = c.random(DType::f32, {d});
        c.check(norm_backward, a);
      }
}

TEST_CASE("FP8 copies of a norm that is not stored take fewer bytes", "[cost]") {
  const int64_t n = 1024, k = 4096;
  Exec exec;
  const auto bytes = [&](Scaling scaling, bool stored) {
    const Tensor stream = tensor(DType::bf16, {n, k}), rstd = tensor(DType::f32, {n}),
                 amax = tensor(DType::f32, {1}), weight = tensor(DType::bf16, {k});
    NormForward norm{.x = stream, .residual = stream, .sum = stream, .weight = weight, .rstd = rstd};
    if (stored) norm.out = stream;
    Quantize copies{
        .source = {.x = stream}, .row = tensor(DType::e4m3, {n, k}), .column = tensor(DType::e4m3, {k, n})};
    if (!stored) copies.source.norm = {.weight = weight, .rstd = rstd};
    copies.row.scales.kind = copies.column.scales.kind = scaling;
    double sum = cost(exec, copies).bytes();
    if (scaling == Scaling::tensor && stored) sum += cost(exec, LargestMagnitude{{stream}, amax}).bytes();
    if (scaling == Scaling::tensor && !stored) norm.amax = amax;
    return (sum + cost(exec, norm).bytes()) / static_cast<double>(n * k);
  };
  CHECK(std::fabs(bytes(Scaling::tensor, true) - 14) < 0.05);
  CHECK(std::fabs(bytes(Scaling::tensor, false) - 10) < 0.05);
  CHECK(std::fabs(bytes(Scaling::row128, true) - 12) < 0.1);
  CHECK(std::fabs(bytes(Scaling::row128, false) - 10) < 0.1);
}

TEST_CASE("FP8 copies of an activation's gradient that is not stored take fewer bytes", "[cost]") {
  const int64_t n = 1024, f = 4096;
  Exec exec;
  // Of each number of dout, which gives two of dx.
  const auto bytes = [&](Scaling scaling, bool stored) {
    const Tensor x = tensor(DType::bf16, {n, 2 * f}), dout = tensor(DType::bf16, {n, f}),
                 amax = tensor(DType::f32, {1});
    QuantizeSource source{.x = x};
    if (!stored) source = {.x = x, .activation = Activation::silu, .gated = true, .dout = dout};
    Quantize copies{
        .source = source, .row = tensor(DType::e5m2, {n, 2 * f}), .column = tensor(DType::e5m2, {2 * f, n})};
    copies.row.scales.kind = copies.column.scales.kind = scaling;
    double sum = cost(exec, copies).bytes();
    if (scaling == Scaling::tensor) sum += cost(exec, LargestMagnitude{source, amax}).bytes();
    if (stored) sum += cost(exec, ActivationBackward{.gated = true, .dout = dout, .x = x, .dx = x}).bytes();
    return sum / static_cast<double>(n * f);
  };
  CHECK(std::fabs(bytes(Scaling::tensor, true) - 22) < 0.05);
  CHECK(std::fabs(bytes(Scaling::tensor, false) - 16) < 0.05);
  CHECK(std::fabs(bytes(Scaling::row128, true) - 18) < 0.2);
  CHECK(std::fabs(bytes(Scaling::row128, false) - 10) < 0.2);
}

TEST_CASE("the bytes of rope, QK norm, sums of parts and activations are those that their kernels touch",
          "[cost]") {
  for (const DType dtype : types) {
    CAPTURE(name_of(dtype));
    {  // four of six dimensions are rotated; two tokens of three have the same position
      Counted c;
      c.check(rope, Rope{.x = c.random(dtype, {3, 2, 6}),
                         .table = c.random(DType::f32, {2, 4}),
                         .positions = c.indices({0, 1, 1})});
    }
    {
      Counted c;
      c.check(qk_norm_rope_forward, QkNormRopeForward{.x = c.random(dtype, {2, 3, 4}),
                                                      .out = c.random(dtype, {2, 3, 4}),
                                                      .heads = 2,
                                                      .q_weight = c.random(dtype, {4}),
                                                      .k_weight = c.random(dtype, {4}),
                                                      .rstd = c.random(DType::f32, {6}),
                                                      .table = c.random(DType::f32, {2, 4}),
                                                      .positions = c.indices({0, 1})});
    }
    {
      Counted c;
      const Tensor dx = c.random(dtype, {2, 3, 4});
      c.check(qk_norm_rope_backward, QkNormRopeBackward{.dout = dx,
                                                        .x = c.random(dtype, {2, 3, 4}),
                                                        .dx = dx,
                                                        .heads = 2,
                                                        .q_weight = c.random(dtype, {4}),
                                                        .k_weight = c.random(dtype, {4}),
                                                        .rstd = c.random(DType::f32, {6}),
                                                        .table = c.random(DType::f32, {2, 4}),
                                                        .positions = c.indices({0, 1}),
                                                        .dq_weight = c.random(DType::f32, {4}),
                                                        .dk_weight = c.random(DType::f32, {4})});
    }
    for (const bool accumulate : {false, true}) {
      Counted c;
      c.check(add_rows, AddRows{.x = c.random(dtype, {3, 5}),
                                .out = c.random(DType::f32, {3, 5}),
                                .accumulate = accumulate});
    }
    {
      Counted c;
      c.check(merge_attention, MergeAttention{.part = c.random(dtype, {3, 2, 4}),
                                              .part_lse = c.random(DType::f32, {2, 3}),
                                              .out = c.random(DType::f32, {3, 2, 4}),
                                              .lse = c.random(DType::f32, {2, 3})});
    }
    for (const bool gated : {false, true}) {
      const int64_t in = gated ? 10 : 5;
      Counted forward, backward;
      forward.check(activation_forward, ActivationForward{.kind = Activation::silu,
                                                          .gated = gated,
                                                          .x = forward.random(dtype, {3, in}),
                                                          .out = forward.random(dtype, {3, 5})});
      backward.check(activation_backward, ActivationBackward{.kind = Activation::silu,
                                                             .gated = gated,
                                                             .dout = backward.random(dtype, {3, 5}),
                                                             .x = backward.random(dtype, {3, in}),
                                                             .dx = backward.random(dtype, {3, in})});
    }
  }
}

TEST_CASE("the bytes of token dispatch are those that its kernels touch", "[cost]") {
  for (const DType dtype : types) {
    CAPTURE(name_of(dtype));
    // Two tokens with two choices each.
    const auto matrix = [](Tensor t, int64_t rows, int64_t columns) {
      return make_tensor(t.data, t.dtype, {rows, columns});
    };
    Counted permuted, regrouped, combined, gate;
    permuted.check(permute, Permute{.x = permuted.random(dtype, {2, 3}),
                                    .source = permuted.indices({2, 0, 1, 3}),
                                    .top_k = 2,
                                    .out = permuted.random(dtype, {4, 3})});
    regrouped.check(regroup_rows, RegroupRows{.x = regrouped.random(dtype, {4, 3}),
                                              .begin = regrouped.indices({0, 1, 1, 4}),
                                              .place = regrouped.indices({3, 0, 0}),
                                              .out = regrouped.random(dtype, {4, 3})});
    combined.check(unpermute, Unpermute{.x = combined.random(dtype, {4, 3}),
                                        .row = matrix(combined.indices({1, 2, 0, 3}), 2, 2),
                                        .prob = combined.random(DType::f32, {2, 2}),
                                        .addend = combined.random(dtype, {2, 3}),
                                        .out = combined.random(dtype, {2, 3})});
    gate.check(gate_backward, GateBackward{.dact = gate.random(dtype, {4, 3}),
                                           .act = gate.random(dtype, {4, 3}),
                                           .prob = gate.random(DType::f32, {2, 2}),
                                           .row = matrix(gate.indices({1, 2, 0, 3}), 2, 2),
                                           .dprob = gate.random(DType::f32, {2, 2}),
                                           .dact_out = gate.random(dtype, {4, 3}),
                                           .act_out = gate.random(dtype, {4, 3})});
  }
}

TEST_CASE("the cost of the GEMMs of experts is that of their rows", "[cost]") {
  const Tensor x = tensor(DType::bf16, {10, 6}), out = tensor(DType::bf16, {10, 4}),
               w = tensor(DType::bf16, {12, 6}), offsets = tensor(DType::i32, {4}),
               dw = tensor(DType::f32, {12, 6});
  const Exec exec;
  const Cost forward = cost(exec, GroupedLinearForward{.x = x, .weight = w, .offsets = offsets, .out = out});
  CHECK(forward.flops == 2.0 * 10 * 4 * 6);
  CHECK(forward.read == 2.0 * (60 + 72));
  CHECK(forward.written == 2.0 * 40);
  const Cost data =
      cost(exec, GroupedLinearBackwardData{.dout = out, .weight = w, .offsets = offsets, .dx = x});
  CHECK(data.flops == forward.flops);
  CHECK(data.written == 2.0 * 60);
  GroupedLinearBackwardWeight b{.dout = out, .x = x, .offsets = offsets, .dweight = dw, .accumulate = false};
  const Cost once = cost(exec, b);
  b.accumulate = true;
  CHECK(once.flops == forward.flops);
  CHECK(once.written == 4.0 * 72);
  CHECK(cost(exec, b).read == once.read + 4.0 * 72);
}

TEST_CASE("the bytes of embeddings, dropout and cross entropy are those that their kernels touch", "[cost]") {
  for (const DType dtype : types)
    for (const bool positions : {false, true}) {
      CAPTURE(name_of(dtype), positions);
      Counted forward, backward;
      EmbeddingForward f{.ids = forward.indices({4, 0, 2}),
                         .table = forward.random(dtype, {7, 4}),
                         .out = forward.random(dtype, {3, 4})};
      if (positions)
        f.position_table = forward.random(dtype, {2, 4}), f.positions = forward.indices({0, 1, 1});
      forward.check(embedding_forward, f);
      EmbeddingBackward b{.ids = backward.indices({4, 0, 2}),
                          .dout = backward.random(dtype, {3, 4}),
                          .dtable = backward.random(DType::f32, {7, 4})};
      if (positions) {
        b.dposition_table = backward.random(DType::f32, {2, 4});
        b.positions = backward.indices({0, 1, 1});
        Cost one = cost(backward.exec(), b);
        EmbeddingBackward tokens = b, others = b;
        tokens.dposition_table = tokens.positions = {};
        others.ids = b.positions, others.dtable = b.dposition_table;
        others.dposition_table = others.positions = {};
        const Cost first = cost(backward.exec(), tokens), second = cost(backward.exec(), others);
        CHECK(one.read == first.read + second.read);
        CHECK(one.written == first.written + second.written);
      } else {
        backward.check(embedding_backward, b);
      }
      Counted c;
      Dropout drop{.x = c.random(dtype, {3, 4}), .out = c.random(dtype, {3, 4})};
      if (positions) drop.residual = c.random(dtype, {3, 4});
      c.check(dropout, drop);
    }
  for (const bool gradient : {false, true})
    for (const DType dtype : types) {
      Counted c;
      CrossEntropy a{.logits = c.random(dtype, {3, 5}),
                     .target = c.indices({4, 0, 2}),
                     .log_prob = c.random(DType::f32, {3}),
                     .lse = c.random(DType::f32, {3})};
      if (gradient) a.weight = c.random(DType::f32, {3});
      c.check(cross_entropy, a);
      if (!gradient || dtype == DType::bf16) continue;
      const Cost over_logits = cost(c.exec(), a);
      a.dlogits = c.random(DType::bf16, {3, 5});
      const Cost in_bf16 = cost(c.exec(), a);
      CHECK(in_bf16.read == over_logits.read);
      CHECK(over_logits.written - in_bf16.written == 3 * 5 * 2);
    }
  for (const bool entropy : {false, true})
    for (const DType dtype : types) {
      Counted forward, slice, gradient;
      CrossEntropy a{.logits = forward.random(dtype, {3, 5}),
                     .target = forward.indices({4, 0, 2}),
                     .log_prob = forward.random(DType::f32, {3}),
                     .inverse_temperature = 0.5f};
      if (entropy) a.entropy = forward.random(DType::f32, {3});
      forward.check(cross_entropy, a);
      slice.check(cross_entropy_statistics, {.logits = slice.random(dtype, {3, 5}),
                                             .target = slice.indices({4, 0, 2}),
                                             .out = slice.random(DType::f32, {3, entropy ? 4 : 3})});
      CrossEntropyGradient b{.logits = gradient.random(dtype, {3, 5}),
                             .target = gradient.indices({4, 0, 2}),
                             .lse = gradient.random(DType::f32, {3}),
                             .weight = gradient.random(DType::f32, {3}),
                             .loss_scale = gradient.random(DType::f64, {1})};
      if (entropy) b.entropy = gradient.random(DType::f32, {3});
      if (entropy) b.entropy_weight = gradient.random(DType::f32, {3});
      gradient.check(cross_entropy_gradient, b);
      const Cost over_logits = cost(gradient.exec(), b);
      b.dlogits = tensor(DType::bf16, {3, 5});
      CHECK(over_logits.written - cost(gradient.exec(), b).written == 3 * 5 * (size_of(dtype) - 2));
      CHECK(over_logits.read == cost(gradient.exec(), b).read);
    }
}

TEST_CASE("the bytes of distillation are those that its kernels touch", "[cost]") {
  {
    // All numbers are selected, so that each counts.
    Counted c;
    const auto ids = [&] { return make_tensor(c.random(DType::f32, {2, 4}).data, DType::i32, {2, 4}); };
    c.check(top_columns,
            {.logits = c.random(DType::f32, {2, 4}), .ids = ids(), .values = c.random(DType::f32, {2, 4})});
    Counted p;
    const Tensor of_parts = make_tensor(p.indices({0, 1, 4, 5, 2, 3, 6, 7}).data, DType::i32, {2, 2, 2});
    p.check(top_columns, {.part_ids = of_parts,
                          .part_values = p.random(DType::f32, {2, 2, 2}),
                          .ids = make_tensor(p.random(DType::f32, {2, 4}).data, DType::i32, {2, 4}),
                          .values = p.random(DType::f32, {2, 4})});
  }
  for (const DType dtype : types) {
    Counted c;
    Tensor ids = c.indices({4, 0, 2, 1, 0, 3});
    ids = make_tensor(ids.data, DType::i32, {3, 2});
    c.check(gather_columns,
            {.logits = c.random(dtype, {3, 5}), .ids = ids, .out = c.random(DType::f32, {3, 2})});
    // With `rest` the logits count as a whole, although those at the ids have no effect.
    Counted s;
    ids = make_tensor(s.indices({4, 0, 2, 1, 0, 3}).data, DType::i32, {3, 2});
    ScatterColumns scatter{
        .logits = s.random(dtype, {3, 5}), .ids = ids, .gradient = s.random(DType::f32, {3, 2})};
    s.check(scatter_columns, scatter);
    const Cost zeros = cost(s.exec(), scatter);
    scatter.rest = tensor(DType::f32, {3, 2}), scatter.lse = tensor(DType::f32, {3});
    const Cost all = cost(s.exec(), scatter);
    CHECK(all.read - zeros.read == 3 * 5 * size_of(dtype) + 3 * 2 * 4 + 3 * 4);
    CHECK(all.written == zeros.written);
    if (dtype == DType::bf16) continue;
    scatter.dlogits = tensor(DType::bf16, {3, 5});
    CHECK(cost(s.exec(), scatter).written == 3 * 5 * 2);
  }
  for (const bool zero_outside : {false, true})
    for (const bool gradient : {false, true}) {
      CAPTURE(zero_outside, gradient);
      Counted c;
      TopkKl a{.student = c.random(DType::f32, {3, 2}),
               .teacher = c.random(DType::f32, {3, 2}),
               .target = c.indices({4, 0, 2}),
               .score = c.random(DType::f32, {3}),
               .options = {.type = KlDirection::mixed, .zero_outside = zero_outside}};
      if (zero_outside) a.lse = c.random(DType::f32, {3}), a.entropy = c.random(DType::f32, {3});
      if (gradient) {
        a.weight = c.random(DType::f32, {3});
        a.gradient = c.random(DType::f32, {3, 2});
        if (zero_outside) a.rest = c.random(DType::f32, {3, 2});
      }
      c.check(topk_kl, a);
    }
}

TEST_CASE("the bytes of the optimizer and its companions are those that their kernels touch", "[cost]") {
  for (const bool master : {false, true}) {
    CAPTURE(master);
    Counted c;
    AdamW a{.param = c.random(DType::f32, {9}),
            .grad = c.random(DType::f32, {9}),
            .exp_avg = c.random(DType::f32, {9}),
            .exp_avg_sq = c.random(DType::f32, {9}),
            .lr = 0.5f};
    if (master) a.param_bf16 = c.random(DType::bf16, {9});
    c.check(adamw, a);
  }
  {  // a shard: the state has fewer elements than the flat buffers
    Counted c;
    AdamW a{.param = c.random(DType::f32, {4}),
            .grad = c.random(DType::f32, {9}),
            .exp_avg = c.random(DType::f32, {4}),
            .exp_avg_sq = c.random(DType::f32, {4}),
            .param_bf16 = c.random(DType::bf16, {9})};
    CHECK(cost(c.exec(), a).bytes() == 4 * (16 + 12 + 2));
  }
  {  // reduced state and remainders, of another number of elements than the flat buffers
    Counted c;
    AdamW a{.param = {},
            .grad = c.random(DType::f32, {128}),
            .exp_avg = make_tensor(c.random(DType::f32, {64}).data, DType::e4m3, {64}),
            .exp_avg_sq = make_tensor(c.random(DType::f32, {64}).data, DType::f16, {64}),
            .param_bf16 = c.random(DType::bf16, {128}),
            .remainder = make_tensor(c.random(DType::f32, {64}).data, DType::u16, {64}),
            .exp_avg_scales = make_tensor(c.random(DType::f32, {64}).data, DType::u8, {1}),
            .exp_avg_sq_scales = make_tensor(c.random(DType::f32, {64}).data, DType::u8, {1})};
    CHECK(cost(c.exec(), a).bytes() == 64 * (4 + 2 * (1 + 2 + 2 + 2)) + 2 * 2);
  }
  for (const bool accumulate : {false, true}) {
    Counted sums, columns;
    sums.check(add_sum_of_squares, SumOfSquares{.x = sums.random(DType::f32, {9}),
                                                .out = sums.random(DType::f64, {1}),
                                                .accumulate = accumulate});
    columns.check(column_sums, ColumnSums{.x = columns.random(DType::bf16, {3, 4}),
                                          .out = columns.random(DType::f32, {4}),
                                          .accumulate = accumulate});
  }
  Counted hash;
  hash.check(add_hash, AddHash{.x = hash.random(DType::f32, {9}),
                               .out = make_tensor(hash.random(DType::f64, {1}).data, DType::i64, {1})});
  Counted sum, converted, zeroed;
  sum.check(add_sum, AddSum{.x = sum.random(DType::f32, {9}), .out = sum.random(DType::f64, {1})});
  converted.check(convert,
                  Convert{.x = converted.random(DType::f32, {9}), .out = converted.random(DType::bf16, {9})});
  for (const bool accumulate : {false, true}) {
    Counted parts;
    parts.check(sum_parts, SumParts{.x = parts.random(DType::bf16, {3, 9}),
                                    .out = parts.random(DType::f32, {9}),
                                    .accumulate = accumulate});
  }
  zeroed.check(zero, Zero{.x = zeroed.random(DType::f32, {9})});
  for (const bool feedback : {false, true}) {
    float any = 0;
    const Tensor values = make_tensor(&any, DType::f32, {2, 300}),
                 codes = make_tensor(&any, DType::u8, {2, 320});
    const Tensor error = make_tensor(feedback ? &any : nullptr, DType::f32, {2, 300});
    const Exec exec;
    // A byte per element and one per block of 128, without the padding.
    CHECK(cost(exec, Fp8Encode{.x = values, .error = error, .out = codes}).bytes() ==
          2 * 303 + 2 * 300 * 4 * (feedback ? 3 : 1));
    CHECK(cost(exec, Fp8Decode{.x = codes, .out = values}).bytes() == 2 * 303 + 2 * 300 * 4);
  }
}

TEST_CASE("the bytes and FLOPs of linear layers are those that their kernels touch", "[cost]") {
  constexpr int64_t n = 3, m = 4, k = 5;
  double multiplications = 0;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t c = 0; c < m; ++c)
      for (int64_t i = 0; i < k; ++i) ++multiplications;
  for (const DType dtype : types)
    for (const bool accumulate : {false, true}) {
      CAPTURE(name_of(dtype), accumulate);
      Counted forward, data, weight;
      LinearForward f{.x = forward.random(dtype, {n, k}),
                      .weight = forward.random(dtype, {m, k}),
                      .out = forward.random(dtype, {n, m}),
                      .accumulate = accumulate};
      if (!accumulate) f.bias = forward.random(dtype, {m});
      forward.check(linear_forward, f);
      const LinearBackwardData d{.dout = data.random(dtype, {n, m}),
                                 .weight = data.random(dtype, {m, k}),
                                 .dx = data.random(dtype, {n, k}),
                                 .accumulate = accumulate};
      data.check(linear_backward_data, d);
      const LinearBackwardWeight w{.dout = weight.random(dtype, {n, m}),
                                   .x = weight.random(dtype, {n, k}),
                                   .dweight = weight.random(DType::f32, {m, k}),
                                   .accumulate = accumulate};
      weight.check(linear_backward_weight, w);
      const Cost costs[] = {cost(forward.exec(), f), cost(data.exec(), d), cost(weight.exec(), w)};
      for (const Cost& c : costs) {
        CHECK(c.flops == 2 * multiplications);
        CHECK(c.work == Work::gemm);
        CHECK(c.operands == dtype);
        CHECK(c.gemm[0] * c.gemm[1] * c.gemm[2] == n * m * k);
      }
      const double rewritten = accumulate ? 2 : 1;
      CHECK(costs[0].epilogue == rewritten * n * m * size_of(dtype));
      CHECK(costs[2].epilogue == rewritten * m * k * 4);
    }
}

TEST_CASE("the bytes of attention are those that its kernels touch", "[cost]") {
  for (const DType dtype : types) {
    CAPTURE(name_of(dtype));
    Counted c;
    const Tensor bounds = c.indices({0, 4}, false);
    AttentionForward f{.q = c.random(dtype, {4, 2, 8}),
                       .k = c.random(dtype, {4, 1, 8}),
                       .v = c.random(dtype, {4, 1, 8}),
                       .out = c.random(dtype, {4, 2, 8}),
                       .lse = c.random(DType::f32, {2, 4}),
                       .cu_q = bounds,
                       .cu_k = bounds};
    f.lengths = {.longest = 4, .equal = true};
    c.check(attention_forward, f);
    Counted other;
    const Tensor same = other.indices({0, 4}, false);
    AttentionBackward b{.dout = other.random(dtype, {4, 2, 8}),
                        .q = other.random(dtype, {4, 2, 8}),
                        .k = other.random(dtype, {4, 1, 8}),
                        .v = other.random(dtype, {4, 1, 8}),
                        .out = other.random(dtype, {4, 2, 8}),
                        .lse = other.random(DType::f32, {2, 4}),
                        .cu_q = same,
                        .cu_k = same,
                        .dq = other.random(dtype, {4, 2, 8}),
                        .dk = other.random(dtype, {4, 1, 8}),
                        .dv = other.random(dtype, {4, 1, 8})};
    b.lengths = f.lengths;
    other.check(attention_backward, b);
    const Cost forward = cost(c.exec(), f), backward = cost(other.exec(), b);
    CHECK(forward.flops == 4.0 * 2 * 8 * 10);
    CHECK(backward.flops == 2.5 * forward.flops);
    CHECK(backward.backward);
    CHECK_FALSE(forward.backward);
  }
}

TEST_CASE("attention counts the pairs that its mask leaves", "[cost]") {
  const auto pairs = [](int64_t queries, int64_t keys, int64_t window, bool causal) {
    double count = 0;
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t key = 0; key < keys; ++key) {
        const int64_t own = q + keys - queries;
        count += !causal || (key <= own && (window == 0 || key > own - window)) ? 1 : 0;
      }
    return count;
  };
  Exec exec;
  for (const auto& [queries, keys] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 9}, {7, 7}, {3, 10}, {12, 12}, {5, 6}})
    for (const int64_t window : {0, 1, 3, 7, 100})
      for (const int64_t sequences : {1, 3})
        for (const bool causal : {true, false}) {
          if (!causal && window > 0) continue;
          CAPTURE(queries, keys, window, sequences, causal);
          const double expected = pairs(queries, keys, window, causal);
          if (causal) CHECK(attention_pairs(queries, keys, window) == expected);
          if (causal && queries == keys) CHECK(attention_pairs(keys, window) == expected);
          const int64_t heads = 4, d = 16;
          AttentionForward a;
          a.q = make_tensor(nullptr, DType::bf16, {sequences * queries, heads, d});
          a.k = a.v = make_tensor(nullptr, DType::bf16, {sequences * keys, 2, d});
          a.out = a.q;
          a.window = window;
          a.causal = causal;
          a.lengths = {.longest = keys, .equal = queries == keys};
          const Cost c = cost(exec, a);
          CHECK(c.flops == 4.0 * static_cast<double>(sequences * heads * d) * expected);
          CHECK(c.keys * static_cast<double>(queries) == Approx(expected));
          CHECK(c.work == Work::attention);
          CHECK(c.head_dim == d);
          CHECK_FALSE(c.library);
          // The same as blocks among rows that do not count.
          a.q = a.out = make_tensor(nullptr, DType::bf16, {sequences * queries * 2, heads, d});
          a.k = a.v = make_tensor(nullptr, DType::bf16, {sequences * keys * 3, 2, d});
          a.lengths = {.longest = 3 * keys,
                       .blocks = sequences,
                       .queries = {.first = queries, .rows = queries, .step = 2 * queries},
                       .keys = {.rows = keys, .step = 3 * keys}};
          CHECK(cost(exec, a).flops == c.flops);
          CHECK(cost(exec, a).keys == c.keys);
        }
}

TEST_CASE("the bytes of generation are those that its kernels touch", "[cost]") {
  // Negative numbers, which no result is: a random one may equal a result of few bits.
  const auto overwritten = [](Tensor t) {
    std::memset(t.data, 0xbf, static_cast<size_t>(t.bytes()));
    return t;
  };
  for (const DType dtype : types) {
    CAPTURE(name_of(dtype));
    Counted w;
    w.check(cache_write, CacheWrite{.keys = w.random(dtype, {3, 8}),
                                    .values = w.random(dtype, {3, 8}),
                                    .slots = w.indices({4, 0, 2}),
                                    .key_cache = overwritten(w.random(dtype, {5, 8})),
                                    .value_cache = overwritten(w.random(dtype, {5, 8}))});
    Counted c;
    const Tensor bounds = c.indices({0, 3}, false), context = c.indices({4}, false);
    Tensor table = c.indices({1, 0}, false);
    table = make_tensor(table.data, DType::i32, {1, 2});
    const AttentionPaged paged{.q = c.random(dtype, {3, 2, 8}),
                               .keys = c.random(dtype, {4, 1, 8}),
                               .values = c.random(dtype, {4, 1, 8}),
                               .out = overwritten(c.random(dtype, {3, 2, 8})),
                               .cu_q = bounds,
                               .context = context,
                               .block_table = table,
                               .page = 2};
    c.check(attention_paged, paged);
    CHECK(cost(c.exec(), paged).flops == 4 * 2 * 8 * (2 + 3 + 4));
  }
  Counted s;
  const auto numbers = [&s](std::vector<int32_t> words) {
    return make_tensor(s.indices(std::move(words)).data, DType::i64, {2});
  };
  s.check(sample_tokens, SampleTokens{.logits = s.random(DType::f32, {2, 5}),
                                      .temperature = s.random(DType::f32, {2}),
                                      .seed = numbers({1, 0, 2, 0}),
                                      .sample = numbers({3, 0, 4, 0}),
                                      .position = s.indices({5, 6}),
                                      .tokens = 5,
                                      .out = s.random(DType::f32, {2, SamplePart::columns})});
  Counted j;
  // A single slice has no other score to compare with.
  j.check(join_samples,
          JoinSamples{.parts = j.random(DType::f32, {1, 2, SamplePart::columns}),
                      .token = make_tensor(j.random(DType::f32, {2}).data, DType::i32, {2}),
                      .log_prob = j.random(DType::f32, {2})},
          2 * sizeof(float));
}

TEST_CASE("the bytes of losses of sequences are those that their kernels touch", "[cost]") {
  Counted sum;
  sum.check(segment_sum, SegmentSum{.x = sum.random(DType::f32, {6}),
                                    .minus = sum.random(DType::f32, {6}),
                                    .target = sum.indices({0, 0, 0, 0, 0, 0}),
                                    .segment = sum.indices({0, 1, 1, 2, 2, 2}),
                                    .out = sum.random(DType::f64, {3})});
  Counted rows;
  rows.check(segment_rows, SegmentRows{.values = rows.random(DType::f64, {2}),
                                       .target = rows.indices({0, 0, 0}),
                                       .segment = rows.indices({1, 0, 1}),
                                       .out = rows.random(DType::f32, {3})});
  // The normalizer and the margin of a pair are the chosen sequence's: the rejected one's are not read, but
  // lie between numbers that are.
  Counted pairs;
  const Tensor values = pairs.random(DType::f64, {4, PairValue::count});
  PairLoss pair{.sums = pairs.random(DType::f64, {4}),
                .values = values,
                .options = {.average = true},
                .gradient = pairs.random(DType::f64, {4}),
                .metrics = pairs.random(DType::f64, {PairMetric::count})};
  pairs.check(pair_loss, pair, 2 * 2 * sizeof(double));
  // Ratios are within the range, so that every input counts, and no row is clipped.
  Counted tokens;
  const auto near = [&](Counted& c) { return c.random(DType::f32, {5}); };
  tokens.check(policy_loss,
               PolicyLoss{.log_prob = near(tokens),
                          .target = tokens.indices({0, 0, 0, 0, 0}),
                          .normalizer = near(tokens),
                          .advantage = near(tokens),
                          .old = near(tokens),
                          .reference = near(tokens),
                          .importance = near(tokens),
                          .entropy = near(tokens),
                          .options = {.lower = 1, .upper = 50, .kl_penalty = 0.5, .entropy_coef = 0.1},
                          .weight = near(tokens),
                          .entropy_weight = near(tokens),
                          .metrics = tokens.random(DType::f64, {PolicyMetric::count})},
               sizeof(double), sizeof(double));
  Counted sequences;
  const PolicyLoss gspo{.log_prob = near(sequences),
                        .target = sequences.indices({0, 0, 0, 0, 0}),
                        .normalizer = near(sequences),
                        .advantage = near(sequences),
                        .segment = sequences.indices({0, 0, 1, 1, 1}),
                        .log_ratios = sequences.random(DType::f64, {2}),
                        .tokens = sequences.random(DType::f64, {2}),
                        .options = {.type = PolicyObjective::gspo, .lower = 1, .upper = 50},
                        .weight = near(sequences),
                        .metrics = sequences.random(DType::f64, {PolicyMetric::count})};
  // There is no divergence and no entropy to add either.
  sequences.check(policy_loss, gspo, 3 * sizeof(double), 3 * sizeof(double));
  CHECK(cost(sequences.exec(), gspo).launches == 2);
  PolicyLoss only_weights = gspo;
  only_weights.metrics = {};
  CHECK(cost(sequences.exec(), only_weights).launches == 1);
  CHECK(cost(sequences.exec(), only_weights).scratch == 0);
}

TEST_CASE("ops only add their calls while calls are collected", "[cost]") {
  std::vector<float> memory(64);
  const auto f32 = [&](int64_t at, std::initializer_list<int64_t> shape) {
    return make_tensor(memory.data() + at, DType::f32, shape);
  };
  KernelSet needed;
  std::vector<Call> calls;
  Exec exec;
  exec.kernels = &cpu_kernels(cpu::Isa::baseline);
  exec.needed = &needed;
  exec.calls = &calls;
  const Tensor x = f32(0, {2, 4}), weight = f32(8, {3, 4}), out = f32(20, {2, 3}), inner = f32(30, {2, 3});
  linear_forward(
      exec,
      {.x = x, .weight = weight, .out = out, .activation = Activation::gelu_tanh, .pre_activation = inner});
  linear_backward_data(exec, {.dout = inner,
                              .weight = weight,
                              .dx = x,
                              .activation = Activation::gelu_tanh,
                              .pre_activation = f32(40, {2, 4})});
  linear_backward_weight(exec, {.dout = inner, .x = x, .dweight = weight, .dbias = f32(50, {3})});
  zero(exec, {.x = out});
  CHECK(memory == std::vector<float>(64));
  std::vector<std::string> names;
  for (const Call& call : calls) names.emplace_back(call.op);
  CHECK(names == std::vector<std::string>{"linear_forward", "activation_forward", "linear_backward_data",
                                          "activation_backward", "linear_backward_weight", "column_sums",
                                          "zero"});
  // Two kernels: the GEMM writes the input of the activation, which reads it.
  CHECK(calls[0].cost.bytes() == 4 * (8 + 12 + 6));
  CHECK(calls[1].cost.bytes() == 4 * (6 + 6));
  CHECK(calls[2].cost.bytes() == 4 * (6 + 12 + 8));
  CHECK(calls[3].cost.bytes() == 4 * (8 + 8 + 8));
  CHECK(needed.contains(Kernel::activation_backward));
  exec.calls = nullptr;
  zero(exec, {.x = out});
  CHECK(calls.size() == names.size());
}

}  // namespace
