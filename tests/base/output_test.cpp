#include "core/base/output.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <iostream>
#include <regex>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "tests/catch.h"

#ifdef __SANITIZE_THREAD__
// Children of fork() start threads here.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif

using namespace nrl;
using Stream = OutputQueue::Stream;

namespace {

// A pipe of one page.
struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    std::array<int, 2> ends;
    REQUIRE(::pipe(ends.data()) == 0);
    read_end = ends[0], write_end = ends[1];
    REQUIRE(::fcntl(write_end, F_SETPIPE_SZ, 4096) >= 4096);
  }
  ~Pipe() {
    close_read();
    close_write();
  }
  void close_read() {
    if (read_end >= 0) ::close(std::exchange(read_end, -1));
  }
  void close_write() {
    if (write_end >= 0) ::close(std::exchange(write_end, -1));
  }
  // Everything up to the first text that ends with `last`, or up to the end.
  std::string read_until(const std::string& last) {
    std::string text;
    std::array<char, 4096> buffer;
    while (last.empty() || !text.ends_with(last)) {
      const ssize_t n = ::read(read_end, buffer.data(), buffer.size());
      if (n <= 0) break;
      text.append(buffer.data(), static_cast<size_t>(n));
    }
    return text;
  }
};

OutputQueue::Options impatient() {
  OutputQueue::Options options;
  options.queue_bytes = 10'000;
  options.stuck = std::chrono::milliseconds(50);
  return options;
}

std::string line(int i) {
  return fmt::format("line {:05}\n", i);
}

// Runs `body` in a child process with both streams in a pipe: what it printed, and its wait status.
std::pair<std::string, int> printed_by_child(const std::function<void()>& body) {
  Pipe pipe;
  std::cout.flush();  // or the child would print what Catch2 3 has buffered
  std::fflush(nullptr);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::dup2(pipe.write_end, STDOUT_FILENO);
    ::dup2(pipe.write_end, STDERR_FILENO);
    ::signal(SIGABRT, SIG_DFL);
    body();
    ::_exit(99);
  }
  pipe.close_write();
  std::string text = pipe.read_until("");
#if defined(__SANITIZE_ADDRESS__)
  // The leak check at exit may warn about the writer threads.
  text = std::regex_replace(text, std::regex("==[0-9]+==Running thread [^\n]*False leaks are possible\\.\n"),
                            "");
#endif
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return {text, status};
}

}  // namespace

TEST_CASE("both streams come out in the order of the calls", "[base]") {
  Pipe pipe;
  OutputQueue queue(pipe.write_end, pipe.write_end);
  std::string expected;
  for (int i = 0; i < 200; ++i) {
    queue.write(i % 3 == 0 ? Stream::err : Stream::out, line(i));
    expected += line(i);
  }
  REQUIRE(queue.flush());
  REQUIRE(pipe.read_until(line(199)) == expected);
}

TEST_CASE("a stopped reader blocks no writer and is told how many lines it missed", "[base]") {
  Pipe out, err;
  OutputQueue queue(out.write_end, err.write_end, impatient());
  constexpr int lines = 5000;
  queue.write(Stream::out, line(0));
  REQUIRE(queue.flush());
  for (int i = 1; i < lines; ++i) queue.write(Stream::out, line(i));
  REQUIRE_FALSE(queue.flush());
  queue.write(Stream::err, "warn: w\n");  // the other stream goes on
  REQUIRE(err.read_until("w\n") == "warn: w\n");
  std::istringstream text(out.read_until(line(lines - 1)));
  REQUIRE(queue.flush());
  // Every line is there in its place or counted there.
  int64_t next = 0, missed = 0;
  for (std::string got; std::getline(text, got);) {
    if (got.starts_with('(')) {
      const int64_t here = std::stoll(got.substr(1));
      REQUIRE(got + "\n" == OutputQueue::plain_dropped_text(here));
      next += here;
      missed += here;
    } else {
      REQUIRE(got + "\n" == line(static_cast<int>(next++)));
    }
  }
  REQUIRE(next == lines);
  REQUIRE(missed > 1000);
}

TEST_CASE("a text longer than the queue is written all the same", "[base]") {
  Pipe out, err;
  OutputQueue queue(out.write_end, err.write_end, impatient());
  const std::string text = std::string(20'000, 'x') + "\n";
  queue.write(Stream::out, text);
  REQUIRE(out.read_until("\n") == text);
  REQUIRE(queue.flush());
}

TEST_CASE("a closed reader silences its stream only", "[base]") {
  Pipe out, err;
  out.close_read();
  OutputQueue queue(out.write_end, err.write_end, impatient());
  for (int i = 0; i < 5000; ++i) queue.write(Stream::out, line(i));  // SIGPIPE would end the test
  queue.write(Stream::err, "warn: w\n");
  REQUIRE(queue.flush());
  REQUIRE(err.read_until("w\n") == "warn: w\n");
}

TEST_CASE("a descriptor that another process made non-blocking is waited for", "[base]") {
  Pipe out, err;
  REQUIRE(::fcntl(out.write_end, F_SETFL, O_NONBLOCK) == 0);
  OutputQueue queue(out.write_end, err.write_end);
  const std::string text = std::string(20'000, 'x') + "\n";
  queue.write(Stream::out, text);
  REQUIRE(out.read_until("\n") == text);
  REQUIRE(queue.flush());
}

TEST_CASE("at the end lines that were not read are counted on the other stream", "[base]") {
  Pipe out, err;
  OutputQueue::Options options = impatient();
  options.queue_bytes = 1 << 20;
  OutputQueue queue(out.write_end, err.write_end, options);
  for (int i = 0; i < 1000; ++i) queue.write(Stream::out, std::string(99, 'x') + "\n");
  queue.finish();
  const std::string text = err.read_until("\n");
  REQUIRE(text.starts_with("warn: the last "));
  const int64_t lines = std::stoll(text.substr(15));
  REQUIRE(lines > 900);
  REQUIRE(lines <= 1000);
  out.close_read();  // the thread lets go of the pipe
  bool written = false;
  for (int i = 0; i < 1000 && !(written = queue.flush()); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  REQUIRE(written);
}

TEST_CASE("exit() and std::terminate() lose no line, and signal handlers can wait for them", "[base]") {
  const auto print = [] {
    output::background();
    for (int i = 0; i < 300; ++i) output::write(i % 2 == 0 ? Stream::out : Stream::err, line(i));
  };
  std::string expected;
  for (int i = 0; i < 300; ++i) expected += line(i);
  const auto [at_exit, exited] = printed_by_child([&] {
    print();
    std::exit(3);
  });
  REQUIRE(at_exit == expected);
  REQUIRE(WEXITSTATUS(exited) == 3);
  const auto [at_terminate, aborted] = printed_by_child([&] {
    print();
    std::terminate();
  });
  REQUIRE(at_terminate.starts_with(expected));
  REQUIRE(WIFSIGNALED(aborted));
  const auto [in_handler, left] = printed_by_child([&] {
    print();
    output::flush_in_handler(std::chrono::seconds(20));
    ::_exit(4);
  });
  REQUIRE(in_handler == expected);
  REQUIRE(WEXITSTATUS(left) == 4);
}
