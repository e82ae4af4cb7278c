#include "apps/model/inference.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace nrl::model {
namespace {

constexpr int64_t chunk_tokens = 128;  // prompt tokens per forward pass

GenerationLimits limits_of(int64_t max_tokens) {
  NRL_CHECK(max_tokens > 0);
  const GenerationLimits standard;
  return {.tokens = std::min(chunk_tokens, max_tokens),
          .longest = max_tokens,
          .pages = (max_tokens + standard.page_tokens - 1) / standard.page_tokens};
}

}  // namespace

Inference::Inference(const ModelSpec& spec, const ParameterList& parameters, std::vector<ParameterView> views,
                     const ops::Exec& exec, int64_t max_tokens)
    : pass_(spec, parameters, std::move(views), exec, limits_of(max_tokens)),
      pages_(static_cast<size_t>(pass_.limits().pages)) {
  std::iota(pages_.begin(), pages_.end(), 0);
}

std::span<const float> Inference::append(std::span<const int32_t> tokens) {
  NRL_CHECK(!tokens.empty() && length() + static_cast<int64_t>(tokens.size()) <= max_tokens());
  while (!tokens.empty()) {
    const size_t now = std::min<size_t>(tokens.size(), chunk_tokens);
    const bool last = now == tokens.size();
    GenerationRows rows{.sequences = {{.tokens = tokens.first(now), .first = length_, .pages = pages_}},
                        .sampled = {}};
    if (last) rows.sampled.push_back(static_cast<int32_t>(now) - 1);
    pass_.run(rows);
    length_ += static_cast<int64_t>(now);
    tokens = tokens.subspan(now);
  }
  return pass_.logits();
}

}  // namespace nrl::model
