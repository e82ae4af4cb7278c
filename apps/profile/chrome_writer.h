#pragma once
// Trace events in the JSON of Chrome, which chrome://tracing and Perfetto read, written to a file as they
// come.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/io/atomic_file.h"

namespace nrl::profile {

class ChromeWriter {
 public:
  /// `header`: members of the file's object before "traceEvents", each with a comma after it. Fails with
  /// Exit::cannot_create or Exit::io, as all functions do.
  ChromeWriter(const std::string& path, std::string_view header);

  /// A name of a process or thread: `what` is process_name, process_labels or thread_name.
  void name(std::string_view what, int pid, int tid, std::string_view value);
  /// A slice of a thread in nanoseconds. `arguments`: members of "args".
  void slice(std::string_view category, std::string_view event_name, int pid, int tid, int64_t begin,
             int64_t end, std::string_view arguments);
  /// An arrow from a slice that contains `at` to the one of the call with the same `id` and `end`.
  void flow(std::string_view event_name, int64_t id, bool end, int pid, int tid, int64_t at);
  /// Values of a counter of a process from `at` on. `values`: members of "args".
  void counter(std::string_view counter_name, int pid, int64_t at, std::string_view values);
  /// The text as JSON, quoted once per text.
  std::string_view quoted(std::string_view text);
  /// Names, slices, ends of arrows and values of counters so far.
  size_t events() const { return events_; }
  /// Ends the file, which appears under its name.
  void commit();

 private:
  void separate();

  AtomicFile file_;
  std::string text_;
  std::unordered_map<std::string, std::string> quoted_;
  size_t events_ = 0;
};

}  // namespace nrl::profile
