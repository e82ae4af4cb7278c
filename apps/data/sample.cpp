#include "apps/data/sample.h"

#include "core/base/error.h"

namespace nrl::data {

void make_sample(std::span<const int32_t> ids, const DocumentRules& rules, Sample& sample) {
  NRL_CHECK(ids.size() > 1);
  const size_t length = ids.size() - 1;
  sample.ids.assign(ids.begin(), ids.end() - 1);
  sample.targets.assign(ids.begin() + 1, ids.end());
  sample.positions.resize(length);
  sample.segments.assign(1, 0);
  int32_t document = 0;  // its first row
  for (size_t t = 0; t < length; ++t) {
    const auto row = static_cast<int32_t>(t);
    sample.positions[t] = rules.reset_position_ids ? row - document : row;
    if (ids[t] != rules.end_token) continue;
    document = row + 1;
    if (rules.eod_mask_loss) sample.targets[t] = -1;
    if (rules.reset_attention_mask && t + 1 < length) sample.segments.push_back(document);
  }
}

std::vector<int32_t> rows_without_loss(const Sample& sample) {
  std::vector<int32_t> rows;
  for (size_t t = 0; t < sample.targets.size(); ++t)
    if (sample.targets[t] < 0) rows.push_back(static_cast<int32_t>(t));
  return rows;
}

}  // namespace nrl::data
