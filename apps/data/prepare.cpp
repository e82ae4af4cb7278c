#include "apps/data/prepare.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "apps/data/encode_progress.h"
#include "apps/data/manifest.h"
#include "apps/data/tokenizer.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"

namespace nrl::data {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto poll_interval = std::chrono::milliseconds(200);

/// A chunk of text to be tokenized.
struct Job {
  TextChunk chunk;
  size_t chunk_bytes = 0;            // size of the text
  std::atomic<int64_t> encoded = 0;  // bytes encoded so far
  std::vector<int32_t> tokens;
  std::vector<int64_t> ends;  // of the documents, in `tokens`
  int64_t text_bytes = 0, bytes_without_token = 0;
  ChunkCounts counts;
  std::exception_ptr error;
  bool done = false;
};

/// One thread reads, several tokenize, and the caller gets the results in input order.
class Pipeline {
 public:
  using Work = std::function<void(Job&)>;

  Pipeline(const std::vector<InputFile>& files, int workers, Work work)
      : files_(files), work_(std::move(work)), max_jobs_(static_cast<size_t>(4 * workers)) {
    try {
      threads_.push_back(start_thread([this] { read(); }));
      for (int i = 0; i < workers; ++i) threads_.push_back(start_thread([this] { tokenize(); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pipeline() { stop(); }

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
    bytes_ -= job->chunk_bytes;
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
    job->chunk_bytes = job->chunk.text.size();
    changed_.wait(lock, [&] {
      return stop_ || order_.empty() || (order_.size() < max_jobs_ && bytes_ + job->chunk_bytes <= max_bytes);
    });
    if (stop_) return false;
    bytes_ += job->chunk_bytes;
    order_.push_back(std::move(job));
    lock.unlock();
    changed_.notify_all();
    return true;
  }

  void read() {
    bool going = true;
    for (const InputFile& file : files_) {
      if (!going) return;
      try {
        read_chunks(file, [&](TextChunk&& chunk) {
          auto job = std::make_unique<Job>();
          job->chunk = std::move(chunk);
          return going = push(std::move(job));
        });
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

  void tokenize() {
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
      job.done = true;
      changed_.notify_all();
    }
  }

  const std::vector<InputFile>& files_;
  const Work work_;
  const size_t max_jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Jobs in input order that next() has not returned yet; workers have taken the first `started_` of them.
  std::deque<std::unique_ptr<Job>> order_;
  size_t started_ = 0;
  size_t bytes_ = 0;  // text of the jobs in order_
  bool stop_ = false, read_all_ = false;
  std::vector<std::thread> threads_;
};

/// Reports progress at a limited rate, and throws PrepareStopped on a stop request.
class Reporter {
 public:
  using Phase = PrepareProgress::Phase;

  Reporter(const PrepareOptions& options, const std::function<void(const PrepareProgress&)>& call)
      : stop_(options.stop), call_(call) {}
  void begin(PrepareProgress& progress, Phase phase) {
    progress.phase = phase;
    begin_ = Clock::now();
    (*this)(progress, true);
  }
  void operator()(PrepareProgress progress, bool always = false) {
    const auto now = Clock::now();
    if (!always && now - last_ < poll_interval / 2) return;
    if (stop_ && stop_()) throw PrepareStopped();
    last_ = now;
    progress.seconds = std::chrono::duration<double>(now - begin_).count();
    if (call_) call_(progress);
  }

 private:
  const std::function<bool()>& stop_;
  const std::function<void(const PrepareProgress&)>& call_;
  Clock::time_point begin_ = Clock::now(), last_{};
};

// A sample of lines from the beginning of every file, in proportion to the file's size.
std::vector<std::string> sample_lines(const std::vector<InputFile>& files, const ChunkOptions& options,
                                      PrepareProgress progress, Reporter& report) {
  constexpr double sample_bytes = 16 << 20;
  constexpr size_t longest_line = 4096;
  std::vector<std::string> lines;
  const auto all = static_cast<double>(std::max<int64_t>(progress.bytes, 1));
  report.begin(progress, PrepareProgress::Phase::sampling);
  for (const InputFile& file : files) {
    double wanted = std::max(4096.0, sample_bytes * static_cast<double>(file.bytes) / all);
    ChunkCounts counts;
    const auto take = [&](std::string_view text) {
      while (!text.empty() && wanted > 0) {
        size_t end = std::min({text.find('\n'), text.size(), longest_line});
        // Long lines are split between characters.
        while (end < text.size() && end > 0 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
        if (end > 0) lines.emplace_back(text.substr(0, end));
        wanted -= static_cast<double>(end + 1);
        text.remove_prefix(end);
        if (text.starts_with('\n')) text.remove_prefix(1);
      }
    };
    read_chunks(file, [&](TextChunk&& chunk) {
      for_each_document(chunk, options, counts, take);
      report(progress);
      return wanted > 0;
    });
    progress.bytes_done += file.bytes;
    ++progress.files_done;
    report(progress);
  }
  return lines;
}

// Training cannot be interrupted, so it runs on another thread while this one reports progress.
std::string train_on(const std::vector<std::string>& lines, int64_t size, int workers,
                     PrepareProgress progress, Reporter& report) {
  report.begin(progress, PrepareProgress::Phase::training_tokenizer);
  std::future<std::string> model =
      std::async(std::launch::async, [&] { return train_sentencepiece(lines, size, workers); });
  while (model.wait_for(poll_interval) != std::future_status::ready) report(progress);
  return model.get();
}

int64_t size_to_train(const std::string& spec) {
  constexpr std::string_view prefix = "train-sentencepiece:";
  if (!spec.starts_with(prefix)) return 0;
  int64_t size = 0;
  const char* end = spec.data() + spec.size();
  const auto [stop, error] = std::from_chars(spec.data() + prefix.size(), end, size);
  if (error != std::errc() || stop != end || size <= 0)
    fail(Exit::usage, "tokenizer '{}': expected a number of tokens after the colon", spec);
  return size;
}

}  // namespace

PrepareSummary run_prepare(const PrepareOptions& options,
                           const std::function<void(const PrepareProgress&)>& progress_call) {
  const auto start = Clock::now();
  if (options.output.empty()) fail(Exit::usage, "prepare: --output is empty; expected a prefix");
  if (options.inputs.empty()) fail(Exit::usage, "prepare: --input is empty; expected files or directories");
  const int64_t train_size = size_to_train(options.tokenizer);
  std::unique_ptr<Tokenizer> tokenizer = train_size > 0 ? nullptr : make_tokenizer(options.tokenizer);
  const std::vector<InputFile> files =
      list_inputs(options.inputs, options.output + ".", options.text.jsonl_key);
  const int workers = options.workers > 0
                          ? std::min(options.workers, 256)
                          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));

  PrepareSummary summary;
  Reporter report(options, progress_call);
  PrepareProgress progress;
  progress.files = static_cast<int64_t>(files.size());
  for (const InputFile& file : files) {
    progress.bytes += file.bytes;
    if (file.json_as_text) summary.json_as_text.add(file.path);
  }
  make_directories(parent_path(options.output));

  if (!tokenizer) {
    const auto lines = sample_lines(files, options.text, progress, report);
    tokenizer = make_sentencepiece(train_on(lines, train_size, workers, progress, report), options.tokenizer);
    summary.vocab_wanted = train_size;
  }
  if (options.append_eod && !tokenizer->eos())
    fail(Exit::usage, "the tokenizer {} has no end-of-document token. Fix: use --no-append-eod",
         options.tokenizer);

  report.begin(progress, PrepareProgress::Phase::tokenizing);
  IndexedDatasetWriter writer(options.output, tokenizer->vocab_size());
  {
    Pipeline pipeline(files, workers, [&](Job& job) {
      for_each_document(job.chunk, options.text, job.counts, [&](std::string_view text) {
        const size_t begin = job.tokens.size();
        job.bytes_without_token += tokenizer->encode(text, job.tokens);
        if (job.tokens.size() == begin) return;
        if (options.append_eod) job.tokens.push_back(*tokenizer->eos());
        job.ends.push_back(static_cast<int64_t>(job.tokens.size()));
        job.text_bytes += static_cast<int64_t>(text.size());
      });
      job.chunk.text = {};
    });
    const auto waiting = [&](int64_t bytes_in_flight) {
      PrepareProgress now = progress;
      now.bytes_done += bytes_in_flight;
      report(now);
    };
    while (const std::unique_ptr<Job> job = pipeline.next(waiting)) {
      int64_t begin = 0;
      for (const int64_t end : job->ends) {
        if (end - begin > INT32_MAX)
          fail(Exit::data, "{}: a document is too long: {} tokens; expected at most {}. Fix: split the file",
               job->chunk.file->path, end - begin, INT32_MAX);
        writer.add_sequence(
            std::span(job->tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
        writer.end_document();
        begin = end;
      }
      summary.text_bytes += job->text_bytes;
      summary.bytes_without_token += job->bytes_without_token;
      summary.counts.invalid_utf8.add(job->counts.invalid_utf8);
      summary.counts.bad_lines.add(job->counts.bad_lines);
      progress.bytes_done += job->chunk.file_bytes;
      progress.files_done += job->chunk.last;
      progress.documents = writer.documents();
      progress.tokens = writer.tokens();
      report(progress);
    }
  }
  if (writer.tokens() == 0)
    fail(Exit::data,
         "prepare: no text in {} file{} (skipped: {} invalid lines, {} documents with invalid UTF-8)",
         files.size(), files.size() == 1 ? "" : "s", summary.counts.bad_lines.count,
         options.text.invalid_utf8 == InvalidUtf8::skip ? summary.counts.invalid_utf8.count : 0);

  if (options.shuffle_documents)
    writer.shuffle_documents(*options.shuffle_documents, [&] { report(progress); });

  DatasetManifest manifest;
  if (options.append_eod) manifest.eod = tokenizer->eos();
  manifest.documents = writer.documents();
  manifest.tokens = writer.tokens();
  manifest.text_bytes = summary.text_bytes;
  std::vector<std::unique_ptr<AtomicFile>> companions;
  for (const Tokenizer::File& file : dataset_companions(options.output, *tokenizer, manifest)) {
    companions.push_back(std::make_unique<AtomicFile>(file.name));
    companions.back()->write(file.content);
  }
  report(progress, true);  // the last opportunity to stop
  writer.finish([&] {
    for (const auto& file : companions) file->commit();
  });

  summary.files = progress.files;
  summary.documents = manifest.documents;
  summary.tokens = manifest.tokens;
  summary.vocab_size = tokenizer->vocab_size();
  summary.slow_reason = tokenizer->slow_reason();
  summary.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return summary;
}

}  // namespace nrl::data
