// nrl-train eval: loss, perplexity and bits per byte of a trained model on token files and on records.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/data/examples/example_set.h"
#include "apps/data/examples/show.h"
#include "apps/data/manifest.h"
#include "apps/nrl-train/commands.h"
#include "apps/nrl-train/show_examples.h"
#include "apps/plan/grid_position.h"
#include "apps/plan/run_plan.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/evaluation.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"
#include "core/io/json.h"
#include "parallel/comm/world/world.h"

namespace nrl::app {
namespace {

struct EvalArgs {
  std::string directory;
  std::vector<std::string> overrides;  ///< "key=value"
  std::vector<std::string> data;       ///< prefixes of token files, or files of records
  int64_t sequence_length = 0;         ///< 0: as in training
  int64_t micro_batch = 4;
  int64_t max_tokens = 0;  ///< of each dataset; 0: all
  std::string device = "auto";
  int threads = 0;
  bool json = false;
};

// Bytes of text of the first `tokens` tokens; unset if the data does not name its tokenizer.
std::optional<int64_t> text_bytes(const IndexedDataset& data, int64_t tokens) {
  const auto manifest = data::read_manifest(data.prefix());
  if (!manifest) return std::nullopt;
  if (tokens == data.tokens() && manifest->text_bytes > 0) return manifest->text_bytes;
  const auto tokenizer = data::tokenizer_of_dataset(data.prefix());
  int64_t bytes = 0;
  std::vector<int32_t> ids;
  for (int64_t s = 0; s < data.sequences() && tokens > 0; ++s) {
    ids.resize(static_cast<size_t>(std::min<int64_t>(tokens, data.lengths()[s])));
    data.read(s, 0, ids);
    bytes += static_cast<int64_t>(tokenizer->decode(ids).size());
    tokens -= static_cast<int64_t>(ids.size());
  }
  return bytes;
}

// True for "section.key=value", which an option with several values takes for one of them.
bool is_override(const std::string& text) {
  const size_t equals = text.find('=');
  return equals != std::string::npos && text.substr(0, equals).find('.') != std::string::npos &&
         text.find('/') > equals && !path_exists(text);
}

// True for files of records, false for token files, which must be of one kind.
bool has_records(const std::vector<std::string>& data) {
  const auto records = [](const std::string& path) {
    if (path_exists(path + ".idx") || path.ends_with(".idx") || path.ends_with(".bin")) return false;
    return names_records(path) || path_exists(path);
  };
  const auto other = std::find_if(data.begin(), data.end(), [&](const std::string& path) {
    return records(path) != records(data.front());
  });
  if (other != data.end())
    fail(Exit::usage,
         "--data: only one of {} and {} has records, the other is the prefix of token files. Fix: evaluate "
         "them in two commands",
         clipped(data.front()), clipped(*other));
  return records(data.front());
}

train::EvaluationOptions evaluation_options(const EvalArgs& args,
                                            std::vector<std::unique_ptr<IndexedDataset>>& sets,
                                            std::string& note) {
  train::EvaluationOptions options;
  options.sequence_length = args.sequence_length;
  options.micro_batch = args.micro_batch;
  options.threads = args.threads;
  options.overrides = args.overrides;
  options.device = args.device == "cpu"    ? DeviceKind::cpu
                   : args.device == "cuda" ? DeviceKind::cuda
                                           : DeviceKind::automatic;
  options.directory = train::find_model_directory(args.directory, note);
  options.examples = has_records(args.data);
  if (options.examples) {
    if (args.max_tokens > 0)
      fail(Exit::usage, "--max-tokens has no effect on files of records. Fix: leave it out");
    return options;
  }
  options.tokens = 0;
  for (const std::string& prefix : args.data) {
    sets.push_back(std::make_unique<IndexedDataset>(prefix));
    options.tokens = std::max(options.tokens, sets.back()->tokens());
  }
  if (args.max_tokens > 0) options.tokens = std::min(options.tokens, args.max_tokens);
  return options;
}

/// The division of the model and the memory of its largest part.
std::string layout_text(comm::World& world, const train::StoredModelEvaluator& evaluator) {
  const plan::RunPlan& plan = evaluator.plan();
  double most[] = {static_cast<double>(plan.memory.total_bytes()),
                   static_cast<double>(plan.memory.bytes(memory::Category::weights))};
  world.comm().all_reduce(std::span(most), comm::Reduce::max);
  const DistributedConfig& d = evaluator.config().distributed;
  std::string grid = plan::grid_line(
      plan.position, d.shard_strategy == ShardStrategy::ddp ? std::string_view() : name_of(d.shard_strategy));
  while (grid.ends_with(' ')) grid.pop_back();
  return fmt::format("{}; a rank needs {}, of which weights {}", grid,
                     human_bytes(static_cast<uint64_t>(most[0])),
                     human_bytes(static_cast<uint64_t>(most[1])));
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void print_row(const comm::World& world, const JsonValue& row) {
  if (world.rank() == 0) output::write(output::Stream::out, row.dump() + "\n");
}

void print_loss(double loss) {
  log::info("loss        {} per token", decimal(loss, 4));
  log::info("perplexity  {}", decimal(std::exp(loss), 2));
}

void evaluate_tokens(comm::World& world, const EvalArgs& args, const std::string& directory,
                     const IndexedDataset& data, train::StoredModelEvaluator& evaluator) {
  if (world.rank() == 0)
    if (const std::string text = data::other_tokenizer_warning(data.prefix(), directory); !text.empty())
      log::warn_text(text);
  const Stopwatch watch;
  const train::EvaluationSums sums = evaluator.run(data, args.max_tokens);
  const double seconds = watch.seconds();
  std::optional<int64_t> bytes;
  train::run_collectively(world, [&] {
    if (world.rank() == 0) bytes = text_bytes(data, sums.tokens + 1);
  });
  std::optional<double> bits;
  if (bytes && *bytes > 0) bits = sums.negative_log_prob / std::log(2.0) / static_cast<double>(*bytes);
  if (args.json)
    return print_row(world, JsonValue::object({{"data", data.prefix()},
                                               {"tokens", sums.tokens},
                                               {"loss", sums.loss()},
                                               {"perplexity", std::exp(sums.loss())},
                                               {"bits_per_byte", bits ? JsonValue(*bits) : JsonValue()},
                                               {"seconds", seconds}}));
  log::info("data        {}", data.prefix());
  log::info("tokens      {} predicted, {}/s", grouped(sums.tokens),
            human_count(static_cast<double>(sums.tokens) / seconds));
  print_loss(sums.loss());
  log::info("bits/byte   {}", bits
                                  ? decimal(*bits, 4)
                                  : "unknown: the data does not name its tokenizer (no PREFIX.dataset.json)");
}

void evaluate_records(comm::World& world, const EvalArgs& args, const std::string& path,
                      train::StoredModelEvaluator& evaluator) {
  const auto examples = evaluator.open_examples(path);
  if (world.rank() == 0)
    for (const std::string& text : data::set_warnings(*examples)) log::warn_text(text);
  const Stopwatch watch;
  std::vector<train::EvaluationSums> parts;  // of preferences: the chosen sequences, the rejected ones
  train::EvaluationSums all;
  for (int s = 0; s < examples->sequences_per_example(); ++s) {
    parts.push_back(evaluator.run(examples, s));
    all.negative_log_prob += parts.back().negative_log_prob;
    all.tokens += parts.back().tokens;
  }
  const double seconds = watch.seconds();
  const bool pairs = parts.size() == 2;
  if (args.json) {
    JsonValue row = JsonValue::object({{"data", path},
                                       {"format", std::string(name_of(examples->format()))},
                                       {"examples", examples->size()},
                                       {"tokens", all.tokens},
                                       {"loss", all.loss()},
                                       {"perplexity", std::exp(all.loss())}});
    if (pairs) {
      row.set("chosen_loss", parts[0].loss());
      row.set("rejected_loss", parts[1].loss());
    }
    row.set("seconds", seconds);
    return print_row(world, row);
  }
  log::info("data        {}: {} of {}", path, counted(examples->size(), "example"),
            name_of(examples->format()));
  log::info("tokens      {} with a loss ({}), {}/s", grouped(all.tokens), name_of(examples->train_on()),
            human_count(static_cast<double>(all.tokens) / seconds));
  print_loss(all.loss());
  if (pairs)
    log::info("loss        {} of chosen, {} of rejected answers", decimal(parts[0].loss(), 4),
              decimal(parts[1].loss(), 4));
}

int evaluate(comm::World& world, const EvalArgs& args) {
  train::EvaluationOptions options;
  std::vector<std::unique_ptr<IndexedDataset>> sets;
  train::run_collectively(world, [&] {
    std::string note;
    options = evaluation_options(args, sets, note);
    if (!note.empty() && world.rank() == 0) log::warn_text(note);
  });
  train::StoredModelEvaluator evaluator(world, options);
  if (!args.json) {
    log::info("model       {}, {} parameters in {}, {} {} tokens", name_of(evaluator.spec().family),
              human_count(static_cast<double>(evaluator.parameters())), name_of(evaluator.dtype()),
              options.examples ? "sequences of up to" : "windows of", evaluator.sequence_length());
    if (world.size() > 1) log::info("layout      {}", layout_text(world, evaluator));
  }
  for (const auto& data : sets) evaluate_tokens(world, args, options.directory, *data, evaluator);
  if (options.examples)
    for (const std::string& path : args.data) evaluate_records(world, args, path, evaluator);
  return 0;
}

int run_eval(EvalArgs args) {
  const auto overrides = std::stable_partition(args.data.begin(), args.data.end(),
                                               [](const std::string& text) { return !is_override(text); });
  args.overrides.insert(args.overrides.end(), overrides, args.data.end());
  args.data.erase(overrides, args.data.end());
  if (args.data.empty()) fail(Exit::usage, "--data: no files are named. Fix: give them before the overrides");
  return train::run_in_world([&](comm::World& world) { return evaluate(world, args); });
}

}  // namespace

void add_eval(CommandLine& line) {
  const auto args = std::make_shared<EvalArgs>();
  CLI::App* c = line.add(
      "eval", "Loss, perplexity and bits per byte of a model on token files or on records",
      "  nrl-train eval results/quickstart/checkpoints --data data/book\n"
      "  mpirun -n 4 nrl-train eval ~/models/Llama-3.2-1B --data data/book data/web --max-tokens 100000\n"
      "  mpirun -n 4 nrl-train eval ~/models/Llama-3.2-1B --data data/book \\\n"
      "      distributed.tensor_parallel_size=2 distributed.pipeline_parallel_size=2\n"
      "  nrl-train eval results/sft-tiny/checkpoints --data data/chat/validation.jsonl data.train_on=all");
  c->add_option(
       "directory", args->directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option("overrides", args->overrides,
                "key=value: how the ranks divide the model (distributed.*, by default each has all of it), "
                "kernels.*, and how records become examples (data.*, policy.tokenizer.*, by default as in "
                "training)");
  c->add_option("--data", args->data,
                "Prefixes of token files made by nrl-train prepare, or files of records: messages, "
                "instructions, text or preferences as JSON lines")
      ->required();
  c->add_option("--sequence-length", args->sequence_length,
                "Tokens per window or sequence (default: as in training, else the model's maximum up to "
                "1024)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  c->add_option("--micro-batch", args->micro_batch,
                "Windows per forward pass; of records: room for so many sequences of full length")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  c->add_option("--max-tokens", args->max_tokens, "Evaluate only the first tokens (default: all)")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 50));
  c->add_option("--device", args->device, "auto (default), cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  c->add_option("--threads", args->threads, "CPU threads per rank (default: the rank's share of the cores)")
      ->check(CLI::Range(1, 1024));
  c->add_flag("--json", args->json, "One JSON object per dataset");
  line.on(c, [args] { return run_eval(*args); });
}

}  // namespace nrl::app
