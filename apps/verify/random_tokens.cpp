#include "apps/verify/random_tokens.h"

#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl::verify {

void RandomTokens::read(int64_t i, std::span<int32_t> out) const {
  const PhiloxStream stream(seed_, "random tokens");
  const auto blocks = static_cast<uint64_t>(sequence_length_ + 1);
  for (size_t t = 0; t < out.size(); ++t) {
    const PhiloxBlock draw = stream.block(static_cast<uint64_t>(i) * blocks + t);
    const bool ends = documents().end_token >= 0 && draw[1] % 16 == 0;
    out[t] =
        ends ? documents().end_token : static_cast<int32_t>(draw[0] % static_cast<uint64_t>(vocab_size_));
  }
}

std::string RandomTokens::describe() const {
  return fmt::format("random tokens, seed {}", seed_);
}

}  // namespace nrl::verify
