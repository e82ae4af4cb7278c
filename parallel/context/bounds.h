#pragma once
// Sequence boundaries of the attention calls of a context-parallel rank: which of its queries see which keys.
//
// Documents are intervals of a sample, so at most one of them has tokens both before and in a chunk. Keys of
// an earlier chunk are therefore seen without a mask, by the first queries of the local rows, and are the
// last rows of the rank that holds them; causal masks are needed among a rank's own rows only. An attention
// call gets rows that must not see each other as sequences without keys or without queries.

#include <cstdint>
#include <span>
#include <vector>

#include "core/config/enums.h"
#include "core/tensor/tensor.h"
#include "parallel/context/zigzag.h"

namespace nrl::parallel {

/// How the ranks of a context-parallel group exchange tokens for attention.
///
///   p2p         keys and values go around a ring (a2a = 1)
///   a2a         all-to-all: each rank has all tokens of some heads (a2a = size)
///   a2a+p2p     all-to-all among `a2a` neighboring ranks, then a ring over size / a2a ranks
///   all_gather  keys and values of all ranks are gathered
struct ContextExchange {
  bool gather = false;  ///< all_gather
  int a2a = 1;          ///< ranks of the all-to-all, a divisor of the group's size
  bool operator==(const ContextExchange&) const = default;
};
/// `inner`: ranks of the all-to-all of a2a+p2p.
ContextExchange context_exchange(CpCommType type, int size, int inner);

/// The boundaries of one call (AttentionForward::cu_q, cu_k), and with dropout the rows of its mask
/// (dropout.rows, key_places). `whole`: every sample is one document in every microbatch, so that the lengths
/// are those of its chunks.
struct CallBounds {
  Tensor cu_q, cu_k, rows = {}, key_places = {};
  bool whole = false;
};

/// The boundaries for one exchange on one rank.
class ContextBounds {
 public:
  /// `zigzag`: the rank's share of a microbatch. `window` as in AttentionForward; only with all_gather and
  /// where one rank of a ring has all tokens. `dropout`: of probabilities, for which the calls have rows.
  ContextBounds(const ContextExchange& exchange, const ZigZag& zigzag, int64_t window, bool dropout = false);

  /// Calls of a forward or backward pass: the steps of the ring, or (sample, half) with all_gather.
  int calls() const;
  /// Room for all boundaries, in i32 elements.
  int64_t capacity() const;
  /// Writes the boundaries for a microbatch to `to` (capacity() elements) and sets `views` (calls() entries)
  /// to what they are at `device`. `documents`: boundaries in all samples' tokens, from 0 to samples *
  /// length, with one at the beginning of each sample. `padded`: sequences are padded with empty ones to a
  /// power of two where their number depends on the documents, so that libraries need few plans.
  void write(std::span<const int32_t> documents, bool padded, int32_t* to, int32_t* device,
             std::span<CallBounds> views) const;

 private:
  class Writer;
  void write_own(std::span<const int32_t> documents, Writer& w) const;
  void write_step(std::span<const int32_t> documents, int from, Writer& w) const;
  /// The rows of the last call's queries and keys: row(i) among all samples' tokens.
  template <class Query, class Key>
  void write_rows(std::span<const int32_t> documents, int64_t queries, const Query& query, int64_t keys,
                  const Key& key, Writer& w) const;
  void write_step_rows(std::span<const int32_t> documents, int from, Writer& w) const;
  void write_prefix(std::span<const int32_t> documents, int64_t sample, int half, Writer& w) const;
  int64_t sequences_of_own() const { return own_.samples() * own_.sample_rows(); }

  ContextExchange exchange_;
  ZigZag own_;  ///< of the ring's rank, whose chunks are `a2a` times as long; of the group's with all_gather
  int64_t window_;
  bool dropout_;
};

/// First key, in its sample, that all_gather passes for queries of a chunk that begins at `first`.
constexpr int64_t first_key(int64_t first, int64_t window) {
  return window > 0 && first >= window ? first - window + 1 : 0;
}

}  // namespace nrl::parallel
