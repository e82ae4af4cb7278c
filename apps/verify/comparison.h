#pragma once
// Compares two runs step by step and keeps the worst differences.

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/verify/compare.h"
#include "apps/verify/learner.h"
#include "apps/verify/limits.h"
#include "parallel/comm/communicator.h"

namespace nrl::verify {

enum class Kind : uint8_t {
  initial,
  loss,
  gradient,
  norm,
  weight,
  evaluation,
  skipped,
  loss_scale,
  checkpoint,
};
std::string_view name_of(Kind kind);
/// True if values of this kind must be equal.
bool exact(Kind kind);

/// Which run is compared with the reference: the layout, the layout after it has resumed from a checkpoint,
/// or the reference after it has resumed from the layout's checkpoint.
enum class Phase : uint8_t { trained, resumed, reference_resumed };
std::string_view name_of(Phase phase);

struct When {
  int64_t step = 0;
  Phase phase = Phase::trained;
};

/// The worst difference of one tensor (or of a scalar, whose name is empty) over all steps.
struct Check {
  Kind kind = Kind::gradient;
  std::string name;
  double error = 0, limit = 0;
  When when = {};
  int rank = -1;             ///< whose values differ most; -1: all ranks alike
  std::string problem = {};  ///< instead of an error: "2 ranks count each element"
  bool ok() const { return problem.empty() && error <= limit; }  // false for NaN
  /// For sorting: how many times the limit.
  double severity() const;
};

/// The scalars of a step, or the loss of an evaluation after it.
struct ComparedStep {
  When when;
  bool evaluation = false;
  Outcome got, want;
};

class Comparison {
 public:
  /// Collective over `world` in all functions, with the same results on all ranks.
  Comparison(comm::Communicator& world, const Limits& limits) : world_(world), limits_(limits) {}

  void add(Check check);
  void initial_weights(const std::vector<Difference>& differences);
  void gradients(When when, const std::vector<Difference>& differences);
  /// `slack`: how many times the limit is allowed.
  void weights(When when, const std::vector<Difference>& differences, double slack = 1);
  /// The loss and the norm of a step. Every rank has `got`, rank 0 has `want`. `skips`: compares whether the
  /// step was skipped, and the loss scale.
  void step(When when, const Outcome& got, Outcome want, bool skips);
  void evaluation(When when, double got, double want);

  /// False from the first failed check on.
  bool ok() const { return ok_; }
  const Limits& limits() const { return limits_; }
  const std::vector<ComparedStep>& steps() const { return steps_; }
  size_t tensors() const { return tensors_; }
  /// In the order of severity.
  std::vector<Check> checks() const;

 private:
  void add_tensors(Kind kind, When when, const std::vector<Difference>& differences,
                   const std::vector<double>& errors, double limit);
  void add_scalar(Kind kind, When when, double error, double limit);
  void add_equal(Kind kind, When when, bool equal, const std::string& problem);

  comm::Communicator& world_;
  Limits limits_;
  std::map<std::pair<Kind, std::string>, Check> checks_;
  std::vector<ComparedStep> steps_;
  size_t tensors_ = 0;
  bool ok_ = true;
};

}  // namespace nrl::verify
