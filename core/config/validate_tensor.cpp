// Keys of tensor and sequence parallelism against each other.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "core/config/load.h"
#include "core/config/validate.h"

namespace nrl::config_detail {
namespace {

void check_comm_overlap(Checker& c) {
  const DistributedConfig& d = c.result.config.distributed;
  constexpr std::string_view key = "distributed.tp_comm_overlap";
  if (!c.sound({key, "distributed.tensor_parallel_size", "distributed.sequence_parallel"})) return;
  if (d.tp_comm_overlap == TpCommOverlap::ring && !d.splits_sequence())
    c.error(
        key,
        fmt::format("{}: ring passes the rows of ranks on, but without sequence parallelism every rank has "
                    "all rows",
                    key),
        "", {"set distributed.sequence_parallel to true, or use pipelined"});
}

void check_model_parallel(Checker& c) {
  const DistributedConfig& d = c.result.config.distributed;
  constexpr std::string_view key = "distributed.model_parallel", tensor = "distributed.tensor_parallel_size",
                             pipeline = "distributed.pipeline_parallel_size";
  const int64_t ranks = d.tensor_parallel_size * d.pipeline_parallel_size;
  if (!d.model_parallel || *d.model_parallel == (ranks > 1) || !c.sound({tensor, pipeline})) return;
  c.error(key,
          fmt::format(
              "{}: {}, but tensor_parallel_size {} x pipeline_parallel_size {} = {}: {}", key,
              *d.model_parallel, d.tensor_parallel_size, d.pipeline_parallel_size, ranks,
              ranks > 1 ? "several ranks hold one copy of the model" : "every rank holds the whole model"),
          "",
          {fmt::format("tensor_parallel_size is at {}, pipeline_parallel_size at {}", c.where(tensor),
                       c.where(pipeline)),
           ranks > 1 ? "Fix: remove it, or set both sizes to 1"
                     : "Fix: remove it, or set one of the sizes above 1"});
}

}  // namespace

void check_tensor_parallel(Checker c) {
  const Config& config = c.result.config;
  const DistributedConfig& d = config.distributed;
  check_comm_overlap(c);
  check_model_parallel(c);
  constexpr std::string_view modules_key = "policy.recompute.modules";
  const AutoOr<std::vector<BlockModule>>& modules = config.policy.recompute.modules;
  if (!modules.is_auto() && !d.splits_sequence() &&
      std::find(modules.value().begin(), modules.value().end(), BlockModule::gather) !=
          modules.value().end() &&
      c.sound({modules_key, "distributed.tensor_parallel_size", "distributed.sequence_parallel"}))
    c.error(modules_key,
            fmt::format("{}: gather matches nothing: inputs are gathered with sequence parallelism only",
                        modules_key),
            "", {"remove it, or set distributed.tensor_parallel_size above 1 and sequence_parallel: true"});
  for (const auto& [key, ranks, part] :
       {std::tuple("distributed.tensor_parallel_size", d.tensor_parallel_size, "a part of every matrix"),
        std::tuple("distributed.expert_parallel_size", d.expert_parallel_size, "a part of the experts"),
        std::tuple("distributed.expert_tensor_parallel_size", d.expert_tensor_parallel_size,
                   "a part of every expert")})
    if (ranks > 1 && config.logger.sample_period > 0 && c.sound({key})) {
      c.error("logger.sample_period",
              fmt::format("logger.sample_period needs the whole model on one rank, which has {}", part), "",
              {fmt::format("{} is at {}; set sample_period to 0 and use nrl-train generate with a checkpoint",
                           key, c.where(key))});
      break;
    }
}

void check_sequence_parallel(Checker c, int world) {
  const Config& config = c.result.config;
  const DistributedConfig& d = config.distributed;
  constexpr std::string_view length_key = "policy.max_total_sequence_length";
  if (!d.splits_sequence() || !c.sound({"distributed.tensor_parallel_size", "distributed.sequence_parallel",
                                        "policy.train_micro_batch_size", "policy.train_global_batch_size"}))
    return;
  const int64_t length = config.policy.max_total_sequence_length, micro = resolve_batch(config, world).micro,
                tokens = length / d.context_parallel_size * micro, ranks = d.tensor_parallel_size;
  if (tokens % ranks == 0) return;
  c.error(length_key,
          fmt::format("a microbatch has {} x {} = {} tokens, which {} tensor-parallel ranks cannot divide "
                      "evenly (distributed.sequence_parallel)",
                      micro, length / d.context_parallel_size, tokens, ranks),
          "",
          {fmt::format("fits: max_total_sequence_length {} or {}",
                       std::max(length / ranks, int64_t{1}) * ranks, (length / ranks + 1) * ranks),
           fmt::format("or train_micro_batch_size a multiple of {}", ranks / std::gcd(ranks, length)),
           "or distributed.sequence_parallel: false"});
}

}  // namespace nrl::config_detail
