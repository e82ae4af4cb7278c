#pragma once
// Source texts, positions in them, and excerpts. Internal to core/config.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/diagnostic.h"

namespace nrl::config_detail {

/// Limits on hostile input.
inline constexpr size_t max_bytes = 1 << 20;
inline constexpr int max_depth = 64;
inline constexpr int max_files = 64;

/// A position in a source; line and column are 1-based, the column counts bytes.
/// `length` bytes are underlined.
struct Pos {
  int line = 1, column = 1, length = 1;
};

struct Source {
  Source(std::string name, std::string text, bool is_override = false);

  std::string name;  ///< file name as the user spelled it, or "command line: a.b=v"
  std::string text;
  bool is_override;
  std::vector<size_t> line_starts;

  std::string_view line(int number) const;
  /// "name:line:column", with the column in characters.
  std::string place(Pos pos) const;
  int character_column(Pos pos) const;
};

struct Sources {
  std::vector<Source> all;
};

/// A diagnostic with the excerpt of `source` around `pos`; `parent_line` (0: none) is shown above it.
Diagnostic make_diagnostic(const Source& source, Pos pos, int parent_line, std::string key,
                           std::string message, std::string label = "", std::vector<std::string> notes = {},
                           Severity severity = Severity::error);

/// The first byte that is not valid UTF-8, or is a control character that YAML forbids.
struct BadByte {
  Pos pos;
  std::string what;
};
std::optional<BadByte> find_bad_byte(std::string_view text);

/// Reads a regular file of at most max_bytes; otherwise an Error with the matching exit code.
std::string read_config_file(const std::string& path);

}  // namespace nrl::config_detail
