#include "apps/monitor/prometheus.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "core/base/error.h"

namespace nrl::monitor {
namespace {

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string escaped(std::string_view text, bool quoted) {
  std::string out;
  for (const char c : text) {
    if (c == '\\')
      out += "\\\\";
    else if (c == '\n')
      out += "\\n";
    else if (c == '"' && quoted)
      out += "\\\"";
    else
      out += c;
  }
  return out;
}

// "gpu.1.util": 1 and "util"; otherwise no number and the whole name.
std::pair<std::string, std::string_view> split_gpu(std::string_view name) {
  constexpr std::string_view prefix = "gpu.";
  const size_t dot = name.starts_with(prefix) ? name.find('.', prefix.size()) : std::string_view::npos;
  if (dot == std::string_view::npos) return {"", name};
  return {std::string(name.substr(prefix.size(), dot - prefix.size())), name.substr(dot + 1)};
}

// Counters of the system, which only rise.
bool is_counter(std::string_view name) {
  return name == "energy_joules" || name == "ecc_errors" || name == "memory_corrected_errors" ||
         name == "memory_uncorrected_errors" || name == "read_bytes" || name == "written_bytes";
}

void add_telemetry(Exposition& out, const Telemetry& t) {
  struct Sample {
    Labels labels;
    double value;
  };
  std::map<std::string, std::vector<Sample>> families;  // the samples of one must be together
  const bool nodes_differ = t.nodes.size() > 1, ranks_differ = t.ranks.size() > 1;
  for (size_t i = 0; i < t.nodes.size(); ++i)
    for (const auto& [name, value] : t.nodes[i].values) {
      const auto [gpu, field] = split_gpu(name);
      Labels labels;
      if (nodes_differ) labels.emplace_back("node", t.nodes[i].host);
      if (!gpu.empty()) labels.emplace_back("gpu", gpu);
      // Names have units in full (promtool check metrics).
      const char* const unit = field.ends_with("_per_s") ? "econd" : "";
      families[fmt::format("nrl_train_{}_{}{}", gpu.empty() ? "host" : "gpu", field, unit)].push_back(
          {labels, value});
    }
  for (const RankSample& rank : t.ranks) {
    const Labels labels = ranks_differ ? Labels{{"rank", std::to_string(rank.rank)}} : Labels{};
    families["nrl_train_rank_own_seconds"].push_back({labels, rank.own_ms * 1e-3});
    families["nrl_train_rank_waiting_seconds"].push_back({labels, rank.waiting_ms * 1e-3});
    families["nrl_train_rank_score_ratio"].push_back({labels, rank.score});
    for (const auto& [name, value] : rank.values)
      families["nrl_train_process_" + name].push_back({labels, value});
  }
  for (const auto& [family, samples] : families) {
    const size_t field = family.find('_', std::string_view("nrl_train_").size()) + 1;
    for (const Sample& sample : samples) {
      if (is_counter(std::string_view(family).substr(field)))
        out.counter(family, "Telemetry (docs/monitoring.md).", sample.value, sample.labels);
      else
        out.gauge(family, "Telemetry (docs/monitoring.md).", sample.value, sample.labels);
    }
  }
}

}  // namespace

bool wants_open_metrics(std::string_view accept) {
  return accept.find("application/openmetrics-text") != std::string_view::npos;
}

const char* metrics_type(bool open_metrics) {
  return open_metrics ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                      : "text/plain; version=0.0.4; charset=utf-8";
}

void Exposition::head(std::string_view name, std::string_view type, std::string_view help) {
  if (family_ == name) return;
  family_ = name;
  text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, escaped(help, open_metrics_), name, type);
}

void Exposition::sample(std::string_view name, double value, const Labels& labels) {
  text_ += name;
  for (size_t i = 0; i < labels.size(); ++i)
    text_ += fmt::format("{}{}=\"{}\"", i == 0 ? "{" : ",", labels[i].first, escaped(labels[i].second, true));
  if (!labels.empty()) text_ += '}';
  text_ += ' ' + number(value) + '\n';
}

void Exposition::gauge(std::string_view name, std::string_view help, double value, const Labels& labels) {
  head(name, "gauge", help);
  sample(name, value, labels);
}

void Exposition::counter(std::string_view name, std::string_view help, double value, const Labels& labels) {
  const std::string total = std::string(name) + "_total";
  // OpenMetrics names the family without the suffix.
  head(open_metrics_ ? name : std::string_view(total), "counter", help);
  sample(total, value, labels);
}

void Exposition::histogram(std::string_view name, std::string_view help, std::span<const double> bounds,
                           std::span<const int64_t> counts, double sum) {
  head(name, "histogram", help);
  const std::string base(name);
  int64_t below = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    sample(base + "_bucket", static_cast<double>(below),
           {{"le", i < bounds.size() ? number(bounds[i]) : "+Inf"}});
  }
  sample(base + "_sum", sum, {});
  sample(base + "_count", static_cast<double>(below), {});
}

std::string Exposition::text() const {
  return open_metrics_ ? text_ + "# EOF\n" : text_;
}

void MetricsState::add(const StepFacts& f) {
  const double seconds = f.step_ms * 1e-3;
  tokens += last.step > 0 ? f.tokens - last.tokens : std::llround(f.tokens_per_s * seconds);
  steps += 1;
  skipped += f.skipped ? 1 : 0;
  data_wait_s += f.data_ms * 1e-3;
  exposed_s += f.comm_ms * 1e-3;
  step_counts[static_cast<size_t>(std::lower_bound(bounds.begin(), bounds.end(), seconds) -
                                  bounds.begin())] += 1;
  step_seconds += seconds;
  last = f;
  if (f.layers) layers = f.layers;
}

std::string metrics_text(const MetricsState& s, bool open_metrics) {
  Exposition out(open_metrics);
  if (s.last.step > 0) {
    out.gauge("nrl_train_step", "Last optimizer step.", static_cast<double>(s.last.step));
    out.gauge("nrl_train_max_steps", "Steps of the whole run.", static_cast<double>(s.last.max_steps));
    out.gauge("nrl_train_loss", "Loss of the last step.", s.last.loss);
    out.gauge("nrl_train_grad_norm", "Norm of the gradients before clipping.", s.last.grad_norm);
    out.gauge("nrl_train_learning_rate", "Learning rate of the last step.", s.last.lr);
    if (s.last.loss_scale)
      out.gauge("nrl_train_loss_scale", "Loss scale of the last step.", *s.last.loss_scale);
    out.gauge("nrl_train_tokens_per_second", "Tokens per second of all ranks in the last step.",
              s.last.tokens_per_s);
    if (s.last.mfu)
      out.gauge("nrl_train_mfu_ratio", "Model FLOP/s of the last step relative to the peak.", *s.last.mfu);
    for (const Metric& metric : s.last.metrics) {
      std::string name = metric.name;
      for (char& c : name)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
      out.gauge("nrl_train_objective_" + name, "A number of the objective.", metric.value);
    }
  }
  if (s.layers)
    for (const LayerTable::Column& column : s.layers->columns)
      for (size_t l = 0; l < column.values.size(); ++l)
        if (!std::isnan(column.values[l]))
          out.gauge("nrl_train_layer_" + column.name, "Statistics of layers (docs/monitoring.md).",
                    column.values[l], {{"layer", s.layers->layers[l]}});
  if (s.val_loss) out.gauge("nrl_train_val_loss", "Loss of the last evaluation.", *s.val_loss);
  out.counter("nrl_train_tokens", "Tokens trained by this process and its peers.",
              static_cast<double>(s.tokens));
  out.counter("nrl_train_skipped_steps", "Steps whose update was not applied.",
              static_cast<double>(s.skipped));
  out.counter("nrl_train_rollbacks", "Times that the run went back to a checkpoint.",
              static_cast<double>(s.rollbacks));
  out.counter("nrl_train_data_wait_seconds", "Time in which rank 0 waited for data.", s.data_wait_s);
  out.counter("nrl_train_exposed_seconds", "Time in which rank 0 waited for communication.", s.exposed_s);
  out.histogram("nrl_train_step_seconds", "Duration of steps.", MetricsState::bounds, s.step_counts,
                s.step_seconds);
  for (const auto& [rule, fires] : s.alerts)
    out.gauge("nrl_train_alerts_firing", "1 while a rule fires.", fires ? 1 : 0, {{"rule", rule}});
  add_telemetry(out, s.telemetry);
  return out.text();
}

}  // namespace nrl::monitor
