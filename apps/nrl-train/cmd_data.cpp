// nrl-train data show: prints the samples of training steps or of an evaluation, or the examples of records.

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/data/examples/example_set.h"
#include "apps/data/examples/prompts.h"
#include "apps/data/loader.h"
#include "apps/data/text_source.h"
#include "apps/nrl-train/commands.h"
#include "apps/nrl-train/show_examples.h"
#include "apps/state/hf_files.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "apps/train/start/run_data.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

struct DataShowArgs {
  ConfigArgs config;  ///< or records
  ShowExamplesArgs examples;
  std::string steps;            ///< first:end, counted from 1, end exclusive
  std::string split = "train";  ///< train or validation
  bool json = false;
};

// The examples that a run trains or evaluates on, in the order of the files.
int show_examples_of_run(const DataShowArgs& args, const Config& config, int64_t vocab_size) {
  if (!args.steps.empty())
    fail(Exit::usage, "--steps has no effect: algorithm {} trains on examples. Fix: --n",
         name_of(config.algorithm));
  const bool validation = args.split == "validation";
  if (validation && config.data.validation.data_path.empty())
    fail(Exit::usage,
         "--split validation: the run has no validation data. Fix: set data.validation.data_path");
  const auto tokenizer = train::tokenizer_of_run(config);
  if (!tokenizer) fail(Exit::config, "policy.tokenizer.name: the run has no tokenizer. Fix: set it");
  if (generates_rollouts(config)) {
    const data::Prompts prompts(train::example_options(config, validation, vocab_size), *tokenizer);
    for (int64_t i = 0; i < std::min<int64_t>(args.examples.n, prompts.size()); ++i) {
      const std::string text = tokenizer->decode(prompts[i].ids);
      if (args.json)
        std::cout << JsonValue::object({{"where", prompts[i].where},
                                        {"prompt", data::with_replacements(text)},
                                        {"ids", JsonValue(prompts[i].ids)}})
                         .dump()
                  << "\n";
      else
        std::cout << prompts[i].where << "  " << prompts[i].ids.size() << " tokens\n"
                  << printable(text) << "\n\n";
    }
    if (!args.json) std::cout << prompts.describe() << "\n";
    return 0;
  }
  const auto set = data::open_examples(train::example_options(config, validation, vocab_size), *tokenizer,
                                       args.examples.workers);
  return print_examples(*set, *tokenizer, args.examples, args.json);
}

int run_data_show(const DataShowArgs& args) {
  if (!args.examples.tokenizer.empty() || names_records(args.config.path)) {
    if (!args.steps.empty())
      fail(Exit::usage, "--steps has no effect with records; expected a configuration. Fix: --n");
    std::vector<std::string> inputs = args.config.overrides;
    inputs.insert(inputs.begin(), args.config.path);
    return show_examples(args.examples, std::move(inputs), args.json);
  }
  for (const CLI::Option* option : args.examples.of_records)
    if (option->count() > 0)
      fail(Exit::usage, "{} has no effect with a configuration, which has a key for it", option->get_name());
  ConfigResult result = load_config(args.config.path, args.config.overrides);
  train::check_but_memory(result, {.world = 0});
  std::cerr << render(result.diagnostics);
  if (!result.ok()) return static_cast<int>(result.exit_code());
  const model::ModelSpec spec = train::load_model_spec(result);
  if (trains_on_examples(result.config)) return show_examples_of_run(args, result.config, spec.vocab_size);
  if (args.steps.empty()) fail(Exit::usage, "--steps is missing: FIRST:END, counted from 1, END exclusive");
  const auto steps = parse_step_range(args.steps);
  if (!steps)
    fail(Exit::usage,
         "--steps takes FIRST:END, counted from 1, END exclusive and greater than FIRST; found '{}'",
         args.steps);
  const auto [first, last] = *steps;
  const int64_t global = result.config.policy.train_global_batch_size;
  train::TrainData training = train::plan_train_data(result.config, spec.vocab_size, global);
  data::DatasetOptions options = training.options;
  if (args.split == "validation") {
    const auto validation = train::plan_validation_data(result.config, training, global);
    if (!validation)
      fail(Exit::usage,
           "--split validation: the run has no evaluations. Fix: set {}, val_at_start or val_at_end",
           loop_key(result.config, "val_period"));
    if (last - 1 > validation->batches)
      fail(Exit::usage, "--steps {}: an evaluation has only {} global batches", args.steps,
           validation->batches);
    options = validation->options;
  } else if (last - 1 > std::max<int64_t>(training.max_steps, 1)) {
    fail(Exit::usage, "--steps {}: the run has only {} steps", args.steps, training.max_steps);
  }
  const auto dataset = data::open_token_dataset(options);
  if (args.json) {
    data::show_samples(*dataset, global, first, last, std::cout);
  } else {
    constexpr size_t shown = 12;
    std::vector<int32_t> tokens(static_cast<size_t>(dataset->sequence_length()) + 1);
    const data::DocumentRules& rules = dataset->documents();
    data::Sample sample;
    for (int64_t i = (first - 1) * global; i < (last - 1) * global; ++i) {
      dataset->read(i, tokens);
      std::cout << "step " << i / global + 1 << "  sample " << i << "  " << tokens.size() << " tokens:";
      for (size_t t = 0; t < std::min(shown, tokens.size()); ++t) std::cout << ' ' << tokens[t];
      std::cout << (tokens.size() > shown ? " ..." : "");
      data::make_sample(tokens, rules, sample);
      if (rules.reset_attention_mask) std::cout << "  segments " << sample.segments.size();
      if (rules.eod_mask_loss) std::cout << "  without loss " << data::rows_without_loss(sample).size();
      std::cout << '\n';
    }
  }
  return std::cout.flush() ? 0 : static_cast<int>(Exit::io);
}

}  // namespace

void add_data(CommandLine& line) {
  const auto args = std::make_shared<DataShowArgs>();
  CLI::App* data =
      line.add("data", "Inspect training data", "  nrl-train data show configs/quickstart.yaml --steps 1:3");
  data->require_subcommand(1);
  CLI::App* c = line.add("show", "Print the samples of training steps, or the examples of records",
                         "  nrl-train data show configs/quickstart.yaml --steps 1:3\n"
                         "  nrl-train data show configs/quickstart.yaml --steps 500:501 --json\n"
                         "  nrl-train data show configs/quickstart.yaml --split validation --steps 1:2\n"
                         "  nrl-train data show chats.jsonl --tokenizer models/my-model --n 5\n"
                         "  nrl-train data show pairs.jsonl --tokenizer bytes --chat-template chatml --json",
                         data);
  add_config(c, args->config.path, args->config.overrides,
             "YAML file; or, with --tokenizer, files of records");
  c->add_option("--steps", args->steps, "FIRST:END, counted from 1, END exclusive; of runs on token files");
  c->add_option("--split", args->split,
                "train, or validation: the samples of an evaluation, one step per global batch")
      ->check(CLI::IsMember({"train", "validation"}));
  c->add_flag(
      "--json", args->json,
      "One JSON object per sample: step, sample, tokens; for records one of the set, then one per example");
  add_show_examples(c, args->examples);
  line.on(c, [args] { return run_data_show(*args); });
}

}  // namespace nrl::app
