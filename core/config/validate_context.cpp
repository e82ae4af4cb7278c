// Context parallelism. Rules that depend on the model are in apps/check/context.cpp.
#include <algorithm>

#include "core/config/validate.h"

namespace nrl::config_detail {

void check_context_parallel(Checker c) {
  constexpr std::string_view size_key = "distributed.context_parallel_size",
                             type_key = "distributed.cp_comm_type",
                             sizes_key = "distributed.hierarchical_context_parallel_sizes",
                             length_key = "policy.max_total_sequence_length";
  const DistributedConfig& d = c.result.config.distributed;
  const int64_t size = d.context_parallel_size, length = c.result.config.policy.max_total_sequence_length;
  const bool both =
      std::find(d.cp_comm_type.begin(), d.cp_comm_type.end(), CpCommType::a2a_p2p) != d.cp_comm_type.end();
  if (d.cp_comm_type.empty())
    c.error(type_key, fmt::format("{} is an empty list", type_key), "",
            {"give one value, or one for each layer"});
  if (size > 1 && c.sound({length_key}) && length % (2 * size) != 0)
    c.error(size_key,
            fmt::format("{} is {}, but {} {} is not a multiple of {}", size_key, size, length_key, length,
                        2 * size),
            "each rank holds two of the equal chunks of a sample",
            {fmt::format("Fix: a length of {}", std::max<int64_t>(1, length / (2 * size)) * 2 * size)});
  if (!c.sound({size_key, type_key})) return;
  if (const auto& sizes = d.hierarchical_context_parallel_sizes) {
    if ((*sizes)[0] * (*sizes)[1] != size)
      c.error(sizes_key,
              fmt::format("{}: {} x {} is not {} {}", sizes_key, (*sizes)[0], (*sizes)[1], size_key, size));
  } else if (both && size > 1) {
    c.error(type_key, fmt::format("cp_comm_type a2a+p2p needs {}", sizes_key), "",
            {fmt::format("the ranks of the all-to-all and of the ring, for example [{}, {}]",
                         size % 2 == 0 ? 2 : size, size % 2 == 0 ? size / 2 : 1)});
  }
}

}  // namespace nrl::config_detail
