// The snippets of documents that users paste, one by one: tests/cli/documents/snippets.txt says what each
// does, this test that it does so, and docs/guides.md shows it. The binary answers for the rest in
// cli.snippets.

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "core/config/schema.h"
#include "core/config/value.h"
#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

const std::string documents = NRL_SOURCE_DIR "/tests/cli/documents/";
constexpr const char* page = NRL_SOURCE_DIR "/docs/guides.md";

struct Snippet {
  std::string document, block, kind, text, outcome;
};

std::vector<std::string> split_at(std::string_view text, std::string_view mark) {
  std::vector<std::string> out;
  for (size_t at = 0; at != std::string_view::npos;) {
    const size_t end = text.find(mark, at);
    out.emplace_back(text.substr(at, end == std::string_view::npos ? end : end - at));
    at = end == std::string_view::npos ? end : end + mark.size();
  }
  return out;
}

std::vector<Snippet> read_snippets() {
  std::ifstream file(documents + "snippets.txt");
  std::vector<Snippet> out;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    const std::vector<std::string> cells = split_at(line, " | ");
    INFO(line);
    REQUIRE(cells.size() == 5);
    out.push_back({cells[0], cells[1], cells[2], cells[3], cells[4]});
  }
  return out;
}

// A run that lacks nothing, so that only the snippet can be wrong.
const std::string complete =
    "policy:\n"
    "  model: {model_type: llama, vocab_size: 272, hidden_size: 64, intermediate_size: 96, "
    "num_hidden_layers: 16,"
    " num_attention_heads: 16}\n"
    "pretrain: {max_num_steps: 4}\n"
    "data: {train: {data_path: corpus}}\n";

ConfigResult load_snippet(const Snippet& s) {
  const size_t blank = s.kind.find(' ');
  const int ranks = std::stoi(s.kind.substr(blank));
  const bool gpu = s.kind.ends_with(" gpu");
  std::vector<std::string> overrides;
  if (s.kind.starts_with("keys")) {
    std::istringstream words(s.text);
    for (std::string word; words >> word;)
      if (word != "+") overrides.push_back(word);
  } else {
    overrides = {"policy.model={model_type: llama}", "data.train.data_path=corpus",
                 "pretrain.max_num_steps=2"};
  }
  ConfigResult result = s.kind.starts_with("keys") ? load_text(complete, overrides)
                                                   : load_config(documents + s.text, overrides);
  if (result.ok()) result.add(validate_for_world(result, ranks));
  if (result.ok()) result.add(validate_for_device(result, {.gpu = gpu, .why = "no driver is loaded"}));
  return result;
}

std::string snippet_value(const ConfigResult& result, const std::string& key) {
  for (const auto& [name, value] : result.model_values)
    if (name == key) return value;
  return value_text(result.config, key);
}

std::string cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
  return text;
}

std::string markdown(const std::vector<Snippet>& snippets) {
  std::string out =
      "# Snippets of guides\n\n"
      "Every code block, key, variable and command of the performance guides of NeMo RL and of NeMo "
      "Framework, and\n"
      "of the pages that they link, and what it does in nrl-train. `tests/cli/documents/snippets.txt` is the "
      "source\n"
      "of this page; `config_tests` and `cli.snippets` try each row.\n";
  const std::map<std::string, std::string> titles{{"scaling", "Performance and scaling"},
                                                  {"profiling", "Performance profiling"},
                                                  {"essay", "NeMo Framework, performance guide"},
                                                  {"memory", "Memory optimization"},
                                                  {"index", "Index, monitoring and benchmarking"}};
  std::string document;
  for (const Snippet& s : snippets) {
    if (s.document != document) {
      document = s.document;
      out += "\n## " + titles.at(document) + "\n\n| block | written | here |\n|---|---|---|\n";
    }
    std::string outcome = s.outcome;
    if (outcome.starts_with("sets ")) {
      outcome.clear();
      for (const std::string& pair : split_at(s.outcome.substr(5), "; "))
        outcome += (outcome.empty() ? "`" : ", `") + pair + "`";
    } else if (outcome.starts_with("refused ")) {
      outcome = "refused: " + outcome.substr(8);
    } else if (outcome.starts_with("warned ")) {
      outcome = "accepted, with a warning: " + outcome.substr(7);
    }
    const std::string text = split_at(s.text, " + ")[0];
    out +=
        "| " + cell(s.block) + " | " +
        (s.kind == "name" || s.kind == "code" || s.kind == "command" ? cell(text) : "`" + cell(text) + "`") +
        " | " + cell(outcome) + " |\n";
  }
  return out;
}

}  // namespace

TEST_CASE("every key of the documents does what the table says", "[config][documents]") {
  int tried = 0;
  for (const Snippet& s : read_snippets()) {
    if (!s.kind.starts_with("keys ") && !s.kind.starts_with("file ")) continue;
    ++tried;
    const ConfigResult result = load_snippet(s);
    const std::string shown = render(result.diagnostics);
    INFO(s.document + " | " + s.block + " | " + s.text);
    INFO(shown);
    if (s.outcome.starts_with("refused ")) {
      CHECK_FALSE(result.ok());
      CHECK(contains(shown, s.outcome.substr(8)));
    } else if (s.outcome.starts_with("warned ")) {
      CHECK(result.ok());
      CHECK(contains(shown, s.outcome.substr(7)));
    } else {
      REQUIRE(s.outcome.starts_with("sets "));
      CHECK(result.ok());
      if (!result.ok()) continue;
      for (const std::string& pair : split_at(s.outcome.substr(5), "; ")) {
        const size_t colon = pair.find(": ");
        REQUIRE(colon != std::string::npos);
        INFO(pair);
        CHECK(snippet_value(result, pair.substr(0, colon)) == pair.substr(colon + 2));
      }
    }
  }
  CHECK(tried > 90);
}

TEST_CASE("docs/guides.md is the table of snippets", "[config][documents]") {
  const std::string expected = markdown(read_snippets());
  if (std::getenv("NRL_UPDATE_DOCS")) std::ofstream(page) << expected;
  std::stringstream text;
  text << std::ifstream(page).rdbuf();
  // When it is not: run this test with NRL_UPDATE_DOCS=1.
  CHECK(text.str() == expected);
}
