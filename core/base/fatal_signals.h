#pragma once
// Signals that end the process because of an error in it: SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT, which
// std::terminate() raises too. The status page keeps signal and address; then the process dies of the signal
// as it would have without this module.

#include <cstdint>
#include <string_view>

namespace nrl::fatal_signals {

/// Installs the handler, on a stack of its own for the calling thread. Call after libraries that have
/// handlers of their own have started (MPI), because theirs run afterwards. Later calls do nothing.
void install();

/// Called by the handler of the first fatal signal, once the status page has it; must be async-signal-safe.
/// Null: nothing.
void set_hook(void (*hook)());

/// "SIGSEGV"; "SIGNAL" for a number without a name. Does not allocate.
struct Name {
  char text[16];
  operator std::string_view() const { return text; }
};
Name name_of(int signal);

/// "signal 11 (SIGSEGV), address 0x10", from the fields of the status page. Does not allocate.
struct Text {
  char text[80];
  operator std::string_view() const { return text; }
};
Text describe(int signal, bool sent, uint64_t at);

}  // namespace nrl::fatal_signals
