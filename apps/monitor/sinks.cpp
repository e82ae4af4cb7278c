#include "apps/monitor/sinks.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "core/base/error.h"
#include "core/base/threads.h"

namespace nrl::monitor {

std::string failure_of(std::string_view sink, const std::exception& error) {
  const auto* const files = dynamic_cast<const std::filesystem::filesystem_error*>(&error);
  const std::string what = files ? fmt::format("{}: {}", files->path1().string(), files->code().message())
                                 : error_from(error).what();
  return fmt::format("{}; the run continues without {}", what, sink);
}

Sinks::Sinks(std::vector<std::unique_ptr<Sink>> sinks, Warn warn, double interval)
    : warn_(std::move(warn)), interval_(interval) {
  for (std::unique_ptr<Sink>& sink : sinks) slots_.push_back({.sink = std::move(sink), .waiting = {}});
  if (slots_.empty()) return;
  const BlockedSignals blocked;  // signals are for the threads of the run
  thread_ = start_thread([this] { run(); });
}

Sinks::~Sinks() {
  stop();
}

void Sinks::row(Row row) {
  if (!slots_.empty()) push({.row = std::move(row), .tag = {}, .text = {}});
}

void Sinks::text(int64_t step, double time, std::string tag, std::string text) {
  if (!slots_.empty())
    push({.row = {.step = step, .time = time}, .tag = std::move(tag), .text = std::move(text)});
}

void Sinks::end_step() {
  if (!slots_.empty()) push({.row = {}, .ends_step = true, .tag = {}, .text = {}}, true);
}

void Sinks::push(Entry entry, bool wake) {
  const auto shared = std::make_shared<const Entry>(std::move(entry));
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    for (Slot& slot : slots_) {
      if (slot.failed) continue;
      if (slot.waiting.size() == capacity) {
        slot.waiting.pop_front();
        slot.dropped += 1;
      }
      slot.waiting.push_back(shared);
      wake = wake || slot.waiting.size() == capacity / 2;
    }
    urgent_ = urgent_ || wake;
  }
  if (wake) wake_.notify_one();
  report();
}

void Sinks::report() {
  std::vector<std::string> reports;
  {
    const std::lock_guard lock(mutex_);
    reports = std::exchange(reports_, {});
  }
  if (warn_)
    for (const std::string& text : reports) warn_(text);
}

template <class F>
std::string Sinks::guarded(const Sink& sink, const F& f) {
  try {
    f();
    return {};
  } catch (const std::exception& e) {
    return failure_of(sink.name(), e);
  }
}

void Sinks::write(Sink& sink, const Queue& entries) {
  for (const auto& entry : entries) {
    if (entry->ends_step)
      sink.end_step();
    else if (entry->tag.empty())
      sink.row(entry->row);
    else
      sink.text(entry->row.step, entry->row.time, entry->tag, entry->text);
  }
  sink.flush();
}

void Sinks::run() {
  std::unique_lock lock(mutex_);
  for (bool last = false; !last;) {
    wake_.wait_for(lock, std::chrono::duration<double>(interval_), [&] { return stopping_ || urgent_; });
    last = stopping_;
    urgent_ = false;
    for (Slot& slot : slots_) {
      const Queue entries = std::exchange(slot.waiting, {});
      const int64_t dropped = std::exchange(slot.dropped, 0);
      if (dropped > 0)
        reports_.push_back(
            fmt::format("{} is too slow: its oldest {} rows were dropped; metrics.jsonl has them",
                        slot.sink->name(), dropped));
      if (entries.empty() || slot.failed) continue;
      lock.unlock();
      const std::string error = guarded(*slot.sink, [&] { write(*slot.sink, entries); });
      lock.lock();
      if (error.empty()) continue;
      slot.failed = true;
      slot.waiting.clear();
      reports_.push_back(error);
    }
  }
}

void Sinks::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Sinks::close(int64_t step, double time, int exit_code) {
  if (!thread_.joinable()) return;
  stop();
  for (Slot& slot : slots_) {
    if (slot.failed) continue;
    const std::string error = guarded(*slot.sink, [&] { slot.sink->close(step, time, exit_code); });
    if (error.empty()) continue;
    slot.failed = true;
    reports_.push_back(error);
  }
  report();
}

std::vector<std::string> Sinks::next() const {
  std::vector<std::string> out;
  for (const Slot& slot : slots_)
    if (std::string command = slot.failed ? "" : slot.sink->next(); !command.empty())
      out.push_back(std::move(command));
  return out;
}

}  // namespace nrl::monitor
