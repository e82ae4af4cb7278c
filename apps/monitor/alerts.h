#pragma once
// Alerts of a run: built-in rules and rules of the configuration, over the numbers of steps, evaluations and
// telemetry. Nothing here has effects; rank 0 prints, writes and sends what fires.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/monitor/facts.h"
#include "apps/monitor/run_signals.h"
#include "apps/monitor/telemetry.h"
#include "core/config/alert_rule.h"
#include "core/config/config.h"
#include "core/io/json.h"

namespace nrl::monitor {

inline constexpr const char* alerts_file = "alerts.jsonl";

enum class AlertLevel : uint8_t { warning, critical };

struct Alert {
  std::string rule = {};
  AlertLevel level = AlertLevel::warning;
  int64_t step = 0;
  double time = 0;  ///< seconds since the epoch
  double value = 0, threshold = 0;
  std::string message = {};
  bool cleared = false;  ///< the end of an alert, which is neither printed as one nor sent
};

/// {"step", "time", "rule", "severity": "warning | critical | cleared", "value", "threshold", "message"}.
JsonValue to_json(const Alert& alert);
/// Throws Error(Exit::data) with the place for anything else.
Alert alert_from(const JsonValue& json);

/// One rule with its state: fires when `hold` evaluations in a row cross the threshold, is over when a value
/// is on the other side of it by a tenth, and fires again every ten minutes in between.
class AlertState {
 public:
  enum class Change : uint8_t { none, fired, cleared };
  explicit AlertState(AlertRule rule) : rule_(std::move(rule)) {}
  /// `time`: seconds. A value that is not finite changes nothing.
  Change evaluate(double value, double time);
  const AlertRule& rule() const { return rule_; }
  bool firing() const { return firing_; }

 private:
  AlertRule rule_;
  int crossed_ = 0;  // evaluations in a row
  bool firing_ = false;
  double fired_at_ = 0;
};

class Alerts {
 public:
  /// `on_gpu`: high use of the processors means nothing where they train. Rules of the configuration must
  /// parse.
  Alerts(const MonitoringConfig& config, bool on_gpu);

  /// A step; its time is facts.time.
  std::vector<Alert> step(const StepFacts& facts);
  std::vector<Alert> evaluation(const EvalFacts& facts);
  std::vector<Alert> telemetry(const Telemetry& telemetry);
  /// A finding that was made elsewhere ("memory_leak"), on this rank. Nothing if the same rule fired for it
  /// less than ten minutes ago, at this level or a higher one. `value`, `threshold`: as in Alert.
  std::vector<Alert> event(std::string_view rule, AlertLevel level, int64_t step, double time,
                           const std::string& message, int rank = 0, double value = 1, double threshold = 0);
  /// Call now and then while no step ends: fires once when none has for 10 median steps and a minute.
  std::vector<Alert> idle(double time);
  /// Bytes of a checkpoint, from which the rule `disk` follows.
  void set_checkpoint_bytes(double bytes) { checkpoint_bytes_ = bytes; }

  /// All rules, and whether they fire.
  std::vector<std::pair<std::string, bool>> states() const;

 private:
  struct Entry {
    std::string name;
    AlertLevel level;
    AlertState state;
    bool own;  // of the configuration
  };
  void add(const char* name, AlertLevel level, bool above, double threshold, int hold);
  void evaluate(std::string_view name, double value, const std::string& message, std::vector<Alert>& out);
  void evaluate_own(const Values& values, std::vector<Alert>& out);
  void evaluate(Entry& entry, double value, const std::string& message, std::vector<Alert>& out);
  void evaluate_period(std::vector<Alert>& out);

  MonitoringConfig config_;
  bool on_gpu_;
  std::vector<Entry> entries_;
  RunSignals signals_;
  int64_t step_ = 0;
  double time_ = 0, period_began_ = 0, last_step_time_ = 0;
  bool stalled_ = false;
  double checkpoint_bytes_ = 0;
  std::map<std::string, std::vector<double>, std::less<>> since_;  // of own rules, since the last evaluation
  std::map<std::string, double> ecc_;                              // first count, by GPU
  struct Fired {
    double time;
    AlertLevel level;
  };
  std::map<std::pair<std::string, int>, Fired> events_;  // the last one, by rule and rank
  std::string slowest_;                                  // rank of the last telemetry, with its notes
};

}  // namespace nrl::monitor
