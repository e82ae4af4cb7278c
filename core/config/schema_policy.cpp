// Keys of the model, its batch, precision, memory, optimizer and schedule.
#include <spdlog/fmt/fmt.h>

#include "core/config/fp8_recipes.h"
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

const Need may_checkpoint{is("policy.gradient_checkpointing", {"true", "auto"})};
const Need full_recompute{is("policy.recompute.granularity", {"full"})};
const Need offloads_activations{is_not("policy.offload_activations", "false", "other than false")};
const Need fp8{is("policy.fp8_cfg.enabled", {"true"})};
template <class Predicate>
Need fp8_recipe(Predicate selects) {
  const std::vector<std::string_view> names = fp8_recipes_with(selects);
  return {is("policy.fp8_cfg.fp8_recipe", {names.begin(), names.end()})};
}
const Need delayed_scales = fp8_recipe([](const Fp8RecipeRules& r) { return r.history; });
const Need tensor_scales = fp8_recipe([](const Fp8RecipeRules& r) { return !r.blocks(); });
std::string fp8_recipe_texts() {
  std::string out;
  for (const Fp8RecipeRules& r : fp8_recipes)
    out += fmt::format("{}{}: {}", out.empty() ? "" : "; ", name_of(r.recipe), r.text);
  return out;
}
const Need precision_aware{is("policy.optimizer.use_precision_aware_optimizer", {"true"})};
const Need packs{is("policy.sequence_packing.enabled", {"true"})};
const Need decays{is_not("policy.scheduler.lr_decay_style", "constant", "other than constant")};
const Condition ends =
    is("policy.scheduler.lr_decay_style", {"linear", "cosine", "WSD", "inverse-square-root"});

// NRL_POLICY_KEY(table, a.b): the key "a.b" of the section, bound to PolicyConfig::a.b.
#define NRL_POLICY_KEY(table, member) \
  table.key(                          \
      #member, [](auto& c) -> auto& { return c.member; })

void add_recompute(PolicyTable& t) {
  NRL_POLICY_KEY(t, gradient_checkpointing)
      .resume(OnResume::unrelated)
      .alias("model.gradient_checkpointing")
      .alias("training.gradient_checkpointing")
      .alias("policy.activation_checkpointing")
      .alias("policy.activation_checkpointing_enabled")
      .alias("policy.dtensor_cfg.activation_checkpointing")
      .alias("policy.megatron_cfg.activation_checkpointing")
      .alias("distributed.fsdp_config.activation_checkpointing")
      .help(
          "Keep only the input of a layer and recompute the layer in the backward pass: all layers, or those "
          "of "
          "checkpoint_ratio, checkpoint_every or checkpoint_layers. auto: where one of them is set. "
          "policy.recompute recomputes parts of layers.");
  NRL_POLICY_KEY(t, checkpoint_ratio)
      .resume(OnResume::unrelated)
      .above(0)
      .at_most(1)
      .alias("model.checkpoint_ratio")
      .help(
          "Fraction of the layers that are recomputed whole, rounded up and evenly spread. Of the others "
          "what "
          "policy.recompute says.")
      .only_with(may_checkpoint);
  NRL_POLICY_KEY(t, checkpoint_every)
      .resume(OnResume::unrelated)
      .at_least(1)
      .help(
          "Keep only the input of every N-th layer and recompute N layers at a time, like "
          "torch.utils.checkpoint_sequential. Pipeline chunks are counted from their first layer.")
      .only_with(may_checkpoint);
  NRL_POLICY_KEY(t, checkpoint_layers)
      .resume(OnResume::unrelated)
      .at_least(0)
      .help(
          "Exactly these layers are recomputed whole, counted from 0. Of the others what policy.recompute "
          "says.")
      .only_with(may_checkpoint);
  t.section("recompute", "Activations that are recomputed in the backward pass instead of kept.");
  t.resume("recompute", OnResume::unrelated);
  NRL_POLICY_KEY(t, recompute.granularity)
      .alias("policy.recompute")
      .alias("policy.megatron_cfg.recompute_granularity")
      .help(
          "full: whole layers; selective: the activations named in modules; none: keep everything; auto: "
          "what "
          "fits into memory.max_memory of the device, chosen by layer (docs/memory.md), or selective where "
          "modules are given.");
  NRL_POLICY_KEY(t, recompute.modules)
      .one_of({"norm", "activation", "gather", "core_attn", "mlp", "moe"})
      .alias("policy.megatron_cfg.recompute_modules")
      .help(
          "Activations to recompute. norm, activation: nearly free; core_attn: the output of attention; mlp: "
          "those between the matrices of the MLP, its first GEMM again; gather: with sequence parallelism "
          "the "
          "inputs that a rank has of all tokens, communicated again; moe: those of experts, their first GEMM "
          "again. auto: [norm, activation].")
      .only_with({is("policy.recompute.granularity", {"selective", "auto"})})
      .idle("[]");
  NRL_POLICY_KEY(t, recompute.method)
      .alias("policy.megatron_cfg.recompute_method")
      .help(
          "With num_layers: uniform keeps only the input of every num_layers-th layer and recomputes as many "
          "at a time; block recomputes the first num_layers layers one by one, and of the others what auto "
          "chooses. Counted "
          "within each pipeline chunk. null: all layers one by one.")
      .only_with(full_recompute);
  NRL_POLICY_KEY(t, recompute.num_layers)
      .at_least(1)
      .alias("policy.megatron_cfg.recompute_num_layers")
      .help("The number of layers of recompute.method.")
      .only_with(full_recompute);
  NRL_POLICY_KEY(t, offload_optimizer)
      .resume(OnResume::reported)
      .alias("policy.dtensor_cfg.cpu_offload")
      .alias("policy.megatron_cfg.optimizer.optimizer_cpu_offload")
      .help(
          "Keep the optimizer state, or this fraction of each rank's, outside of the device: on a GPU in "
          "page-locked host memory, where the CPU updates it, in a CPU run in a file (memory.offload_dir). "
          "The "
          "numbers stay the same (docs/memory.md).");
  NRL_POLICY_KEY(t, offload_activations)
      .resume(OnResume::unrelated)
      .alias("policy.megatron_cfg.fine_grained_activation_offloading")
      .help(
          "Move activations that are kept to the host's memory (a CPU: to a file) between the passes: of all "
          "layers, or of this fraction of them, rounded up and evenly spread, or of offload_layers "
          "(docs/memory.md).");
  NRL_POLICY_KEY(t, offload_layers)
      .resume(OnResume::unrelated)
      .at_least(0)
      .help("With offload_activations: true: exactly these layers, counted from 0.")
      .only_with(offloads_activations);
  NRL_POLICY_KEY(t, offload_modules)
      .resume(OnResume::unrelated)
      .alias("policy.megatron_cfg.offload_modules")
      .help(
          "Which activations of these layers are moved. input: the residual stream, which norms read; qkv: "
          "what attention reads; core_attn: its output; the others as in recompute.modules. []: all that are "
          "kept.")
      .only_with(offloads_activations);
}

void add_fp8(PolicyTable& t) {
  t.section("fp8_cfg",
            "FP8 operands of the GEMMs of attention, MLP and experts, and if wanted of attention itself "
            "(docs/precision.md). The rest, the LM head included, stays in policy.precision.");
  t.resume("fp8_cfg", OnResume::reported);
  NRL_POLICY_KEY(t, fp8_cfg.enabled)
      .alias("policy.megatron_cfg.fp8_cfg.enabled")
      .help(
          "Round the operands of GEMMs to FP8. A CPU rounds them and computes in fp32. A GPU does not "
          "support policy.precision: float32 with it.");
  NRL_POLICY_KEY(t, fp8_cfg.fp8)
      .alias("policy.megatron_cfg.fp8_cfg.fp8")
      .help(
          "hybrid: values in e4m3, gradients in e5m2 (with blockwise and mxfp8 in e4m3 as well, whose scales "
          "give the range); e4m3: everything in e4m3.")
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_recipe)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_recipe")
      .help(fmt::format("Scales. {}.", fp8_recipe_texts()))
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.num_first_layers_in_bf16)
      .at_least(0)
      .help("This many first layers read policy.precision instead; not with delayed.")
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.num_last_layers_in_bf16)
      .at_least(0)
      .help("This many last layers read policy.precision instead; not with delayed.")
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_margin)
      .at_least(0)
      .at_most(16)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_margin")
      .help("Scales leave room for numbers 2^margin times as large.")
      .only_with(fp8)
      .only_with(tensor_scales);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_amax_history_len)
      .at_least(1)
      .at_most(65536)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_amax_history_len")
      .help("Steps whose largest numbers are kept.")
      .only_with(delayed_scales);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_amax_compute_algo)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_amax_compute_algo")
      .help("The scale follows from the last step (most_recent), or from the largest of the history.")
      .only_with(delayed_scales);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_param)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_param")
      .help(
          "Not with mxfp8: keep the weights of these GEMMs in FP8 between steps. The optimizer, which has "
          "them in policy.precision in its shards, writes them, and ranks gather FP8. The numbers are those "
          "of false.")
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.cache_weights)
      .resume(OnResume::unrelated)
      .help(
          "Round weights to FP8 in the first microbatch of a step and keep both copies, 2 bytes per "
          "parameter on every rank; false: round them for each GEMM. auto: true, but with "
          "distributed.shard_strategy: optim_grads_params or hsdp false. The numbers are the same.")
      .only_with(fp8);
  NRL_POLICY_KEY(t, fp8_cfg.fp8_dot_product_attention)
      .alias("policy.megatron_cfg.fp8_cfg.fp8_dot_product_attention")
      .help(
          "With tensorwise and delayed, and fp8: hybrid: the products of attention have FP8 operands as "
          "well. "
          "On a GPU cuDNN must run it (compute capability 10.x, sequences of equal length).")
      .only_with(fp8);
}

void add_optimizer(PolicyTable& t) {
  t.section("optimizer", "The optimizer.");
  t.resume("optimizer", OnResume::reported);
  NRL_POLICY_KEY(t, optimizer.name)
      .built({"adamw"})
      .alias("policy.megatron_cfg.optimizer.optimizer")
      .alias("training.optimizer.type")
      .help("adamw: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).");
  NRL_POLICY_KEY(t, optimizer.lr)
      .above(0)
      .at_most(1000)
      .alias("policy.optimizer.kwargs.lr")
      .alias("policy.megatron_cfg.optimizer.lr")
      .alias("training.learning_rate")
      .alias("training.optimizer.lr")
      .alias("optim.lr")
      .help("Peak learning rate, before lr_scaling.");
  NRL_POLICY_KEY(t, optimizer.weight_decay)
      .at_least(0)
      .at_most(1000)
      .alias("policy.optimizer.kwargs.weight_decay")
      .alias("policy.megatron_cfg.optimizer.weight_decay")
      .alias("training.weight_decay")
      .alias("training.optimizer.weight_decay")
      .help("Decay of matrices and embeddings; norms and biases have none.");
  NRL_POLICY_KEY(t, optimizer.betas)
      .at_least(0)
      .below(1)
      .alias("policy.optimizer.kwargs.betas")
      .alias("optim.betas")
      .help("Decay rates of the running means of gradient and squared gradient.");
  NRL_POLICY_KEY(t, optimizer.eps)
      .above(0)
      .at_most(1)
      .alias("policy.optimizer.kwargs.eps")
      .alias("policy.megatron_cfg.optimizer.adam_eps")
      .help("Added to the denominator.");
  NRL_POLICY_KEY(t, optimizer.use_precision_aware_optimizer)
      .alias("policy.megatron_cfg.optimizer.use_precision_aware_optimizer")
      .help(
          "Allows optimizer state in fewer bits than fp32: exp_avg_dtype, exp_avg_sq_dtype, "
          "store_param_remainders, main_params_dtype and main_grads_dtype. Updates are computed in fp32.");
  NRL_POLICY_KEY(t, optimizer.exp_avg_dtype)
      .alias("policy.megatron_cfg.optimizer.exp_avg_dtype")
      .help(
          "Type in which the running mean of the gradient is kept. fp16 and fp8 (E4M3) have a scale for "
          "every 64 numbers. Rounded at random, so that small changes are not lost.")
      .only_with(precision_aware);
  NRL_POLICY_KEY(t, optimizer.exp_avg_sq_dtype)
      .alias("policy.megatron_cfg.optimizer.exp_avg_sq_dtype")
      .help("The same of the squared gradient.")
      .only_with(precision_aware);
  NRL_POLICY_KEY(t, optimizer.store_param_remainders)
      .alias("policy.megatron_cfg.optimizer.store_param_remainders")
      .help(
          "With precision bfloat16, unless false: keep the 16 bits that bf16 weights lack instead of fp32 "
          "master weights. The same numbers in 2 bytes less per parameter.")
      .only_with(precision_aware)
      .only_with({is("policy.precision", {"bfloat16", "auto", "fastest"})})
      .idle("false");
  NRL_POLICY_KEY(t, optimizer.main_params_dtype)
      .resume(OnResume::refused)
      .one_of({"fp32", "bf16"})
      .alias("policy.megatron_cfg.optimizer.main_params_dtype")
      .help(
          "bf16, with precision bfloat16: there are no master weights. Updated weights are rounded to bf16 "
          "at random, so that small updates are not lost. 2 bytes per parameter less than remainders.")
      .only_with(precision_aware)
      .only_with({is("policy.precision", {"bfloat16", "auto", "fastest"})});
  NRL_POLICY_KEY(t, optimizer.main_grads_dtype)
      .one_of({"fp32", "bf16"})
      .alias("policy.megatron_cfg.optimizer.main_grads_dtype")
      .help(
          "Type in which gradients are kept and added over microbatches. bf16 needs a shard_strategy other "
          "than ddp; one rank may have optim as well.")
      .only_with(precision_aware);
  t.section("optimizer.lr_scaling",
            "The learning rate for other global batches than the one it was tuned for.");
  NRL_POLICY_KEY(t, optimizer.lr_scaling.rule)
      .help("Scale lr with the global batch: linear lr x B/base, sqrt lr x sqrt(B/base), none.");
  NRL_POLICY_KEY(t, optimizer.lr_scaling.base_batch_size)
      .at_least(1)
      .help("The global batch size that lr was tuned for.")
      .only_with({is_not("policy.optimizer.lr_scaling.rule", "none", "other than none")});

  t.section("scheduler", "The learning-rate schedule.");
  t.resume("scheduler", OnResume::reported);
  NRL_POLICY_KEY(t, scheduler.lr_decay_style)
      .alias("policy.megatron_cfg.scheduler.lr_decay_style")
      .alias("training.lr_scheduler")
      .alias("training.lr_scheduler_type")
      .alias("training.scheduler.type")
      .alias("optim.lr_scheduler")
      .help("Shape of the decay from lr to min_lr after the warm-up.");
  NRL_POLICY_KEY(t, scheduler.lr_warmup_iters)
      .at_least(0)
      .at_most(many_steps)
      .size()
      .alias("policy.megatron_cfg.scheduler.lr_warmup_iters")
      .alias("training.warmup_steps")
      .alias("training.scheduler.warmup_steps")
      .help("Warm-up steps: the rate rises linearly from 0.");
  NRL_POLICY_KEY(t, scheduler.warmup_ratio)
      .at_least(0)
      .at_most(1)
      .alias("training.warmup_ratio")
      .alias("optim.lr_warmup_steps_ratio")
      .help("The warm-up as a fraction of lr_decay_iters; instead of lr_warmup_iters.");
  NRL_POLICY_KEY(t, scheduler.lr_decay_iters)
      .at_least(1)
      .at_most(many_steps)
      .size()
      .alias("policy.megatron_cfg.scheduler.lr_decay_iters")
      .alias("training.scheduler.total_steps")
      .help("Step at which min_lr is reached; null: the last step of the run.")
      .only_with({ends, is_not("policy.scheduler.warmup_ratio", "null")});
  NRL_POLICY_KEY(t, scheduler.lr_wsd_decay_iters)
      .at_least(1)
      .at_most(many_steps)
      .size()
      .alias("policy.megatron_cfg.scheduler.lr_wsd_decay_iters")
      .help("Length of the final decay of WSD (warm-up, stable, decay).")
      .only_with({is("policy.scheduler.lr_decay_style", {"WSD"})});
  NRL_POLICY_KEY(t, scheduler.lr_step_iters)
      .at_least(1)
      .at_most(many_steps)
      .size()
      .help("Steps after the warm-up between two reductions of the rate, which must be given for step.")
      .only_with({is("policy.scheduler.lr_decay_style", {"step"})});
  NRL_POLICY_KEY(t, scheduler.lr_step_factor)
      .above(0)
      .at_most(1)
      .help("Factor of a reduction; the rate stays above min_lr.")
      .only_with({is("policy.scheduler.lr_decay_style", {"step"})});
  NRL_POLICY_KEY(t, scheduler.lr_cycle_iters)
      .at_least(2)
      .at_most(many_steps)
      .size()
      .help(
          "Steps of a cycle from lr to min_lr and back, linear both ways, which must be given for cyclical. "
          "A "
          "warm-up of half of it makes the triangles of PyTorch's CyclicLR.")
      .only_with({is("policy.scheduler.lr_decay_style", {"cyclical"})});
  NRL_POLICY_KEY(t, scheduler.min_lr)
      .at_least(0)
      .at_most(1000)
      .alias("policy.megatron_cfg.optimizer.min_lr")
      .alias("training.scheduler.min_lr")
      .help("Final learning rate, or the least one of step and cyclical; scaled by lr_scaling like lr.")
      .only_with(decays);
  NRL_POLICY_KEY(t, scheduler.unit).built({"optimizer_steps"}).help("Unit of the counts in this section.");
}

void add_planned_features(PolicyTable& t) {
  NRL_POLICY_KEY(t, loss_scaling)
      .resume(OnResume::reported)
      .above(0)
      .at_most(0x1p60)
      .alias("training.loss_scaling")
      .help(
          "What the loss is multiplied by before the backward pass, so that small gradients are not lost; "
          "the "
          "optimizer divides by it. A number (2**15 is accepted), or dynamic: begins at 65536, doubles after "
          "2000 steps without overflow, and halves at an overflow, whose step is skipped. auto: dynamic with "
          "precision float16, else none.");
}

}  // namespace

void add_policy_keys(Table& table, const std::string& section, PolicyConfig Config::*member) {
  PolicyTable t(table, section, member);
  t.section("", "The model and how it is trained.");
  NRL_POLICY_KEY(t, model_name)
      .resume(OnResume::unrelated)
      .alias("model.name")
      .alias("training.model_name_or_path")
      .help("Hugging Face model directory to start from; null: from scratch, described by policy.model.");
  t.section(
      "model",
      "The model's config.json, under the names of Hugging Face: all of it when training from scratch, or "
      "changes to the one in policy.model_name. Defaults depend on model_type.");
  add_model_keys(t);
  t.section("tokenizer", "The tokenizer.");
  t.resume("tokenizer", OnResume::unrelated);
  NRL_POLICY_KEY(t, tokenizer.name)
      .help(
          "Tokenizer file or directory; null: the one of policy.model_name. Training on token files needs "
          "none.");
  NRL_POLICY_KEY(t, tokenizer.chat_template)
      .help(
          "Template of conversations: default (the tokenizer's), the name of one that it has or of a "
          "built-in one "
          "(chatml, llama3, zephyr), a file, or the text itself.")
      .only_with(on_examples());
  NRL_POLICY_KEY(t, precision)
      .alias("model.precision")
      .alias("model.torch_dtype")
      .alias("training.precision")
      .on_off("training.mixed_precision", "", "float32")
      .on_off("policy.mixed_precision", "", "float32")
      .on_off("training.fp16", "float16", "")
      .on_off("training.bf16", "bfloat16", "")
      .on_off("policy.megatron_cfg.optimizer.bf16", "bfloat16", "")
      .on_off("policy.megatron_cfg.optimizer.fp16", "float16", "")
      .help(
          "Type of weights and activations (master weights and optimizer state are fp32, unless "
          "policy.optimizer says otherwise). auto: float32 on "
          "a CPU, bfloat16 on a GPU. fastest: bfloat16 on a GPU and on a CPU whose bf16 dot products are "
          "faster than its fp32 arithmetic, else float32. float16: with loss_scaling, not with FP8.");
  NRL_POLICY_KEY(t, logits_dtype)
      .resume(OnResume::reported)
      .help(
          "Type of the logits in training and its evaluations; the loss is computed from them in fp32. "
          "bfloat16 "
          "halves their memory and traffic and needs precision bfloat16. auto: bfloat16 on a GPU where "
          "precision is bfloat16, as under torch.autocast; else float32, and always of dpo, grpo and "
          "distill, "
          "which compare log-probabilities.")
      .only_with({is("algorithm", {"pretrain", "sft", "dpo", "grpo", "distill"})});
  NRL_POLICY_KEY(t, train_global_batch_size)
      .resume(OnResume::reported, "step count and data position are preserved")
      .at_least(1)
      .at_most(1LL << 30)
      .size()
      .alias("data.train_batch_size")
      .times("training.batch_size", "policy.gradient_accumulation_steps")
      .help(
          "Sequences, of dpo and rm pairs, per optimizer step, over all ranks. training.batch_size counts "
          "those of one "
          "accumulation "
          "step: it is multiplied by gradient_accumulation_steps.");
  NRL_POLICY_KEY(t, train_micro_batch_size)
      .resume(OnResume::unrelated)
      .at_least(1)
      .alias("data.micro_batch_size_per_gpu")
      .alias("training.per_device_train_batch_size")
      .help(
          "Sequences per forward pass and rank; auto: as given by gradient_accumulation_steps, else the "
          "largest that divides evenly with at most 8192 tokens and, with pipeline stages, four microbatches "
          "per stage; less where that does not fit into memory.max_memory. nrl-train tune batch-size "
          "measures "
          "the fastest.");
  NRL_POLICY_KEY(t, gradient_accumulation_steps)
      .resume(OnResume::unrelated)
      .at_least(1)
      .alias("training.gradient_accumulation_steps")
      .help(
          "Forward passes per optimizer step and rank; null: global / (micro x data_parallel_size). A given "
          "value is checked.");
  NRL_POLICY_KEY(t, max_total_sequence_length)
      .resume(ResumeChange::sequence_length, "the number of consumed samples is preserved")
      .at_least(1)
      .at_most(1 << 24)
      .size()
      .alias("data.max_length")
      .alias("training.max_length")
      .alias("data.max_input_seq_length")
      .help("Tokens of a training sequence; of examples, the most.");
  NRL_POLICY_KEY(t, on_overlong)
      .resume(ResumeChange::data)
      .alias("data.truncation")
      .help("Examples of more tokens: truncate at the end, drop, or stop with an error.")
      .only_with(on_examples());
  const auto capacity = [](KeyBuilder key) {
    return key.resume(OnResume::unrelated)
        .at_least(1)
        .size()
        .help(
            "Most tokens of a microbatch, a multiple of max_total_sequence_length; null: "
            "train_micro_batch_size "
            "times that.");
  };
  t.section("sequence_packing", "Several examples in a row of a microbatch, without padding.");
  NRL_POLICY_KEY(t, sequence_packing.enabled)
      .resume(OnResume::unrelated)
      .help(
          "Fill microbatches with examples of any lengths up to train_mb_tokens. They do not see each other, "
          "and the samples of a step, its loss and gradients are those without packing.")
      .only_with(on_examples());
  capacity(NRL_POLICY_KEY(t, sequence_packing.train_mb_tokens)).only_with(packs);
  NRL_POLICY_KEY(t, sequence_packing.algorithm)
      .resume(OnResume::unrelated)
      .help("How examples are chosen for a microbatch.")
      .only_with(packs);
  t.section("dynamic_batching", "Microbatches of examples of similar lengths.");
  NRL_POLICY_KEY(t, dynamic_batching.enabled)
      .resume(OnResume::unrelated)
      .help("Sort the examples of a step by length and cut microbatches of up to train_mb_tokens.")
      .only_with(on_examples());
  capacity(NRL_POLICY_KEY(t, dynamic_batching.train_mb_tokens))
      .only_with({is("policy.dynamic_batching.enabled", {"true"})});
  NRL_POLICY_KEY(t, max_grad_norm)
      .resume(OnResume::reported)
      .above(0)
      .alias("policy.megatron_cfg.optimizer.clip_grad")
      .alias("training.max_grad_norm")
      .alias("policy.gradient_clipping")
      .alias("training.gradient_clipping")
      .alias("optim.clip_grad")
      .help("Clip gradients to this global norm; null: no clipping.");
  t.section("attention", "The attention kernel.");
  t.resume("attention", OnResume::unrelated);
  NRL_POLICY_KEY(t, attention.type)
      .built({"auto", "flash_attention", "cudnn"})
      .advice("unfused",
              "no kernel here stores the sequence x sequence matrix; write flash_attention, or remove it")
      .alias("model.attention.type")
      .on_off("policy.use_flash_attention", "flash_attention", "unfused")
      .on_off("model.use_flash_attention", "flash_attention", "unfused")
      .help(
          "Kernels never store the sequence x sequence matrix. auto, flash_attention: cuDNN on a GPU for the "
          "problems that it supports, else kernels of our own; cudnn: the run ends where it is not cuDNN.");
  NRL_POLICY_KEY(t, attention.memory_efficient)
      .alias("model.attention.memory_efficient")
      .help("Must be true: flash_attention is always memory efficient.");
  t.section("fusions", "Operations that share a kernel. All others that can share one always do.");
  t.resume("fusions", OnResume::reported);
  NRL_POLICY_KEY(t, fusions.bias_activation)
      .help(
          "GPU: bias and GELU (tanh) of MLPs without gates in the GEMM before them. auto: yes; false: a "
          "kernel "
          "of its own.");
  NRL_POLICY_KEY(t, cuda_graph)
      .resume(OnResume::unrelated)
      .alias("kernels.cuda_graph.enabled")
      .help(
          "GPU: capture a whole step once and launch it as one CUDA graph from then on, which saves host "
          "time when kernels are short. Not with distributed.backend staged on several ranks, nor with "
          "data.reset_attention_mask, distributed.overlap_param_gather or pipeline stages.");
  add_fp8(t);
  add_recompute(t);
  add_adapter_keys(t);
  NRL_POLICY_KEY(t, pin_memory)
      .resume(OnResume::unrelated)
      .help(
          "Page-locked host buffers of offloaded memory, checkpoints and batches. GPU runs always have them: "
          "false is refused there, and true has no effect on a CPU.");
  add_optimizer(t);
  add_planned_features(t);
}

}  // namespace nrl::config_detail
