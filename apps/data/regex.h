#pragma once
// Regular expressions over valid UTF-8 with Unicode properties (PCRE2, compiled to machine code where it can
// be).

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace nrl::data {

/// A compiled pattern. Searching is safe from any number of threads.
class Regex {
 public:
  /// A pattern of Oniguruma, or the text itself. Throws Error (`data`) beginning with `where` if it cannot be
  /// used.
  Regex(const std::string& pattern, bool literal, const std::string& where);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  /// True when find() needs the text of replace_new_characters() to know all characters of Unicode 16.0.
  bool has_classes() const;

  /// The next match that is not empty, from byte `from` on: sets [begin, end). Throws Error (`data`) if the
  /// pattern needs more work than is allowed.
  bool find(std::string_view text, size_t from, size_t& begin, size_t& end) const;

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

}  // namespace nrl::data
