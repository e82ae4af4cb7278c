#pragma once
// Ends the test program when a case hangs, so that a deadlock is a failure with a name.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

class TimeLimit {
 public:
  explicit TimeLimit(std::string what, std::chrono::seconds limit = std::chrono::seconds(30))
      : thread_([this, what = std::move(what), limit] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, limit, [this] { return done_; })) return;
          std::fprintf(stderr, "HANG: %s: not over after %d s\n", what.c_str(),
                       static_cast<int>(limit.count()));
          std::_Exit(1);
        }) {}
  ~TimeLimit() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    over_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::thread thread_;
};
