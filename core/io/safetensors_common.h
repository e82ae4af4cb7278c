#pragma once
// Element types of the safetensors format, shared by its reader and writer.

#include <optional>
#include <string_view>

#include "core/base/dtype.h"

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

}  // namespace nrl::detail
