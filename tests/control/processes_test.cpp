// Real processes without MPI: deaths, stops, errors, broken connections, and what is left behind.

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "parallel/control/control.h"
#include "parallel/control/sockets.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::control;

namespace {

constexpr int most_ranks = 8;
constexpr Nanos second = 1'000'000'000;

// Shared by the processes of a test.
struct Shared {
  std::atomic<int> arrived{0};
  std::array<std::byte, 4096> buffer{};
  struct Rank {
    std::atomic<int> ready{0}, committed{-1};
    std::atomic<Nanos> left{0};
    Verdict verdict;
    int restored = 0, sockets = 0;
    char warning[256] = {};
  };
  std::array<Rank, most_ranks> ranks;
};

class Processes {
 public:
  using Body = std::function<void(int rank, Control& control, Shared& shared)>;

  // Starts `count` processes, `per_node` of which are a node, and waits until they are connected.
  Processes(int count, int per_node, Options options, Body body, std::function<StatusSample(int)> sample = {})
      : count_(count) {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    shared_ = new (memory) Shared;
    options.run_id = run_ = fmt::format("processes-test-{}", getpid());
    if (options.interface.empty()) options.interface = "127.0.0.1";
    for (int r = 0; r < count; ++r) {
      const pid_t pid = fork();
      REQUIRE(pid >= 0);
      if (pid == 0) _exit(child(r, per_node, options, body, sample));
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (pid_t pid : pids_) ::kill(pid, SIGKILL);
    for (pid_t pid : pids_) waitpid(pid, nullptr, 0);
    munmap(shared_, sizeof(Shared));
  }

  void wait_ready() {
    const Nanos end = monotonic_now() + 60 * second;
    for (int r = 0; r < count_; ++r)
      while (shared_->ranks[static_cast<size_t>(r)].ready.load() == 0 && monotonic_now() < end) usleep(1000);
    usleep(300'000);
  }
  void kill(int rank, int signal) {
    killed_ = monotonic_now();
    ::kill(pids_[static_cast<size_t>(rank)], signal);
  }
  // Exit code, or 128 + signal; 999 if it is still there after 60 s.
  int code(int rank) {
    int status = 0;
    const Nanos end = monotonic_now() + 60 * second;
    while (waitpid(pids_[static_cast<size_t>(rank)], &status, WNOHANG) == 0) {
      if (monotonic_now() > end) return 999;
      usleep(1000);
    }
    pids_[static_cast<size_t>(rank)] = -2;  // no process
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  // Seconds from kill() until a rank had decided to leave, on its own clock.
  double left_after(int rank) { return in_seconds(of(rank).left.load() - killed_); }
  Shared::Rank& of(int rank) { return shared_->ranks[static_cast<size_t>(rank)]; }
  std::string text(int rank) { return std::string(of(rank).verdict.text.view()); }
  bool left_nothing() const {
    return !std::filesystem::exists(fmt::format("/dev/shm/nrl-{}/{}", geteuid(), run_));
  }

 private:
  void meet(int& round) {
    const int target = ++round * count_;
    shared_->arrived.fetch_add(1);
    while (shared_->arrived.load() < target) usleep(200);
  }

  int child(int rank, int per_node, const Options& options, const Body& body,
            const std::function<StatusSample(int)>& sample) {
    int round = 0;
    Bootstrap b{rank, count_, rank / per_node, {}, {}};
    b.broadcast = [&](std::span<std::byte> bytes) {
      if (rank == 0) std::memcpy(shared_->buffer.data(), bytes.data(), bytes.size());
      meet(round);
      std::memcpy(bytes.data(), shared_->buffer.data(), bytes.size());
      meet(round);
    };
    b.allgather = [&](std::span<const std::byte> own, std::span<std::byte> all) {
      std::memcpy(shared_->buffer.data() + static_cast<size_t>(rank) * own.size(), own.data(), own.size());
      meet(round);
      std::memcpy(all.data(), shared_->buffer.data(), all.size());
      meet(round);
    };
    Shared::Rank& mine = of(rank);
    Hooks hooks;
    hooks.sample = [&, rank] { return sample ? sample(rank) : StatusSample{}; };
    hooks.phase_name = [](uint8_t) { return std::string_view("forward"); };
    hooks.leave = [&](const Failure& failure) {
      mine.verdict = failure.verdict;
      mine.left.store(monotonic_now());
    };
    hooks.last_words = [](Text<398>& text) { text.append("by signal 11, in layer 3"); };
    hooks.notice = [&](Notice notice, int) { mine.restored += notice == Notice::link_restored; };
    try {
      Control control(60, false);
      const std::string warning = control.connect(options, b, hooks);
      warning.copy(mine.warning, sizeof mine.warning - 1);
      for (int fd = 3; fd < 100; ++fd) {
        sockaddr_storage own{};
        socklen_t length = sizeof own;
        if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0)
          mine.sockets += own.ss_family == AF_INET;
      }
      mine.ready.store(1);
      body(rank, control, *shared_);
    } catch (const Error& e) {
      std::string(e.what()).copy(mine.warning, sizeof mine.warning - 1);
      return static_cast<int>(e.code());
    }
    return 0;
  }

  int count_;
  std::string run_;
  Shared* shared_;
  std::vector<pid_t> pids_;
  Nanos killed_ = 0;
};

void wait_forever(int, Control&, Shared&) {
  for (;;) pause();
}

Options quick(double heartbeat = 2, double network = 4) {
  Options o;
  o.heartbeat_timeout_s = heartbeat;
  o.network_timeout_s = network;
  return o;
}

}  // namespace

TEST_CASE("processes that finish leave nothing behind, and one host opens no port") {
  for (const int per_node : {4, 2, 1}) {
    Processes p(4, per_node, quick(), [](int rank, Control& control, Shared& shared) {
      usleep(1'300'000);
      shared.ranks[static_cast<size_t>(rank)].committed = control.may_commit();
      usleep(static_cast<unsigned>(rank) * 50'000);
      control.finish();
    });
    for (int r = 0; r < 4; ++r) {
      CHECK(p.code(r) == 0);
      CHECK(p.of(r).left.load() == 0);
      CHECK(std::string(p.of(r).warning).empty());
      if (per_node == 4) CHECK(p.of(r).sockets == 0);
    }
    CHECK(p.of(0).committed == 1);
    CHECK(p.left_nothing());
  }
}

TEST_CASE("a killed process ends the others at once") {
  for (const int per_node : {4, 2})
    for (const int victim : {0, 2, 3}) {
      Processes p(4, per_node, quick(), wait_forever);
      p.wait_ready();
      p.kill(victim, SIGKILL);
      for (int r = 0; r < 4; ++r) {
        CAPTURE(per_node, victim, r, p.text(r));
        CHECK(p.code(r) == (r == victim ? 128 + SIGKILL : 80));
        if (r == victim) continue;
        CHECK(p.left_after(r) < 2.0);  // 0.8 s on an idle machine; the simulator asserts 1 s
        CHECK((p.of(r).verdict.kind == Kind::rank_killed || p.of(r).verdict.kind == Kind::rank_exited));
        CHECK(p.of(r).verdict.ranks[0] == victim);
      }
      CHECK(p.left_nothing());
    }
}

TEST_CASE("a stopped process is named, and woken up to leave") {
  for (const int victim : {0, 3}) {
    Processes p(4, 2, quick(2, 6), wait_forever);
    p.wait_ready();
    p.kill(victim, SIGSTOP);
    for (int r = 0; r < 4; ++r) {
      CAPTURE(victim, r, p.text(r));
      CHECK(p.code(r) == 80);
      CHECK(p.left_after(r) > 1.0);
      CHECK(p.left_after(r) < 4.0);
      CHECK(p.of(r).verdict.kind == Kind::rank_stopped);
      CHECK(p.of(r).verdict.ranks[0] == victim);
      CHECK_THAT(p.text(r), ContainsSubstring("process state T (stopped)"));
    }
  }
}

TEST_CASE("an error of one process is the exit code of all") {
  Processes p(4, 2, quick(), [](int rank, Control& control, Shared& shared) {
    if (rank == 1) control.fail(Evidence::secondary, 80, "MPI lost a peer");
    if (rank == 3) usleep(100'000), control.fail(Evidence::error, 74, "disk full");
    wait_forever(rank, control, shared);
  });
  for (int r = 0; r < 4; ++r) {
    CHECK(p.code(r) == 74);
    CHECK(p.text(r) == "rank 3 (node 1): disk full");
  }
}

TEST_CASE("a process that ends without finish() is noticed") {
  Processes p(2, 2, quick(), [](int rank, Control& control, Shared& shared) {
    if (rank == 0) wait_forever(rank, control, shared);
    _exit(3);
  });
  CHECK(p.code(1) == 3);
  CHECK(p.code(0) == 80);
  CHECK(p.of(0).verdict.ranks[0] == 1);
}

TEST_CASE("a broken connection between nodes ends nothing") {
  Processes p(2, 1, quick(), [](int rank, Control& control, Shared&) {
    usleep(500'000);
    for (int fd = 3; rank == 1 && fd < 100; ++fd) {
      sockaddr_storage peer{};
      socklen_t length = sizeof peer;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.ss_family == AF_INET)
        shutdown(fd, SHUT_RDWR);
    }
    usleep(1'500'000);
    control.finish();
  });
  for (int r = 0; r < 2; ++r) {
    CHECK(p.code(r) == 0);
    CHECK(p.of(r).restored == 1);
  }
}

TEST_CASE("a rank that hangs is named by what the others wait for") {
  Processes p(4, 2, quick(), wait_forever, [](int rank) {
    StatusSample s;
    s.step = 7;
    s.over_limit = 1;
    s.in_phase = 61 * second;
    s.wait.ranks = rank == 2 ? 0 : 4;
    s.wait.sequence = 12;
    s.wait.text.assign("all_reduce of dp");
    return s;
  });
  for (int r = 0; r < 4; ++r) {
    CHECK(p.code(r) == 80);
    CHECK_THAT(p.text(r),
               ContainsSubstring("rank 2 (node 1) hangs for 61.0 s at step 7 in forward. ranks 0-1, 3 wait"));
  }
}

TEST_CASE("nodes that cannot connect are refused, or on their own with a warning") {
  for (const bool require : {true, false}) {
    Options options = quick();
    options.require = require;
    options.interface = "no-such-interface";
    options.connect_timeout_s = 1;
    Processes p(4, 2, options, [](int rank, Control& control, Shared& shared) {
      if (rank == 3) _exit(5);
      wait_forever(rank, control, shared);
    });
    for (int r = 0; r < 4; ++r) {
      if (!require && r < 2) {  // the other node does not notice
        p.wait_ready();
        p.kill(r, SIGKILL);
        CHECK(p.code(r) == 128 + SIGKILL);
        r = 1;
        continue;
      }
      CAPTURE(require, r, std::string(p.of(r).warning));
      CHECK(p.code(r) == (require ? 69 : r == 3 ? 5 : 80));
      CHECK_THAT(std::string(p.of(r).warning),
                 ContainsSubstring("control plane: reliability.interface: this node has no interface"));
    }
  }
}

TEST_CASE("a process that never connects ends at the start limit") {
  const pid_t pid = fork();
  if (pid == 0) {
    Control control(0.3, false);
    for (;;) pause();
  }
  int status = 0;
  waitpid(pid, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 80);
}

TEST_CASE("a process that dies of a fatal signal tells the others first") {
  for (const int victim : {0, 1, 2}) {
    Processes p(4, 2, quick(), [victim](int rank, Control& control, Shared& shared) {
      if (rank == victim) {
        usleep(500'000);
        control.dying();
        std::signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
      }
      wait_forever(rank, control, shared);
    });
    for (int r = 0; r < 4; ++r) {
      CAPTURE(victim, r, p.text(r));
      if (r == victim) continue;
      CHECK(p.code(r) == 80);
      CHECK(p.of(r).verdict.kind == Kind::rank_killed);
      CHECK(p.of(r).verdict.ranks[0] == victim);
      CHECK_THAT(p.text(r), ContainsSubstring("in forward: by signal 11, in layer 3"));
    }
  }
}

TEST_CASE("the root reads the pace of all ranks") {
  Options options = quick();
  options.paces = true;
  Processes p(
      3, 3, options,
      [](int rank, Control& control, Shared& shared) {
        for (int i = 0; i < 300 && shared.ranks[0].committed == -1; ++i) {
          const auto paces = control.paces();
          if (rank == 0 && std::ranges::all_of(paces, [](const auto& r) { return r.count > 0; }))
            shared.ranks[0].committed = static_cast<int>(1000 * paces[2].pace.seconds);
          usleep(100'000);
        }
        shared.ranks[static_cast<size_t>(rank)].restored = control.paces().empty() ? 0 : 1;
        control.finish();
      },
      [](int rank) {
        StatusSample s;
        s.step = 4 + monotonic_now() / second;
        s.own = s.step * second / (rank == 2 ? 2 : 4);
        return s;
      });
  for (int r = 0; r < 3; ++r) CHECK(p.code(r) == 0);
  CHECK(p.of(0).committed == 500);
  for (int r = 0; r < 3; ++r) CHECK(p.of(r).restored == (r == 0 ? 1 : 0));
}
