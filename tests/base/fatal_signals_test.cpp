// Signals that end a process, and processes that the kernel ended.

#include "core/base/fatal_signals.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <string>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/memory_kills.h"
#include "core/base/status.h"
#include "tests/catch.h"

using namespace nrl;

namespace {

struct Shared {
  status::Page page;
  std::atomic<int> hooks{0}, chained{0};
};
Shared* shared;

// The signal that ends a process which does this, and its status page.
int end_of(const std::function<void()>& work, bool chains = false) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  shared = new (memory) Shared;
  const pid_t child = fork();
  if (child == 0) {
    for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT})
      std::signal(number, SIG_DFL);  // Catch's
    if (chains) std::signal(SIGSEGV, [](int) { ++shared->chained, _exit(42); });
    std::set_terminate(nullptr);
    [[maybe_unused]] const int quiet = ::close(STDERR_FILENO);
    status::place(&shared->page);
    fatal_signals::install();
    fatal_signals::set_hook([] { ++shared->hooks; });
    work();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

[[gnu::noinline]] int overflow(int depth) {
  volatile char page[4096];
  page[depth % 4096] = 1;
  return depth < 0 ? 0 : overflow(depth + 1) + page[(depth + 7) % 4096];
}

std::string described() {
  return std::string(std::string_view(
      fatal_signals::describe(shared->page.signal, shared->page.signal_sent != 0, shared->page.signal_at)));
}

}  // namespace

TEST_CASE("a fatal signal is kept in the status page, and ends the process as before", "[base]") {
  CHECK(end_of([] { *reinterpret_cast<volatile int*>(0x10) = 1; }) == SIGSEGV);  // NOLINT: must fail
  CHECK(shared->page.signal == SIGSEGV);
  CHECK(described() == "signal 11 (SIGSEGV), address 0x10");
  CHECK(shared->hooks == 1);
  CHECK(end_of([] { raise(SIGFPE); }) == SIGFPE);
  CHECK(shared->page.signal == SIGFPE);
  CHECK(shared->page.signal_sent == 1);
  CHECK(end_of([] { std::terminate(); }) == SIGABRT);
  CHECK(shared->page.signal == SIGABRT);
  CHECK(shared->hooks == 1);
  CHECK(end_of([] {}) == 0);
  CHECK(shared->page.signal == 0);
}

TEST_CASE("a stack that overflows leaves room for the handler", "[base]") {
  const int signal = end_of([] { overflow(static_cast<int>(::getpid()) % 7); });
  CHECK((signal == SIGSEGV || signal == SIGBUS));
  CHECK(shared->page.signal == signal);
}

TEST_CASE("a handler from before runs afterwards", "[base]") {
  CHECK(end_of([] { raise(SIGSEGV); }, true) == -42);
  CHECK(shared->page.signal == SIGSEGV);
  CHECK(shared->chained == 1);
}

TEST_CASE("signals have names", "[base]") {
  CHECK(std::string_view(fatal_signals::name_of(SIGKILL)) == "SIGKILL");
  CHECK(std::string_view(fatal_signals::name_of(999)) == "SIGNAL");
  CHECK(std::string_view(fatal_signals::describe(SIGABRT, true, 0)) == "signal 6 (SIGABRT)");
  CHECK(std::string_view(fatal_signals::describe(SIGSEGV, true, 1)) == "signal 11 (SIGSEGV) of process 1");
}

TEST_CASE("processes that the kernel killed for memory are counted", "[base]") {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("nrl-kills-" + std::to_string(getpid()));
  const auto write = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("proc/self/cgroup", "0::/job\n");
  write("proc/vmstat", std::string(12000, 'x') + "\noom_kill 5\nlast 1\n");
  CHECK(MemoryKills(root).count() == 5);  // no file of the group
  write("sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 2\noom_group_kill 0\n");
  const MemoryKills kills(root);
  CHECK(kills.count() == 2);
  write("sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 3\noom_group_kill 0\n");
  CHECK(kills.count() == 3);
  write("proc/self/cgroup", "4:cpu,memory:/old\n0::/\n");
  write("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n");
  CHECK(MemoryKills(root).count() == 7);  // the group as its container sees it
  fs::remove_all(root);
  CHECK(MemoryKills(root).count() == -1);
  CHECK(MemoryKills().count() >= 0);
}
