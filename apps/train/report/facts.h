#pragma once
// What the trainer tells the terminal and the metrics file.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/train/report/timers.h"

namespace nrl::train {

/// One optimizer step, already reduced over the ranks where that applies.
struct StepFacts {
  int64_t step = 0, max_steps = 0;  ///< step counts from 1
  double time = 0;                  ///< wall clock, seconds since the epoch; 0 = when it is written
  double loss = 0, lr = 0, grad_norm = 0;
  int64_t tokens = 0;                            ///< of the whole run up to and with this step, all ranks
  double tokens_per_s = 0;                       ///< all ranks
  std::optional<double> mfu = {};                ///< 0 to 1; absent where the peak is unknown
  int64_t mem_bytes = 0;                         ///< peak of the rank that needs most; 0 = not shown
  double step_ms = 0, data_ms = 0, comm_ms = 0;  ///< comm: exposed only
  double gemm_ms = 0, attention_ms = 0;          ///< inside the step: linear layers, attention
  double eta_s = -1;                             ///< negative = unknown
  bool skipped = false;                          ///< the update was not applied (gradients not finite)
  int world_size = 1;
  /// Bytes by category ("params", "grads", ...), for the metrics file: mem_<category>_bytes.
  std::vector<std::pair<std::string, int64_t>> memory = {};
};

/// One evaluation. Its first loss is the one named "val_loss"; further ones ("val_loss/code") may follow.
struct EvalFacts {
  int64_t step = 0;
  double time = 0;  ///< as in StepFacts
  std::vector<std::pair<std::string, double>> losses = {};
  double seconds = 0;  ///< what it took
};

/// The banner: one title, the run's name, and one line a section, e.g. {"grid", "8 = dp 8 x tp 1"}. A text
/// with several lines is indented under its label.
struct RunFacts {
  std::string title = {};  ///< "nrl-train 0.1.0 (a1b2c3d, Open MPI 4.1.4)"
  std::string run = {};    ///< may be empty
  std::vector<std::pair<std::string, std::string>> sections = {};
};

/// The end of a run.
struct RunSummary {
  /// First line, e.g. "done: 20000 steps" or "stopped after 2311/20000 steps, checkpoint saved; exit 75".
  std::string outcome = {};
  int64_t steps = 0, max_steps = 0;  ///< steps made by this process; max_steps of the whole run
  int64_t tokens = 0;                ///< processed by this process, all ranks
  double wall_s = 0;
  double mean_tokens_per_s = 0, median_tokens_per_s = 0;
  std::optional<double> mfu = {};
  std::optional<double> best_val_loss = {};
  int64_t best_val_step = 0;
  SectionTimes times = {};
  /// Seconds by kernel, largest first ("linear_forward", ...); printed as shares of the compute section.
  std::vector<std::pair<std::string, double>> kernels = {};
  std::string checkpoint = {};         ///< path of the last one; empty = none was written
  std::vector<std::string> next = {};  ///< commands to go on with
};

}  // namespace nrl::train
