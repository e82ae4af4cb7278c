#pragma once
// The estimated time of a training step by part, from the costs of its calls (core/ops/cost.h) and the
// assumed rates of a GPU, beside the measured times where there are any.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/machine/call_time.h"
#include "core/io/json.h"
#include "core/trace/trace.h"

namespace nrl::predict {

struct PredictedPart {
  std::string_view name;
  int64_t calls = 0;
  double bytes = 0, flops = 0;  ///< of all calls
  double seconds = 0, arithmetic = 0,
         memory = 0;    ///< estimated; the latter two as if each were the only limit
  double measured = 0;  ///< seconds; 0: not measured
};

/// Times of a step in seconds.
struct MeasuredStep {
  double step = 0;                  ///< without timing its parts
  std::vector<trace::Total> parts;  ///< with Total::parent; per step
};

/// A step's work, for the figures below the table.
struct StepFacts {
  double tokens = 0, flops_per_token = 0;  ///< model FLOPs, recomputation excluded
  int64_t planned_bytes = 0;
};

class Prediction {
 public:
  Prediction(const machine::DeviceModel& gpu, std::span<const ops::Call> calls, const StepFacts& facts);
  void add(const MeasuredStep& measured);

  /// In the order of the table, those without calls left out; the last one is the time between kernels.
  const std::vector<PredictedPart>& parts() const { return parts_; }
  double seconds() const { return seconds_; }
  double mfu(double seconds) const;
  /// The table with the assumptions above and the sums below it. Everything in it is an estimate but the
  /// measured column.
  std::string text() const;
  JsonValue json() const;

 private:
  const machine::DeviceModel& gpu_;
  StepFacts facts_;
  std::vector<PredictedPart> parts_;
  double seconds_ = 0, poor_ = 0, good_ = 0;
  std::optional<double> measured_;
};

}  // namespace nrl::predict
