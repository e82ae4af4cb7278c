#pragma once
// The typed configuration, nested as the YAML: `policy.optimizer.lr` is `config.policy.optimizer.lr`. Member
// initializers are the defaults; meaning, range and spelling of every key are in the option table
// (schema_*.cpp) and in docs/configuration.md.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/cluster_config.h"
#include "core/config/enums.h"

namespace nrl {

/// A value or `auto`: the program chooses and prints its choice.
template <class T>
class AutoOr {
 public:
  AutoOr() = default;
  AutoOr(T value) : value_(std::move(value)) {}
  bool is_auto() const { return !value_; }
  /// Precondition: not auto.
  const T& value() const { return *value_; }
  T value_or(T chosen) const { return value_ ? *value_ : chosen; }
  bool operator==(const AutoOr&) const = default;

 private:
  std::optional<T> value_;
};

struct DistributedConfig {
  CommBackend backend = CommBackend::automatic;
  int64_t tensor_parallel_size = 1;
  AutoOr<bool> sequence_parallel;                 ///< auto: with tensor parallelism
  AutoOr<TpCommOverlap> tp_comm_overlap;          ///< auto: plan::tp_comm_overlap()
  std::optional<int64_t> tp_comm_overlap_splits;  ///< pieces of a rank's rows; unset: 4
  int64_t pipeline_parallel_size = 1;
  std::optional<int64_t> virtual_pipeline_size;  ///< chunks of layers per stage; unset: 1
  std::optional<bool> model_parallel;            ///< checked against tensor x pipeline
  AutoOr<ScheduleKind> pipeline_schedule;  ///< auto: interleaved with several chunks per stage, else 1F1B
  std::optional<int64_t> num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage;
  bool account_for_embedding_in_pipeline_split = false, account_for_loss_in_pipeline_split = false;
  std::optional<std::vector<int64_t>> pipeline_layout;        ///< layers of each chunk of the model
  std::optional<int64_t> microbatch_group_size_per_vp_stage;  ///< of interleaved; unset: from the stages
  bool overlap_p2p_comm = false;
  int64_t context_parallel_size = 1;
  std::vector<CpCommType> cp_comm_type = {CpCommType::p2p};  ///< of all layers, or of each
  /// Ranks of the all-to-all and of the ring of a2a+p2p.
  std::optional<std::array<int64_t, 2>> hierarchical_context_parallel_sizes;
  int64_t expert_parallel_size = 1;
  int64_t expert_tensor_parallel_size = 1;
  AutoOr<int64_t> data_parallel_size;  ///< derived; a given value is checked
  ShardStrategy shard_strategy = ShardStrategy::ddp;
  bool overlap_grad_reduce = true;
  bool overlap_param_gather = false;
  int64_t dp_replicate_size = 1;  ///< copies of all shards
  DType grad_reduce_dtype = DType::f32;
  bool grad_reduce_error_feedback = true;
  bool grad_reduce_fp32_accumulation = false;
  AutoOr<double> bucket_size_mb;  ///< MiB of gradients per bucket; auto: parallel::auto_bucket_elements()
  bool nccl_ub = false;           ///< user buffers
  /// Ranks of one copy of the model.
  int64_t model_ranks() const {
    return tensor_parallel_size * pipeline_parallel_size * context_parallel_size;
  }
  bool splits_sequence() const { return tensor_parallel_size > 1 && sequence_parallel.value_or(true); }
  bool operator==(const DistributedConfig&) const = default;
};

struct TokenizerConfig {
  std::optional<std::string> name;        ///< file or directory; unset: that of policy.model_name, if any
  std::string chat_template = "default";  ///< default, a name, a file, or the text itself
  bool operator==(const TokenizerConfig&) const = default;
};

struct AttentionConfig {
  AttentionType type = AttentionType::automatic;
  bool memory_efficient = true;
  bool operator==(const AttentionConfig&) const = default;
};

struct FusionsConfig {
  AutoOr<bool> bias_activation;  ///< auto: wherever the GEMMs have it
  bool operator==(const FusionsConfig&) const = default;
};

struct RecomputeConfig {
  RecomputeGranularity granularity = RecomputeGranularity::automatic;
  AutoOr<std::vector<BlockModule>> modules;  ///< of granularity selective; auto: norm and activation
  std::optional<RecomputeMethod> method;     ///< of granularity full, with num_layers; unset: all layers
  std::optional<int64_t> num_layers;
  bool operator==(const RecomputeConfig&) const = default;
};

struct Fp8Config {
  bool enabled = false;
  Fp8Format fp8 = Fp8Format::hybrid;
  Fp8Recipe fp8_recipe = Fp8Recipe::tensorwise;
  int64_t num_first_layers_in_bf16 = 0, num_last_layers_in_bf16 = 0;
  int64_t fp8_margin = 0;
  int64_t fp8_amax_history_len = 1;
  AmaxAlgorithm fp8_amax_compute_algo = AmaxAlgorithm::most_recent;
  bool fp8_param = false;
  AutoOr<bool> cache_weights;  ///< auto: unless the strategy shards parameters; without fp8_param
  bool fp8_dot_product_attention = false;
  bool operator==(const Fp8Config&) const = default;
};

struct LrScalingConfig {
  LrScalingRule rule = LrScalingRule::none;
  int64_t base_batch_size = 32;
  bool operator==(const LrScalingConfig&) const = default;
};

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 3e-4;
  double weight_decay = 0.1;
  std::array<double, 2> betas = {0.9, 0.95};
  double eps = 1e-8;
  bool use_precision_aware_optimizer = false;
  DType exp_avg_dtype = DType::f32, exp_avg_sq_dtype = DType::f32;
  DType main_grads_dtype = DType::f32;
  AutoOr<bool> store_param_remainders;   ///< auto: where weights are bf16; without
                                         ///< use_precision_aware_optimizer: no effect
  DType main_params_dtype = DType::f32;  ///< bf16: no master weights of bf16 weights
  LrScalingConfig lr_scaling;
  bool operator==(const OptimizerConfig&) const = default;
};

struct SchedulerConfig {
  LrDecayStyle lr_decay_style = LrDecayStyle::cosine;
  int64_t lr_warmup_iters = 0;
  std::optional<double> warmup_ratio;     ///< of lr_decay_iters; instead of lr_warmup_iters
  std::optional<int64_t> lr_decay_iters;  ///< unset: all steps of the run
  std::optional<int64_t> lr_wsd_decay_iters;
  std::optional<int64_t> lr_step_iters;   ///< of `step`: between two reductions
  double lr_step_factor = 0.1;            ///< of `step`
  std::optional<int64_t> lr_cycle_iters;  ///< of `cyclical`
  double min_lr = 0;
  ScheduleUnit unit = ScheduleUnit::optimizer_steps;
  /// Steps of the decay that WSD ends with.
  int64_t final_decay() const {
    return lr_decay_style == LrDecayStyle::wsd ? lr_wsd_decay_iters.value_or(0) : 0;
  }
  /// The shape depends on the step at which the decay ends.
  bool ends() const {
    return lr_decay_style != LrDecayStyle::constant && lr_decay_style != LrDecayStyle::step &&
           lr_decay_style != LrDecayStyle::cyclical;
  }
  bool operator==(const SchedulerConfig&) const = default;
};

struct SequencePackingConfig {
  bool enabled = false;
  std::optional<int64_t> train_mb_tokens;  ///< of a microbatch
  PackingAlgorithm algorithm = PackingAlgorithm::modified_first_fit_decreasing;
  bool operator==(const SequencePackingConfig&) const = default;
};

struct DynamicBatchingConfig {
  bool enabled = false;
  std::optional<int64_t> train_mb_tokens;  ///< of a microbatch
  bool operator==(const DynamicBatchingConfig&) const = default;
};

/// Low-rank adapters, which are trained in place of the model's weights.
struct LoraConfig {
  bool enabled = false;
  int64_t dim = 8;
  double alpha = 32;
  double dropout = 0;
  bool use_rslora = false;
  std::vector<std::string> target_modules = {"all-linear"}, exclude_modules;  ///< patterns of modules
  LoraInit lora_A_init = LoraInit::kaiming;
  std::optional<std::string> adapter;  ///< directory to start from
  bool operator==(const LoraConfig&) const = default;
};

struct PolicyConfig {
  std::optional<std::string> model_name;  ///< Hugging Face model directory
  /// The keys given under policy.model as the text of one JSON object, in order of appearance
  /// ("{}" when none). They override the model's config.json, or replace it. Types are checked
  /// here; apps/model interprets them.
  std::string model_json = "{}";
  TokenizerConfig tokenizer;
  Precision precision = Precision::automatic;
  LogitsDType logits_dtype = LogitsDType::automatic;
  AutoOr<LossScaling> loss_scaling;
  Fp8Config fp8_cfg;
  int64_t train_global_batch_size = 32;                ///< sequences per optimizer step, over all ranks
  AutoOr<int64_t> train_micro_batch_size;              ///< sequences per forward pass and rank
  std::optional<int64_t> gradient_accumulation_steps;  ///< checked against global / (micro x dp)
  int64_t max_total_sequence_length = 1024;
  OnOverlong on_overlong = OnOverlong::truncate;
  SequencePackingConfig sequence_packing;
  DynamicBatchingConfig dynamic_batching;
  std::optional<double> max_grad_norm = 1.0;  ///< unset: no clipping
  AttentionConfig attention;
  FusionsConfig fusions;
  bool cuda_graph = false;
  AutoOr<bool> pin_memory;              ///< a GPU run always does
  AutoOr<bool> gradient_checkpointing;  ///< auto: where one of the next three is set
  std::optional<double> checkpoint_ratio;
  std::optional<int64_t> checkpoint_every;
  std::optional<std::vector<int64_t>> checkpoint_layers;
  RecomputeConfig recompute;
  Share offload_activations;  ///< of the layers
  std::optional<std::vector<int64_t>> offload_layers;
  std::vector<BlockModule> offload_modules;  ///< empty: all that is kept
  Share offload_optimizer;
  LoraConfig lora;
  std::vector<std::string> freeze;  ///< patterns of tensors and modules
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  bool operator==(const PolicyConfig&) const = default;
};

/// The training loop: keys of the section of every algorithm that trains in steps.
struct LoopConfig {
  std::optional<int64_t> max_num_steps;
  std::optional<int64_t> max_num_epochs;
  int64_t val_period = 0;              ///< steps between evaluations; 0: none
  std::optional<int64_t> val_batches;  ///< global batches per evaluation; unset: the whole validation set
  bool val_at_start = false;
  bool val_at_end = false;
  int64_t seed = 42;
  OnNonfinite on_nonfinite = OnNonfinite::skip;
  int64_t max_nonfinite_steps = 5;  ///< consecutive skipped steps that stop the run
  bool operator==(const LoopConfig&) const = default;
};

/// The loss of pairs (algorithm dpo).
struct PreferenceConfig {
  PreferenceLoss loss_type = PreferenceLoss::sigmoid;
  double beta = 0.1;                   ///< of the policy's divergence from the reference
  double label_smoothing = 0;          ///< probability that a pair is labeled the wrong way round
  double simpo_gamma = 0.5;            ///< target margin of simpo
  double preference_weight = 1;        ///< factor of the loss of pairs
  double sft_weight = 0;               ///< factor of the negative log-likelihood of the chosen sequences
  AutoOr<bool> average_log_probs;      ///< of pairs: means over tokens instead of sums
  AutoOr<bool> sft_average_log_probs;  ///< the same of the term of the chosen sequences
  bool operator==(const PreferenceConfig&) const = default;
};

/// The loss of a reward model (algorithm rm).
struct RewardModelConfig {
  double center_rewards_coefficient = 0;  ///< of (r_chosen + r_rejected)^2
  bool operator==(const RewardModelConfig&) const = default;
};

/// The loss of a policy (algorithm grpo).
struct PolicyLossConfig {
  PolicyObjective type = PolicyObjective::clip;
  AutoOr<LossAggregation> aggregation;  ///< auto: loss_aggregation()
  double ratio_clip_min = 0.2, ratio_clip_max = 0.2;
  std::optional<double> ratio_clip_c;      ///< dual clip: bound of the loss of negative advantages; > 1
  double reference_policy_kl_penalty = 0;  ///< factor of the divergence from the reference
  KlEstimator reference_policy_kl_type = KlEstimator::k3;
  bool use_kl_in_reward = false;                    ///< the divergence lowers rewards instead
  std::optional<std::string> reference_model;       ///< directory; unset: the model of the start
  bool use_importance_sampling_correction = false;  ///< losses are weighted by the ratio of old to sampler
  std::optional<ImportanceSampling> truncated_importance_sampling_type;  ///< unset: tis
  std::optional<double> truncated_importance_sampling_ratio, truncated_importance_sampling_ratio_min;
  double entropy_coef = 0;             ///< factor of the entropy, which is rewarded
  bool force_on_policy_ratio = false;  ///< the log-probabilities of the step itself are the old ones
  bool operator==(const PolicyLossConfig&) const = default;
};

/// Rollouts that a policy generates while it is trained (algorithm grpo, data.train.format: prompts).
struct RolloutConfig {
  int64_t num_prompts_per_step = 32;
  int64_t num_generations_per_prompt = 16;
  AdvantageEstimator adv_estimator = AdvantageEstimator::grpo;
  bool minus_baseline = true;  ///< of reinforce_plus_plus: rewards minus the mean of their group
  bool use_leave_one_out_baseline = true;
  AdvantageStd advantage_std = AdvantageStd::group;
  bool overlong_filtering = false;    ///< completions that reach max_new_tokens have no loss
  bool use_dynamic_sampling = false;  ///< groups of equal rewards are replaced
  int64_t dynamic_sampling_max_gen_batches = 10;
  std::optional<int64_t> max_val_samples;  ///< prompts of an evaluation; unset: all
  int64_t val_num_generations_per_prompt = 1;
  AutoOr<int64_t> max_new_tokens;  ///< auto: as many as max_total_sequence_length leaves
  double temperature = 1;          ///< > 0: of the distribution that rollouts are sampled from
  double val_temperature = 0;      ///< of evaluations; 0: greedy
  bool operator==(const RolloutConfig&) const = default;
};

/// Distillation from a teacher's log-probabilities in files (algorithm distill).
struct DistillationConfig {
  KlDirection kl_type = KlDirection::forward;
  double mixed_kl_weight = 0.5;    ///< of the forward divergence in kl_type mixed
  double temperature = 1;          ///< of teacher and student; > 0
  bool zero_outside_topk = false;  ///< the student's distribution is over the whole vocabulary
  int64_t topk = 64;               ///< the teacher's most probable ids per token that count
  bool operator==(const DistillationConfig&) const = default;
};

struct DatasetConfig {
  std::vector<std::string> data_path;          ///< one or several (a blend)
  std::optional<std::vector<double>> weights;  ///< of the blend, one per path; unset: by size
  ExampleFormat format = ExampleFormat::automatic;
  bool operator==(const DatasetConfig&) const = default;
};

struct DataConfig {
  DatasetConfig train;
  DatasetConfig validation;
  std::optional<std::array<double, 3>> split;  ///< train, validation, test shares of data.train (any scale)
  std::optional<int64_t> seed;                 ///< unset: pretrain.seed
  bool shuffle = true;
  int64_t num_workers = 1;
  int64_t prefetch_batches = 2;
  AutoOr<bool> pin_memory;  ///< a GPU run always does
  bool reset_position_ids = false, reset_attention_mask = false, eod_mask_loss = false;
  TrainOn train_on = TrainOn::automatic;
  std::optional<std::string> chat_key;  ///< unset: messages or conversations
  std::string input_key = "prompt", output_key = "completion";
  std::optional<std::string> system_prompt_file, prompt_file;
  SpecialTokensInText special_tokens_in_text = SpecialTokensInText::allow;
  OnBadRecord on_bad_record = OnBadRecord::error;
  std::optional<std::string> template_date;  ///< unset: today
  std::optional<std::string> cache_dir;      ///< unset: beside the file
  bool operator==(const DataConfig&) const = default;
};

/// checkpointing.resume: "auto", "never", or a checkpoint directory.
struct ResumeFrom {
  ResumeMode mode = ResumeMode::automatic;
  std::string directory = {};  ///< with ResumeMode::directory
  bool operator==(const ResumeFrom&) const = default;
};

struct CheckpointingConfig {
  bool enabled = true;
  std::string checkpoint_dir = "results/checkpoints";
  int64_t save_period = 1000;          ///< optimizer steps; 0: only at the end and when stopped
  std::optional<double> save_seconds;  ///< between two checkpoints; unset: no limit
  std::optional<std::string> checkpoint_must_save_by;  ///< DD:HH:MM:SS (core/config/time_span.h)
  std::optional<int64_t> keep_latest_k = 3;            ///< unset: keep all
  int64_t keep_every = 0;                              ///< steps whose multiples are kept as well; 0: none
  bool verify_saved = true;
  std::vector<std::string> after_save;  ///< program and arguments; empty: none
  ResumeFrom resume;
  std::vector<ResumeChange> allow_changes;  ///< permitted since the checkpoint that is resumed
  bool save_optimizer = true;
  AutoOr<bool> is_async;  ///< auto: plan::takes_snapshot()
  bool operator==(const CheckpointingConfig&) const = default;
};

struct TensorboardConfig {
  std::optional<std::string> log_dir;  ///< unset: "tensorboard" in logger.log_dir
  bool operator==(const TensorboardConfig&) const = default;
};

struct WandbConfig {
  std::optional<std::string> project, name, entity, group;
  bool operator==(const WandbConfig&) const = default;
};

struct MlflowConfig {
  std::optional<std::string> tracking_uri;  ///< unset: "mlruns" in logger.log_dir
  std::optional<std::string> experiment_name, run_name;
  bool operator==(const MlflowConfig&) const = default;
};

/// Telemetry of the machine, by logger.monitor_gpus.
struct GpuMonitoringConfig {
  double collection_interval = 10;  ///< seconds between samples
  double flush_interval = 10;       ///< seconds between writes of telemetry.jsonl
  bool operator==(const GpuMonitoringConfig&) const = default;
};

struct LoggerConfig {
  std::string log_dir = "results/logs";
  int64_t log_interval = 10;
  Progress progress = Progress::automatic;
  bool monitor_gpus = false;
  GpuMonitoringConfig gpu_monitoring;
  int64_t layer_stats_period = 0;
  int64_t sample_period = 0;
  std::string sample_prompt;
  int64_t sample_tokens = 64;
  double sample_temperature = 0.8;
  bool tensorboard_enabled = false;
  TensorboardConfig tensorboard;
  bool wandb_enabled = false;
  WandbConfig wandb;
  bool mlflow_enabled = false;
  MlflowConfig mlflow;
  bool operator==(const LoggerConfig&) const = default;
};

struct MemoryConfig {
  OnOom on_oom = OnOom::fail;
  double max_memory = 0.9;  ///< share of the device's memory that choices of `auto` count with
  std::optional<std::string> offload_dir;
  bool operator==(const MemoryConfig&) const = default;
};

/// Growth of memory that counts as a leak; an unset limit is not tested.
struct MemoryLeakConfig {
  std::optional<double> slope_mb_per_step = 1;
  std::optional<double> ratio = 1.5;  ///< of the last min_samples samples to the first ones
  std::optional<double> step_increase_gb = 1;
  int64_t min_samples = 10;
  bool operator==(const MemoryLeakConfig&) const = default;
};

/// Detection of instability in loss and gradient norm (apps/monitor/stability.h).
struct StabilityConfig {
  int64_t window = 100;  ///< steps that a new one is compared with
  double cv_threshold = 0.1, spike_factor = 10;
  OnInstability on_instability = OnInstability::off;
  double lr_factor = 0.5;      ///< of the learning rate after each rollback
  int64_t max_recoveries = 3;  ///< rollbacks before the run gives up
  bool skip_data = true;       ///< after a rollback, the samples up to the bad step are left out
  bool operator==(const StabilityConfig&) const = default;
};

/// Live views of a run: an HTTP server, a file for node_exporter.
struct VisualizationConfig {
  bool prometheus = false, dashboard = false;
  int64_t port = 8000;  ///< 0: any
  std::string bind = "127.0.0.1";
  std::optional<std::string> textfile;
  bool serves() const { return prometheus || dashboard; }
  bool operator==(const VisualizationConfig&) const = default;
};

/// Fractions at which built-in alerts fire.
struct AlertThresholds {
  double loss_increase = 0.1, gpu_memory = 0.9, cpu_usage = 0.95, training_speed = 0.5;
  bool operator==(const AlertThresholds&) const = default;
};

struct AlertingConfig {
  bool enabled = false;
  std::vector<std::string> rules;  ///< besides the built-in ones: "perf/tokens_per_s < 1000 for 5"
  std::optional<std::string> command, webhook;
  bool email_notifications = false, slack_notifications = false;
  AlertThresholds thresholds;
  bool operator==(const AlertingConfig&) const = default;
};

/// Statistical rules of alerts.
struct AnalysisConfig {
  bool trend_analysis = false, anomaly_detection = false, performance_regression = false;
  double anomaly_z = 4;
  bool operator==(const AnalysisConfig&) const = default;
};

struct MonitoringConfig {
  bool enabled = true;
  double interval = 30;        ///< seconds between evaluations of the rules of alerts
  AutoOr<NanCheck> nan_check;  ///< auto: all on a CPU, loss on a GPU
  StabilityConfig stability;
  MemoryLeakConfig memory_leak;
  VisualizationConfig visualization;
  AlertingConfig alerting;
  AnalysisConfig analysis;
  bool operator==(const MonitoringConfig&) const = default;
};

struct NsysConfig {
  std::optional<std::string> steps;
  std::vector<std::string> workers;
  bool operator==(const NsysConfig&) const = default;
};

struct ProfilingConfig {
  bool enabled = false;
  std::string steps = "3:5";
  std::optional<int64_t> every;
  std::vector<std::string> ranks = {"auto"};  ///< "auto", "all" or numbers
  TraceFormat trace = TraceFormat::perfetto;
  bool memory_snapshot = false;
  NsysConfig nsys;
  bool operator==(const ProfilingConfig&) const = default;
};

struct ReliabilityConfig {
  ControlMode control = ControlMode::automatic;
  std::optional<std::string> interface;   ///< network interface or address; unset: of the default route
  double heartbeat_timeout_seconds = 10;  ///< silence of a rank, for the others of its node
  double network_timeout_seconds = 30;    ///< silence of a node
  AutoOr<double> step_timeout_seconds;    ///< without progress; auto: learned from the steps
  bool stragglers = true;                 ///< report ranks that are slower than their peers
  bool stacks = true;                     ///< keep the stacks of all threads of a run that hangs
  int64_t replica_check_period = 100;     ///< steps; 0: replicas are not compared
  int64_t recompute_check_period = 0;     ///< steps; 0: no step is computed again
  bool operator==(const ReliabilityConfig&) const = default;
};

struct KernelsConfig {
  AutoOr<int64_t> num_threads;       ///< per rank
  std::string cpu_binding = "none";  ///< "none", "auto", or CPUs of the node: "0-3,8"
  AutoOr<Isa> isa;
  bool share_device = false;
  bool autotune = false;
  std::optional<std::string> gemm_tuning;  ///< file (*.txt) or directory of timed choices
  bool tf32 = false;
  bool deterministic = false;
  bool operator==(const KernelsConfig&) const = default;
};

struct Config {
  Algorithm algorithm = Algorithm::pretrain;
  DeviceKind device = DeviceKind::automatic;
  ClusterConfig cluster;
  DistributedConfig distributed;
  PolicyConfig policy;
  LoopConfig pretrain;
  LoopConfig sft;
  LoopConfig dpo;
  LoopConfig rm;
  LoopConfig grpo;
  LoopConfig distill;
  PreferenceConfig preference;     ///< keys of section dpo
  RewardModelConfig reward_model;  ///< keys of section rm
  PolicyLossConfig loss_fn;
  RolloutConfig rollout;            ///< keys of sections grpo and policy.generation
  std::vector<std::string> reward;  ///< JSON objects, or names of types (apps/reward/spec.h)
  DistillationConfig distillation;  ///< keys of section distill
  DataConfig data;
  CheckpointingConfig checkpointing;
  MemoryConfig memory;
  LoggerConfig logger;
  MonitoringConfig monitoring;
  ReliabilityConfig reliability;
  ProfilingConfig profiling;
  KernelsConfig kernels;
  bool operator==(const Config&) const = default;
};

/// True if the policy generates the rollouts that it is trained on.
bool generates_rollouts(const Config& config);
/// Completions that are generated at once, of one version of the weights.
int64_t rollouts_at_once(const Config& config);

/// True if steps consist of sequences of different lengths (data::ExampleSet), else of token files.
bool trains_on_examples(const Config& config);
/// Tokens that policy.sequence_packing or dynamic_batching give a microbatch, and train_micro_batch_size in
/// their place; none if they do not.
std::optional<int64_t> packed_tokens(const PolicyConfig& policy);
std::optional<int64_t> packed_micro_batch(const Config& config);
/// Most tokens of one element of a batch: a sequence, or the two of a pair.
int64_t example_tokens(const Config& config);
/// The loop of the configured algorithm.
const LoopConfig& resolved_loop(const Config& config);
/// True if the run evaluates during training.
bool evaluates(const Config& config);
/// What the loss is multiplied by; none with `auto`, unless the precision is float16.
std::optional<LossScaling> resolved_loss_scaling(const PolicyConfig& policy);

/// Says on which files the algorithm trains instead of this format; empty if it can train on it, or for
/// `auto`.
std::string format_refusal(Algorithm algorithm, ExampleFormat format);
/// True if the loss of pairs compares means over the tokens of a sequence, and the same of its term of the
/// chosen sequences.
bool averages_log_probs(const PreferenceConfig& loss);
bool averages_sft_log_probs(const PreferenceConfig& loss);
/// The mean from which the normalizers of a policy's loss follow. gspo and rloo: sequence_mean_token_sum,
/// since a sequence has one loss.
LossAggregation loss_aggregation(const PolicyLossConfig& loss);
/// True if the loss depends on differences of log-probabilities of a token, so that rounded logits count.
bool compares_log_probs(const Config& config);

/// The full name of one of its keys, for messages: "pretrain.max_num_steps" for "max_num_steps".
std::string loop_key(const Config& config, std::string_view name);

/// The seed of the data order: data.seed, or the loop's.
int64_t data_seed(const Config& config);

}  // namespace nrl
