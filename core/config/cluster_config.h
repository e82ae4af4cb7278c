#pragma once
// The section cluster: the size of a job, its network, its failures and its price.

#include <cstdint>
#include <optional>
#include <vector>

namespace nrl {

/// The network between NVLink domains, for predictions (machine::Fabric).
struct FabricConfig {
  double adapters_per_rank = 1;
  std::optional<double> adapter_gbit;  ///< unset: as the device usually has
  int64_t leaf_ranks = 256;            ///< ranks whose adapters are one switch apart
  bool rail_optimized = true;          ///< a leaf switch has the adapters of one local index of its nodes
  double oversubscription = 1;         ///< of the links between leaf switches
  bool operator==(const FabricConfig&) const = default;
};

/// Failures of a job, for predictions (predict::forecast_run). The default rate was seen on 16,384 H100: 419
/// interruptions in 54 days (Llama 3, arXiv:2407.21783, table 5).
struct FailureConfig {
  double failures_per_rank_hour = 2e-5;
  double detect_s = 60;                ///< from a failure to the end of the job
  double restart_s = 300;              ///< from there to the loading of a checkpoint
  std::optional<double> storage_gb_s;  ///< of all ranks; unset: 0.125 for each
  bool operator==(const FailureConfig&) const = default;
};

/// Price and power of a job, for predictions (predict::forecast_run).
struct CostConfig {
  std::optional<double> rank_hour, kwh;  ///< prices in one currency
  double pue = 1.2;                      ///< energy of the data center over its computers'
  std::optional<double> node_watts;      ///< without its GPUs; unset: 2,000, of a node of CPUs unknown
  bool operator==(const CostConfig&) const = default;
};

struct ClusterConfig {
  // Must equal the sizes of the job, if given.
  std::optional<int64_t> num_nodes;
  std::optional<int64_t> world_size;
  std::optional<std::vector<int64_t>> gpus_per_node;  ///< ranks by node; one number: of every node
  std::optional<int64_t> segment_size;                ///< nodes of an NVLink domain
  FabricConfig fabric;
  FailureConfig reliability;
  CostConfig cost;
  bool operator==(const ClusterConfig&) const = default;
};

}  // namespace nrl
