#pragma once
// Untrusted YAML text to a tree with places. Internal to core/config.

#include "core/config/source.h"

#include <string>
#include <vector>

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

/// Parses the text of `source` (at most kMaxBytes) as one block mapping. Anchors, aliases, tags, merge keys,
/// duplicate keys, keys that are not scalars, second documents and anything left unread are errors, appended
/// to `problems`. Returns the tree as far as it could be read; it is complete only if no problem was added.
Node parse_yaml(const Source& source, Diagnostics& problems);

/// Parses one override "a.b=value": a mapping with the single key "a.b".
Node parse_override(const Source& source, Diagnostics& problems);

}  // namespace nrl::config_detail
