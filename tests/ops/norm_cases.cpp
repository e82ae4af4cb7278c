#include <cmath>

#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Shape {
  std::vector<int64_t> x;
  int64_t gap = 0;
  int64_t rows() const {
    int64_t n = 1;
    for (size_t i = 0; i + 1 < x.size(); ++i) n *= x[i];
    return n;
  }
};

struct Options {
  NormKind kind;
  DType dtype, weight;
  bool extra;  ///< residual, dresidual, bias; of RMS norms an offset of the weight
  float weight_offset() const { return extra && kind == NormKind::rms ? 0.75f : 0.0f; }
};

Outputs forward(Exec& e, const Shape& s, const Options& o) {
  const int64_t d = s.x.back();
  const Buffer x = Buffer(o.dtype, s.x, s.gap).normal("x", 2.0, 0.5),
               residual = Buffer(o.dtype, s.x).normal("residual");
  const Buffer weight = Buffer(o.weight, {d}).normal("weight", 0.3, 1.0),
               bias = Buffer(o.weight, {d}).normal("bias");
  Buffer sum(o.dtype, s.x, s.gap), out(o.dtype, s.x, s.gap), mean(DType::f32, {s.rows()}),
      rstd(DType::f32, {s.rows()});
  NormForward a{
      .kind = o.kind, .x = x, .weight = weight, .weight_offset = o.weight_offset(), .out = out, .rstd = rstd};
  if (o.extra) {
    a.residual = residual;
    a.sum = sum;
  }
  if (o.kind == NormKind::layer) {
    a.mean = mean;
    if (o.extra) a.bias = bias;
  }
  norm_forward(e, a);
  return {{"out", out, d}, {"sum", sum}, {"mean", mean, d}, {"rstd", rstd, d}};
}

Outputs backward(Exec& e, const Shape& s, const Options& o, bool weights, bool alias) {
  const int64_t d = s.x.back();
  const bool layer = o.kind == NormKind::layer;
  const Buffer x = Buffer(o.dtype, s.x, s.gap).normal("x"),
               weight = Buffer(o.weight, {d}).normal("weight", 0.3, 1.0);
  Buffer dout = Buffer(o.dtype, s.x, s.gap).normal("dout"), dx(o.dtype, s.x, s.gap);
  const Buffer dresidual = Buffer(o.dtype, s.x, s.gap).normal("dresidual");
  const Buffer mean = Buffer(DType::f32, {s.rows()}).normal("mean", 0.1);
  const Buffer rstd = Buffer(DType::f32, {s.rows()}).normal("rstd", 0.1, 1.0);
  Buffer dweight = Buffer(DType::f32, {d}).normal("dweight"), dbias = Buffer(DType::f32, {d}).normal("dbias");
  NormBackward a{.kind = o.kind,
                 .dout = dout,
                 .x = x,
                 .weight = weight,
                 .weight_offset = o.weight_offset(),
                 .rstd = rstd,
                 .dx = alias ? dout : dx};
  Buffer amax = Buffer(DType::f32, {1}).fill(0.25);
  if (o.extra) a.dresidual = dresidual, a.amax = amax;
  if (layer) a.mean = mean;
  if (weights) a.dweight = dweight;
  if (weights && layer) a.dbias = dbias;
  norm_backward(e, a);
  synchronize(e);
  const Buffer& written = alias ? dout : dx;
  double largest = 0.25;
  for (int64_t i = 0; i < written.size(); ++i) largest = std::max(largest, std::fabs(written.get(i)));
  expect(amax.get(0) == (o.extra ? largest : 0.25), "largest magnitude of dx");
  return {{"dx", written, d}, {"dweight", dweight, s.rows()}, {"dbias", dbias, s.rows()}};
}

/// Dropout of x on the way into the sum; max |out| beside it. `sum` lies in x or in residual, or is its own.
enum class Sum : uint8_t { own, x, residual };

Outputs dropped(Exec& e, const Shape& s, const Options& o, float p, bool with_step, Sum where) {
  const int64_t d = s.x.back();
  Buffer x = Buffer(o.dtype, s.x, s.gap).normal("x", 2.0, 0.5),
         residual = Buffer(o.dtype, s.x, s.gap).normal("residual"), own(o.dtype, s.x, s.gap),
         out(o.dtype, s.x, s.gap);
  const Buffer weight = Buffer(o.weight, {d}).normal("weight", 0.3, 1.0);
  const Buffer step = Buffer(DType::i64, {1}).fill(77);
  Buffer amax = Buffer(DType::f32, {1}).fill(0.25), rstd(DType::f32, {s.rows()});
  Buffer& sum = where == Sum::own ? own : where == Sum::x ? x : residual;
  NormForward a{.kind = o.kind,
                .x = x,
                .residual = residual,
                .sum = sum,
                .weight = weight,
                .out = out,
                .rstd = rstd,
                .amax = amax};
  a.dropout = {.p = p, .seed = 11, .stream = 0x1234, .first_row = (int64_t{1} << 33) + 5};
  if (with_step) a.dropout.step = step;
  norm_forward(e, a);
  return {{"out", out, d}, {"sum", sum}, {"rstd", rstd, d}, {"amax", amax, d}};
}

/// The mask is that of ops::dropout.
void same_mask(Exec& e) {
  const int64_t n = 5, d = 64;
  const Buffer x = Buffer(DType::f32, {n, d}).fill(1.0), zero(DType::f32, {n, d}),
               weight = Buffer(DType::f32, {d}).fill(1.0), step = Buffer(DType::i64, {1}).fill(3);
  Buffer mask(DType::f32, {n, d}), sum(DType::f32, {n, d}), out(DType::f32, {n, d});
  dropout(e, {.x = x, .out = mask, .p = 0.4f, .seed = 5, .stream = 9, .first_row = 2, .step = step});
  NormForward a{.x = x, .residual = zero, .sum = sum, .weight = weight, .out = out};
  a.dropout = {.p = 0.4f, .seed = 5, .stream = 9, .first_row = 2, .step = step};
  norm_forward(e, a);
  expect(same_bits(mask, sum), "the fused mask is another one");
}

/// The larger stays, and a NaN is not lost.
void largest_output(Exec& e) {
  const int64_t n = 4, d = 16;
  Buffer x = Buffer(DType::bf16, {n, d}).normal("x"), out(DType::bf16, {n, d});
  const Buffer weight = Buffer(DType::bf16, {d}).fill(1.0);
  Buffer amax = Buffer(DType::f32, {1}).fill(100.0);
  norm_forward(e, {.x = x, .weight = weight, .out = out, .amax = amax});
  expect(amax.get(0) == 100.0, "a larger value is overwritten");
  amax.fill(0);
  norm_forward(e, {.x = x, .weight = weight, .out = out, .amax = amax});
  double peak = 0;
  for (int64_t i = 0; i < out.size(); ++i) peak = std::max(peak, std::fabs(out.get(i)));
  expect(amax.get(0) == peak, fmt::format("the largest output is {}, not {}", peak, amax.get(0)));
  x.set(17, NAN);
  norm_forward(e, {.x = x, .weight = weight, .out = out, .amax = amax});
  expect(std::isnan(amax.get(0)), "a NaN is lost");
  const Buffer rstd = Buffer(DType::f32, {n}).fill(1.0);
  norm_backward(e, {.dout = out, .x = x, .weight = weight, .rstd = rstd, .dx = out, .amax = amax.fill(0)});
  synchronize(e);
  expect(std::isnan(amax.get(0)), "a NaN of the gradient is lost");
}

/// Without its output a norm gives the same sums, statistics and largest magnitude.
void not_stored(Exec& e) {
  for (const NormKind kind : {NormKind::rms, NormKind::layer})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t d : {int64_t{31}, int64_t{520}, int64_t{4096}, int64_t{16400}}) {
        const bool layer = kind == NormKind::layer;
        const Buffer x = Buffer(dtype, {5, d}).normal("x", 2.0, 0.5),
                     residual = Buffer(dtype, {5, d}).normal("residual"),
                     weight = Buffer(dtype, {d}).normal("weight", 0.3, 1.0),
                     bias = Buffer(dtype, {d}).normal("bias");
        std::vector<std::vector<Buffer>> results;
        for (const bool stored : {true, false})
          for (const bool measured : {true, false}) {
            Buffer sum(dtype, {5, d}), out(dtype, {5, d}), mean(DType::f32, {5}), rstd(DType::f32, {5}),
                amax(DType::f32, {1});
            norm_forward(e, {.kind = kind,
                             .x = x,
                             .residual = residual,
                             .sum = sum,
                             .weight = weight,
                             .weight_offset = layer ? 0.0f : 1.0f,
                             .bias = layer ? bias.tensor() : Tensor{},
                             .out = stored ? out.tensor() : Tensor{},
                             .mean = layer ? mean.tensor() : Tensor{},
                             .rstd = rstd,
                             .amax = measured ? amax.tensor() : Tensor{}});
            synchronize(e);
            double largest = 0;
            for (int64_t i = 0; i < out.size(); ++i) largest = std::max(largest, std::fabs(out.get(i)));
            if (stored && measured) expect(amax.get(0) == largest, "largest magnitude");
            results.push_back({sum, mean, rstd});
            if (measured) results.back().push_back(amax);
            for (size_t i = 0; i < results.back().size(); ++i)
              expect(same_bits(results.back()[i], results.front()[i]),
                     fmt::format("{} of {}{} columns, result {}", name_of(dtype), d,
                                 stored ? "" : " not stored", i));
          }
      }
}

/// Gradients of the weight have the same bits on GPUs of other sizes, and in every run.
void same_sums(Exec& e) {
  const Options o{NormKind::layer, DType::bf16, DType::bf16, true};
  const Outputs expected = backward(e, {{600, 64}}, o, true, false);
  for (const int multiprocessors : {e.multiprocessors, 1, 13}) {
    Exec other = e;
    other.multiprocessors = multiprocessors;
    const Outputs again = backward(other, {{600, 64}}, o, true, false);
    for (size_t i = 0; i < expected.size(); ++i)
      expect(same_bits(expected[i].value, again[i].value),
             fmt::format("{} differs with {} multiprocessors", expected[i].name, multiprocessors));
  }
}

/// inputs x, residual, weight, bias with the loss <out, dout> + <sum, dresidual>.
struct Problem {
  Buffer x, residual, weight, bias, dout, dresidual, sum, out, mean, rstd, dx, dweight, dbias;
};

GradProblem gradient(DType t, NormKind kind, std::vector<int64_t> shape) {
  const int64_t d = shape.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  auto p = std::make_shared<Problem>();
  p->x = Buffer(t, shape, 3).normal("x");
  p->residual = Buffer(t, shape).normal("residual");
  p->weight = Buffer(t, {d}).normal("weight", 0.5, 1.0);
  p->bias = Buffer(t, {d}).normal("bias");
  p->dout = Buffer(t, shape).normal("dout");
  p->dresidual = Buffer(t, shape).normal("dresidual");
  p->sum = p->out = p->dx = Buffer(t, shape, 5);
  p->mean = p->rstd = Buffer(t, {rows});
  p->dweight = p->dbias = Buffer(t, {d});
  const bool layer = kind == NormKind::layer;
  GradProblem g;
  g.keep = p;
  g.reduction_length = std::max(rows, d);
  g.inputs = {&p->x, &p->residual, &p->weight};
  g.gradients = {&p->dx, &p->dx, &p->dweight};
  if (layer) {
    g.inputs.push_back(&p->bias);
    g.gradients.push_back(&p->dbias);
  }
  g.loss = [p, kind, layer](Exec& e) {
    NormForward a{.kind = kind,
                  .x = p->x,
                  .residual = p->residual,
                  .sum = p->sum,
                  .weight = p->weight,
                  .weight_offset = layer ? 0.0f : 0.5f,
                  .out = p->out,
                  .rstd = p->rstd};
    if (layer) {
      a.bias = p->bias;
      a.mean = p->mean;
    }
    e.kernels->norm_forward(e, a);
    return dot(p->out, p->dout) + dot(p->sum, p->dresidual);
  };
  g.backward = [p, kind, layer](Exec& e) {
    NormBackward a{.kind = kind,
                   .dout = p->dout,
                   .x = p->sum,
                   .weight = p->weight,
                   .weight_offset = layer ? 0.0f : 0.5f,
                   .rstd = p->rstd,
                   .dresidual = p->dresidual,
                   .dx = p->dx,
                   .dweight = p->dweight};
    if (layer) {
      a.mean = p->mean;
      a.dbias = p->dbias;
    }
    e.kernels->norm_backward(e, a);
  };
  return g;
}

}  // namespace

NRL_OP_CASES(norm) {
  registry.properties.push_back({"norm.same_mask", same_mask});
  registry.properties.push_back({"norm.largest_output", largest_output});
  registry.properties.push_back({"norm.not_stored", not_stored});
  registry.properties.push_back({"norm.same_sums", same_sums});
  const std::vector<Shape> shapes = {{{1, 1}},
                                     {{3, 7}},
                                     {{5, 31}, 2},
                                     {{61, 61}},
                                     {{7, 64}, 16},
                                     {{129, 257}},
                                     {{33, 1024}, 3},
                                     {{5, 3, 64}, 77},
                                     {{31}},
                                     // Rows of whole packs: parts of a warp, a warp, several, a block; longer
                                     // than a block's registers.
                                     {{13, 8}},
                                     {{70, 3, 128}, 8},
                                     {{9, 640}},
                                     {{10, 1024}, 8},
                                     {{5, 1536}},
                                     {{7, 4096}, 16},
                                     {{3, 8192}},
                                     {{3, 8200}},
                                     {{2, 16400}}};
  for (NormKind kind : {NormKind::rms, NormKind::layer}) {
    const std::string kind_name = kind == NormKind::rms ? "rms" : "layer";
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Shape& shape : shapes) {
        for (bool extra : {false, true}) {
          const Options o{kind, dtype, extra || dtype == DType::f16 ? dtype : DType::f32, extra};
          const std::string name = fmt::format("norm.{}.{} ({}) {}", kind_name, name_of(dtype),
                                               fmt::join(shape.x, ","), extra ? "fused" : "plain");
          registry.tests.push_back({name + " forward", [=](Exec& e) { return forward(e, shape, o); }, true});
          for (bool weights : {false, true}) {
            registry.tests.push_back({name + (weights ? " backward" : " backward dx"),
                                      [=](Exec& e) { return backward(e, shape, o, weights, weights); }});
          }
        }
      }
    }
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Shape& shape :
           {Shape{{120, 8}}, {{70, 7}}, {{40, 1048}}, {{18, 9, 64}}, {{11, 4096}}, {{8, 8192}}}) {
        const Options o{kind, dtype, dtype, true};
        const std::string name =
            fmt::format("norm.{}.{} ({}) few blocks", kind_name, name_of(dtype), fmt::join(shape.x, ","));
        registry.tests.push_back({name + " forward", [=](Exec& e) {
                                    Exec few = few_blocks(e);
                                    return forward(few, shape, o);
                                  }});
        registry.tests.push_back({name + " backward", [=](Exec& e) {
                                    Exec few = few_blocks(e);
                                    return backward(few, shape, o, true, false);
                                  }});
      }
      for (const Shape& shape : {Shape{{7, 31}, 3}, {{6, 64}}, {{5, 1024}, 8}, {{2, 16400}}}) {
        for (float p : {0.0f, 0.3f}) {
          for (Sum where : {Sum::own, Sum::x, Sum::residual}) {
            const bool step = where == Sum::x;
            const std::string name =
                fmt::format("norm.{}.{} ({}) dropout {}{} sum in {}", kind_name, name_of(dtype),
                            fmt::join(shape.x, ","), p, step ? " with step" : "", static_cast<int>(where));
            registry.tests.push_back({name,
                                      [=](Exec& e) {
                                        return dropped(e, shape, {kind, dtype, dtype, true}, p, step, where);
                                      },
                                      true});
          }
        }
      }
    }
    for (std::vector<int64_t> shape : {std::vector<int64_t>{3, 17}, {2, 3, 8}}) {
      registry.grads.push_back({fmt::format("norm.{} ({})", kind_name, fmt::join(shape, ",")),
                                [=](DType t) { return gradient(t, kind, shape); }});
    }
  }
}

}  // namespace nrl::ops_test
