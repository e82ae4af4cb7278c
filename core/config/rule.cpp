#include "core/config/rule.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/config/load.h"
#include "core/config/schema.h"

namespace nrl {
namespace config_detail {
namespace {

Diagnostic diagnostic_of(const ConfigResult& result, const std::string& key,
                         std::span<const std::string> others, Broken broken) {
  if (broken.idle)
    return without_effect(result, key, std::move(broken.reason), others, std::move(broken.remedy));
  Diagnostic d;
  if (broken.place.empty()) {
    d = diagnose(result, key, std::move(broken.reason), std::move(broken.label), std::move(broken.remedy),
                 broken.severity);
    d.exit = broken.exit;
  } else {
    d.file = std::move(broken.place);
    d.message = std::move(broken.reason);
    d.notes = std::move(broken.remedy);
  }
  return d;
}

}  // namespace

bool judgeable(const ConfigResult& result, const std::vector<std::string>& keys) {
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return result.sound(full_name(result.config, key)); });
}

void report(Diagnostics& out, const ConfigResult& result, const std::vector<std::string>& keys,
            Verdict verdict) {
  for (Broken& broken : verdict) {
    const std::string key = !broken.key.empty() ? broken.key
                            : keys.empty()      ? ""
                                                : full_name(result.config, keys[0]);
    const bool stands = !broken.place.empty() || (result.sound(key) && (!broken.idle || result.given(key)));
    if (stands)
      out.push_back(diagnostic_of(result, key, std::span(keys).subspan(std::min<size_t>(1, keys.size())),
                                  std::move(broken)));
  }
}

}  // namespace config_detail

std::string filled_in(const ConfigResult& result, std::string_view text) {
  std::string out;
  for (size_t open = text.find('<'); open != std::string_view::npos; open = text.find('<')) {
    const size_t close = text.find('>', open);
    NRL_CHECK(close != std::string_view::npos, "a token without an end: {}", text);
    out += text.substr(0, open++);
    const char form = text[open];
    if (std::string_view("@:=").find(form) != std::string_view::npos) ++open;
    const std::string key(text.substr(open, close - open)), value = value_text(result.config, key);
    if (form == '@')
      out += result.where(key);
    else if (form == ':')
      out += fmt::format("{}: {}", key, value);
    else if (form == '=')
      out += fmt::format("{} is {} ({})", key, value, result.where(key));
    else
      out += value;
    text.remove_prefix(close + 1);
  }
  return out.append(text);
}

}  // namespace nrl
