// Which attention problems a library runs, and the text that says so.

#include "core/ops/attention_engine.h"

namespace nrl::ops::attention {
namespace {

constexpr int64_t vector_bytes = 16;
constexpr int64_t largest_d = 256;  ///< on Hopper, limited by the backward pass; training needs both
constexpr int64_t d_multiple = 8;
constexpr int64_t largest_fp8_d = 128, fp8_d_multiple = 16;

HeadSteps steps_of(const Tensor& t) {
  return {t.stride[0], t.stride[1]};
}

bool aligned(const Tensor& t) {
  const int64_t unit = vector_bytes / size_of(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % vector_bytes == 0 && t.stride[0] % unit == 0 &&
         t.stride[1] % unit == 0;
}

template <class Attention>
Problem common(Direction direction, const Attention& a) {
  Problem p;
  p.direction = direction;
  p.dtype = a.q.dtype;
  p.result = a.out.dtype;
  p.queries = a.q.dim(0);
  p.keys = a.k.dim(0);
  const SequenceLengths& known = a.lengths;
  p.sequences = known.blocks > 0 ? known.blocks : a.cu_q.dim(0) - 1;
  p.equal = known.equal || known.blocks > 0;
  p.self = known.equal || (known.blocks == 0 && a.cu_q.data == a.cu_k.data);
  p.query = p.key = {.rows = known.longest, .step = known.equal ? known.longest : 0};
  if (known.blocks > 0) p.query = known.queries, p.key = known.keys;
  p.heads = a.q.dim(1);
  p.kv_heads = a.k.dim(1);
  p.d = a.q.dim(2);
  p.causal = a.causal;
  p.window = a.window;
  p.dropout = a.dropout.p > 0;
  p.scale = a.scale;
  p.q = steps_of(a.q);
  p.k = steps_of(a.k);
  p.v = steps_of(a.v);
  p.out = steps_of(a.out);
  p.lse_row = a.lse ? a.lse.stride[0] : 0;
  p.aligned = aligned(a.q) && aligned(a.k) && aligned(a.v) && aligned(a.out);
  return p;
}

const char* name_of(Direction d) {
  return d == Direction::forward ? "forward" : "backward";
}

}  // namespace

Problem problem_of(const AttentionForward& a) {
  return common(Direction::forward, a);
}

Problem problem_of(const AttentionBackward& a) {
  Problem p = common(Direction::backward, a);
  p.dout = steps_of(a.dout);
  p.dq = steps_of(a.dq);
  p.dk = steps_of(a.dk);
  p.dv = steps_of(a.dv);
  p.aligned = p.aligned && aligned(a.dout) && aligned(a.dq) && aligned(a.dk) && aligned(a.dv);
  return p;
}

std::string unsupported_reason(const Problem& p) {
  const bool fp8 = p.dtype == DType::e4m3;
  if (fp8) {
    if (std::string reason = fp8_attention_refusal(fp8_attention_major, p.result, p.d); !reason.empty())
      return reason;
    if (!p.equal) return "FP8 operands of sequences of different lengths";
    if (!p.self) return "FP8 operands with other keys than queries";
  } else if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return fmt::format("{} tensors", nrl::name_of(p.dtype));
  }
  if (p.d % d_multiple != 0)
    return fmt::format("a head dimension of {}, not a multiple of {}", p.d, d_multiple);
  if (p.d > largest_d) return fmt::format("a head dimension of {}, more than {}", p.d, largest_d);
  if (!p.self && !p.equal) return "sequences of different lengths with other keys than queries";
  if (p.causal && p.query.rows > p.key.rows) return "queries that see no key";
  if (p.query.rows <= 1 || p.key.rows <= 1) return "sequences of one token";
  if (!p.aligned) return "rows that are not 16-byte aligned";
  // cuDNN takes one seed per call: the mask of a sample would depend on its position in the microbatch.
  if (p.dropout) return "attention dropout, whose mask must not depend on the microbatch";
  return "";
}

Choice choose(const Libraries& libraries, const Problem& p, size_t workspace) {
  Engine* const engine = libraries.attention.get();
  if (!engine) return {nullptr, libraries.why_no_attention};
  std::string reason = unsupported_reason(p);
  if (reason.empty()) reason = engine->no_plan_reason(p, workspace);
  return {reason.empty() ? engine : nullptr, reason};
}

LibraryChoice describe(const Choice& choice, const Problem& p) {
  return {"attention", p.self ? name_of(p.direction) : fmt::format("{} to other keys", name_of(p.direction)),
          choice.engine ? choice.engine->name() : fmt::format("our own kernels ({})", choice.reason)};
}

void foresee(const Exec& exec, const Problem& p) {
  if (!exec.libraries) return;
  const Choice choice = choose(*exec.libraries, p, exec.workspace.size);
  if (p.dtype == DType::e4m3 && !choice.engine)
    fail(Exit::config,
         "policy.fp8_cfg.fp8_dot_product_attention: true needs cuDNN on a GPU, which does not run the {} "
         "pass: "
         "{}. Fix: set it to false",
         name_of(p.direction), choice.reason);
  note_choice(exec, describe(choice, p));
  std::string& obstacle = exec.libraries->not_capturable;
  if (choice.engine && obstacle.empty()) obstacle = choice.engine->not_capturable_reason(p);
}

}  // namespace nrl::ops::attention

namespace nrl::ops {

std::string fp8_attention_refusal(int major, DType out, int64_t d) {
  using namespace attention;
  if (major != fp8_attention_major)
    return fmt::format(
        "it takes compute capability {}.x, where cuDNN writes results in bf16: on 9.0 it rounds them to FP8 "
        "with scales that must be known before, and on 12.0 it has no backward pass",
        fp8_attention_major);
  if (out != DType::bf16) return fmt::format("FP8 operands with results in {}, not bf16", name_of(out));
  if (d % fp8_d_multiple != 0 || d > largest_fp8_d)
    return fmt::format("FP8 operands with a head dimension of {}, not a multiple of {} up to {}", d,
                       fp8_d_multiple, largest_fp8_d);
  return "";
}

}  // namespace nrl::ops
