#include "core/base/fatal_signals.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/status.h"

namespace nrl::fatal_signals {
namespace {

constexpr int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
constexpr size_t stack_bytes = size_t{64} << 10;

struct sigaction before[NSIG];
std::atomic<void (*)()> the_hook{nullptr};
std::atomic<bool> seen{false}, installed{false};
alignas(64) char own_stack[stack_bytes];

extern "C" void on_fatal_signal(int number, siginfo_t* info, void*) {
  const int saved_errno = errno;
  if (!seen.exchange(true)) {
    status::Page& page = status::page();
    const bool sent = info->si_code <= 0;
    page.signal_at.store(sent ? (info->si_pid == ::getpid() ? 0 : static_cast<uint64_t>(info->si_pid))
                              : reinterpret_cast<uint64_t>(info->si_addr),  // NOLINT: an address
                         std::memory_order_relaxed);
    page.signal_sent.store(sent ? 1 : 0, std::memory_order_relaxed);
    page.signal.store(number, std::memory_order_release);
    if (const auto hook = the_hook.load()) hook();
  }
  // The instruction that failed runs again, or the signal is sent again, with the action from before.
  ::sigaction(number, &before[number], nullptr);
  if (info->si_code <= 0) ::syscall(SYS_tgkill, ::getpid(), ::syscall(SYS_gettid), number);
  errno = saved_errno;
}

}  // namespace

void install() {
  if (installed.exchange(true)) return;
  stack_t now{};
  if (::sigaltstack(nullptr, &now) == 0 && (now.ss_flags & SS_DISABLE) != 0) {
    stack_t own{};
    own.ss_sp = own_stack;
    own.ss_size = sizeof own_stack;
    ::sigaltstack(&own, nullptr);
  }
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = on_fatal_signal;
  for (const int number : numbers) ::sigaction(number, &action, &before[number]);
}

void set_hook(void (*hook)()) {
  the_hook = hook;
}

Name name_of(int signal) {
  Name name{};
  const char* known = sigabbrev_np(signal);
  std::snprintf(name.text, sizeof name.text, "SIG%s", known ? known : "NAL");
  return name;
}

Text describe(int signal, bool sent, uint64_t at) {
  Text text{};
  const Name name = name_of(signal);
  if (!sent)
    std::snprintf(text.text, sizeof text.text, "signal %d (%s), address 0x%llx", signal, name.text,
                  static_cast<unsigned long long>(at));
  else if (at != 0)
    std::snprintf(text.text, sizeof text.text, "signal %d (%s) of process %llu", signal, name.text,
                  static_cast<unsigned long long>(at));
  else
    std::snprintf(text.text, sizeof text.text, "signal %d (%s)", signal, name.text);
  return text;
}

}  // namespace nrl::fatal_signals
