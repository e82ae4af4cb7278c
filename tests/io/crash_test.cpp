// Crashes and storage errors at every single operation of a commit, and the lock of a run. Crashes lose what
// was not fsynced (durability.h).
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/process.h"
#include "core/io/checkpoint_store.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"
#include "tests/io/durability.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::atomic<int> g_left{0};  // operations until the fault
int g_error = 0;             // errno of the fault
bool g_persistent = false;

int fault(FileOp, const std::string&) {
  const int left = --g_left;
  if (left > 0 || (left < 0 && !g_persistent)) return 0;
  return g_error;
}

// The operations of a training run at a save.
void save_and_retain(const std::string& store, int64_t step, uint64_t salt) {
  save(store, step, salt);
  apply_retention(store, 1);
}

// The store holds one of the two models, in order; returns its salt.
uint64_t check_store(const std::string& store, int64_t old_step, int64_t new_step) {
  const ResumePoint point = find_resume(store);
  REQUIRE(point.checkpoint.has_value());
  CHECK(point.rejected.empty());  // never damage under a final name
  for (const std::string& w : point.warnings) CHECK(contains(w, "/LATEST names step-"));
  CHECK((point.checkpoint->step == old_step || point.checkpoint->step == new_step));
  if (holds_model(point.checkpoint->path, 1)) return 1;
  REQUIRE(holds_model(point.checkpoint->path, 2));
  CHECK(point.checkpoint->step == new_step);
  return 2;
}

// Checks every state that a crash may leave of a save after steps 5 and 10.
void check_save(int64_t new_step, const std::function<void(const std::string& store, Recorder&)>& record) {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  save(dir / "c", 5, 1);
  save(dir / "c", 10, 1);
  Recorder recorder(dir.path());
  record(dir / "c", recorder);
  recorder.stop();
  int old_ones = 0, new_ones = 0;
  recorder.for_each_crash([&](const std::string& left, bool promised, const std::string& what) {
    CAPTURE(what);
    const std::string store = join_path(left, "c");
    const uint64_t found = check_store(store, 10, new_step);
    // LATEST may be behind, but names a checkpoint that is there.
    const std::string latest = read_file(join_path(store, "LATEST"), 100);
    CHECK(path_exists(join_path(store, latest.substr(0, latest.find('\n')))));
    if (promised) CHECK(found == 2);
    ++(found == 2 ? new_ones : old_ones);
    // The next start cleans up, and the same save works.
    const RunLock lock(left);
    clean_store(store, lock);
    save_and_retain(store, new_step, 2);
    CHECK(list_directory(store) == std::vector<std::string>{"LATEST", step_directory_name(new_step)});
    CHECK(check_store(store, new_step, new_step) == 2);
  });
  CHECK(old_ones >= 20);
  CHECK(new_ones >= 20);
}

}  // namespace

TEST_CASE("a crash at any operation of a save leaves a valid newest checkpoint") {
  for (int64_t new_step : {20, 10}) {  // a new step, and the same step again
    CAPTURE(new_step);
    check_save(new_step, [&](const std::string& store, Recorder& recorder) {
      save(store, new_step, 2);
      recorder.promise();
      apply_retention(store, 1);
    });
  }
}

TEST_CASE("a crash while several ranks save leaves a valid newest checkpoint") {
  check_save(20, [](const std::string& store, Recorder& recorder) {
    ThreadRanks ranks(3);
    for (const Caught& caught : ranks.run([&](int rank) {
           CheckpointWriter writer(store, 20, 10000, ranks.group(rank));
           add_model(writer, rank, 3, 2);
           writer.commit(JsonValue::object());
         }))
      REQUIRE(caught.text.empty());
    recorder.promise();
    apply_retention(store, 1);
  });
}

TEST_CASE("the first checkpoint survives a crash, with the directories made for it") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  Recorder recorder(dir.path());
  save(dir / "runs/one/c", 5, 1);
  recorder.promise();
  recorder.stop();
  recorder.for_each_crash([&](const std::string& left, bool promised, const std::string& what) {
    CAPTURE(what);
    const ResumePoint point = find_resume(join_path(left, "runs/one/c"));
    CHECK(point.rejected.empty());
    if (promised) REQUIRE(point.checkpoint.has_value());
    if (point.checkpoint) CHECK(holds_model(point.checkpoint->path, 1));
  });
}

TEST_CASE("a crash while checkpoints are set aside loses none of them") {
  for (int64_t step : {5, -1}) {  // all that are newer, and all
    CAPTURE(step);
    const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
    for (int64_t s : {5, 10, 20}) save(dir / "c", s, static_cast<uint64_t>(s));
    const RunLock lock(dir.path());
    Recorder recorder(dir / "c");
    set_checkpoints_aside(dir / "c", step, lock);
    recorder.promise();
    recorder.stop();
    recorder.for_each_crash([&](const std::string& store, bool promised, const std::string& what) {
      CAPTURE(what);
      if (promised) CHECK(set_checkpoints_aside(store, step, lock).empty());
      for (const ResumePoint& point : {find_resume(store), find_resume(join_path(store, "previous-1"))})
        CHECK(point.rejected.empty());
      if (const std::string latest = join_path(store, "LATEST"); path_exists(latest)) {
        const std::string name = read_file(latest, 100);
        CHECK(path_exists(join_path(store, name.substr(0, name.find('\n')))));
      }
      set_checkpoints_aside(store, step, lock);  // the next start
      clean_store(store, lock);
      const ResumePoint point = find_resume(store);
      CHECK(point.checkpoint.has_value() == (step == 5));
      if (point.checkpoint) CHECK(point.checkpoint->step == 5);
      CHECK(point.warnings.empty());
      for (uint64_t s : {5, 10, 20}) {
        int copies = 0;
        for (const char* where : {"", "previous-1/", "previous-2/"}) {
          const std::string path = fmt::format("{}/{}step-{}", store, where, s);
          copies += path_exists(path) && holds_model(path, s) ? 1 : 0;
        }
        CHECK(copies >= 1);
      }
    });
  }
}

TEST_CASE("a file that is replaced holds the old or the new text after a crash") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  write_file_atomic(dir / "config.yaml", "old text");
  Recorder recorder(dir.path());
  write_file_atomic(dir / "config.yaml", "the new text");
  recorder.promise();
  recorder.stop();
  int old_ones = 0, new_ones = 0;
  recorder.for_each_crash([&](const std::string& left, bool promised, const std::string& what) {
    CAPTURE(what);
    const std::string text = read_file(join_path(left, "config.yaml"), 100);
    if (text == "old text") ++old_ones;
    if (text == "the new text") ++new_ones;
    CHECK((text == "the new text" || (text == "old text" && !promised)));
  });
  CHECK(old_ones > 0);
  CHECK(new_ones > 0);
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

namespace {
int g_lock_syncs = 0;
int count_lock_syncs(FileOp op, const std::string& path) {
  g_lock_syncs += op == FileOp::fsync && path.ends_with("/run.lock") ? 1 : 0;
  return 0;
}
}  // namespace

TEST_CASE("the owner's name in a lock is fsynced, for other hosts to read") {
  const TemporaryDirectory dir;
  set_file_op_hook(count_lock_syncs);
  const RunLock lock(dir.path());
  set_file_op_hook(nullptr);
  CHECK(g_lock_syncs == 1);
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

TEST_CASE("a lock of a dead process on this kernel is taken over at once") {
  const TemporaryDirectory dir;
  // A container that was started again has another host name, and its processes other numbers.
  const std::string owner = fmt::format(
      R"({{"host":"container-1","pid":7,"boot_id":"{}","start_ticks":1,"since":"then"}})", boot_id());
  overwrite(dir / "run.lock", owner);
  {
    const RunLock lock(dir.path());
    CHECK(contains(lock.takeover(), "taken over from pid 7 on container-1"));
  }
  // It lives while the kernel holds its lock.
  overwrite(dir / "run.lock", owner);
  const int fd = ::open((dir / "run.lock").c_str(), O_RDWR);
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  REQUIRE(::fcntl(fd, F_OFD_SETLK, &whole) == 0);
  CHECK(error_of([&] { RunLock lock(dir.path()); }).code == 73);
  ::close(fd);
  // A host that names no boot may be any.
  overwrite(dir / "run.lock",
            R"({"host":"container-1","pid":7,"boot_id":"","start_ticks":1,"since":"then"})");
  CHECK(error_of([&] { RunLock lock(dir.path()); }).code == 73);
}

namespace {

// A lock that beats every 5 ms, whatever this thread does.
constexpr LockTiming fast{.stale_after_s = 60, .heartbeat = std::chrono::milliseconds(5)};
constexpr LockTiming slow{.stale_after_s = 60, .heartbeat = std::chrono::milliseconds(200)};

}  // namespace

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
    // This host's clock has jumped, or the other one's is wrong: its heartbeats come, and look old.
    std::atomic<bool> over = false;
    std::thread other([&] {
      for (time_t beats = 0; !over; ++beats) {
        timespec late[2] = {{old[0].tv_sec - 1000 + beats, 0}, {old[0].tv_sec - 1000 + beats, 0}};
        ::utimensat(AT_FDCWD, path.c_str(), late, 0);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    const Caught beats = error_of([&] { RunLock lock(dir.path(), slow); });
    over = true;
    other.join();
    CHECK(beats.code == 73);
    CHECK(contains(beats.text, "Its heartbeat goes on; the clocks of the hosts differ"));
  }
  {
    const RunLock lock(dir.path(), fast);
    CHECK(contains(lock.takeover(), "elsewhere.invalid"));
  }
  overwrite(path, "half a na");
  CHECK(contains(RunLock(dir.path()).takeover(), "an unknown run"));
}

namespace {

// Whether `done` holds before a minute has passed.
template <class Done>
bool soon(Done&& done) {
  for (int i = 0; i < 6000; ++i) {
    if (done()) return true;
    ::usleep(10'000);
  }
  return false;
}

// Its content replaced in place, as by a run on a host that does not see the kernel's lock.
void take_over(const std::string& path, const std::string& owner) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_TRUNC);
  REQUIRE(fd >= 0);
  REQUIRE(::write(fd, owner.data(), owner.size()) == static_cast<ssize_t>(owner.size()));
  ::close(fd);
}

std::atomic<int> g_touches{0};
int refuse_touch(FileOp op, const std::string&) {
  if (op != FileOp::touch) return 0;
  ++g_touches;
  return EIO;
}

}  // namespace

TEST_CASE("a lock stays young although its owner's main thread is busy") {
  const TemporaryDirectory dir;
  RunLock lock(dir.path(), fast);
  const timespec old[2] = {{::time(nullptr) - 1000, 0}, {::time(nullptr) - 1000, 0}};
  REQUIRE(::utimensat(AT_FDCWD, lock.path().c_str(), old, 0) == 0);
  CHECK(soon([&] {
    struct stat now;
    return ::stat(lock.path().c_str(), &now) == 0 && now.st_mtime > ::time(nullptr) - 100;
  }));
  CHECK(lock.lost().empty());
  lock.require_held();
}

TEST_CASE("a run notices that another one has taken its lock, and leaves it alone") {
  const TemporaryDirectory dir;
  const std::string other =
      R"({"host":"elsewhere.invalid","pid":7,"boot_id":"b","start_ticks":1,"since":"then"})";
  {
    const RunLocks locks({dir.path(), dir / "logs"});
    locks.require_held();
    take_over(dir / "run.lock", R"({"host":"elsewh)");  // being written: proves nothing
    locks.require_held();
    take_over(dir / "run.lock", other);
    const Caught caught = error_of([&] { locks.require_held(); });
    CHECK(caught.code == 73);
    CHECK(contains(caught.text, dir / "run.lock: this run has lost the lock to pid 7 on elsewhere.invalid"));
  }
  CHECK(read_file(dir / "run.lock", 1000) == other);
  remove_tree(dir / "run.lock");
  {
    RunLock lock(dir.path(), fast);
    take_over(dir / "run.lock", other);
    REQUIRE(soon([&] { return !lock.lost().empty(); }));  // without being asked
    CHECK(contains(lock.lost(), "pid 7 on elsewhere.invalid since then"));
    CHECK(error_of([&] { lock.require_held(); }).code == 73);
  }
  CHECK(read_file(dir / "run.lock", 1000) == other);
}

TEST_CASE("the heartbeat's thread takes no signal, and goes on after a failure") {
  const auto threads = [] { return list_directory("/proc/self/task"); };
  const TemporaryDirectory dir;
  const std::vector<std::string> before = threads();
  set_file_op_hook(refuse_touch);
  {
    const RunLock lock(dir.path(), fast);
    std::vector<std::string> added;
    for (const std::string& id : threads())
      if (std::find(before.begin(), before.end(), id) == before.end()) added.push_back(id);
    REQUIRE(added.size() == 1);
    std::ifstream status("/proc/self/task/" + added[0] + "/status");
    uint64_t blocked = 0;
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("SigBlk:")) blocked = std::stoull(line.substr(7), nullptr, 16);
    for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM})
      CHECK((blocked >> (signal - 1) & 1) == 1);
    CHECK(soon([] { return g_touches > 2; }));
  }
  set_file_op_hook(nullptr);
  CHECK(soon([&] { return threads() == before; }));
}

TEST_CASE("a lock of a lost host is taken from an earlier attempt of the same run at once") {
  const auto owner = [](const std::string& identity) {
    return R"({"host":"elsewhere.invalid","pid":7,"boot_id":"b","start_ticks":1,"since":"then")" + identity +
           "}";
  };
  const TemporaryDirectory dir;
  const std::string path = dir / "run.lock";
  const RunIdentity third{"0a1b", 3};
  for (const char* others :
       {"", R"(,"run_id":"0a1b")", R"(,"run_id":"0a1b","attempt":3)", R"(,"run_id":"0a1b","attempt":4)",
        R"(,"run_id":"ffff","attempt":2)", R"(,"run_id":"0a1b","attempt":-1)"}) {
    overwrite(path, owner(others));
    CHECK(error_of([&] { RunLock lock(dir.path(), {}, third); }).code == 73);
  }
  overwrite(path, owner(R"(,"run_id":"0a1b","attempt":2)"));
  CHECK(error_of([&] { RunLock lock(dir.path()); }).code == 73);  // no supervisor has ended that attempt
  CHECK(read_lock_owner(dir.path())->identity.attempt == 2);
  CHECK(!read_lock_owner(dir.path())->ended);
  {
    const RunLock lock(dir.path(), {}, third);
    CHECK(contains(lock.takeover(), "elsewhere.invalid"));
    const LockOwner now = *read_lock_owner(dir.path());
    CHECK((now.identity.run_id == "0a1b" && now.identity.attempt == 3 && !now.ended));
    // A process of this host that lives is not taken over, whatever its attempt.
    CHECK(error_of([&] { RunLock second(dir.path(), {}, {"0a1b", 4}); }).code == 73);
  }
  CHECK(!read_lock_owner(dir.path()));
  overwrite(path, "half a na");
  CHECK(read_lock_owner(dir.path())->host.empty());
}

TEST_CASE("a late writer of an ended attempt saves nothing") {
  const TemporaryDirectory dir;
  const auto save = [&](const RunLock& lock) {
    return error_of([&] {
      CheckpointWriter::Options options;
      options.before_publish = [&] { lock.require_held(); };
      CheckpointWriter writer(dir / "store", 1, 8, {}, options);
      writer.commit(JsonValue::object());
    });
  };
  {
    const RunLock first(dir.path(), {}, {"0a1b", 1});
    remove_tree(dir / "run.lock");
    // The second attempt is over, and its lock is gone.
    const Caught caught = save(first);
    CHECK(caught.code == 73);
    CHECK(contains(caught.text, "attempt 1 of run 0a1b saves nothing"));
    overwrite(dir / "run.lock", "half a na");
    CHECK(save(first).code == 73);
    remove_tree(dir / "run.lock");
    const RunLock second(dir.path(), {}, {"0a1b", 2});
    CHECK(contains(save(first).text, "lost the lock"));
    CHECK(list_directory(dir / "store").empty());
    CHECK(save(second).code == 0);
    CHECK(path_exists(dir / "store/step-1"));
  }
  // Without a supervisor, a file that was removed proves nothing.
  const RunLock plain(dir.path());
  remove_tree(dir / "run.lock");
  CHECK(save(plain).code == 0);
}

TEST_CASE("the identity of a supervised process is complete or refused") {
  const auto identity = [](const char* id, const char* attempt) {
    id ? ::setenv("NRL_RUN_ID", id, 1) : ::unsetenv("NRL_RUN_ID");
    attempt ? ::setenv("NRL_ATTEMPT", attempt, 1) : ::unsetenv("NRL_ATTEMPT");
    RunIdentity found;
    const Caught caught = error_of([&] { found = supervised_identity(); });
    ::unsetenv("NRL_RUN_ID");
    ::unsetenv("NRL_ATTEMPT");
    return caught.code == 0 ? found.attempt : -caught.code;
  };
  CHECK(identity(nullptr, nullptr) == 0);
  CHECK(identity("0a1b", "12") == 12);
  for (const char* bad : {"", "0", "-1", "1x", "99999999999"}) CHECK(identity("0a1b", bad) == -64);
  CHECK(identity("0a1b", nullptr) == -64);
  CHECK(identity(nullptr, "1") == -64);
  CHECK(identity("../x", "1") == -64);
}
