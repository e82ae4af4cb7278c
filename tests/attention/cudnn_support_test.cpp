// Asks cuDNN, without a GPU, whether an H200 has plans for every attention problem that it would run, and
// none for those that unsupported_reason() names. The graphs are the engine's own. Compiled with each version
// of cuDNN's C++ headers that is there: later ones refuse more.

#include <bit>

#include "core/ops/attention/cudnn/support.h"
#include "core/ops/libraries.h"
#include "tests/attention/h200.h"
#include "tests/attention/problem.h"
#include "tests/catch.h"
#include "tests/sim/sim.h"

namespace nrl::ops::attention {
namespace {

struct Heads {
  int64_t heads, kv_heads;
};
struct Lengths {
  int64_t sequences, longest;
  bool equal;
  int64_t tokens() const { return equal ? sequences * longest : sequences * longest * 3 / 4; }
};

Problem make(Direction direction, const Lengths& l, const Heads& h, int64_t d, bool causal, int64_t window,
             Columns columns = Columns::qkv) {
  return training_problem(direction, l.tokens(), l.sequences, {l.longest, l.equal}, h.heads, h.kv_heads, d,
                          causal, window, columns);
}

std::string text_of(const Problem& p) {
  return fmt::format("{} {} {}x{}{} heads {}/{} D{}{}{}", name_of(p.dtype),
                     p.direction == Direction::forward ? "forward" : "backward", p.sequences, p.query.rows,
                     p.equal ? "" : " ragged", p.heads, p.kv_heads, p.d, p.causal ? " causal" : " full",
                     p.window > 0 ? fmt::format(" window {}", p.window) : "");
}

size_t usual_workspace(const Problem& p) {
  return attention_gpu_workspace(p.queries, p.heads, p.kv_heads, p.d, p.dtype == DType::e4m3);
}

CudnnSupport ask(const Problem& p, size_t workspace, bool deterministic = false) {
  return cudnn_support(p, {deterministic}, workspace, h200_json, h200_capability);
}

/// Of the matrix of queries x keys, padded to tiles, that deterministic gradients need on Hopper.
int64_t plan_matrix_bytes(const Problem& p) {
  const auto up = [](int64_t n) { return (n + 255) / 256 * 256; };
  const int64_t sequences = p.equal ? p.sequences
                                    : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.sequences))),
                longest = p.equal ? p.query.rows
                                  : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.query.rows)));
  return 2 * sequences * p.heads * up(longest) * up(longest);
}

struct Mask {
  bool causal;
  int64_t window;
};

constexpr Direction directions[] = {Direction::forward, Direction::backward};

/// cuDNN must have a plan for `p`.
void check_plan(const Problem& p, size_t workspace, bool deterministic = false) {
  REQUIRE(unsupported_reason(p).empty());
  const CudnnSupport s = ask(p, workspace, deterministic);
  INFO(text_of(p) << (deterministic ? " deterministic: " : ": ") << s.reason << "; " << s.plans << " plans, "
                  << s.own_bytes << " of " << workspace << " bytes");
  CHECK(s.reason.empty());
  CHECK(s.plans > 0);
}
void check_plan(const Problem& p) {
  check_plan(p, usual_workspace(p));
}

TEST_CASE("cuDNN has a plan for every attention that it gets, within the usual workspace") {
  for (const Direction direction : directions)
    for (const Lengths& lengths : {Lengths{2, 4096, true},
                                   {8, 1024, true},
                                   {3, 100, true},
                                   {1, 2, true},
                                   Lengths{4, 4096, false},
                                   {37, 300, false}})
      for (const Heads& heads : {Heads{32, 32}, {32, 8}, {8, 1}})
        for (const int64_t d : {64, 80, 96, 128, 192, 256})
          for (const Mask& mask : {Mask{true, 0}, {false, 0}, {true, 512}})
            check_plan(make(direction, lengths, heads, d, mask.causal, mask.window));
}

/// Of what a rank gives a context-parallel call: scratch memory for the rows of the call with the most.
size_t context_workspace(const Problem& p) {
  return attention_gpu_workspace(std::max(p.queries, p.keys), p.heads, p.kv_heads, p.d);
}

TEST_CASE("cuDNN has a plan for the keys of other ranks of a ring") {
  for (const Direction direction : directions)
    for (const int64_t samples : {1, 3})
      for (const int64_t chunk : {64, 100, 128, 16384})
        for (const bool earlier : {true, false})
          for (const Heads& heads : {Heads{32, 8}, {8, 1}})
            for (const int64_t d : {64, 80, 128, 256}) {
              Problem p = ring_problem(direction, samples, chunk, earlier, heads.heads, heads.kv_heads, d);
              p.dtype = p.result = d == 80 ? DType::f16 : DType::bf16;
              check_plan(p, context_workspace(p));
            }
}

TEST_CASE("cuDNN has a plan for chunks of queries with the gathered keys before them") {
  for (const Direction direction : directions)
    for (const int64_t chunk : {64, 100, 2048})
      for (const int64_t before : {1, 15})
        for (const Heads& heads : {Heads{32, 8}, {8, 1}})
          for (const int64_t d : {64, 80, 128, 256}) {
            const Problem p =
                gather_problem(direction, chunk, before * chunk, heads.heads, heads.kv_heads, d);
            check_plan(p, context_workspace(p));
            for (const int64_t window : {int64_t{17}, 2 * chunk + 1}) {
              const int64_t seen = std::min(window - 1, before * chunk);
              const Problem w =
                  gather_problem(direction, chunk, seen, heads.heads, heads.kv_heads, d, window);
              check_plan(w, context_workspace(w));
            }
          }
}

TEST_CASE("Deterministic gradients of other ranks' keys need a matrix of queries x keys") {
  for (const bool earlier : {true, false}) {
    const Problem p = ring_problem(Direction::backward, 1, 2048, earlier, 32, 8, 128);
    CHECK_FALSE(ask(p, context_workspace(p), true).reason.empty());
    CHECK(ask(p, context_workspace(p) + (size_t{2} * 32 * 2048 * 4096), true).reason.empty());
  }
}

TEST_CASE("cuDNN has a plan for the models that are trained") {
  struct Model {
    Heads heads;
    int64_t d, window;
    Columns columns;
  };
  // GPT-2 124M and XL, Llama 17M, 1B and 8B, Qwen2 0.5B, Qwen3 0.6B, Mistral 7B
  const Model models[] = {{{12, 12}, 64, 0, Columns::qkv},      {{25, 25}, 64, 0, Columns::qkv},
                          {{6, 6}, 64, 0, Columns::qkv},        {{32, 8}, 64, 0, Columns::qkv},
                          {{32, 8}, 128, 0, Columns::qkv},      {{14, 2}, 64, 0, Columns::qkv},
                          {{16, 8}, 128, 0, Columns::qk_and_v}, {{32, 8}, 128, 4096, Columns::qkv}};
  for (const Direction direction : directions)
    for (const Model& m : models)
      for (const Lengths& lengths : {Lengths{16, 512, true},
                                     {4, 2048, true},
                                     {1, 8192, true},
                                     {5, 1000, true},
                                     {8, 2048, false},
                                     {64, 777, false}}) {
        Problem p = make(direction, lengths, m.heads, m.d, true, m.window, m.columns);
        const auto matrix = static_cast<size_t>(plan_matrix_bytes(p));
        for (const DType dtype : {DType::bf16, DType::f16}) {
          p.dtype = dtype;
          check_plan(p);
          if (direction == Direction::backward) check_plan(p, usual_workspace(p) + matrix, true);
          if (direction == Direction::backward) continue;
          Problem evaluation = p;
          evaluation.lse_row = 0;
          check_plan(evaluation);
        }
      }
}

TEST_CASE("cuDNN has the plans for float16 that it has for bfloat16") {
  for (const Direction direction : directions)
    for (const Lengths& lengths : {Lengths{2, 4096, true}, {3, 100, true}, {37, 300, false}})
      for (const int64_t d : {64, 80, 128, 256})
        for (const Mask& mask : {Mask{true, 0}, {false, 0}, {true, 512}}) {
          Problem p = make(direction, lengths, {32, 8}, d, mask.causal, mask.window);
          p.dtype = DType::f16;
          check_plan(p);
          Problem bf16 = p;
          bf16.dtype = DType::bf16;
          CHECK(ask(p, usual_workspace(p)).plans == ask(bf16, usual_workspace(bf16)).plans);
        }
}

/// With operands in FP8 as the model has them: q, k, v and dout are matrices of their own.
Problem in_fp8(Problem p) {
  p.dtype = DType::e4m3;
  p.q = {p.heads * p.d, p.d};
  p.k = p.v = {p.kv_heads * p.d, p.d};
  return p;
}
CudnnSupport ask_b200(const Problem& p, bool deterministic = false) {
  return cudnn_support(p, {deterministic}, usual_workspace(p), b200_json, b200_capability);
}

TEST_CASE("cuDNN has a plan on Blackwell for every FP8 attention that it gets") {
  for (const Direction direction : directions)
    for (const Lengths& lengths : {Lengths{2, 4096, true},
                                   {8, 1024, true},
                                   {1, 2048, true},
                                   {1, 8192, true},
                                   {3, 100, true},
                                   {5, 1000, true}})
      for (const Heads& heads : {Heads{32, 32}, {32, 8}, {8, 1}, {14, 2}})
        for (const int64_t d : {16, 64, 80, 128})
          for (const Mask& mask : {Mask{true, 0}, {true, 512}}) {
            const Problem p = in_fp8(make(direction, lengths, heads, d, mask.causal, mask.window));
            REQUIRE(unsupported_reason(p).empty());
            for (const bool deterministic : {false, true}) {
              const CudnnSupport s = ask_b200(p, deterministic);
              INFO(text_of(p) << ": " << s.reason << "; " << s.own_bytes << " of " << usual_workspace(p));
              CHECK(s.reason.empty());
              CHECK(s.plans > 0);
            }
            Problem evaluation = p;
            evaluation.lse_row = 0;
            if (direction == Direction::forward) CHECK(ask_b200(evaluation).reason.empty());
          }
}

TEST_CASE("FP8 attention is refused where cuDNN has no plan for it") {
  const Lengths lengths{2, 1024, true};
  for (const Direction direction : directions) {
    const Problem p = in_fp8(make(direction, lengths, {8, 2}, 128, true, 0));
    CHECK(fp8_attention_refusal(10, DType::bf16, 128).empty());
    CHECK(ask_b200(p).reason.empty());
    CHECK_FALSE(fp8_attention_refusal(9, DType::bf16, 128).empty());
    CHECK_FALSE(ask(p, usual_workspace(p)).reason.empty());
    for (const int64_t d : {8, 72, 144, 256}) {
      const Problem other = in_fp8(make(direction, lengths, {8, 2}, d, true, 0));
      CAPTURE(d);
      CHECK_FALSE(unsupported_reason(other).empty());
      CHECK_FALSE(ask_b200(other).reason.empty());
    }
    Problem wide = p;
    wide.result = DType::f32;
    CHECK_FALSE(unsupported_reason(wide).empty());
    Problem dropped = p;
    dropped.dropout = true;
    CHECK_FALSE(unsupported_reason(dropped).empty());
    CHECK_FALSE(unsupported_reason(in_fp8(make(direction, {2, 1024, false}, {8, 2}, 128, true, 0))).empty());
  }
}

TEST_CASE("cuDNN has a plan whatever the window, the length and the number of heads") {
  for (const Direction direction : directions) {
    for (const int64_t window : {1, 2, 100, 511, 512, 513, 4000})
      for (const bool equal : {true, false})
        check_plan(make(direction, {2, 512, equal}, {8, 2}, 64, true, window));
    for (const int64_t length : {2, 3, 17, 63, 64, 65, 127, 128, 129, 1000, 1023})
      for (const int64_t sequences : {1, 2, 3})
        check_plan(make(direction, {sequences, length, true}, {4, 2}, 64, true, 0));
    for (const Heads& heads :
         {Heads{1, 1}, {2, 1}, {3, 3}, {5, 1}, {7, 7}, {9, 3}, {24, 4}, {64, 8}, {128, 16}})
      for (const bool equal : {true, false}) check_plan(make(direction, {4, 256, equal}, heads, 64, true, 0));
  }
}

TEST_CASE("cuDNN takes head dimensions that are multiples of 8 and no others") {
  for (const Direction direction : {Direction::forward, Direction::backward})
    for (int64_t d = 4; d <= 264; d += 4) {
      const Problem p = make(direction, {2, 512, true}, {4, 2}, d, true, 0);
      const bool ours = !unsupported_reason(p).empty();
      const CudnnSupport s = ask(p, size_t{1} << 32);
      INFO(text_of(p) << ": " << unsupported_reason(p) << "; cuDNN: " << s.reason);
      if (ours && direction == Direction::forward && d % 8 == 0) continue;  // no use without backward
      CHECK(ours == !s.reason.empty());
    }
}

TEST_CASE("Deterministic gradients need a matrix of queries x keys, which long sequences have no room for") {
  const Problem shorter = make(Direction::backward, {2, 64, true}, {4, 2}, 64, true, 0),
                longer = make(Direction::backward, {2, 4096, true}, {32, 8}, 128, true, 0);
  CHECK(ask(shorter, usual_workspace(shorter), true).reason.empty());
  CHECK_FALSE(ask(longer, usual_workspace(longer), true).reason.empty());
  const size_t matrix = size_t{2} * 32 * 4096 * 4096 * 2;
  CHECK(ask(longer, usual_workspace(longer) + matrix, true).reason.empty());
}

TEST_CASE("Too little workspace is a reason") {
  const Problem p = make(Direction::backward, {2, 1024, true}, {8, 8}, 128, true, 0);
  const std::string reason = ask(p, 1 << 20).reason;
  CHECK(reason.find("workspace") != std::string::npos);
}

TEST_CASE("cuDNN opens, or says why it does not") {
  const auto device = device::open_sim();
  std::string why;
  const auto engine = open_cudnn(*device, {}, why);
  INFO(why);
  CHECK((engine == nullptr) != why.empty());
  if (!engine) CHECK(why.find("cudnnCreate") != std::string::npos);  // the library is there, a GPU is not
}

}  // namespace
}  // namespace nrl::ops::attention
