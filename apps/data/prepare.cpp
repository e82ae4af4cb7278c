#include "apps/data/prepare.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "apps/data/chunk_pipeline.h"
#include "apps/data/manifest.h"
#include "apps/data/tokenizer.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"

namespace nrl::data {
namespace {

using Clock = std::chrono::steady_clock;

/// The documents of a chunk.
struct Tokenized {
  std::vector<int32_t> tokens;
  std::vector<int64_t> ends;  // of the documents, in `tokens`
  int64_t text_bytes = 0, bytes_without_token = 0;
  ChunkCounts counts;
};
using Pipeline = ChunkPipeline<Tokenized>;
constexpr auto poll_interval = Pipeline::poll_interval;

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
    Pipeline pipeline(files, workers, [&](Pipeline::Job& job) {
      Tokenized& out = job.result;
      for_each_document(job.chunk, options.text, out.counts, [&](std::string_view text) {
        const size_t begin = out.tokens.size();
        out.bytes_without_token += tokenizer->encode(text, out.tokens);
        if (out.tokens.size() == begin) return;
        if (options.append_eod) out.tokens.push_back(*tokenizer->eos());
        out.ends.push_back(static_cast<int64_t>(out.tokens.size()));
        out.text_bytes += static_cast<int64_t>(text.size());
      });
      job.chunk.text = {};
    });
    const auto waiting = [&](int64_t bytes_in_flight) {
      PrepareProgress now = progress;
      now.bytes_done += bytes_in_flight;
      report(now);
    };
    while (const std::unique_ptr<Pipeline::Job> job = pipeline.next(waiting)) {
      const Tokenized& result = job->result;
      int64_t begin = 0;
      for (const int64_t end : result.ends) {
        if (end - begin > INT32_MAX)
          fail(Exit::data, "{}: a document is too long: {} tokens; expected at most {}. Fix: split the file",
               job->chunk.file->path, end - begin, INT32_MAX);
        writer.add_sequence(
            std::span(result.tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
        writer.end_document();
        begin = end;
      }
      summary.text_bytes += result.text_bytes;
      summary.bytes_without_token += result.bytes_without_token;
      summary.counts.invalid_utf8.add(result.counts.invalid_utf8);
      summary.counts.bad_lines.add(result.counts.bad_lines);
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
