#pragma once
// Sends alerts away from the run: to a command and a webhook, from a thread of its own.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "apps/monitor/alerts.h"

namespace nrl::monitor {

class Notifier {
 public:
  struct Options {
    std::optional<std::string>
        command;  ///< for sh -c; the alert is in its environment and, as JSON, its input
    std::optional<std::string> webhook = {};  ///< URL
    std::string run = {};                     ///< NRL_ALERT_RUN, "run": the log directory
    double command_s = 10, webhook_s = 5;     ///< limits
    double last_s = 15;                       ///< that the destructor waits for what is queued
    /// Gets one line for a command or webhook that fails; called in the notifier's thread, and at most once
    /// for each until it has succeeded again.
    std::function<void(const std::string&)> warn = {};
  };
  /// Starts nothing: the thread is started by the first alert.
  explicit Notifier(Options options);
  ~Notifier();
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  /// Returns immediately. Alerts are sent one after the other; of more than 64 that wait the oldest are left
  /// out.
  void send(const Alert& alert);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nrl::monitor
