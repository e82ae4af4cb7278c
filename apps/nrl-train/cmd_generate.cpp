// nrl-train generate: continues a text with a trained model.

#include <cstdio>

#include <unistd.h>

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
  std::vector<cpu::HostMemory> memory;
  std::vector<Tensor> weights;
  const DType dtype = train::stored_dtype(directory);
  for (const model::Parameter& p : parameters.all) {
    memory.emplace_back(static_cast<size_t>(p.numel() * size_of(dtype)));
    weights.push_back(p.view(memory.back().data(), dtype));
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
    memory.clear();
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

}  // namespace nrl::app
