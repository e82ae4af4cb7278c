// Parses the command line. Only this file includes CLI11, which is slow to compile.

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>
#include <sstream>
#include <system_error>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"

namespace nrl::app {
namespace {

constexpr std::string_view commands[] = {"train",      "plan",  "verify", "prepare", "data",
                                         "generate",   "tune",  "eval",   "report",  "explain",
                                         "checkpoint", "bench", "doctor"};

// `nrl-train run.yaml ...` means `nrl-train train run.yaml ...`.
std::vector<std::string> with_default_command(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  if (args.empty()) return args;
  const bool names_config = args.front() == "--config" || args.front().starts_with("--config=");
  if (args.front().starts_with("-") && !names_config) return args;
  for (std::string_view command : commands)
    if (args.front() == command) return args;
  const bool looks_like_config = names_config || args.front().find_first_of("./") != std::string::npos;
  if (!looks_like_config) {
    const std::string_view near = nearest(args.front(), commands);
    fail(Exit::usage, "'{}' is neither a command nor a configuration file{}. Fix: see nrl-train --help",
         args.front(), near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }
  args.insert(args.begin(), "train");
  return args;
}

/// The configuration file of a command and its overrides: "CONFIG key=value ..." or "--config CONFIG
/// key=value ...".
struct ConfigOptions {
  ConfigOptions(std::string& path, std::vector<std::string>& overrides)
      : path_(path), overrides_(overrides) {}

  /// `first`: of a command that takes another file before CONFIG, where that goes; null: it takes none.
  void add(
      CLI::App* command, const std::string& what = "YAML file", bool required = true,
      std::function<std::string*()> first = [] { return nullptr; }) {
    command->add_option("CONFIG", path_, what);
    command->add_option("overrides", overrides_, "key=value, e.g. policy.optimizer.lr=1e-4");
    command->add_option("--config", named_, "The same as CONFIG");
    command->parse_complete_callback([this, required, first] {
      if (std::string* file = first()) take_first(*file);
      settle(required);
    });
  }

 private:
  void take_first(std::string& file) {
    file = std::exchange(path_, "");
    if (overrides_.empty() || overrides_.front().find('=') != std::string::npos) return;
    path_ = overrides_.front();
    overrides_.erase(overrides_.begin());
  }

  void settle(bool required) {
    if (named_.empty()) {
      if (path_.empty() && required) throw CLI::RequiredError("CONFIG");
      return;
    }
    std::error_code no_file;
    if (path_.find('=') != std::string::npos)
      overrides_.insert(overrides_.begin(), path_);  // the first argument without a name
    else if (!path_.empty() && path_ != named_ && !std::filesystem::equivalent(path_, named_, no_file))
      fail(Exit::usage, "two configurations are given: '{}' and --config '{}'. Fix: leave one out", path_,
           named_);
    path_ = named_;
  }

  std::string& path_;
  std::vector<std::string>& overrides_;
  std::string named_;
};

// A number in [low, high]. CLI11's own range accepts NaN.
CLI::Validator finite_range(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) -> std::string {
        double value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && value >= low && value <= high)
          return "";
        return fmt::format("expected a number from {} to {}, found '{}'", low, high, clipped(text));
      },
      fmt::format("FLOAT in [{} - {}]", low, high));
}

// Appends examples to the help of all subcommands.
void complete_help(CLI::App& app, const std::string& parent) {
  for (CLI::App* c : app.get_subcommands({})) {
    const std::string name = parent.empty() ? c->get_name() : parent + " " + c->get_name();
    c->footer(fmt::format("Examples:\n{}", examples_of(name)));
    complete_help(*c, name);
  }
}

int run(int argc, char** argv) {
  CLI::App app(
      "Trains transformer language models from a YAML file, alone or under mpirun or srun.\n"
      "  nrl-train CONFIG.yaml [key=value ...]       trains\n"
      "  mpirun -n 8 nrl-train CONFIG.yaml           trains on 8 ranks",
      "nrl-train");
  app.set_version_flag("--version", std::string("nrl-train ") + NRL_VERSION);
  app.require_subcommand(1);
  int result = 0;

  ConfigArgs train;
  ConfigOptions train_config(train.path, train.overrides);
  CLI::App* c = app.add_subcommand("train", "Train (the default command)");
  train_config.add(c);
  c->callback([&] { result = run_train(train); });

  PlanArgs plan;
  ConfigOptions plan_config(plan.config.path, plan.config.overrides);
  c = app.add_subcommand("plan", "Print batch arithmetic, grid and memory of a run without running it");
  plan_config.add(c);
  c->add_option("--world", plan.world, "Ranks to plan for")->check(CLI::Range(1, 1 << 20));
  c->add_option("--device", plan.device,
                "auto (as configured), cpu, cuda, or a GPU that need not be there: h200, h100, b200, a100");
  c->add_flag("--buffers", plan.buffers, "List every planned buffer");
  c->add_option("--program", plan.program,
                "Print the program of a rank, all that it does in an optimizer step, and nothing else")
      ->type_name("RANK")
      ->check(CLI::NonNegativeNumber);
  c->add_option("--search", plan.search,
                "Show the N layouts of the ranks that are estimated to be the fastest")
      ->check(CLI::Range(1, 1000));
  c->add_option("--expert-load", plan.expert_load,
                "--search: rows that the experts of the busiest rank get, over those of a balanced router "
                "(default 1)")
      ->check(CLI::Range(1.0, 1e6));
  c->callback([&] { result = run_plan(plan); });

  VerifyArgs verify;
  ConfigOptions verify_config(verify.config.path, verify.config.overrides);
  c = app.add_subcommand("verify",
                         "Compare a few steps of the launched ranks with the same steps on one rank");
  verify_config.add(c);
  CLI::Option* const verify_steps =
      c->add_option("--steps", verify.steps, "Steps to compare (default 2)")->check(CLI::Range(1, 1000));
  c->add_option("--undisturbed", verify.undisturbed,
                "Train N steps as in training (overlap, CUDA graph) and compare when they are done; then an "
                "evaluation, a checkpoint to and from another layout, and N steps from it")
      ->check(CLI::Range(1, 1000))
      ->excludes(verify_steps);
  c->add_flag("--random-tokens", verify.random_tokens,
              "Train on random tokens; without it only if the configured data does not exist");
  c->add_option(
       "--layouts", verify.layouts,
       "configured (default), auto: every valid layout of the launched ranks, or list: their names only")
      ->check(CLI::IsMember({"configured", "auto", "list"}));
  c->add_option(
       "--sample", verify.sample,
       "Only so many of the layouts of --layouts, with as many pairs and triples of options as they can "
       "have")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  c->callback([&] { result = run_verify(verify); });

  PrepareArgs prepare;
  c = app.add_subcommand("prepare", "Tokenize text into token files (PREFIX.bin and PREFIX.idx)");
  c->add_option("--input", prepare.input,
                "Text files, JSON lines (.jsonl, .json), either compressed (.gz, .zst), or directories")
      ->required();
  c->add_option("--tokenizer", prepare.tokenizer,
                "bytes | sentencepiece:MODEL | train-sentencepiece:SIZE | hf:tokenizer.json");
  c->add_option("--output", prepare.output, "Prefix of the files to write")->required();
  c->add_option("--jsonl-key", prepare.jsonl_key, "Field of a JSONL line that holds the text");
  c->add_option("--invalid-utf8", prepare.invalid_utf8,
                "Action for a document with invalid UTF-8: error | replace (by U+FFFD) | skip")
      ->check(CLI::IsMember({"error", "replace", "skip"}));
  c->add_option("--on-bad-line", prepare.on_bad_line, "Action for a JSONL line without a text: error | skip")
      ->check(CLI::IsMember({"error", "skip"}));
  c->add_flag("--append-eod,!--no-append-eod", prepare.append_eod,
              "End every document with the end-of-text token (default)");
  c->add_option(
      "--shuffle-documents", prepare.shuffle_documents,
      "Write the documents in a random order that depends on this SEED, so that data.split divides them "
      "at random (default: input order)");
  c->add_option("--workers", prepare.workers, "Threads (default: all cores)")->check(CLI::Range(0, 1024));
  c->callback([&] { result = run_prepare_command(prepare); });

  DataShowArgs show;
  ConfigOptions show_config(show.config.path, show.config.overrides);
  CLI::App* data = app.add_subcommand("data", "Inspect training data");
  data->require_subcommand(1);
  c = data->add_subcommand("show", "Print the samples of training steps");
  show_config.add(c);
  c->add_option("--steps", show.steps, "FIRST:END, counted from 1, END exclusive")->required();
  c->add_option("--split", show.split,
                "train, or validation: the samples of an evaluation, one step per global batch")
      ->check(CLI::IsMember({"train", "validation"}));
  c->add_flag("--json", show.json, "One JSON object per sample: step, sample, tokens");
  c->callback([&] { result = run_data_show(show); });

  GenerateArgs generate;
  c = app.add_subcommand("generate", "Continue a text with a trained model");
  c->add_option(
       "directory", generate.directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option("--prompt", generate.prompt, "Text to continue")->required();
  c->add_option("--tokenizer", generate.tokenizer,
                "bytes | sentencepiece:MODEL | hf:tokenizer.json (default: the directory's)");
  c->add_option("--max-tokens", generate.max_tokens, "Tokens to generate (default: 100)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  c->add_option("--temperature", generate.temperature, "Sampling temperature (default: 0.8); 0: greedy")
      ->check(finite_range(0, 100));
  c->add_option("--top-k", generate.top_k, "Sample from the K most likely tokens (default 0: all)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  c->add_option("--top-p", generate.top_p, "Sample from the most likely tokens with this total probability")
      ->check(finite_range(0, 1));
  c->add_option("--seed", generate.seed, "Seed of the sampling");
  c->add_option("--device", generate.device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option("--threads", generate.threads, "CPU threads (default: all cores)")
      ->check(CLI::Range(0, 1024));
  c->callback([&] { result = run_generate(generate); });

  EvalArgs eval;
  c = app.add_subcommand("eval", "Loss, perplexity and bits per byte of a model on token files");
  c->add_option(
       "directory", eval.directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option("--data", eval.data, "Prefixes of token files made by nrl-train prepare")->required();
  c->add_option("--sequence-length", eval.sequence_length,
                "Tokens per window (default: as in training, else the model's maximum up to 1024)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  c->add_option("--micro-batch", eval.micro_batch, "Windows per forward pass")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  c->add_option("--max-tokens", eval.max_tokens, "Evaluate only the first tokens (default: all)")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 50));
  c->add_option("--device", eval.device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option("--threads", eval.threads, "CPU threads per rank (default: the rank's share of the cores)")
      ->check(CLI::Range(1, 1024));
  c->add_flag("--json", eval.json, "One JSON object per dataset");
  c->callback([&] { result = run_eval(eval); });

  ReportArgs report;
  c = app.add_subcommand("report", "Draw the loss and other curves of one or more runs");
  c->add_option("runs", report.runs, "Log directories of runs (logger.log_dir)")->required();
  c->add_option("--html", report.html, "Write a self-contained page with all curves to this file");
  c->callback([&] { result = run_report(report); });

  std::string key;
  c = app.add_subcommand("explain", "Explain a configuration key or section");
  c->add_option("key", key,
                "A key, a section, the name of a key in another program, or a word to search for");
  bool markdown = false;
  c->add_flag("--markdown", markdown, "Print docs/configuration.md");
  c->callback([&] { result = markdown ? run_config_docs() : run_explain(key); });

  CheckpointArgs checkpoint;
  CLI::App* ck = app.add_subcommand("checkpoint", "Inspect checkpoints");
  ck->require_subcommand(1);
  c = ck->add_subcommand("verify",
                         "Verify all checksums of a checkpoint, or of all checkpoints in a directory");
  c->add_option("directory", checkpoint.directory, "Checkpoint (step-N), or a directory of checkpoints")
      ->required();
  c->callback([&] { result = run_checkpoint_verify(checkpoint); });

  bench::Args bench;
  ConfigOptions bench_config(bench.config, bench.overrides);
  c = app.add_subcommand("bench", "Benchmark this machine relative to its limits");
  c->add_option("benchmark", bench.benchmark,
                "ops: memory-bound kernels; gemm: matmuls; attention;\n"
                "step: training steps of CONFIG on random tokens; comm: communication, in the groups of\n"
                "CONFIG, or inside and across nodes;\n"
                "compare SUITE [CONFIG]: variants of CONFIG, by default that of the suite, beside what is\n"
                "promised of them, as the YAML file SUITE says")
      ->required()
      ->check(CLI::IsMember({"ops", "gemm", "attention", "step", "comm", "compare"}));
  bench_config.add(c, "YAML file, for step, comm and compare, with key=value after it", false,
                   [&] { return bench.benchmark == "compare" ? &bench.suite : nullptr; });
  c->add_option("--device", bench.device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option(
       "--precision", bench.precision,
       "Of ops, gemm and attention: auto (default: bfloat16 on a GPU, else float32), float32, bfloat16 or\n"
       "float16")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}));
  c->add_option("--json", bench.json, "Write the results to this file");
  c->add_option("--only", bench.only,
                "Only cases whose name contains this text (ops, gemm, attention, compare)");
  c->add_option("--steps", bench.steps, "Steps to time (step and compare; default 20)")
      ->check(CLI::Range(1, 100000));
  c->add_option("--tokens", bench.tokens,
                "Tokens of the activations (ops; default 8192 on a GPU, 2048 on a CPU)")
      ->check(CLI::Range(1, 1 << 20));
  c->add_option(
      "--predict", bench.predict,
      "Print the estimated time of every part of a step on this GPU (step): h200, h100, b200 or a100");
  c->add_flag("--quick", bench.quick,
              "Tiny sizes, executed once, whatever --steps says: a functional test without useful timings");
  c->callback([&] { result = run_bench(bench); });

  bench::TuneArgs tune;
  ConfigOptions tune_config(tune.config, tune.overrides);
  CLI::App* tuner = app.add_subcommand("tune", "Find the best value of a key by measuring");
  tuner->require_subcommand(1);
  c = tuner->add_subcommand("batch-size", "Find the largest and the fastest microbatch");
  tune_config.add(c);
  c->add_option(
       "--max-memory", tune.max_memory,
       "Fraction of the GPU's memory, or of the rank's share of the machine's for its whole process\n"
       "(default: memory.max_memory, which in a run limits the plan alone)")
      ->check(finite_range(1e-6, 1));
  c->add_option("--sizes", tune.sizes, "Sizes to try, e.g. 1,2,4,8 (default: all that divide the batch)")
      ->delimiter(',')
      ->allow_extra_args(false)  // overrides may follow
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  c->add_option("--steps", tune.steps, "Steps to time of each size (default 3)")->check(CLI::Range(1, 1000));
  c->callback([&] { result = run_tune(tune); });

  c = app.add_subcommand("doctor", "Show the capabilities of this build and this machine");
  c->callback([&] { result = run_doctor(); });
  complete_help(app, "");

  try {
    std::vector<std::string> args = with_default_command(argc, argv);
    if (args.empty()) {
      std::fputs(app.help().c_str(), stderr);
      return static_cast<int>(Exit::usage);
    }
    std::reverse(args.begin(), args.end());  // CLI11 takes them from the back
    app.parse(args);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out, problem;  // the message quotes the command line
    const int code = app.exit(e, out, problem);
    // Every rank has the same command line.
    if (comm::launched_rank() > 0) return code == 0 ? 0 : static_cast<int>(Exit::usage);
    std::fputs(out.str().c_str(), stdout);
    std::fputs(bounded_lines(message_text(problem.str())).c_str(), stderr);
    return code == 0 ? 0 : static_cast<int>(Exit::usage);
  }
  return result;
}

}  // namespace
}  // namespace nrl::app

int main(int argc, char** argv) {
  nrl::cpu::silence_hwloc_without_sysfs();
  nrl::cpu::limit_openmp_spin(argv);
  nrl::cpu::arrange_heap();
  try {
    return nrl::app::run(argc, argv);
  } catch (const std::exception& e) {
    const nrl::Error error = nrl::error_from(e);
    // Every rank has the same command line.
    if (error.code() != nrl::Exit::usage || nrl::comm::launched_rank() == 0)
      nrl::log::error_text(error.what());
    return static_cast<int>(error.code());
  }
}
