#pragma once
// GEMMs whose algorithms were timed, and how often a step calls them.

#include <memory>
#include <string>
#include <vector>

#include "core/ops/libraries.h"

namespace nrl::ops {

/// A GEMM that autotuning has timed.
struct GemmTiming {
  std::string gemm;     ///< shape and types, as in the tuning file
  double first_ms = 0;  ///< the algorithm that the library recommends
  double best_ms = 0;   ///< the one that was chosen
  int64_t calls = 0;    ///< since counting began
};

/// Counts the GEMMs that `libraries` run from its construction on; to be created before the first one.
class GemmCounter {
 public:
  explicit GemmCounter(Libraries& libraries);
  ~GemmCounter();
  GemmCounter(const GemmCounter&) = delete;
  GemmCounter& operator=(const GemmCounter&) = delete;
  /// The GEMMs that were timed, in the order of their first calls.
  std::vector<GemmTiming> timings() const;

 private:
  class Engine;
  Libraries& libraries_;
  std::shared_ptr<gemm::Engine> inner_;
  std::shared_ptr<Engine> counting_;
};

}  // namespace nrl::ops
