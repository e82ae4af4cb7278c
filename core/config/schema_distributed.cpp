// Keys of the process grid.
#include "core/config/pipeline_layout.h"
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

const Need tensor_parallel{is_not("distributed.tensor_parallel_size", "1", "above 1")};
const Need pipeline_parallel{is_not("distributed.pipeline_parallel_size", "1", "above 1")};
const Need context_parallel{is_not("distributed.context_parallel_size", "1", "above 1")};
const Need shards{is_not("distributed.shard_strategy", "ddp", "other than ddp")};

std::vector<std::string_view> schedule_names() {
  std::vector<std::string_view> names;
  for (const ScheduleText& s : configured_schedules) names.push_back(name_of(s.kind));
  return names;
}
std::string schedule_texts() {
  std::string out;
  for (const ScheduleText& s : configured_schedules)
    out +=
        fmt::format("{}{}{}{}", out.empty() ? "" : "; ", name_of(s.kind), s.text.empty() ? "" : ", ", s.text);
  return out;
}

}  // namespace

void add_distributed_keys(Table& t) {
  t.section("cluster",
            "Expected size of the job, checked against the launcher, and its network, for predictions.");
  t.resume("cluster", OnResume::unrelated);
  NRL_KEY(t, cluster.num_nodes)
      .at_least(1)
      .alias("distributed.num_nodes")
      .help("Nodes of the run; null: not checked.");
  NRL_KEY(t, cluster.world_size)
      .at_least(1)
      .alias("distributed.world_size")
      .help("Ranks of the run; null: not checked.");
  NRL_KEY(t, cluster.gpus_per_node)
      .at_least(1)
      .alias("distributed.gpus_per_node")
      .alias("distributed.num_gpus")
      .help(
          "Ranks of a node, which are its GPUs or the processes of a run on CPUs; or a list with one number "
          "per "
          "node, in the order in which the launcher numbers them. null: not checked, and nrl-train plan does "
          "not "
          "know the nodes.");
  NRL_KEY(t, cluster.segment_size)
      .at_least(1)
      .help(
          "Nodes of an NVLink domain: consecutive nodes belong to one. An expert group must not span two. "
          "null: "
          "not checked.");
  t.section("cluster.fabric",
            "The network between nodes, or between NVLink domains of several nodes, for the times that "
            "nrl-train plan predicts.");
  NRL_KEY(t, cluster.fabric.adapters_per_rank)
      .at_least(0.125)
      .at_most(16)
      .help("Network adapters of a rank; 0.5 if two ranks share one.");
  NRL_KEY(t, cluster.fabric.adapter_gbit)
      .at_least(0.1)
      .at_most(10000)
      .help("Gbit/s of an adapter each way; null: what is usual for the device.");
  NRL_KEY(t, cluster.fabric.leaf_ranks)
      .at_least(1)
      .help("Consecutive ranks that reach each other without links between leaf switches and the spine.");
  NRL_KEY(t, cluster.fabric.rail_optimized)
      .help(
          "A leaf switch connects the adapters of the same place in their nodes: messages between different "
          "places in different nodes pass the spine.");
  NRL_KEY(t, cluster.fabric.oversubscription)
      .at_least(1)
      .at_most(64)
      .help("Bandwidth of the adapters below a leaf switch over that of its links to the spine.");
  t.section(
      "cluster.reliability",
      "Failures of the job and the time that they cost, for the days that nrl-train plan predicts; a run "
      "ignores them.");
  NRL_KEY(t, cluster.reliability.failures_per_rank_hour)
      .at_least(0)
      .at_most(1)
      .help("Failures that end the job, over ranks and hours; 0: none.");
  NRL_KEY(t, cluster.reliability.detect_s)
      .at_least(0)
      .at_most(86400)
      .help("Seconds from a failure until the job has ended.");
  NRL_KEY(t, cluster.reliability.restart_s)
      .at_least(0)
      .at_most(86400)
      .help("Seconds from there until the checkpoint is loaded: new nodes, start of the processes.");
  NRL_KEY(t, cluster.reliability.storage_gb_s)
      .at_least(0.001)
      .at_most(1000000)
      .help("GB/s at which all ranks together save and load a checkpoint; null: 0.125 for each rank.");
  t.section("cluster.cost",
            "Prices and power, for the price and energy that nrl-train plan predicts; a run ignores them.");
  NRL_KEY(t, cluster.cost.rank_hour)
      .at_least(0)
      .help("Price of an hour of a rank, in any currency; null: not counted.");
  NRL_KEY(t, cluster.cost.kwh).at_least(0).help("Price of a kWh in the same currency; null: not counted.");
  NRL_KEY(t, cluster.cost.pue)
      .at_least(1)
      .at_most(5)
      .help("Power usage effectiveness: energy of the data center over that of its computers.");
  NRL_KEY(t, cluster.cost.node_watts)
      .at_least(0)
      .at_most(1000000)
      .help(
          "Watts of a node without its GPUs; null: 2000, and of a node without GPUs unknown, so that no "
          "energy "
          "is printed.");

  t.section("distributed", "Parallelism and communication.");
  t.resume("distributed", OnResume::unrelated);
  NRL_KEY(t, distributed.backend)
      .help(
          "Communication of tensors: mpi (host memory), nccl (GPUs), staged (GPU memory through pinned host "
          "memory and MPI; works without NCCL, and for several ranks on one GPU); auto: mpi on CPUs, nccl "
          "on GPUs if it supports the layout, else staged. mpirun or srun starts the processes.");
  NRL_KEY(t, distributed.tensor_parallel_size)
      .at_least(1)
      .alias("model.parallelism.tensor_parallel_size")
      .alias("policy.tensor_parallel_size")
      .alias("policy.dtensor_cfg.tensor_parallel_size")
      .alias("policy.megatron_cfg.tensor_model_parallel_size")
      .alias("model.tensor_model_parallel_size")
      .help(
          "Ranks that split every weight matrix; the attention heads, key/value heads and the width of the "
          "MLP "
          "must be multiples of it. Best within a node.");
  NRL_KEY(t, distributed.pipeline_parallel_size)
      .at_least(1)
      .alias("model.parallelism.pipeline_parallel_size")
      .alias("policy.pipeline_parallel_size")
      .alias("policy.megatron_cfg.pipeline_model_parallel_size")
      .alias("model.pipeline_model_parallel_size")
      .help("Ranks that split the layers.");
  NRL_KEY(t, distributed.virtual_pipeline_size)
      .at_least(1)
      .alias("distributed.virtual_pipeline_model_parallel_size")
      .alias("policy.megatron_cfg.virtual_pipeline_model_parallel_size")
      .help("Chunks of layers per pipeline stage, not consecutive in the model; null: 1.")
      .only_with(pipeline_parallel)
      .idle("1");
  NRL_KEY(t, distributed.pipeline_schedule)
      .one_of(schedule_names())
      .help(fmt::format("Order of the passes of a pipeline stage: {}. auto: interleaved with "
                        "virtual_pipeline_size above 1, else 1f1b.",
                        schedule_texts()))
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.num_layers_in_first_pipeline_stage)
      .at_least(0)
      .alias("policy.megatron_cfg.num_layers_in_first_pipeline_stage")
      .help("Layers of the first pipeline stage; the others share the rest. null: as many as others.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.num_layers_in_last_pipeline_stage)
      .at_least(0)
      .alias("policy.megatron_cfg.num_layers_in_last_pipeline_stage")
      .help("Layers of the last pipeline stage; the others share the rest. null: as many as others.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.account_for_embedding_in_pipeline_split)
      .alias("policy.megatron_cfg.account_for_embedding_in_pipeline_split")
      .help("Count the embedding as a layer when layers are spread over pipeline stages.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.account_for_loss_in_pipeline_split)
      .alias("policy.megatron_cfg.account_for_loss_in_pipeline_split")
      .help("Count the head with its loss as a layer when layers are spread over pipeline stages.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.pipeline_layout)
      .or_text("Megatron-LM's text (\"Et*3|(tt|)*2,L\")", parse_pipeline_layout)
      .alias("policy.megatron_cfg.pipeline_model_parallel_layout")
      .help(
          "Layers of every chunk of the model, in order: one number for each of pipeline_parallel_size x "
          "virtual_pipeline_size chunks; chunk i is on stage i modulo pipeline_parallel_size. Megatron-LM's "
          "text "
          "for it lists the parts of the chunks: E embedding, t layer, L loss, | between chunks, (x)*3 three "
          "times. null: spread evenly.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.microbatch_group_size_per_vp_stage)
      .at_least(1)
      .alias("policy.megatron_cfg.microbatch_group_size_per_vp_stage")
      .help(
          "Schedule interleaved: microbatches that pass one chunk of a stage before the stage turns to its "
          "next "
          "chunk, from pipeline_parallel_size to the number of microbatches; a smaller last group needs at "
          "least pipeline_parallel_size. More means larger groups of messages and more activations. null: as "
          "few as possible.")
      .only_with({{.key = "distributed.virtual_pipeline_size",
                   .is = false,
                   .values = {"null", "1"},
                   .phrase = "above 1"}});
  NRL_KEY(t, distributed.overlap_p2p_comm)
      .alias("distributed.overlap_p2p_communication")
      .alias("policy.megatron_cfg.overlap_p2p_comm")
      .help(
          "Post the receives of pipeline messages before the previous pass, so that they arrive during it, "
          "for "
          "the memory of one more message in flight; false: when the pass that needs them begins. Sends are "
          "always waited for only when their buffers are used again.")
      .only_with(pipeline_parallel);
  NRL_KEY(t, distributed.context_parallel_size)
      .at_least(1)
      .alias("policy.dtensor_cfg.context_parallel_size")
      .alias("policy.megatron_cfg.context_parallel_size")
      .help(
          "Ranks that split every sample: each holds two of twice as many chunks of its tokens, so that "
          "causal "
          "attention is the same work on all. max_total_sequence_length must be a multiple of twice this "
          "size.");
  NRL_KEY(t, distributed.cp_comm_type)
      .alias("policy.megatron_cfg.cp_comm_type")
      .help(
          "How context-parallel ranks exchange tokens for attention, one value or a list with one per layer: "
          "p2p "
          "(keys and values go around a ring during attention), all_gather (of keys and values), a2a (each "
          "rank "
          "has all tokens of some heads), a2a+p2p (both, see hierarchical_context_parallel_sizes).")
      .only_with(context_parallel);
  NRL_KEY(t, distributed.hierarchical_context_parallel_sizes)
      .at_least(1)
      .alias("policy.megatron_cfg.hierarchical_context_parallel_sizes")
      .help(
          "Ranks of the all-to-all and of the ring of cp_comm_type a2a+p2p; their product is "
          "context_parallel_size. The ranks of an all-to-all are neighbors, the fast part of the network.")
      .only_with({is("distributed.cp_comm_type", {"a2a+p2p"})});
  NRL_KEY(t, distributed.expert_parallel_size)
      .at_least(1)
      .alias("policy.dtensor_cfg.expert_parallel_size")
      .alias("policy.megatron_cfg.expert_model_parallel_size")
      .help(
          "Ranks that split the experts. They are ranks of tensor, context and data parallelism: "
          "expert_parallel_size x expert_tensor_parallel_size divides their number.");
  NRL_KEY(t, distributed.expert_tensor_parallel_size)
      .at_least(1)
      .alias("policy.megatron_cfg.expert_tensor_parallel_size")
      .help(
          "Ranks that split every expert's matrices. Unlike in Megatron-LM, tensor_parallel_size does not "
          "change it.");
  NRL_KEY(t, distributed.sequence_parallel)
      .alias("model.parallelism.sequence_parallel")
      .alias("policy.dtensor_cfg.sequence_parallel")
      .alias("policy.megatron_cfg.sequence_parallel")
      .help(
          "Tensor-parallel ranks also split norms, dropout and the residual stream, along the sequence: less "
          "memory for the same communication. auto: with tensor parallelism.")
      .only_with(tensor_parallel)
      .idle("false");
  NRL_KEY(t, distributed.tp_comm_overlap)
      .on_off("policy.megatron_cfg.tp_comm_overlap", "pipelined", "none")
      .help(
          "Tensor-parallel communication beside GEMMs. bulk: in the backward pass, beside a GEMM that does "
          "not need it; pipelined: also pieces of the rows beside the GEMM on others; ring (with "
          "sequence_parallel): also the rows of one rank after another, which pass from neighbor to "
          "neighbor. auto: bulk on a GPU, none on a CPU.")
      .only_with(tensor_parallel)
      .idle("none");
  NRL_KEY(t, distributed.tp_comm_overlap_splits)
      .at_least(1)
      .at_most(256)
      .help("Pieces into which tp_comm_overlap: pipelined divides the rows of a rank; null: 4.")
      .only_with({is("distributed.tp_comm_overlap", {"pipelined"})});
  NRL_KEY(t, distributed.data_parallel_size)
      .at_least(1)
      .alias("policy.data_parallel_size")
      .help("Model replicas; auto: world / (tensor x pipeline x context). A given value is checked.");
  NRL_KEY(t, distributed.model_parallel)
      .alias("policy.model_parallel")
      .help(
          "Whether several ranks hold one copy of the model: checked against tensor_parallel_size x "
          "pipeline_parallel_size, never used to choose. null: not checked.");
  NRL_KEY(t, distributed.dp_replicate_size)
      .at_least(1)
      .alias("policy.dtensor_cfg.dp_replicate_size")
      .alias("distributed.num_distributed_optimizer_instances")
      .alias("policy.megatron_cfg.distributed_data_parallel_config.num_distributed_optimizer_instances")
      .help(
          "Copies of all shards: data-parallel ranks are divided into so many slices of consecutive ranks, "
          "each of which holds every shard. Gradients are reduced within a slice, then their shards across "
          "slices; weights are gathered within a slice. For hsdp, and for a hierarchical reduction with the "
          "other strategies that have shards.")
      .only_with(shards);
  NRL_KEY(t, distributed.shard_strategy)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy")
      .alias("distributed.fsdp_config.sharding_strategy")
      .on_off("policy.megatron_cfg.optimizer.use_distributed_optimizer", "optim", "ddp")
      .on_off("distributed.use_distributed_optimizer", "optim", "ddp")
      .help(
          "What is sharded over data-parallel ranks: nothing (ddp), the optimizer state (optim, ZeRO-1), "
          "gradients too (optim_grads, ZeRO-2), parameters too (optim_grads_params, ZeRO-3); hsdp: as "
          "optim_grads_params, within each of dp_replicate_size slices. ZeRO-2 reduces gradients after every "
          "microbatch, ZeRO-3 also gathers parameters for its forward and for its backward pass "
          "(docs/sharding.md).");
  NRL_KEY(t, distributed.overlap_grad_reduce)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce")
      .help("Reduce gradients during the backward pass.");
  NRL_KEY(t, distributed.overlap_param_gather)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather")
      .help(
          "Gather parameters during computation: updated ones during the next forward pass (optim, "
          "optim_grads; needs overlap_grad_reduce), sharded ones during the layer before the one that reads "
          "them (optim_grads_params, hsdp). Not with policy.cuda_graph.")
      .only_with(shards);
  NRL_KEY(t, distributed.grad_reduce_dtype)
      .resume(OnResume::reported)
      .one_of({"fp32", "bf16", "fp8"})
      .on_off("policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32", "fp32", "bf16")
      .help(
          "Type in which gradients are communicated; policy.optimizer.main_grads_dtype is the one in which "
          "they are kept. bf16 halves the bytes and rounds every rank's gradient and, without "
          "grad_reduce_fp32_accumulation, the sum: once with mpi and staged (and once per host "
          "if several hosts have several ranks), at every addition with nccl. Sums across dp_replicate_size "
          "slices are of the type in which gradients are kept. fp8 (ddp, optim) sends e4m3 numbers with a "
          "scale per "
          "128, "
          "about a quarter of the bytes; the ranks add the decoded numbers in fp32, see "
          "grad_reduce_error_feedback.");
  NRL_KEY(t, distributed.grad_reduce_error_feedback)
      .resume(OnResume::reported)
      .help(
          "Keep what each rank's gradients lose by rounding (fp32, as much memory as the gradients) and add "
          "it to those of the next step.")
      .only_with({is("distributed.grad_reduce_dtype", {"fp8"})});
  NRL_KEY(t, distributed.grad_reduce_fp32_accumulation)
      .resume(OnResume::reported)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.reduce_scatter_with_fp32_accumulation")
      .help(
          "Exchange the gradients (all-to-all) and add them in fp32 on every rank instead of in the "
          "communication library: only each rank's gradient is rounded (with ddp also the sum).")
      .only_with({is("distributed.grad_reduce_dtype", {"bf16"})});
  NRL_KEY(t, distributed.bucket_size_mb)
      .above(0)
      .at_most(65536)
      .help(
          "Gradients per bucket, in MiB of fp32. With optim_grads, optim_grads_params and hsdp, and with "
          "main_grads_dtype: bf16, a bucket also ends at every layer. auto: 4 for each rank that sums them, "
          "up to an eighth of the gradients of "
          "these ranks, and never below 40 (docs/sharding.md).");
  NRL_KEY(t, distributed.nccl_ub)
      .alias("policy.megatron_cfg.distributed_data_parallel_config.nccl_ub")
      .help(
          "Allocate the memory of the model by NCCL and register it with the groups (user buffers), so that "
          "NCCL needs no copies and fewer multiprocessors. Needs backend nccl. Never tried on GPUs.");
}

}  // namespace nrl::config_detail
