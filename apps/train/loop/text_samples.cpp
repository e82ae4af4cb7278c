#include "apps/train/loop/text_samples.h"

#include "apps/train/state/hf_files.h"
#include "core/ops/transfer.h"

namespace nrl::train {

TextSamples::TextSamples(const Config& c, engine::Engine& engine, int threads) : config_(c), engine_(engine) {
  tokenizer_ = tokenizer_of_run(c);
  if (!tokenizer_)
    fail(Exit::config,
         "logger.sample_period: the tokenizer of this run is unknown: neither the data nor the model names "
         "one. Fix: set policy.tokenizer.name, or logger.sample_period to 0");
  weights_ = engine.weights();
  if (engine.exec().device)
    for (Tensor& weight : weights_) {
      copies_.emplace_back(static_cast<size_t>(weight.bytes()));
      weight.data = copies_.back().data();
    }
  try {
    generator_ =
        std::make_unique<TextGenerator>(engine.plan().spec, engine.plan().parameters, weights_, *tokenizer_,
                                        c.logger.sample_prompt, c.logger.sample_tokens, cpu_exec(threads));
  } catch (const Error& e) {
    if (e.code() == Exit::usage) fail(Exit::config, "logger.sample_prompt: {}", e.what());
    throw;
  }
}

std::string TextSamples::sample() {
  const Config& c = config_;
  engine_.finish_gathers();
  if (engine_.exec().device) {
    const std::vector<Tensor> device = engine_.weights();
    for (size_t i = 0; i < device.size(); ++i) ops::download(engine_.exec(), device[i], weights_[i].data);
  }
  std::string text = c.logger.sample_prompt;
  SamplingOptions options;
  options.temperature = c.logger.sample_temperature;
  options.seed = static_cast<uint64_t>(resolved_loop(c).seed);
  generator_->run(options, [&](std::string_view piece) { text += piece; });
  return text;
}

}  // namespace nrl::train
