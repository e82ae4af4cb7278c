#pragma once
// Detects memory, or numbers of open files and threads, that grow from step to step.

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"

namespace nrl::monitor {

/// The memory of a rank after a step, in bytes; or a number of things. Together `parts` explain most of
/// `total`.
struct MemorySample {
  struct Part {
    std::string name;  ///< "heap in use"
    int64_t bytes = 0;
  };
  int64_t step = 0;
  int64_t total = 0;
  std::vector<Part> parts = {};
};

/// A warning of a detector.
struct Leak {
  std::string text;
  int64_t growth = 0;  ///< bytes by which the memory grew in the samples that were compared; 0: no memory
  /// A growth from which on a leak is critical.
  static constexpr int64_t high = 100'000'000;
};

/// Watches one kind of memory ("resident memory", "device memory"). Three tests, each of which warns once,
/// and again when the memory has doubled since:
/// - slope: of the slopes between all pairs of samples in a window two thirds are above the limit, so that a
///   single rise, as of the first evaluation, does not count;
/// - ratio: the mean of the last samples is a multiple of the mean of the first ones;
/// - step increase: the rise from one sample to the next, per step.
class LeakDetector {
 public:
  LeakDetector(std::string what, const MemoryLeakConfig& limits);
  /// Samples are numbers of things, which have limits of their own: a slope of 1 in 10 steps; a ratio of 1.5
  /// with at least 16 more.
  static LeakDetector of_counts(std::string what);

  /// Adds the sample of a later step. Returns a warning that names the part that has grown most, or nothing.
  std::optional<Leak> add(const MemorySample& sample);

 private:
  struct Test {
    int64_t warned = 0;  // the total of the last warning; 0: none yet
    bool due(int64_t total) const { return warned == 0 || total >= 2 * warned; }
  };
  std::optional<Leak> slope(const MemorySample& now);
  std::optional<Leak> ratio(const MemorySample& now);
  std::optional<Leak> step_increase(const MemorySample& now);

  std::string amount(double total) const;
  Leak leak(std::string text, const MemorySample& before, const MemorySample& now) const {
    return {std::move(text), counts_ ? 0 : now.total - before.total};
  }
  std::string grown_part(const MemorySample& before, const MemorySample& now) const;

  std::string what_;
  MemoryLeakConfig limits_;
  bool counts_ = false;
  std::deque<MemorySample> window_;  // the last samples
  MemorySample first_;
  double first_sum_ = 0;
  int64_t count_ = 0;
  Test slope_, ratio_, step_increase_;
};

}  // namespace nrl::monitor
