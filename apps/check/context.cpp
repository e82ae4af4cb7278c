// Rules about how context-parallel ranks exchange tokens.
#include <algorithm>

#include "apps/check/rule.h"

namespace nrl::check {
namespace {

const std::vector<std::string> context_keys{"distributed.cp_comm_type", "distributed.context_parallel_size",
                                            "distributed.hierarchical_context_parallel_sizes",
                                            "distributed.tensor_parallel_size"};

// Ranks of the all-to-all; 1: none.
int64_t all_to_all_ranks(const DistributedConfig& d, CpCommType type) {
  if (type == CpCommType::a2a) return d.context_parallel_size;
  return type == CpCommType::a2a_p2p && d.hierarchical_context_parallel_sizes
             ? (*d.hierarchical_context_parallel_sizes)[0]
             : 1;
}

bool needs_ring(const DistributedConfig& d, CpCommType type) {
  return type != CpCommType::all_gather && all_to_all_ranks(d, type) < d.context_parallel_size;
}

Verdict judge_list(const Facts& f) {
  const size_t count = f.distributed().cp_comm_type.size();
  if (count == 1 || static_cast<int64_t>(count) == f.spec().layers) return {};
  return {{fmt::format("{} lists {} values, but the model has {} layers", context_keys[0], count,
                       f.spec().layers),
           {"Fix: give one value, or one for each layer"}}};
}

Verdict judge_heads(const Facts& f, CpCommType type) {
  const int64_t ranks = all_to_all_ranks(f.distributed(), type),
                tensor = f.distributed().tensor_parallel_size;
  for (const auto& [what, heads] :
       {std::pair("query heads", f.spec().heads), {"key/value heads", f.spec().kv_heads}})
    if (heads % tensor == 0 && heads / tensor % ranks != 0)  // the former is another rule's
      return {{.reason = fmt::format(
                   "cp_comm_type {}: {} {}{} cannot be divided among {} ranks", name_of(type), heads, what,
                   tensor > 1 ? fmt::format(" / tensor_parallel_size {}", tensor) : "", ranks),
               .remedy = {"Fix: p2p or all_gather, or a2a+p2p with a smaller all-to-all"},
               .label = "an all-to-all gives each rank all tokens of some heads"}};
  return {};
}

Verdict judge_window(const Facts& f, CpCommType type) {
  if (!needs_ring(f.distributed(), type)) return {};
  const std::vector<CpCommType>& types = f.distributed().cp_comm_type;
  int64_t window = 0;
  for (int64_t layer = 0; layer < f.spec().layers; ++layer) {
    const auto at = static_cast<size_t>(layer);
    if (types.size() == 1 || (at < types.size() && types[at] == type))
      window = std::max(window, f.spec().window(layer));
  }
  if (window == 0) return {};
  return {
      {.reason = fmt::format("cp_comm_type {} does not support the sliding window of the model ({} tokens)",
                             name_of(type), window),
       .remedy = {"Fix: cp_comm_type all_gather or a2a"},
       .label = "a ring attends to the keys of other ranks as a whole"}};
}

/// A rule about each type that some layer has.
Rule of_each_type(Verdict (*judge)(const Facts&, CpCommType)) {
  return {context_keys, [judge](const Facts& f) {
            Verdict out;
            std::vector<CpCommType> seen;
            if (f.distributed().context_parallel_size == 1) return out;
            for (const CpCommType type : f.distributed().cp_comm_type) {
              if (std::find(seen.begin(), seen.end(), type) != seen.end()) continue;
              seen.push_back(type);
              for (Broken& broken : judge(f, type)) out.push_back(std::move(broken));
            }
            return out;
          }};
}

const Rule context_table[] = {
    {context_keys, judge_list}, of_each_type(judge_heads), of_each_type(judge_window)};

}  // namespace

std::span<const Rule> context_rules() {
  return context_table;
}

}  // namespace nrl::check
