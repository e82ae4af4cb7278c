#include "apps/monitor/notify.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/spawn.h"
#include "core/base/threads.h"
#include "core/io/http_post.h"

namespace nrl::monitor {
namespace {

constexpr size_t most_waiting = 64;
constexpr size_t longest_answer = size_t{1} << 20;  // of a webhook

std::string_view level_text(const Alert& alert) {
  return alert.level == AlertLevel::critical ? "critical" : "warning";
}

}  // namespace

struct Notifier::State {
  explicit State(Options o) : options(std::move(o)) {}

  void send(const Alert& alert) {
    JsonValue json = to_json(alert);
    json.set("text",
             fmt::format("{}: {} (step {}, {})", level_text(alert), alert.message, alert.step, options.run));
    json.set("run", options.run);
    if (options.command) {
      std::vector<std::string> environment =
          inherited({"HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER"});
      for (std::string variable :
           {"NRL_ALERT_RULE=" + alert.rule, fmt::format("NRL_ALERT_SEVERITY={}", level_text(alert)),
            fmt::format("NRL_ALERT_VALUE={:g}", alert.value),
            fmt::format("NRL_ALERT_THRESHOLD={:g}", alert.threshold),
            fmt::format("NRL_ALERT_STEP={}", alert.step), "NRL_ALERT_MESSAGE=" + alert.message,
            "NRL_ALERT_RUN=" + options.run})
        environment.push_back(std::move(variable));
      report("monitoring.alerting.command", command_failed,
             run_program({"/bin/sh", "-c", *options.command}, json.dump() + "\n", environment,
                         options.command_s));
    }
    if (options.webhook)
      report("monitoring.alerting.webhook", webhook_failed,
             http_post(*options.webhook, json.dump(), options.webhook_s, longest_answer).problem);
  }

  void report(const char* key, bool& failed, const std::string& problem) {
    if (!problem.empty() && !failed && options.warn)
      options.warn(fmt::format("{}: an alert was not sent: {}; training continues", key, problem));
    failed = !problem.empty();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stop || !waiting.empty(); });
      if (waiting.empty()) break;
      const Alert alert = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      send(alert);
      lock.lock();
    }
    done = true;
    changed.notify_all();
  }

  const Options options;
  bool command_failed = false, webhook_failed = false;  // of the thread
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Alert> waiting;
  bool stop = false, done = false;
};

Notifier::Notifier(Options options) : state_(std::make_shared<State>(std::move(options))) {}

void Notifier::send(const Alert& alert) {
  if (!state_->options.command && !state_->options.webhook) return;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->waiting.size() >= most_waiting) state_->waiting.pop_front();
    state_->waiting.push_back(alert);
  }
  state_->changed.notify_all();
  if (state_->thread.joinable()) return;
  const BlockedSignals blocked;
  state_->thread = start_thread([state = state_] { state->run(); });
}

Notifier::~Notifier() {
  if (!state_->thread.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const std::chrono::duration<double> patience(state_->options.last_s);
  const bool done = state_->changed.wait_for(lock, patience, [&] { return state_->done; });
  state_->waiting.clear();
  lock.unlock();
  if (done) {
    state_->thread.join();
  } else {
    state_->thread.detach();
  }
}

}  // namespace nrl::monitor
