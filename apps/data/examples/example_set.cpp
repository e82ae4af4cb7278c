#include "apps/data/examples/example_set.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "apps/data/chat/template_choice.h"
#include "apps/data/chunk_pipeline.h"
#include "apps/data/examples/cache_file.h"
#include "apps/data/examples/example_builder.h"
#include "apps/data/examples/example_cache.h"
#include "apps/data/examples/example_counts.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::data {
namespace {

// Small chunks, because rendering may multiply their text.
constexpr size_t example_chunk_bytes = size_t{256} << 10;
using ExamplePipeline = ChunkPipeline<ExampleBatch>;
using ExampleClock = std::chrono::steady_clock;

/// A key of a record with its default, and the formats that use it.
struct KeyUse {
  const char* name;
  std::string ExampleOptions::*member;
  std::vector<ExampleFormat> formats;
};

bool used_in(const KeyUse& use, ExampleFormat format) {
  return std::find(use.formats.begin(), use.formats.end(), format) != use.formats.end();
}

// Refuses options that have no effect in this format.
void check_options(const ExampleOptions& o, bool with_template) {
  using enum ExampleFormat;
  const ExampleOptions usual;
  const KeyUse keys[] = {
      {"text_key", &ExampleOptions::text_key, {text}},
      {"chat_key", &ExampleOptions::chat_key, {messages}},
      {"tools_key", &ExampleOptions::tools_key, {messages, instruction, preference, rollouts}},
      {"input_key", &ExampleOptions::input_key, {instruction, rollouts}},
      {"output_key", &ExampleOptions::output_key, {instruction, rollouts}},
      {"prompt_key", &ExampleOptions::prompt_key, {preference}},
      {"chosen_key", &ExampleOptions::chosen_key, {preference}},
      {"rejected_key", &ExampleOptions::rejected_key, {preference}}};
  for (const KeyUse& use : keys)
    if (!used_in(use, o.format) && o.*use.member != usual.*use.member)
      fail(Exit::config, "{}: '{}' has no effect: the format is {}", use.name, o.*use.member,
           name_of(o.format));
  const auto refuse_train_on = [&](std::string_view expected) {
    fail(Exit::config, "train_on: {} does not apply to the format {}; expected {}", name_of(o.train_on),
         name_of(o.format), expected);
  };
  if (o.format == text && o.train_on != TrainOn::all) refuse_train_on("all");
  if (o.format == messages && o.train_on == TrainOn::completion)
    refuse_train_on("assistant, last_assistant or all");
  if (o.format == rollouts && o.train_on != TrainOn::completion) refuse_train_on("completion");
  if (with_template) {
    if (o.add_bos || !o.add_eos)
      fail(Exit::config,
           "add_bos and add_eos have no effect with a chat template, which writes these tokens");
  } else {
    if (o.format == messages)
      fail(Exit::config, "the format messages needs a chat template, and the tokenizer has none. {}",
           no_template_fix());
    if (!o.chat_template_kwargs.is_null())
      fail(Exit::config, "chat_template_kwargs: no effect without a chat template");
    if (!o.template_date.empty()) fail(Exit::config, "template_date: no effect without a chat template");
  }
}

TrainOn usual_train_on(ExampleFormat format) {
  if (format == ExampleFormat::text) return TrainOn::all;
  return format == ExampleFormat::messages ? TrainOn::assistant : TrainOn::completion;
}

// Calls `take` with the lines of the files and "FILE:line" of each until it returns true.
void read_lines(const std::vector<InputFile>& files,
                const std::function<bool(std::string_view line, const std::string& source)>& take) {
  bool done = false;
  for (size_t i = 0; i < files.size() && !done; ++i)
    read_chunks(files[i], [&](TextChunk&& chunk) {
      for_each_line(chunk, [&](std::string_view line, int64_t number) {
        if (!done) done = take(line, fmt::format("{}:{}", files[i].path, number));
      });
      return !done;
    });
}

// The format of the first record of the files, with a note about the choice.
ExampleFormat first_format(const std::vector<InputFile>& files, const ExampleOptions& options,
                           std::vector<std::string>& notes) {
  const auto text =
      std::find_if(files.begin(), files.end(), [](const InputFile& file) { return !file.jsonl; });
  std::optional<ExampleFormat> format;
  read_lines({files.begin(), text}, [&](std::string_view line, const std::string& source) {
    const JsonValue record = parse_json_line(line, source);
    try {
      const DetectedFormat detected = detect_format(record, options);
      format = detected.format;
      notes.push_back(
          fmt::format("format: {} ({} has {})", name_of(detected.format), source, detected.fields));
    } catch (const Error& e) {
      fail(e.code(), "{}", place_in_line(e.what(), source));
    }
    return true;
  });
  if (format) return *format;
  if (text == files.end()) fail(Exit::data, "{}: no records", files.empty() ? "the input" : files[0].path);
  notes.push_back(fmt::format("format: text ({} is not JSON lines)", text->path));
  return ExampleFormat::text;
}

// The columns of all records. The first record that can be read decides which numbers rollouts have.
ExpectedColumns expected_columns(const std::vector<InputFile>& files, const ExampleOptions& options,
                                 const ExampleBuilder& builder) {
  ExpectedColumns expected;
  if (options.format == ExampleFormat::preference)
    expected.columns.values[static_cast<size_t>(ExampleValue::margin)] = true;
  if (options.format != ExampleFormat::rollouts) return expected;
  expected.columns.groups = true;
  read_lines(files, [&](std::string_view line, const std::string& source) {
    try {
      expected = {.columns = builder.columns(line, source), .where = source};
      return true;
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
      return options.on_bad_record == OnBadRecord::error;  // reported when the examples are made
    }
  });
  return expected;
}

int worker_threads(int threads) {
  if (threads > 0) return std::min(threads, 256);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Reports at a limited rate.
class ExampleReporter {
 public:
  explicit ExampleReporter(const std::function<void(const ExampleProgress&)>& call) : call_(call) {}
  void operator()(ExampleProgress progress) {
    const auto now = ExampleClock::now();
    if (!call_ || now - last_ < ExamplePipeline::poll_interval / 2) return;
    last_ = now;
    progress.seconds = std::chrono::duration<double>(now - begin_).count();
    call_(progress);
  }

 private:
  const std::function<void(const ExampleProgress&)>& call_;
  const ExampleClock::time_point begin_ = ExampleClock::now();
  ExampleClock::time_point last_{};
};

// Makes the cache at `path`.
void build_cache(const std::string& path, const std::string& key, const std::vector<InputFile>& files,
                 const ExampleBuilder& builder, const ExpectedColumns& expected, int threads,
                 ExampleReporter& report, const std::function<std::string()>& current_key) {
  ExampleProgress progress;
  for (const InputFile& file : files) progress.bytes += file.bytes;
  ExampleCacheWriter writer(path, builder.sequences(), expected.columns);
  ExamplePipeline pipeline(
      files, threads,
      [&](ExamplePipeline::Job& job) {
        builder.add(job.chunk, static_cast<int32_t>(job.chunk.file - files.data()), expected, job.result);
        job.result_bytes = job.result.bytes();
        job.chunk.text = {};
      },
      example_chunk_bytes);
  const auto waiting = [&](int64_t bytes_in_flight) {
    ExampleProgress now = progress;
    now.bytes_done += bytes_in_flight;
    report(now);
  };
  while (const auto job = pipeline.next(waiting)) {
    writer.add(job->result);
    progress.bytes_done += job->chunk.file_bytes;
    progress.records = writer.counts().records;
    progress.tokens = writer.counts().tokens;
    report(progress);
  }
  const ExampleCounts& counts = writer.counts();
  if (counts.examples == 0)
    fail(Exit::data,
         "{}: no examples in {}: {} too long, {} with special tokens in the text, {} without tokens to "
         "train, {} "
         "bad",
         files[0].path, counted(counts.records, "record"), counts.dropped.count, counts.special_dropped.count,
         counts.without_loss.count, counts.skipped.count);
  if (current_key() != key)
    fail(Exit::data, "{}: the input changed while it was read. Fix: run again", files[0].path);
  writer.finish(key);
}

}  // namespace

struct ExampleSet::State {
  std::unique_ptr<const ExampleCache> cache;
  ExampleFormat format;
  TrainOn train_on;
  bool rendered = false;
  std::vector<std::string> files, notes;

  size_t sequence(int64_t example, int sequence) const {
    const int each = cache->facts().sequences;
    NRL_CHECK(example >= 0 && example < cache->examples() && sequence >= 0 && sequence < each,
              "sequence {} of example {} of {}", sequence, example, cache->examples());
    return static_cast<size_t>(example) * static_cast<size_t>(each) + static_cast<size_t>(sequence);
  }
  const ExampleSource& source(int64_t example) const {
    NRL_CHECK(example >= 0 && example < cache->examples(), "example {} of {}", example, cache->examples());
    return cache->arrays().sources[static_cast<size_t>(example)];
  }
  // The rows of an example in an array of a teacher.
  template <class T>
  std::span<const T> top_rows(std::span<const T> rows, int64_t example) const {
    const size_t i = sequence(example, 0);
    if (rows.empty()) return {};
    const auto first = cache->arrays().top_first;
    const auto width = static_cast<uint64_t>(cache->facts().columns.top_k);
    return rows.subspan(first[i] * width, (first[i + 1] - first[i]) * width);
  }
  // The name of a file. A cache of another program may have other indices.
  std::string file(int32_t index) const {
    return index >= 0 && static_cast<size_t>(index) < files.size() ? files[static_cast<size_t>(index)] : "?";
  }
};

ExampleSet::ExampleSet(std::unique_ptr<const State> state) : state_(std::move(state)) {}
ExampleSet::~ExampleSet() = default;

int64_t ExampleSet::size() const {
  return state_->cache->examples();
}
int ExampleSet::sequences_per_example() const {
  return state_->cache->facts().sequences;
}

SequenceLength ExampleSet::length(int64_t example, int sequence) const {
  const ExampleCache::Arrays& arrays = state_->cache->arrays();
  const size_t i = state_->sequence(example, sequence);
  return {.tokens = static_cast<int32_t>(arrays.first[i + 1] - arrays.first[i]),
          .loss_tokens = arrays.loss[i]};
}

std::span<const int32_t> ExampleSet::ids(int64_t example, int sequence) const {
  const ExampleCache::Arrays& arrays = state_->cache->arrays();
  const size_t i = state_->sequence(example, sequence);
  return arrays.ids.subspan(arrays.first[i], arrays.first[i + 1] - arrays.first[i]);
}

bool ExampleSet::in_loss(int64_t example, int sequence, int64_t token) const {
  const ExampleCache::Arrays& arrays = state_->cache->arrays();
  const size_t i = state_->sequence(example, sequence);
  const uint64_t bit = arrays.first[i] + static_cast<uint64_t>(token);
  NRL_CHECK(token >= 0 && bit < arrays.first[i + 1], "token {} of example {}", token, example);
  return (arrays.mask[bit / 64] >> (bit % 64) & 1) != 0;
}

ExampleColumns ExampleSet::columns() const {
  return state_->cache->facts().columns;
}

double ExampleSet::value(int64_t example, ExampleValue value) const {
  const size_t i = state_->sequence(example, 0) / static_cast<size_t>(sequences_per_example());
  const auto column = state_->cache->arrays().values[static_cast<size_t>(value)];
  return column.empty() ? 0 : column[i];
}

std::span<const float> ExampleSet::log_probs(int64_t example, TokenLogProbs kind) const {
  const size_t i = state_->sequence(example, 0);
  const ExampleCache::Arrays& arrays = state_->cache->arrays();
  const auto column = arrays.log_probs[static_cast<size_t>(kind)];
  if (column.empty()) return {};
  return column.subspan(arrays.first[i], arrays.first[i + 1] - arrays.first[i]);
}

int64_t ExampleSet::group(int64_t example) const {
  const size_t i = state_->sequence(example, 0);
  const auto groups = state_->cache->arrays().groups;
  return groups.empty() ? example : groups[i];
}

std::span<const int32_t> ExampleSet::top_ids(int64_t example) const {
  return state_->top_rows(state_->cache->arrays().top_ids, example);
}

std::span<const float> ExampleSet::top_log_probs(int64_t example) const {
  return state_->top_rows(state_->cache->arrays().top_log_probs, example);
}

int64_t ExampleSet::source_row(int64_t example) const {
  return state_->source(example).row;
}

std::string ExampleSet::where(int64_t example) const {
  const ExampleSource& source = state_->source(example);
  return fmt::format("{}:{}", state_->file(source.file), source.line);
}

std::string ExampleSet::where(const RecordIncidents::Place& place) const {
  return fmt::format("{}:{}{}", state_->file(place.file), place.line, place.text);
}

std::string ExampleSet::describe() const {
  const ExampleCounts& c = counts();
  return fmt::format("{} examples of {} ({}), {:.0f} tokens on average, {:.0f} % with a loss ({})",
                     human_count(static_cast<double>(c.examples)), fmt::join(files(), " "), name_of(format()),
                     static_cast<double>(c.tokens) / static_cast<double>(c.examples),
                     100 * static_cast<double>(c.loss_tokens) / static_cast<double>(c.tokens),
                     name_of(train_on()));
}

const ExampleCounts& ExampleSet::counts() const {
  return state_->cache->facts().counts;
}
ExampleFormat ExampleSet::format() const {
  return state_->format;
}
TrainOn ExampleSet::train_on() const {
  return state_->train_on;
}
bool ExampleSet::rendered() const {
  return state_->rendered;
}
const std::vector<std::string>& ExampleSet::files() const {
  return state_->files;
}
const std::vector<std::string>& ExampleSet::notes() const {
  return state_->notes;
}

std::shared_ptr<const ExampleSet> open_examples(const ExampleOptions& given, const Tokenizer& tokenizer,
                                                int threads,
                                                const std::function<void(const ExampleProgress&)>& progress) {
  ExampleOptions options = given;
  if (options.inputs.empty()) fail(Exit::config, "examples: no input files");
  if (options.max_length < 2)
    fail(Exit::config, "examples: max_length is {}; expected at least 2", options.max_length);
  if (options.format == ExampleFormat::tokens)
    fail(Exit::config, "format: token files have no examples; expected {}",
         alternatives({{"auto", "text", "messages", "instruction", "preference", "rollouts"}}));
  threads = worker_threads(threads);

  const CacheDirectory caches(options);
  const std::vector<InputFile> files =
      CacheDirectory::without_caches(list_inputs(options.inputs, caches.stem(), ""));
  if (files.empty()) fail(Exit::no_input, "{}: no files", options.inputs[0]);
  auto state = std::make_unique<ExampleSet::State>();
  for (const InputFile& file : files) state->files.push_back(file.path);
  if (options.format == ExampleFormat::automatic) options.format = first_format(files, options, state->notes);
  if (options.train_on == TrainOn::automatic) options.train_on = usual_train_on(options.format);

  std::optional<ChosenTemplate> chosen;
  if (options.format != ExampleFormat::text) {
    chosen = choose_chat_template(options.chat_template, tokenizer);
  } else if (options.chat_template != "default" && options.chat_template != "none") {
    fail(Exit::config, "chat_template: no effect: the format is text");
  }
  check_options(options, chosen.has_value());
  if (chosen) state->notes.push_back(fmt::format("chat template: {}", chosen->chat.name()));
  const bool dated = chosen && chosen->source.find("strftime_now") != std::string::npos;
  if (chosen && !dated && !options.template_date.empty())
    fail(Exit::config, "template_date: no effect: the chat template prints no date");
  if (dated && options.template_date.empty()) {
    options.template_date = today();
    state->notes.push_back(fmt::format(
        "the chat template prints a date: {}. Fix: set data.template_date to keep it in later runs",
        options.template_date));
  }
  if (!chosen && options.add_eos && !tokenizer.eos())
    state->notes.push_back("the tokenizer has no end token: none is trained");

  const RenderOptions render = render_options(tokenizer, dated ? options.template_date : today());
  const std::string template_text = chosen ? chosen->source : "";
  const ExampleBuilder builder(options, tokenizer,
                               chosen ? std::optional(std::move(chosen->chat)) : std::nullopt, render);
  const auto current_key = [&] { return example_key(options, files, tokenizer, template_text); };
  const std::string key = current_key();
  ExampleReporter report(progress);
  state->cache = caches.open(
      key, tokenizer.vocab_size(), threads,
      [&](const std::string& path) {
        build_cache(path, key, files, builder, expected_columns(files, options, builder), threads, report,
                    current_key);
      },
      [&] { report({.phase = ExampleProgress::Phase::waiting}); }, state->notes);
  state->format = options.format;
  state->train_on = options.train_on;
  state->rendered = chosen.has_value();
  return std::make_shared<const ExampleSet>(std::move(state));
}

}  // namespace nrl::data
