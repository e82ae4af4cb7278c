#pragma once
// The interface of the programs that a run reports to: TensorBoard, Weights & Biases, MLflow.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nrl::monitor {

/// The numbers of a step under the names that all sinks use (rows.h).
struct Row {
  int64_t step = 0;
  double time = 0;  ///< wall clock, seconds since the epoch
  std::vector<std::pair<std::string, double>> values = {};
};

/// The run as a sink describes it.
struct RunInfo {
  std::string id, name;          ///< RunFile
  bool resumed = false;          ///< sessions of this run came before; sinks append to what they wrote
  int64_t first_step = 0;        ///< steps before this session
  double created = 0, time = 0;  ///< start of the run and of this session, seconds since the epoch
  std::string host = {};
  /// The keys that the user gave, with their values in canonical YAML.
  std::vector<std::pair<std::string, std::string>> settings = {};

  /// The first step that this session may report: 0, for an evaluation before training, or the step after the
  /// checkpoint. What earlier sessions reported of it and of later steps is superseded.
  int64_t first_row() const { return first_step == 0 ? 0 : first_step + 1; }
};

/// One format. All calls come from one thread at a time. Any call may throw Error; the sink is then not used
/// any more. A destructor without close() leaves the run as one that was killed.
class Sink {
 public:
  Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  virtual ~Sink() = default;

  /// "tensorboard", for messages.
  virtual std::string_view name() const = 0;
  virtual void row(const Row& row) = 0;
  /// A text of a step, under the name `tag`.
  virtual void text(int64_t step, double time, std::string_view tag, std::string_view text) = 0;
  /// No more rows or texts of the last step will come.
  virtual void end_step() {}
  /// Hands everything to the system, so that it survives a kill of this process; the last step may be left
  /// out before end_step().
  virtual void flush() = 0;
  /// The end of the run at `step`; `exit_code` as the process has it.
  virtual void close(int64_t step, double time, int exit_code) = 0;
  /// A command that the user may want to run after the end; empty: none.
  virtual std::string next() const { return {}; }
};

}  // namespace nrl::monitor
