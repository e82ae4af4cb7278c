#pragma once
// Forward passes of many sequences with a paged key/value cache, and the sampling of their next tokens. Runs
// the layers of training in mode `generation`, on the weights that training uses. Which rows a pass has is
// the caller's decision.
//
// On a GPU a decoding pass, in which every sequence has one row and its next token is sampled, is padded to
// one of a few numbers of rows with copies of the first one that write nothing. Each number is captured as a
// CUDA graph the second time that it occurs and replayed from then on: the tensors of such a pass depend on
// this number alone, and everything else is read from the block of rows that is uploaded before. Not with
// tensor parallelism: no watchdog sees the collectives inside a graph.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/model/program/stage.h"
#include "core/device/runtime.h"

namespace nrl::model {

struct GenerationLimits {
  int64_t tokens = 128;   ///< rows of a pass
  int64_t sequences = 1;  ///< sequences of a pass, and rows whose next token is sampled
  int64_t longest = 0;    ///< tokens of a sequence
  int64_t pages = 0;      ///< of the cache
  int64_t page_tokens = 16;
  int64_t vocabulary = 0;  ///< tokens from this one on are never sampled; 0: the model's vocabulary
  bool graphs = true;      ///< on a GPU: replay decoding passes as graphs where they can be captured
};

/// Rows of the padded decoding pass of `sequences` sequences, where a pass has at most `most`: 1, 2, 4, a
/// multiple of 8, or `most`.
int64_t padded_sequences(int64_t sequences, int64_t most);

/// Bytes that a GenerationPass allocates.
struct GenerationMemory {
  int64_t pages = 0;    ///< keys and values
  int64_t buffers = 0;  ///< activations of a pass, its rows, logits and the workspace of ops
  int64_t total() const { return pages + buffers; }
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

/// The rows of a pass, in host memory: consecutive tokens of sequences, one sequence after the other.
struct GenerationRows {
  struct Sequence {
    std::span<const int32_t> tokens;  ///< of the rows, at least one
    int64_t first = 0;                ///< position of the first of them
    std::span<const int32_t> pages;   ///< of positions [0, first + tokens), at least
  };
  std::vector<Sequence> sequences;
  std::vector<int32_t> sampled;        ///< rows whose next logits are computed; may repeat
  std::vector<SamplingKey> keys = {};  ///< one for each of them; empty: only logits() is computed
  bool sample_later = false;           ///< with keys: sample() is called, after logits() and its changes
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
  /// Enqueues a forward pass: writes keys and values of the rows to their pages, and samples.
  void run(const GenerationRows& rows);
  /// Samples from the logits as the caller has changed them in the memory of logits().
  void sample();
  /// The next tokens of the pass's sampled rows. Waits for the pass, which must have had keys.
  std::vector<SampledToken> tokens();
  /// The next logits (sampled rows, V) of the pass, valid until the next call of another method. Waits for
  /// the pass. Not with tensor parallelism.
  std::span<float> logits();

  const GenerationLimits& limits() const { return limits_; }
  int64_t vocabulary() const { return vocabulary_; }  ///< of the model
  int64_t replays() const { return replays_; }        ///< passes that a graph has executed so far
  /// The reason why decoding passes are not captured; empty: they are, or the device is a CPU.
  const std::string& no_graphs() const { return no_graphs_; }

 private:
  GenerationPass(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                 const ops::Exec& exec, const GenerationLimits& limits, const ModelLayout& layout,
                 const parallel::Groups* groups, bool allocate);
  /// The workspace that the ops need at most, from a dry run. `bind`: binds everything to no memory.
  size_t needed_workspace(const std::function<void()>& bind);
  struct Rows;  ///< of a pass, on the device
  /// Writes them to the block of rows and uploads it.
  void upload(const GenerationRows& rows, int64_t padding, Rows& to);
  void execute(const Rows& rows, bool samples);
  void sample(const Rows& rows);

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
  std::byte* block_ = nullptr;  ///< ids, positions, pages and keys of a pass (block_bytes())
  device::Memory staging_;      ///< page-locked, of the same size; empty on a CPU
  Tensor parts_, results_;      ///< samples of each rank; then tokens, then log-probabilities
  int64_t sampled_ = 0;         ///< rows of the last pass, without padding
  std::unique_ptr<Rows> last_;  ///< of the last pass
  bool in_flight_ = false;      ///< the device may still read the staging memory
  bool pads_ = false;
  std::string no_graphs_;
  struct Captured {
    bool ran = false;  ///< libraries select and load their kernels then, which capture does not allow
    device::Graph graph;
  };
  std::map<std::pair<int64_t, bool>, Captured> graphs_;  ///< by rows, and by whether it samples
  int64_t replays_ = 0;
  std::vector<float> logits_;
};

}  // namespace nrl::model
