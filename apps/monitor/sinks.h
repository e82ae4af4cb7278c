#pragma once
// The sinks of a run, written by a thread of their own.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "apps/monitor/sink.h"

namespace nrl::monitor {

/// The report of a sink that failed with `error`.
std::string failure_of(std::string_view sink, const std::exception& error);

/// Passes rows and texts to sinks once per `interval`; the caller only queues them. No error of a sink
/// reaches the caller: a sink that fails is reported once and not used any more. Each sink has a queue of
/// `capacity` entries; if it is full, the oldest are dropped and their number is reported. Without sinks
/// there is no thread and every call returns at once.
class Sinks {
 public:
  static constexpr size_t capacity = 4096;
  /// Receives the reports, on the thread that calls row(), text() or close().
  using Warn = std::function<void(const std::string&)>;

  explicit Sinks(std::vector<std::unique_ptr<Sink>> sinks = {}, Warn warn = {}, double interval = 1);
  Sinks(const Sinks&) = delete;
  Sinks& operator=(const Sinks&) = delete;
  /// Writes the entries that wait. The run counts as killed unless close() was called.
  ~Sinks();

  bool empty() const { return slots_.empty(); }
  void row(Row row);
  void text(int64_t step, double time, std::string tag, std::string text);
  /// Must be called after all rows and texts of a step that a later session may start from, so that it finds
  /// them: wakes the thread to write the entries that wait.
  void end_step();
  /// Writes the entries that wait and ends the run in all sinks. Later rows are ignored.
  void close(int64_t step, double time, int exit_code);
  /// Sink::next() of the sinks that did not fail. After close().
  std::vector<std::string> next() const;

 private:
  struct Entry {
    Row row;
    bool ends_step = false;  // and nothing else
    std::string tag, text;   // of a text; `row` has its step and time
  };
  using Queue = std::deque<std::shared_ptr<const Entry>>;
  struct Slot {
    std::unique_ptr<Sink> sink;
    Queue waiting;
    int64_t dropped = 0;
    bool failed = false;
  };

  void push(Entry entry, bool wake = false);
  void report();
  void run();
  void stop();
  static void write(Sink& sink, const Queue& entries);
  /// Calls `f`; returns the report of an error, empty if there was none.
  template <class F>
  static std::string guarded(const Sink& sink, const F& f);

  Warn warn_;
  double interval_;
  std::vector<Slot> slots_;
  std::mutex mutex_;  // of everything below, and of the queues
  std::condition_variable wake_;
  std::vector<std::string> reports_;
  bool stopping_ = false, urgent_ = false;
  std::thread thread_;
};

}  // namespace nrl::monitor
