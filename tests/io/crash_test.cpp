// Crashes and storage errors at every single operation of a commit, and the lock of a run.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "core/io/checkpoint_store.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::atomic<int> g_left{0};  // operations until the fault
int g_error = 0;             // errno of the fault; 0: the process ends
bool g_persistent = false;

int fault(FileOp, const std::string&) {
  const int left = --g_left;
  if (left > 0 || (left < 0 && !g_persistent)) return 0;
  if (g_error == 0) ::_exit(9);
  return g_error;
}

// What a training run does at a save.
void save_and_retain(const std::string& store, int64_t step, uint64_t salt) {
  save(store, step, salt);
  apply_retention(store, 1);
}

// The store holds one of the two models, in order; returns its salt.
uint64_t check_store(const std::string& store, int64_t old_step, int64_t new_step) {
  const ResumePoint point = find_resume(store);
  REQUIRE(point.checkpoint.has_value());
  for (const std::string& w : point.warnings) {
    CAPTURE(w);
    CHECK(contains(w, "LATEST"));  // never damage under a final name
  }
  CHECK((point.checkpoint->step == old_step || point.checkpoint->step == new_step));
  if (holds_model(point.checkpoint->path, 1)) return 1;
  REQUIRE(holds_model(point.checkpoint->path, 2));
  CHECK(point.checkpoint->step == new_step);
  return 2;
}

}  // namespace

TEST_CASE("a crash at any operation of a save leaves a valid newest checkpoint") {
  for (int64_t new_step : {20, 10}) {  // a new step, and the same step again
    CAPTURE(new_step);
    int points = 0, new_ones = 0;
    for (int n = 1;; ++n) {
      CAPTURE(n);
      const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
      save(dir / "c", 5, 1);
      save(dir / "c", 10, 1);
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        g_left = n;
        g_error = 0;
        set_file_op_hook(fault);
        try {
          save_and_retain(dir / "c", new_step, 2);
        } catch (...) {
          ::_exit(3);
        }
        ::_exit(0);
      }
      int status = 0;
      REQUIRE(::waitpid(child, &status, 0) == child);
      REQUIRE(WIFEXITED(status));
      const uint64_t found = check_store(dir / "c", 10, new_step);
      if (WEXITSTATUS(status) == 0) {
        CHECK(found == 2);
        break;
      }
      REQUIRE(WEXITSTATUS(status) == 9);
      ++points;
      new_ones += found == 2 ? 1 : 0;
      // The next start cleans up, and the same save works.
      const RunLock lock(dir.path());
      clean_store(dir / "c", lock);
      save_and_retain(dir / "c", new_step, 2);
      CHECK(list_directory(dir / "c") == std::vector<std::string>{"LATEST", step_directory_name(new_step)});
      CHECK(check_store(dir / "c", new_step, new_step) == 2);
    }
    CHECK(points >= 20);
    CHECK(new_ones >= 4);            // crashes after the commit
    CHECK(new_ones <= points - 10);  // and before
  }
}

TEST_CASE("a crash while checkpoints are set aside loses none of them") {
  for (int n = 1;; ++n) {
    CAPTURE(n);
    const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
    const std::string store = dir / "c";
    for (int64_t step : {5, 10, 20}) save(store, step, static_cast<uint64_t>(step));
    const RunLock lock(dir.path());
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      g_left = n;
      g_error = 0;
      set_file_op_hook(fault);
      set_checkpoints_aside(store, 5, lock);
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    set_checkpoints_aside(store, 5, lock);  // the next start
    clean_store(store, lock);
    CHECK(find_resume(store).checkpoint->step == 5);
    for (uint64_t step : {5, 10, 20}) {
      int copies = 0;
      for (const char* where : {"", "previous-1/", "previous-2/"}) {
        const std::string path = fmt::format("{}/{}step-{}", store, where, step);
        copies += path_exists(path) && holds_model(path, step) ? 1 : 0;
      }
      CHECK(copies == 1);
    }
    if (WEXITSTATUS(status) == 0) {
      CHECK(n > 6);
      break;
    }
  }
}

TEST_CASE("a storage error at any operation of a save leaves a valid newest checkpoint") {
  for (const auto& [error, persistent] : {std::pair{EIO, false}, {ENOSPC, true}, {EINTR, false}}) {
    for (int n = 1;; ++n) {
      CAPTURE(n, error, persistent);
      const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
      save(dir / "c", 5, 1);
      save(dir / "c", 10, 1);
      g_left = n;
      g_error = error;
      g_persistent = persistent;
      set_file_op_hook(fault);
      const Caught caught = error_of([&] { save_and_retain(dir / "c", 20, 2); });
      set_file_op_hook(nullptr);
      const bool fired = g_left <= 0;
      check_store(dir / "c", 10, 20);
      if (caught.code != 0) CHECK(contains(caught.text, std::strerror(error)));
      const RunLock lock(dir.path());
      clean_store(dir / "c", lock);
      save_and_retain(dir / "c", 20, 2);
      CHECK(check_store(dir / "c", 20, 20) == 2);
      CHECK(list_directory(dir / "c") == std::vector<std::string>{"LATEST", "step-20"});
      if (!fired) break;
      REQUIRE(n < 200);
    }
  }
}

TEST_CASE("one run per directory: a living owner is named, a dead one replaced") {
  const TemporaryDirectory dir;
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const RunLock lock(dir.path());
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char c = 0;
  REQUIRE(::read(ready[0], &c, 1) == 1);
  const std::string before = read_file(dir / "run.lock", 1000);
  const Caught caught = error_of([&] { RunLock lock(dir.path()); });
  CHECK(caught.code == 73);
  CHECK(contains(caught.text, fmt::format("locked by pid {} on ", child)));
  CHECK(read_file(dir / "run.lock", 1000) == before);
  ::kill(child, SIGKILL);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  ::close(ready[0]);
  ::close(ready[1]);
  {
    const RunLock lock(dir.path());
    CHECK(contains(lock.takeover(), fmt::format("taken over from pid {}", child)));
    lock.heartbeat();
    CHECK(error_of([&] { RunLock second(dir.path()); }).code == 73);
  }
  CHECK_FALSE(path_exists(dir / "run.lock"));
  const RunLock fresh(dir.path());
  CHECK(fresh.takeover().empty());
  CHECK(error_of([&] { RunLock lock(dir / "none"); }).code == 73);
}

TEST_CASE("a run locks all its directories, each once") {
  const TemporaryDirectory dir;
  make_directories(dir / "logs");
  {
    // One directory by three names, and one inside of it that is made here.
    const RunLocks locks({dir / "logs", dir / "logs/", dir / "logs/../logs", dir / "logs/deep/er"});
    CHECK(&locks.of(dir / "logs") == &locks.of(dir / "logs/"));
    CHECK(path_exists(dir / "logs/deep/er/run.lock"));
    CHECK(error_of([&] { RunLock lock(dir / "logs"); }).code == 73);
    // Refused for the logs: the other directory is neither made nor locked.
    const Caught caught = error_of([&] { RunLocks({dir / "new/one", dir / "logs"}); });
    CHECK(caught.code == 73);
    CHECK(contains(caught.text, fmt::format("{}/run.lock: locked by pid {}", dir / "logs", ::getpid())));
    CHECK_FALSE(path_exists(dir / "new"));
    const RunLocks other({dir / "new/one", dir / "new"});
    overwrite(dir / "new/kept", "x");
  }
  CHECK(list_directory(dir / "logs").empty());
  CHECK(list_directory(dir / "new") == std::vector<std::string>{"kept"});
}

TEST_CASE("a lock of another host counts while its heartbeat is young") {
  const TemporaryDirectory dir;
  const std::string path = dir / "run.lock";
  overwrite(path, R"({"host":"elsewhere.invalid","pid":7,"boot_id":"b","start_ticks":1,"since":"then"})");
  const Caught caught = error_of([&] { RunLock lock(dir.path()); });
  CHECK(caught.code == 73);
  CHECK(contains(caught.text, "pid 7 on elsewhere.invalid"));
  timespec old[2] = {{::time(nullptr) - 100, 0}, {::time(nullptr) - 100, 0}};
  REQUIRE(::utimensat(AT_FDCWD, path.c_str(), old, 0) == 0);
  {
    const RunLock lock(dir.path());
    CHECK(contains(lock.takeover(), "elsewhere.invalid"));
  }
  overwrite(path, "half a na");
  CHECK(contains(RunLock(dir.path()).takeover(), "left no name"));
}
