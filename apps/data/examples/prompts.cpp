#include "apps/data/examples/prompts.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "apps/data/chat/chat_prompt.h"
#include "apps/data/chat/template_choice.h"
#include "apps/data/examples/record.h"
#include "apps/data/text_source.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {

Prompts::Prompts(const ExampleOptions& options, const Tokenizer& tokenizer) {
  const auto chosen = choose_chat_template(options.chat_template, tokenizer);
  const std::string date = options.template_date.empty() ? today() : options.template_date;
  std::optional<ChatPrompts> chat;
  if (chosen) chat.emplace(chosen->chat, render_options(tokenizer, date), tokenizer);
  const RecordReader reader(options, ExampleFormat::instruction, chosen.has_value());
  std::string end_text;

  const auto read = [&](std::string_view line, const std::string& source) {
    Item item{.ids = {}, .record = parse_json_line(line, source), .where = source};
    // An instruction without its answer.
    JsonValue with_answer = item.record;
    with_answer.set(options.output_key, "-");
    RecordSequence sequence = std::move(reader.read(std::move(with_answer)).sequences.front());
    Prompt prompt;
    if (chat) {
      sequence.messages.items().resize(sequence.prompt_messages);
      prompt = chat->prompt(sequence.messages);
    } else {
      prompt = text_prompt(sequence.prompt, tokenizer);
    }
    for (const int32_t id : prompt.ids)
      if (options.vocab_size > 0 && id >= options.vocab_size)
        fail(Exit::data, "token {} is outside of the model's vocabulary of {}", id, options.vocab_size);
    const auto length = std::ssize(prompt.ids);
    if (length >= options.max_length) {
      if (options.on_overlong != OnOverlong::drop)
        fail(Exit::data,
             "a prompt of {} tokens leaves no room for an answer in policy.max_total_sequence_length: {}. "
             "Fix: raise that, or set policy.on_overlong: drop",
             length, options.max_length);
      ++dropped_;
      return;
    }
    end_ids_ = std::move(prompt.end_ids);
    end_text = std::move(prompt.end_text);
    longest_ = std::max(longest_, length);
    tokens_ += length;
    item.ids = std::move(prompt.ids);
    items_.push_back(std::move(item));
  };

  const std::vector<InputFile> files = list_inputs(options.inputs, options.inputs.front() + ".", "");
  for (const InputFile& file : files)
    read_chunks(file, [&](TextChunk&& chunk) {
      for_each_line(chunk, [&](std::string_view line, int64_t number) {
        const std::string source = fmt::format("{}:{}", file.path, number);
        try {
          read(line, source);
        } catch (const Error& e) {
          if (e.code() != Exit::data) throw;
          const std::string text = place_in_line(e.what(), source);
          fail(Exit::data, "{}", text.starts_with(file.path) ? text : fmt::format("{}: {}", source, text));
        }
      });
      return true;
    });
  source_ = files.empty() ? "" : files.front().path;
  if (items_.empty()) fail(Exit::data, "{}: there is no prompt", source_);
  // The template's own end of an answer counts if it is a token.
  if (const auto id = tokenizer.id_of(end_text); id && std::ranges::find(end_ids_, *id) == end_ids_.end())
    end_ids_.push_back(*id);
  if (end_ids_.empty())
    fail(Exit::config,
         "{}: answers have no end: the tokenizer has no end token, and the chat template puts no special "
         "token "
         "after an answer. Fix: set {}",
         source_, template_key);
}

std::string Prompts::describe() const {
  return fmt::format("{} prompts of {}, {} tokens on average, {} at most{}", grouped(size()),
                     clipped(source_), tokens_ / size(), longest_,
                     dropped_ > 0 ? fmt::format("; {} too long ones left out", grouped(dropped_)) : "");
}

}  // namespace nrl::data
