// Chat templates against texts that transformers and jinja2 made.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "apps/data/chat/chat_template.h"
#include "core/base/error.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/chat_files.h"

namespace nrl::data {
namespace {

/// The result of a rendering as a vector has it: the text, or "error: " and the text of the error.
struct Outcome {
  std::string text;
  std::vector<Region> generation;
};

Outcome rendered(const std::string& source, const Conversation& conversation, const RenderOptions& options) {
  try {
    Rendered result = ChatTemplate::parse(source, "template").render(conversation, options);
    return {std::move(result.text), std::move(result.generation)};
  } catch (const Error& e) {
    CHECK(e.code() == Exit::data);
    return {"error: " + std::string(without_place(e.what(), "template")), {}};
  }
}

/// Errors of templates and of undefined values have the same text; others need only be errors.
void compare(const Outcome& outcome, const JsonValue& vector) {
  if (const JsonValue* const text = vector.find("text")) {
    CHECK(outcome.text == text->as_string());
    return;
  }
  const std::string type = vector.get_string("type");
  if (type == "TemplateError" || type == "UndefinedError" || type == "TypeError")
    CHECK(outcome.text == "error: " + vector.get_string("error"));
  else
    CHECK(outcome.text.starts_with("error: "));
}

void compare_template(const std::filesystem::path& file, const JsonValue& shared) {
  const JsonValue recorded = read_json(file);
  for (const JsonValue& vector : recorded.at("vectors").items()) {
    const JsonValue& recorded_conversation = shared.at("conversations").at(vector.get_string("conversation"));
    const Conversation conversation{recorded_conversation.at("messages"), recorded_conversation.at("tools"),
                                    recorded_conversation.at("kwargs")};
    RenderOptions options;
    options.now = time_of(shared.get_string("now"));
    options.special_tokens = shared.at("special_tokens");
    options.add_generation_prompt = vector.get_bool("add_generation_prompt", false);
    options.continue_final_message = vector.get_bool("continue_final_message", false);
    INFO(file.filename().string() << ", " << vector.dump());
    const Outcome outcome = rendered(recorded.get_string("source"), conversation, options);
    compare(outcome, vector);
    if (const JsonValue* const regions = vector.find("generation")) {
      std::vector<Region> wanted;
      for (const JsonValue& region : regions->items())
        wanted.push_back({region.items()[0].as_uint(), region.items()[1].as_uint()});
      CHECK(outcome.generation == wanted);
    }
  }
}

void compare_directory(const std::filesystem::path& directory) {
  const JsonValue shared = read_json(directory / "conversations.json");
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    const std::string name = entry.path().filename();
    if (!name.ends_with(".json") || name == "conversations.json" || name == "expressions.json") continue;
    compare_template(entry.path(), shared);
    ++files;
  }
  CHECK(files > 0);
}

TEST_CASE("Chat templates render the text that transformers makes") {
  compare_directory(chat_directory());
}

// NRL_CHAT_VECTORS names a directory that scripts/dev/chat-vectors.py has written, such as the vectors of
// templates that are not part of the sources.
TEST_CASE("Chat templates render the text of further vectors") {
  if (const char* const directory = std::getenv("NRL_CHAT_VECTORS")) compare_directory(directory);
}

TEST_CASE("Expressions have the values of jinja2") {
  const JsonValue recorded = read_json(chat_directory() / "expressions.json");
  RenderOptions options;
  options.now = time_of(recorded.get_string("now"));
  for (const JsonValue& vector : recorded.at("vectors").items()) {
    const JsonValue& context = recorded.at("contexts").items()[vector.get_uint("context")];
    const Conversation conversation{recorded.at("messages"), {}, context};
    INFO(vector.dump());
    compare(rendered(vector.get_string("source"), conversation, options), vector);
  }
}

}  // namespace
}  // namespace nrl::data
