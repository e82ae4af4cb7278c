#pragma once
// The time that calls and operations of groups lose while both run on a rank.

#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/machine/profile.h"
#include "core/ops/cost.h"
#include "parallel/comm/collective_log.h"
#include "parallel/comm/ledger.h"

namespace nrl::machine {

/// Times of a call and of an operation while the other runs, over their times alone.
struct Sharing {
  double call = 1, operation = 1;

  bool operator==(const Sharing&) const = default;
};

class Overlap {
 public:
  /// Calls of a kind have the same factors; see row().
  using Row = int;

  /// `assumed`: of all calls and operations.
  explicit Overlap(const Sharing& assumed = {});
  /// Assumed of calls that are GEMMs, and of all others. `layers_apart`: operations of layers run on copy
  /// engines, or on multiprocessors that GEMMs leave to them.
  Overlap(const Sharing& gemms, const Sharing& others, bool layers_apart);
  /// Factors of a profile, which must not be empty: a call has its op's, else the median of the ops with the
  /// same kind of work, else of all ops; an operation that was not measured has the median of the others.
  explicit Overlap(std::span<const MeasuredOverlap> measured);

  Row row(std::string_view op, ops::Work work) const;
  const Sharing& of(Row row, comm::Op op) const { return rows_[row][static_cast<size_t>(op)]; }
  /// False: neither calls nor operations lose anything.
  bool any() const { return any_; }
  /// True if operations of this purpose and calls share multiprocessors.
  bool shares(comm::Purpose purpose) const { return !layers_apart_ || purpose != comm::Purpose::layers; }

 private:
  static constexpr size_t operations = static_cast<size_t>(comm::Op::split) + 1;
  using Factors = std::array<Sharing, operations>;

  void add(std::span<const MeasuredOverlap> measured);

  std::vector<Factors> rows_;  // by ops::Work, then the ops of ops_; assumed: one of all calls
  std::map<std::string, Row, std::less<>> ops_;
  bool any_ = false, layers_apart_ = false;
};

}  // namespace nrl::machine
