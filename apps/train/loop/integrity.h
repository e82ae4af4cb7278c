#pragma once
// Finds numbers that hardware got wrong: replicas with other bits, and passes that give other bits when they
// are repeated.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "apps/engine/replica_hashes.h"
#include "apps/train/launch/faults.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Replicas of a tensor that differ.
struct Difference {
  std::string tensor = {};
  std::vector<int> ranks = {};  ///< of the run: the minority, or all if there is no majority
  bool majority = false;        ///< more than half of the replicas agree
};
/// The ranks to suspect, ascending: those that a majority contradicts; without any, the ranks in most of the
/// differences. Empty if there is no difference.
std::vector<int> suspects(std::span<const Difference> differences);
/// The replicas of a tensor that differ from the majority. `hashes[i]` is of `ranks[i]`.
Difference compare(const std::string& tensor, std::span<const int64_t> hashes, std::span<const int> ranks);

/// Compares weights and optimizer state, bit for bit, among the ranks that hold the same.
class ReplicaCheck {
 public:
  /// Collective. `run` must outlive the object.
  explicit ReplicaCheck(Run& run);

  /// Some rank has a tensor with replicas; the same on all ranks.
  bool has_replicas() const { return any_; }
  /// Collective, at the same place between steps on all ranks. Prints which ranks have other bits and throws
  /// AgreedExit (81) on all ranks, or returns.
  void check(int64_t step);

 private:
  Run& run_;
  std::vector<engine::KeptTensor> tensors_;
  std::vector<parallel::GroupId> groups_;  // in an order that is the same on all ranks
  bool any_ = false;
};

/// Repeats the passes of the last step twice, which must be collected and on a CPU, and compares
/// log-probabilities and gradients bit for bit. Collective. Throws AgreedExit (81) on all ranks if any rank
/// has a difference.
void check_repeated(Run& run, int64_t step);

/// Changes the number that a fault of memory names. Error(Exit::usage) if this rank has no such tensor.
void plant(engine::Engine& engine, const fault::Fault& fault);
/// The same in `values`, in the memory of `exec`. Error(Exit::usage) if it has no such element.
void plant(ops::Exec& exec, const Tensor& values, const fault::Fault& fault);
/// A reader of gradients (StepInput::gradient, Inspection::gradient) that plants `faults`.
std::function<void(int, const Tensor&)> planter(engine::Engine& engine, std::vector<fault::Fault> faults);

}  // namespace nrl::train
