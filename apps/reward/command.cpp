#include "apps/reward/command.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/spawn.h"
#include "core/base/status.h"
#include "core/base/text.h"
#include "core/io/append_file.h"

namespace nrl::reward {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t longest_answer = size_t{64} << 10, longest_log = size_t{1} << 20, kept_words = 500;

struct Ends {
  int read = -1, write = -1;
};

Ends make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail(Exit::io, "pipe to a reward command: {}", std::strerror(errno));
  return {ends[0], ends[1]};
}

void close_end(int& end) {
  if (end >= 0) close(end);
  end = -1;
}

std::vector<std::string> worker_environment() {
  return inherited({"HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ"});
}

const std::vector<std::string> without_net = {"unshare", "--map-current-user", "--net", "--"};

}  // namespace

CommandOptions command_options(const Spec& spec) {
  return {.command = spec.options.get_string("command"),
          .workers = spec.options.get_int("workers", 2),
          .time_limit_s = spec.options.get_double("time_limit_s", 10),
          .memory_mib = spec.options.get_int("memory_mib", 4096),
          .network = spec.options.get_bool("network", false),
          .log = {}};
}

bool can_deny_network() {
  static const bool can = [] {
    std::vector<std::string> words = without_net;
    words.emplace_back("true");
    pid_t pid = -1;
    if (spawn_group(pid, words, worker_environment(), {}) != 0) return false;
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }();
  return can;
}

struct CommandWorkers::Worker {
  pid_t pid = -1;
  int in = -1, out = -1, error = -1;  ///< our ends
  std::string to_send, received, words;
  std::optional<size_t> item;  ///< in work
  Clock::time_point until;
};

CommandWorkers::CommandWorkers(CommandOptions options) : options_(std::move(options)) {
  for (int64_t i = 0; i < options_.workers; ++i) workers_.push_back(std::make_unique<Worker>());
}

CommandWorkers::~CommandWorkers() {
  for (const auto& worker : workers_) stop(*worker);
}

bool CommandWorkers::without_network() const {
  return !options_.network && can_deny_network();
}

void CommandWorkers::start(Worker& w) {
  Ends in = make_pipe(), out = make_pipe(), error = make_pipe();
  std::vector<std::string> words = without_network() ? without_net : std::vector<std::string>();
  // A worker dies with the thread that started it, and gains no rights by setuid programs.
  words.insert(words.end(), {"setpriv", "--no-new-privs", "--pdeathsig", "KILL", "--"});
  // $0 is the command.
  words.insert(
      words.end(),
      {"sh", "-c", fmt::format("ulimit -c 0; ulimit -v {}; exec sh -c \"$0\"", options_.memory_mib * 1024),
       options_.command});
  const int refused = spawn_group(w.pid, words, worker_environment(),
                                  {.in = in.read, .out = out.write, .error = error.write});
  for (int* end : {&in.read, &out.write, &error.write}) close_end(*end);
  if (refused != 0) {
    for (int* end : {&in.write, &out.read, &error.read}) close_end(*end);
    w.pid = -1;
    fail(Exit::unavailable, "{}: {}", words.front(), std::strerror(refused));
  }
  for (const int end : {in.write, out.read, error.read}) fcntl(end, F_SETFL, O_NONBLOCK);
  w.in = in.write;
  w.out = out.read;
  w.error = error.read;
  w.to_send.clear();
  w.received.clear();
  w.words.clear();
}

void CommandWorkers::stop(Worker& w) {
  if (w.pid < 0) return;
  kill(-w.pid, SIGKILL);
  int status = 0;
  while (waitpid(w.pid, &status, 0) < 0 && errno == EINTR) {
  }
  read_errors(w);
  for (int* end : {&w.in, &w.out, &w.error}) close_end(*end);
  w.pid = -1;
}

void CommandWorkers::read_errors(Worker& w) {
  char buffer[4096];
  for (ssize_t n; (n = read(w.error, buffer, sizeof buffer)) > 0;) {
    const auto count = static_cast<size_t>(n);
    w.words.append(buffer, count);
    if (w.words.size() > kept_words) w.words.erase(0, w.words.size() - kept_words);
    const size_t more = std::min(count, longest_log - logged_);
    if (options_.log.empty() || more == 0) continue;
    try {
      AppendFile(options_.log).append(std::string_view(buffer, more));
      logged_ += more;
    } catch (const Error&) {
      logged_ = longest_log;
    }
  }
}

void CommandWorkers::worker_failed(Worker& w, std::string why) {
  read_errors(w);
  std::string words = w.words;
  while (!words.empty() && words.back() == '\n') words.pop_back();
  if (!words.empty()) why += ": " + printable(words.substr(words.rfind('\n') + 1));
  stop(w);
  failed(std::move(why),
         "it must answer each line with {\"id\": ID, \"reward\": NUMBER} and flush its output");
}

std::string CommandWorkers::note() const {
  return fmt::format("the command {} with the rights of this user{}", clipped(options_.command),
                     without_network()    ? " and without network"
                     : can_deny_network() ? ", network included (network: true)"
                                          : ", network included (this system cannot deny it)");
}

std::vector<std::optional<double>> CommandWorkers::judge(std::span<const Item> items) {
  std::vector<std::optional<double>> rewards(items.size());
  size_t next = 0, done = 0;
  const auto finish = [&](Worker& w) {
    w.item.reset();
    status::made_progress();
    ++done;
  };
  const auto give = [&](Worker& w) {
    if (next == items.size()) return;
    if (w.pid < 0) start(w);
    w.to_send = request_of(items[next], next).dump() + "\n";
    w.received.clear();
    w.item = next++;
    w.until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                 std::chrono::duration<double>(options_.time_limit_s));
  };
  // An answer, or why the line is none.
  const auto take = [&](Worker& w, const std::string& text) -> std::string {
    try {
      return read_answer(parse_json(text, "answer", {.depth = 8}), *w.item, rewards[*w.item]);
    } catch (const Error&) {
      return "a line that is no JSON: " + printable(text.substr(0, 80));
    }
  };

  // Writing to a worker that is gone must not end the run.
  struct sigaction ignore = {}, before = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  struct Restore {
    struct sigaction& action;
    ~Restore() { sigaction(SIGPIPE, &action, nullptr); }
  } restore{before};

  while (done < items.size()) {
    std::vector<pollfd> polled;
    std::vector<Worker*> of;
    Clock::time_point first = Clock::time_point::max();
    for (const auto& worker : workers_) {
      if (!worker->item) give(*worker);
      if (!worker->item) continue;
      first = std::min(first, worker->until);
      for (const auto& [end, events] :
           {std::pair<int, short>(worker->out, POLLIN), std::pair<int, short>(worker->error, POLLIN),
            std::pair<int, short>(worker->in, POLLOUT)}) {
        if (end == worker->in && worker->to_send.empty()) continue;
        polled.push_back({.fd = end, .events = events, .revents = 0});
        of.push_back(worker.get());
      }
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - Clock::now()).count();
    if (poll(polled.data(), polled.size(), static_cast<int>(std::clamp<int64_t>(left, 0, 60'000))) < 0 &&
        errno != EINTR)
      fail(Exit::io, "poll of reward commands: {}", std::strerror(errno));
    for (size_t i = 0; i < polled.size(); ++i) {
      Worker& w = *of[i];
      if (!w.item || polled[i].revents == 0) continue;
      std::string why;
      if (polled[i].fd == w.error) {
        if (polled[i].revents & POLLIN)
          read_errors(w);
        else
          close_end(w.error);
        continue;
      }
      if (polled[i].fd == w.in) {
        const ssize_t n = write(w.in, w.to_send.data(), w.to_send.size());
        if (n > 0) w.to_send.erase(0, static_cast<size_t>(n));
        if (n < 0 && errno != EAGAIN && errno != EINTR) why = "it reads no more";
      } else if (polled[i].fd == w.out) {
        char buffer[4096];
        const ssize_t n = read(w.out, buffer, sizeof buffer);
        if (n == 0) why = "it ended";
        if (n > 0) w.received.append(buffer, static_cast<size_t>(n));
        const size_t end = w.received.find('\n');
        if (end != std::string::npos) {
          why = take(w, w.received.substr(0, end));
          if (why.empty() && end + 1 < w.received.size()) why = "more than one line for a completion";
          if (why.empty()) {
            answered();
            finish(w);
            continue;
          }
          rewards[*w.item].reset();
        } else if (w.received.size() > longest_answer) {
          why = "a line of more than 64 KiB";
        }
      } else {
        continue;
      }
      if (why.empty()) continue;
      worker_failed(w, std::move(why));
      finish(w);
    }
    for (const auto& worker : workers_)
      if (worker->item && Clock::now() >= worker->until) {
        worker_failed(*worker, fmt::format("no answer in {:g} s", options_.time_limit_s));
        finish(*worker);
      }
  }
  return rewards;
}

}  // namespace nrl::reward
