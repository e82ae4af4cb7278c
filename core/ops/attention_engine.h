#pragma once
// A library of fused attention for the problems that it supports; our own kernels run the others. choose()
// decides: first unsupported_reason(), rules that need no library, then Engine::no_plan_reason(), what the
// library says of the graph and the workspace.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/ops/attention.h"
#include "core/ops/libraries.h"

namespace nrl::ops::attention {

enum class Direction : uint8_t { forward, backward };

/// Steps of a (rows, heads, D) tensor between rows and between heads, in elements.
struct HeadSteps {
  int64_t row = 0, head = 0;
  auto operator<=>(const HeadSteps&) const = default;
};

/// Everything that a library's plan depends on; nothing in it is read from device memory.
struct Problem {
  Direction direction = Direction::forward;
  DType dtype = DType::bf16;      ///< of q, k and v; e4m3: dout is e5m2
  DType result = DType::bf16;     ///< of out and the gradients
  int64_t queries = 0, keys = 0;  ///< rows of all sequences together
  /// Of equal lengths: those with queries and keys. Else room in cu_q and cu_k.
  int64_t sequences = 0;
  bool equal = false;  ///< all sequences have as many queries, and as many keys, as the first
  bool self = true;    ///< every sequence has as many queries as keys
  /// Of equal lengths: where they are. Else `rows` is the length of the longest.
  RowBlocks query, key;
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

/// Why no library of fused attention runs this problem; empty when one may.
std::string unsupported_reason(const Problem& p);

/// Why cuDNN 9.19 must not run this problem on a device with this major number of its compute capability,
/// though it has a plan: for a dry run without the library. Empty when it may.
std::string assumed_defect_reason(const Problem& p, int major);

class Engine {
 public:
  virtual ~Engine() = default;
  /// "cuDNN 9.19.0, deterministic": for messages.
  virtual std::string name() const = 0;
  /// Why the engine has no plan for the problem with `workspace` bytes of scratch memory; empty when it has
  /// one. The first call for a problem builds its plan (about a second, on the host), which must happen
  /// before a graph capture.
  virtual const std::string& no_plan_reason(const Problem& p, size_t workspace) = 0;
  /// As the ops of the same name (attention.h), on exec.stream in exec.workspace, for problems that have a
  /// plan. Fails with Exit::internal and the library's text.
  virtual void forward(Exec& exec, const AttentionForward& a) = 0;
  virtual void backward(Exec& exec, const AttentionBackward& a) = 0;
  /// Why calls for this problem, which has a plan, cannot be captured in a CUDA graph; empty when they can.
  virtual std::string not_capturable_reason(const Problem&) const { return {}; }
};

struct Choice {
  Engine* engine = nullptr;  ///< null: our own kernels
  std::string reason;        ///< why not the library
};
Choice choose(const Libraries& libraries, const Problem& p, size_t workspace);
/// For note_choice(): "cuDNN 9.19.0" or "our own kernels (f32 tensors)", for the pass "forward" or, where
/// keys and queries have different rows (context parallelism, generation), "forward to other keys".
LibraryChoice describe(const Choice& choice, const Problem& p);
/// For the dry run of a step: plans one of its problems now, and notes which implementation runs it.
void foresee(const Exec& exec, const Problem& p);

struct CudnnOptions {
  /// Gradients have the same bits in every run. On Hopper cuDNN then needs a matrix of queries x keys (2
  /// bytes each) in the workspace: long sequences do not fit and run on our own kernels. Otherwise the
  /// gradient of q is summed with atomic additions, in an order that changes from run to run.
  bool deterministic = false;
};

/// cuDNN on `runtime`, which must outlive it. Null with the reason in `why_none` where cuDNN cannot be
/// loaded or does not support the device.
std::unique_ptr<Engine> open_cudnn(device::Runtime& runtime, const CudnnOptions& options,
                                   std::string& why_none);

}  // namespace nrl::ops::attention
