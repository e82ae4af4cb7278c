#pragma once
// The layouts that nrl-train plan --search compares: what each decides, and the keys that give it.

#include <compare>
#include <string>
#include <vector>

#include "apps/model/spec/spec.h"
#include "core/config/load.h"

namespace nrl::planner {

/// The decisions of the search; everything else is as configured.
struct Layout {
  int tp = 1, cp = 1, ep = 1, pp = 1;
  int chunks = 1;                   ///< of a pipeline stage
  std::string schedule = "auto";    ///< distributed.pipeline_schedule
  int64_t micro = 1;                ///< policy.train_micro_batch_size
  std::string recompute = {};       ///< policy.recompute.granularity; empty: as configured
  std::string strategy = "optim";   ///< distributed.shard_strategy
  int replicas = 1;                 ///< distributed.dp_replicate_size, of hsdp
  bool param_gather = false;        ///< distributed.overlap_param_gather
  bool messages = false;            ///< distributed.overlap_p2p_comm
  std::string tp_overlap = "auto";  ///< distributed.tp_comm_overlap
  bool count_ends = false;          ///< embedding and loss count as layers of the pipeline's ends

  auto operator<=>(const Layout&) const = default;
  int data_parallel(int world) const { return world / tp / cp / pp; }

  /// "tp 2 x dp 4  optim  micro 4".
  std::string name(int world) const;
  /// "key=value" of all of these, and of keys that only suit the configured layout.
  std::vector<std::string> overrides() const;
  /// The keys to add to the configuration `given`: overrides() that this layout needs, or that
  /// `given` has otherwise than `config`, which is `given` with overrides().
  std::vector<std::string> keys(const Config& given, const Config& config) const;
  /// `given` as load_config() returns it with overrides(), unchecked; policy.recompute stays as it is.
  Config applied(Config given) const;
};

/// All grids whose tensor-parallel ranks are on one node of `node` ranks; context parallelism where a rank
/// keeps at least 2048 tokens of a sequence; expert parallelism; microbatches up to 16; 1F1B, zb_h1 and every
/// number of chunks by which the blocks divide, alone or with embedding and head counted as two; every
/// sharding strategy, with and without overlapped gathers. `recompute`: the values of Layout::recompute.
/// Sizes divide the ranks, the batch and the layers; all else is left to the checks of a run.
std::vector<Layout> candidates(const Config& config, const model::ModelSpec& spec, int world, int node,
                               const std::vector<std::string>& recompute);

/// The same layout with one key changed, for each of the keys that candidates() leaves alone, and with each
/// of the other sharding strategies.
std::vector<Layout> variants(const Layout& layout, int world);

}  // namespace nrl::planner
