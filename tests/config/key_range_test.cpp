// Every key of the schema at both ends of its range, just outside of it, and with every choice.

#include "core/config/convert.h"
#include "tests/catch.h"
#include "tests/config/helpers.h"
#include "tests/config/key_ends.h"

using namespace nrl;
using namespace nrl::config_detail;
using namespace nrl::test;

namespace {

/// A file with nothing but this key, and where its value stands.
struct OneKey {
  std::string text;
  int line = 0, column = 0;
};
OneKey file_of(const std::string& path, const std::string& value) {
  OneKey file;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string indent(static_cast<size_t>(2 * file.line++), ' ');
    file.text += indent + path.substr(begin, end - begin) + (end < path.size() ? ":\n" : ": ");
    file.column = static_cast<int>(indent.size() + end - begin + 3);
    begin = end + 1;
  }
  file.text += value + "\n";
  return file;
}

/// The keys that complete a configuration of an algorithm that has the key.
std::vector<std::string> completed(const Key& key) {
  const std::string algorithm(name_of(key.algorithms.empty() ? Algorithm::pretrain : key.algorithms[0]));
  std::vector<std::string> overrides;
  if (algorithm != "pretrain") overrides.push_back("algorithm=" + algorithm);
  for (const std::string& needed :
       {std::string("policy.model.model_type=llama"), algorithm + ".max_num_steps=10",
        std::string("data.train.data_path=corpus")})
    if (!needed.starts_with(key.path + "=")) overrides.push_back(needed);
  return overrides;
}

Node scalar(const std::string& value) {
  Diagnostics none;
  const Source source("value", "a=" + value, true);
  const Node root = parse_override(source, none);
  REQUIRE(none.empty());
  return root.entries[0].value;
}

}  // namespace

TEST_CASE("every key takes the ends of its range", "[config][ranges]") {
  int accepted = 0;
  for (const Key& key : Schema::get().keys())
    for (const std::string& value : ends_of(key).inside) {
      CAPTURE(key.path, value);
      const Converted converted = convert(key, scalar(value));
      if (!key.built) {  // of a feature to come: its default and nothing else
        const bool inert = converted.value.has_value();
        if (inert) CHECK(yaml_text(*converted.value) == key.default_yaml());
        if (!inert) CHECK(contains(converted.rejection->message, "not supported yet"));
        continue;
      }
      REQUIRE(converted.value);
      ++accepted;
      // Rejected by a later check with another message, or stored.
      const OneKey file = file_of(key.path, value);
      const ConfigResult result = load_text(file.text, completed(key));
      for (const Diagnostic& d : result.diagnostics) {
        CHECK(!d.message.empty());
        if (d.key == key.path) CHECK(!contains(d.message, "out of range"));
      }
      if (key.get && result.sound(key.path)) CHECK(key.get(result.config) == *converted.value);
    }
  CHECK(accepted > 250);
}

TEST_CASE("every key rejects values outside of its range, with its name and position", "[config][ranges]") {
  int refused = 0;
  for (const Key& key : Schema::get().keys()) {
    for (const std::string& value : ends_of(key).outside) {
      CAPTURE(key.path, value);
      const OneKey file = file_of(key.path, value);
      const ConfigResult result = load_text(file.text, completed(key));
      CHECK(static_cast<int>(result.exit_code()) == 78);
      const auto found = std::find_if(result.diagnostics.begin(), result.diagnostics.end(),
                                      [&](const Diagnostic& d) { return d.key == key.path; });
      if (key.is_list && value == "{a: 1}") continue;  // an unknown key within it
      REQUIRE(found != result.diagnostics.end());
      CHECK(contains(found->message, key.path));
      CHECK(found->file == "t.yaml");
      CHECK(found->line == file.line);
      CHECK(found->column >= file.column);  // of the element in a list
      CHECK(found->column <= file.column + 1);
      ++refused;
    }
  }
  CHECK(refused > 900);
}

TEST_CASE("upper limits that the reference page does not print", "[config][ranges]") {
  // 10^12 steps, 2^31 - 1 for other counts.
  const auto code = [](const std::string& assignment) {
    return static_cast<int>(load_base({assignment, "policy.max_total_sequence_length=1"}).exit_code());
  };
  CHECK(code("pretrain.max_num_steps=1000000000000") == 0);
  CHECK(code("pretrain.max_num_steps=1000000000001") == 78);
  CHECK(code("checkpointing.save_period=1000000000000") == 0);
  CHECK(code("checkpointing.save_period=1000000000001") == 78);
  CHECK(code("logger.log_interval=2147483647") == 0);
  CHECK(code("logger.log_interval=2147483648") == 78);
  CHECK(code("pretrain.seed=2147483647") == 0);
  CHECK(code("pretrain.seed=2147483648") == 78);
}
