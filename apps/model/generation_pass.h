#pragma once
// Forward passes of many sequences with a paged key/value cache, and the sampling of their next tokens. Runs
// the layers of training in mode `generation`, on the weights that training uses. Which rows a pass has is
// the caller's decision.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "apps/model/program/stage.h"

namespace nrl::model {

struct GenerationLimits {
  int64_t tokens = 128;   ///< rows of a pass
  int64_t sequences = 1;  ///< sequences of a pass, and rows whose next token is sampled
  int64_t longest = 0;    ///< tokens of a sequence
  int64_t pages = 0;      ///< of the cache
  int64_t page_tokens = 16;
};

/// Bytes that a GenerationPass allocates.
struct GenerationMemory {
  int64_t pages = 0;    ///< keys and values
  int64_t buffers = 0;  ///< activations of a pass, its rows, logits and the workspace of ops
  int64_t total() const { return pages + buffers; }
};

/// The rows of a pass, in host memory: consecutive tokens of sequences, one sequence after the other.
struct GenerationRows {
  struct Sequence {
    std::span<const int32_t> tokens;  ///< of the rows, at least one
    int64_t first = 0;                ///< position of the first of them
    std::span<const int32_t> pages;   ///< of positions [0, first + tokens), at least
  };
  std::vector<Sequence> sequences;
  std::vector<int32_t> sampled;  ///< rows whose next logits are computed; may repeat
};

/// How the next token of a sampled row is chosen (ops::SampleTokens).
struct SamplingKey {
  float temperature = 1;  ///< 0: greedy
  int64_t seed = 0, sample = 0;
  int32_t position = 0;  ///< of the sampled token
};
struct SampledToken {
  int32_t token = 0;  ///< -1: the logits are not finite
  float log_prob = 0;
};

class GenerationPass {
 public:
  /// `views` are indexed like ParameterList::all (gradients unused), in the memory of exec's device; they and
  /// all references must outlive the pass, which allocates its own workspace. Activations and cache have the
  /// weights' dtype. `layout`: tensor parallelism alone; its ranks must make the same calls, and `groups` has
  /// parallel::group::tp. Fails with Exit::usage if a model with learned positions has fewer than `longest`.
  GenerationPass(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                 const ops::Exec& exec, const GenerationLimits& limits, const ModelLayout& layout = {},
                 const parallel::Groups* groups = nullptr)
      : GenerationPass(spec, parameters, std::move(views), exec, limits, layout, groups, true) {}
  ~GenerationPass();
  GenerationPass(GenerationPass&&) = delete;

  /// Bytes of a page in all layers of this rank, in this dtype.
  static int64_t page_bytes(const ModelSpec& spec, const ModelLayout& layout, int64_t page_tokens,
                            DType dtype);

  /// The memory of a pass with these arguments. `exec` may be of a dry device and `views` of no memory.
  static GenerationMemory memory(const ModelSpec& spec, const ParameterList& parameters,
                                 std::vector<ParameterView> views, const ops::Exec& exec,
                                 const GenerationLimits& limits, const ModelLayout& layout = {},
                                 const parallel::Groups* groups = nullptr);
  GenerationMemory memory() const { return memory_; }

  /// Copies a page of all layers to another one.
  void copy_page(int32_t from, int32_t to);
  /// Enqueues a forward pass: writes keys and values of the rows to their pages.
  void run(const GenerationRows& rows);
  /// The next tokens of the pass's sampled rows, a key for each. Tokens from `vocabulary` on are never
  /// sampled.
  std::vector<SampledToken> sample(std::span<const SamplingKey> keys, int64_t vocabulary);
  /// The next logits (sampled rows, V) of the pass, valid until the next call. Not with tensor parallelism.
  std::span<const float> logits();

  const GenerationLimits& limits() const { return limits_; }
  int64_t vocabulary() const { return vocabulary_; }  ///< of the model

 private:
  GenerationPass(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                 const ops::Exec& exec, const GenerationLimits& limits, const ModelLayout& layout,
                 const parallel::Groups* groups, bool allocate);
  /// The workspace that the ops need at most, from a dry run. `bind`: binds everything to no memory.
  size_t needed_workspace(const std::function<void()>& bind);
  Tensor upload(const Tensor& to, const void* from, std::initializer_list<int64_t> shape);

  const ModelSpec part_;  ///< tensor_part() of the model
  int64_t vocabulary_;
  Slice own_;  ///< this rank's part of the vocabulary
  GenerationLimits limits_;
  ops::Exec exec_;
  LayerContext context_;
  std::unique_ptr<Stage> stage_;
  memory::Arenas arenas_;
  GenerationMemory memory_;
  PagedCache cache_;
  MicroBatch batch_;
  struct {
    Tensor temperature, seed, sample, position, parts, token, log_prob;
  } sampling_;
  int64_t sampled_ = 0;  ///< rows of the last pass
  std::vector<float> logits_;
};

}  // namespace nrl::model
