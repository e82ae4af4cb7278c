#pragma once
// Reads files and works on their text with several threads, in bounded memory.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "apps/data/encode_progress.h"
#include "apps/data/text_source.h"
#include "core/base/threads.h"

namespace nrl::data {

/// One thread reads, several work, and the caller gets the results in input order.
template <class Result>
class ChunkPipeline {
 public:
  struct Job {
    TextChunk chunk;
    Result result;
    size_t result_bytes = 0;  ///< memory of the result, if `work` sets it: counts against the limit

    // Used by the pipeline.
    size_t bytes = 0;                  // that count against the limit
    size_t chunk_bytes = 0;            // size of the text
    std::atomic<int64_t> encoded = 0;  // bytes encoded so far, see encode_progress.h
    std::exception_ptr error;
    bool done = false;
  };
  using Work = std::function<void(Job&)>;

  static constexpr std::chrono::milliseconds poll_interval{200};

  /// `files` must outlive the pipeline; `work` is called by several threads at a time. `chunk_bytes`: see
  /// read_chunks().
  ChunkPipeline(const std::vector<InputFile>& files, int workers, Work work,
                size_t chunk_bytes = default_chunk_bytes)
      : files_(files),
        work_(std::move(work)),
        chunk_bytes_(chunk_bytes),
        max_jobs_(static_cast<size_t>(4 * workers)) {
    try {
      threads_.push_back(start_thread([this] { read(); }));
      for (int i = 0; i < workers; ++i) threads_.push_back(start_thread([this] { take_jobs(); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ChunkPipeline() { stop(); }
  ChunkPipeline(const ChunkPipeline&) = delete;
  ChunkPipeline& operator=(const ChunkPipeline&) = delete;

  /// The next result, or null at the end. Rethrows the first error in input order. While waiting, calls
  /// `waiting` every poll_interval with the file bytes that jobs in flight have encoded so far.
  std::unique_ptr<Job> next(const std::function<void(int64_t)>& waiting) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, poll_interval,
                              [&] { return order_.empty() ? read_all_ : order_.front()->done; })) {
      const int64_t bytes = bytes_in_flight();
      lock.unlock();
      waiting(bytes);
      lock.lock();
    }
    if (order_.empty()) return nullptr;
    std::unique_ptr<Job> job = std::move(order_.front());
    order_.pop_front();
    bytes_ -= job->bytes;
    --started_;
    lock.unlock();
    changed_.notify_all();
    if (job->error) std::rethrow_exception(job->error);
    return job;
  }

 private:
  int64_t bytes_in_flight() const {
    double bytes = 0;
    for (size_t i = 0; i < started_; ++i) {
      const Job& job = *order_[i];
      const double fraction = static_cast<double>(job.encoded.load(std::memory_order_relaxed)) /
                              static_cast<double>(std::max<size_t>(job.chunk_bytes, 1));
      bytes += static_cast<double>(job.chunk.file_bytes) * (job.done ? 1.0 : std::min(fraction, 1.0));
    }
    return static_cast<int64_t>(bytes);
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Returns false if the pipeline is being stopped.
  bool push(std::unique_ptr<Job> job) {
    std::unique_lock lock(mutex_);
    constexpr size_t max_bytes = size_t{256} << 20;
    job->bytes = job->chunk_bytes = job->chunk.text.size();
    changed_.wait(lock, [&] {
      return stop_ || order_.empty() || (order_.size() < max_jobs_ && bytes_ + job->bytes <= max_bytes);
    });
    if (stop_) return false;
    bytes_ += job->bytes;
    order_.push_back(std::move(job));
    lock.unlock();
    changed_.notify_all();
    return true;
  }

  void read() {
    bool going = true;
    const auto push_chunk = [&](TextChunk&& chunk) {
      auto job = std::make_unique<Job>();
      job->chunk = std::move(chunk);
      return going = push(std::move(job));
    };
    for (const InputFile& file : files_) {
      if (!going) return;
      try {
        read_chunks(file, push_chunk, chunk_bytes_);
      } catch (...) {
        auto job = std::make_unique<Job>();
        job->error = std::current_exception();
        going = push(std::move(job));
      }
    }
    const std::lock_guard lock(mutex_);
    read_all_ = true;
    changed_.notify_all();
  }

  void take_jobs() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stop_ || started_ < order_.size() || read_all_; });
      if (stop_ || started_ == order_.size()) return;
      Job& job = *order_[started_++];
      lock.unlock();
      std::exception_ptr error = job.error;
      if (!error) try {
          encode_progress = &job.encoded;
          work_(job);
        } catch (...) {
          error = std::current_exception();
        }
      encode_progress = nullptr;
      lock.lock();
      job.error = error;
      job.bytes += job.result_bytes;
      bytes_ += job.result_bytes;
      job.done = true;
      changed_.notify_all();
    }
  }

  const std::vector<InputFile>& files_;
  const Work work_;
  const size_t chunk_bytes_, max_jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Jobs in input order that next() has not returned yet; workers have taken the first `started_` of them.
  std::deque<std::unique_ptr<Job>> order_;
  size_t started_ = 0;
  size_t bytes_ = 0;  // texts and results of the jobs in order_
  bool stop_ = false, read_all_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nrl::data
