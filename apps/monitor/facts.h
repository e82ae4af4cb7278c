#pragma once
// The data that the trainer reports to the terminal and the metrics file.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/timers.h"

namespace nrl::monitor {

/// A number of the objective beside the loss.
struct Metric {
  std::string name;
  double value = 0;
  std::string brief = {};  ///< its name in the terminal; empty: not shown
};

/// Numbers of the layers of a model in one step. NaN: a layer has none of this name.
struct LayerTable {
  std::vector<std::string> layers = {};  ///< "embedding", "0", "1", ..., "head"
  struct Column {
    std::string name;                 ///< "grad_norm"
    std::vector<double> values = {};  ///< by layer
  };
  std::vector<Column> columns = {};
};

/// One optimizer step. Loss and gradient norm are already reduced over the ranks.
struct StepFacts {
  int64_t step = 0, max_steps = 0;  ///< step counts from 1
  double time = 0;                  ///< wall clock, seconds since the epoch; 0: the time of writing
  double loss = 0, lr = 0, grad_norm = 0;
  struct Router {
    std::optional<double> aux_loss;  ///< before its coefficient; absent without one
    double z_loss;                   ///< before its coefficient
    double load;                     ///< tokens of the busiest expert / the mean
    int rounds = 1;                  ///< in which rank 0's experts got their rows, at most
  };
  std::optional<Router> router = {};  ///< of models with experts: means over their layers
  struct Examples {
    int64_t loss_tokens;           ///< targets with a loss, all ranks
    double efficiency, imbalance;  ///< StepSource::Totals
  };
  std::optional<Examples> examples = {};         ///< of algorithms that train on examples
  std::vector<Metric> metrics = {};              ///< of the objective, beside the loss
  int64_t tokens = 0;                            ///< of the whole run including this step, all ranks
  double tokens_per_s = 0;                       ///< all ranks
  std::optional<double> mfu = {};                ///< 0 to 1; absent where the peak is unknown
  std::string fp8 = {};                          ///< "fp8 tensorwise"; empty without FP8
  int64_t mem_bytes = 0;                         ///< memory of rank 0; 0: not shown
  double step_ms = 0, data_ms = 0, comm_ms = 0;  ///< comm: exposed communication
  double gemm_ms = 0, attention_ms = 0;          ///< kernel time within the step
  double eta_s = -1;                             ///< negative: unknown
  bool skipped = false;                          ///< the update was not applied
  bool limited = false;                          ///< because of a limit of the stability guard
  std::optional<double> loss_scale = {};         ///< that the step was computed with, if there is one
  /// Own work of the slowest rank over the median of its peers, in the last window of some seconds.
  std::optional<double> straggler_ratio = {};
  /// Activations that rank 0 moved to the host and back; absent without.
  struct Offload {
    int64_t bytes;      ///< both ways
    double ms;          ///< of the copies; 0: not timed
    double exposed_ms;  ///< of it, in which ops waited
  };
  std::optional<Offload> offload = {};
  int world_size = 1;
  /// Bytes by category ("params", "grads", ...), for the metrics file: mem_<category>_bytes.
  std::vector<std::pair<std::string, int64_t>> memory = {};
  std::optional<LayerTable> layers = {};  ///< every logger.layer_stats_period steps
};

/// One evaluation. The first loss is named "val_loss"; others ("val_loss/code") may follow.
struct EvalFacts {
  int64_t step = 0;
  double time = 0;  ///< as in StepFacts
  std::vector<std::pair<std::string, double>> losses = {};
  double seconds = 0;                ///< duration
  std::vector<Metric> metrics = {};  ///< of the objective, beside the loss: "val_accuracy"
};

/// The banner: a title, and one labeled line per section, e.g. {"grid", "8 ranks = dp 8"}. Further lines of a
/// section are indented under the first.
struct RunFacts {
  std::string title = {};  ///< "nrl-train 0.1.0"
  std::vector<std::pair<std::string, std::string>> sections = {};
};

/// The operations of one kind in one group of ranks, as rank 0 saw them (comm::LogTotal).
struct CommFacts {
  std::string group = {}, operation = {}, algorithm = {};
  int ranks = 1;          ///< of the group
  int64_t count = 0;      ///< operations
  int64_t bytes = 0;      ///< of the vectors
  double wire_bytes = 0;  ///< that a rank sends
  double seconds = 0;     ///< from start to end, waiting for late ranks included
  double exposed_s = 0;   ///< in which nothing else was done

  double bus_bandwidth() const { return seconds > 0 ? wire_bytes / seconds : 0; }  ///< bytes per second
  double hidden() const { return seconds > 0 ? 1 - std::min(exposed_s / seconds, 1.0) : 0; }
};

/// The end of a run.
struct RunSummary {
  /// First line, e.g. "done: 20000 steps" or "stopped after 2311/20000 steps, checkpoint saved; exit 75".
  std::string outcome = {};
  int64_t steps = 0, max_steps = 0;  ///< steps of this process; max_steps of the whole run
  int64_t tokens = 0;                ///< processed by this process, all ranks
  double wall_s = 0;
  double mean_tokens_per_s = 0, median_tokens_per_s = 0;
  std::optional<double> mfu = {};
  std::optional<double> best_val_loss = {};
  int64_t best_val_step = 0;
  SectionTimes times = {};
  /// Seconds by kernel, largest first ("linear_forward", ...), in steps that were timed; printed as fractions
  /// of `kernel_base_s`, which these steps spent computing.
  std::vector<std::pair<std::string, double>> kernels = {};
  double kernel_base_s = 0;
  std::string kernel_steps = {};       ///< "of steps 3-5" where only these were timed
  std::vector<CommFacts> comm = {};    ///< in `steps` steps, the most exposed first
  std::string checkpoint = {};         ///< path of the last one; empty: none was saved
  std::vector<std::string> next = {};  ///< suggested commands
};

}  // namespace nrl::monitor
