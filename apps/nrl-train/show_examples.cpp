#include "apps/nrl-train/show_examples.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/data/examples/example_set.h"
#include "apps/data/examples/show.h"
#include "apps/data/tokenizer.h"
#include "apps/monitor/terminal.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/scratch_directory.h"

namespace nrl::app {
namespace {

// The enumerator of a spelling, which the parser has checked.
template <class E>
E enumerator(const std::string& name) {
  const auto& names = EnumNames<E>::names;
  return static_cast<E>(std::find(std::begin(names), std::end(names), name) - std::begin(names));
}

template <class E>
CLI::Option* add_choice(CLI::App* command, const std::string& name, std::string& value, std::string help,
                        size_t first = 0) {
  const auto& names = EnumNames<E>::names;
  const std::vector<std::string> choices(std::begin(names) + first, std::end(names));
  for (const std::string& choice : choices) help += (choice == choices[0] ? ": " : " | ") + choice;
  return command->add_option(name, value, help)->check(CLI::IsMember(choices));
}

bool color_wanted() {
  const auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value ? value : "");
  };
  return monitor::terminal_columns(STDOUT_FILENO) > 0 && environment("NO_COLOR").empty() &&
         environment("TERM") != "dumb";
}

}  // namespace

void add_show_examples(CLI::App* c, ShowExamplesArgs& args) {
  data::ExampleOptions& o = args.options;
  constexpr const char* group = "Options for records";
  const auto in_group = [&](CLI::Option* option) {
    option->group(group);
    args.of_records.push_back(option);
  };
  in_group(c->add_option("--tokenizer", args.tokenizer,
                         "bytes | sentencepiece:MODEL | hf:tokenizer.json | a directory with a tokenizer"));
  in_group(add_choice<ExampleFormat>(c, "--format", args.format, "Content of the records", 1));
  in_group(c->add_option("--chat-template", o.chat_template,
                         "default (the tokenizer's) | none | a name | a file | the text of a template"));
  in_group(c->add_option("--template-date", o.template_date, "Date that the template may print, YYYY-MM-DD"));
  in_group(add_choice<TrainOn>(c, "--train-on", args.train_on, "Tokens with a loss"));
  in_group(c->add_option("--max-length", o.max_length, "Most tokens of a sequence (default: no limit)")
               ->check(CLI::Range(int64_t{2}, int64_t{std::numeric_limits<int32_t>::max()})));
  in_group(add_choice<OnOverlong>(c, "--on-overlong", args.on_overlong, "Action for longer ones"));
  in_group(add_choice<SpecialTokensInText>(c, "--special-tokens", args.special_tokens,
                                           "Texts of special tokens in records"));
  in_group(add_choice<OnBadRecord>(c, "--on-bad-record", args.on_bad_record, "Action for a bad record"));
  constexpr std::pair<const char*, std::string data::ExampleOptions::*> keys[] = {
      {"--text-key", &data::ExampleOptions::text_key},
      {"--chat-key", &data::ExampleOptions::chat_key},
      {"--tools-key", &data::ExampleOptions::tools_key},
      {"--input-key", &data::ExampleOptions::input_key},
      {"--output-key", &data::ExampleOptions::output_key},
      {"--prompt-key", &data::ExampleOptions::prompt_key},
      {"--chosen-key", &data::ExampleOptions::chosen_key},
      {"--rejected-key", &data::ExampleOptions::rejected_key}};
  for (const auto& [name, member] : keys) in_group(c->add_option(name, o.*member, "Field of a record"));
  in_group(c->add_option("--system-prompt-file", o.system_prompt_file, "System message of instructions"));
  in_group(c->add_option("--prompt-file", o.prompt_file, "Text in which {} stands for the prompt"));
  in_group(c->add_flag("--add-bos", o.add_bos, "Without a template: begin with the beginning token"));
  in_group(c->add_flag("!--no-add-eos", o.add_eos, "Without a template: no end token"));
  in_group(
      c->add_option("--cache-dir", o.cache_dir, "Directory in which the tokens are kept (default: nowhere)"));
  c->add_option("--n", args.n, "Number of examples to print (default 3)")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()));
  c->add_flag("--ids", args.ids, "Print the token ids of examples too, those with a loss marked *");
  c->add_option("--workers", args.workers, "Threads that make examples (default: all cores)")
      ->check(CLI::Range(0, 1024));
}

bool names_records(const std::string& path) {
  constexpr std::array<std::string_view, 7> ends = {".jsonl", ".ndjson", ".json",   ".txt",
                                                    ".gz",    ".zst",    ".parquet"};
  return is_directory(path) ||
         std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return path.ends_with(end); });
}

int show_examples(const ShowExamplesArgs& args, std::vector<std::string> inputs, bool json) {
  if (args.tokenizer.empty())
    fail(Exit::usage, "{}: records need a tokenizer. Fix: --tokenizer bytes, or a directory with a tokenizer",
         clipped(inputs.at(0)));
  data::ExampleOptions options = args.options;
  options.inputs = std::move(inputs);
  options.format = enumerator<ExampleFormat>(args.format);
  options.train_on = enumerator<TrainOn>(args.train_on);
  options.on_overlong = enumerator<OnOverlong>(args.on_overlong);
  options.special_tokens_in_text = enumerator<SpecialTokensInText>(args.special_tokens);
  options.on_bad_record = enumerator<OnBadRecord>(args.on_bad_record);
  if (options.max_length == 0) options.max_length = std::numeric_limits<int32_t>::max();
  std::unique_ptr<ScratchDirectory> scratch;
  if (options.cache_dir.empty()) {
    scratch = std::make_unique<ScratchDirectory>(scratch_parent(), "nrl-examples-");
    options.cache_dir = scratch->path();
  }
  const auto tokenizer = data::make_tokenizer(args.tokenizer);
  const auto set = data::open_examples(options, *tokenizer, args.workers);
  return print_examples(*set, *tokenizer, args, json);
}

int print_examples(const data::ExampleSet& set, const data::Tokenizer& tokenizer,
                   const ShowExamplesArgs& args, bool json) {
  const int64_t count = std::min(args.n, set.size());
  if (json) {
    std::cout << data::set_json(set).dump() << '\n';
    for (int64_t i = 0; i < count; ++i) std::cout << data::example_json(set, tokenizer, i).dump() << '\n';
  } else {
    const data::ShowStyle style{.color = color_wanted(), .ids = args.ids};
    for (int64_t i = 0; i < count; ++i) std::cout << data::example_text(set, tokenizer, i, style) << '\n';
    std::cout << data::set_text(set);
    std::cout.flush();
    for (const std::string& warning : data::set_warnings(set)) log::warn_text(warning);
  }
  return std::cout.flush() ? 0 : static_cast<int>(Exit::io);
}

}  // namespace nrl::app
