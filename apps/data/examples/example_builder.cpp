#include "apps/data/examples/example_builder.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "apps/data/chat/assistant_spans.h"
#include "apps/data/json_line.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data {
namespace {

constexpr size_t most_record_text = size_t{16} << 20;   // of one sequence
constexpr size_t most_batch_bytes = size_t{1} << 30;    // of the examples of a chunk
constexpr size_t most_record_values = size_t{1} << 20;  // JSON values of a record
constexpr size_t most_rollout_values = size_t{4} << 20;

// Sets the mask of tokens that overlap one of the regions, which are in order. Tokens of no width belong to
// the next one.
void mark_regions(std::span<const int64_t> ends, std::span<const Region> regions, std::span<uint8_t> mask) {
  size_t region = 0;
  int64_t begin = 0;
  for (size_t i = 0; i < ends.size(); begin = ends[i++]) {
    while (region < regions.size() && static_cast<int64_t>(regions[region].end) <= begin) ++region;
    mask[i] = region < regions.size() && static_cast<int64_t>(regions[region].begin) < ends[i];
  }
  for (size_t i = ends.size(); i-- > 1;)
    if (ends[i - 1] == (i > 1 ? ends[i - 2] : 0)) mask[i - 1] = mask[i];
}

bool any_text(const JsonValue& value, const std::function<bool(std::string_view)>& found) {
  if (value.is_string()) return found(value.as_string());
  if (value.is_array())
    return std::any_of(value.items().begin(), value.items().end(),
                       [&](const JsonValue& item) { return any_text(item, found); });
  if (value.is_object())
    return std::any_of(value.members().begin(), value.members().end(),
                       [&](const JsonMember& member) { return any_text(member.value, found); });
  return false;
}

Record text_record(std::string text) {
  Record record;
  record.sequences.emplace_back().completion = std::move(text);
  return record;
}

// Calls `work`, and says of its errors that they are the chat template's.
template <class F>
auto in_template(const F& work) {
  try {
    return work();
  } catch (const Error& e) {
    if (e.code() != Exit::data) throw;
    fail(Exit::data, "chat template: {}", e.what());
  }
}

// Appends the numbers of a record, of the tokens with a loss.
void append_numbers(const Record& record, const std::vector<uint8_t>& mask, ExampleBatch& batch) {
  const ExampleColumns& columns = record.columns;
  const ExampleNumbers& numbers = record.numbers;
  for (size_t v = 0; v < example_values; ++v)
    if (columns.values[v]) batch.values[v].push_back(numbers.values[v]);
  for (size_t k = 0; k < token_log_probs; ++k) {
    if (!columns.log_probs[k]) continue;
    auto next = numbers.log_probs[k].begin();
    for (const uint8_t in_loss : mask) batch.log_probs[k].push_back(in_loss ? *next++ : 0.0f);
  }
  if (columns.groups) batch.groups.push_back(batch.group_count - 1);
  const auto top = std::count(mask.begin(), mask.end(), 1) * columns.top_k;
  batch.top_ids.insert(batch.top_ids.end(), numbers.top_ids.begin(), numbers.top_ids.begin() + top);
  batch.top_log_probs.insert(batch.top_log_probs.end(), numbers.top_log_probs.begin(),
                             numbers.top_log_probs.begin() + top);
}

void require_size(size_t bytes) {
  if (bytes > most_record_text)
    fail(Exit::data, "the record has {} of text; expected at most {}", human_bytes(bytes),
         human_bytes(most_record_text));
}

}  // namespace

/// The tokens of a sequence.
struct ExampleBuilder::Made {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  bool ended = true;  // every trained turn ends with an end token
  int64_t text_bytes = 0, bytes_without_token = 0;

  int32_t loss_tokens() const { return static_cast<int32_t>(std::count(mask.begin(), mask.end(), 1)); }
};

ExampleBuilder::ExampleBuilder(ExampleOptions options, const Tokenizer& tokenizer,
                               std::optional<ChatTemplate> chat, RenderOptions render)
    : options_(std::move(options)),
      tokenizer_(tokenizer),
      chat_(std::move(chat)),
      render_(std::move(render)),
      reader_(options_, options_.format, chat_.has_value()),
      special_(tokenizer),
      eos_ids_(tokenizer.eos_ids()),
      end_ids_(eos_ids_) {
  NRL_CHECK(options_.train_on != TrainOn::automatic);
  for (const Tokenizer::SpecialToken& token : tokenizer.special_token_list()) end_ids_.push_back(token.id);
  std::sort(end_ids_.begin(), end_ids_.end());
}

bool ExampleBuilder::is_end(int32_t id) const {
  return std::binary_search(end_ids_.begin(), end_ids_.end(), id);
}

Record ExampleBuilder::read(std::string_view line, const std::string& source) const {
  const bool rollouts = options_.format == ExampleFormat::rollouts;
  return reader_.read(parse_json_line(line, source, rollouts ? most_rollout_values : most_record_values));
}

ExampleColumns ExampleBuilder::columns(std::string_view line, const std::string& source) const {
  return read(line, source).columns;
}

void ExampleBuilder::add(const TextChunk& chunk, int32_t file, const ExpectedColumns& expected,
                         ExampleBatch& batch) const {
  // Calls `work`, and adds the record at `number` to its errors.
  const auto add_at = [&](int64_t number, const std::function<void(const RecordIncidents::Place&)>& work) {
    RecordIncidents::Place place{.file = file, .line = number, .text = {}};
    const std::string source = fmt::format("{}:{}", chunk.file->path, number);
    ++batch.counts.records;
    try {
      work(place);
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
      std::string text = place_in_line(e.what(), source);
      text = text.starts_with(source) ? text.substr(source.size()) : ": " + text;
      if (options_.on_bad_record == OnBadRecord::error)
        fail(Exit::data, "{}{}. (data.on_bad_record: skip leaves such records out.)", source, text);
      place.text = std::move(text);
      batch.counts.skipped.add(std::move(place));
    }
    if (batch.bytes() > most_batch_bytes)
      fail(Exit::data, "{}: the examples of {} of records have more than {}. Fix: reduce max_length", source,
           human_bytes(chunk.text.size()), human_bytes(most_batch_bytes));
  };
  if (chunk.file->jsonl) {
    for_each_line(chunk, [&](std::string_view line, int64_t number) {
      add_at(number, [&](const RecordIncidents::Place& place) {
        auto text = plain_text(line);
        add_record(
            text ? text_record(*std::move(text)) : read(line, fmt::format("{}:{}", chunk.file->path, number)),
            place, expected, batch);
      });
    });
    return;
  }
  if (options_.format != ExampleFormat::text)
    fail(Exit::data,
         "{}: not JSON lines; expected a file with the format {} named *.jsonl, one record on each line. Fix "
         "for "
         "a JSON list: jq -c '.[]' LIST.json > DATA.jsonl",
         chunk.file->path, name_of(options_.format));
  const std::string& text = chunk.text;
  const size_t bad = std::min(text.find('\0'), find_invalid_utf8(text));
  const auto before = text.begin() + static_cast<ptrdiff_t>(std::min(bad, text.size()));
  const auto number = bad == std::string::npos ? 1 : 1 + std::count(text.begin(), before, '\n');
  add_at(number, [&](const RecordIncidents::Place& place) {
    if (bad != std::string::npos)
      fail(Exit::data, "not UTF-8 text: byte 0x{:02x}. Fix: convert the file (iconv -f LATIN1 -t UTF-8)",
           static_cast<uint8_t>(text[bad]));
    ChunkCounts counts;
    for_each_document(chunk, {}, counts, [&](std::string_view document) {
      add_record(text_record(std::string(document)), place, expected, batch);
    });
  });
}

// The text of a line of format text, if that needs no closer look.
std::optional<std::string> ExampleBuilder::plain_text(std::string_view line) const {
  if (options_.format != ExampleFormat::text || find_invalid_utf8(line) != std::string_view::npos ||
      line.find('\0') != std::string_view::npos)
    return std::nullopt;
  auto text = text_of_plain_line(line, options_.text_key);
  return text && !text->empty() ? std::move(text) : std::nullopt;
}

std::string ExampleBuilder::special_text(const Record& record) const {
  std::string name;
  const auto found = [&](std::string_view text) {
    const auto match = special_.find(text);
    if (match) name = text.substr(match->begin, match->end - match->begin);
    return match.has_value();
  };
  if (any_text(record.tools, found)) return name;
  for (const RecordSequence& sequence : record.sequences)
    if (found(sequence.prompt) || found(sequence.completion) || any_text(sequence.messages, found))
      return name;
  return {};
}

void ExampleBuilder::add_beginning(Made& made) const {
  if (!options_.add_bos || !tokenizer_.bos() || (!made.ids.empty() && made.ids[0] == *tokenizer_.bos()))
    return;
  made.ids.insert(made.ids.begin(), *tokenizer_.bos());
  made.mask.insert(made.mask.begin(), 0);
}

void ExampleBuilder::make_ids(RecordSequence& sequence, const Record& record, Made& made) const {
  made.ids = std::move(sequence.prompt_ids);
  if (made.ids.empty()) {
    const bool messages = !sequence.messages.is_null();
    std::string text = std::move(sequence.prompt);
    if (messages) {
      RenderOptions options = render_;
      options.add_generation_prompt = true;
      const Conversation conversation = conversation_of(sequence, record);
      text = in_template([&] { return chat_->render(conversation, options).text; });
    }
    require_size(text.size());
    made.text_bytes = static_cast<int64_t>(text.size());
    std::vector<int64_t> ends;
    made.bytes_without_token = special_.encode(tokenizer_, text, made.ids, ends);
    if (!messages) add_beginning(made);
  }
  made.mask.assign(made.ids.size(), 0);
  made.ids.insert(made.ids.end(), sequence.completion_ids.begin(), sequence.completion_ids.end());
  made.mask.resize(made.ids.size(), 1);
  made.ended = is_end(made.ids.back());
}

void ExampleBuilder::make_plain(const RecordSequence& sequence, Made& made) const {
  const size_t begin = options_.train_on == TrainOn::all ? 0 : sequence.prompt.size();
  const std::string text = sequence.prompt + sequence.completion;
  require_size(text.size());
  made.text_bytes = static_cast<int64_t>(text.size());
  std::vector<int64_t> ends;
  made.bytes_without_token = special_.encode(tokenizer_, text, made.ids, ends);
  made.mask.resize(made.ids.size());
  const Region trained{.begin = begin, .end = text.size()};
  mark_regions(ends, {&trained, 1}, made.mask);
  add_beginning(made);
  const auto ends_already = [&] {
    return !made.ids.empty() && std::binary_search(eos_ids_.begin(), eos_ids_.end(), made.ids.back());
  };
  if (options_.add_eos && tokenizer_.eos() && !ends_already()) {
    made.ids.push_back(*tokenizer_.eos());
    made.mask.push_back(1);
  }
  made.ended = ends_already();
}

Conversation ExampleBuilder::conversation_of(RecordSequence& sequence, const Record& record) const {
  Conversation conversation{.messages = std::move(sequence.messages), .tools = record.tools, .kwargs = {}};
  if (options_.chat_template_kwargs.is_object()) conversation.kwargs = options_.chat_template_kwargs;
  if (record.kwargs.is_object())
    for (const JsonMember& member : record.kwargs.members())
      conversation.kwargs.set(member.key, member.value);
  return conversation;
}

void ExampleBuilder::make_rendered(RecordSequence& sequence, const Record& record, Made& made) const {
  const Conversation conversation = conversation_of(sequence, record);
  const Rendered rendered = in_template([&] { return chat_->render(conversation, render_); });
  std::vector<AssistantSpan> spans;
  if (options_.train_on != TrainOn::all)
    spans = in_template(
        [&] { return assistant_spans(*chat_, conversation, render_, rendered, special_.texts()); });
  require_size(rendered.text.size());
  made.text_bytes = static_cast<int64_t>(rendered.text.size());
  if (options_.train_on == TrainOn::last_assistant && spans.size() > 1)
    spans.erase(spans.begin(), spans.end() - 1);
  std::vector<Region> regions;
  for (const AssistantSpan& span : spans) {
    if (options_.train_on == TrainOn::completion && span.message < sequence.prompt_messages) continue;
    regions.push_back(span.region);
    made.ended = made.ended && span.ended;
  }
  if (options_.train_on == TrainOn::all) regions = {{.begin = 0, .end = rendered.text.size()}};
  std::vector<int64_t> ends;
  made.bytes_without_token = special_.encode(tokenizer_, rendered.text, made.ids, ends);
  made.mask.resize(made.ids.size());
  mark_regions(ends, regions, made.mask);
  // A template may end turns with a text that is no token.
  if (options_.train_on == TrainOn::all) {
    made.ended = std::any_of(made.ids.begin(), made.ids.end(), [&](int32_t id) { return is_end(id); });
    return;
  }
  for (size_t i = 0; i < made.ids.size(); ++i) {
    const bool last = made.mask[i] && (i + 1 == made.ids.size() || !made.mask[i + 1]);
    if (last && !is_end(made.ids[i])) made.ended = false;
  }
}

void ExampleBuilder::check_ids(std::span<const int32_t> ids, std::string_view reason) const {
  int64_t vocab = tokenizer_.vocab_size();
  if (options_.vocab_size > 0) vocab = std::min(vocab, options_.vocab_size);
  for (const int32_t id : ids)
    if (id >= vocab)
      fail(Exit::data, "token {} is outside of the model's vocabulary of {}{}", id, vocab, reason);
}

void ExampleBuilder::add_record(Record record, RecordIncidents::Place place, const ExpectedColumns& expected,
                                ExampleBatch& batch) const {
  ExampleCounts& counts = batch.counts;
  if (expected.columns.groups) batch.begin_record(record.numbers.group);
  require_columns(record.columns, expected);
  const std::string special = special_text(record);
  if (!special.empty()) {
    if (options_.special_tokens_in_text == SpecialTokensInText::error)
      fail(Exit::data, "its text contains the special token {}, and is tokenized as that token", special);
    if (options_.special_tokens_in_text == SpecialTokensInText::drop) {
      counts.special_dropped.add(std::move(place));
      return;
    }
  }
  std::vector<Made> made(record.sequences.size());
  size_t longest = 0;
  bool ended = true;
  for (size_t i = 0; i < made.size(); ++i) {
    RecordSequence& sequence = record.sequences[i];
    const bool ids = !sequence.completion_ids.empty();
    if (ids) {
      make_ids(sequence, record, made[i]);
    } else if (sequence.messages.is_null()) {
      make_plain(sequence, made[i]);
    } else {
      make_rendered(sequence, record, made[i]);
    }
    if (!made[i].mask.empty()) made[i].mask[0] = 0;  // nothing predicts the first token
    longest = std::max(longest, made[i].ids.size());
    ended = ended && made[i].ended;
    counts.text_bytes += made[i].text_bytes;
    counts.bytes_without_token += made[i].bytes_without_token;
    check_ids(made[i].ids, ids ? "" : ": the tokenizer is not the model's");
  }
  check_ids(record.numbers.top_ids, " (\"topk_ids\")");
  if (std::any_of(made.begin(), made.end(), [](const Made& m) { return m.loss_tokens() == 0; })) {
    counts.without_loss.add(std::move(place));
    return;
  }
  require_tokens(record.columns, record.numbers, made[0].loss_tokens(),
                 record.sequences[0].completion_ids.empty());
  // The sequences of a pair have the same limit, so that truncation prefers neither.
  const auto most = static_cast<size_t>(options_.max_length);
  bool end_lost = false;
  if (longest > most) {
    if (options_.on_overlong == OnOverlong::error)
      fail(Exit::data,
           "{} tokens, more than the {} of the context. Fix: raise policy.max_total_sequence_length, or set "
           "policy.on_overlong to truncate or drop",
           longest, most);
    if (options_.on_overlong == OnOverlong::drop) {
      counts.dropped.add(std::move(place));
      return;
    }
    for (Made& m : made) {
      if (m.ids.size() <= most) continue;
      const auto first = std::find(m.mask.begin(), m.mask.end(), 1) - m.mask.begin();
      if (first >= options_.max_length)
        fail(Exit::data,
             "its prompt has {} tokens, so that truncation to the {} of the context leaves nothing to train. "
             "Fix: raise policy.max_total_sequence_length, or set policy.on_overlong: drop",
             first, most);
      end_lost = end_lost || (m.ended && std::find(m.mask.begin() + options_.max_length, m.mask.end(), 1) !=
                                             m.mask.end());
      m.ids.resize(most);
      m.mask.resize(most);
    }
    counts.truncated.add(place);
  }
  if (end_lost) counts.end_lost.add(place);
  if (!ended) counts.no_end_token.add(place);
  if (!special.empty()) counts.special_text.add(place);
  batch.sources.push_back({.row = counts.records - 1, .line = place.line, .file = place.file});
  append_numbers(record, made[0].mask, batch);
  for (const Made& m : made) {
    batch.ids.insert(batch.ids.end(), m.ids.begin(), m.ids.end());
    batch.mask.insert(batch.mask.end(), m.mask.begin(), m.mask.end());
    batch.lengths.push_back({.tokens = static_cast<int32_t>(m.ids.size()), .loss_tokens = m.loss_tokens()});
  }
}

}  // namespace nrl::data
