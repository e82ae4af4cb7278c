#include "apps/reward/verifier.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "apps/data/regex.h"
#include "apps/reward/json_schema.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::reward {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r\n";
  const size_t first = text.find_first_not_of(space);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(space) - first + 1);
}

std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

/// Finds the next match; a pattern that takes too many steps on this text finds none.
bool finds(const data::Regex& regex, const std::string& text, size_t from, size_t& begin, size_t& end) {
  try {
    return regex.find(text, from, begin, end);
  } catch (const Error&) {
    return false;
  }
}

/// The part of a completion that is judged.
class Extract {
 public:
  explicit Extract(const Spec& spec) {
    const std::string text = spec.options.get_string("extract", "");
    const size_t space = text.find(' ');
    kind_ = text.substr(0, space);
    argument_ = space == std::string::npos ? "" : text.substr(space + 1);
    constexpr std::string_view kinds[] = {"last_line",  "boxed",    "last_number",
                                          "after TEXT", "tag NAME", "regex PATTERN"};
    const bool plain = kind_.empty() || kind_ == "last_line" || kind_ == "boxed" || kind_ == "last_number";
    const bool with_argument = kind_ == "after" || kind_ == "tag" || kind_ == "regex";
    if (!(plain && argument_.empty()) && !(with_argument && !argument_.empty()))
      fail(Exit::config, "{}.extract: '{}'. Fix: {}", spec.where, clipped(text), alternatives(kinds));
    if (kind_ == "regex") {
      try {
        regex_.emplace(argument_, false, spec.where + ".extract: ");
      } catch (const Error& e) {
        fail(Exit::config, "{}", e.what());
      }
    }
  }
  /// Absent: the completion has no such part.
  std::optional<std::string> part(const std::string& text) const {
    if (kind_.empty()) return std::string(trimmed(text));
    if (kind_ == "boxed") return last_boxed(text);
    if (kind_ == "last_number") return last_number(text);
    if (kind_ == "last_line") {
      const std::string_view all = trimmed(text);
      return std::string(trimmed(all.substr(all.rfind('\n') + 1)));
    }
    if (kind_ == "after") {
      const size_t at = text.rfind(argument_);
      if (at == std::string::npos) return std::nullopt;
      const std::string_view rest = trimmed(std::string_view(text).substr(at + argument_.size()));
      return std::string(trimmed(rest.substr(0, rest.find('\n'))));
    }
    if (kind_ == "tag") {
      const std::string open = "<" + argument_ + ">", close = "</" + argument_ + ">";
      const size_t end = text.rfind(close), begin = end == std::string::npos ? end : text.rfind(open, end);
      if (begin == std::string::npos) return std::nullopt;
      return std::string(
          trimmed(std::string_view(text).substr(begin + open.size(), end - begin - open.size())));
    }
    std::optional<std::string> last;
    for (size_t from = 0, begin = 0, end = 0; finds(*regex_, text, from, begin, end); from = end)
      last = text.substr(begin, end - begin);
    return last;
  }

 private:
  std::string kind_, argument_;
  std::optional<data::Regex> regex_;
};

/// Verifiers that compare a part of the completion with the record's answer.
class WithAnswer : public Verifier {
 public:
  explicit WithAnswer(const Spec& spec)
      : extract_(spec), key_(spec.options.get_string("answer_key", "answer")), where_(spec.where) {}
  void check(const JsonValue& record, const std::string& where) const override {
    const JsonValue* answer = record.find(key_);
    if (!answer || !(answer->is_string() || answer->is_number()))
      fail(Exit::data,
           "{}: the record has no text or number under \"{}\", which {} compares with. Fix: add it, or set "
           "answer_key",
           where, key_, where_);
  }
  std::optional<double> judge(const Item& item) const override {
    const std::optional<std::string> part = extract_.part(item.completion);
    if (!part) return 0;
    const JsonValue& answer = item.record->at(key_);
    return compare(*part, std::string(trimmed(answer.is_string() ? answer.as_string() : answer.dump())));
  }

 private:
  virtual double compare(const std::string& part, const std::string& answer) const = 0;

  Extract extract_;
  std::string key_, where_;
};

class Exact final : public WithAnswer {
 public:
  Exact(const Spec& spec, bool contains)
      : WithAnswer(spec), contains_(contains), ignore_case_(spec.options.get_bool("ignore_case", false)) {}

 private:
  double compare(const std::string& part, const std::string& answer) const override {
    const std::string a = ignore_case_ ? lower(part) : part, b = ignore_case_ ? lower(answer) : answer;
    return (contains_ ? a.find(b) != std::string::npos : a == b) ? 1 : 0;
  }
  bool contains_, ignore_case_;
};

class Number final : public WithAnswer {
 public:
  explicit Number(const Spec& spec)
      : WithAnswer(spec), tolerance_(spec.options.get_double("tolerance", 1e-6)) {}

 private:
  double compare(const std::string& part, const std::string& answer) const override {
    const auto a = last_number(part), b = last_number(answer);
    if (!a || !b) return 0;
    const double x = std::strtod(a->c_str(), nullptr), y = std::strtod(b->c_str(), nullptr);
    return std::abs(x - y) <= tolerance_ * std::max(1.0, std::abs(y)) ? 1 : 0;
  }
  double tolerance_;
};

class Math final : public WithAnswer {
 public:
  explicit Math(const Spec& spec) : WithAnswer(spec), given_(spec.options.contains("extract")) {}

 private:
  double compare(const std::string& part, const std::string& answer) const override {
    std::optional<std::string> stated = given_ ? std::optional(part) : last_boxed(part);
    if (!stated) stated = last_number(part);
    const std::string right = last_boxed(answer).value_or(answer);
    return stated && same_answer(*stated, right) ? 1 : 0;
  }
  bool given_;
};

/// The share of elements, words or else characters, that both have.
class Multiset final : public WithAnswer {
 public:
  explicit Multiset(const Spec& spec) : WithAnswer(spec) {}

 private:
  static std::map<std::string, int64_t> elements(const std::string& text, bool words) {
    std::map<std::string, int64_t> out;
    if (!words) {
      for (const char c : text) ++out[std::string(1, c)];
      return out;
    }
    for (size_t at = 0; (at = text.find_first_not_of(" ,;\n", at)) != std::string::npos;) {
      const size_t end = std::min(text.find_first_of(" ,;\n", at), text.size());
      ++out[text.substr(at, end - at)];
      at = end;
    }
    return out;
  }
  double compare(const std::string& part, const std::string& answer) const override {
    const bool words = answer.find_first_of(" ,;\n") != std::string::npos;
    const auto a = elements(part, words), b = elements(answer, words);
    int64_t common = 0, of_a = 0, of_b = 0;
    for (const auto& [element, count] : a) {
      of_a += count;
      const auto other = b.find(element);
      common += other == b.end() ? 0 : std::min(count, other->second);
    }
    for (const auto& [element, count] : b) of_b += count;
    return static_cast<double>(common) / static_cast<double>(std::max({of_a, of_b, int64_t{1}}));
  }
};

class Matches final : public Verifier {
 public:
  explicit Matches(const Spec& spec)
      : extract_(spec), regex_(make(spec.options.get_string("pattern"), spec.where)) {}
  std::optional<double> judge(const Item& item) const override {
    const auto part = extract_.part(item.completion);
    size_t begin = 0, end = 0;
    return part && finds(regex_, *part, 0, begin, end) ? 1 : 0;
  }

 private:
  static data::Regex make(const std::string& pattern, const std::string& where) {
    try {
      return data::Regex(pattern, false, where + ".pattern: ");
    } catch (const Error& e) {
      fail(Exit::config, "{}", e.what());
    }
  }
  Extract extract_;
  data::Regex regex_;
};

/// 1 if the completion consists of the tags, each once, in this order.
class Format final : public Verifier {
 public:
  explicit Format(const Spec& spec) {
    for (const JsonValue& tag : spec.options.at("tags").items()) tags_.push_back(tag.as_string());
  }
  std::optional<double> judge(const Item& item) const override {
    std::string_view rest = trimmed(item.completion);
    for (const std::string& tag : tags_) {
      const std::string open = "<" + tag + ">", close = "</" + tag + ">";
      if (!rest.starts_with(open)) return 0;
      rest.remove_prefix(open.size());
      const size_t end = rest.find(close);
      if (end == std::string_view::npos || rest.substr(0, end).find(open) != std::string_view::npos) return 0;
      rest = trimmed(rest.substr(end + close.size()));
    }
    return rest.empty() ? 1 : 0;
  }

 private:
  std::vector<std::string> tags_;
};

/// The soft penalty of DAPO (Yu et al., 2025): 0 up to max - buffer tokens, falling to -1 at max and beyond.
class Length final : public Verifier {
 public:
  explicit Length(const Spec& spec)
      : max_(static_cast<double>(spec.options.get_int("max_tokens"))),
        buffer_(static_cast<double>(spec.options.get_int("buffer_tokens"))) {
    if (buffer_ > max_)
      fail(Exit::config, "{}.buffer_tokens: {} is more than max_tokens: {}", spec.where, buffer_, max_);
  }
  std::optional<double> judge(const Item& item) const override {
    const double over = static_cast<double>(item.tokens) - (max_ - buffer_);
    return -std::clamp(over / buffer_, 0.0, 1.0);
  }

 private:
  double max_, buffer_;
};

class Json final : public Verifier {
 public:
  explicit Json(const Spec& spec) : extract_(spec) {
    if (const JsonValue* schema = spec.options.find("schema")) {
      check_schema(*schema, spec.where + ".schema");
      schema_ = *schema;
    }
  }
  std::optional<double> judge(const Item& item) const override {
    const auto part = extract_.part(item.completion);
    if (!part) return 0;
    try {
      return fits_schema(parse_json(*part, "completion"), schema_) ? 1 : 0;
    } catch (const Error&) {
      return 0;
    }
  }

 private:
  Extract extract_;
  JsonValue schema_ = JsonValue::object();
};

}  // namespace

std::unique_ptr<Verifier> make_verifier(const Spec& spec) {
  if (spec.type == "exact") return std::make_unique<Exact>(spec, false);
  if (spec.type == "contains") return std::make_unique<Exact>(spec, true);
  if (spec.type == "number") return std::make_unique<Number>(spec);
  if (spec.type == "math") return std::make_unique<Math>(spec);
  if (spec.type == "multiset") return std::make_unique<Multiset>(spec);
  if (spec.type == "regex") return std::make_unique<Matches>(spec);
  if (spec.type == "format") return std::make_unique<Format>(spec);
  if (spec.type == "length") return std::make_unique<Length>(spec);
  if (spec.type == "json") return std::make_unique<Json>(spec);
  return nullptr;
}

}  // namespace nrl::reward
