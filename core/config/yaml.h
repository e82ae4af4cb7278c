#pragma once
// Parses untrusted YAML text to a tree with positions. Internal to core/config.

#include <string>
#include <vector>

#include "core/config/source.h"

namespace nrl::config_detail {

struct Node;

struct Entry;

struct Node {
  enum class Kind { null, scalar, list, map };
  Kind kind = Kind::null;
  std::string text;     ///< of a scalar
  bool quoted = false;  ///< a quoted or block scalar: never a number, a boolean or null
  Pos pos;
  std::vector<Node> items;
  std::vector<Entry> entries;
};

struct Entry {
  std::string key;
  Pos key_pos;
  Node value;
};

/// Parses the text of `source` (at most max_bytes) as one block mapping. Anchors, aliases, tags, merge keys,
/// duplicate keys, non-scalar keys, further documents and unread text are errors, appended to `problems`.
/// Returns the part of the tree that could be read; complete only if no problem was added.
Node parse_yaml(const Source& source, Diagnostics& problems);

/// Parses one override "a.b=value": a mapping with the single key "a.b".
Node parse_override(const Source& source, Diagnostics& problems);

}  // namespace nrl::config_detail
