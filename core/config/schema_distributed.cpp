// Keys of the process grid.
#include "core/config/schema.h"

namespace nrl::config_detail {

void add_distributed_keys(Table& t) {
  t.section("cluster", "Expected size of the job; checked against the launcher, never used to choose.");
  NRL_KEY(t, cluster.num_nodes)
      .at_least(1)
      .alias("distributed.num_nodes")
      .help("Nodes of the run; null: not checked.");
  NRL_KEY(t, cluster.world_size)
      .at_least(1)
      .alias("distributed.world_size")
      .help("Ranks of the run; null: not checked.");
  t.planned("cluster.gpus_per_node", Kind::integer, "null")
      .nullable()
      .or_single()
      .at_least(1)
      .alias("distributed.gpus_per_node")
      .alias("distributed.num_gpus")
      .help("GPUs of a node, or a list with one number per node.");
  t.planned("cluster.segment_size", Kind::integer, "null")
      .nullable()
      .at_least(1)
      .help("Nodes of an NVLink domain; an expert group must not span two.");

  t.section("distributed", "Parallelism and communication.");
  NRL_KEY(t, distributed.backend)
      .help(
          "Communication of tensors: mpi (host memory), nccl (GPUs), staged (GPU memory through pinned host "
          "memory and MPI; works without NCCL, and for several ranks on one GPU); auto: mpi on CPUs, nccl "
          "on GPUs if it supports the layout, else staged. mpirun or srun starts the processes.");
  NRL_KEY(t, distributed.tensor_parallel_size)
      .at_least(1)
      .not_built()
      .alias("model.parallelism.tensor_parallel_size")
      .alias("policy.tensor_parallel_size")
      .alias("policy.dtensor_cfg.tensor_parallel_size")
      .alias("policy.megatron_cfg.tensor_model_parallel_size")
      .alias("model.tensor_model_parallel_size")
      .help("Ranks that split every weight matrix.");
  NRL_KEY(t, distributed.pipeline_parallel_size)
      .at_least(1)
      .not_built()
      .alias("model.parallelism.pipeline_parallel_size")
      .alias("policy.pipeline_parallel_size")
      .alias("policy.megatron_cfg.pipeline_model_parallel_size")
      .alias("model.pipeline_model_parallel_size")
      .help("Ranks that split the layers.");
  t.planned("distributed.virtual_pipeline_size", Kind::integer, "null")
      .nullable()
      .at_least(1)
      .alias("policy.megatron_cfg.virtual_pipeline_model_parallel_size")
      .help("Chunks of layers per rank.");
  NRL_KEY(t, distributed.context_parallel_size)
      .at_least(1)
      .not_built()
      .alias("policy.dtensor_cfg.context_parallel_size")
      .alias("policy.megatron_cfg.context_parallel_size")
      .help("Ranks that split a sequence.");
  t.planned("distributed.cp_comm_type", Kind::choice, "p2p")
      .one_of({"p2p", "all_gather", "a2a", "a2a+p2p"})
      .alias("policy.megatron_cfg.cp_comm_type")
      .help("How context-parallel ranks exchange keys and values.");
  NRL_KEY(t, distributed.expert_parallel_size)
      .at_least(1)
      .not_built()
      .alias("policy.dtensor_cfg.expert_parallel_size")
      .alias("policy.megatron_cfg.expert_model_parallel_size")
      .help("Ranks that split the experts.");
  NRL_KEY(t, distributed.expert_tensor_parallel_size)
      .at_least(1)
      .not_built()
      .alias("policy.megatron_cfg.expert_tensor_parallel_size")
      .help("Ranks that split every expert's matrices.");
  t.planned("distributed.sequence_parallel", Kind::boolean, "auto")
      .automatic()
      .alias("model.parallelism.sequence_parallel")
      .alias("policy.dtensor_cfg.sequence_parallel")
      .alias("policy.megatron_cfg.sequence_parallel")
      .help("Split norms and dropout along the sequence; auto: with tensor parallelism.");
  NRL_KEY(t, distributed.data_parallel_size)
      .at_least(1)
      .alias("policy.data_parallel_size")
      .help("Model replicas; auto: world / (tensor x pipeline x context). A given value is checked.");
  t.planned("distributed.dp_replicate_size", Kind::integer, "1")
      .at_least(1)
      .alias("policy.dtensor_cfg.dp_replicate_size")
      .help("Replicas of the sharded group (hsdp).");
  NRL_KEY(t, distributed.shard_strategy)
      .built({"ddp", "optim"})
      .alias("policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy")
      .alias("distributed.fsdp_config.sharding_strategy")
      .on_off("policy.megatron_cfg.optimizer.use_distributed_optimizer", "optim", "ddp")
      .on_off("distributed.use_distributed_optimizer", "optim", "ddp")
      .help(
          "What is sharded over data-parallel ranks: nothing (ddp), the optimizer state (optim, ZeRO-1), "
          "gradients too (ZeRO-2), parameters too (ZeRO-3).");
  NRL_KEY(t, distributed.overlap_grad_reduce)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce")
      .help("Reduce gradients during the backward pass.");
  NRL_KEY(t, distributed.overlap_param_gather)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather")
      .help(
          "Gather updated parameters during the next forward pass; needs shard_strategy: optim and "
          "overlap_grad_reduce, not with policy.cuda_graph.");
  NRL_KEY(t, distributed.grad_reduce_dtype)
      .built({"fp32"})
      .on_off("policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32", "fp32", "bf16")
      .help("Type in which gradients are communicated.");
  NRL_KEY(t, distributed.bucket_size_mb).above(0).at_most(65536).help("Gradients per bucket, in MiB.");
}

}  // namespace nrl::config_detail
