#pragma once
// Rules of monitoring.alerting.rules: "perf/tokens_per_s < 1000 for 5".

#include <string>
#include <string_view>

namespace nrl {

struct AlertRule {
  std::string metric = {};  ///< as sinks name it: "train/loss", "node.0.cpu"
  bool above = false;       ///< fires above the threshold; else below it
  double threshold = 0;
  int hold = 3;  ///< evaluations in a row
};

/// A rule, or what is wrong with the text: "at character 20: expected a number".
struct ParsedAlertRule {
  AlertRule rule = {};
  std::string problem = {};
};

/// METRIC ("<" | ">") NUMBER ["for" COUNT]. A metric that is nearly a name that every run has is a typo;
/// objectives and telemetry have further names below their prefixes.
ParsedAlertRule parse_alert_rule(std::string_view text);

}  // namespace nrl
