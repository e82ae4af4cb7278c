#include "apps/train/context_check.h"

#include <algorithm>

namespace nrl::train {
namespace {

constexpr const char *size_key = "distributed.context_parallel_size", *type_key = "distributed.cp_comm_type",
                     *sizes_key = "distributed.hierarchical_context_parallel_sizes";

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

void check_heads(const ConfigResult& result, const model::ModelSpec& spec, CpCommType type,
                 Diagnostics& out) {
  const DistributedConfig& d = result.config.distributed;
  const int64_t ranks = all_to_all_ranks(d, type), tensor = d.tensor_parallel_size;
  const std::pair<const char*, int64_t> counts[] = {{"query heads", spec.heads},
                                                    {"key/value heads", spec.kv_heads}};
  for (const auto& [what, heads] : counts) {
    if (heads % tensor != 0 || heads / tensor % ranks == 0) continue;  // the former is another rule's
    out.push_back(diagnose(
        result, type_key,
        fmt::format("cp_comm_type {}: {} {}{} cannot be divided among {} ranks", name_of(type), heads, what,
                    tensor > 1 ? fmt::format(" / tensor_parallel_size {}", tensor) : "", ranks),
        "an all-to-all gives each rank all tokens of some heads",
        {"Fix: p2p or all_gather, or a2a+p2p with a smaller all-to-all"}));
    return;
  }
}

}  // namespace

void check_context_parallel(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out) {
  const DistributedConfig& d = result.config.distributed;
  for (const char* key : {size_key, type_key, sizes_key, "distributed.tensor_parallel_size"})
    if (!result.sound(key)) return;
  const std::vector<CpCommType>& types = d.cp_comm_type;
  if (types.size() > 1 && static_cast<int64_t>(types.size()) != spec.layers)
    out.push_back(diagnose(
        result, type_key,
        fmt::format("{} lists {} values, but the model has {} layers", type_key, types.size(), spec.layers),
        "", {"Fix: give one value, or one for each layer"}));
  if (d.context_parallel_size == 1) return;
  const auto each = [&](const auto& body) {
    for (size_t i = 0; i < types.size(); ++i)
      if (std::find(types.begin(), types.begin() + static_cast<ptrdiff_t>(i), types[i]) ==
          types.begin() + static_cast<ptrdiff_t>(i))
        body(types[i]);
  };
  each([&](CpCommType type) { check_heads(result, spec, type, out); });
  each([&](CpCommType type) {
    if (spec.window == 0 || !needs_ring(d, type)) return;
    out.push_back(diagnose(result, type_key,
                           fmt::format("cp_comm_type {} does not support the sliding window of the model ({} "
                                       "tokens)",
                                       name_of(type), spec.window),
                           "a ring attends to the keys of other ranks as a whole",
                           {"Fix: cp_comm_type all_gather or a2a"}));
  });
}

}  // namespace nrl::train
