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

/// nullptr for a spelling that the format does not know.
const SafetensorsDType* find_safetensors_dtype(std::string_view name);

/// Place in the format's order of element types; the data is written from the highest to the lowest, so that
/// every tensor is aligned.
int safetensors_rank(DType dtype);

/// The header of a safetensors file as it is read.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< in the header's order; names may still occur twice
  std::map<std::string, std::string> metadata;
};
/// Reads the JSON of a header without a tree of values. Error(Exit::data) "path: ..." for anything but the
/// format's structure.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& path);

/// What a file that begins with `head` is instead of safetensors, and what to do: "a zip archive, ...". Empty
/// when it is nothing known.
std::string foreign_format(std::string_view head);

/// `tensor "name"` for messages.
std::string quoted_tensor(std::string_view name);

}  // namespace nrl::detail
