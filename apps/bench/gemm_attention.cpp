// nrl-train bench gemm, bench attention: compute-bound kernels, relative to peak FLOP/s.

#include <algorithm>
#include <array>
#include <utility>

#include "apps/bench/machine.h"
#include "apps/plan/device_models.h"
#include "core/base/log.h"
#include "core/ops/attention_difference.h"
#include "core/ops/attention_engine.h"
#include "core/ops/grouped_linear.h"
#include "core/ops/kernel_table.h"
#include "core/ops/peak.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

/// Peak FLOP/s: the data sheet of a GPU (bf16), or the measured FMA rate of a CPU (fp32).
double peak_of(Machine& machine) {
  return machine.gpu() ? plan::peak_flops(machine.exec().device->properties())
                       : ops::measure_fma_peak(machine.exec().threads) * 1e9;
}

std::string peak_text(const Machine& machine, double peak) {
  if (peak <= 0) return "peak unknown";
  return machine.gpu() ? fmt::format("peak {:.0f} TFLOP/s (data sheet, dense bf16)", peak * 1e-12)
                       : fmt::format("fp32 peak {:.0f} GFLOP/s (register FMAs)", peak * 1e-9);
}

/// On a CPU 16-bit GEMMs are compared with those of f32, in turn: the processor's clock and load drift.
bool compares_with_f32(const Machine& machine, DType dtype) {
  return !machine.gpu() && dtype != DType::f32;
}

// "  612 (62 %)", in TFLOP/s on a GPU and GFLOP/s on a CPU.
std::string rate_text(const Machine& machine, double rate, double peak) {
  const double scaled = rate * (machine.gpu() ? 1e-12 : 1e-9);
  if (peak <= 0) return fmt::format("{:>8.1f}        ", scaled);
  return fmt::format("{:>8.1f} ({:>3.0f} %)", scaled, rate / peak * 100);
}

JsonValue rate_json(double seconds, double flops, double peak) {
  return JsonValue::object(
      {{"seconds", seconds},
       {"flops_per_s", flops / seconds},
       {"fraction_of_peak", peak > 0 ? JsonValue(flops / seconds / peak) : JsonValue()}});
}

/// Tokens, outputs, inputs of a linear layer, or of each of the layers of experts, which have equal parts of
/// the tokens.
struct GemmCase {
  const char* name;
  int64_t n, m, k;
  bool gelu = false;  ///< on a GPU also with GELU behind it
  int64_t experts = 0;
};
// The layers of configs/bench-*.yaml, one microbatch.
constexpr GemmCase gpu_gemms[] = {{"8b qkv", 32768, 6144, 4096},
                                  {"8b o", 32768, 4096, 4096},
                                  {"8b gate+up", 32768, 28672, 4096},
                                  {"8b down", 32768, 4096, 14336},
                                  {"8b head", 8192, 128256, 4096},
                                  {"1b qkv", 32768, 3072, 2048},
                                  {"1b o", 32768, 2048, 2048},
                                  {"1b gate+up", 32768, 16384, 2048},
                                  {"1b down", 32768, 2048, 8192},
                                  {"1b head", 8192, 128256, 2048},
                                  {"xl qkv", 16384, 4800, 1600},
                                  {"xl mlp", 16384, 6400, 1600, true},
                                  {"square", 8192, 8192, 8192},
                                  {"30b experts", 32768, 1536, 2048, false, 16},
                                  {"30b down", 32768, 2048, 768, false, 16},
                                  {"8x7b experts", 16384, 28672, 4096, false, 4}};
constexpr GemmCase cpu_gemms[] = {
    {"124m qkv", 1024, 2304, 768},  {"124m o", 1024, 768, 768},           {"124m up", 1024, 3072, 768},
    {"124m down", 1024, 768, 3072}, {"124m head", 256, 50304, 768},       {"17m qkv", 4096, 1152, 384},
    {"17m o", 4096, 384, 384},      {"17m gate+up", 4096, 2048, 384},     {"17m down", 4096, 384, 1024},
    {"17m head", 256, 8192, 384},   {"experts", 4096, 512, 384, false, 8}};
constexpr GemmCase quick_gemms[] = {
    {"quick", 48, 32, 64, true}, {"quick odd", 40, 24, 16}, {"quick experts", 48, 32, 64, false, 3}};

/// Sequences of `length` tokens.
struct AttentionCase {
  const char* name;
  int64_t sequences, length, heads, kv_heads, d;
  int64_t window = 0;
  float dropout = 0;
};
constexpr AttentionCase gpu_attentions[] = {
    {"8b t8192", 1, 8192, 32, 8, 128},        {"8b t4096", 2, 4096, 32, 8, 128},
    {"8b t1024", 8, 1024, 32, 8, 128},        {"1b t4096", 4, 4096, 32, 8, 64},
    {"xl t1024", 8, 1024, 25, 25, 64},        {"mha t4096", 2, 4096, 32, 32, 128},
    {"8b window", 2, 4096, 32, 8, 128, 1024}, {"xl dropout", 8, 1024, 25, 25, 64, 0, 0.1f}};
constexpr AttentionCase cpu_attentions[] = {{"124m t1024", 1, 1024, 12, 12, 64},
                                            {"124m t256", 4, 256, 12, 12, 64},
                                            {"17m t256", 16, 256, 6, 6, 64},
                                            {"gqa t512", 2, 512, 12, 4, 64},
                                            {"8b t2048", 1, 2048, 8, 2, 128},
                                            {"8b window", 1, 2048, 8, 2, 128, 512},
                                            {"124m dropout", 1, 1024, 12, 12, 64, 0, 0.1f}};
constexpr AttentionCase quick_attentions[] = {{"quick", 2, 24, 4, 2, 16}};

template <class Case>
std::span<const Case> choose(const Args& args, const Machine& machine, std::span<const Case> quick,
                             std::span<const Case> gpu, std::span<const Case> cpu) {
  return args.quick ? quick : machine.gpu() ? gpu : cpu;
}

/// Replaces the engine of GEMMs for its lifetime.
class OtherGemms {
 public:
  OtherGemms(ops::Libraries& libraries, std::shared_ptr<ops::gemm::Engine> engine)
      : libraries_(libraries), engine_(std::exchange(libraries.gemm, std::move(engine))) {}
  ~OtherGemms() { libraries_.gemm = std::move(engine_); }
  OtherGemms(const OtherGemms&) = delete;
  OtherGemms& operator=(const OtherGemms&) = delete;

 private:
  ops::Libraries& libraries_;
  std::shared_ptr<ops::gemm::Engine> engine_;
};

size_t gemm_workspace(const Machine& machine, const ops::Exec& e, const GemmCase& c, DType dtype) {
  if (machine.gpu()) return ops::gpu_linear_workspace(std::max(c.m, c.k), e.partials());
  return c.experts > 0
             ? ops::grouped_linear_workspace(c.n, c.m, c.k, dtype, e.threads, e.kernels->bf16_products)
             : ops::linear_workspace(c.n, c.m, c.k, dtype, e.threads, e.kernels->bf16_products);
}

/// The operands of the passes of a linear layer, several sets of them.
class GemmOperands {
 public:
  GemmOperands(Machine& machine, const GemmCase& c, DType dtype)
      : machine_(machine),
        memory_(machine),
        count_(machine.sets(
            static_cast<double>((c.n * c.k + weight_rows(c) * c.k + c.n * c.m) * size_of(dtype)))) {
    machine.need_workspace(gemm_workspace(machine, machine.exec(), c, dtype));
    if (c.experts > 0) offsets_ = memory_.arithmetic(c.experts + 1, 0, c.n / c.experts);
    for (int i = 0; i < count_; ++i)
      sets_.push_back({.x = memory_.normal(dtype, {c.n, c.k}),
                       .w = memory_.normal(dtype, {weight_rows(c), c.k}, 0.02),
                       .y = memory_.normal(dtype, {c.n, c.m}, 0.1),
                       .dx = memory_.normal(dtype, {c.n, c.k}),
                       .dw = memory_.constant(DType::f32, {weight_rows(c), c.k}, 0)});
  }

  struct Times {
    double forward = 0, dgrad = 0, wgrad = 0;
  };
  Times seconds() {
    ops::Exec& e = machine_.exec();
    Times t;
    if (offsets_) {
      t.dgrad = timed([&](const Set& s) {
        ops::grouped_linear_backward_data(e, {.dout = s.y, .weight = s.w, .offsets = offsets_, .dx = s.dx});
      });
      t.wgrad = timed([&](const Set& s) {
        ops::grouped_linear_backward_weight(
            e, {.dout = s.y, .x = s.x, .offsets = offsets_, .dweight = s.dw, .accumulate = false});
      });
      t.forward = timed([&](const Set& s) {
        ops::grouped_linear_forward(e, {.x = s.x, .weight = s.w, .offsets = offsets_, .out = s.y});
      });
      return t;
    }
    t.dgrad =
        timed([&](const Set& s) { ops::linear_backward_data(e, {.dout = s.y, .weight = s.w, .dx = s.dx}); });
    t.wgrad = timed([&](const Set& s) {
      ops::linear_backward_weight(e, {.dout = s.y, .x = s.x, .dweight = s.dw, .accumulate = false});
    });
    t.forward = timed([&](const Set& s) { ops::linear_forward(e, {.x = s.x, .weight = s.w, .out = s.y}); });
    return t;
  }

 private:
  struct Set {
    Tensor x, w, y, dx, dw;
  };
  static int64_t weight_rows(const GemmCase& c) { return std::max<int64_t>(c.experts, 1) * c.m; }
  double timed(const std::function<void(const Set&)>& call) {
    const double t = machine_.seconds([&](int i) { call(sets_[static_cast<size_t>(i % count_)]); }, count_);
    ops::synchronize(machine_.exec());
    return t;
  }

  Machine& machine_;
  Tensors memory_;
  int count_;
  Tensor offsets_;  ///< of experts
  std::vector<Set> sets_;
};

/// `tuned`: an autotuning engine, measured beside that of the machine; null on a CPU.
void gemm_case(Machine& machine, const GemmCase& c, DType dtype, double peak,
               const std::shared_ptr<ops::gemm::Engine>& tuned, Report& report) {
  GemmOperands operands(machine, c, dtype);
  const double flops = ops::linear_flops(c.n, c.m, c.k);
  const auto show = [&](const char* name, const GemmOperands::Times& t, JsonValue& to,
                        const std::string& more = {}) {
    log::info("{:<12} {:>6} {:>6} {:>6}  {} {} {}{}", name, c.n, c.m, c.k,
              rate_text(machine, flops / t.forward, peak), rate_text(machine, flops / t.dgrad, peak),
              rate_text(machine, flops / t.wgrad, peak), more);
    to.set("forward", rate_json(t.forward, flops, peak));
    to.set("backward_data", rate_json(t.dgrad, flops, peak));
    to.set("backward_weight", rate_json(t.wgrad, flops, peak));
  };
  JsonValue row = JsonValue::object({{"name", c.name}, {"n", c.n}, {"m", c.m}, {"k", c.k}});
  GemmOperands::Times best = operands.seconds();
  if (compares_with_f32(machine, dtype)) {
    GemmOperands f32(machine, c, DType::f32);
    GemmOperands::Times other = f32.seconds();
    constexpr int rounds = 3;
    const auto faster = [](GemmOperands::Times& a, const GemmOperands::Times& b) {
      a = {std::min(a.forward, b.forward), std::min(a.dgrad, b.dgrad), std::min(a.wgrad, b.wgrad)};
    };
    for (int i = 1; i < rounds && !machine.quick(); ++i) {
      faster(best, operands.seconds());
      faster(other, f32.seconds());
    }
    const double ratios[] = {other.forward / best.forward, other.dgrad / best.dgrad,
                             other.wgrad / best.wgrad};
    show(c.name, best, row,
         fmt::format("   {:.2f} {:.2f} {:.2f} x float32", ratios[0], ratios[1], ratios[2]));
    row.set("speed_over_float32",
            JsonValue::object(
                {{"forward", ratios[0]}, {"backward_data", ratios[1]}, {"backward_weight", ratios[2]}}));
  } else {
    show(c.name, best, row);
  }
  if (tuned && c.experts == 0) {
    const OtherGemms other(*machine.exec().libraries, tuned);
    JsonValue of_tuned = JsonValue::object({});
    show("  tuned", operands.seconds(), of_tuned);
    row.set("tuned", std::move(of_tuned));
  }
  report.add(std::move(row));
}

/// The GELU of an MLP of `m` columns, in the epilogues of the two GEMMs beside it or in kernels of its own.
void gelu_case(Machine& machine, const GemmCase& c, DType dtype, double peak, Report& report) {
  struct Set {
    Tensor x, w_in, pre, act, dout, w_out, dpre;
  };
  ops::Exec& e = machine.exec();
  machine.need_workspace(ops::gpu_linear_workspace(std::max(c.m, c.k), e.partials()));
  const int count =
      machine.sets(static_cast<double>((2 * c.n * c.k + 2 * c.m * c.k + 3 * c.n * c.m) * size_of(dtype)));
  Tensors memory(machine);
  std::vector<Set> sets;
  for (int i = 0; i < count; ++i)
    sets.push_back({.x = memory.normal(dtype, {c.n, c.k}),
                    .w_in = memory.normal(dtype, {c.m, c.k}, 0.02),
                    .pre = memory.normal(dtype, {c.n, c.m}),
                    .act = memory.normal(dtype, {c.n, c.m}),
                    .dout = memory.normal(dtype, {c.n, c.k}, 0.1),
                    .w_out = memory.normal(dtype, {c.k, c.m}, 0.02),
                    .dpre = memory.normal(dtype, {c.n, c.m})});
  const double flops = ops::linear_flops(c.n, c.m, c.k);
  const auto rate = [&](const std::function<void(const Set&)>& call) {
    const double t = machine.seconds([&](int i) { call(sets[static_cast<size_t>(i % count)]); }, count);
    ops::synchronize(e);
    return t;
  };
  constexpr auto gelu = ops::Activation::gelu_tanh;
  const double fused_forward = rate([&](const Set& s) {
    ops::linear_forward(
        e, {.x = s.x, .weight = s.w_in, .out = s.act, .activation = gelu, .pre_activation = s.pre});
  });
  const double fused_backward = rate([&](const Set& s) {
    ops::linear_backward_data(
        e, {.dout = s.dout, .weight = s.w_out, .dx = s.dpre, .activation = gelu, .pre_activation = s.pre});
  });
  const double forward = rate([&](const Set& s) {
    ops::linear_forward(e, {.x = s.x, .weight = s.w_in, .out = s.pre});
    ops::activation_forward(e, {.kind = gelu, .x = s.pre, .out = s.act});
  });
  const double backward = rate([&](const Set& s) {
    ops::linear_backward_data(e, {.dout = s.dout, .weight = s.w_out, .dx = s.dpre});
    ops::activation_backward(e, {.kind = gelu, .dout = s.dpre, .x = s.pre, .dx = s.dpre});
  });
  log::info("{:<12} GELU in the GEMM: forward {}, dgrad {}; a kernel of its own: {}, {}", c.name,
            rate_text(machine, flops / fused_forward, peak), rate_text(machine, flops / fused_backward, peak),
            rate_text(machine, flops / forward, peak), rate_text(machine, flops / backward, peak));
  report.add(JsonValue::object({{"name", std::string(c.name) + " gelu"},
                                {"forward_fused", rate_json(fused_forward, flops, peak)},
                                {"forward_separate", rate_json(forward, flops, peak)},
                                {"backward_fused", rate_json(fused_backward, flops, peak)},
                                {"backward_separate", rate_json(backward, flops, peak)}}));
}

/// Disables the attention library for its lifetime, so that our own kernels run for all shapes.
class OwnKernels {
 public:
  explicit OwnKernels(ops::Libraries& libraries)
      : libraries_(libraries), engine_(std::move(libraries.attention)) {}
  ~OwnKernels() { libraries_.attention = std::move(engine_); }
  OwnKernels(const OwnKernels&) = delete;
  OwnKernels& operator=(const OwnKernels&) = delete;

 private:
  ops::Libraries& libraries_;
  std::shared_ptr<ops::attention::Engine> engine_;
};

/// One call of each pass, on columns of one buffer as a training step has them.
struct AttentionSet {
  ops::AttentionForward forward;
  ops::AttentionBackward backward;
  Tensor dqkv;  ///< what dq, dk and dv are columns of
};

AttentionSet attention_set(Tensors& memory, const AttentionCase& c, DType dtype) {
  const int64_t n = c.sequences * c.length, width = (c.heads + 2 * c.kv_heads) * c.d;
  const Tensor qkv = memory.normal(dtype, {n, width});
  const auto heads = [&c](const Tensor& rows, int64_t first, int64_t count) {
    return rows.columns(first * c.d, count * c.d).split_heads(count, c.d);
  };
  AttentionSet s;
  s.dqkv = memory.normal(dtype, {n, width});
  ops::AttentionForward& f = s.forward;
  f.q = heads(qkv, 0, c.heads);
  f.k = heads(qkv, c.heads, c.kv_heads);
  f.v = heads(qkv, c.heads + c.kv_heads, c.kv_heads);
  f.out = memory.normal(dtype, {n, c.heads, c.d});
  f.lse = memory.constant(DType::f32, {c.heads, n}, 0);
  f.cu_q = f.cu_k = memory.arithmetic(c.sequences + 1, 0, c.length);
  f.scale = 1.0f / std::sqrt(static_cast<float>(c.d));
  f.window = c.window;
  f.lengths = {.longest = c.length, .equal = true};
  f.dropout.p = c.dropout;
  ops::AttentionBackward& b = s.backward;
  b.dout = memory.normal(dtype, {n, c.heads, c.d});
  b.q = f.q;
  b.k = f.k;
  b.v = f.v;
  b.out = f.out;
  b.lse = f.lse;
  b.cu_q = b.cu_k = f.cu_q;
  b.dq = heads(s.dqkv, 0, c.heads);
  b.dk = heads(s.dqkv, c.heads, c.kv_heads);
  b.dv = heads(s.dqkv, c.heads + c.kv_heads, c.kv_heads);
  b.scale = f.scale;
  b.window = f.window;
  b.lengths = f.lengths;
  b.dropout = f.dropout;
  return s;
}

void need_attention_workspace(Machine& machine, const AttentionCase& c) {
  const int64_t n = c.sequences * c.length;
  const int threads = machine.exec().threads;
  machine.need_workspace(machine.gpu()
                             ? ops::attention_gpu_workspace(n, c.heads, c.kv_heads, c.d)
                             : ops::attention_workspace(n, c.heads, c.kv_heads, c.d, c.length, threads));
}

/// `difference`: of compare_attention(), or none.
void attention_case(Machine& machine, const AttentionCase& c, const char* implementation, DType dtype,
                    double peak, Report& report, const JsonValue& difference = {}) {
  ops::Exec& e = machine.exec();
  const int64_t n = c.sequences * c.length, width = (c.heads + 2 * c.kv_heads) * c.d;
  need_attention_workspace(machine, c);
  Tensors memory(machine);
  const int count = machine.sets(static_cast<double>(2 * n * width * size_of(dtype)));
  std::vector<AttentionSet> sets;
  for (int i = 0; i < count; ++i) {
    sets.push_back(attention_set(memory, c, dtype));
    ops::attention_forward(e, sets.back().forward);  // computes out and lse for the backward pass
  }
  const double forward = machine.seconds(
      [&](int i) { ops::attention_forward(e, sets[static_cast<size_t>(i % count)].forward); }, count);
  const double backward = machine.seconds(
      [&](int i) { ops::attention_backward(e, sets[static_cast<size_t>(i % count)].backward); }, count);
  ops::synchronize(e);
  const double flops = cost(e, sets.front().forward).flops,
               backward_flops = cost(e, sets.front().backward).flops;
  log::info("{:<12} {:>4} x {:>5} {:>3}/{:<2} d {:>3}  {} {}   {}", c.name, c.sequences, c.length, c.heads,
            c.kv_heads, c.d, rate_text(machine, flops / forward, peak),
            rate_text(machine, backward_flops / backward, peak), implementation);
  report.add(JsonValue::object({{"name", c.name},
                                {"kernels", implementation},
                                {"sequences", c.sequences},
                                {"length", c.length},
                                {"heads", c.heads},
                                {"kv_heads", c.kv_heads},
                                {"head_dim", c.d},
                                {"window", c.window},
                                {"dropout", static_cast<double>(c.dropout)},
                                {"difference", difference},
                                {"forward", rate_json(forward, flops, peak)},
                                {"backward", rate_json(backward, backward_flops, peak)}}));
}

/// The values of a contiguous tensor on the host.
std::vector<float> values_of(ops::Exec& e, const Tensor& t) {
  std::vector<float> values(static_cast<size_t>(t.numel()));
  if (t.dtype == DType::f32) {
    ops::download(e, t, values.data());
    return values;
  }
  const auto upcast = [&]<class T>(std::vector<T> narrow) {
    ops::download(e, t, narrow.data());
    std::transform(narrow.begin(), narrow.end(), values.begin(), [](T v) { return static_cast<float>(v); });
  };
  t.dtype == DType::f16 ? upcast(std::vector<f16>(values.size())) : upcast(std::vector<bf16>(values.size()));
  return values;
}

/// The largest differences between a library and our own kernels for the same inputs. Backward, both get the
/// library's out and lse.
struct Differences {
  JsonValue rows;     ///< {"out": 0.004, ...}
  std::string wrong;  ///< the tensors that differ by more than attention_difference_limit
};

Differences compare_attention(Machine& machine, const AttentionCase& c, DType dtype) {
  ops::Exec& e = machine.exec();
  need_attention_workspace(machine, c);
  Tensors memory(machine);
  const AttentionSet library = attention_set(memory, c, dtype), own = attention_set(memory, c, dtype);
  ops::attention_forward(e, library.forward);
  ops::attention_backward(e, library.backward);
  {
    const OwnKernels disabled(*e.libraries);
    ops::attention_forward(e, own.forward);
    ops::AttentionBackward b = own.backward;
    b.out = library.forward.out;
    b.lse = library.forward.lse;
    ops::attention_backward(e, b);
  }
  const int64_t n = c.sequences * c.length, width = (c.heads + 2 * c.kv_heads) * c.d;
  const std::vector<float> out = values_of(e, library.forward.out), own_out = values_of(e, own.forward.out),
                           dqkv = values_of(e, library.dqkv), own_dqkv = values_of(e, own.dqkv);
  struct Result {
    const char* name;
    const std::vector<float>&got, &want;
    int64_t row_step, first, heads;
  };
  Differences found{JsonValue::object({}), {}};
  std::string text;
  for (const Result& r : {Result{"out", out, own_out, c.heads * c.d, 0, c.heads},
                          {"dq", dqkv, own_dqkv, width, 0, c.heads},
                          {"dk", dqkv, own_dqkv, width, c.heads, c.kv_heads},
                          {"dv", dqkv, own_dqkv, width, c.heads + c.kv_heads, c.kv_heads}}) {
    const auto of = [&](const std::vector<float>& values) {
      return [&values, &r, &c](int64_t row_and_head, int64_t i) {
        const int64_t at = row_and_head / r.heads * r.row_step + (r.first + row_and_head % r.heads) * c.d + i;
        return static_cast<double>(values[static_cast<size_t>(at)]);
      };
    };
    const double rms = ops::rms_of(n * r.heads, c.d, of(r.want));
    const double difference = ops::largest_difference(n * r.heads, c.d, of(r.got), of(r.want), rms);
    found.rows.set(r.name, difference);
    text += fmt::format("  {} {:.2g}", r.name, difference);
    if (!(difference <= ops::attention_difference_limit))
      found.wrong += (found.wrong.empty() ? "" : ", ") + std::string(r.name);
  }
  log::info("{:<12} largest |library - own| / (|own| + rms):{}", c.name, text);
  return found;
}

/// Whether a library runs both passes of a case.
bool library_runs(Machine& machine, const AttentionCase& c, DType dtype) {
  ops::Exec& e = machine.exec();
  if (!e.libraries || !e.libraries->attention) return false;
  need_attention_workspace(machine, c);
  Tensors memory(machine);
  const AttentionSet set = attention_set(memory, c, dtype);
  const auto chosen = [&](const ops::attention::Problem& p) {
    const auto choice = ops::attention::choose(*e.libraries, p, e.workspace.size);
    log::info("{:<12} {}: {}", c.name, describe(choice, p).pass,
              describe(choice, p).implementation);
    return choice.engine != nullptr;
  };
  const bool forward = chosen(ops::attention::problem_of(set.forward));
  return chosen(ops::attention::problem_of(set.backward)) && forward;
}

template <class Case, class Measure>
int measure_all(const Args& args, std::span<const Case> cases, Report& report, const Measure& measure) {
  for (const Case& c : cases) {
    if (!selected(args, c.name)) continue;
    try {
      measure(c);
    } catch (const Error& error) {
      report.add_failure(c.name, error.what());
    }
  }
  return report.finish();
}

}  // namespace

int gemm(const Args& args) {
  Machine machine(args.device, args.quick);
  Report report(args, machine.describe());
  const DType dtype = precision_of(args, machine);
  const double peak = peak_of(machine);
  report.set("peak_flops_per_s", peak);
  log::info("{}; {}; {}", machine.name(), name_of(dtype), peak_text(machine, peak));
  log::info("{:<12} {:>6} {:>6} {:>6}  {:>16} {:>16} {:>16}   {} (% of peak)", "layer", "tokens", "out", "in",
            "forward", "dgrad", "wgrad", machine.gpu() ? "TFLOP/s" : "GFLOP/s");
  std::shared_ptr<ops::gemm::Engine> tuned;
  if (machine.gpu()) {
    tuned = train::accelerator_backend().libraries(*machine.exec().device, {.autotune = true})->gemm;
    log::info(
        "first line of a layer: the library's choice of algorithm; tuned: the fastest of its candidates");
  }
  return measure_all(args, choose<GemmCase>(args, machine, quick_gemms, gpu_gemms, cpu_gemms), report,
                     [&](const GemmCase& c) {
                       gemm_case(machine, c, dtype, peak, tuned, report);
                       if (c.gelu && machine.gpu()) gelu_case(machine, c, dtype, peak, report);
                     });
}

int attention(const Args& args) {
  Machine machine(args.device, args.quick);
  Report report(args, machine.describe());
  const DType dtype = precision_of(args, machine);
  const double peak = peak_of(machine);
  report.set("peak_flops_per_s", peak);
  log::info("{}; {}; {}; FLOPs: exact causal pairs, backward 2.5 x forward", machine.name(), name_of(dtype),
            peak_text(machine, peak));
  log::info("{:<12} {:>12} {:>6} {:>5}  {:>16} {:>16}   {} (% of peak)", "case", "seqs x length", "heads",
            "dim", "forward", "backward", machine.gpu() ? "TFLOP/s" : "GFLOP/s");
  return measure_all(args,
                     choose<AttentionCase>(args, machine, quick_attentions, gpu_attentions, cpu_attentions),
                     report, [&](const AttentionCase& c) {
                       const bool library = library_runs(machine, c, dtype);
                       if (!machine.gpu()) return attention_case(machine, c, "own", dtype, peak, report);
                       // Without a library a quick run compares our kernels with themselves.
                       Differences d;
                       if (library || args.quick) d = compare_attention(machine, c, dtype);
                       if (library) attention_case(machine, c, "library", dtype, peak, report, d.rows);
                       const OwnKernels own(*machine.exec().libraries);
                       attention_case(machine, c, "own", dtype, peak, report, library ? JsonValue() : d.rows);
                       if (!d.wrong.empty())
                         fail(Exit::internal, "library and own kernels differ by more than {} in {}",
                              ops::attention_difference_limit, d.wrong);
                     });
}

}  // namespace nrl::bench
