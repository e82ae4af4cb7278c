// nrl-train prepare: tokenizes text into token files.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/data/prepare_report.h"
#include "apps/monitor/terminal.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/launch/stop_signal.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

struct PrepareArgs {
  std::vector<std::string> input;
  std::string tokenizer = "bytes";
  std::string output;
  std::string jsonl_key = "text";
  std::string invalid_utf8 = "error";  ///< error, replace or skip
  std::string on_bad_line = "error";   ///< error or skip
  bool append_eod = true;
  std::optional<uint64_t> shuffle_documents;  ///< seed
  int workers = 0;                            ///< 0: all cores
};

void warn_of(const data::Incidents& incidents, std::string_view message) {
  if (incidents.count == 0) return;
  std::string text = fmt::format("{} {}:", grouped(incidents.count), message);
  for (const std::string& location : incidents.locations) text += "\n  " + location;
  const int64_t more = incidents.count - static_cast<int64_t>(incidents.locations.size());
  if (more > 0) text += fmt::format("\n  and {} more", grouped(more));
  log::warn_text(text);
}

int run_prepare_command(const PrepareArgs& args) {
  data::PrepareOptions options;
  options.inputs = args.input;
  options.tokenizer = args.tokenizer;
  options.output = args.output;
  options.append_eod = args.append_eod;
  options.shuffle_documents = args.shuffle_documents;
  options.text.jsonl_key = args.jsonl_key;
  options.text.invalid_utf8 = args.invalid_utf8 == "error"     ? data::InvalidUtf8::error
                              : args.invalid_utf8 == "replace" ? data::InvalidUtf8::replace
                                                               : data::InvalidUtf8::skip;
  options.text.bad_line = args.on_bad_line == "error" ? data::BadLine::error : data::BadLine::skip;
  options.workers = args.workers;
  train::stop::handle_at_start();
  train::stop::handle_in_steps();
  options.stop = [] { return train::stop::requested() != 0; };

  data::PrepareReport report(monitor::terminal_columns(STDOUT_FILENO), [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  data::PrepareSummary s;
  try {
    s = data::run_prepare(options, [&](const data::PrepareProgress& p) { report(p); });
    report.finish();
  } catch (const data::PrepareStopped&) {
    const int signal = train::stop::requested();
    report.finish();
    log::info("stopped by {}: no files were written", train::stop::signal_name(signal));
    std::fflush(stdout);
    train::stop::end_by(signal);
  } catch (...) {
    report.finish();
    throw;
  }
  log::info(
      "{} document{} from {} file{}: {} of text -> {} tokens ({:.2f} bytes per token), vocabulary {}, {:.1f} "
      "s",
      grouped(s.documents), s.documents == 1 ? "" : "s", grouped(s.files), s.files == 1 ? "" : "s",
      human_bytes(static_cast<uint64_t>(s.text_bytes)), grouped(s.tokens),
      static_cast<double>(s.text_bytes) / static_cast<double>(s.tokens), s.vocab_size, s.seconds);
  if (s.vocab_wanted > s.vocab_size)
    log::info("the vocabulary has only {} of {} tokens: the text is too small for more",
              grouped(s.vocab_size), grouped(s.vocab_wanted));
  warn_of(s.json_as_text,
          fmt::format(".json files were read as plain text, because their first line is not a "
                      "JSON object with a text under \"{}\"",
                      args.jsonl_key));
  warn_of(s.counts.invalid_utf8, options.text.invalid_utf8 == data::InvalidUtf8::skip
                                     ? "documents with invalid UTF-8 were skipped"
                                     : "documents had invalid UTF-8, which was replaced by U+FFFD");
  warn_of(s.counts.bad_lines, "invalid lines were skipped");
  if (s.bytes_without_token > 0)
    log::info("{} bytes of text were skipped: the tokenizer has no token for them",
              grouped(s.bytes_without_token));
  if (!s.slow_reason.empty())
    log::info("the text was encoded by the sentencepiece library, which is slower: {}", s.slow_reason);
  log::info("wrote {0}.bin and {0}.idx; train on it with data.train.data_path: {0}", args.output);
  return 0;
}

}  // namespace

void add_prepare(CommandLine& line) {
  const auto args = std::make_shared<PrepareArgs>();
  CLI::App* c =
      line.add("prepare", "Tokenize text into token files (PREFIX.bin and PREFIX.idx)",
               "  nrl-train prepare --input book.txt --tokenizer bytes --output data/book\n"
               "  nrl-train prepare --input docs/ --tokenizer train-sentencepiece:8192 --output data/docs\n"
               "  nrl-train prepare --input web.jsonl --tokenizer hf:gpt2/tokenizer.json --output data/web");
  c->add_option("--input", args->input,
                "Text files, JSON lines (.jsonl, .json), either compressed (.gz, .zst), or directories")
      ->required();
  c->add_option("--tokenizer", args->tokenizer,
                "bytes | sentencepiece:MODEL | train-sentencepiece:SIZE | hf:tokenizer.json");
  c->add_option("--output", args->output, "Prefix of the files to write")->required();
  c->add_option("--jsonl-key", args->jsonl_key, "Field of a JSONL line that holds the text");
  c->add_option("--invalid-utf8", args->invalid_utf8,
                "Action for a document with invalid UTF-8: error | replace (by U+FFFD) | skip")
      ->check(CLI::IsMember({"error", "replace", "skip"}));
  c->add_option("--on-bad-line", args->on_bad_line, "Action for a JSONL line without a text: error | skip")
      ->check(CLI::IsMember({"error", "skip"}));
  c->add_flag("--append-eod,!--no-append-eod", args->append_eod,
              "End every document with the end-of-text token (default)");
  c->add_option(
      "--shuffle-documents", args->shuffle_documents,
      "Write the documents in a random order that depends on this SEED, so that data.split divides them "
      "at random (default: input order)");
  c->add_option("--workers", args->workers, "Threads (default: all cores)")->check(CLI::Range(0, 1024));
  line.on(c, [args] { return run_prepare_command(*args); });
}

}  // namespace nrl::app
