#pragma once
// metrics.jsonl: one JSON object per line and step.

#include <cstdint>
#include <string>

#include "apps/monitor/facts.h"
#include "core/io/append_file.h"
#include "core/io/json.h"

namespace nrl::monitor {

inline constexpr const char* metrics_file = "metrics.jsonl";
/// The RunSummary of the last session that ended, with the id and goodput of the run and the exit code.
inline constexpr const char* summary_file = "summary.json";

/// {"step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_ms", "data_ms",
/// "comm_ms", "gemm_ms", "attention_ms", "skipped", "mem_<category>_bytes"...}; with several ranks, after
/// some seconds, also "straggler_ratio"; of models with experts "router_aux_loss", "router_z_loss",
/// "expert_load", "expert_rounds"; with offloaded activations "offload_bytes" and, unless the step was a
/// graph, "offload_ms" and "offload_exposed_ms"; every logger.layer_stats_period steps "layers" (layers.h).
/// Doubles round-trip exactly; unknown mfu and non-finite numbers are null.
JsonValue step_row(const StepFacts& facts);
/// {"step", "time", "val_loss", ..., "eval_s"}.
JsonValue eval_row(const EvalFacts& facts);
/// {"outcome", "steps", ..., "compute_s", ..., "communication", "checkpoint", "next"}.
JsonValue summary_row(const RunSummary& summary);

/// The file `log_dir`/metrics.jsonl, written by rank 0. Each line is one write(2): readers that follow the
/// file see whole lines, and a killed run loses at most the current line.
class MetricsLog {
 public:
  /// Opens the file, creating `log_dir` if missing. `resume_step`: step of the checkpoint that the run
  /// resumes from, 0 for a fresh run. Rows of later steps, left by an earlier attempt, are removed (the file
  /// is replaced atomically), so that each step occurs once. An incomplete last line, left by a crash, is
  /// removed with a warning; any other line that is not an object with an integer "step" is Error(Exit::data)
  /// with file and line. With `active` false (ranks other than 0) nothing is opened or written.
  /// `name`: another file of such rows.
  MetricsLog(const std::string& log_dir, int64_t resume_step, bool active = true,
             const char* name = metrics_file);

  void step(const StepFacts& facts) { append(step_row(facts)); }
  void eval(const EvalFacts& facts) { append(eval_row(facts)); }
  /// Appends a row, which must have an integer "step". A write error, as on a full disk, is Error(Exit::io)
  /// once; the rows that are not written stay in memory, the last 4 MiB of them, and every later row tries to
  /// write them again.
  void append(const JsonValue& row);

  const std::string& path() const { return path_; }
  /// Duration of the steps in the rows that were kept at the start, without steps whose update was skipped.
  double kept_ms() const { return kept_ms_; }

 private:
  void drop_rows_after(int64_t resume_step);

  std::string path_;
  AppendFile file_;
  std::string unwritten_;  // whole lines
  double kept_ms_ = 0;
};

}  // namespace nrl::monitor
