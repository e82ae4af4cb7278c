#include "core/config/source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

constexpr size_t max_excerpt_line = 160, max_label = 400;

bool is_continuation(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

int characters(std::string_view text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](char c) { return !is_continuation(c); }));
}

}  // namespace

Source::Source(std::string name_, std::string text_, bool is_override_)
    : name(std::move(name_)), text(std::move(text_)), is_override(is_override_), line_starts{0} {
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] == '\n') line_starts.push_back(i + 1);
}

std::string_view Source::line(int number) const {
  if (number < 1 || static_cast<size_t>(number) > line_starts.size()) return {};
  const size_t index = static_cast<size_t>(number);
  const size_t begin = line_starts[index - 1];
  const size_t end = index < line_starts.size() ? line_starts[index] - 1 : text.size();
  std::string_view rest = std::string_view(text).substr(begin, end - begin);
  if (!rest.empty() && rest.back() == '\r') rest.remove_suffix(1);
  return rest;
}

int Source::character_column(Pos pos) const {
  return characters(line(pos.line).substr(0, static_cast<size_t>(pos.column - 1))) + 1;
}

std::string Source::place(Pos pos) const {
  return is_override ? name : fmt::format("{}:{}:{}", name, pos.line, character_column(pos));
}

Diagnostic make_diagnostic(const Source& source, Pos pos, int parent_line, std::string key,
                           std::string message, std::string label, std::vector<std::string> notes,
                           Severity severity) {
  Diagnostic d;
  d.severity = severity;
  d.file = source.name;
  d.key = std::move(key);
  d.message = std::move(message);
  d.notes = std::move(notes);
  std::string_view line = source.line(pos.line);
  const size_t offset = std::min(static_cast<size_t>(std::max(pos.column, 1) - 1), line.size());
  pos.column = static_cast<int>(offset) + 1;
  d.line = source.is_override ? 0 : pos.line;
  d.column = source.is_override ? 0 : source.character_column(pos);

  // Long lines are cut around the position.
  size_t begin =
      offset > max_excerpt_line / 2 && line.size() > max_excerpt_line ? offset - max_excerpt_line / 2 : 0;
  while (begin > 0 && begin < line.size() && is_continuation(line[begin])) --begin;
  size_t end = std::min(line.size(), begin + max_excerpt_line);
  while (end < line.size() && is_continuation(line[end])) ++end;
  const std::string head = begin > 0 ? "..." : "";
  const std::string shown = head + masked(line.substr(begin, end - begin)) + (end < line.size() ? "..." : "");
  std::string pad(head.size(), ' ');
  for (char c : line.substr(begin, offset - begin))
    if (c == '\t')
      pad += '\t';
    else if (!is_continuation(c))
      pad += ' ';
  const size_t marked = std::min(offset + static_cast<size_t>(std::max(pos.length, 1)), end);
  const int carets = std::max(1, marked > offset ? characters(line.substr(offset, marked - offset)) : 1);

  const std::string number = source.is_override ? "" : std::to_string(pos.line);
  const size_t width = std::max<size_t>(number.size(), 2);
  const std::string gutter(width, ' ');
  auto numbered = [&](const std::string& n, std::string_view text) {
    d.excerpt += fmt::format("{:>{}} |{}{}\n", n, width, text.empty() ? "" : " ", text);
  };
  numbered("", "");
  if (parent_line > 0 && parent_line < pos.line && !source.is_override) {
    numbered(std::to_string(parent_line), masked(source.line(parent_line).substr(0, max_excerpt_line)));
    if (parent_line + 1 < pos.line) numbered("", "...");
  }
  numbered(number, shown);
  numbered("", pad + std::string(static_cast<size_t>(carets), '^') +
                   (label.empty() ? "" : " " + clipped(label, max_label)));
  return d;
}

std::optional<BadByte> find_bad_byte(std::string_view text) {
  Pos pos;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    const unsigned c = static_cast<unsigned char>(rest[0]);
    const size_t n = utf8_length(rest);
    if (n == 0) return BadByte{pos, fmt::format("the byte 0x{:02x}, which is not valid UTF-8", c)};
    if (c == 0) return BadByte{pos, "a NUL byte"};
    if ((c < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7f)
      return BadByte{pos, fmt::format("the control character 0x{:02x}", c)};
    // C1 controls, and the line separators that YAML 1.1 takes for line ends.
    if (n == 2 && c == 0xC2 && static_cast<unsigned char>(rest[1]) < 0xA0)
      return BadByte{pos, "a control character"};
    if (rest.starts_with("\xe2\x80\xa8") || rest.starts_with("\xe2\x80\xa9"))
      return BadByte{pos, "a Unicode line separator"};
    i += n;
    if (c == '\n')
      ++pos.line, pos.column = 1;
    else
      pos.column += static_cast<int>(n);
  }
  return std::nullopt;
}

std::string read_config_file(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(Exit::no_input, "cannot read {}: {}", path, std::strerror(errno));
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};
  struct stat info {};
  if (::fstat(fd, &info) != 0) fail(Exit::no_input, "cannot read {}: {}", path, std::strerror(errno));
  if (!S_ISREG(info.st_mode))
    fail(Exit::no_input, "cannot read {}: it is {}", path,
         S_ISDIR(info.st_mode) ? "a directory, not a YAML file" : "not a regular file");
  if (static_cast<size_t>(info.st_size) > max_bytes)
    fail(Exit::config, "{} has {} bytes; a configuration has at most 1 MiB", path, info.st_size);
  std::string text;
  char buffer[16384];
  while (text.size() <= max_bytes) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(Exit::no_input, "cannot read {}: {}", path, std::strerror(errno));
    if (n == 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  return text;
}

}  // namespace nrl::config_detail
