#include "parallel/control/control.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <ranges>
#include <thread>
#include <utility>
#include <vector>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <pthread.h>
#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "core/base/memory_kills.h"
#include "core/base/process.h"
#include "parallel/control/transport.h"

namespace nrl::control {

namespace {

constexpr Nanos stopped_grace = 1'200_ms;  // for a process that was woken up, before it is killed
constexpr Nanos drain_limit = 100_ms;
constexpr Nanos kills_interval = 5_s;
constexpr Nanos pace_window = 10_s;
constexpr unsigned backstop_seconds = 3;
constexpr int exit_lost = 80;

// Every rank sends these to all others before they connect.
struct PeerRecord {
  uint64_t host = 0, pid_namespace = 0, start_ticks = 0;
  int32_t node = 0, pid = 0;
};
struct AddressRecord {
  Address address;
  int32_t failed = 0;
};
struct ConnectRecord {
  int32_t failed = 0, local = 0, error = 0;
};
struct SecretRecord {
  Secret secret;
  char run[64] = {};
};

template <class T>
std::vector<T> gather(const Bootstrap& b, const T& own) {
  std::vector<T> all(static_cast<size_t>(b.size));
  b.allgather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

std::atomic<int> backstop_code{exit_lost};
void on_backstop(int) {
  _exit(backstop_code.load());
}

template <class Body>
std::thread start_thread(const char* name, Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([name, body = std::move(body)] {
    prctl(PR_SET_NAME, name);
    body();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

void message(std::string_view text) {
  std::fprintf(stderr, "error: %.*s\n", static_cast<int>(text.size()), text.data());
}

}  // namespace

struct Control::State final : Actions, TransportEvents {
  enum class Stage : int { guard, connected, stopped };

  std::atomic<Stage> stage{Stage::guard};
  std::atomic<bool> lease{true}, failing{false}, finish_wanted{false}, gone{false}, failed{false};
  Nanos start_limit = 0;
  bool watch_launcher = false;
  pid_t launcher = getppid();
  int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  int watched = epoll_create1(EPOLL_CLOEXEC);  // `wake`, and the end of the launcher
  int launcher_end = -1;
  Hooks hooks;
  std::unique_ptr<Protocol> protocol;
  std::unique_ptr<Transport> transport;
  Topology topology;
  std::vector<PeerRecord> peers;
  Suspicion own_failure;
  std::atomic<bool> own_failure_ready{false};
  std::atomic<bool> dying{false}, told_last_words{false};
  struct PaceSlot {
    std::atomic<float> seconds{0}, data_seconds{0};
    std::atomic<uint32_t> count{0};
  };
  std::unique_ptr<PaceSlot[]> paces;  // by rank; of the root
  MemoryKills memory_kills;
  int64_t killed_before = memory_kills.count(), killed_now = killed_before;
  Nanos killed_read = 0;  // time of killed_now; killed_before is older
  Verdict verdict;
  bool has_verdict = false, reported_launcher = false;
  Nanos ran = 0;

  // To the helper thread.
  std::atomic<uint32_t> helper_calls{0};
  std::atomic<bool> helper_leaves{false}, helper_done{false}, helper_stops{false};
  std::array<std::atomic<uint32_t>, 16> notices{};
  std::thread thread, helper;

  ~State() override {
    for (const int fd : {wake, watched, launcher_end})
      if (fd >= 0) close(fd);
  }

  // Without pidfd_open() (before Linux 5.3) the launcher is looked at twice a second.
  void watch() {
    if (watch_launcher) launcher_end = static_cast<int>(syscall(SYS_pidfd_open, launcher, 0));
    for (const int fd : {wake, launcher_end}) {
      epoll_event readable{};
      readable.events = EPOLLIN;
      if (fd >= 0) epoll_ctl(watched, EPOLL_CTL_ADD, fd, &readable);
    }
  }

  // ---- Protocol and transport, on the control thread ----
  void send(size_t link, const Message& m) override { transport->send(link, m); }
  void leave(const Verdict& v) override {
    verdict = v;
    has_verdict = true;
  }
  void notice(Notice kind, int rank) override {
    for (auto& slot : notices) {
      uint32_t empty = 0;
      if (slot.compare_exchange_strong(
              empty, (static_cast<uint32_t>(rank) << 8) | (static_cast<uint32_t>(kind) + 1)))
        break;
    }
    call_helper();
  }
  void pace(const Pace& p) override {
    if (!paces) return;
    PaceSlot& slot = paces[static_cast<size_t>(p.rank)];
    slot.seconds.store(p.seconds, std::memory_order_relaxed);
    slot.data_seconds.store(p.data_seconds, std::memory_order_relaxed);
    slot.count.fetch_add(1, std::memory_order_release);
  }
  void on_message(size_t link, const Message& m) override {
    if (!protocol) return;  // the others are connected already
    const Nanos now = monotonic_now();
    protocol->on_local(hooks.sample(), now);
    protocol->on_message(link, m, now, *this);
  }
  void on_closed(size_t link, Closed::How how) override {
    if (!protocol) return;
    Closed closed{how, -1};
    const bool unexpected = !has_verdict && !protocol->said_bye(link);
    if (unexpected && topology.links[link].local && how != Closed::How::failed)
      closed = {Closed::How::ended, status_of(link), memory_kills.count() > killed_before};
    protocol->on_closed(link, closed, monotonic_now(), *this);
  }
  void on_connected(size_t link) override {
    if (protocol) protocol->on_connected(link, monotonic_now(), *this);
  }

  // ---- Processes of this node ----
  const PeerRecord& record(size_t link) const {
    return peers[static_cast<size_t>(topology.links[link].rank)];
  }
  // The process of a link, unless its number means another one by now.
  std::optional<ProcessFacts> process_of(size_t link) const {
    const PeerRecord& peer = record(link);
    if (!topology.links[link].local ||
        peer.pid_namespace != peers[static_cast<size_t>(topology.rank)].pid_namespace)
      return std::nullopt;
    std::optional<ProcessFacts> facts = read_process(peer.pid);
    if (facts && facts->start_ticks != peer.start_ticks) facts.reset();
    return facts;
  }
  // Its end closes a process's sockets before it becomes a zombie, which the launcher removes soon.
  int status_of(size_t link) const {
    for (int i = 0; i < 40; ++i) {
      const std::optional<ProcessFacts> facts = process_of(link);
      if (!facts) return -1;
      if (facts->state == 'Z') return facts->wait_status;
      usleep(100);
    }
    return -1;
  }

  // ---- The control thread ----
  void call_helper() {
    helper_calls.fetch_add(1);
    helper_calls.notify_one();
  }
  void wake_up() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake, &one, sizeof one);
  }
  void end(std::string_view text) {
    message(text);
    _exit(exit_lost);
  }
  bool lost_launcher() { return watch_launcher && getppid() != launcher; }

  void guard() {
    while (stage.load() == Stage::guard) {
      pollfd p{watched, POLLIN, 0};
      ::poll(&p, 1, 200);
      drain_wake();
      if (stage.load() != Stage::guard) return;
      if (lost_launcher())
        end("the launcher has ended. Fix: find out what ended it; the same command resumes");
      if (monotonic_now() > start_limit)
        end("the ranks did not start in time. Fix: look for a rank that did not start, or raise "
            "reliability.start_timeout_seconds");
    }
  }
  void drain_wake() {
    uint64_t count;
    [[maybe_unused]] const ssize_t n = read(wake, &count, sizeof count);
  }

  void run() {
    guard();
    ran = monotonic_now();
    while (stage.load() == Stage::connected) {
      transport->poll(std::clamp<Nanos>(protocol->deadline() - monotonic_now(), 0, 1_s), watched, *this);
      drain_wake();
      const Nanos now = monotonic_now();
      const Nanos gap = now - std::exchange(ran, now);
      if (!has_verdict) tick(now, gap);
      if (has_verdict) leave_now();
      lease.store(!topology.root() || protocol->has_lease(now));
      failing.store(!protocol->evidence().empty());
      if (protocol->state() == control::State::gone) {
        transport->drain(drain_limit);
        gone.store(true);
        gone.notify_all();
        return;
      }
    }
  }

  void tick(Nanos now, Nanos gap) {
    protocol->on_local(hooks.sample(), now);
    if (now - killed_read > kills_interval) {
      killed_read = now;
      killed_before = std::exchange(killed_now, memory_kills.count());
    }
    if (dying.exchange(false)) {
      Suspicion words;
      words.evidence = Evidence::process_exit;
      words.kind = Kind::rank_killed;
      words.when = now;
      if (hooks.last_words) hooks.last_words(words.text);
      protocol->on_failure(words, now, *this);
      told_last_words.store(true);
    }
    if (own_failure_ready.exchange(false)) protocol->on_failure(own_failure, now, *this);
    if (finish_wanted.exchange(false)) protocol->on_finish(now, *this);
    if (lost_launcher() && !std::exchange(reported_launcher, true)) {
      Suspicion lost;
      lost.kind = Kind::launcher_lost;
      lost.when = now;
      lost.text.assign("its launcher has ended");
      if (launcher_end >= 0) epoll_ctl(watched, EPOLL_CTL_DEL, launcher_end, nullptr);  // stays readable
      protocol->on_failure(lost, now, *this);
    }
    for (size_t i = 0; i < topology.links.size(); ++i)
      if (protocol->silence(i, now) > 2_s)
        if (const std::optional<ProcessFacts> facts = process_of(i))
          protocol->on_process_state(i, facts->state);
    protocol->on_tick(now, gap, *this);
  }

  // ---- Leaving ----
  [[noreturn]] void leave_now() {
    failing.store(true);
    lease.store(false);
    backstop_code.store(verdict.exit_code);
    struct sigaction action {};
    action.sa_handler = on_backstop;
    sigaction(SIGALRM, &action, nullptr);
    alarm(backstop_seconds);
    helper_leaves.store(true);
    call_helper();
    const Nanos begin = monotonic_now();
    // A stopped process reads the verdict once it runs again.
    std::array<size_t, 256> woken;
    size_t woken_count = 0;
    for (size_t i = 0; i < topology.links.size() && woken_count < woken.size(); ++i)
      if (const std::optional<ProcessFacts> facts = process_of(i); facts && facts->state == 'T') {
        ::kill(record(i).pid, SIGCONT);
        woken[woken_count++] = i;
      }
    bool killed = false;
    for (Nanos now = begin; now - begin < leave_budget + 500_ms; now = monotonic_now()) {
      bool waiting = !helper_done.load() && now - begin < leave_budget;
      for (size_t k = 0; k < woken_count; ++k) {
        const std::optional<ProcessFacts> facts = process_of(woken[k]);
        if (!facts || facts->state == 'Z') continue;
        waiting = true;
        if (!killed && now - begin > stopped_grace) ::kill(record(woken[k]).pid, SIGKILL);
      }
      killed |= now - begin > stopped_grace;
      if (!waiting) break;
      transport->poll(10_ms, -1, *this);
    }
    transport->drain(drain_limit);
    if (verdict.kind == Kind::node_lost) end_launcher();
    _exit(verdict.exit_code);
  }

  // mpirun would wait minutes for a node that does not answer.
  void end_launcher() const {
    const std::optional<ProcessFacts> facts = read_process(launcher);
    if (!watch_launcher || !topology.leader() || getppid() != launcher || !facts) return;
    for (const char* name : {"mpirun", "orterun", "prterun", "prte"})
      if (std::strcmp(facts->name, name) == 0) ::kill(launcher, SIGTERM);
  }

  void help() {
    uint32_t seen = 0;
    while (!helper_stops.load()) {
      helper_calls.wait(seen);
      seen = helper_calls.load();
      for (auto& slot : notices)
        if (const uint32_t n = slot.exchange(0); n != 0 && hooks.notice)
          hooks.notice(static_cast<Notice>((n & 0xFF) - 1), static_cast<int>(n >> 8));
      if (helper_leaves.exchange(false)) {
        try {
          hooks.leave({verdict, protocol->evidence(), verdict.issuer == topology.rank});
        } catch (const std::exception& e) {
          message(e.what());
        }
        helper_done.store(true);
      }
    }
  }

  // ---- Connecting, on the main thread ----
  std::string establish(const Options& options, const Bootstrap& b);
};

std::string Control::State::establish(const Options& options, const Bootstrap& b) {
  if (b.size == 1) {
    topology = make_topology(0, {0});
    peers.resize(1);
    transport = std::make_unique<Transport>(topology, Secret{}, "", 0);
    return {};
  }
  SecretRecord shared;
  if (b.rank == 0) {
    fill_random(shared.secret.key);
    uint64_t name = 0;
    fill_random(std::as_writable_bytes(std::span(&name, 1)));
    const std::string run = options.run_id.empty() ? fmt::format("{:016x}", name) : options.run_id;
    NRL_CHECK(run.size() < sizeof shared.run && run.find('/') == std::string::npos && run[0] != '.',
              "run id {}", run);
    std::memcpy(shared.run, run.data(), run.size());
    shared.secret.run = digest(std::as_bytes(std::span(run)));
    shared.secret.attempt = static_cast<uint32_t>(options.attempt);
  }
  b.broadcast(std::as_writable_bytes(std::span(&shared, 1)));

  PeerRecord own;
  own.host = host_identity();
  own.pid_namespace = pid_namespace();
  own.node = b.node;
  own.pid = getpid();
  if (const auto facts = read_process(own.pid)) own.start_ticks = facts->start_ticks;
  peers = gather(b, own);
  std::vector<int> nodes;
  for (const PeerRecord& p : peers) {
    size_t first = 0;
    while (peers[first].node != p.node || peers[first].host != p.host) ++first;
    nodes.push_back(static_cast<int>(first));
  }
  topology = make_topology(b.rank, nodes);
  transport = std::make_unique<Transport>(topology, shared.secret, shared.run,
                                          static_cast<Nanos>(options.network_timeout_s * 1e9));
  // An error of one rank is told after all know that there is one.
  Text<198> own_error;
  AddressRecord listening;
  try {
    transport->listen_local();
    if (transport->has_remote_children())
      listening.address = transport->listen_remote(open_interface(options.interface));
  } catch (const Error& e) {
    own_error.assign(e.what());
    listening.failed = 1;
  }
  const std::vector<AddressRecord> addresses = gather(b, listening);
  const bool hopeless = std::ranges::any_of(addresses, [](const AddressRecord& a) { return a.failed != 0; });
  if (!topology.links.empty() && topology.links[0].up)
    transport->set_parent(addresses[static_cast<size_t>(topology.links[0].rank)].address);
  const auto is_missing = [&](size_t link) { return !transport->is_open(link); };
  const auto links = std::views::iota(size_t{0}, topology.links.size());
  const auto waits_for = [&](size_t link) {
    return is_missing(link) && (topology.links[link].local || !hopeless);
  };
  const Nanos end = monotonic_now() + static_cast<Nanos>(options.connect_timeout_s * 1e9);
  while (std::ranges::any_of(links, waits_for) && monotonic_now() < end) transport->poll(50_ms, -1, *this);
  ConnectRecord result;
  result.failed = listening.failed;
  for (size_t i : links)
    if (is_missing(i)) {
      result.failed = 1;
      result.local |= topology.links[i].local;
      if (topology.links[i].up) result.error = transport->last_error();
    }
  const std::vector<ConnectRecord> results = gather(b, result);
  int failed = -1;
  bool local = false;
  for (int r = b.size - 1; r >= 0; --r) {
    const ConnectRecord& one = results[static_cast<size_t>(r)];
    local |= one.local != 0;
    if (one.failed != 0 && (failed < 0 || one.error != 0)) failed = r;
  }
  if (failed < 0) return {};
  const Topology theirs = make_topology(failed, nodes);
  const int parent = theirs.links.empty() || !theirs.links[0].up ? failed : theirs.links[0].rank;
  std::string text = fmt::format("control plane: rank {} (node {}) cannot reach rank {} (node {})", failed,
                                 theirs.node_of_rank(failed), parent, theirs.node_of_rank(parent));
  if (!local) text += " at " + text_of(addresses[static_cast<size_t>(parent)].address);
  const int error = results[static_cast<size_t>(failed)].error;
  text += error != 0 ? fmt::format(": {}", std::strerror(error)) : std::string(": no connection");
  for (const auto& reason : gather(b, own_error))
    if (reason.length > 0) {
      text = fmt::format("control plane: {}", reason.view());
      break;
    }
  const std::string fix = text.find("Fix: ") == std::string::npos ? ". Fix: set reliability.interface" : "";
  if (options.require) nrl::fail(Exit::unavailable, "{}{}", text, fix);
  // Every node is on its own; if a connection within a node failed, every rank.
  topology = transport->keep_local(!local);
  return "a lost node will not be noticed: " + text + fix;
}

Control::Control(double start_timeout_s, bool watch_launcher) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.start_limit = monotonic_now() + static_cast<Nanos>(start_timeout_s * 1e9);
  s.watch_launcher = watch_launcher;
  s.watch();
  s.thread = start_thread("nrl-control", [&s] { s.run(); });
}

Control::~Control() {
  State& s = *state_;
  s.stage.store(State::Stage::stopped);
  s.wake_up();
  s.thread.join();
  if (s.helper.joinable()) {
    s.helper_stops.store(true);
    s.call_helper();
    s.helper.join();
  }
}

std::string Control::connect(const Options& options, const Bootstrap& bootstrap, const Hooks& hooks) {
  State& s = *state_;
  NRL_CHECK(!connected());
  s.hooks = hooks;
  s.topology.rank = bootstrap.rank;
  std::string warning = s.establish(options, bootstrap);
  Limits limits;
  limits.heartbeat = static_cast<Nanos>(options.heartbeat_timeout_s * 1e9);
  limits.network = static_cast<Nanos>(options.network_timeout_s * 1e9);
  if (options.paces) limits.pace = pace_window;
  if (options.paces && s.topology.root())
    s.paces = std::make_unique<State::PaceSlot[]>(static_cast<size_t>(s.topology.size));
  s.protocol = std::make_unique<Protocol>(s.topology, limits, hooks.phase_name, monotonic_now());
  s.helper = start_thread("nrl-helper", [&s] { s.help(); });
  s.stage.store(State::Stage::connected);
  s.wake_up();
  return warning;
}

bool Control::connected() const {
  return state_->stage.load() == State::Stage::connected;
}

void Control::fail(Evidence evidence, int exit_code, std::string_view text, Kind kind) {
  State& s = *state_;
  NRL_CHECK(connected());
  if (!s.failed.exchange(true)) {  // the first failure of the process counts
    s.own_failure.evidence = evidence;
    s.own_failure.kind = kind;
    s.own_failure.exit_code = static_cast<uint8_t>(exit_code);
    s.own_failure.when = monotonic_now();
    s.own_failure.text.assign(text);
    s.own_failure_ready.store(true);
    s.wake_up();
  }
  for (;;) pause();
}

void Control::dying() noexcept {
  State& s = *state_;
  if (!connected()) return;
  s.dying.store(true);
  s.wake_up();
  const timespec pause{0, 1'000'000};
  for (int i = 0; i < 300 && !s.told_last_words.load(); ++i) nanosleep(&pause, nullptr);
}

std::vector<Control::PaceReading> Control::paces() const {
  const State& s = *state_;
  std::vector<PaceReading> out(s.paces ? static_cast<size_t>(s.topology.size) : 0);
  for (size_t r = 0; r < out.size(); ++r) {
    const State::PaceSlot& slot = s.paces[r];
    out[r].count = slot.count.load(std::memory_order_acquire);
    out[r].pace = {static_cast<int32_t>(r), slot.seconds.load(std::memory_order_relaxed),
                   slot.data_seconds.load(std::memory_order_relaxed)};
  }
  return out;
}

int Control::process_of(int rank) const {
  const State& s = *state_;
  const PeerRecord &own = s.peers[static_cast<size_t>(s.topology.rank)],
                   &peer = s.peers[static_cast<size_t>(rank)];
  const bool here = s.topology.node_of_rank(rank) == s.topology.node_of_rank(s.topology.rank);
  return here && peer.pid_namespace == own.pid_namespace ? peer.pid : 0;
}

const Topology& Control::topology() const {
  return state_->topology;
}
bool Control::may_commit() const {
  return state_->lease.load();
}
bool Control::is_failing() const {
  return state_->failing.load();
}

void Control::finish() {
  State& s = *state_;
  if (!connected()) return;
  s.finish_wanted.store(true);
  s.wake_up();
  s.gone.wait(false);
}

}  // namespace nrl::control
