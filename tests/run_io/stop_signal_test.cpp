#include "apps/train/run_io/stop_signal.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

// Runs `body` in a child process, whose exit status it gives (128 + n for death by signal n, as a shell).
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int quiet = ::open("/dev/null", O_WRONLY);
    ::dup2(quiet, STDERR_FILENO);
    ::_exit(body());
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("a signal sets the flag and the first one is remembered", "[run_io]") {
  StopSignals signals;
  REQUIRE(StopSignals::requested() == 0);
  ::raise(SIGUSR1);
  REQUIRE(StopSignals::requested() == SIGUSR1);
  ::raise(SIGTERM);
  REQUIRE(StopSignals::requested() == SIGUSR1);
}

TEST_CASE("a new object starts without a request", "[run_io]") {
  {
    StopSignals signals;
    ::raise(SIGINT);
    REQUIRE(StopSignals::requested() == SIGINT);
  }
  StopSignals signals;
  REQUIRE(StopSignals::requested() == 0);
}

TEST_CASE("the second SIGINT or SIGTERM leaves at once", "[run_io]") {
  REQUIRE(in_child([] {
            StopSignals signals(StopSignals::Term::second_leaves);
            ::raise(SIGTERM);
            ::raise(SIGTERM);
            return 1;
          }) == 128 + SIGTERM);
  REQUIRE(in_child([] {
            StopSignals signals(StopSignals::Term::second_leaves);
            ::raise(SIGTERM);
            ::raise(SIGINT);
            return 1;
          }) == 128 + SIGINT);
  // Any number of SIGUSR1, and one SIGTERM after it, leave the time to save.
  REQUIRE(in_child([] {
            StopSignals signals(StopSignals::Term::second_leaves);
            ::raise(SIGUSR1);
            ::raise(SIGUSR1);
            ::raise(SIGTERM);
            return StopSignals::requested() == SIGUSR1 ? 0 : 1;
          }) == 0);
}

TEST_CASE("inside Slurm a repeated SIGTERM is the scheduler's own", "[run_io]") {
  REQUIRE(in_child([] {
            ::setenv("SLURM_JOB_ID", "4711", 1);
            StopSignals signals;
            ::raise(SIGTERM);
            ::raise(SIGTERM);
            ::raise(SIGINT);
            if (StopSignals::requested() != SIGTERM) return 1;
            ::raise(SIGINT);
            return 2;
          }) == 128 + SIGINT);
  REQUIRE(in_child([] {
            ::unsetenv("SLURM_JOB_ID");
            StopSignals signals;
            ::raise(SIGTERM);
            ::raise(SIGTERM);
            return 1;
          }) == 128 + SIGTERM);
}

TEST_CASE("a closed pipe is an error of the write, and SIGCONT is nothing", "[run_io]") {
  REQUIRE(in_child([] {
            StopSignals signals;
            ::raise(SIGCONT);
            int ends[2];
            if (::pipe(ends) != 0) return 1;
            ::close(ends[0]);
            return ::write(ends[1], "x", 1) < 0 && errno == EPIPE && StopSignals::requested() == 0 ? 0 : 2;
          }) == 0);
}

TEST_CASE("the previous actions come back", "[run_io]") {
  REQUIRE(in_child([] {
            ::signal(SIGUSR1, SIG_IGN);
            { StopSignals signals; }
            ::raise(SIGUSR1);  // ignored again
            ::signal(SIGTERM, SIG_DFL);
            { StopSignals signals; }
            ::raise(SIGTERM);  // ends the process
            return 1;
          }) == 128 + SIGTERM);
}

TEST_CASE("an interrupted call goes on and errno is kept", "[run_io]") {
  StopSignals signals;
  errno = ENOENT;
  ::raise(SIGUSR1);
  REQUIRE(errno == ENOENT);
}

TEST_CASE("two objects at once are a bug", "[run_io]") {
  StopSignals signals;
  REQUIRE_THROWS_AS(StopSignals(), Error);
  // The refused one must not have touched the first.
  ::raise(SIGUSR1);
  REQUIRE(StopSignals::requested() == SIGUSR1);
}

TEST_CASE("signals have names", "[run_io]") {
  REQUIRE(signal_name(SIGUSR1) == "SIGUSR1");
  REQUIRE(signal_name(63) == "signal 63");
}
