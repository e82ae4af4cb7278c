// nrl-train bench gemm: linear layers, relative to peak FLOP/s.

#include <algorithm>
#include <utility>

#include "apps/bench/rates.h"
#include "core/base/log.h"
#include "core/ops/activation.h"
#include "core/ops/grouped_linear.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

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
    const double t = machine_.seconds([&](int i) { call(sets_[i % count_]); }, count_);
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
    const double t = machine.seconds([&](int i) { call(sets[i % count]); }, count);
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

}  // namespace nrl::bench
