#include "apps/data/chat/template_choice.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <utility>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::data {
namespace {

constexpr uint64_t max_template_bytes = 1 << 20;
constexpr std::array<std::string_view, 3> builtin_templates = {"chatml", "llama3", "zephyr"};

// YYYY-MM-DD at noon, so that no time zone moves the day.
std::tm parse_date(const std::string& date) {
  std::tm parsed{};
  int read = 0;
  if (date.size() != 10 ||
      std::sscanf(date.c_str(), "%4d-%2d-%2d%n", &parsed.tm_year, &parsed.tm_mon, &parsed.tm_mday, &read) !=
          3 ||
      read != 10)
    fail(Exit::config, "template_date '{}': expected YYYY-MM-DD", clipped(date));
  parsed.tm_year -= 1900;
  parsed.tm_mon -= 1;
  parsed.tm_hour = 12;
  parsed.tm_isdst = -1;
  std::tm normal = parsed;
  if (std::mktime(&normal) == -1 || normal.tm_mday != parsed.tm_mday || normal.tm_mon != parsed.tm_mon)
    fail(Exit::config, "template_date '{}': no such day", clipped(date));
  return normal;
}

}  // namespace

std::string no_template_fix(std::string_view key) {
  return fmt::format("Fix: set {} to {}, a file, or the text of a template", key,
                     alternatives(builtin_templates));
}

std::optional<ChosenTemplate> choose_chat_template(const std::string& choice, const Tokenizer& tokenizer,
                                                   std::string_view key) {
  const auto parsed = [](std::string source, std::string name) {
    ChatTemplate chat = ChatTemplate::parse(source, std::move(name));
    return ChosenTemplate{.chat = std::move(chat), .source = std::move(source)};
  };
  if (choice == "none") return std::nullopt;
  if (const auto own = tokenizer.chat_template(choice)) return parsed(*own, "the tokenizer's");
  if (choice == "default") return std::nullopt;
  if (const char* text = builtin_chat_template(choice)) return parsed(text, choice);
  if (choice.find("{%") != std::string::npos || choice.find("{{") != std::string::npos)
    return parsed(choice, "chat_template");
  if (path_exists(choice)) return parsed(read_file(choice, max_template_bytes), choice);
  fail(Exit::config,
       "chat_template '{}': neither a template of the tokenizer, a built-in one, a file, nor the text of a "
       "template. {}",
       clipped(choice), no_template_fix(key));
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  return fmt::format("{:04}-{:02}-{:02}", local.tm_year + 1900, local.tm_mon + 1, local.tm_mday);
}

RenderOptions render_options(const Tokenizer& tokenizer, const std::string& date) {
  RenderOptions options;
  options.special_tokens = JsonValue::object();
  for (const auto& [name, text] : tokenizer.special_tokens()) options.special_tokens.set(name, text);
  options.now = parse_date(date);
  return options;
}

}  // namespace nrl::data
