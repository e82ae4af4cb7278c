#pragma once
// Element types of the safetensors format, shared by its reader and writer.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"

namespace nrl {
struct TensorInfo;
}

namespace nrl::detail {

struct SafetensorsDType {
  std::string_view name;
  int bits;
  std::optional<DType> ours;
};

/// nullptr for an unknown name.
const SafetensorsDType* find_safetensors_dtype(std::string_view name);

/// Position in the format's order of element types; data is written from the highest to the lowest, so that
/// every tensor is aligned.
int safetensors_rank(DType dtype);

/// The parsed header of a safetensors file.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< in the header's order; names may be duplicated
  std::map<std::string, std::string> metadata;
};
/// Parses the JSON header without building a tree of values. Exit::data "path: ..." unless it
/// has the format's structure.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& path);

/// Identifies a file of another format by its first bytes, with a fix: "a zip archive, ...". Empty
/// when unknown.
std::string foreign_format(std::string_view head);

/// `tensor "name"` for messages.
std::string quoted_tensor(std::string_view name);

}  // namespace nrl::detail
