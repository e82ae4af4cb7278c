#include "apps/model/spec/row_domains.h"

#include <algorithm>
#include <cmath>

#include "core/ops/dispatch.h"

namespace nrl::model {

int64_t ExpertRows::of(RowDomain domain) const {
  switch (domain) {
    case sent_rows:
      return sent;
    case dispatched_rows:
      return dispatched;
    case expert_group_rows:
      return group;
    case dispatched_rows_by_16:
      return grouped_rows(dispatched, experts, 16);
    case dispatched_rows_by_128:
      return grouped_rows(dispatched, experts, 128);
    default:
      NRL_CHECK(false, "row domain {} is not of experts", static_cast<int>(domain));
  }
}

bool exchanges_tokens(const ModelLayout& layout) {
  return layout.expert_ranks() > 1;
}

ExpertRows expert_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens, bool generation) {
  const MoeSpec& m = spec.moe;
  if (m.experts == 0) return {};
  ExpertRows rows{.sent = m.rows(tokens, generation)};
  rows.dispatched = rows.most = rows.sent;
  rows.experts = expert_shape(spec, layout).local();
  if (!exchanges_tokens(layout)) return rows;
  const int64_t capacity = m.capacity(tokens, generation);
  const bool pad = capacity > 0 && m.pad_to_capacity;
  rows.most = most_received(expert_shape(spec, layout), tokens, m.rule.top_k, {.rows = capacity, .pad = pad});
  rows.balanced = rows.sent * layout.expert_tensor;
  rows.group = tokens * layout.expert_ranks();
  const double slack = generation || pad || m.dispatcher == TokenDispatcher::allgather ? 0 : m.row_slack;
  const auto balanced = static_cast<double>(rows.balanced);
  rows.dispatched =
      slack > 0 ? std::min(rows.most, static_cast<int64_t>(std::ceil(slack * balanced))) : rows.most;
  return rows;
}

std::array<int64_t, row_domains> domain_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens,
                                             int64_t own, int64_t head_chunk, bool generation) {
  std::array<int64_t, row_domains> rows{};
  rows[token_rows] = tokens;
  rows[sequence_rows] = own;
  rows[head_chunk_rows] = head_chunk;
  const ExpertRows experts = expert_rows(spec, layout, own, generation);
  for (const RowDomain d :
       {sent_rows, dispatched_rows, expert_group_rows, dispatched_rows_by_16, dispatched_rows_by_128})
    rows[d] = experts.of(d);
  rows[one_row] = 1;
  return rows;
}

}  // namespace nrl::model
