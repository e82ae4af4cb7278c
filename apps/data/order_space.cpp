#include "apps/data/order_space.h"

#include <cstring>

#include "core/base/error.h"

namespace nrl::data {

void OrderSpace::read_bytes(int64_t at, std::span<std::byte> out) const {
  if (file_) return file_->pread_all(out.data(), out.size(), begin_ + static_cast<uint64_t>(at));
  if (!out.empty())
    std::memcpy(out.data(), memory_.subspan(static_cast<size_t>(at), out.size()).data(), out.size());
}

void OrderSpace::write_bytes(int64_t at, std::span<const std::byte> values) const {
  if (file_) return file_->pwrite_all(values.data(), values.size(), begin_ + static_cast<uint64_t>(at));
  if (!values.empty())
    std::memcpy(memory_.subspan(static_cast<size_t>(at), values.size()).data(), values.data(), values.size());
}

}  // namespace nrl::data
