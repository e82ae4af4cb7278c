#include "core/base/finite.h"

#include <cstring>

namespace nrl {
namespace {

// Elements whose exponent bits are all set.
template <class Word>
int64_t count_full_exponents(const void* data, size_t bytes, Word mask) {
  const auto* p = static_cast<const char*>(data);
  int64_t found = 0;
  for (size_t i = 0; i + sizeof(Word) <= bytes; i += sizeof(Word)) {
    Word w;
    std::memcpy(&w, p + i, sizeof w);
    found += static_cast<Word>(w & mask) == mask ? 1 : 0;
  }
  return found;
}

}  // namespace

int64_t count_non_finite(DType dtype, const void* data, size_t bytes) {
  switch (dtype) {
    case DType::f32:
      return count_full_exponents<uint32_t>(data, bytes, 0x7f800000u);
    case DType::bf16:
      return count_full_exponents<uint16_t>(data, bytes, 0x7f80u);
    case DType::f16:
      return count_full_exponents<uint16_t>(data, bytes, 0x7c00u);
    case DType::f64:
      return count_full_exponents<uint64_t>(data, bytes, 0x7ff0000000000000ull);
    default:
      return 0;
  }
}

}  // namespace nrl
