#include "apps/train/loop/text_samples.h"

#include <utility>

#include "apps/data/chat/chat_prompt.h"
#include "apps/data/chat/template_choice.h"
#include "apps/data/examples/example_options.h"
#include "apps/data/examples/record.h"
#include "apps/state/hf_files.h"
#include "apps/train/start/run_data.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "core/ops/transfer.h"

namespace nrl::train {

namespace {

// The prompt of the run's examples with the text as the user's message.
data::Prompt chat_prompt(const Config& c, const data::Tokenizer& tokenizer) {
  const data::ExampleOptions options = example_options(c, false, 0);
  JsonValue messages = JsonValue::array({data::chat_message("user", c.logger.sample_prompt)});
  if (!options.system_prompt_file.empty() || !options.prompt_file.empty()) {
    const data::RecordReader reader(options, ExampleFormat::instruction, true);
    data::RecordSequence sequence = std::move(
        reader
            .read(JsonValue::object({{options.input_key, c.logger.sample_prompt}, {options.output_key, "-"}}))
            .sequences.front());
    sequence.messages.items().resize(sequence.prompt_messages);
    messages = std::move(sequence.messages);
  }
  const auto chosen = data::choose_chat_template(options.chat_template, tokenizer);
  NRL_CHECK(chosen, "conversations without a chat template");
  const std::string date = options.template_date.empty() ? data::today() : options.template_date;
  return data::ChatPrompts(chosen->chat, data::render_options(tokenizer, date), tokenizer).prompt(messages);
}

}  // namespace

TextSamples::TextSamples(const Config& c, engine::Engine& engine, bool chat, int threads)
    : config_(c), engine_(engine), chat_(chat) {
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
    generator_ = std::make_unique<TextGenerator>(
        engine.plan().spec, engine.plan().parameters, weights_, *tokenizer_,
        chat ? chat_prompt(c, *tokenizer_) : data::text_prompt(c.logger.sample_prompt, *tokenizer_),
        c.logger.sample_tokens, cpu_exec(threads));
  } catch (const Error& e) {
    fail(e.code() == Exit::usage ? Exit::config : e.code(), "logger.sample_prompt: {}", e.what());
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
  if (chat_) text += '\n';
  SamplingOptions options;
  options.temperature = c.logger.sample_temperature;
  options.seed = static_cast<uint64_t>(resolved_loop(c).seed);
  generator_->run(options, [&](std::string_view piece) { text += piece; });
  return text;
}

}  // namespace nrl::train
