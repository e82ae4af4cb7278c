#include "apps/train/launch/stop_signal.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>

#include <unistd.h>

#include "core/base/error.h"
#include "core/base/inherited_signals.h"
#include "core/base/output.h"

namespace nrl::train::stop {
namespace {

// Accessed by handlers that may run on several threads at once.
std::atomic<int> first_signal{0};
std::atomic<bool> profile_signal{false};  // SIGUSR2 since it was taken
std::atomic<int> urgent_signals{0};       // received signals of the kinds whose second one ends the process
std::atomic<bool> term_is_urgent{true};
std::atomic<int> final_code{-1};  // exit code when the work is done; -1: it is not
std::atomic<int> exit_code_now{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

extern "C" void on_exit_alarm(int) {
  ::_exit(exit_code_now.load());
}

// Async-signal-safe. The alarm ends the process if flushing blocks on a terminal that is not read.
[[noreturn]] void exit_at_once(int number) {
  const int done = final_code.load();
  exit_code_now = done >= 0 ? done : 128 + number;
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = on_exit_alarm;
  ::sigaction(SIGALRM, &action, nullptr);
  ::alarm(1);
  output::flush_in_handler(std::chrono::milliseconds(300));
  static constexpr char text[] = "second stop signal: exiting at once without saving\n";
  if (done < 0) [[maybe_unused]]
    const ssize_t ignored = ::write(STDERR_FILENO, text, sizeof text - 1);
  ::_exit(exit_code_now.load());
}

extern "C" void on_stop_signal(int number) {
  const int saved_errno = errno;
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
  const bool urgent = number == SIGINT || (number == SIGTERM && term_is_urgent.load());
  if (urgent && urgent_signals.fetch_add(1) > 0) exit_at_once(number);
  errno = saved_errno;
}

extern "C" void on_profile_signal(int) {
  profile_signal = true;
}

// Signals must not interrupt threads that compute or write: the handler of a second signal waits for output
// that the interrupted thread may be writing. Therefore a dedicated thread receives the signals; all others
// inherit the mask of the calling thread and block them. If the system cannot create the thread, signals are
// handled on any thread.
void deliver_to_dedicated_thread() {
  static std::atomic<pid_t> process{0};  // a fork() does not copy the thread
  if (process.exchange(::getpid()) == ::getpid()) return;
  sigset_t signals;
  sigemptyset(&signals);
  for (int number : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM}) sigaddset(&signals, number);
  try {
    std::thread([signals] {
      ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
      for (;;) ::pause();
    }).detach();
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  } catch (const std::system_error&) {
  }
}

void set_handler(int number, void (*handler)(int)) {
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  action.sa_handler = handler;
  if (::sigaction(number, &action, nullptr) != 0)
    fail(Exit::internal, "cannot set the handler of {}: {}", signal_name(number), std::strerror(errno));
}

bool hangup_is_ignored() {
  struct sigaction now = {};
  if (::sigaction(SIGHUP, nullptr, &now) != 0 || now.sa_handler == SIG_IGN) return true;
  return now.sa_handler != SIG_DFL && hangup_was_ignored();  // a library's handler hides it
}

}  // namespace

void handle_at_start() {
  first_signal = 0;
  urgent_signals = 0;
  profile_signal = false;
  final_code = -1;
  deliver_to_dedicated_thread();
  for (int number : {SIGPIPE, SIGXFSZ, SIGCONT}) set_handler(number, SIG_IGN);
  set_handler(SIGUSR1, on_stop_signal);
  set_handler(SIGUSR2, on_profile_signal);
  set_handler(SIGHUP, hangup_is_ignored() ? SIG_IGN : on_stop_signal);
}

void handle_in_steps(std::optional<bool> second_term_ends) {
  term_is_urgent = second_term_ends.value_or(std::getenv("SLURM_JOB_ID") == nullptr);
  set_handler(SIGINT, on_stop_signal);
  set_handler(SIGTERM, on_stop_signal);
}

void set_final_exit_code(int exit_code) {
  final_code = exit_code;
}

void end_by(int number) {
  set_handler(number, SIG_DFL);
  ::kill(::getpid(), number);
  for (;;) ::pause();
}

bool take_profile_request() {
  return profile_signal.load(std::memory_order_relaxed) && profile_signal.exchange(false);
}

int requested() {
  return first_signal.load();
}

std::string signal_name(int number) {
  switch (number) {
    case SIGUSR1:
      return "SIGUSR1";
    case SIGHUP:
      return "SIGHUP";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGPIPE:
      return "SIGPIPE";
    case SIGXFSZ:
      return "SIGXFSZ";
    case SIGCONT:
      return "SIGCONT";
    default:
      return fmt::format("signal {}", number);
  }
}

}  // namespace nrl::train::stop
