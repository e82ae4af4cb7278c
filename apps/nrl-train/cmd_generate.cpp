// nrl-train generate: continues a text with a trained model.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/data/tokenizer.h"
#include "apps/model/spec/parameters.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/launch/accelerator.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/loop/text_generator.h"
#include "apps/train/state/checkpoint.h"
#include "apps/train/state/model_source.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "core/device/cpu/threads.h"
#include "core/ops/transfer.h"

namespace nrl::app {
namespace {

struct GenerateArgs {
  std::string directory;
  std::string prompt;
  std::string tokenizer;  ///< empty: that of the directory
  int64_t max_tokens = 100;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1.0;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
};

int run_generate(const GenerateArgs& args) {
  std::string note;
  const std::string directory = train::find_model_directory(args.directory, note);
  if (!note.empty()) log::warn_text(note);
  const model::ModelSpec spec = train::load_model_directory(directory);
  const auto tokenizer =
      args.tokenizer.empty() ? data::tokenizer_in(directory) : data::make_tokenizer(args.tokenizer);
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
  train::TextGenerator generator(spec, parameters, weights, *tokenizer, args.prompt, args.max_tokens, exec);

  // A model may generate control characters: they are escaped on a terminal, but not in a file.
  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto print = [&](std::string_view text) {
    const std::string shown = terminal ? printable(text) : std::string(text);
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
  };
  print(args.prompt);
  generator.run(
      {.temperature = args.temperature, .top_k = args.top_k, .top_p = args.top_p, .seed = args.seed}, print);
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace

void add_generate(CommandLine& line) {
  const auto args = std::make_shared<GenerateArgs>();
  CLI::App* c = line.add(
      "generate", "Continue a text with a trained model",
      "  nrl-train generate results/quickstart/checkpoints --prompt \"Once upon a time\"\n"
      "  nrl-train generate results/quickstart/checkpoints/step-500 --prompt \"Once\" --temperature 0\n"
      "  nrl-train generate ~/models/Llama-3.2-1B --prompt \"The sky is\" --top-p 0.9 --seed 7");
  c->add_option(
       "directory", args->directory,
       "Checkpoint (step-N), a directory of checkpoints (the newest one) or a Hugging Face directory")
      ->required();
  c->add_option("--prompt", args->prompt, "Text to continue")->required();
  c->add_option("--tokenizer", args->tokenizer,
                "bytes | sentencepiece:MODEL | hf:tokenizer.json (default: the directory's)");
  c->add_option("--max-tokens", args->max_tokens, "Tokens to generate (default: 100)")
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
  c->add_option("--threads", args->threads, "CPU threads (default: all cores)")->check(CLI::Range(0, 1024));
  line.on(c, [args] { return run_generate(*args); });
}

}  // namespace nrl::app
