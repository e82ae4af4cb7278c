#pragma once
// Shared by the tests of the formats of sinks.

#include <cmath>
#include <csignal>
#include <string>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "apps/monitor/sink.h"
#include "core/base/error.h"

namespace nrl::test {

inline monitor::RunInfo sample_run(int64_t first_step = 0, double time = 1700017949.25) {
  return {.id = "0a1b2c3d",
          .name = "tiny",
          .resumed = first_step > 0,
          .first_step = first_step,
          .created = 1700017949.25,
          .time = time,
          .host = "node1",
          .settings = {{"policy.optimizer.lr", "3e-04"}, {"policy.tie", "true"}, {"data.path", "corpus: a"}}};
}

inline monitor::Row sample_row(int64_t step) {
  const auto x = static_cast<double>(step);
  return {.step = step,
          .time = 1700017950 + x,
          .values = {{"train/loss", 8 - x / 64}, {"train/grad_norm", step == 3 ? NAN : x / 4}}};
}

/// True if `f` throws Exit::io in a process that may not write files beyond `bytes`.
template <class F>
bool fails_on_full_disk(uint64_t bytes, F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{bytes, bytes};
    ::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      f();
    } catch (const Error& e) {
      ::_exit(e.code() == Exit::io ? 7 : 1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

}  // namespace nrl::test
