#include "apps/monitor/live.h"

#include <chrono>
#include <limits>
#include <utility>

#include "apps/monitor/chart.h"
#include "apps/monitor/timers.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/threads.h"
#include "core/io/atomic_file.h"
#include "core/io/http_post.h"

namespace nrl::monitor {
namespace {

constexpr double page_refresh_s = 10, look_s = 1;

}  // namespace

std::unique_ptr<Live> Live::open(const Config& config, Place place, Show show) {
  const MonitoringConfig& m = config.monitoring;
  const bool views =
      m.enabled && (m.alerting.enabled || m.visualization.serves() || m.visualization.textfile);
  if (!config.logger.monitor_gpus && !(views && place.rank == 0)) return nullptr;
  return std::unique_ptr<Live>(new Live(config, std::move(place), std::move(show)));
}

Live::Live(const Config& config, Place place, Show show)
    : config_(config), place_(std::move(place)), show_(std::move(show)) {
  const MonitoringConfig& m = config.monitoring;
  const std::string& log_dir = config.logger.log_dir;
  if (config.logger.monitor_gpus) {
    process_.emplace("");
    next_write_ = steady_seconds() + config.logger.gpu_monitoring.flush_interval;
    if (place_.first_of_node)
      guarded([&] {
        sampler_ = std::make_unique<NodeSampler>(NodeSampler::Options{
            .interval = config.logger.gpu_monitoring.collection_interval,
            .gpus = place_.gpus,
            .host = place_.host,
            .directory = config.checkpointing.enabled ? config.checkpointing.checkpoint_dir : ""});
      });
    if (first()) guarded([&] { telemetry_log_.emplace(log_dir, place_.step, true, telemetry_file); });
  }
  gather_interval_ = sampler_                          ? config.logger.gpu_monitoring.collection_interval
                     : m.enabled && m.alerting.enabled ? m.interval
                                                       : std::numeric_limits<double>::infinity();
  next_gathering_ = steady_seconds() + gather_interval_;
  if (!first() || !m.enabled) return;
  if (m.alerting.enabled) {
    alerts_.emplace(m, place_.on_gpu);
    state_.alerts = alerts_->states();
    guarded([&] { alerts_log_.emplace(log_dir, place_.step, true, alerts_file); });
    std::optional<std::string> webhook = m.alerting.webhook;
    if (webhook) webhook = url_named(*webhook, "monitoring.alerting.webhook");
    notifier_.emplace(Notifier::Options{.command = m.alerting.command,
                                        .webhook = std::move(webhook),
                                        .run = log_dir,
                                        .warn = [](const std::string& text) { log::warn("{}", text); }});
  }
  if (m.visualization.serves()) guarded([&] { serve(); });
  if (!m.alerting.enabled && !m.visualization.textfile) return;
  guarded([&] {
    const BlockedSignals blocked;
    thread_ = start_thread([this] { run(); });
  });
}

Live::~Live() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  write_telemetry(true);
}

template <class F>
void Live::guarded(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    show_.warn(e.what());
  }
}

void Live::serve() {
  const VisualizationConfig& v = config_.monitoring.visualization;
  std::vector<HttpServer::Route> routes;
  if (v.prometheus)
    routes.push_back({"/metrics", [this](const std::string& accept) {
                        const bool open_metrics = wants_open_metrics(accept);
                        const std::lock_guard lock(mutex_);
                        return HttpReply{metrics_text(state_, open_metrics), metrics_type(open_metrics)};
                      }});
  if (v.dashboard) {
    routes.push_back({"/", [this](const std::string&) { return page(); }});
    routes.push_back(
        {"/api/row", [this](const std::string&) {
           const std::lock_guard lock(mutex_);
           return HttpReply{state_.last.step > 0 ? step_row(state_.last).dump() : "{}", "application/json"};
         }});
  }
  server_ = open_http_server(v.bind, static_cast<int>(v.port), std::move(routes));
  const int port = server_->port();
  if (v.port != 0 && port != v.port)
    show_.warn(fmt::format("port {} is busy; the server of this run listens at port {}", v.port, port));
  const bool everywhere = v.bind == "0.0.0.0" || v.bind == "::";
  const std::string target = fmt::format("{}:{}", everywhere ? place_.host : v.bind, port);
  show_.note(fmt::format("live views at http://{}{}", target, v.dashboard ? "/" : "/metrics"));
  if (!v.prometheus) return;
  const JsonValue entry =
      JsonValue::object({{"targets", JsonValue::array({target})},
                         {"labels", JsonValue::object({{"run", config_.logger.log_dir}})}});
  write_file_atomic(join_path(config_.logger.log_dir, target_file), JsonValue::array({entry}).dump() + "\n",
                    Durable::no);
}

// The page of nrl-train report. It reads the whole metrics.jsonl, so it is kept for some seconds.
HttpReply Live::page() {
  {
    const std::lock_guard lock(mutex_);
    if (!page_.body.empty() && steady_seconds() - page_time_ < page_refresh_s) return page_;
  }
  HttpReply reply{"", "text/html; charset=utf-8"};
  try {
    const RunHistory history = load_history(config_.logger.log_dir);
    reply.body = html_report(std::span(&history, 1));
    const std::string refresh = fmt::format("<meta http-equiv=\"refresh\" content=\"{:g}\">", page_refresh_s);
    if (const size_t head = reply.body.find("<head>"); head != std::string::npos)
      reply.body.insert(head + std::string_view("<head>").size(), refresh);
  } catch (const Error& e) {
    return {e.what() + std::string("\n"), "text/plain; charset=utf-8"};
  }
  const std::lock_guard lock(mutex_);
  page_ = reply;
  page_time_ = steady_seconds();
  return reply;
}

void Live::work(double own, double waiting) {
  own_ += own;
  waiting_ += waiting;
  steps_ += 1;
}

std::string Live::contribution(double now) {
  const double steps = static_cast<double>(std::max<int64_t>(steps_, 1));
  const RankSample rank{.rank = place_.rank,
                        .node = place_.node,
                        .own_ms = own_ * 1e3 / steps,
                        .waiting_ms = waiting_ * 1e3 / steps,
                        .values = process_ ? process_->process() : Values{}};
  own_ = waiting_ = 0;
  steps_ = 0;
  next_gathering_ = now + gather_interval_;
  if (!sampler_) return monitor::contribution(rank, nullptr);
  const NodeSample node = sampler_->latest();
  return monitor::contribution(rank, &node);
}

void Live::gathered(int64_t step, double time, std::span<const std::string> contributions) {
  if (!first() || !config_.logger.monitor_gpus) return;
  Telemetry telemetry = joined_telemetry(step, time, contributions);
  unwritten_.push_back(to_json(telemetry));
  write_telemetry(false);
  std::vector<Alert> alerts;
  {
    const std::lock_guard lock(mutex_);
    if (alerts_) {
      alerts = alerts_->telemetry(telemetry);
      state_.alerts = alerts_->states();
    }
    state_.telemetry = std::move(telemetry);
  }
  raise(alerts, true);
}

void Live::write_telemetry(bool now) {
  if (!now && steady_seconds() < next_write_) return;
  next_write_ = steady_seconds() + config_.logger.gpu_monitoring.flush_interval;
  guarded([&] {
    for (const JsonValue& row : std::exchange(unwritten_, {}))
      if (telemetry_log_) telemetry_log_->append(row);
  });
}

void Live::step(const StepFacts& facts) {
  if (!first()) return;
  std::vector<Alert> alerts;
  {
    const std::lock_guard lock(mutex_);
    paused_ = false;
    state_.add(facts);
    if (alerts_) alerts = alerts_->step(facts);
    if (!alerts.empty()) state_.alerts = alerts_->states();
  }
  raise(alerts, true);
}

void Live::evaluation(const EvalFacts& facts) {
  if (!first()) return;
  std::vector<Alert> alerts;
  {
    const std::lock_guard lock(mutex_);
    if (!facts.losses.empty()) state_.val_loss = facts.losses.front().second;
    if (alerts_) alerts = alerts_->evaluation(facts);
    if (!alerts.empty()) state_.alerts = alerts_->states();
  }
  raise(alerts, true);
}

void Live::event(std::string_view rule, AlertLevel level, int64_t step, const std::string& message) {
  std::vector<Alert> alerts;
  {
    const std::lock_guard lock(mutex_);
    if (alerts_) alerts = alerts_->event(rule, level, step, wall_seconds(), message);
  }
  raise(alerts, true);
}

void Live::leak(int64_t step, int rank, const std::string& host, const Leak& leak) {
  const bool critical = leak.growth >= Leak::high;
  const std::string text = rank == 0 ? leak.text : fmt::format("rank {} ({}): {}", rank, host, leak.text);
  std::vector<Alert> alerts;
  {
    const std::lock_guard lock(mutex_);
    if (alerts_)
      alerts = alerts_->event("memory_leak", critical ? AlertLevel::critical : AlertLevel::warning, step,
                              wall_seconds(), text, rank, static_cast<double>(leak.growth) * 1e-6,
                              static_cast<double>(Leak::high) * 1e-6);
  }
  raise(alerts, true);
}

void Live::rolled_back(int64_t from, const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    state_.rollbacks += 1;
  }
  event("rollback", AlertLevel::critical, from, message);
}

void Live::checkpoint(double bytes) {
  const std::lock_guard lock(mutex_);
  if (alerts_) alerts_->set_checkpoint_bytes(bytes);
}

void Live::pause() {
  const std::lock_guard lock(mutex_);
  paused_ = true;
}

// The terminal belongs to the training thread: other threads warn.
void Live::raise(const std::vector<Alert>& alerts, bool in_training_thread) {
  for (const Alert& alert : alerts) {
    if (in_training_thread)
      show_.alert(alert);
    else
      log::warn("alert: {}", alert.message);
    const std::lock_guard lock(raising_);
    try {
      if (notifier_ && !alert.cleared) notifier_->send(alert);
      if (alerts_log_) alerts_log_->append(to_json(alert));
    } catch (const Error& e) {
      log::warn("{}", e.what());
    }
  }
}

void Live::run() {
  const std::optional<std::string>& textfile = config_.monitoring.visualization.textfile;
  double next_text = 0;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, std::chrono::duration<double>(look_s), [&] { return stop_; });
    if (alerts_ && !paused_ && !stop_) {
      const std::vector<Alert> alerts = alerts_->idle(wall_seconds());
      if (!alerts.empty()) {
        state_.alerts = alerts_->states();
        raise(alerts, false);
      }
    }
    if (!textfile || failed_ || (!stop_ && steady_seconds() < next_text)) continue;
    next_text = steady_seconds() + config_.monitoring.interval;
    const std::string text = metrics_text(state_, false);
    lock.unlock();
    bool failed = false;
    try {
      write_file_atomic(*textfile, text, Durable::no);
    } catch (const Error& e) {
      failed = true;
      log::warn("monitoring.visualization.textfile: {}; it is not written any more", e.what());
    }
    lock.lock();
    failed_ = failed;
  }
}

}  // namespace nrl::monitor
