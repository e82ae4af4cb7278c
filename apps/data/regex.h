#pragma once
// Regular expressions over valid UTF-8 with Unicode properties (PCRE2, JIT-compiled if possible).

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace nrl::data {

/// A compiled pattern. Searching is thread-safe.
class Regex {
 public:
  /// `pattern`: an Oniguruma pattern, or with `literal` plain text. Throws Error (`data`), beginning with
  /// `where`, if it is invalid or not supported.
  Regex(const std::string& pattern, bool literal, const std::string& where);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  /// Whether find() must be given replace_new_characters(text) to support all characters of Unicode 16.0.
  bool has_classes() const;

  /// Finds the next non-empty match from byte `from` on and sets [begin, end). Throws Error (`data`) if
  /// PCRE2's match limits are exceeded.
  bool find(std::string_view text, size_t from, size_t& begin, size_t& end) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace nrl::data
