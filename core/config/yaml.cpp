#include "core/config/yaml.h"

#include <algorithm>
#include <cctype>
#include <sstream>
#include <unordered_map>

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

namespace nrl::config_detail {
namespace {

/// Thrown by the event handler to stop parsing.
struct Stop {};

/// Offset of marks in the parsed text from positions in the source.
struct Shift {
  int columns = 0;
};

/// Length of the text at `pos` as written: a quoted scalar with its quotes, a plain one as long as its value.
int written_length(const Source& source, Pos pos, const std::string& value, bool quoted) {
  const std::string_view line = source.line(pos.line);
  const size_t begin = static_cast<size_t>(pos.column - 1);
  if (begin >= line.size()) return 1;
  if (!quoted) return static_cast<int>(std::max<size_t>(1, std::min(value.size(), line.size() - begin)));
  const char quote = line[begin];
  if (quote != '"' && quote != '\'') return 1;
  for (size_t i = begin + 1; i < line.size(); ++i) {
    if (quote == '"' && line[i] == '\\')
      ++i;
    else if (line[i] == quote)
      return static_cast<int>(i - begin + 1);
  }
  return 1;
}

/// Builds the tree. yaml-cpp's parser is recursive and reports every level before it descends: stopping at
/// level 65 bounds its stack too.
class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(const Source& source, Shift shift, const std::string& sentinel, Diagnostics& problems)
      : source_(source), shift_(shift), sentinel_(sentinel), problems_(problems) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    check(mark, "", anchor);
    Node node;
    node.pos = pos_of(mark);
    add(std::move(node));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    problem(pos_of(mark), "aliases are not supported",
            "write the value out, or use 'defaults:' to share settings");
    Node node;
    node.pos = pos_of(mark);
    add(std::move(node));
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check(mark, tag, anchor);
    Node node;
    node.kind = Node::Kind::scalar;
    node.text = value;
    node.quoted = tag == "!";
    node.pos = pos_of(mark);
    node.pos.length = written_length(source_, node.pos, value, node.quoted);
    if (node.quoted && value.find(sentinel_) != std::string::npos) unclosed_ = node.pos;
    if (find_bad_byte(value)) problem(node.pos, "control characters are not supported in values", "");
    add(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, Node::Kind::list);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, Node::Kind::map);
  }
  void OnMapEnd() override { close(); }

  bool complete() const { return sentinel_seen_; }
  Node take() { return std::move(root_); }
  /// The opening quote of a scalar that runs to the end of the text.
  std::optional<Pos> unclosed_quote() const { return unclosed_; }
  /// The innermost flow or block collection still open.
  std::optional<Pos> open_collection() const {
    if (stack_.empty()) return std::nullopt;
    return stack_.back().node.pos;
  }
  bool has_root() const { return has_root_; }

  Pos pos_of(const YAML::Mark& mark) const {
    Pos pos;
    pos.line = std::max(mark.line, 0) + 1;
    pos.column = std::max(mark.column - shift_.columns, 0) + 1;
    return pos;
  }

 private:
  struct Level {
    Node node;
    bool have_key = false;  ///< of a map: the key of the next value has been read
    Entry entry;
    std::unordered_map<std::string, Pos> seen;
  };

  void problem(Pos pos, std::string message, std::string note) {
    if (problems_.size() >= 100) throw Stop{};
    problems_.push_back(
        make_diagnostic(source_, pos, 0, "", std::move(message), "",
                        note.empty() ? std::vector<std::string>{} : std::vector{std::move(note)}));
  }

  void check(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != 0)
      problem(pos_of(mark), "anchors are not supported",
              "write the value out, or use 'defaults:' to share settings between files");
    if (!tag.empty() && tag != "?" && tag != "!")
      problem(pos_of(mark), "tags are not supported", "remove it; the type of every key is known");
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, Node::Kind kind) {
    check(mark, tag, anchor);
    if (stack_.size() >= static_cast<size_t>(max_depth)) {
      problem(pos_of(mark), fmt::format("nested deeper than {}", max_depth), "");
      throw Stop{};
    }
    Level level;
    level.node.kind = kind;
    level.node.pos = pos_of(mark);
    stack_.push_back(std::move(level));
  }

  void close() {
    Node node = std::move(stack_.back().node);
    stack_.pop_back();
    add(std::move(node));
  }

  void add(Node node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      has_root_ = true;
      return;
    }
    Level& level = stack_.back();
    if (level.node.kind == Node::Kind::list) {
      level.node.items.push_back(std::move(node));
      return;
    }
    if (!level.have_key) {
      level.have_key = true;
      level.entry = Entry{std::move(node.text), node.pos, {}};
      if (node.kind != Node::Kind::scalar) problem(node.pos, "a key must be plain text", "");
      return;
    }
    level.have_key = false;
    Entry entry = std::move(level.entry);
    if (stack_.size() == 1 && entry.key == sentinel_) {
      sentinel_seen_ = true;
      return;
    }
    if (entry.key == "<<") {
      problem(entry.key_pos, "merge keys are not supported", "use 'defaults:' to inherit from another file");
      return;
    }
    const auto [before, fresh] = level.seen.emplace(entry.key, entry.key_pos);
    if (!fresh) {
      problem(entry.key_pos, fmt::format("duplicate key '{}'", entry.key),
              fmt::format("first given at {}", source_.place(before->second)));
      return;
    }
    // yaml-cpp marks an absent value at the next token.
    if (node.kind == Node::Kind::null) place_null(node, entry.key_pos);
    entry.value = std::move(node);
    level.node.entries.push_back(std::move(entry));
  }

  /// Marks a written null at its position, an absent one at its key.
  void place_null(Node& node, Pos key) const {
    const std::string_view line = source_.line(node.pos.line);
    const size_t at = static_cast<size_t>(node.pos.column - 1);
    const std::string_view rest = at < line.size() ? line.substr(at) : std::string_view();
    if (node.pos.line == key.line && node.pos.column > key.column && rest.starts_with('~'))
      node.pos.length = 1;
    else if (node.pos.line == key.line && node.pos.column > key.column &&
             (rest.starts_with("null") || rest.starts_with("Null") || rest.starts_with("NULL")))
      node.pos.length = 4;
    else
      node.pos = key;
  }

  const Source& source_;
  const Shift shift_;
  const std::string sentinel_;
  Diagnostics& problems_;
  std::vector<Level> stack_;
  Node root_;
  bool has_root_ = false;
  bool sentinel_seen_ = false;
  std::optional<Pos> unclosed_;
};

bool starts_with_tab(std::string_view line) {
  const size_t first = line.find_first_not_of(' ');
  return first != std::string_view::npos && line[first] == '\t';
}

/// Columns by which the top mapping is indented: those of the first line with content.
size_t top_indent(std::string_view text) {
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    const size_t first = line.find_first_not_of(' ');
    if (first != std::string_view::npos && line[first] != '#' && line[first] != '\r' &&
        !line.starts_with("---") && !line.starts_with("%"))
      return first;
    begin = end + 1;
  }
  return 0;
}

/// Where a second document or a document end begins.
std::optional<Pos> second_document(std::string_view text) {
  Pos pos;
  bool content = false;
  for (size_t begin = 0; begin < text.size(); ++pos.line) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (content && (line.starts_with("---") || line.starts_with("..."))) {
      pos.length = 3;
      return pos;
    }
    const size_t first = line.find_first_not_of(" \t\r");
    content = content || (first != std::string_view::npos && line[first] != '#');
    begin = end + 1;
  }
  return std::nullopt;
}

/// The '=' of a line "name = value", as in a program: of this line or the one before it.
std::optional<Pos> assignment(const Source& source, int line_number) {
  for (int number = line_number; number >= std::max(line_number - 1, 1); --number) {
    const std::string_view line = source.line(number);
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    std::string_view name = line.substr(0, equals);
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    const bool word = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.';
    });
    if (word) return Pos{number, static_cast<int>(equals) + 1, 1};
  }
  return std::nullopt;
}

/// The last position with content.
Pos last_content(std::string_view text) {
  Pos pos, last;
  for (const char c : text) {
    if (c != ' ' && c != '\t' && c != '\r' && c != '\n') last = pos;
    if (c == '\n')
      ++pos.line, pos.column = 1;
    else
      ++pos.column;
  }
  return last;
}

bool check_text(const Source& source, Diagnostics& problems) {
  if (source.text.size() > max_bytes) {
    problems.push_back(make_diagnostic(
        source, {}, 0, "", fmt::format("{} bytes; a configuration has at most 1 MiB", source.text.size())));
    return false;
  }
  if (const auto bad = find_bad_byte(source.text)) {
    problems.push_back(make_diagnostic(source, bad->pos, 0, "", "the text contains " + bad->what, "",
                                       {"a configuration is plain UTF-8 text"}));
    return false;
  }
  return true;
}

Node parse(const Source& source, std::string text, Shift shift, Diagnostics& problems) {
  // yaml-cpp stops silently at an unclosed quote, a lone comma or a second document: a sentinel key at the
  // end of the top mapping proves that it read everything.
  std::string sentinel = "__end__";
  while (text.find(sentinel) != std::string::npos) sentinel += '_';
  const size_t indent = top_indent(text);
  text += fmt::format("\n{:{}}{}: 0\n", "", indent, sentinel);

  const size_t before = problems.size();
  TreeBuilder builder(source, shift, sentinel, problems);
  auto add = [&](Pos pos, std::string message, std::vector<std::string> notes = {}) {
    problems.push_back(make_diagnostic(source, pos, 0, "", std::move(message), "", std::move(notes)));
  };
  const Pos end = last_content(source.text);
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
  } catch (const Stop&) {
    return {};
  } catch (const YAML::Exception& e) {
    Pos pos = builder.pos_of(e.mark);
    if (builder.unclosed_quote()) {
      add(*builder.unclosed_quote(), "unclosed quote");
    } else if (const auto equals = assignment(source, std::min(pos.line, end.line))) {
      add(*equals, "not valid YAML: a value is given with ':', not with '='", {"write 'key: value'"});
    } else if (pos.line > end.line || e.mark.line < 0) {
      // The error is at the sentinel: something above is still open.
      const auto open = builder.open_collection();
      const std::string_view what =
          open ? source.line(open->line).substr(static_cast<size_t>(open->column - 1)) : "";
      if (what.starts_with('[') || what.starts_with('{'))
        add(*open, fmt::format("unclosed '{}'", what[0]));
      else
        add(end, "not valid YAML: the text ends unexpectedly", {"every line must be 'key: value'"});
    } else if (const std::string_view line = source.line(pos.line); starts_with_tab(line)) {
      pos.column = static_cast<int>(line.find('\t')) + 1;
      add(pos, "a tab in the indentation", {"YAML is indented with spaces"});
    } else if (e.msg.starts_with("the referenced anchor is not defined")) {
      add(pos, "aliases are not supported",
          {"write the value out, or quote it if it is a text that begins with '*'"});
    } else {
      add(pos, "not valid YAML: " + e.msg);
    }
    return builder.take();
  }
  if (problems.size() > before) return builder.take();
  if (builder.unclosed_quote()) {
    add(*builder.unclosed_quote(), "unclosed quote");
  } else if (!builder.complete()) {
    Node root = builder.take();
    if (const auto second = second_document(source.text))
      add(*second, "a configuration is a single document",
          {"remove this line and what belongs to another document"});
    else if (builder.has_root() && root.kind != Node::Kind::map)
      add(root.pos, "the top level must be a mapping: lines of 'key: value'");
    else if (builder.has_root() &&
             source.line(root.pos.line).substr(static_cast<size_t>(root.pos.column - 1)).starts_with('{'))
      add(root.pos, "the top level must be lines of 'key: value', not braces");
    else
      add(end, "the text could not be read to its end",
          {"is a line indented differently from its neighbors?"});
    return root;
  }
  return builder.take();
}

}  // namespace

Node parse_yaml(const Source& source, Diagnostics& problems) {
  if (!check_text(source, problems)) return {};
  return parse(source, source.text, {}, problems);
}

Node parse_override(const Source& source, Diagnostics& problems) {
  if (!check_text(source, problems)) return {};
  const std::string& text = source.text;
  const size_t equals = text.find('=');
  const size_t plus = text.starts_with("++") ? 2 : 0;  // NeMo RL's spelling for "add"
  if (equals == std::string::npos || equals <= plus || text.find('\n') != std::string::npos ||
      text[0] == '~') {
    problems.push_back(make_diagnostic(source, {1, 1, static_cast<int>(text.size())}, 0, "",
                                       "an override is written section.key=value", "",
                                       {"for example policy.optimizer.lr=3e-4, without spaces around '='"}));
    return {};
  }
  // "k: value", with marks moved to where the value stands in the override.
  Node root = parse(source, "k: " + text.substr(equals + 1), {3 - static_cast<int>(equals) - 1}, problems);
  if (root.entries.size() == 1) {
    Entry& entry = root.entries[0];
    entry.key = text.substr(plus, equals - plus);
    entry.key_pos = {1, static_cast<int>(plus) + 1, static_cast<int>(equals - plus)};
    if (entry.value.kind == Node::Kind::null) entry.value.pos = entry.key_pos;
  }
  return root;
}

}  // namespace nrl::config_detail
