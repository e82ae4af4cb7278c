#include "core/ops/activation.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

constexpr std::pair<Activation, const char*> kinds[] = {{Activation::none, "none"},
                                                        {Activation::silu, "silu"},
                                                        {Activation::gelu_tanh, "gelu_tanh"},
                                                        {Activation::gelu_erf, "gelu_erf"}};

struct Problem {
  Buffer x, out, dout, dx;
};

GradProblem gradient(DType t, Activation kind, bool gated) {
  auto p = std::make_shared<Problem>();
  p->x = Buffer(t, {3, gated ? 14 : 7}).normal("x", 2.0);
  p->out = p->dx = Buffer(t, {3, 7});
  p->dx = Buffer(t, {3, gated ? 14 : 7});
  p->dout = Buffer(t, {3, 7}).normal("dout");
  GradProblem g;
  g.inputs = {&p->x};
  g.gradients = {&p->dx};
  g.loss = [=](Exec& e) {
    e.kernels->activation_forward(e, {.kind = kind, .gated = gated, .x = p->x, .out = p->out});
    return dot(p->out, p->dout);
  };
  g.backward = [=](Exec& e) {
    e.kernels->activation_backward(e,
                                   {.kind = kind, .gated = gated, .dout = p->dout, .x = p->x, .dx = p->dx});
  };
  return g;
}

/// The activation that the backward pass writes has the bits of the forward pass, and the gradient does not
/// depend on whether it is written.
void backward_repeats_forward(Exec& e) {
  for (const auto& [kind, name] : kinds)
    for (const bool gated : {false, true})
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const int64_t f : {67, 4096}) {
          constexpr int64_t n = 9;
          const Buffer x = Buffer(dtype, {n, gated ? 2 * f : f}).normal("x", 4.0),
                       dout = Buffer(dtype, {n, f}).normal("dout");
          Buffer want(dtype, {n, f}), out(dtype, {n, f}), dx = x, want_dx = x;
          activation_forward(e, {.kind = kind, .gated = gated, .x = x, .out = want});
          activation_backward(e, {.kind = kind, .gated = gated, .dout = dout, .x = x, .dx = want_dx});
          activation_backward(e, {.kind = kind, .gated = gated, .dout = dout, .x = x, .dx = dx, .out = out});
          synchronize(e);
          const std::string what =
              fmt::format("{}{} {} ({})", name, gated ? " gated" : "", name_of(dtype), f);
          expect(same_bits(out, want), what + ": the backward pass writes another activation");
          expect(same_bits(dx, want_dx), what + ": the gradient depends on it");
        }
}

/// out may be over dout, not over what else the kernel reads or writes.
void overlapping_outputs(Exec& e) {
  const Buffer dout(DType::f32, {2, 8});
  Buffer x(DType::f32, {2, 16}), dx(DType::f32, {2, 16});
  const auto refused = [&](const Tensor& out) {
    try {
      activation_backward(
          e, {.kind = Activation::silu, .gated = true, .dout = dout, .x = x, .dx = dx, .out = out});
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  expect(refused(x.tensor().columns(0, 8)) && refused(dx.tensor().columns(8, 8)), "out over x or dx");
  expect(!refused(dout.tensor()), "out over dout is refused");
}

}  // namespace

NRL_OP_CASES(activation) {
  registry.properties.push_back({"activation.backward_repeats_forward", backward_repeats_forward});
  registry.properties.push_back({"activation.overlapping_outputs", overlapping_outputs});
  for (const auto& [kind_value, kind_name] : kinds) {
    const Activation kind = kind_value;
    for (bool gated : {false, true}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        struct Shape {
          int64_t n, f, x_gap = 3, gap = 1;
        };
        for (auto [n, f, x_gap, gap] :
             {Shape{1, 1}, {7, 31}, {3, 64}, {61, 257}, {1, 20001}, {9, 88, 8, 16}, {2, 8192, 0, 0}}) {
          const int64_t width = gated ? 2 * f : f;
          const std::string name = fmt::format("activation.{}{}.{} ({}, {}) gaps {} {}", kind_name,
                                               gated ? ".gated" : "", name_of(dtype), n, f, x_gap, gap);
          registry.tests.push_back({name + " forward",
                                    [=](Exec& e) -> Outputs {
                                      const Buffer x = Buffer(dtype, {n, width}, x_gap).normal("x", 4.0);
                                      Buffer out(dtype, {n, f}, gap);
                                      activation_forward(e,
                                                         {.kind = kind, .gated = gated, .x = x, .out = out});
                                      return {{"out", out, 2}};
                                    },
                                    true});
          for (bool alias : {false, true})
            registry.tests.push_back(
                {name + (alias ? " backward with out in place" : " backward with out"),
                 [=](Exec& e) -> Outputs {
                   Buffer x = Buffer(dtype, {n, width}, x_gap).normal("x", 4.0);
                   Buffer dout = Buffer(dtype, {n, f}, gap).normal("dout");
                   Buffer dx = alias ? Buffer(dtype, {1, 1}) : Buffer(dtype, {n, width}, 2 * gap);
                   Buffer out = alias ? Buffer(dtype, {1, 1}) : Buffer(dtype, {n, f}, gap);
                   activation_backward(e, {.kind = kind,
                                           .gated = gated,
                                           .dout = dout,
                                           .x = x,
                                           .dx = alias ? x : dx,
                                           .out = alias ? dout : out});
                   return {{"dx", alias ? x : dx, 16}, {"out", alias ? dout : out, 2}};
                 },
                 true});
          for (bool alias : {false, true}) {
            registry.tests.push_back(
                {name + (alias ? " backward in place" : " backward"),
                 [=](Exec& e) -> Outputs {
                   Buffer x = Buffer(dtype, {n, width}, x_gap).normal("x", 4.0);
                   const Buffer dout = Buffer(dtype, {n, f}).normal("dout");
                   Buffer dx = alias ? Buffer(dtype, {1, 1}) : Buffer(dtype, {n, width}, 2 * gap);
                   Exec few = few_blocks(e);
                   activation_backward(
                       few, {.kind = kind, .gated = gated, .dout = dout, .x = x, .dx = alias ? x : dx});
                   return {{"dx", alias ? x : dx, 16}};
                 },
                 true});
          }
        }
      }
      registry.grads.push_back({fmt::format("activation.{}{}", kind_name, gated ? ".gated" : ""),
                                [=](DType t) { return gradient(t, kind, gated); }});
    }
  }
}

}  // namespace nrl::ops_test
