#include "apps/train/launch/stop_signal.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/output.h"
#include "tests/catch.h"

#ifdef __SANITIZE_THREAD__
// Children of fork() start threads here.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif

using namespace nrl;
using namespace nrl::train;

namespace {

// Runs `body` in a child process, whose exit status it gives (128 + n for death by signal n, as a shell).
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int quiet = ::open("/dev/null", O_WRONLY);
    ::dup2(quiet, STDERR_FILENO);
    for (int number : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGALRM}) ::signal(number, SIG_DFL);
    ::_exit(body());
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// To the process, as mpirun and a terminal do; the thread for signals takes it.
void send(int number) {
  ::kill(::getpid(), number);
  ::usleep(50'000);
}

// For processes that a signal should have ended by now.
int still_here() {
  ::sleep(10);
  return 1;
}

}  // namespace

TEST_CASE("a signal sets the flag and the first one is remembered", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps();
            if (stop::requested() != 0) return 1;
            send(SIGUSR1);
            if (stop::requested() != SIGUSR1) return 2;
            send(SIGTERM);
            return stop::requested() == SIGUSR1 ? 0 : 3;
          }) == 0);
}

TEST_CASE("at the start SIGINT and SIGTERM end the process, others ask for a stop", "[train]") {
  for (int number : {SIGUSR1, SIGHUP})
    REQUIRE(in_child([=] {
              stop::handle_at_start();
              send(number);
              stop::handle_in_steps();
              return stop::requested() == number ? 0 : 1;
            }) == 0);
  for (int number : {SIGINT, SIGTERM})
    REQUIRE(in_child([=] {
              stop::handle_at_start();
              send(number);
              return still_here();
            }) == 128 + number);
}

TEST_CASE("SIGHUP asks for a stop unless the process was started under nohup", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps();
            for (int i = 0; i < 3; ++i) send(SIGHUP);  // the kernel and the shell may both send it
            return stop::requested() == SIGHUP ? 0 : 1;
          }) == 0);
  REQUIRE(in_child([] {
            ::signal(SIGHUP, SIG_IGN);
            stop::handle_at_start();
            stop::handle_in_steps();
            send(SIGHUP);
            return stop::requested() == 0 ? 0 : 1;
          }) == 0);
}

TEST_CASE("the second SIGINT or SIGTERM leaves at once", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps(true);
            send(SIGTERM);
            send(SIGTERM);
            return still_here();
          }) == 128 + SIGTERM);
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps(true);
            send(SIGTERM);
            send(SIGINT);
            return still_here();
          }) == 128 + SIGINT);
  // Any number of SIGUSR1, and one SIGTERM after it, leave the time to save.
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps(true);
            send(SIGUSR1);
            send(SIGUSR1);
            send(SIGTERM);
            return stop::requested() == SIGUSR1 ? 0 : 1;
          }) == 0);
}

TEST_CASE("after the work is done a second signal leaves with its exit code", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            stop::handle_in_steps(true);
            send(SIGTERM);
            stop::set_final_exit_code(75);
            for (int i = 0; i < 10; ++i) send(SIGUSR1);
            send(SIGTERM);
            return still_here();
          }) == 75);
}

TEST_CASE("a second signal exits even if nobody reads the terminal", "[train]") {
  REQUIRE(in_child([] {
            int ends[2];
            if (::pipe(ends) != 0 || ::fcntl(ends[1], F_SETPIPE_SZ, 4096) < 0) return 1;
            ::dup2(ends[1], STDOUT_FILENO);
            ::dup2(ends[1], STDERR_FILENO);
            output::background();
            stop::handle_at_start();
            stop::handle_in_steps(true);
            output::write(output::Stream::err, std::string(10'000, 'x'));
            send(SIGINT);
            send(SIGINT);
            return still_here();
          }) == 128 + SIGINT);
}

TEST_CASE("inside Slurm a repeated SIGTERM is the scheduler's own", "[train]") {
  REQUIRE(in_child([] {
            ::setenv("SLURM_JOB_ID", "4711", 1);
            stop::handle_at_start();
            stop::handle_in_steps();
            send(SIGTERM);
            send(SIGTERM);
            send(SIGINT);
            if (stop::requested() != SIGTERM) return 1;
            send(SIGINT);
            return still_here();
          }) == 128 + SIGINT);
  REQUIRE(in_child([] {
            ::unsetenv("SLURM_JOB_ID");
            stop::handle_at_start();
            stop::handle_in_steps();
            send(SIGTERM);
            send(SIGTERM);
            return still_here();
          }) == 128 + SIGTERM);
}

TEST_CASE("a closed pipe and a file size limit are errors of the write, and SIGCONT is nothing", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            send(SIGCONT);
            int ends[2];
            if (::pipe(ends) != 0) return 1;
            ::close(ends[0]);
            if (::write(ends[1], "x", 1) >= 0 || errno != EPIPE) return 2;
            const rlimit none = {0, 0};
            std::FILE* file = std::tmpfile();
            if (file == nullptr || ::setrlimit(RLIMIT_FSIZE, &none) != 0) return 3;
            if (::write(::fileno(file), "x", 1) >= 0 || errno != EFBIG) return 4;
            return stop::requested() == 0 ? 0 : 5;
          }) == 0);
}

TEST_CASE("signals reach a thread of their own and interrupt no other", "[train]") {
  REQUIRE(in_child([] {
            stop::handle_at_start();
            const auto all_blocked = [] {
              sigset_t blocked;
              ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
              for (int number : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGALRM})
                if (sigismember(&blocked, number) != 1) return false;
              return true;
            };
            bool inherited = false;
            std::thread([&] { inherited = all_blocked(); }).join();
            if (!all_blocked() || !inherited) return 1;
            send(SIGUSR1);
            return stop::requested() == SIGUSR1 ? 0 : 2;
          }) == 0);
}

TEST_CASE("a process can end by a signal that it handled", "[train]") {
  REQUIRE(in_child([]() -> int {
            stop::handle_at_start();
            stop::handle_in_steps();
            send(SIGTERM);
            stop::end_by(SIGTERM);
          }) == 128 + SIGTERM);
}

TEST_CASE("signals have names", "[train]") {
  REQUIRE(stop::signal_name(SIGUSR1) == "SIGUSR1");
  REQUIRE(stop::signal_name(63) == "signal 63");
}
