// nrl-train bench attention: forward and backward, relative to peak FLOP/s.

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "apps/bench/rates.h"
#include "core/base/log.h"
#include "core/ops/attention_difference.h"
#include "core/ops/attention_engine.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

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
  const double forward =
      machine.seconds([&](int i) { ops::attention_forward(e, sets[i % count].forward); }, count);
  const double backward =
      machine.seconds([&](int i) { ops::attention_backward(e, sets[i % count].backward); }, count);
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
        return static_cast<double>(values[at]);
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

/// True when a library runs both passes of a case.
bool library_runs(Machine& machine, const AttentionCase& c, DType dtype) {
  ops::Exec& e = machine.exec();
  if (!e.libraries || !e.libraries->attention) return false;
  need_attention_workspace(machine, c);
  Tensors memory(machine);
  const AttentionSet set = attention_set(memory, c, dtype);
  const auto chosen = [&](const ops::attention::Problem& p) {
    const auto choice = ops::attention::choose(*e.libraries, p, e.workspace.size);
    log::info("{:<12} {}: {}", c.name, describe(choice, p).pass, describe(choice, p).implementation);
    return choice.engine != nullptr;
  };
  const bool forward = chosen(ops::attention::problem_of(set.forward));
  return chosen(ops::attention::problem_of(set.backward)) && forward;
}

}  // namespace

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
