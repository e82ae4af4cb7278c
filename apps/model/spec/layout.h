#pragma once
// How one copy of a model is divided over ranks, and which part a rank holds.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/model/spec/spec.h"
#include "core/config/enums.h"
#include "parallel/context/bounds.h"
#include "parallel/experts/row_exchange.h"

namespace nrl::model {

/// Elements [begin, begin + count).
struct Slice {
  int64_t begin = 0, count = 0;
};

/// Blocks [begin, end) of the model.
struct BlockRange {
  int begin = 0, end = 0;
};

/// How blocks are spread over chunks. By default evenly: sizes differ by at most one. At most one of the
/// alternatives may be used.
struct BlockSplit {
  std::vector<int64_t> chunks = {};              ///< blocks of every chunk of the model
  std::optional<int64_t> first = {}, last = {};  ///< blocks of the first and the last stage
  bool embedding = false, head = false;          ///< count as one block of the first and the last chunk
  bool operator==(const BlockSplit&) const = default;
};

/// Overlap of tensor-parallel communication with GEMMs (gemm_overlap.h).
struct CommOverlap {
  TpCommOverlap method = TpCommOverlap::none;
  int64_t splits = 4;  ///< pieces of a rank's rows, with `pipelined`
};

/// The division of a model and one rank's coordinates in it. The default is the whole model on one rank.
struct ModelLayout {
  int tensor = 1, tensor_rank = 0;  ///< ranks that split every weight matrix
  /// Tensor-parallel ranks also split the tokens between the matrices: norms, dropout, residual stream.
  bool sequence_parallel = false;
  CommOverlap overlap = {};
  int context = 1, context_rank = 0;  ///< ranks that split every sequence
  /// How context-parallel ranks exchange tokens for the attention of each block; empty if context is 1.
  std::vector<parallel::ContextExchange> exchanges = {};
  /// Ranks that split the experts, and the ranks that split the matrices of every expert. Their grid covers
  /// the tensor-, context- and data-parallel ranks.
  int expert = 1, expert_rank = 0;
  int expert_tensor = 1, expert_tensor_rank = 0;
  /// Pipeline stages, each with `chunks` chunks of consecutive layers: chunk c of stage s is chunk
  /// c * stages + s of the model.
  int stages = 1, stage = 0;
  int chunks = 1;
  BlockSplit split = {};

  /// The number of this rank's tokens in the residual stream, of `tokens` in the microbatch.
  int64_t own_tokens(int64_t tokens) const { return sequence_parallel ? tokens / tensor : tokens; }
  /// Ranks among which tokens are sent to experts, and this rank's index (parallel::group::etp_ep).
  int expert_ranks() const { return expert * expert_tensor; }
  int expert_group_rank() const { return expert_rank * expert_tensor + expert_tensor_rank; }
  int model_chunks() const { return stages * chunks; }
  int model_chunk(int chunk) const { return chunk * stages + stage; }
  bool first_stage() const { return stage == 0; }
  bool last_stage() const { return stage + 1 == stages; }
  /// Whether this rank reports the log-probabilities of its tokens: exactly one of the ranks that compute
  /// them does.
  bool reports_tokens() const { return last_stage() && tensor_rank == 0; }
};

/// Part `i` of `n` things divided into `parts` whose sizes differ by at most one.
Slice even_part(int64_t n, int64_t parts, int64_t i);
/// The part of `n` rows, columns or heads of a tensor-parallel rank.
Slice tensor_slice(const ModelLayout& layout, int64_t n);
/// The blocks of a chunk of the model (0 to model_chunks() - 1).
BlockRange chunk_blocks(const ModelLayout& layout, int64_t layers, int model_chunk);
/// Why this many blocks cannot be spread over the layout's chunks; empty if they can. Only the first and the
/// last chunk of the model may be without blocks.
std::string split_problem(const ModelLayout& layout, int64_t layers);
/// By block of the model: true if one of this rank's chunks has it.
std::vector<bool> held_blocks(const ModelLayout& layout, int64_t layers);

/// This rank's blocks with experts among the first `blocks` of the model.
int64_t held_expert_layers(const ModelSpec& spec, const ModelLayout& layout, int64_t blocks);

/// With context parallelism the boundaries of a block's attention calls depend on these.
struct ContextKind {
  parallel::ContextExchange exchange;
  int64_t window = 0;  ///< LayerKind::window
  bool operator==(const ContextKind&) const = default;
};
/// The different kinds of the blocks, in the order of their first blocks; empty if context is 1.
std::vector<ContextKind> context_kinds(const ModelSpec& spec, const ModelLayout& layout);

/// The experts of a layer, and the matrices of each, that this rank has.
Slice local_experts(const ModelSpec& spec, const ModelLayout& layout);
parallel::ExpertShape expert_shape(const ModelSpec& spec, const ModelLayout& layout);

/// The sizes of a tensor-parallel rank's part: `tensor` must divide heads, kv_heads, ffn and shared_ffn, and
/// `expert_tensor` the inner size of an expert. The number of experts and the vocabulary keep their sizes:
/// see local_experts() and tensor_slice().
ModelSpec tensor_part(const ModelSpec& spec, const ModelLayout& layout);

}  // namespace nrl::model
