#pragma once
// The layout of parameters, gradients and optimizer state in flat buffers (after Megatron-LM's distributed
// optimizer). DDP and the ZeRO stages differ only in which of the three buffers a rank keeps unsharded.
//
// Parameters are in reverse model order, which is about the order in which their gradients become complete;
// each starts at a multiple of 64 elements. A bucket is closed when it reaches the bucket size, and at the
// end of a unit, and padded so that the data-parallel ranks get equal shards; shard boundaries ignore
// parameter boundaries.
//
// Shards start at multiples of 8 elements, which are 16 bytes of bf16. With equal bucket sizes the layout
// does not depend on the data-parallel size if that divides shard_unit / 8 = 7680 = 2^9 * 3 * 5 (1, 2, 3, 4,
// 5, 6, 8, 10, 12, ..., 512, 768); other sizes lengthen the padding at the end of buckets, and leave
// parameters in their buckets and at their offsets there.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/enums.h"

namespace nrl::parallel {

/// One parameter tensor of this rank, in model order. A tied parameter is listed once.
struct ParamSpec {
  std::string name;
  int64_t numel = 0;
  /// Parameters of different units (layers) are never in one bucket.
  int unit = 0;
};

/// Elements [begin, end).
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

struct ParamPlace {
  int bucket = 0;
  int64_t offset = 0;  ///< in the bucket
  int64_t start = 0;   ///< in the flat buffer
};

struct Bucket {
  int64_t start = 0;        ///< in the flat buffer
  int64_t size = 0;         ///< with padding
  int64_t used = 0;         ///< up to the end of the last parameter
  std::vector<int> params;  ///< indices into FlatBuckets::params(), in layout order
};

/// The part of a parameter that lies in a rank's shard of its bucket.
struct ShardPiece {
  int param = 0;
  ElementRange in_param;
  int64_t in_flat = 0;   ///< where it starts in the whole flat buffer
  int64_t in_shard = 0;  ///< where it starts in the rank's shards, concatenated over buckets
};

/// The bucket size for `total` gradients that `ranks` ranks sum (distributed.bucket_size_mb: auto). A ring
/// takes a step of latency per rank, so that the bytes per rank must not fall as ranks are added: 4 MiB of
/// fp32 take several times the latency of a step on current networks. Never less than 40 MiB; above that at
/// most an eighth of `total`, so that most of the reduction overlaps with the backward pass, and staging
/// buffers remain small. The size depends on nothing but these numbers, so that plans do not depend on the
/// machine.
int64_t auto_bucket_elements(int64_t total, int ranks);

/// A pure description: no memory, the same on all ranks that hold the same parameters.
class FlatBuckets {
 public:
  static constexpr int64_t param_align = 64;
  static constexpr int64_t shard_unit = 61440;   // 2^12 * 3 * 5
  static constexpr int64_t min_shard_align = 8;  // 16 bytes of bf16

  FlatBuckets() = default;
  /// `bucket_elements`: a bucket is closed when it has at least this many (0: one bucket). `shards`: the
  /// data-parallel size. `shard_align`: shards start at multiples of it and of min_shard_align; the layout is
  /// the same for sizes that divide shard_unit by both. Fails with Exit::config when the total overflows, and
  /// with Exit::internal for an empty parameter or a duplicate name.
  FlatBuckets(std::vector<ParamSpec> params, int64_t bucket_elements, int shards, int64_t shard_align = 1);

  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const ParamPlace& place(int param) const { return places_.at(static_cast<size_t>(param)); }
  /// Index of a name; -1 when there is none.
  int find(std::string_view name) const;
  int shards() const { return shards_; }

  /// Elements of a whole flat buffer, padding included.
  int64_t total() const { return total_; }
  /// Elements of one rank's shards together; equal for all ranks.
  int64_t shard_total() const { return total_ / shards_; }
  /// The flat range of a bucket.
  ElementRange range(int bucket) const;
  /// The flat range of a rank's shard of a bucket.
  ElementRange shard(int bucket, int shard_rank) const;
  /// Where a bucket's shard lies in a rank's shards, concatenated over buckets.
  ElementRange in_shards(int bucket) const;
  /// All elements that a rank owns, in the order of its shards. Padding belongs to no piece.
  std::vector<ShardPiece> pieces(int shard_rank) const;

 private:
  std::vector<ParamSpec> params_;
  std::vector<ParamPlace> places_;
  std::vector<Bucket> buckets_;
  std::vector<int> by_name_;  // indices ordered by name
  int shards_ = 1;
  int64_t total_ = 0;
};

/// Which of the three buffers are sharded between steps. With several replicas (hsdp, hierarchical reduction)
/// each holds all shards.
struct ShardingStrategy {
  std::string_view name;
  bool parameters = false;
  bool gradients = false;
  bool optimizer_state = false;
  bool operator==(const ShardingStrategy&) const = default;
};

constexpr ShardingStrategy sharding_of(ShardStrategy s) {
  return {.name = name_of(s),
          .parameters = s >= ShardStrategy::optim_grads_params,
          .gradients = s >= ShardStrategy::optim_grads,
          .optimizer_state = s >= ShardStrategy::optim};
}

namespace sharding {
inline constexpr ShardingStrategy ddp = sharding_of(ShardStrategy::ddp);
inline constexpr ShardingStrategy optim = sharding_of(ShardStrategy::optim);
inline constexpr ShardingStrategy optim_grads = sharding_of(ShardStrategy::optim_grads);
inline constexpr ShardingStrategy optim_grads_params = sharding_of(ShardStrategy::optim_grads_params);
inline constexpr ShardingStrategy hsdp = sharding_of(ShardStrategy::hsdp);
inline constexpr ShardingStrategy all[] = {ddp, optim, optim_grads, optim_grads_params, hsdp};
}  // namespace sharding

}  // namespace nrl::parallel
