#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <sys/stat.h>

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

struct Bad {
  std::string yaml;
  int line, column;
  std::string message;  ///< part of what is printed
};

std::string repeat(std::string_view piece, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += piece;
  return out;
}

/// The problem at a place, or a test failure that shows what there was instead.
void require_problem(const Bad& bad) {
  const auto start = std::chrono::steady_clock::now();
  const ConfigResult result = load_text(bad.yaml);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string text = render(result.diagnostics);
  INFO(bad.yaml.substr(0, 200));
  INFO(text);
  CHECK(seconds < 5);
  CHECK(result.exit_code() == Exit::config);
  bool found = false;
  for (const Diagnostic& d : result.diagnostics)
    found = found || (d.line == bad.line && d.column == bad.column && contains(render({d}), bad.message));
  CHECK(found);
}

}  // namespace

TEST_CASE("malformed YAML is refused with its place", "[config]") {
  const Bad cases[] = {
      {",", 1, 1, "must be a mapping"},
      {",a", 1, 1, "must be a mapping"},
      {"policy: {}\n---\n,", 2, 1, "single document"},
      {"policy: {}\n...\ndata: 1", 2, 1, "single document"},
      {"a: &a [*a]", 1, 4, "anchors are not supported"},
      {"&a {k: *a}", 1, 1, "anchors are not supported"},
      {"policy: &a {*a: 1}", 1, 9, "anchors are not supported"},
      {"policy:\n  precision: *x", 2, 14, "aliases are not supported"},
      {"a: !!python/object:os.system 1", 1, 4, "tags are not supported"},
      {"policy:\n  <<: {precision: float32}", 2, 3, "merge keys are not supported"},
      {"policy:\n  precision: float32\n  precision: bfloat16\n", 3, 3, "first given at t.yaml:2:3"},
      {"data: {seed: 1, seed: 1}", 1, 17, "duplicate key 'seed'"},
      {"policy:\n  model_name: \"abc\n  precision: float32\n", 2, 15, "unclosed quote"},
      {"policy:\n  model_name: 'abc\n", 2, 15, "unclosed quote"},
      {"policy:\n  optimizer: {lr: 1\n", 2, 14, "unclosed '{'"},
      {"data:\n  split: [1, 2\n", 2, 10, "unclosed '['"},
      {"- 1\n- 2\n", 1, 1, "must be a mapping"},
      {"{policy: {}}", 1, 1, "not braces"},
      {"hello", 1, 5, "not valid YAML"},
      {"a: b: c", 1, 5, "not valid YAML"},
      {"policy.precision = \"bfloat16\"\npolicy.tensor_parallel_size = 2\n", 2, 29, "not with '='"},
      {"policy:\n  model: {}\n  precision = float32\ndata: {}\n", 3, 13, "write 'key: value'"},
      {"[1, 2]: 3", 1, 1, "a key must be plain text"},
      {"policy:\n\tmodel_name: x", 2, 1, "a tab in the indentation"},
      {"a: 1\nb: \xff\n", 2, 4, "0xff"},
      {"a: \xc0\xaf", 1, 4, "UTF-8"},
      {"a: \xed\xa0\x80", 1, 4, "UTF-8"},
      {std::string("a: 1\0", 5), 1, 5, "NUL"},
      {"a: \x1b[31m", 1, 4, "control character 0x1b"},
      {"data:\n  train: {data_path: \"a\\0b\"}", 2, 22, "control characters"},
  };
  for (const Bad& bad : cases) require_problem(bad);
}

TEST_CASE("deep nesting is refused before it costs stack", "[config]") {
  require_problem({repeat("{a: ", 100000), 1, 253, "nested deeper than 64"});
  require_problem({repeat("- ", 100000), 1, 129, "nested deeper than 64"});
  require_problem({repeat("? ", 100000), 1, 129, "nested deeper than 64"});
  require_problem({"a: " + repeat("[", 65) + repeat("]", 65), 1, 67, "nested deeper than 64"});
  const ConfigResult brackets = load_text(repeat("[", 100000));
  CHECK(contains(render(brackets.diagnostics), "nested deeper than 64"));
}

TEST_CASE("alias bombs do not expand", "[config]") {
  std::string bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n";
  for (int i = 1; i < 10; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + repeat(before + ",", 8) + before +
            "]\n";
  }
  require_problem({bomb, 1, 5, "anchors are not supported"});
}

TEST_CASE("too large a file is refused", "[config]") {
  require_problem({"# " + std::string((1 << 20) + 10, 'x'), 1, 1, "at most 1 MiB"});
}

TEST_CASE("inputs of a megabyte are read in linear time", "[config]") {
  std::string keys;
  for (int i = 0; i < 60000; ++i) keys += "polcy" + std::to_string(i) + ": 1\n";
  const std::string cases[] = {"data: {train: {data_path: [" + repeat("a,", 500000) + "]}}",
                               keys,
                               "policy: {" + repeat("x: 1, ", 170000) + "}",
                               repeat("a: |\n  b\n", 100000),
                               repeat("[],", 300000),
                               repeat("{", 500000) + repeat("}", 500000),
                               repeat("\n", 1000000)};
  for (const std::string& text : cases) {
    const auto start = std::chrono::steady_clock::now();
    const ConfigResult result = load_text(text);
    CHECK(!result.ok());
    CHECK(result.diagnostics.size() <= 100);
    INFO(text.substr(0, 30));
    CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < 10);
  }
}

TEST_CASE("a value of the wrong kind is refused where it stands", "[config]") {
  const Bad cases[] = {
      {"pretrain:\n  max_num_steps: 010", 2, 18, "did you mean 10?"},
      {"pretrain:\n  max_num_steps: 0x10", 2, 18, "expected integer"},
      {"pretrain:\n  max_num_steps: 1_000", 2, 18, "did you mean 1000?"},
      {"pretrain:\n  max_num_steps: 1e3", 2, 18, "did you mean 1000?"},
      {"pretrain:\n  max_num_steps: 3.0", 2, 18, "did you mean 3?"},
      {"pretrain:\n  max_num_steps: 2.5k", 2, 18, "did you mean 2500?"},
      {"pretrain:\n  max_num_steps: 5 GB", 2, 18, "expected integer"},
      {"pretrain:\n  max_num_steps: \"10\"", 2, 18, "remove the quotes"},
      {"pretrain:\n  max_num_steps: 99999999999999999999", 2, 18, "out of range"},
      {"pretrain:\n  val_batches: 2147483648", 2, 16, "out of range"},
      {"pretrain:\n  val_batches: 20k", 2, 16, "did you mean 20000?"},
      {"pretrain:\n  seed: -1", 2, 9, "out of range"},
      {"pretrain:\n  seed: +1", 2, 9, "did you mean 1?"},
      {"pretrain:\n  seed: 1:30", 2, 9, "expected integer"},
      {"pretrain:\n  seed: [1]", 2, 9, "found a list"},
      {"pretrain:\n  seed:", 2, 3, "found nothing"},
      {"pretrain:\n  seed: ~", 2, 9, "expected integer"},
      {"pretrain:\n  val_at_end: yes", 2, 15, "write true or false"},
      {"pretrain:\n  val_at_end: 1", 2, 15, "expected true or false"},
      {"pretrain: 3", 1, 11, "expected a mapping"},
      {"pretrain: [a]", 1, 11, "expected a mapping"},
      {"pretrain:\n  on_nonfinite: Skip", 2, 17, "did you mean 'skip'?"},
      {"policy:\n  loss_scaling: \"2**15\"", 2, 17, "write 32768, or 2**15 without quotes"},
      {"policy:\n  loss_scaling: 2^15", 2, 17, "write 32768"},
      {"policy:\n  train_global_batch_size: 2**5", 2, 28, "write 32"},
      {"policy:\n  optimizer: {lr: .nan}", 2, 19, "expected number"},
      {"policy:\n  optimizer: {lr: .inf}", 2, 19, "expected number"},
      {"policy:\n  optimizer: {lr: 1e400}", 2, 19, "expected number"},
      {"policy:\n  optimizer: {lr: .5}", 2, 19, "did you mean 0.5?"},
      {"policy:\n  optimizer: {lr: 0}", 2, 19, "out of range"},
      {"policy:\n  optimizer: {betas: [0.9]}", 2, 22, "list of 2 numbers"},
      {"policy:\n  optimizer: {betas: [0.9, 1.0]}", 2, 28, "out of range"},
      {"policy:\n  optimizer: {betas: [0.9, x]}", 2, 28, "found 'x'"},
      {"policy:\n  model: {hidden_size: big}", 2, 24, "found 'big'"},
      {"policy:\n  model: {rope_scaling: llama3}", 2, 25, "expected a mapping"},
      {"policy:\n  model_name: ???", 2, 15, "must be given"},
      {"data:\n  split: \"1,2\"", 2, 10, "list of 3 numbers"},
      {"data:\n  split: \"1,2,x\"", 2, 10, "found 'x'"},
      {"data:\n  train: {data_path: [a, {b: c}]}", 2, 26, "found a mapping"},
      {"kernels: {isa: AVX2}", 1, 16, "did you mean 'avx2'?"},
      {"pretrain:\n  s\xc3\xa9"
       "ed: \xc3\xa9",
       2, 3, "did you mean 'seed'?"},
  };
  for (const Bad& bad : cases) require_problem(bad);
}

TEST_CASE("unknown and foreign keys are refused with advice", "[config]") {
  const Bad cases[] = {
      {"distributed:\n  tensor_paralel_size: 2", 2, 3, "did you mean 'tensor_parallel_size'?"},
      {"policy:\n  lr: 1e-3", 2, 3, "did you mean 'policy.optimizer.lr'?"},
      {"lr: 1e-3", 1, 1, "did you mean 'policy.optimizer.lr'?"},
      {"optimizer: {lr: 1}", 1, 1, "did you mean 'policy.optimizer'?"},
      {"Policy: {}", 1, 1, "did you mean 'policy'?"},
      {"policy:\n  optimizer: {LR: 1}", 2, 15, "did you mean 'lr'?"},
      {"policy:\n  model: {hiden_size: 1}", 2, 11, "did you mean 'hidden_size'?"},
      {"pretrain: {qqqqqq: 1}", 1, 12, "keys here: max_num_steps, max_num_epochs"},
      {"trainer_class: DPOTrainer", 1, 1, "write algorithm: pretrain"},
      {"cluster: {resources_per_worker: {GPU: 2}}", 1, 11, "mpirun -n RANKS or srun"},
      {"policy: {dtensor_cfg: {lora_cfg: {dropout_position: post}}}", 1, 35,
       "applies to the adapter's input"},
      {"policy: {lora: {r: 0}}", 1, 20, "out of range"},
      {"worker_groups: [{name: policy}]", 1, 1, "separate groups of ranks are not supported yet"},
      {"policy . precision: float32", 1, 1, "did you mean 'policy.precision'?"},
      {"policy . model: {model_type: llama}", 1, 1, "a key is written without spaces"},
      {"include: a.yaml", 1, 1, "defaults"},
      {"policy: {offload_optimizer: 1.5}", 1, 29, "out of range"},
      {"policy: {offload_optimizer: all}", 1, 29, "expected true, false or a number from 0 to 1"},
      {"policy: {offload_optimizer: \"true\"}", 1, 29, "expected true, false or a number from 0 to 1"},
      {"algorithm: pretrain\ndistill: {topk: 64}", 2, 1, "algorithm distill"},
      {"distill: {topk: 0}", 1, 17, "out of range"},
      {"distill: {kl_type: both}", 1, 20, "forward | reverse | mixed"},
      {"distill: {temperature: 0}", 1, 24, "out of range"},
      {"teacher: {model_name: large}", 1, 1, "the teacher of what the student"},
      {"algorithm: pretrain\ndpo: {loss_type: sigmoid}", 2, 1, "algorithm dpo"},
  };
  for (const Bad& bad : cases) require_problem(bad);
}

TEST_CASE("features that do not exist yet are refused, their defaults are not", "[config]") {
  const Bad cases[] = {
      {"grpo: {max_rollout_turns: 2}", 1, 27, "not supported yet"},
      {"policy: {sequence_packing: {sequence_length_round: 8}}", 1, 52, "not supported yet"},
      {"checkpointing: {higher_is_better: true}", 1, 35, "remove it or set it to false"},
      {"logger: {swanlab_enabled: true}", 1, 27, "swanlab convert reads the event files"},
      {"data: {shuffle: false}", 1, 17, "remove it or set it to true"},
      {"logger: {mlflow_enabled: true, mlflow: {tracking_uri: 'http://host:5000'}}", 1, 55,
       "mlflow migrate-filestore"},
      {"logger: {mlflow_enabled: true, mlflow: {tracking_uri: 'sqlite:///m.db'}}", 1, 55,
       "only directories are supported"},
      {"logger: {mlflow_enabled: true, mlflow: {tracking_uri: databricks}}", 1, 55, "only directories"},
      {"logger: {mlflow_enabled: true, mlflow: {tracking_uri: ''}}", 1, 55, "tracking_uri is empty"},
      {"logger: {tensorboard_enabled: true, tensorboard: {log_dir: ''}}", 1, 60, "log_dir is empty"},
  };
  for (const Bad& bad : cases) require_problem(bad);
  const ConfigResult inert = load_text(base_yaml +
                                       "distributed: {tensor_parallel_size: 1, sequence_parallel: auto}\n"
                                       "checkpointing: {higher_is_better: false}\n"
                                       "logger: {wandb_enabled: false, swanlab_enabled: false}\n");
  INFO(render(inert.diagnostics));
  CHECK(inert.ok());
}

TEST_CASE("keys that contradict each other are refused", "[config]") {
  struct Contradiction {
    std::vector<std::string> overrides;
    std::string message;
  };
  const Contradiction cases[] = {
      {{"device=cpu", "policy.cuda_graph=true"}, "policy.cuda_graph: true needs a GPU"},
      {{"device=cpu", "kernels.autotune=true"}, "kernels.autotune: true has no effect without a GPU"},
      {{"device=cuda", "policy.offload_optimizer=true", "memory.offload_dir=/tmp"},
       "memory.offload_dir has no effect on a GPU"},
      {{"device=cpu", "policy.logits_dtype=bfloat16"}, "needs policy.precision: bfloat16"},
      {{"device=cuda", "policy.logits_dtype=bfloat16", "policy.precision=float32"},
       "needs policy.precision: bfloat16"},
      {{"policy.loss_scaling=dynamic", "distributed.grad_reduce_dtype=fp8"},
       "policy.loss_scaling: dynamic with distributed.grad_reduce_error_feedback: true"},
      {{"policy.precision=float16", "distributed.grad_reduce_dtype=fp8"},
       "policy.loss_scaling: auto is dynamic in float16 with distributed.grad_reduce_error_feedback: true"},
      {{"policy.precision=float16", "policy.logits_dtype=bfloat16"},
       "policy.logits_dtype: bfloat16 does not go with policy.precision: float16"},
      {{"policy.precision=fp16", "policy.fp8_cfg.enabled=true"},
       "policy.fp8_cfg.enabled: true does not go with policy.precision: float16"},
      {{"policy.optimizer.use_precision_aware_optimizer=true", "policy.optimizer.main_grads_dtype=bf16"},
       "use optim, which one rank may have as well"},
      {{"policy.optimizer.use_precision_aware_optimizer=true", "policy.optimizer.main_grads_dtype=bf16",
        "distributed.shard_strategy=optim", "distributed.grad_reduce_dtype=fp8"},
       "distributed.grad_reduce_dtype: fp8 needs gradients that are kept in fp32"},
      {{"policy.optimizer.main_params_dtype=fp16"}, "main_params_dtype: expected fp32 | bf16, found 'fp16'"},
      {{"policy.precision=bfloat16", "policy.optimizer.use_precision_aware_optimizer=true",
        "policy.optimizer.main_params_dtype=bf16", "policy.optimizer.store_param_remainders=true"},
       "store_param_remainders: true needs master weights, and main_params_dtype: bf16 has none"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_param=true", "policy.fp8_cfg.cache_weights=true"},
       "cache_weights: true has no effect with fp8_param: true"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
        "policy.fp8_cfg.num_first_layers_in_bf16=1"},
       "num_first_layers_in_bf16: 1 is not supported with delayed scales"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=delayed",
        "policy.fp8_cfg.num_last_layers_in_bf16=2"},
       "num_last_layers_in_bf16: 2 is not supported with delayed scales"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=mxfp8", "policy.fp8_cfg.fp8_param=true"},
       "fp8_param: true is not supported with mxfp8: the transposed copy has scales of its own"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_param=true", "logger.sample_period=5",
        "distributed.shard_strategy=optim"},
       "logger.sample_period: 5 needs all parameters on rank 0, which has them in FP8"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=blockwise",
        "policy.fp8_cfg.fp8_dot_product_attention=true"},
       "fp8_dot_product_attention: true is not supported with blockwise: attention takes scales of tensors"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_recipe=mxfp8",
        "policy.megatron_cfg.fp8_cfg.fp8_dot_product_attention=true"},
       "fp8_dot_product_attention: true is not supported with mxfp8"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8=e4m3",
        "policy.fp8_cfg.fp8_dot_product_attention=true"},
       "is not supported with policy.fp8_cfg.fp8: e4m3: gradients of scores span more than e4m3 does"},
      {{"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_dot_product_attention=true",
        "distributed.context_parallel_size=2"},
       "is not supported with distributed.context_parallel_size: 2: ranks exchange keys and values"},
      {{"policy.fp8_cfg.enabled=true", "distributed.tensor_parallel_size=2",
        "policy.fp8_cfg.fp8_recipe=blockwise", "distributed.tp_comm_overlap=pipelined"},
       "tp_comm_overlap: pipelined is not supported with blockwise"},
      {{"distributed.shard_strategy=hsdp"}, "needs distributed.dp_replicate_size above 1"},
      {{"distributed.shard_strategy=optim_grads", "distributed.grad_reduce_dtype=fp8"},
       "grad_reduce_dtype: fp8 needs distributed.shard_strategy: ddp or optim"},
      {{"distributed.shard_strategy=optim_grads_params", "distributed.grad_reduce_dtype=fp8"},
       "grad_reduce_dtype: fp8 needs distributed.shard_strategy: ddp or optim"},
      {{"distributed.shard_strategy=fsdp", "device=cuda", "policy.cuda_graph=true"},
       "a CUDA graph replays a step without the host"},
      {{"distributed.pipeline_parallel_size=2", "device=cuda", "policy.cuda_graph=true"},
       "does not promise that its kernels run side by side"},
      {{"distributed.shard_strategy=fsdp", "logger.sample_period=5"}, "needs all parameters on rank 0"},
      {{"distributed.tensor_parallel_size=2", "logger.sample_period=5"}, "needs the whole model on one rank"},
      {{"distributed.tensor_parallel_size=2", "distributed.sequence_parallel=false",
        "distributed.tp_comm_overlap=ring"},
       "without sequence parallelism every rank has all rows"},
      {{"policy.recompute.modules=[norm,gather]"}, "gather matches nothing"},
      {{"distributed.tensor_parallel_size=2", "distributed.sequence_parallel=false",
        "policy.recompute.modules=gather"},
       "gather matches nothing"},
      {{"distributed.overlap_param_gather=true", "distributed.shard_strategy=optim",
        "distributed.overlap_grad_reduce=false"},
       "needs distributed.overlap_grad_reduce: true"},
      {{"distributed.overlap_param_gather=true", "distributed.shard_strategy=optim", "device=cuda",
        "policy.cuda_graph=true"},
       "cross the end of a step"},
      {{"device=cpu", "kernels.gemm_tuning=configs"}, "kernels.gemm_tuning has no effect without a GPU"},
      {{"kernels.gemm_tuning=\"\""}, "kernels.gemm_tuning is empty"},
      {{"distributed.context_parallel_size=3"},
       "policy.max_total_sequence_length 1024 is not a multiple of 6"},
      {{"distributed.context_parallel_size=2", "distributed.cp_comm_type=[]"},
       "distributed.cp_comm_type is an empty list"},
      {{"distributed.context_parallel_size=4", "distributed.cp_comm_type=a2a+p2p"},
       "cp_comm_type a2a+p2p needs distributed.hierarchical_context_parallel_sizes"},
      {{"distributed.context_parallel_size=4", "distributed.cp_comm_type=[p2p,a2a+p2p]",
        "distributed.hierarchical_context_parallel_sizes=[2,4]"},
       "2 x 4 is not distributed.context_parallel_size 4"},
      {{"device=cpu", "distributed.backend=nccl"}, "requires device: cuda"},
      {{"device=cuda", "distributed.backend=mpi"}, "supports host memory only"},
      {{"profiling.enabled=true", "profiling.steps=5:3"}, "profiling.steps is"},
      {{"profiling.enabled=true", "profiling.steps=3:6", "profiling.every=2"}, "profiling.every is 2"},
      {{"profiling.enabled=true", "profiling.ranks=some"}, "profiling.ranks is [some]"},
      {{"profiling.enabled=true", "profiling.ranks=[auto,1]"}, "profiling.ranks is [auto, 1]"},
      {{"training.mixed_precision=true", "policy.precision=bogus"}, "expected auto | float32"},
      {{"policy.train_global_batch_size=10", "policy.train_micro_batch_size=4"}, "not a multiple of micro 4"},
      {{"policy.train_global_batch_size=12", "policy.train_micro_batch_size=2",
        "policy.gradient_accumulation_steps=4"},
       "is not a multiple of micro 2 x accumulation 4 = 8"},
      {{"policy.optimizer.lr=1e-4", "policy.scheduler.min_lr=1e-3"}, "min_lr 0.001 is above lr 0.0001"},
      {{"policy.optimizer.eps=1e-60"}, "policy.optimizer.eps"},
      {{"policy.optimizer.betas=[0.9, 0.99999999999]"}, "policy.optimizer.betas"},
      {{"policy.scheduler.lr_decay_style=WSD"}, "WSD needs"},
      {{"policy.scheduler.lr_decay_style=step"}, "step needs policy.scheduler.lr_step_iters"},
      {{"policy.scheduler.lr_decay_style=cyclical"}, "cyclical needs policy.scheduler.lr_cycle_iters"},
      {{"policy.scheduler.lr_warmup_iters=5", "policy.scheduler.warmup_ratio=0.1"}, "given twice"},
      {{"policy.scheduler.lr_warmup_iters=11", "policy.scheduler.lr_decay_iters=10"},
       "longer than lr_decay_iters (10)"},
      {{"policy.scheduler.lr_decay_style=WSD", "policy.scheduler.lr_wsd_decay_iters=7",
        "policy.scheduler.lr_warmup_iters=4", "policy.scheduler.lr_decay_iters=10"},
       "warm-up (4) and final decay (7) are longer than lr_decay_iters (10)"},
      {{"pretrain.val_period=5"}, "no validation data"},
      {{"pretrain.val_at_start=true"}, "no validation data"},
      {{"pretrain.val_at_end=true"}, "no validation data"},
      {{"data.validation.data_path=v", "data.split=98,1,1", "pretrain.val_at_end=true"},
       "both give validation data"},
      {{"data.split=0,1,1"}, "nothing for training"},
      {{"data.train.weights=[1,2]"}, "2 numbers for 1 paths"},
      {{"policy.attention.memory_efficient=false"}, "not supported"},
      {{"policy.checkpoint_every=2", "policy.checkpoint_ratio=0.5"},
       "policy.checkpoint_ratio and policy.checkpoint_every both say which layers are recomputed"},
      {{"policy.checkpoint_layers=[0]", "policy.checkpoint_ratio=0.5"},
       "policy.checkpoint_ratio and policy.checkpoint_layers both say"},
      {{"policy.checkpoint_layers=[3, 0, 3]"}, "has layer 3 twice"},
      {{"policy.checkpoint_layers=[]"}, "policy.checkpoint_layers is an empty list"},
      {{"policy.gradient_checkpointing=true", "policy.recompute.granularity=selective"},
       "policy.gradient_checkpointing and policy.recompute.granularity say in two ways what is recomputed"},
      {{"policy.checkpoint_every=2", "policy.recompute.modules=[norm]"},
       "policy.checkpoint_every and policy.recompute.modules say in two ways"},
      {{"policy.checkpoint_ratio=1", "policy.recompute.modules=[norm]"},
       "policy.checkpoint_ratio and policy.recompute.modules say in two ways"},
      {{"policy.checkpoint_layers=[0]", "policy.recompute=full"},
       "policy.checkpoint_layers and policy.recompute.granularity say in two ways"},
      {{"policy.recompute.granularity=full", "policy.recompute.method=uniform"},
       "policy.recompute.method needs policy.recompute.num_layers"},
      {{"policy.recompute.granularity=full", "policy.recompute.num_layers=2"},
       "policy.recompute.num_layers needs policy.recompute.method"},
      {{"policy.offload_activations=1.5"}, "expected true, false or a number from 0 to 1"},
      {{"policy.offload_activations=0.5", "policy.offload_layers=[0]"},
       "both say which layers are offloaded"},
      {{"policy.offload_activations=true", "policy.offload_layers=[1, 0, 1]"}, "has layer 1 twice"},
      {{"policy.offload_activations=true", "policy.offload_modules=[qkv, input, qkv]"}, "has qkv twice"},
      {{"policy.offload_activations=true", "policy.offload_modules=[bogus]"}, "expected list of: norm"},
      {{"policy.offload_activations=true", "policy.offload_modules=[input, norm]",
        "policy.recompute.modules=[norm]"},
       "norm is recomputed, so that there is nothing to offload"},
      {{"policy.offload_activations=true", "policy.offload_modules=[activation]",
        "policy.recompute.modules=[mlp]"},
       "activation is recomputed"},
      {{"policy.offload_activations=true", "policy.offload_modules=[norm]",
        "policy.recompute.granularity=selective"},
       "norm is recomputed"},
      {{"policy.offload_activations=true", "policy.offload_modules=[mlp]",
        "policy.recompute.granularity=full"},
       "mlp is recomputed in all layers"},
      {{"policy.offload_activations=true", "policy.offload_modules=[qkv]",
        "policy.gradient_checkpointing=true"},
       "qkv is recomputed in all layers"},
      {{"policy.offload_activations=true", "policy.offload_modules=[qkv]", "policy.offload_layers=[0]",
        "policy.checkpoint_layers=[1, 0]"},
       "qkv is recomputed in all layers of policy.offload_layers"},
      {{"policy.recompute.modules=[norm, mlp, norm]"}, "policy.recompute.modules has norm twice"},
      {{"policy.recompute=full", "policy.gradient_checkpointing=false"},
       "policy.gradient_checkpointing is false, but policy.recompute.granularity is full"},
      {{"policy.precision=float16", "logger.sample_period=2"},
       "logger.sample_period: 2 does not go with policy.precision: float16"},
      {{"distributed.expert_parallel_size=2", "logger.sample_period=2"},
       "needs the whole model on one rank, which has a part of the experts"},
      {{"distributed.expert_tensor_parallel_size=2", "logger.sample_period=2"},
       "needs the whole model on one rank, which has a part of every expert"},
      {{"policy.train_global_batch_size=8", "policy.train_micro_batch_size=3",
        "policy.gradient_accumulation_steps=2"},
       "train_global_batch_size 8 is not a multiple of micro 3 x accumulation 2 = 6"},
      {{"policy.offload_activations=true", "policy.offload_modules=[gather]"}, "gather matches nothing"},
      {{"pretrain.max_num_steps=null"}, "must be given"},
      {{"data.train.data_path=[]"}, "data.train.data_path must be given"},
      {{"policy.mixed_precision=true", "policy.precision=float32"}, "contradicts"},
      {{"training.fp16=true", "training.bf16=true"}, "policy.precision is given twice with different values"},
      {{"training.fp16=true", "policy.precision=bfloat16"},
       "first as 'training.fp16' at command line: training.fp16=true"},
      {{"training.batch_size=8", "policy.train_global_batch_size=8", "policy.gradient_accumulation_steps=2"},
       "training.batch_size: 8 is understood as policy.train_global_batch_size: 16 (8 x "
       "policy.gradient_accumulation_steps 2), which contradicts policy.train_global_batch_size: 8"},
      {{"training.batch_size=1000000000", "policy.gradient_accumulation_steps=10000000000"},
       "x policy.gradient_accumulation_steps 10000000000 is too large"},
      {{"training.batch_size=many"}, "expected integer from 1"},
      {{"training.batch_size=${pretrain.seed}", "policy.gradient_accumulation_steps=2"},
       "are multiplied: expected numbers, not references"},
      {{"policy.model_parallel=true"},
       "distributed.model_parallel: true, but tensor_parallel_size 1 x pipeline_parallel_size 1 = 1: every "
       "rank holds the whole model"},
      {{"policy.model_parallel=false", "distributed.pipeline_parallel_size=2"},
       "= 2: several ranks hold one copy of the model"},
      {{"device=cuda", "policy.pin_memory=false"}, "policy.pin_memory: false is not supported on a GPU"},
      {{"device=cuda", "data.pin_memory=false"}, "data.pin_memory: false is not supported on a GPU"},
      {{"kernels.cuda_graph.scope=full"}, "'kernels.cuda_graph.scope' is a known key, but not supported yet"},
      {{"monitoring.stability.on_instability=rollback", "checkpointing.save_period=0"},
       "rollback has no checkpoint to go back to with checkpointing.save_period: 0"},
      {{"monitoring.stability.on_instability=rollback", "checkpointing.enabled=false"},
       "rollback has no checkpoint to go back to with checkpointing.enabled: false"},
      {{"monitoring.stability.on_instability=rollback", "checkpointing.save_period=5",
        "checkpointing.keep_latest_k=1"},
       "rollback has no checkpoint to go back to with checkpointing.keep_latest_k: 1"},
      {{"monitoring.stability.lr_factor=0.1"}, "has no effect without"},
      {{"monitoring.stability.window=50"}, "has no effect without"},
      {{"monitoring.interval=10"}, "has no effect without"},
      {{"monitoring.alerting.enabled=true", "monitoring.alerting.rules=[\"train/los > 3\"]"},
       "\"train/los > 3\": at character 1: unknown metric 'train/los'; did you mean 'train/loss'?"},
      {{"monitoring.alerting.enabled=true", "monitoring.alerting.rules=[\"node.0.cpu > 1\"]"},
       "write logger.monitor_gpus: true"},
      {{"monitoring.alerting.enabled=true",
        "monitoring.alerting.webhook=https://hooks.slack.com/services/T0"},
       "the address is a secret, which a configuration must not hold"},
      {{"cluster.gpus_per_node=8", "cluster.fabric.leaf_ranks=12"},
       "cluster.fabric.leaf_ranks is 12, which cuts nodes of 8 ranks"},
      {{"cluster.gpus_per_node=4", "cluster.segment_size=18", "cluster.fabric.leaf_ranks=32"},
       "cluster.fabric.leaf_ranks is 32, which cuts NVLink domains of 72 ranks"},
      {{"cluster.world_size=64", "cluster.fabric.oversubscription=2", "cluster.fabric.rail_optimized=false"},
       "limits links between leaf switches, but all 64 ranks are below one"},
      {{"device=cuda", "reliability.recompute_check_period=100"},
       "reliability.recompute_check_period compares bits, which are not reproducible on a GPU"},
      {{"monitoring.alerting.enabled=true", "monitoring.alerting.slack_notifications=true"},
       "there is no address to post alerts to"},
      {{"monitoring.alerting.enabled=true", "monitoring.alerting.email_notifications=true"},
       "nrl-train sends no mail itself"},
      {{"worker_groups.x=1"}, "'worker_groups' is not a key of nrl-train"},
      {{"worker_groups.x=1"}, "separate groups of ranks are not supported yet"},
      {{"policy.precision =float32"}, "did you mean 'policy.precision'?"},
      {{"policy.precision = float32"}, "a key is written without spaces"},
      {{"="}, "without spaces around '='"},
      {{"policy.mixed_precision=true", "policy.precision=fp32"}, "contradicts"},
  };
  for (const Contradiction& c : cases) {
    const ConfigResult result = load_base(c.overrides);
    INFO(c.message);
    INFO(render(result.diagnostics));
    CHECK(result.exit_code() == Exit::config);
    CHECK(contains(render(result.diagnostics), c.message));
  }
  require_problem(
      {base_yaml + "training: {fp16: true, bf16: true}", 7, 24, "given twice with different values"});
}

TEST_CASE("an error is drawn with its line and a caret under the place", "[config]") {
  const ConfigResult result = load_text("distributed:\n  tensor_paralel_size: 2\n" + base_yaml);
  CHECK(render(result.diagnostics) ==
        "error: unknown key 'tensor_paralel_size'\n"
        "  --> t.yaml:2:3\n"
        "   |\n"
        " 1 | distributed:\n"
        " 2 |   tensor_paralel_size: 2\n"
        "   |   ^^^^^^^^^^^^^^^^^^^ did you mean 'tensor_parallel_size'?  (distributed.tensor_parallel_size: "
        "integer "
        "from 1, default 1)\n"
        "   = keys here: backend, tensor_parallel_size, pipeline_parallel_size, virtual_pipeline_size, "
        "pipeline_schedule, num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage, "
        "account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split, pipeline_layout, "
        "microbatch_group_size_per_vp_stage, overlap_p2p_comm, ... (19 more: "
        "nrl-train explain distributed)\n"
        "\n"
        "1 error, nothing was started. (exit 78)\n");
  // Columns and carets count characters, not bytes; a gap to the section's line is shown.
  const ConfigResult wide = load_text(
      "logger:\n  log_interval: 1\n  log_dir: \"\xc3\xa9\xc3\xa9\"  # \xc3\xa9\n  progress: fast\n" +
      base_yaml);
  CHECK(render(wide.diagnostics) ==
        "error: logger.progress: expected auto | bar | plain | json, found 'fast'\n"
        "  --> t.yaml:4:13\n"
        "   |\n"
        " 1 | logger:\n"
        "   | ...\n"
        " 4 |   progress: fast\n"
        "   |             ^^^^\n"
        "\n"
        "1 error, nothing was started. (exit 78)\n");
  const ConfigResult flow = load_text("logger: {log_dir: \"\xc3\xa9\xc3\xa9\", progress: fast}\n");
  CHECK(contains(render(flow.diagnostics),
                 "  --> t.yaml:1:35\n"
                 "   |\n"
                 " 1 | logger: {log_dir: \"\xc3\xa9\xc3\xa9\", progress: fast}\n"
                 "   |                                   ^^^^\n"));
  const ConfigResult override = load_base({"policy.optimizer.lr=fast"});
  CHECK(render(override.diagnostics) ==
        "error: policy.optimizer.lr: expected number above 0 to 1000, found 'fast'\n"
        "  --> command line: policy.optimizer.lr=fast\n"
        "   |\n"
        "   | policy.optimizer.lr=fast\n"
        "   |                     ^^^^\n"
        "\n"
        "1 error, nothing was started. (exit 78)\n");
}

TEST_CASE("all problems are found at once, in file order", "[config]") {
  const ConfigResult result = load_text(
      "policy:\n"
      "  precisoin: x\n"
      "  train_global_batch_size: many\n"
      "  scheduler: {min_lr: 1}\n"  // a conflict of two good keys
      "logger: {progress: 1}\n"
      "data:\n"
      "  split: 1,0,0\n"  // no data_path
      "pretrain: {max_num_steps: 5, val_period: 2}\n");
  INFO(render(result.diagnostics));
  std::vector<int> lines;
  for (const Diagnostic& d : result.diagnostics) lines.push_back(d.line);
  // No model; precisoin; batch; min_lr; progress; data_path at its section; evaluation without data.
  CHECK(lines == std::vector{1, 2, 3, 4, 5, 6, 8});
  CHECK(contains(render(result.diagnostics), "7 errors, nothing was started. (exit 78)"));
  CHECK(!result.sound("policy.train_global_batch_size"));
  CHECK(!result.sound("policy.precision"));  // probably meant
  CHECK(!result.sound("policy"));
  CHECK(result.sound("policy.optimizer"));
}

TEST_CASE("a problem is not followed by those that it causes", "[config]") {
  const std::vector<std::string> cases[] = {
      {"data.train.data_pth=x", "data.train.data_path=[]"},
      {"policy.optimizer.lr=fast", "policy.scheduler.min_lr=0.1"},
      {"pretrain.max_num_step=5", "pretrain.max_num_steps=null"},
      {"policy.scheduler.lr_decay_style=WDS", "policy.scheduler.lr_wsd_decay_iters=5"},
      {"policy.train_micro_batch_size=x", "policy.train_global_batch_size=7"},
      {"data.split=1", "pretrain.val_period=5"}};
  for (const auto& overrides : cases) {
    const ConfigResult result = load_base(overrides);
    INFO(render(result.diagnostics));
    CHECK(result.diagnostics.size() == 1);
    // The default batch of 32 on 3 ranks is independent, except for the microbatch.
    CHECK(validate_for_world(result, 3).empty() == overrides[0].starts_with("policy.train_micro"));
  }
  // Text that could not be parsed causes no errors about missing keys.
  const ConfigResult broken = load_text("policy: {model: {model_type: llama}\n");
  CHECK(broken.diagnostics.size() == 1);
  CHECK(validate_for_world(broken, 3).empty());
}

TEST_CASE("input cannot control the terminal, and long values are cut", "[config]") {
  const std::string evil = "\xe2\x80\xae\xc2\x9b";  // a bidirectional override, and C1's escape sequence
  const std::string long_text(5000, 'x');
  for (const std::string& text : std::vector<std::string>{
           "\x1b[2J: 1\n" + base_yaml,
           base_yaml + "logger: {log_dir: \"\\e[31m\", progress: \"\\r\\e]0;x\\a\"}\n",
           base_yaml + "\xe2\x80\xae" + "key: 1\n", base_yaml + "logger: {progress: \xe2\x80\xaeoff}\n",
           "a: \xff\x1b\n", base_yaml + long_text + ": 1\n",
           base_yaml + "logger: {progress: " + long_text + "}\n",
           base_yaml + "logger: {log_dir: ${" + long_text + "}}\n"}) {
    const std::string shown =
        render(load_config_text(text, "dir\x1b[31m/\nerror: t" + evil + ".yaml").diagnostics);
    INFO(shown.substr(0, 2000));
    CHECK(contains(shown, "dir\\x1b[31m/\\nerror: t\\u202e\\x9b.yaml"));
    CHECK(shown.find_first_of("\x1b\r\a") == std::string::npos);
    CHECK(!contains(shown, evil.substr(0, 3)));
    CHECK(!contains(shown, evil.substr(3)));
    CHECK(shown.size() < 3000);
  }
  CHECK(render(load_base({"logger.progress=" + long_text}).diagnostics).size() < 2000);
  CHECK(render(load_base({long_text}).diagnostics).size() < 2000);
}

TEST_CASE("a message about 100,000 keys is short", "[config]") {
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += fmt::format("k{}: 1\n", i);
  const ConfigResult result = load_text(text);
  const std::string shown = render(result.diagnostics);
  INFO(shown);
  CHECK(shown.size() <= 4000);
  CHECK(contains(shown, "unknown key 'k0'"));
  CHECK(contains(shown, " more\n\n"));
  CHECK(contains(shown, "errors, nothing was started. (exit 78)"));
  try {
    raise(result.diagnostics);
  } catch (const Error& e) {
    CHECK(std::string_view(e.what()).size() <= 4000);
  }
}

TEST_CASE("files that cannot be read", "[config]") {
  const auto folder = std::filesystem::temp_directory_path() / ("nrl_config_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const auto missing = load_config((folder / "none.yaml").string());
  CHECK(missing.exit_code() == Exit::no_input);
  CHECK(contains(render(missing.diagnostics), "No such file"));
  CHECK(contains(render(missing.diagnostics), "(exit 66)"));
  CHECK(load_config(folder.string()).exit_code() == Exit::no_input);
  const std::string fifo = (folder / "fifo").string();
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  CHECK(load_config(fifo).exit_code() == Exit::no_input);  // returns instead of waiting for a writer
  std::ofstream(folder / "big.yaml") << "# " << std::string((1 << 20) + 1, 'x');
  CHECK(load_config((folder / "big.yaml").string()).exit_code() == Exit::config);
  std::filesystem::remove_all(folder);
}
