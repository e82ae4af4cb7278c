#include "apps/profile/chrome_writer.h"

#include <spdlog/fmt/fmt.h>

#include "core/io/json.h"

namespace nrl::profile {
namespace {

/// Microseconds with all digits of the nanoseconds, exact as text.
std::string microseconds(int64_t ns) {
  return fmt::format("{}.{:03}", ns / 1000, ns % 1000);
}

}  // namespace

ChromeWriter::ChromeWriter(const std::string& path, std::string_view header)
    : file_(path), text_(fmt::format("{{{}\"traceEvents\": [\n", header)) {}

// Events with the same name are many.
std::string_view ChromeWriter::quoted(std::string_view text) {
  auto [at, added] = quoted_.try_emplace(std::string(text));
  if (added) at->second = JsonValue(text).dump();
  return at->second;
}

void ChromeWriter::separate() {
  if (events_++ > 0) text_ += ",\n";
  if (text_.size() < size_t{1} << 20) return;
  file_.write(text_);
  text_.clear();
}

void ChromeWriter::name(std::string_view what, int pid, int tid, std::string_view value) {
  separate();
  text_ += fmt::format(R"({{"ph": "M", "name": "{}", "pid": {}, "tid": {}, "args": {{"{}": {}}}}})", what,
                       pid, tid, what == "process_labels" ? "labels" : "name", quoted(value));
}

void ChromeWriter::slice(std::string_view category, std::string_view event_name, int pid, int tid,
                         int64_t begin, int64_t end, std::string_view arguments) {
  separate();
  text_ += fmt::format(
      R"({{"ph": "X", "cat": "{}", "name": {}, "pid": {}, "tid": {}, "ts": {}, "dur": {}, "args": {{{}}}}})",
      category, quoted(event_name), pid, tid, microseconds(begin), microseconds(end - begin), arguments);
}

void ChromeWriter::flow(std::string_view event_name, int64_t id, bool end, int pid, int tid, int64_t at) {
  separate();
  text_ += fmt::format(
      R"({{"ph": "{}", "cat": "message", "name": {}, "id": {}, "pid": {}, "tid": {}, "ts": {}{}}})",
      end ? "f" : "s", quoted(event_name), id, pid, tid, microseconds(at), end ? R"(, "bp": "e")" : "");
}

void ChromeWriter::counter(std::string_view counter_name, int pid, int64_t at, std::string_view values) {
  separate();
  text_ += fmt::format(R"({{"ph": "C", "name": {}, "pid": {}, "ts": {}, "args": {{{}}}}})",
                       quoted(counter_name), pid, microseconds(at), values);
}

void ChromeWriter::commit() {
  text_ += "\n]}\n";
  file_.write(text_);
  file_.commit();
}

}  // namespace nrl::profile
