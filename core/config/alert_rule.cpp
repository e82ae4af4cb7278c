#include "core/config/alert_rule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include <spdlog/fmt/fmt.h>

#include "core/base/text.h"

namespace nrl {
namespace {

constexpr int most_evaluations = 10000;

constexpr std::array<std::string_view, 19> names = {
    "train/loss",          "train/grad_norm",   "train/lr",          "train/loss_scale",
    "train/skipped",       "train/tokens",      "train/expert_load", "train/router_aux_loss",
    "validation/val_loss", "perf/tokens_per_s", "perf/mfu",          "perf/step_ms",
    "perf/data_ms",        "perf/exposed_ms",   "perf/gemm_ms",      "perf/attention_ms",
    "perf/loss_increase",  "perf/speed",        "perf/data_wait"};
constexpr std::array<std::string_view, 5> prefixes = {"train/", "validation/", "layers/", "node.", "rank."};

struct Reader {
  std::string_view text;
  size_t at = 0;

  std::string_view word() {
    at = std::min(text.find_first_not_of(" \t", at), text.size());
    const size_t begin = at;
    // An operator ends a name without a blank.
    if (begin < text.size() && (text[begin] == '<' || text[begin] == '>')) return text.substr(at++, 1);
    at = std::min(text.find_first_of(" \t<>", begin), text.size());
    return text.substr(begin, at - begin);
  }
  ParsedAlertRule wrong(std::string_view word, std::string_view expected) const {
    return {{}, fmt::format("at character {}: {}", at - word.size() + 1, expected)};
  }
};

template <class T>
bool reads(std::string_view word, T& value) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size() && !word.empty();
}

}  // namespace

ParsedAlertRule parse_alert_rule(std::string_view text) {
  Reader in{text};
  AlertRule rule;
  const std::string_view metric = in.word();
  if (metric.empty() || metric == "<" || metric == ">")
    return in.wrong(metric, "expected the name of a metric");
  if (std::find(names.begin(), names.end(), metric) == names.end()) {
    const std::string_view near = nearest(metric, names);
    const bool open = std::any_of(prefixes.begin(), prefixes.end(),
                                  [&](std::string_view prefix) { return metric.starts_with(prefix); });
    if (!near.empty() || !open)
      return in.wrong(metric,
                      fmt::format("unknown metric '{}'{}", clipped(metric, 60),
                                  near.empty() ? "; expected a name such as train/loss, perf/tokens_per_s "
                                                 "or node.0.cpu"
                                               : did_you_mean(near, "; ")));
  }
  rule.metric = metric;
  const std::string_view compare = in.word();
  if (compare != "<" && compare != ">") return in.wrong(compare, "expected '<' or '>'");
  rule.above = compare == ">";
  const std::string_view number = in.word();
  if (!reads(number, rule.threshold) || !std::isfinite(rule.threshold))
    return in.wrong(number, "expected a number");
  const std::string_view unit = in.word();
  if (!unit.empty()) {
    if (unit != "for") return in.wrong(unit, "expected 'for N' or the end");
    const std::string_view count = in.word();
    if (!reads(count, rule.hold) || rule.hold < 1 || rule.hold > most_evaluations)
      return in.wrong(count, fmt::format("expected a number of evaluations from 1 to {}", most_evaluations));
    if (const std::string_view rest = in.word(); !rest.empty()) return in.wrong(rest, "expected the end");
  }
  return {rule};
}

}  // namespace nrl
