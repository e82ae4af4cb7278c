#pragma once
// Packing: which sequences of a global batch share a microbatch, and which rank computes it.

#include <cstdint>
#include <span>
#include <vector>

namespace nrl::data {

enum class PackAlgorithm : uint8_t {
  modified_first_fit_decreasing,  ///< Johnson and Garey (1985)
  first_fit_decreasing,
  first_fit_shuffle,  ///< first fit in random order
  concatenative,      ///< consecutive units
  sorted,             ///< dynamic batching: consecutive units of similar length, longest first
  none,               ///< micro_batch_size consecutive units per microbatch
};

/// Order of the microbatches of a rank. Either way position j has similar work on every rank.
enum class BinOrder : uint8_t {
  largest_first,  ///< by decreasing work
  small_ends,     ///< the least work first and last, for the ramps of a pipeline
};

/// Sequences that must be in one microbatch: one sequence, or the two of a pair.
struct PackUnit {
  int64_t rows = 0;  ///< 1 to 2^40: the sum over its sequences
  double work = 0;   ///< finite, not negative, in any unit, e.g. the FLOPs of its rows
};

struct PackOptions {
  PackAlgorithm algorithm = PackAlgorithm::modified_first_fit_decreasing;
  BinOrder order = BinOrder::largest_first;
  int64_t capacity = 0;          ///< most rows of a microbatch
  int64_t row_unit = 1;          ///< the rows of a microbatch are padded to a multiple; at most the capacity
  int64_t ranks = 1;             ///< data-parallel ranks
  int64_t bins_multiple = 1;     ///< the number of microbatches per rank is a multiple
  int64_t micro_batch_size = 1;  ///< units per microbatch; for `none` only
  uint64_t seed = 0;             ///< for `first_fit_shuffle` only; must differ between steps
};

struct Packing {
  /// [rank][position]: indices of the units of a microbatch, in increasing order. Every rank has the same
  /// number of microbatches. An empty one has no units: its rank must compute row_unit rows without targets.
  std::vector<std::vector<std::vector<int32_t>>> bins;
  double efficiency = 1;  ///< rows of all units / capacity of the microbatches that are not empty
  double imbalance = 0;   ///< largest work of a rank / mean work of the ranks - 1
};

/// Packs the units of one optimizer step. The result depends on the arguments only, so that every rank may
/// compute it. Every unit is in exactly one microbatch, and the padded rows of a microbatch do not exceed the
/// capacity.
///
/// - Microbatches are filled by `algorithm`, then split until their number is a multiple of
///   ranks * bins_multiple; if there are too few units to split, empty ones are added.
/// - They are distributed so that ranks have equal counts and similar work. For that, the first three
///   algorithms may also move single units between microbatches.
/// - `none` only cuts the units into microbatches: position j of rank r is microbatch j * ranks + r in the
///   order of the units (Megatron's order), none is split, and `order` is ignored.
///
/// Without units there are no microbatches. Throws Error (`config`) naming the smallest possible capacity if
/// a unit, or for `none` the units of a microbatch, have more rows than fit.
Packing pack(std::span<const PackUnit> units, const PackOptions& options);

}  // namespace nrl::data
