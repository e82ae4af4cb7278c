// Asks cuDNN, without a GPU, whether an H200 has plans for every attention problem that it would run, and
// none for those that unsupported_reason() names. The graphs are the engine's own.

#include "core/device/sim/sim.h"
#include "core/ops/attention/cudnn/support.h"
#include "tests/attention/h200.h"
#include "tests/catch.h"

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

Problem make(Direction direction, const Lengths& l, const Heads& h, int64_t d, bool causal, int64_t window) {
  return training_problem(direction, DType::bf16, l.tokens(), l.sequences, {l.longest, l.equal}, h.heads,
                          h.kv_heads, d, causal, window);
}

std::string text_of(const Problem& p) {
  return fmt::format("{} {}x{}{} heads {}/{} D{}{}{}",
                     p.direction == Direction::forward ? "forward" : "backward", p.sequences, p.longest,
                     p.equal ? "" : " ragged", p.heads, p.kv_heads, p.d, p.causal ? " causal" : " full",
                     p.window > 0 ? fmt::format(" window {}", p.window) : "");
}

size_t usual_workspace(const Problem& p) {
  return attention_gpu_workspace(p.queries, p.heads, p.kv_heads, p.d);
}

CudnnSupport ask(const Problem& p, size_t workspace, bool deterministic = false) {
  return cudnn_support(p, {deterministic}, workspace, h200_json, h200_capability);
}

struct Mask {
  bool causal;
  int64_t window;
};

/// Calls check(problem) for everything that unsupported_reason() lets through.
template <class Check>
void for_each_problem(const Check& check) {
  for (const Direction direction : {Direction::forward, Direction::backward})
    for (const Lengths& lengths : {Lengths{2, 4096, true},
                                   {8, 1024, true},
                                   {3, 100, true},
                                   {1, 2, true},
                                   Lengths{4, 4096, false},
                                   {37, 300, false}})
      for (const Heads& heads : {Heads{32, 32}, {32, 8}, {8, 1}})
        for (const int64_t d : {64, 80, 96, 128, 192, 256})
          for (const Mask& mask : {Mask{true, 0}, {false, 0}, {true, 512}})
            check(make(direction, lengths, heads, d, mask.causal, mask.window));
}

TEST_CASE("cuDNN has a plan for every attention that it gets, within the usual workspace") {
  int asked = 0;
  for_each_problem([&](const Problem& p) {
    REQUIRE(unsupported_reason(p).empty());
    const CudnnSupport s = ask(p, usual_workspace(p));
    INFO(text_of(p) << ": " << s.reason << "; " << s.plans << " plans, " << s.own_bytes << " of "
                    << usual_workspace(p) << " bytes");
    CHECK(s.reason.empty());
    CHECK(s.plans > 0);
    ++asked;
  });
  CHECK(asked > 300);
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
