#pragma once
// The numbers of a run in Prometheus' text format 0.0.4 or OpenMetrics 1.0.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/monitor/facts.h"
#include "apps/monitor/telemetry.h"

namespace nrl::monitor {

/// True if an Accept header prefers OpenMetrics.
bool wants_open_metrics(std::string_view accept);
/// The Content-Type of metrics_text().
const char* metrics_type(bool open_metrics);

using Labels = std::vector<std::pair<std::string, std::string>>;

/// Families of samples as text. The samples of a family must be added one after the other.
class Exposition {
 public:
  explicit Exposition(bool open_metrics) : open_metrics_(open_metrics) {}
  void gauge(std::string_view name, std::string_view help, double value, const Labels& labels = {});
  /// `name` without "_total".
  void counter(std::string_view name, std::string_view help, double value, const Labels& labels = {});
  /// `bounds`: ascending; `counts`: observations in each bucket, one more than bounds.
  void histogram(std::string_view name, std::string_view help, std::span<const double> bounds,
                 std::span<const int64_t> counts, double sum);
  std::string text() const;

 private:
  void head(std::string_view name, std::string_view type, std::string_view help);
  void sample(std::string_view name, double value, const Labels& labels);

  bool open_metrics_;
  std::string family_, text_;
};

/// The state that a scrape shows. Counters are of this process, so that they never fall; the step is a gauge.
struct MetricsState {
  StepFacts last;  ///< step 0: none yet
  std::optional<double> val_loss = {};
  std::optional<LayerTable> layers = {};  ///< of the last step that had any
  int64_t tokens = 0, steps = 0, skipped = 0, rollbacks = 0;
  double data_wait_s = 0, exposed_s = 0;
  static constexpr std::array<double, 14> bounds = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
                                                    2.5,  5,     10,   25,  50,   100, 250};
  std::array<int64_t, bounds.size() + 1> step_counts{};  ///< by duration in seconds
  double step_seconds = 0;
  std::vector<std::pair<std::string, bool>> alerts = {};
  Telemetry telemetry = {};

  void add(const StepFacts& facts);
};

std::string metrics_text(const MetricsState& state, bool open_metrics);

}  // namespace nrl::monitor
