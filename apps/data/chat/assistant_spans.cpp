#include "apps/data/chat/assistant_spans.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/text.h"
#include "core/base/error.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

/// Up to this many assistant messages, the beginning of each is found by a rendering of the messages before
/// it. Beyond, messages of one class share the distance from their region, if it is the same at so many of
/// them.
constexpr size_t most_exact = 16, samples = 6;

constexpr size_t npos = std::string_view::npos;

bool is_assistant(const JsonValue& message) {
  const JsonValue* const role = message.find("role");
  return role && role->is_string() && role->as_string() == "assistant";
}

/// Messages of one class have neighbors of the same shape, to which templates give the same frame.
std::string class_of(const JsonValue::Array& messages, size_t index) {
  std::string name;
  const auto add = [&](const JsonValue& message) {
    if (const JsonValue* const role = message.find("role"); role && role->is_string())
      name += role->as_string();
    for (const JsonMember& member : message.members())
      if (!member.value.is_null()) (name += '\n') += member.key;
    name += '\0';
  };
  if (index > 0) add(messages[index - 1]);
  add(messages[index]);
  return name;
}

/// The content of a message, or its last text part, without white space around it.
std::string_view content_of(const JsonValue& message) {
  const JsonValue* content = message.find("content");
  if (content && content->is_array()) {
    const JsonValue* last = nullptr;
    for (const JsonValue& part : content->items())
      if (part.is_object() && part.contains("text")) last = part.find("text");
    content = last;
  }
  if (!content || !content->is_string()) return {};
  return chat::strip(content->as_string(), chat::Side::both);
}

class SpanFinder {
 public:
  SpanFinder(const ChatTemplate& chat, const Conversation& conversation, const RenderOptions& options,
             const Rendered& rendered, std::span<const std::string> end_tokens)
      : chat_(chat),
        conversation_(conversation),
        options_(options),
        rendered_(rendered),
        messages_(conversation.messages.items()),
        text_(rendered.text),
        end_tokens_(end_tokens) {}

  std::vector<AssistantSpan> run() {
    for (size_t i = 0; i < rendered_.messages.size(); ++i)
      if (is_assistant(messages_[i])) assistants_.push_back(i);
    if (chat_.has_generation_blocks()) return blocks();
    attributed_ = std::any_of(assistants_.begin(), assistants_.end(), [&](size_t i) { return !is_empty(i); });
    find_begins();
    std::vector<AssistantSpan> spans;
    for (size_t k = 0; k < assistants_.size(); ++k)
      if (begins_[k] != npos) spans.push_back(span_from(assistants_[k], begins_[k]));
    return spans;
  }

 private:
  Region region(size_t message) const { return rendered_.messages[message]; }
  bool is_empty(size_t message) const { return region(message).begin == region(message).end; }

  // The {% generation %} blocks: these are the spans, as in transformers.
  std::vector<AssistantSpan> blocks() const {
    const std::vector<Region>& found = rendered_.generation;
    std::vector<AssistantSpan> spans;
    for (size_t k = 0; k < found.size(); ++k) {
      if (found[k].begin == found[k].end) continue;
      // The last message that begins before the block: it may follow the loop over the messages.
      size_t owner = npos;
      for (const size_t i : assistants_)
        if (!is_empty(i) && region(i).begin <= found[k].begin) owner = i;
      if (owner == npos && found.size() == assistants_.size()) owner = assistants_[k];
      if (owner == npos)
        fail(Exit::data, "{}: a generation block is not part of an assistant message", chat_.name());
      const std::string_view block = text_.substr(found[k].begin, found[k].end - found[k].begin);
      const std::string_view trimmed = chat::strip(block, chat::Side::right);
      const bool ended = std::any_of(end_tokens_.begin(), end_tokens_.end(), [&](const std::string& token) {
        return !token.empty() && (block.ends_with(token) || trimmed.ends_with(token));
      });
      spans.push_back({owner, found[k], ended});
    }
    return spans;
  }

  void find_begins() {
    begins_.assign(assistants_.size(), npos);
    if (assistants_.size() <= most_exact) {
      for (size_t k = 0; k < assistants_.size(); ++k) begins_[k] = exact_begin(assistants_[k]);
      return;
    }
    std::vector<std::pair<std::string, std::vector<size_t>>> classes;
    for (size_t k = 0; k < assistants_.size(); ++k) {
      std::string name = class_of(messages_, assistants_[k]);
      const auto known =
          std::find_if(classes.begin(), classes.end(), [&](const auto& c) { return c.first == name; });
      if (known != classes.end())
        known->second.push_back(k);
      else
        classes.push_back({std::move(name), {k}});
    }
    for (const auto& [name, members] : classes) find_begins_of_class(members);
  }

  void find_begins_of_class(const std::vector<size_t>& members) {
    std::optional<std::string_view> frame;  // text from the region to the beginning of the turn
    bool same = members.size() > samples;
    for (size_t sample = 0; same && sample < samples; ++sample) {
      const size_t k = members[sample * (members.size() - 1) / (samples - 1)];
      begins_[k] = exact_begin(assistants_[k]);
      const Region place = region(assistants_[k]);
      if (begins_[k] == npos || begins_[k] < place.begin || begins_[k] > place.end) {
        same = false;
        break;
      }
      const std::string_view sampled = text_.substr(place.begin, begins_[k] - place.begin);
      same = !frame || *frame == sampled;
      frame = sampled;
    }
    for (const size_t k : members) {
      if (begins_[k] != npos) continue;
      const Region place = region(assistants_[k]);
      const bool applies = same && text_.substr(place.begin, place.end - place.begin).starts_with(*frame);
      begins_[k] = applies ? place.begin + frame->size() : exact_begin(assistants_[k]);
    }
  }

  std::optional<std::string> prefix(size_t count, bool add_generation_prompt) const {
    if (count == 0) return std::nullopt;
    RenderOptions options = options_;
    options.add_generation_prompt = add_generation_prompt;
    options.continue_final_message = false;
    options.most_messages = count;
    try {
      return chat_.render(conversation_, options).text;
    } catch (const Error&) {
      return std::nullopt;  // a template may refuse to end here
    }
  }

  // The beginning of the turn; npos for a message that the template leaves out.
  size_t exact_begin(size_t message) {
    if (attributed_ && is_empty(message)) return npos;
    const auto before = prefix(message, true);
    const bool fits = !attributed_ || (before && before->size() <= region(message).end);
    if (before && fits && text_.starts_with(*before)) return before->size();
    if (!is_empty(message)) {
      const std::string_view own =
          text_.substr(region(message).begin, region(message).end - region(message).begin);
      find_headers();
      // The template may begin the text with something else.
      const std::string_view before_content = own.substr(0, own.find(content_of(messages_[message])));
      for (const std::string* const header : {&prompt_, &header_})
        if (const size_t at = before_content.find(*header); at != npos && !header->empty())
          return region(message).begin + at + header->size();
      return region(message).begin;
    }
    fail(Exit::data,
         "{}: the beginning of message {} cannot be found in the rendered text: the template changes earlier "
         "messages "
         "and has no loop over them. Fix: mark the assistant's text by {{% generation %}} blocks",
         chat_.name(), message + 1);
  }

  // Renders a conversation of our own; nullopt if the template refuses it.
  std::optional<Rendered> probe(JsonValue messages, bool add_generation_prompt) const {
    RenderOptions options = options_;
    options.continue_final_message = false;
    options.add_generation_prompt = add_generation_prompt;
    try {
      return chat_.render({std::move(messages), conversation_.tools, conversation_.kwargs}, options);
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  // Finds the text that add_generation_prompt adds, and the part of it that an earlier turn has, too: it may
  // go on with reasoning that only the last turn shows.
  void find_headers() {
    if (std::exchange(has_headers_, true)) return;
    const auto message = [](const char* role, const char* content) {
      return JsonValue::object({{"role", role}, {"content", content}});
    };
    const JsonValue question = message("user", "x"), answer = message("assistant", "y");
    const auto without = probe(JsonValue::array({question}), false),
               with = probe(JsonValue::array({question}), true);
    if (without && with && with->text.starts_with(without->text))
      prompt_ = with->text.substr(without->text.size());
    header_ = prompt_;
    const auto turns = probe(JsonValue::array({question, answer, question}), false);
    if (!turns || turns->messages[1].begin == turns->messages[1].end) return;
    header_.resize(common_size(prompt_, std::string_view(turns->text).substr(turns->messages[1].begin)));
  }

  // Bytes that both texts begin with, in whole characters.
  static size_t common_size(std::string_view a, std::string_view b) {
    size_t common =
        static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
    while (common > 0 && common < a.size() && (static_cast<uint8_t>(a[common]) & 0xC0) == 0x80) --common;
    return common;
  }

  // The end of the text of a message, which begins at `begin`.
  size_t limit_of(size_t message, size_t begin) const {
    if (!is_empty(message) && region(message).end > begin) return region(message).end;
    const auto until = prefix(message + 1, false);
    return until && until->size() >= begin && text_.starts_with(*until) ? until->size() : text_.size();
  }

  struct EndToken {
    size_t begin = npos, end = 0;
  };

  // The first end token from `from` on, and the longest one there.
  EndToken end_token(std::string_view text, size_t from) const {
    EndToken first;
    for (const std::string& token : end_tokens_) {
      const size_t at = token.empty() ? npos : text.find(token, from);
      if (at == npos || at > first.begin || (at == first.begin && at + token.size() < first.end)) continue;
      first = {at, at + token.size()};
    }
    return first;
  }

  AssistantSpan span_from(size_t message, size_t begin) const {
    const size_t limit = limit_of(message, begin);
    const std::string_view own = text_.substr(begin, limit - begin);
    const std::string_view content = content_of(messages_[message]);
    size_t found = own.find(content);
    // Not a part of an end token.
    const EndToken early = end_token(own, 0);
    if (found != npos && early.begin < found && found < early.end) found = npos;
    const size_t content_end = found == npos ? 0 : found + content.size();
    if (const EndToken token = end_token(own, content_end); token.begin != npos)
      return {message, {begin, begin + token.end}, true};
    // The next message may begin with the end token.
    size_t next = 0;
    for (const std::string& token : end_tokens_)
      if (text_.substr(limit).starts_with(token)) next = std::max(next, token.size());
    if (next > 0) return {message, {begin, limit + next}, true};
    const bool has_more = found == npos || content.empty() || messages_[message].contains("tool_calls");
    const size_t end = has_more ? chat::strip(own, chat::Side::right).size() : content_end;
    return {message, {begin, begin + end}, false};
  }

  const ChatTemplate& chat_;
  const Conversation& conversation_;
  const RenderOptions& options_;
  const Rendered& rendered_;
  const JsonValue::Array& messages_;
  const std::string_view text_;
  const std::span<const std::string> end_tokens_;
  std::vector<size_t> assistants_;  // indices of their messages
  bool attributed_ = false;         // they have regions
  std::vector<size_t> begins_;      // of the assistants' turns
  bool has_headers_ = false;
  std::string prompt_, header_;  // see find_headers()
};

}  // namespace

std::vector<AssistantSpan> assistant_spans(const ChatTemplate& chat, const Conversation& conversation,
                                           const RenderOptions& options, const Rendered& rendered,
                                           std::span<const std::string> end_tokens) {
  return SpanFinder(chat, conversation, options, rendered, end_tokens).run();
}

}  // namespace nrl::data
