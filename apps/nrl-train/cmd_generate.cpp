// nrl-train generate: continues a text with a trained model, or answers messages.

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/data/chat/chat_prompt.h"
#include "apps/data/chat/template_choice.h"
#include "apps/data/text_source.h"
#include "apps/data/tokenizer.h"
#include "apps/model/spec/parameters.h"
#include "apps/nrl-train/commands.h"
#include "apps/state/checkpoint.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/loop/capture.h"
#include "apps/train/loop/profile_files.h"
#include "apps/train/loop/text_generator.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "core/ops/transfer.h"
#include "core/trace/trace.h"

namespace nrl::app {
namespace {

struct GenerateArgs {
  std::string directory;
  std::vector<std::string> prompt;
  std::string prompts;  ///< a file of them; empty: none
  int64_t n = 1;        ///< continuations of each prompt
  bool chat = false;
  std::optional<std::string> system;
  std::string chat_template = "default";
  std::string tokenizer;  ///< empty: that of the directory
  int64_t max_tokens = 100;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1.0;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
  std::string profile;  ///< log directory for a window of generated tokens; empty: none
};

/// Records pieces of text as steps, without the first ones, which include the prompt.
class RecordedPieces {
 public:
  RecordedPieces(ops::Exec& exec, const model::ModelSpec& spec, int threads)
      : exec_(exec), calls_(static_cast<size_t>(100 + 40 * spec.layers)), threads_(threads) {}

  /// Must be called after each piece.
  void next() {
    ++pieces_;
    if (pieces_ == skipped) capture_.emplace(exec_, 1, most, calls_);
    if (!capture_ || done()) return;
    capture_->begin_step();
    trace::tag().step = static_cast<int32_t>(capture_->steps());
    if (done()) record_ = capture_->finish(true);
  }
  void write(const std::string& log_dir) {
    if (!capture_ || (!done() && capture_->steps() < 2))
      fail(Exit::usage,
           "--profile: {} pieces of text were generated; expected {} or more. Fix: raise --max-tokens",
           pieces_, skipped + 1);
    if (!done()) record_ = capture_->finish(true);
    record_.peaks = train::measure_peaks(exec_);
    profile::RunFacts facts;
    facts.threads = threads_;
    facts.tokens_per_step = 1;
    train::write_local_profile(record_, std::move(facts), log_dir);
    print_profile(log_dir);
  }

 private:
  static constexpr int64_t skipped = 3, most = 100;
  bool done() const { return capture_->steps() == most + 1; }

  ops::Exec& exec_;
  size_t calls_;
  int threads_;
  int64_t pieces_ = 0;
  std::optional<train::LocalCapture> capture_;
  profile::Recorded record_;
};

data::ChatPrompts chat_prompts(const GenerateArgs& args, const std::string& directory,
                               const data::Tokenizer& tokenizer) {
  constexpr std::string_view option = "--chat-template";
  const auto chosen = data::choose_chat_template(args.chat_template, tokenizer, option);
  if (!chosen)
    fail(Exit::usage, "--chat needs a chat template, and {}. {}",
         args.chat_template == "none"
             ? std::string("--chat-template is none")
             : fmt::format("the tokenizer of {} has none",
                           clipped(args.tokenizer.empty() ? directory : args.tokenizer)),
         data::no_template_fix(option));
  return {chosen->chat, data::render_options(tokenizer, data::today()), tokenizer};
}

JsonValue message(std::string_view role, std::string content, const std::string& source) {
  try {
    return data::chat_message(role, std::move(content));
  } catch (const Error& e) {
    fail(e.code(), "{}: {}", source, e.what());
  }
}

JsonValue first_messages(const GenerateArgs& args) {
  JsonValue messages = JsonValue::array();
  if (args.system) messages.push_back(message("system", *args.system, "--system"));
  return messages;
}

// Answers each line of standard input. `answer` prints and returns the answer to a prompt.
void converse(const GenerateArgs& args, const data::ChatPrompts& prompts,
              const std::function<std::string(data::Prompt)>& answer) {
  JsonValue messages = first_messages(args);
  const bool asks = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  const auto ask = [&] {
    if (asks) std::cout << "> " << std::flush;
  };
  std::string line;
  int64_t number = 0;
  for (ask(); std::getline(std::cin, line); ask()) {
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    messages.push_back(message("user", line, fmt::format("standard input:{}", number)));
    // A model may generate bytes that are no text.
    messages.push_back(
        message("assistant", data::with_replacements(answer(prompts.prompt(messages))), "the answer"));
  }
  if (asks) std::cout << std::endl;
}

/// A prompt of the command line or of a file.
struct Asked {
  std::string text, source;
};

std::vector<Asked> asked(const GenerateArgs& args) {
  std::vector<Asked> all;
  for (const std::string& text : args.prompt) all.push_back({text, "--prompt"});
  if (args.prompts.empty()) return all;
  std::istringstream file(read_file(args.prompts, uint64_t{1} << 30));
  const bool json = args.prompts.ends_with(".jsonl");
  int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string source = fmt::format("{}:{}", args.prompts, ++number);
    if (line.ends_with('\r')) line.pop_back();
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    if (json) {
      const JsonValue record = parse_json(line, source);
      const JsonValue* const prompt = record.is_object() ? record.find("prompt") : nullptr;
      if (!prompt || !prompt->is_string())
        fail(Exit::data, R"({}: expected an object {{"prompt": TEXT}})", source);
      line = prompt->as_string();
    }
    all.push_back({std::move(line), source});
  }
  if (all.empty()) fail(Exit::data, "{}: no prompts; expected one in each line", args.prompts);
  return all;
}

std::string speed_text(const train::GenerationSpeed& speed) {
  const auto rate = [](int64_t tokens, double seconds) {
    return tokens > 0 && seconds > 0 ? human_count(static_cast<double>(tokens) / seconds) : "-";
  };
  return fmt::format("generation  prefill {} tok/s, decode {} tok/s, first token after {:.3f} s\n",
                     rate(speed.prompt_tokens, speed.prefill_seconds),
                     rate(speed.decoded_tokens, speed.decode_seconds), speed.first_token_seconds);
}

int run_generate(const GenerateArgs& args) {
  const std::vector<Asked> texts = asked(args);
  if (!args.chat && texts.empty())
    fail(Exit::usage, "generate: --prompt is missing. Fix: give a text to continue, or --chat");
  if (texts.empty() && args.n > 1)
    fail(Exit::usage, "--n {} answers prompts of the command line. Fix: add --prompt or --prompts", args.n);
  const bool many = texts.size() * static_cast<size_t>(args.n) > 1;
  if (many && !args.profile.empty())
    fail(Exit::usage, "--profile records one continuation. Fix: give one --prompt, without --n");
  std::string note;
  const std::string directory = train::find_model_directory(args.directory, note);
  if (!note.empty()) log::warn_text(note);
  const model::ModelSpec spec = train::load_model_directory(directory);
  train::require_logits(spec, "generate", directory);
  const auto tokenizer =
      args.tokenizer.empty() ? data::tokenizer_in(directory) : data::make_tokenizer(args.tokenizer);
  std::optional<data::ChatPrompts> prompts;
  if (args.chat) prompts.emplace(chat_prompts(args, directory, *tokenizer));
  const int threads = args.threads > 0 ? args.threads : cpu::available_cores();
  cpu::use_threads(threads);
  const model::ParameterList parameters = model::make_parameters(spec);
  const DType dtype = train::stored_dtype(directory);
  // One piece of memory, which then consists of huge pages: each token reads all of it.
  const auto bytes = [dtype](const model::Parameter& p) {
    constexpr size_t alignment = 64;
    return (static_cast<size_t>(p.numel() * size_of(dtype)) + alignment - 1) / alignment * alignment;
  };
  size_t all = 0;
  for (const model::Parameter& p : parameters.all) all += bytes(p);
  cpu::HostMemory memory(all);
  std::vector<Tensor> weights;
  std::byte* at = memory.data();
  for (const model::Parameter& p : parameters.all) {
    weights.push_back(p.view(at, dtype));
    at += bytes(p);
  }
  train::load_weights(directory, spec, engine::whole_slices(parameters, weights));
  train::Accelerator accelerator;  // must outlive everything that uses the device
  std::vector<device::Memory> on_device;
  ops::Exec exec = train::cpu_exec(threads);
  if (train::device_of_option(args.device) == DeviceType::cuda) {
    accelerator = train::open_accelerator(0, {});
    exec = accelerator.exec();
    for (Tensor& weight : weights) {
      on_device.emplace_back(*exec.device, device::Memory::Kind::device, static_cast<size_t>(weight.bytes()));
      const void* host = weight.data;
      weight.data = on_device.back().data();
      ops::upload(exec, weight, host);
    }
    memory = {};
  }
  // A model may generate control characters: they are escaped on a terminal, but not in a file.
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto print = [&](std::string_view text) {
    const std::string shown = terminal ? printable(text) : std::string(text);
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  };
  std::optional<RecordedPieces> recorded;
  if (!args.profile.empty()) recorded.emplace(exec, spec, threads);
  train::TextGenerator generator(spec, parameters, weights, *tokenizer, args.max_tokens, exec, threads);
  generator.use_graphs(!recorded);
  train::SamplingOptions sampling{
      .temperature = args.temperature, .top_k = args.top_k, .top_p = args.top_p, .seed = args.seed};
  const auto warn_cut = [&](bool ended) {
    if (args.chat && !ended)
      log::warn_text(fmt::format("the answer is cut off at --max-tokens ({}) or at the model's last position",
                                 args.max_tokens));
  };
  // Prints the text before the continuation, and the continuation, which it returns.
  const auto run = [&](data::Prompt prompt, std::string_view before) {
    generator.set_prompt(std::move(prompt));
    std::string text;
    print(before);
    const bool ended = generator.run(sampling, [&](std::string_view piece) {
      {
        const trace::Range range("print", trace::Kind::report);
        text += piece;
        print(piece);
      }
      if (recorded) recorded->next();
    });
    print("\n");
    warn_cut(ended);
    ++sampling.seed;
    return text;
  };
  const auto prompt_of = [&](const Asked& a) {
    if (!prompts) return data::text_prompt(a.text, *tokenizer);
    JsonValue messages = first_messages(args);
    messages.push_back(message("user", a.text, a.source));
    return prompts->prompt(messages);
  };
  if (texts.empty()) {
    converse(args, *prompts, [&](data::Prompt prompt) { return run(std::move(prompt), ""); });
  } else if (!many) {
    run(prompt_of(texts.front()), args.chat ? std::string_view() : texts.front().text);
  } else {
    std::vector<data::Prompt> all;
    for (const Asked& a : texts) all.push_back(prompt_of(a));
    // In the order of the prompts, each as soon as it and all before it are complete.
    const auto n = static_cast<size_t>(args.n);
    std::map<size_t, train::TextGenerator::Text> complete;
    size_t next = 0;
    generator.run_all(all, args.n, sampling, [&](size_t i, const train::TextGenerator::Text& text) {
      for (complete.emplace(i, text); !complete.empty() && complete.begin()->first == next; ++next) {
        const auto& [text_of_next, ended] = complete.begin()->second;
        print(fmt::format("--- prompt {}, sample {}\n", next / n + 1, next % n + 1));
        print(args.chat ? text_of_next : texts[next / n].text + text_of_next);
        print("\n");
        warn_cut(ended);
        complete.erase(complete.begin());
      }
    });
  }
  output::write(output::Stream::err, speed_text(generator.speed()));
  if (recorded) recorded->write(args.profile);
  return 0;
}

}  // namespace

void add_generate(CommandLine& line) {
  const auto args = std::make_shared<GenerateArgs>();
  CLI::App* c = line.add(
      "generate", "Continue a text with a trained model, or chat with it",
      "  nrl-train generate results/quickstart/checkpoints --prompt \"Once upon a time\"\n"
      "  nrl-train generate results/quickstart/checkpoints/step-500 --prompt \"Once\" --temperature 0\n"
      "  nrl-train generate ~/models/Llama-3.2-1B --prompt \"The sky is\" --top-p 0.9 --seed 7\n"
      "  nrl-train generate ~/models/Llama-3.2-1B --prompts questions.txt --n 4 --max-tokens 50\n"
      "  nrl-train generate results/sft/checkpoints --chat --prompt \"What is 2 plus 3?\"\n"
      "  nrl-train generate ~/models/Llama-3.2-1B --chat --chat-template llama3 --system \"Be brief.\"");
  c->add_option(
       "directory", args->directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option(
       "--prompt", args->prompt,
       "Text to continue; with --chat the user's message (default: one for each line of standard input).\n"
       "Several are computed together")
      ->allow_extra_args(false);
  c->add_option("--prompts", args->prompts,
                "File of prompts: one in each line, or in *.jsonl the member \"prompt\" of each record");
  c->add_option("--n", args->n,
                "Continuations of each prompt (default: 1), which is computed once; number i, counted over\n"
                "all prompts from 0, is that of the seed --seed + i alone")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  CLI::Option* chat = c->add_flag(
      "--chat", args->chat, "Answer messages, in the model's chat template, instead of continuing a text");
  c->add_option("--system", args->system, "System message of the conversation")->needs(chat);
  c->add_option(
       "--chat-template", args->chat_template,
       "default (the tokenizer's) | chatml | llama3 | zephyr | another of the tokenizer's | a file | the "
       "text of a template")
      ->needs(chat);
  c->add_option("--tokenizer", args->tokenizer,
                "bytes | sentencepiece:MODEL | hf:tokenizer.json (default: the directory's)");
  c->add_option("--max-tokens", args->max_tokens, "Most tokens to generate, of each answer (default: 100)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  c->add_option("--temperature", args->temperature, "Sampling temperature (default: 0.8); 0: greedy")
      ->check(finite_range(0, 100));
  c->add_option("--top-k", args->top_k, "Sample from the K most likely tokens (default 0: all)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  c->add_option("--top-p", args->top_p, "Sample from the most likely tokens with this total probability")
      ->check(finite_range(0, 1));
  c->add_option("--seed", args->seed, "Seed of the sampling");
  c->add_option("--device", args->device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option(
      "--profile", args->profile,
      "Record up to 100 tokens after the first three in this log directory, and print where their time went");
  c->add_option("--threads", args->threads, "CPU threads (default: all cores)")->check(CLI::Range(0, 1024));
  line.on(c, [args] { return run_generate(*args); });
}

}  // namespace nrl::app
