#include "apps/monitor/alerts.h"

#include <algorithm>
#include <cmath>

#include "apps/monitor/layers.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::monitor {
namespace {

constexpr double repeat_s = 600;
constexpr double clear_margin = 0.1;  // of the threshold
constexpr double most_data_wait = 0.1, spike_deviations = 8, explosion_factor = 10;
// A test at every few hundred steps of a long run is right once in a thousand: z of p = 0.001, one side.
constexpr double trend_z = 3.09, least_trend = 0.02;
constexpr double stall_medians = 10, stall_s = 60;

std::string_view name_of(const Alert& alert) {
  if (alert.cleared) return "cleared";
  return alert.level == AlertLevel::critical ? "critical" : "warning";
}

}  // namespace

JsonValue to_json(const Alert& a) {
  return JsonValue::object({{"step", a.step},
                            {"time", a.time},
                            {"rule", a.rule},
                            {"severity", name_of(a)},
                            {"value", a.value},
                            {"threshold", a.threshold},
                            {"message", a.message}});
}

Alert alert_from(const JsonValue& json) {
  const std::string& severity = json.get_string("severity");
  if (severity != "warning" && severity != "critical" && severity != "cleared")
    fail(Exit::data, "{}severity is '{}'; expected warning, critical or cleared", json.where(),
         clipped(severity));
  return {.rule = json.get_string("rule"),
          .level = severity == "critical" ? AlertLevel::critical : AlertLevel::warning,
          .step = json.get_int("step"),
          .time = json.get_double("time"),
          .value = json.get_double("value", NAN),
          .threshold = json.get_double("threshold", NAN),
          .message = json.get_string("message"),
          .cleared = severity == "cleared"};
}

AlertState::Change AlertState::evaluate(double value, double time) {
  if (!std::isfinite(value)) return Change::none;
  const double margin = clear_margin * std::abs(rule_.threshold);
  const bool crosses = rule_.above ? value > rule_.threshold : value < rule_.threshold;
  const bool clear = rule_.above ? value <= rule_.threshold - margin : value >= rule_.threshold + margin;
  crossed_ = crosses ? crossed_ + 1 : 0;
  if (firing_ && clear) {
    firing_ = false;
    return Change::cleared;
  }
  const bool due = firing_ ? time - fired_at_ >= repeat_s : crossed_ >= rule_.hold;
  if (!crosses || !due) return Change::none;
  firing_ = true;
  fired_at_ = time;
  return Change::fired;
}

Alerts::Alerts(const MonitoringConfig& config, bool on_gpu) : config_(config), on_gpu_(on_gpu) {
  constexpr auto warning = AlertLevel::warning, critical = AlertLevel::critical;
  const AlertThresholds& limits = config.alerting.thresholds;
  add("non_finite", critical, true, 0.5, 1);
  // The stability guard raises these itself (monitoring.stability.on_instability).
  if (config.stability.on_instability == OnInstability::off) {
    add("loss_spike", warning, true, spike_deviations, 1);
    add("gradient_explosion", warning, true, explosion_factor, 1);
  }
  add("loss_increase", warning, true, limits.loss_increase, 3);
  add("val_loss_increase", warning, true, limits.loss_increase, 1);
  add("training_speed", critical, false, limits.training_speed, 3);
  add("slower", warning, false, std::max(0.7, limits.training_speed), 3);
  add("data_wait", warning, true, most_data_wait, 3);
  add("gpu_memory", warning, true, limits.gpu_memory, 3);
  if (on_gpu) add("cpu_usage", warning, true, limits.cpu_usage, 3);
  add("straggler", warning, false, slower_score, 3);
  add("throttled", warning, true, 0.5, 3);
  add("ecc_errors", critical, true, 0, 1);
  add("disk", critical, false, 2, 1);
  add("no_step", critical, true, stall_medians, 1);
  if (config.analysis.trend_analysis) {
    add("loss_trend", warning, true, trend_z, 1);
    add("speed_trend", warning, false, -trend_z, 1);
  }
  if (config.analysis.anomaly_detection)
    for (const char* name : {"loss_anomaly", "grad_norm_anomaly", "step_ms_anomaly"})
      add(name, warning, true, config.analysis.anomaly_z, 3);
  for (const std::string& text : config.alerting.rules) {
    const ParsedAlertRule parsed = parse_alert_rule(text);
    NRL_CHECK(parsed.problem.empty(), "{}", parsed.problem);
    entries_.push_back({text, warning, AlertState(parsed.rule), true});
  }
}

void Alerts::add(const char* name, AlertLevel level, bool above, double threshold, int hold) {
  entries_.push_back({name, level,
                      AlertState({.metric = name, .above = above, .threshold = threshold, .hold = hold}),
                      false});
}

void Alerts::evaluate(Entry& entry, double value, const std::string& message, std::vector<Alert>& out) {
  const AlertState::Change change = entry.state.evaluate(value, time_);
  if (change == AlertState::Change::none) return;
  const bool cleared = change == AlertState::Change::cleared;
  out.push_back({.rule = entry.name,
                 .level = entry.level,
                 .step = step_,
                 .time = time_,
                 .value = value,
                 .threshold = entry.state.rule().threshold,
                 .message = cleared ? fmt::format("{} is over", entry.name) : message,
                 .cleared = cleared});
}

void Alerts::evaluate(std::string_view name, double value, const std::string& message,
                      std::vector<Alert>& out) {
  for (Entry& entry : entries_)
    if (!entry.own && entry.name == name) evaluate(entry, value, message, out);
}

void Alerts::evaluate_own(const Values& values, std::vector<Alert>& out) {
  for (Entry& entry : entries_) {
    if (!entry.own) continue;
    for (const auto& [name, value] : values)
      if (name == entry.state.rule().metric)
        evaluate(entry, value, fmt::format("{} is {:.5g}; rule: {}", name, value, entry.name), out);
  }
}

std::vector<Alert> Alerts::step(const StepFacts& f) {
  std::vector<Alert> out;
  step_ = f.step;
  time_ = last_step_time_ = f.time;
  if (period_began_ == 0) period_began_ = time_;
  if (std::exchange(stalled_, false)) evaluate("no_step", 0, "", out);
  const RunSignals::AtStep now = signals_.add(f);
  // With a loss scale some steps overflow by design.
  if (!f.loss_scale)
    evaluate("non_finite", f.skipped && !f.limited ? 1 : 0,
             "non_finite: gradients were not finite; the step was skipped", out);
  if (now.spike)
    evaluate("loss_spike", *now.spike,
             fmt::format("loss_spike: loss {:.4f}, {:.1f} deviations above the trend of the last 100 steps",
                         f.loss, *now.spike),
             out);
  if (now.explosion)
    evaluate(
        "gradient_explosion", *now.explosion,
        fmt::format("gradient_explosion: norm {:.4g}, {:.1f} times its median", f.grad_norm, *now.explosion),
        out);
  for (const auto& [name, z] :
       {std::pair("loss", now.loss_z), {"grad_norm", now.grad_norm_z}, {"step_ms", now.step_ms_z}})
    if (z)
      evaluate(
          fmt::format("{}_anomaly", name), std::abs(*z),
          fmt::format("{0}_anomaly: {0} is {1:.1f} deviations off its trend, in 3 steps in a row", name, *z),
          out);
  const auto note = [&](const char* name, double value) {
    if (const auto found = since_.find(name); found != since_.end()) found->second.push_back(value);
  };
  if (since_.empty())
    for (const Entry& entry : entries_)
      if (entry.own) since_[entry.state.rule().metric];
  if (!since_.empty()) {
    note("train/loss", f.loss);
    note("train/grad_norm", f.grad_norm);
    note("train/lr", f.lr);
    note("train/skipped", f.skipped ? 1 : 0);
    note("train/tokens", static_cast<double>(f.tokens));
    if (f.loss_scale) note("train/loss_scale", *f.loss_scale);
    if (f.router) {
      note("train/expert_load", f.router->load);
      if (f.router->aux_loss) note("train/router_aux_loss", *f.router->aux_loss);
    }
    for (const Metric& metric : f.metrics) note(("train/" + metric.name).c_str(), metric.value);
    if (f.layers)
      for (const auto& [name, value] : flat(*f.layers)) note(name.c_str(), value);
    note("perf/tokens_per_s", f.tokens_per_s);
    if (f.mfu) note("perf/mfu", *f.mfu);
    note("perf/step_ms", f.step_ms);
    note("perf/data_ms", f.data_ms);
    note("perf/exposed_ms", f.comm_ms);
    note("perf/gemm_ms", f.gemm_ms);
    note("perf/attention_ms", f.attention_ms);
  }
  if (time_ - period_began_ >= config_.interval) evaluate_period(out);
  return out;
}

// The end of an interval: rules about the median of its steps.
void Alerts::evaluate_period(std::vector<Alert>& out) {
  period_began_ = time_;
  const RunSignals::Period p = signals_.period();
  Values own;
  if (p.loss_increase) {
    own.emplace_back("perf/loss_increase", *p.loss_increase);
    evaluate("loss_increase", *p.loss_increase,
             fmt::format("loss_increase: the median of 50 losses is {:.1f} % above the best one",
                         100 * *p.loss_increase),
             out);
  }
  if (p.speed) {
    own.emplace_back("perf/speed", *p.speed);
    const std::string text = fmt::format(
        "{} tokens/s; {:.2f} of the {} of steps 10 to 50{}", grouped(std::llround(p.tokens_per_s)), *p.speed,
        grouped(std::llround(p.baseline)), slowest_.empty() ? "" : ". " + slowest_);
    evaluate("training_speed", *p.speed, "training_speed: " + text, out);
    evaluate("slower", *p.speed, "slower: " + text, out);
  }
  if (p.data_wait) {
    own.emplace_back("perf/data_wait", *p.data_wait);
    evaluate("data_wait", *p.data_wait,
             fmt::format("data_wait: {:.0f} % of the time of steps was spent waiting for data",
                         100 * *p.data_wait),
             out);
  }
  const auto trend = [&](const char* rule, const std::optional<Trend>& t, const char* text) {
    if (!t) return;
    const double z = std::abs(t->change) >= least_trend ? t->z : 0;
    evaluate(rule, z, fmt::format("{}: {} by {:.1f} % over 200 steps", rule, text, 100 * std::abs(t->change)),
             out);
  };
  trend("loss_trend", p.loss, "the loss rose");
  trend("speed_trend", p.tokens, "tokens/s fell");
  for (auto& [name, values] : since_)
    if (!values.empty()) own.emplace_back(name, median_of(std::exchange(values, {})));
  evaluate_own(own, out);
}

std::vector<Alert> Alerts::evaluation(const EvalFacts& f) {
  std::vector<Alert> out;
  step_ = f.step;
  time_ = last_step_time_ = f.time;
  Values own;
  for (const auto& [name, loss] : f.losses) own.emplace_back("validation/" + name, loss);
  for (const Metric& metric : f.metrics) own.emplace_back("validation/" + metric.name, metric.value);
  if (!f.losses.empty() && std::isfinite(f.losses.front().second)) {
    const double loss = f.losses.front().second, rise = signals_.validation(loss);
    evaluate("val_loss_increase", rise,
             fmt::format("val_loss_increase: validation loss {:.4f} is {:.1f} % above the best one", loss,
                         100 * rise),
             out);
  }
  evaluate_own(own, out);
  return out;
}

std::vector<Alert> Alerts::telemetry(const Telemetry& t) {
  std::vector<Alert> out;
  time_ = t.time;
  std::optional<double> cpu, gpu, throttled, free;
  double ecc = 0;
  const auto most = [](std::optional<double>& sum, double value) {
    sum = std::max(sum.value_or(value), value);
  };
  std::string gpu_name, notes;
  for (size_t i = 0; i < t.nodes.size(); ++i) {
    const NodeSample& node = t.nodes[i];
    std::map<std::string, double, std::less<>> values(node.values.begin(), node.values.end());
    for (const auto& [name, value] : node.values) {
      if (name == "cpu") most(cpu, value);
      if (name == "disk_free_bytes") free = std::min(free.value_or(value), value);
      if (!name.starts_with("gpu.")) continue;
      if (name.ends_with(".throttled")) most(throttled, value);
      if (name.ends_with(".ecc_errors")) {
        const double first = ecc_.emplace(fmt::format("{}.{}", i, name), value).first->second;
        ecc = std::max(ecc, value - first);
      }
      constexpr std::string_view used = ".mem_bytes";
      if (!name.ends_with(used)) continue;
      const auto total = values.find(name.substr(0, name.size() - used.size()) + ".mem_total_bytes");
      if (total == values.end() || total->second <= 0) continue;
      if (!gpu || value / total->second > *gpu)
        gpu_name = fmt::format("{} of {}", name.substr(0, name.size() - used.size()), node.host);
      most(gpu, value / total->second);
    }
    for (const std::string& note : node.notes)
      notes += fmt::format("{}{}, {}", notes.empty() ? "" : "; ", node.host, note);
  }
  slowest_.clear();
  if (t.ranks.size() > 1) {
    const RankSample& rank =
        *std::min_element(t.ranks.begin(), t.ranks.end(),
                          [](const RankSample& a, const RankSample& b) { return a.score < b.score; });
    const size_t node = static_cast<size_t>(rank.node);
    const std::string text =
        fmt::format("rank {}{} needs {:.1f} ms of its own per step, {:.2f} times the fastest", rank.rank,
                    node < t.nodes.size() ? fmt::format(" ({})", t.nodes[node].host) : "", rank.own_ms,
                    rank.score > 0 ? 1 / rank.score : 0);
    if (rank.score < slow_score) slowest_ = text + (notes.empty() ? "" : "; " + notes);
    evaluate("straggler", rank.score, "straggler: " + text, out);
  }
  if (cpu)
    evaluate("cpu_usage", *cpu,
             fmt::format("cpu_usage: {:.0f} % of the processors of a node are busy", 100 * *cpu), out);
  if (gpu)
    evaluate("gpu_memory", *gpu, fmt::format("gpu_memory: {:.1f} % of {} is in use", 100 * *gpu, gpu_name),
             out);
  if (throttled) evaluate("throttled", *throttled, "throttled: " + notes, out);
  if (!ecc_.empty())
    evaluate("ecc_errors", ecc,
             fmt::format("ecc_errors: {:.0f} uncorrected errors of GPU memory since the start", ecc), out);
  if (free && checkpoint_bytes_ > 0)
    evaluate(
        "disk", *free / checkpoint_bytes_,
        fmt::format("disk: {} are free, and a checkpoint has {}", human_bytes(static_cast<uint64_t>(*free)),
                    human_bytes(static_cast<uint64_t>(checkpoint_bytes_))),
        out);
  evaluate_own(flat(t), out);
  return out;
}

std::vector<Alert> Alerts::event(std::string_view rule, AlertLevel level, int64_t step, double time,
                                 const std::string& message, int rank, double value, double threshold) {
  const auto [last, first] = events_.emplace(std::pair(std::string(rule), rank), Fired{time, level});
  if (!first && time - last->second.time < repeat_s && level <= last->second.level) return {};
  last->second = {time, level};
  return {{.rule = std::string(rule),
           .level = level,
           .step = step,
           .time = time,
           .value = value,
           .threshold = threshold,
           .message = fmt::format("{}: {}", rule, message)}};
}

std::vector<Alert> Alerts::idle(double time) {
  std::vector<Alert> out;
  const auto usual = signals_.step_seconds();
  const double waited = time - last_step_time_;
  if (!usual || stalled_ || waited < stall_s || waited < stall_medians * *usual) return out;
  stalled_ = true;
  time_ = time;
  evaluate(
      "no_step", waited / std::max(*usual, 1e-9),
      fmt::format("no_step: no step has ended for {}; they take {:.2f} s", human_duration(waited), *usual),
      out);
  return out;
}

std::vector<std::pair<std::string, bool>> Alerts::states() const {
  std::vector<std::pair<std::string, bool>> out;
  for (const Entry& entry : entries_) out.emplace_back(entry.name, entry.state.firing());
  return out;
}

}  // namespace nrl::monitor
