#include "core/base/output.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <poll.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/threads.h"

namespace nrl {
namespace {

using Clock = std::chrono::steady_clock;

// How long a text waits for an earlier text of the other stream.
constexpr std::chrono::milliseconds order_timeout{200};

int64_t lines_of(std::string_view text) {
  return std::count(text.begin(), text.end(), '\n');
}

// Calls `progress` after every write; false when the descriptor has failed.
template <class Progress>
bool write_all(int fd, std::string_view text, const Progress& progress) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {  // another process made the shared descriptor non-blocking
      pollfd ready = {fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (n < 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
    progress();
  }
  return true;
}

}  // namespace

struct OutputQueue::State : std::enable_shared_from_this<OutputQueue::State> {
  struct Text {
    uint64_t number;  // of the write() call, over both streams
    std::string text;
  };
  struct Queue {
    int fd = -1;
    std::deque<Text> waiting;
    size_t bytes = 0;     // of `waiting`
    int64_t dropped = 0;  // lines that are missing before waiting.front()
    bool has_thread = false, closed = false;
    // The text that the thread is writing.
    bool busy = false;
    uint64_t number = 0;
    Clock::time_point since;  // of the last byte that was taken

    bool idle() const { return !busy && waiting.empty(); }
    uint64_t oldest() const { return busy ? number : waiting.empty() ? UINT64_MAX : waiting.front().number; }
  };

  Options options;
  std::array<Queue, 2> queues;
  DroppedText dropped_text = plain_dropped_text;
  uint64_t calls = 0;
  bool leave = false;
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int> unwritten{0};  // texts of both streams, for signal handlers
  static_assert(std::atomic<int>::is_always_lock_free);

  Queue& queue(Stream stream) { return queues[static_cast<size_t>(stream)]; }

  void forget(Queue& q, size_t count) {
    for (; count > 0; --count) {
      q.bytes -= q.waiting.front().text.size();
      q.waiting.pop_front();
      unwritten.fetch_sub(1);
    }
  }

  // The mutex must be held. False when the system refuses another thread.
  bool start_thread(Stream stream) {
    const BlockedSignals blocked;  // the thread inherits the mask
    try {
      std::thread([self = shared_from_this(), stream] { self->run(stream); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  void run(Stream stream) {
    Queue& q = queue(stream);
    const Queue& other = queue(stream == Stream::out ? Stream::err : Stream::out);
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return leave || !q.waiting.empty(); });
      if (leave) return;
      const auto in_order = [&] { return leave || other.oldest() > q.waiting.front().number; };
      changed.wait_until(lock, (other.busy ? other.since : Clock::now()) + order_timeout, in_order);
      if (leave) return;
      std::string text = std::move(q.waiting.front().text);
      q.bytes -= text.size();
      q.number = q.waiting.front().number;
      q.waiting.pop_front();
      if (const int64_t lines = std::exchange(q.dropped, 0); lines > 0)
        text.insert(0, stream == Stream::out ? dropped_text(lines) : plain_dropped_text(lines));
      q.busy = true;
      q.since = Clock::now();
      lock.unlock();
      const bool written = write_all(q.fd, text, [&] {
        const std::lock_guard progress(mutex);
        q.since = Clock::now();
      });
      lock.lock();
      q.busy = false;
      unwritten.fetch_sub(1);
      if (!written) {
        q.closed = true;
        forget(q, q.waiting.size());
      }
      changed.notify_all();
    }
  }
};

std::string OutputQueue::plain_dropped_text(int64_t lines) {
  return fmt::format("({} line{} not shown)\n", lines, lines == 1 ? " was" : "s were");
}

OutputQueue::OutputQueue(int out, int err, const Options& options) : state_(std::make_shared<State>()) {
  state_->options = options;
  state_->queue(Stream::out).fd = out;
  state_->queue(Stream::err).fd = err;
}

OutputQueue::~OutputQueue() {
  const std::lock_guard lock(state_->mutex);
  state_->leave = true;
  state_->changed.notify_all();
}

void OutputQueue::write(Stream stream, std::string_view text) {
  State& s = *state_;
  State::Queue& q = s.queue(stream);
  const std::lock_guard lock(s.mutex);
  if (q.closed || text.empty()) return;
  if (!q.has_thread && !(q.has_thread = s.start_thread(stream))) {
    q.closed = !write_all(q.fd, text, [] {});
    return;
  }
  while (!q.waiting.empty() && q.bytes + text.size() > s.options.queue_bytes) {
    q.dropped += lines_of(q.waiting.front().text);
    s.forget(q, 1);
  }
  q.waiting.push_back({s.calls++, std::string(text)});
  q.bytes += text.size();
  s.unwritten.fetch_add(1);
  s.changed.notify_all();
}

void OutputQueue::set_dropped_text(DroppedText text) {
  const std::lock_guard lock(state_->mutex);
  state_->dropped_text = text;
}

bool OutputQueue::flush() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  const Clock::time_point last = Clock::now() + s.options.flush;
  for (;;) {
    const Clock::time_point now = Clock::now();
    Clock::time_point until = now;
    bool idle = true;
    for (const State::Queue& q : s.queues) {
      if (q.idle()) continue;
      idle = false;
      until = std::max(until, (q.busy ? q.since : now) + s.options.stuck);
    }
    if (idle) return true;
    until = std::min(until, last);
    if (until <= now) return false;
    s.changed.wait_until(lock, until);
  }
}

void OutputQueue::finish() {
  if (flush()) return;
  State& s = *state_;
  int64_t lines = 0;
  {
    const std::lock_guard lock(s.mutex);
    const State::Queue& out = s.queue(Stream::out);
    if (out.idle() || !s.queue(Stream::err).idle()) return;
    lines = out.dropped + (out.busy ? 1 : 0);
    for (const State::Text& text : out.waiting) lines += lines_of(text.text);
  }
  if (lines == 0) return;
  write(Stream::err,
        fmt::format("warn: the last {} of standard output {} not shown: its reader stopped reading\n",
                    lines == 1 ? "line" : fmt::format("{} lines", lines), lines == 1 ? "was" : "were"));
  flush();
}

void OutputQueue::wait_in_handler(std::chrono::milliseconds limit) const {
  constexpr long slice_ms = 2;
  const struct timespec slice = {0, slice_ms * 1'000'000};
  for (int64_t waited = 0; state_->unwritten.load() > 0 && waited < limit.count(); waited += slice_ms)
    ::nanosleep(&slice, nullptr);
}

namespace output {
namespace {

// Never destroyed: the threads, exit handlers and signal handlers use it to the end.
std::atomic<OutputQueue*> queue{nullptr};

std::terminate_handler previous_terminate = nullptr;

}  // namespace

void write(Stream stream, std::string_view text) {
  if (OutputQueue* q = queue.load()) return q->write(stream, text);
  std::FILE* file = stream == Stream::out ? stdout : stderr;
  std::fwrite(text.data(), 1, text.size(), file);
  std::fflush(file);
}

void background() {
  if (queue.load()) return;
  std::fflush(stdout);
  std::fflush(stderr);
  queue = new OutputQueue(STDOUT_FILENO, STDERR_FILENO);
  std::atexit(flush);
  previous_terminate = std::set_terminate([] {
    flush();
    previous_terminate();
    std::abort();
  });
}

void set_dropped_text(OutputQueue::DroppedText text) {
  if (OutputQueue* q = queue.load()) q->set_dropped_text(text);
}

void flush() {
  if (OutputQueue* q = queue.load()) q->finish();
}

void flush_in_handler(std::chrono::milliseconds limit) {
  if (const OutputQueue* q = queue.load()) q->wait_in_handler(limit);
}

}  // namespace output
}  // namespace nrl
