#include "core/config/pipeline_layout.h"

#include <algorithm>
#include <cctype>

#include <spdlog/fmt/fmt.h>

namespace nrl::config_detail {
namespace {

constexpr size_t longest = 1 << 16;  // parts after repetition

/// Expands repetitions.
class Expansion {
 public:
  explicit Expansion(std::string_view text) : text_(text) {}

  std::string run(std::string& out) {
    out = sequence(0);
    if (problem_.empty() && at_ < text_.size()) problem_ = "a ')' without '('";
    return problem_;
  }

 private:
  bool more() const { return problem_.empty() && at_ < text_.size(); }

  std::string sequence(int depth) {
    std::string out;
    while (more() && text_[at_] != ')') {
      const char c = text_[at_++];
      if (c == ',' || c == ' ') continue;
      std::string item(1, c);
      if (c == '(') {
        if (depth == 8) problem_ = "parentheses nested too deeply";
        if (problem_.empty()) item = sequence(depth + 1);
        if (problem_.empty() && at_ == text_.size()) problem_ = "a '(' without ')'";
        ++at_;
      } else if (c == 'm') {
        problem_ = "'m' is a multi-token prediction layer, which is not supported";
      } else if (c != 'E' && c != 't' && c != 'L' && c != '|') {
        problem_ = fmt::format("'{}' is none of E, t, L, |, ( and )", c);
      }
      append(out, item, count());
    }
    return out;
  }

  /// The number after a '*', else 1.
  size_t count() {
    if (!more() || text_[at_] != '*') return 1;
    size_t number = 0;
    const size_t begin = ++at_;
    for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) && number < longest;
         ++at_)
      number = 10 * number + static_cast<size_t>(text_[at_] - '0');
    if (at_ == begin) problem_ = "a '*' without a number";
    return number;
  }

  void append(std::string& out, const std::string& item, size_t times) {
    if (problem_.empty() && !item.empty() && times > (longest - out.size()) / item.size())
      problem_ = "too many parts";
    for (size_t i = 0; i < times && problem_.empty(); ++i) out += item;
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string problem_;
};

}  // namespace

std::string parse_pipeline_layout(std::string_view text, std::vector<int64_t>& layers) {
  std::string parts;
  if (std::string problem = Expansion(text).run(parts); !problem.empty()) return problem;
  if (!parts.starts_with('E')) return "the first chunk must begin with E, the embedding";
  if (!parts.ends_with('L')) return "the last chunk must end with L, the loss";
  if (std::count(parts.begin(), parts.end(), 'E') > 1)
    return "only the first chunk can have E, the embedding";
  if (std::count(parts.begin(), parts.end(), 'L') > 1) return "only the last chunk can have L, the loss";
  layers.assign(1, 0);
  for (const char c : parts) {
    if (c == '|') layers.push_back(0);
    if (c == 't') ++layers.back();
  }
  return "";
}

}  // namespace nrl::config_detail
