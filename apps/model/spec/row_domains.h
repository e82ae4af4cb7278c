#pragma once
// The numbers of rows that the slots of layers have.

#include <array>

#include "apps/model/spec/layout.h"

namespace nrl::model {

/// The meaning of a slot's rows (SlotSpec::rows).
enum RowDomain : uint8_t {
  token_rows,  ///< tokens of the microbatch
  /// Tokens that this rank has of the residual stream: with sequence parallelism tensor-parallel ranks divide
  /// the tokens of the microbatch, else all of them.
  sequence_rows,
  head_chunk_rows,  ///< tokens of one chunk of the head (their logits exist at the same time)
  // The rows of layers with experts (ExpertRows):
  sent_rows,          ///< choices of this rank's tokens
  dispatched_rows,    ///< rows that this rank's experts get
  expert_group_rows,  ///< tokens of all ranks among which tokens are sent
  /// dispatched_rows in FP8 copies, in which experts begin at multiples of 16 or 128 (row_unit()).
  dispatched_rows_by_16,
  dispatched_rows_by_128,
  one_row,  ///< one row
  row_domains
};

/// True if a layer's tokens go to other ranks' experts.
bool exchanges_tokens(const ModelLayout& layout);

/// Rows of a layer with experts that there is memory for: the row domains of the same names.
struct ExpertRows {
  int64_t sent = 0, dispatched = 0, group = 0;
  int64_t balanced = 0;  ///< that a rank gets from balanced routers
  int64_t most = 0;      ///< that a rank may get; more than `dispatched` are exchanged in rounds
  int64_t experts = 0;   ///< of this rank
  int64_t of(RowDomain domain) const;
};
/// For `tokens` tokens on every rank. `generation`: no token is dropped.
ExpertRows expert_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens, bool generation);
/// Rows of every domain, for `tokens` tokens of the microbatch and `own` in this rank's residual stream.
std::array<int64_t, row_domains> domain_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens,
                                             int64_t own, int64_t head_chunk, bool generation);

}  // namespace nrl::model
