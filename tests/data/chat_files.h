#pragma once
// Reads the test vectors of chat templates (tests/data/chat).

#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "apps/data/chat/chat_template.h"
#include "core/io/json.h"

namespace nrl::data {

inline std::filesystem::path chat_directory() {
  return std::filesystem::path(NRL_TEST_DATA) / "chat";
}

/// "2025-07-26T14:05:09" as broken-down time.
inline std::tm time_of(const std::string& text) {
  std::tm time{};
  strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &time);
  return time;
}

/// The text of an error without "NAME:line:column: ".
inline std::string_view without_place(std::string_view text, std::string_view name) {
  if (!text.starts_with(std::string(name) + ':')) return text;
  text.remove_prefix(text.find(':', text.find(':', name.size() + 1) + 1) + 1);
  return text.substr(text.find_first_not_of(' '));
}

/// The template tests/data/chat/templates/NAME.jinja.
inline std::string template_text(std::string_view name) {
  std::ifstream file(chat_directory() / "templates" / (std::string(name) + ".jinja"), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline ChatTemplate template_file(std::string_view name) {
  return ChatTemplate::parse(template_text(name), std::string(name));
}

}  // namespace nrl::data
