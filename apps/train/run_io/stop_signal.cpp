#include "apps/train/run_io/stop_signal.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/base/error.h"

namespace nrl {
namespace {

constexpr int kHandled[] = {SIGUSR1, SIGTERM, SIGINT};
constexpr int kIgnored[] = {SIGPIPE, SIGCONT};

// Read and written by handlers that may run on several threads at once.
std::atomic<int> first_signal{0};
std::atomic<int> urgent_signals{0};  // of those whose second one ends the process
std::atomic<bool> term_is_urgent{true};
std::atomic<bool> installed{false};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

extern "C" void on_stop_signal(int number) {
  const int saved_errno = errno;
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
  if (number == SIGINT || (number == SIGTERM && term_is_urgent.load())) {
    if (urgent_signals.fetch_add(1) > 0) {
      static constexpr char text[] = "second stop signal: leaving at once, nothing is saved\n";
      [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, text, sizeof text - 1);
      ::_exit(128 + number);
    }
  }
  errno = saved_errno;
}

void set_action(int number, const struct sigaction* action, struct sigaction* previous) {
  if (::sigaction(number, action, previous) != 0)
    fail(Exit::internal, "cannot set the action of {}: {}", signal_name(number), std::strerror(errno));
}

}  // namespace

StopSignals::StopSignals(Term term) {
  NRL_CHECK(!installed.exchange(true), "stop signals are installed twice");
  term_is_urgent =
      term == Term::second_leaves || (term == Term::by_environment && std::getenv("SLURM_JOB_ID") == nullptr);
  first_signal = 0;
  urgent_signals = 0;
  int slot = 0;
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_stop_signal;
  for (int number : kHandled) set_action(number, &action, &previous_[slot++]);
  action.sa_handler = SIG_IGN;
  for (int number : kIgnored) set_action(number, &action, &previous_[slot++]);
}

StopSignals::~StopSignals() {
  int slot = 0;
  for (int number : kHandled) ::sigaction(number, &previous_[slot++], nullptr);
  for (int number : kIgnored) ::sigaction(number, &previous_[slot++], nullptr);
  installed = false;
}

int StopSignals::requested() {
  return first_signal.load();
}

std::string signal_name(int number) {
  switch (number) {
    case SIGUSR1:
      return "SIGUSR1";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGPIPE:
      return "SIGPIPE";
    case SIGCONT:
      return "SIGCONT";
    default:
      return fmt::format("signal {}", number);
  }
}

}  // namespace nrl
