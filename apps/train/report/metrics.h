#pragma once
// metrics.jsonl: one JSON object a step, appended line by line.

#include <cstdint>
#include <string>

#include "apps/train/report/facts.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::train {

/// {"step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_ms", "data_ms",
/// "comm_ms", "skipped", "mem_<category>_bytes"...}. Doubles read back to the same bits; an unknown mfu and
/// numbers that are not finite are null.
JsonValue step_row(const StepFacts& facts);
/// {"step", "time", "val_loss", ..., "eval_s"}.
JsonValue eval_row(const EvalFacts& facts);

/// The file `log_dir`/metrics.jsonl, written by rank 0. Each line is one write(2), so a reader that follows
/// the file sees whole lines, and a killed run loses at most the line it was writing.
class MetricsLog {
 public:
  /// Opens the file and makes `log_dir` when missing. `resume_step` is the step of the checkpoint the run
  /// goes on from, 0 for a fresh one: rows of later steps, left by an earlier attempt, are removed (the file
  /// is replaced atomically), so each step occurs once. A broken last line, as a crash leaves it, is removed
  /// with a warning; any other line that is not an object with an integer "step" is Error(Exit::data) with
  /// file and line. With `active` false (ranks other than 0) nothing is opened or written.
  MetricsLog(const std::string& log_dir, int64_t resume_step, bool active = true);

  void step(const StepFacts& facts) { append(step_row(facts)); }
  void eval(const EvalFacts& facts) { append(eval_row(facts)); }
  /// One row; it needs an integer "step". The first failing write is Error(Exit::io), what it left of the
  /// line is taken back, and later rows are dropped without another error, so that a caller may go on.
  void append(const JsonValue& row);

  const std::string& path() const { return path_; }
  /// Rows of later steps that the constructor removed.
  int64_t removed_rows() const { return removed_rows_; }

 private:
  void drop_rows_after(int64_t resume_step);

  std::string path_;
  File file_;
  bool failed_ = false;
  int64_t removed_rows_ = 0;
};

}  // namespace nrl::train
