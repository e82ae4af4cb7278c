// nrl-train eval: loss, perplexity and bits per byte of a trained model on token files.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/data/manifest.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/evaluation.h"
#include "apps/train/state/model_source.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/io/json.h"

namespace nrl::app {
namespace {

struct EvalArgs {
  std::string directory;
  std::vector<std::string> data;  ///< prefixes of token files
  int64_t sequence_length = 0;    ///< 0: as in training
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

int evaluate(comm::World& world, const EvalArgs& args) {
  train::EvaluationOptions options;
  options.sequence_length = args.sequence_length;
  options.micro_batch = args.micro_batch;
  options.threads = args.threads;
  std::vector<std::unique_ptr<IndexedDataset>> sets;
  train::run_collectively(world, [&] {
    std::string note;
    options.directory = train::find_model_directory(args.directory, note);
    if (!note.empty() && world.rank() == 0) log::warn_text(note);
    options.device = train::device_of_option(args.device);
    options.tokens = 0;
    for (const std::string& prefix : args.data) {
      sets.push_back(std::make_unique<IndexedDataset>(prefix));
      options.tokens = std::max(options.tokens, sets.back()->tokens());
    }
    if (args.max_tokens > 0) options.tokens = std::min(options.tokens, args.max_tokens);
  });
  train::StoredModelEvaluator evaluator(world, options);
  if (!args.json)
    log::info("model       {}, {} parameters in {}, windows of {} tokens", name_of(evaluator.spec().family),
              human_count(static_cast<double>(evaluator.parameters())), name_of(evaluator.dtype()),
              evaluator.sequence_length());
  for (const auto& data : sets) {
    if (world.rank() == 0)
      if (const std::string text = data::other_tokenizer_warning(data->prefix(), options.directory);
          !text.empty())
        log::warn_text(text);
    const auto begin = std::chrono::steady_clock::now();
    const train::EvaluationSums sums = evaluator.run(*data, args.max_tokens);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::optional<int64_t> bytes;
    train::run_collectively(world, [&] {
      if (world.rank() == 0) bytes = text_bytes(*data, sums.tokens + 1);
    });
    std::optional<double> bits;
    if (bytes && *bytes > 0) bits = sums.negative_log_prob / std::log(2.0) / static_cast<double>(*bytes);
    if (args.json) {
      const JsonValue row = JsonValue::object({{"data", data->prefix()},
                                               {"tokens", sums.tokens},
                                               {"loss", sums.loss()},
                                               {"perplexity", std::exp(sums.loss())},
                                               {"bits_per_byte", bits ? JsonValue(*bits) : JsonValue()},
                                               {"seconds", seconds}});
      if (world.rank() == 0) output::write(output::Stream::out, row.dump() + "\n");
      continue;
    }
    log::info("data        {}", data->prefix());
    log::info("tokens      {} predicted, {}/s", grouped(sums.tokens),
              human_count(static_cast<double>(sums.tokens) / seconds));
    log::info("loss        {} per token", decimal(sums.loss(), 4));
    log::info("perplexity  {}", decimal(std::exp(sums.loss()), 2));
    log::info(
        "bits/byte   {}",
        bits ? decimal(*bits, 4) : "unknown: the data does not name its tokenizer (no PREFIX.dataset.json)");
  }
  return 0;
}

int run_eval(const EvalArgs& args) {
  return train::run_in_world([&](comm::World& world) { return evaluate(world, args); });
}

}  // namespace

void add_eval(CommandLine& line) {
  const auto args = std::make_shared<EvalArgs>();
  CLI::App* c = line.add(
      "eval", "Loss, perplexity and bits per byte of a model on token files",
      "  nrl-train eval results/quickstart/checkpoints --data data/book\n"
      "  mpirun -n 4 nrl-train eval ~/models/Llama-3.2-1B --data data/book data/web --max-tokens 100000");
  c->add_option(
       "directory", args->directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option("--data", args->data, "Prefixes of token files made by nrl-train prepare")->required();
  c->add_option("--sequence-length", args->sequence_length,
                "Tokens per window (default: as in training, else the model's maximum up to 1024)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  c->add_option("--micro-batch", args->micro_batch, "Windows per forward pass")
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
