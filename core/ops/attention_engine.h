#pragma once
// A library of fused attention that takes the problems it supports; our own kernels do the rest. Which of
// the two does what is decided in one place: refusal() by rules that need no library, then Engine::refusal()
// by what the library itself says of the graph and by the workspace.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "core/ops/attention.h"

namespace nrl::device {
class Runtime;
}

namespace nrl::ops::attention {

enum class Direction : uint8_t { forward, backward };

/// Steps of a (rows, heads, D) tensor between rows and between heads, in elements.
struct HeadSteps {
  int64_t row = 0, head = 0;
  auto operator<=>(const HeadSteps&) const = default;
};

/// All that a plan of a library depends on, and nothing that lies in device memory.
struct Problem {
  Direction direction = Direction::forward;
  DType dtype = DType::bf16;
  int64_t queries = 0, keys = 0;  ///< rows of all sequences together
  int64_t sequences = 0;          ///< room in cu_q and cu_k
  int64_t longest = 0;            ///< SequenceLengths
  bool equal = false;             ///< SequenceLengths
  bool self = true;               ///< every sequence has as many queries as keys
  int64_t heads = 1, kv_heads = 1, d = 0;
  bool causal = true;
  int64_t window = 0;
  bool dropout = false;  ///< of probabilities
  float scale = 1.0f;
  HeadSteps q, k, v, out, dout, dq, dk, dv;  ///< zero where a direction has no such tensor
  int64_t lse_row = 0;                       ///< step between the heads of lse; 0: not wanted
  bool aligned = true;                       ///< every row of a head starts at 16 bytes
  auto operator<=>(const Problem&) const = default;
};
Problem problem_of(const AttentionForward& a);
Problem problem_of(const AttentionBackward& a);

/// What a model's training step asks for: q, k and v are columns of one buffer of rows (heads + 2 kv_heads) *
/// d, so are dq, dk and dv; out and dout are dense. `lengths.longest` must be set.
Problem training_problem(Direction direction, DType dtype, int64_t tokens, int64_t sequences,
                         const SequenceLengths& lengths, int64_t heads, int64_t kv_heads, int64_t d,
                         bool causal = true, int64_t window = 0, bool dropout = false);

/// Why a library of fused attention never gets this problem; empty when it may.
std::string refusal(const Problem& p);

class Engine {
 public:
  virtual ~Engine() = default;
  /// "cuDNN 9.19.0" with what was chosen: for messages.
  virtual std::string name() const = 0;
  /// Why the engine does not take the problem with `workspace` bytes of scratch memory; empty when it does.
  /// The first call for a problem builds its plan (a second or so, on the host), which must happen before
  /// a graph capture.
  virtual const std::string& refusal(const Problem& p, size_t workspace) = 0;
  /// As the ops of the same name (attention.h), on exec.stream in exec.workspace, for problems with an empty
  /// refusal(). Fails with Exit::internal and the library's text.
  virtual void forward(Exec& exec, const AttentionForward& a) = 0;
  virtual void backward(Exec& exec, const AttentionBackward& a) = 0;

  /// True the first time it is called with this text.
  bool say_once(const std::string& text) { return said_.insert(text).second; }

 private:
  std::set<std::string> said_;
};

/// `engine` when it is there and takes the problem; else null, with the reason in the log when it is a new
/// one.
Engine* choose(Engine* engine, const Problem& p, size_t workspace);

/// One line for the start of a run: who does the problem, and why not the library if it does not. `engine`
/// may be null; then `why_none` is the reason. choose() will not say it again.
std::string describe_choice(Engine* engine, const std::string& why_none, const Problem& p, size_t workspace);

struct CudnnOptions {
  /// Gradients have the same bits in every run. On Hopper cuDNN then keeps a matrix of queries x keys (2
  /// bytes each) in the workspace: long sequences do not fit and get our own kernels. Otherwise the gradient
  /// of q is summed with atomic additions, in an order that changes from run to run.
  bool deterministic = false;
};

/// cuDNN on `runtime`, which must outlive it. Null with the reason in `why_none` where cuDNN cannot be
/// loaded or refuses the device.
std::unique_ptr<Engine> open_cudnn(device::Runtime& runtime, const CudnnOptions& options,
                                   std::string& why_none);

}  // namespace nrl::ops::attention
