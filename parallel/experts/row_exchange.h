#pragma once
// Rows of tokens between the ranks that route them and the ranks that have their experts.
//
// An expert group (group::etp_ep) has P T ranks, P = ExpertShape::ep and T = ExpertShape::etp. Rank p T + t
// has part t of the matrices of the experts [p L, (p + 1) L), L = E / P. Every rank routes tokens of its own.
// Its rows lie in the order of experts: those of expert e are [offsets[e], offsets[e + 1])
// (core/ops/dispatch.h).
//
//   dispatch   every row, or each of T parts of its columns, goes to the T ranks of its expert
//   combine    the results go back the same way: a source gets T of each row
//
// Rows whose columns are divided cross the network once: the T ranks gather the parts from each other, and
// sum their results into parts before those go back (group::etp; apps/model/layers/expert_alltoall.cpp).
//
// A rank gets one message from every other: their rows lie one behind the other as they arrive, in the order
// [source, local expert]. The GEMMs read them by experts, [local expert, source]; groups() says how one order
// becomes the other (ops::RegroupRows), as in Megatron's sort_chunks_by_idxs.
//
// The ranks must know each other's offsets on the host before; these are the only values that a host waits
// for. If a rank receives more rows than it has memory for, all of them exchange in rounds: round i has the
// rows [i n, (i + 1) n) of those that every rank receives, by experts. They are contiguous at their source.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "parallel/comm/communicator.h"

namespace nrl::parallel {

/// How the experts of a layer are divided over the ranks of a group.
struct ExpertShape {
  int64_t experts = 1;  ///< E; ep divides it
  int ep = 1, etp = 1;
  int ranks() const { return ep * etp; }
  /// L: experts of a rank.
  int64_t local() const { return experts / ep; }
  bool operator==(const ExpertShape&) const = default;
};

/// What limits the rows of an expert (ops::DispatchSort).
struct ExpertCapacity {
  int64_t rows = 0;  ///< of each expert and source; 0: no limit
  bool pad = false;  ///< exactly `rows`
};

/// The most rows that a rank receives when every rank routes `tokens` tokens to `top_k` different experts.
int64_t most_received(const ExpertShape& shape, int64_t tokens, int64_t top_k,
                      const ExpertCapacity& capacity);

/// The rows that are exchanged at a time: [first, first + rows) of those that a rank receives.
struct RowRange {
  int64_t first = 0, rows = std::numeric_limits<int32_t>::max();
};

class RowExchange {
 public:
  /// `rank`: this rank's index in the group.
  RowExchange(const ExpertShape& shape, int rank);

  const ExpertShape& shape() const { return shape_; }
  /// Elements of a table: the E + 1 offsets of each rank, in rank order.
  int64_t table_size() const { return shape_.ranks() * (shape_.experts + 1); }
  /// The table when every expert has `capacity` rows on every rank.
  void padded_table(int64_t capacity, std::span<int32_t> table) const;

  /// The table of dry runs: every rank sends `sent` rows, of which the experts of this rank get `received` in
  /// all; they and the others are even.
  void planned_table(int64_t sent, int64_t received, std::span<int32_t> table) const;

  /// Rows that this rank sends, each to T ranks.
  int64_t sent(std::span<const int32_t> table) const { return offset(table, rank_, shape_.experts); }
  /// Rows that this rank receives.
  int64_t received(std::span<const int32_t> table, const RowRange& range = {}) const;
  /// The most rows that a rank receives; the same on all.
  int64_t most_received(std::span<const int32_t> table) const;
  /// (L + 1): the rows of the local experts are [offsets[l], offsets[l + 1]) of those received.
  void local_offsets(std::span<const int32_t> table, std::span<int32_t> offsets,
                     const RowRange& range = {}) const;
  /// C: the groups of rows that arrive together and are of one expert.
  int64_t group_count() const { return shape_.ranks() * shape_.local(); }
  /// The groups in the order in which they arrive: where they begin then (C + 1), and their places by experts
  /// (C).
  void groups(std::span<const int32_t> table, std::span<int32_t> begin, std::span<int32_t> place,
              const RowRange& range = {}) const;

  /// Contiguous rows of `width` elements in memory of the communicator's kind.
  struct Rows {
    comm::ConstView in;
    comm::View out;
    int64_t width = 1;
    bool divided = false;  ///< dispatch: `in` is (T, sent, width), the rows for each of the T ranks
  };
  /// Of each of `rows`: `in` has all rows that this rank sends, by experts, `out` gets those of the range as
  /// they arrive. Collective over `ranks`, which is the group.
  comm::Handle dispatch(comm::Communicator& ranks, std::span<const int32_t> table, std::span<const Rows> rows,
                        const RowRange& range = {}, const comm::After& after = {}) const;
  /// `in` has the received rows of the range as they arrived; `out` gets those of (T, sent) rows that are
  /// theirs: of each of the T ranks the rows in the order in which they were sent. Collective.
  comm::Handle combine(comm::Communicator& ranks, std::span<const int32_t> table, std::span<const Rows> rows,
                       const RowRange& range = {}, const comm::After& after = {}) const;

 private:
  int64_t offset(std::span<const int32_t> table, int rank, int64_t expert) const {
    return table[rank * (shape_.experts + 1) + expert];
  }
  /// Rows of expert `e` that `rank` sends.
  int64_t count(std::span<const int32_t> table, int rank, int64_t e) const {
    return offset(table, rank, e + 1) - offset(table, rank, e);
  }
  int64_t first_expert() const { return first_expert_of(rank_); }
  int64_t first_expert_of(int rank) const { return rank / shape_.etp * shape_.local(); }
  /// Calls f(l, source, first, n) for every local expert and source, by experts: the rows [first, first + n)
  /// of those that `source` sends of that expert to `rank` are in the range.
  template <class F>
  void for_each_group(std::span<const int32_t> table, int rank, const RowRange& range, F&& f) const;
  comm::Handle exchange(comm::Communicator& ranks, std::span<const int32_t> table, std::span<const Rows> rows,
                        bool forth, const RowRange& range, const comm::After& after) const;

  ExpertShape shape_;
  int rank_;
};

}  // namespace nrl::parallel
