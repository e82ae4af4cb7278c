#include "core/base/inherited_signals.h"

#include <csignal>

namespace nrl {
namespace {

bool ignored_at_start = false;

void read_at_start() {
  struct sigaction now = {};
  ignored_at_start = ::sigaction(SIGHUP, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

// Functions in this section of a program run before the constructors of its libraries.
__attribute__((section(".preinit_array"), used)) void (*const at_start)() = read_at_start;

}  // namespace

bool hangup_was_ignored() {
  return ignored_at_start;
}

void restore_ignored_hangup() {
  if (ignored_at_start) ::signal(SIGHUP, SIG_IGN);
}

}  // namespace nrl
