// Keys of the run: algorithm, pretrain, checkpointing, logger, memory, monitoring, profiling, kernels.
#include "core/base/threads.h"
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

const Need saves{is("checkpointing.enabled", {"true"})};
const Need monitors{is("monitoring.enabled", {"true"})};
const Need guards{is_not("monitoring.stability.on_instability", "off")};
const Need tensorboard{is("logger.tensorboard_enabled", {"true"})};
const Need wandb{is("logger.wandb_enabled", {"true"})};
const Need mlflow{is("logger.mlflow_enabled", {"true"})};
const Need samples{is_not("logger.sample_period", "0", "above 0")};

}  // namespace

// NRL_LOOP_KEY(a): the key "a" of the loop's section, bound to LoopConfig::a.
#define NRL_LOOP_KEY(member)                                                         \
  t.key(                                                                             \
       section + "." #member, [loop](auto& c) -> auto& { return (c.*loop).member; }) \
      .alias("loop." #member)

void add_loop(Table& t, Algorithm algorithm, LoopConfig Config::*loop) {
  const std::string section(name_of(algorithm));
  t.section(section, fmt::format("The loop of algorithm {}.", section), {algorithm});
  NRL_LOOP_KEY(max_num_steps)
      .resume(OnResume::reported)
      .at_least(0)
      .at_most(many_steps)
      .size()
      .unlimited("-1")
      .alias("training.max_steps")
      .alias("trainer.max_steps")
      .alias("policy.megatron_cfg.train_iters")
      .help(
          "Optimizer steps of the run; null (or -1): as many as max_num_epochs gives; 0: write the initial "
          "checkpoint and stop.");
  NRL_LOOP_KEY(max_num_epochs)
      .resume(OnResume::reported)
      .at_least(1)
      .alias("trainer.total_epochs")
      .alias("training.num_epochs")
      .alias("training.num_train_epochs")
      .help("Passes over the training data; null: no limit. The run ends at whichever limit comes first.");
  NRL_LOOP_KEY(val_period)
      .resume(OnResume::unrelated)
      .at_least(0)
      .at_most(many_steps)
      .size()
      .alias("evaluation.eval_steps")
      .alias("training.eval_steps")
      .alias("trainer.test_freq")
      .help("Optimizer steps between evaluations; 0: none.");
  NRL_LOOP_KEY(val_batches)
      .resume(OnResume::unrelated)
      .at_least(1)
      .unlimited("-1")
      .help("Global batches of an evaluation; null (or -1): the whole validation set.")
      .only_with(evaluates());
  NRL_LOOP_KEY(val_at_start).resume(OnResume::unrelated).help("Evaluate before the first step.");
  NRL_LOOP_KEY(val_at_end).resume(OnResume::unrelated).help("Evaluate after the last step.");
  NRL_LOOP_KEY(seed)
      .resume(OnResume::reported)
      .at_least(0)
      .alias("training.seed")
      .help("Seed of initial weights, dropout and, unless data.seed is given, the data order.");
  NRL_LOOP_KEY(on_nonfinite)
      .resume(OnResume::unrelated)
      .help(
          "On a NaN or infinite loss or gradient norm: skip the step (weights and optimizer state are "
          "unchanged) or stop.");
  NRL_LOOP_KEY(max_nonfinite_steps)
      .resume(OnResume::unrelated)
      .at_least(1)
      .help("This many consecutive skipped steps stop the run (exit 79).")
      .only_with({is(section + ".on_nonfinite", {"skip"})});
}

namespace {

void add_checkpointing(Table& t) {
  t.section("checkpointing", "Saving and resuming.");
  t.resume("checkpointing", OnResume::unrelated);
  NRL_KEY(t, checkpointing.enabled).help("Save checkpoints.");
  NRL_KEY(t, checkpointing.checkpoint_dir)
      .alias("checkpointing.save_dir")
      .alias("training.output_dir")
      .help(
          "Directory of the checkpoints; each is a directory step-N, which is a Hugging Face model directory "
          "too.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.save_period)
      .at_least(0)
      .at_most(many_steps)
      .size()
      .alias("checkpointing.save_steps")
      .alias("training.save_steps")
      .alias("trainer.save_freq")
      .alias("checkpointing.ft_save_period")
      .help("Optimizer steps between checkpoints; 0: only at the end and when stopped.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.save_seconds)
      .at_least(1)
      .at_most(many_steps)
      .help("Also save when the last checkpoint is this many seconds old; null: only every save_period.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.checkpoint_must_save_by)
      .help(
          "DD:HH:MM:SS since the start of the process: the run saves in time and stops with exit code 75. "
          "Inside a Slurm job that tells its end (SLURM_JOB_END_TIME), it does so before that as well.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.keep_latest_k)
      .at_least(1)
      .alias("checkpointing.keep_top_k")
      .alias("checkpointing.save_total_limit")
      .alias("training.save_total_limit")
      .alias("trainer.max_ckpt_to_keep")
      .alias("checkpointing.ft_keep_latest_k")
      .help("Number of newest checkpoints to keep; null: all.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.keep_every)
      .at_least(0)
      .at_most(many_steps)
      .size()
      .help("keep_latest_k keeps the checkpoints of every multiple of so many steps as well; 0: none.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.verify_saved)
      .help(
          "Read each checkpoint back in the background, on the host of rank 0; a good one gets a file "
          "VERIFIED. keep_latest_k never removes the newest of these.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.after_save)
      .help(
          "Program and arguments, run without a shell on the host of rank 0 after a checkpoint is saved, "
          "with "
          "its directory as last argument: to copy it to an object store, for example.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.resume)
      .alias("checkpointing.resume_from_checkpoint")
      .alias("checkpointing.load_checkpoint")
      .help(
          "auto: resume from the newest valid checkpoint in checkpoint_dir, if any; never: start from "
          "scratch; or the checkpoint directory to resume from. Checkpoints in checkpoint_dir that are "
          "newer than the one resumed from (never: all) are moved to checkpoint_dir/previous-N.");
  NRL_KEY(t, checkpointing.allow_changes)
      .help(
          "Differences from the run that saved the checkpoint that a resume permits: data (token files, "
          "weights of the blend, split), seed (of the data order), sequence_length, model (values of "
          "config.json that change the mathematics but no shape: RoPE, eps, window, activation, dropout).")
      .only_with({is_not("checkpointing.resume", "never", "other than never")})
      .only_with(
          {is("checkpointing.enabled", {"true"}), is_not("checkpointing.resume", "auto", "other than auto")});
  NRL_KEY(t, checkpointing.save_optimizer)
      .help("Save the optimizer state; without it a checkpoint holds weights and position only.")
      .only_with(saves);
  NRL_KEY(t, checkpointing.is_async)
      .help(
          "Save while the next steps run, from a copy of what a rank saves in the host's memory "
          "(docs/checkpoints.md): true, false, or auto, which does so where the copy fits. The last "
          "checkpoint, and "
          "that of a stop, are saved at once.")
      .only_with(saves);
}

void add_logger(Table& t) {
  t.section("logger", "Terminal output and metrics.");
  t.resume("logger", OnResume::unrelated);
  NRL_KEY(t, logger.log_dir)
      .alias("logging.log_dir")
      .help("Directory of config.yaml (resolved) and metrics.jsonl.");
  NRL_KEY(t, logger.log_interval)
      .at_least(1)
      .alias("logging.log_interval")
      .alias("logging.logging_steps")
      .alias("training.logging_steps")
      .help("Optimizer steps between printed lines (metrics.jsonl has every step).")
      .only_with({is_not("logger.progress", "json", "other than json")});
  NRL_KEY(t, logger.progress)
      .help(
          "auto: a bar on a terminal, else lines; bar; plain: lines; json: one object per line on standard "
          "output.");
  NRL_KEY(t, logger.layer_stats_period)
      .at_least(0)
      .help(
          "Optimizer steps between statistics of layers: norms of gradients and weights, sizes of "
          "activations; 0: none. Such a step is not launched as a CUDA graph.");
  NRL_KEY(t, logger.sample_period)
      .at_least(0)
      .help(
          "Optimizer steps between samples of text from the model, and one after the last step, printed and "
          "written to metrics.jsonl; 0: none. Rank 0 generates them on its CPU while the others wait.");
  NRL_KEY(t, logger.sample_prompt)
      .help(
          "Text that the samples continue; empty: the tokenizer's first token. Where the examples are "
          "conversations, a user message, which the samples answer.")
      .only_with(samples);
  NRL_KEY(t, logger.sample_tokens).at_least(1).at_most(4096).help("Tokens of a sample.").only_with(samples);
  NRL_KEY(t, logger.sample_temperature)
      .at_least(0)
      .at_most(100)
      .help("Temperature of the samples; 0: greedy.")
      .only_with(samples);
  NRL_KEY(t, logger.tensorboard_enabled)
      .alias("monitoring.visualization.tensorboard")
      .help("Write TensorBoard event files. Rank 0 writes them, as all files of this section.");
  t.section("logger.tensorboard", "TensorBoard event files.");
  NRL_KEY(t, logger.tensorboard.log_dir)
      .help("Directory of the event files; null: the directory tensorboard in logger.log_dir.")
      .only_with(tensorboard);
  NRL_KEY(t, logger.wandb_enabled)
      .help(
          "Write an offline run for Weights & Biases to the directory wandb in logger.log_dir; the end of "
          "the "
          "run prints the command that uploads it.");
  t.section("logger.wandb", "The run at Weights & Biases.");
  NRL_KEY(t, logger.wandb.project)
      .help("Project; null: the one that wandb sync chooses (uncategorized).")
      .only_with(wandb);
  NRL_KEY(t, logger.wandb.name)
      .help("Name of the run; null: the last directory of logger.log_dir other than logs.")
      .only_with(wandb);
  NRL_KEY(t, logger.wandb.entity)
      .help("User or team; null: the default of the account that syncs.")
      .only_with(wandb);
  NRL_KEY(t, logger.wandb.group).help("Group of runs; null: none.").only_with(wandb);
  NRL_KEY(t, logger.mlflow_enabled)
      .help(
          "Write the run to a file store of MLflow; the end of the run prints the command that moves it into "
          "a database.");
  t.section("logger.mlflow", "The run in MLflow.");
  NRL_KEY(t, logger.mlflow.tracking_uri)
      .help(
          "Directory of the file store, with or without file://; null: the directory mlruns in "
          "logger.log_dir. Servers are not supported.")
      .only_with(mlflow);
  NRL_KEY(t, logger.mlflow.experiment_name).help("Experiment; null: Default.").only_with(mlflow);
  NRL_KEY(t, logger.mlflow.run_name)
      .help("Name of the run; null: the last directory of logger.log_dir other than logs.")
      .only_with(mlflow);
  NRL_KEY(t, logger.monitor_gpus)
      .help(
          "Sample GPUs (where the run uses any), processor, memory, network, disk and energy of every node, "
          "and "
          "the work of every rank, into LOG_DIR/telemetry.jsonl.");
  t.section("logger.gpu_monitoring", "Sampling by logger.monitor_gpus.");
  const Need sampled{is("logger.monitor_gpus", {"true"})};
  NRL_KEY(t, logger.gpu_monitoring.collection_interval)
      .above(0)
      .at_most(86400)
      .help("Seconds between samples.")
      .only_with(sampled);
  NRL_KEY(t, logger.gpu_monitoring.flush_interval)
      .above(0)
      .at_most(86400)
      .help("Seconds between writes of telemetry.jsonl.")
      .only_with(sampled);
}

void add_memory(Table& t) {
  t.section("memory", "Limits of memory.");
  t.resume("memory", OnResume::unrelated);
  NRL_KEY(t, memory.on_oom)
      .help(
          "If the plan of a rank does not fit into its memory, or the memory cannot be allocated: fail with "
          "the plan and changes that fit, or halve the microbatch and double the accumulation on all ranks, "
          "which leaves the steps as they are.");
  NRL_KEY(t, memory.max_memory)
      .above(0)
      .at_most(1)
      .help(
          "Fraction of the device's memory, on a CPU of the rank's share of the machine's, that "
          "policy.recompute: auto and policy.train_micro_batch_size: auto may plan with.");
  NRL_KEY(t, memory.offload_dir)
      .help(
          "CPU runs: directory, on a disk of each host, of the files in which offloaded memory lies. Their "
          "space is reserved at the start and free again when the run ends, however it ends. A directory in "
          "memory (tmpfs) is refused. null: TMPDIR if it is set and on a disk, else /var/tmp.");
}

void add_monitoring(Table& t) {
  t.section("monitoring", "Monitoring of the run: NaN, instability, leaks, alerts.");
  t.resume("monitoring", OnResume::unrelated);
  NRL_KEY(t, monitoring.enabled).help("Apply the rules of this section. false: none.");
  NRL_KEY(t, monitoring.nan_check)
      .help(
          "Search for the cause of a step that is not finite. loss: say whether it is the loss or the "
          "gradient "
          "norm. all: repeat the step and name the first tensor that is not finite, with its rank, "
          "microbatch "
          "and pass; grads: the same among the gradients of parameters. auto: all on a CPU, loss on a GPU, "
          "where the others wait for the result of every step.")
      .only_with(monitors);
  t.section("monitoring.stability", "Instability of loss and gradient norm.");
  NRL_KEY(t, monitoring.stability.on_instability)
      .help(
          "When the loss leaves its trend or becomes noisy, or the gradient norm explodes: warn, once for "
          "every "
          "such episode, and raise an alert; skip_step: also skip steps of spikes and explosions; rollback: "
          "go "
          "back to a checkpoint from before, with a lower learning rate.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.stability.window)
      .at_least(10)
      .at_most(10000)
      .help("Steps that a new one is compared with; there are no findings before as many steps.")
      .only_with(guards);
  NRL_KEY(t, monitoring.stability.cv_threshold)
      .above(0)
      .help(
          "Noise of the loss between steps, relative to its mean in the window, that is instability if it is "
          "also three times the noise of the window before.")
      .only_with(guards);
  const Need rolls_back{is("monitoring.stability.on_instability", {"rollback"})};
  NRL_KEY(t, monitoring.stability.lr_factor)
      .above(0)
      .at_most(1)
      .help("The learning rate is multiplied by this after every rollback, until the end of the run.")
      .only_with(rolls_back);
  NRL_KEY(t, monitoring.stability.max_recoveries)
      .at_least(0)
      .at_most(1000)
      .help("Rollbacks of the run; at the next instability it ends with exit code 79.")
      .only_with(rolls_back);
  NRL_KEY(t, monitoring.stability.skip_data)
      .help(
          "Leave out the samples from the checkpoint to the bad step after a rollback; false: train on them "
          "again.")
      .only_with(rolls_back);
  NRL_KEY(t, monitoring.stability.spike_factor)
      .above(1)
      .help("Gradient norm relative to its median in the window that is an explosion.")
      .only_with(guards);
  t.section("monitoring.memory_leak", "Growth of memory from step to step that is reported as a leak.");
  NRL_KEY(t, monitoring.memory_leak.slope_mb_per_step)
      .above(0)
      .help(
          "Growth of the resident memory of a process, or of a GPU's memory, that is a leak, in 1e6 bytes: "
          "two thirds of the slopes between the last steps. A leak is a warning that names what grows; null: "
          "not tested.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.memory_leak.ratio)
      .above(1)
      .help(
          "Memory in the last min_samples samples, relative to the first ones, that is a leak; null: not "
          "tested.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.memory_leak.step_increase_gb)
      .above(0)
      .help("Growth within one step that is a leak, in 1e9 bytes; null: not tested.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.memory_leak.min_samples)
      .at_least(2)
      .at_most(1000)
      .help("Samples before memory is compared. There is a sample after every step, at most five a second.")
      .only_with(monitors)
      .only_with({is_not("monitoring.memory_leak.slope_mb_per_step", "null"),
                  is_not("monitoring.memory_leak.ratio", "null"),
                  is_not("monitoring.memory_leak.step_increase_gb", "null")});
}

void add_live_views(Table& t) {
  t.section("monitoring.visualization", "Live views of the run.");
  const Need serves{is("monitoring.visualization.prometheus", {"true"}),
                    is("monitoring.visualization.dashboard", {"true"})};
  NRL_KEY(t, monitoring.visualization.prometheus)
      .help(
          "Rank 0 serves metrics for Prometheus at http://BIND:PORT/metrics; LOG_DIR/prometheus.json names "
          "the target.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.visualization.dashboard)
      .help("Rank 0 serves the page of nrl-train report at http://BIND:PORT/, and the last row at /api/row.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.visualization.port)
      .at_least(0)
      .at_most(65535)
      .help("Port of the server, or the next free one; 0: any.")
      .only_with(serves);
  NRL_KEY(t, monitoring.visualization.bind)
      .help("Address that the server listens at; 0.0.0.0: all of this machine, for anyone who reaches it.")
      .only_with(serves);
  NRL_KEY(t, monitoring.visualization.textfile)
      .help(
          "File (*.prom) with the same metrics, replaced at every monitoring.interval, for the textfile "
          "collector of node_exporter; null: none.")
      .only_with(monitors);
}

void add_alerting(Table& t) {
  const Need alerts{is("monitoring.alerting.enabled", {"true"})};
  t.section("monitoring.alerting", "Alerts when a metric crosses a threshold.");
  NRL_KEY(t, monitoring.alerting.enabled)
      .help(
          "Evaluate the built-in rules and those of `rules`. Alerts are printed, written to "
          "LOG_DIR/alerts.jsonl and sent to `command` and `webhook`.")
      .only_with(monitors);
  NRL_KEY(t, monitoring.interval)
      .above(0)
      .at_most(86400)
      .help(
          "Seconds between evaluations of the rules of alerts, which take the median since the last one, and "
          "between writes of visualization.textfile.")
      .only_with(
          {is("monitoring.alerting.enabled", {"true"}), is_not("monitoring.visualization.textfile", "null")});
  NRL_KEY(t, monitoring.alerting.rules)
      .help("Further rules: \"METRIC < NUMBER\" or \">\", with \" for N\" after N evaluations in a row (3).")
      .only_with(alerts);
  NRL_KEY(t, monitoring.alerting.command)
      .help(
          "Shell command run with every alert, at most 10 s each: JSON on its standard input, "
          "NRL_ALERT_RULE, "
          "_SEVERITY, _VALUE, _THRESHOLD, _STEP, _MESSAGE, _RUN in its environment.")
      .only_with(alerts);
  NRL_KEY(t, monitoring.alerting.webhook)
      .help(
          "Address that gets every alert as a POST of JSON with \"text\", as Slack and Mattermost take it: "
          "env:NAME, the environment variable that has it, or file:/PATH, whose first line it is; or an "
          "http:// URL, which is no secret.")
      .only_with(alerts);
  NRL_KEY(t, monitoring.alerting.slack_notifications).help("Requires a webhook.").only_with(alerts);
  NRL_KEY(t, monitoring.alerting.email_notifications)
      .help("Requires a command, which sends the mail.")
      .only_with(alerts);
  t.section("monitoring.alerting.thresholds", "Thresholds of the built-in rules.");
  NRL_KEY(t, monitoring.alerting.thresholds.loss_increase)
      .above(0)
      .help("Median loss above the best one, relative to it, also of monitoring.stability.")
      .only_with({is("monitoring.alerting.enabled", {"true"}),
                  is_not("monitoring.stability.on_instability", "off")});
  NRL_KEY(t, monitoring.alerting.thresholds.gpu_memory)
      .above(0)
      .at_most(1)
      .help("Fraction of a GPU's memory in use.")
      .only_with(alerts)
      .only_with({is("logger.monitor_gpus", {"true"})});
  NRL_KEY(t, monitoring.alerting.thresholds.cpu_usage)
      .above(0)
      .at_most(1)
      .help("Busy fraction of a node's processors. Not in runs on the CPU.")
      .only_with(alerts)
      .only_with({is("logger.monitor_gpus", {"true"})});
  NRL_KEY(t, monitoring.alerting.thresholds.training_speed)
      .above(0)
      .at_most(1)
      .help("Tokens per second relative to the median of steps 10 to 50.")
      .only_with(alerts);
  t.section("monitoring.analysis", "Statistical rules of alerts.");
  NRL_KEY(t, monitoring.analysis.trend_analysis)
      .help(
          "Alert when the loss rises or tokens/s fall over 200 steps (Mann-Kendall test, p < 0.001 with a "
          "change of at least 2 %).")
      .only_with(alerts);
  NRL_KEY(t, monitoring.analysis.anomaly_detection)
      .help("Alert when loss, gradient norm or step time leave their trend by anomaly_z in 3 steps in a row.")
      .only_with(alerts);
  NRL_KEY(t, monitoring.analysis.performance_regression)
      .help(
          "Alert when steps of a window of profiling.every take 10 % longer than those of the first one; it "
          "names the part that grew.")
      .only_with(alerts)
      .only_with({is_not("profiling.every", "null")});
  NRL_KEY(t, monitoring.analysis.anomaly_z)
      .above(0)
      .help("Distance from the trend of the last 100 steps in robust standard deviations (1.4826 MAD).")
      .only_with({is("monitoring.analysis.anomaly_detection", {"true"})});
}

void add_profiling(Table& t) {
  t.section("profiling", "Traces of selected steps.");
  t.resume("profiling", OnResume::unrelated);
  NRL_KEY(t, profiling.enabled)
      .help(
          "Record every operation of some steps, and write where their time and memory went into "
          "LOG_DIR/profile/step-FIRST.");
  NRL_KEY(t, profiling.steps)
      .help(
          "Steps to record: \"FIRST:END\", counted from 1, END exclusive. An evaluation, a text sample or a "
          "checkpoint among them divides them into two records.")
      .only_with({is("profiling.enabled", {"true"})});
  NRL_KEY(t, profiling.every)
      .at_least(1)
      .help("Record again each so many steps after the first ones; null: only once.")
      .only_with({is("profiling.enabled", {"true"})});
  NRL_KEY(t, profiling.ranks)
      .help(
          "Ranks that write their timelines: all, numbers of ranks, or auto: all of up to 16 ranks, else the "
          "first one of every pipeline stage and node, at most 16.")
      .only_with({is("profiling.enabled", {"true"})});
  NRL_KEY(t, profiling.trace)
      .help(
          "Format of the timelines: perfetto (https://ui.perfetto.dev), chrome (Kineto's JSON, for Holistic "
          "Trace Analysis and TensorBoard), or none.")
      .only_with({is("profiling.enabled", {"true"})});
  NRL_KEY(t, profiling.memory_snapshot)
      .help("Also draw the memory of the first rank over a step, every buffer with its lifetime, as a page.")
      .only_with({is("profiling.enabled", {"true"})});
  t.section("profiling.nsys", "Nsight Systems, which the run starts, and stops after some steps.");
  NRL_KEY(t, profiling.nsys.steps)
      .help(
          "Steps to capture on a GPU: \"FIRST:END\", counted from 1, END exclusive; null: none. The variable "
          "NRL_NSYS_PROFILE_STEP_RANGE has priority. Must be in CONFIG itself or on the command line.");
  NRL_KEY(t, profiling.nsys.workers)
      .help(
          "Patterns of the workers to capture, as of a shell; the ranks are named policy_worker. The "
          "variable "
          "NRL_NSYS_WORKER_PATTERNS has priority.")
      .only_with({is_not("profiling.nsys.steps", "null", "set")});
}

}  // namespace

Need evaluates() {
  return {is_not("loop.val_period", "0", "above 0"), is("loop.val_at_start", {"true"}),
          is("loop.val_at_end", {"true"})};
}

Need on_examples() {
  return {is("algorithm", {"sft", "dpo", "rm", "grpo", "distill"})};
}

Need on_prompts() {
  return {is("algorithm", {"sft", "grpo", "distill"})};
}

Need on_tokens() {
  return {is("algorithm", {"pretrain"})};
}

void add_top_keys(Table& t) {
  t.section("", "The run.");
  NRL_KEY(t, algorithm).resume(OnResume::unrelated).alias("training.algorithm").help("Training algorithm.");
  NRL_KEY(t, device)
      .resume(OnResume::unrelated)
      .help("Device of the run; auto: a GPU if this build can use one on every rank, else the CPU.");
}

void add_run_keys(Table& t) {
  add_loop(t, Algorithm::pretrain, &Config::pretrain);
  add_loop(t, Algorithm::sft, &Config::sft);
  add_objective_keys(t);
  add_rollout_keys(t);
  add_checkpointing(t);
  add_logger(t);
  add_reliability_keys(t);
  t.section("kernels", "Kernels of the CPU and the GPU.");
  t.resume("kernels", OnResume::unrelated);
  NRL_KEY(t, kernels.num_threads)
      .at_least(1)
      .at_most(max_threads)
      .help(
          "Threads per rank; auto: OMP_NUM_THREADS (of a list the first number) if set, else the cores that "
          "this rank may use, divided among the ranks of the node.");
  NRL_KEY(t, kernels.cpu_binding)
      .help(
          "CPUs that the threads of a rank may use. none: those that the launcher allows; auto: the rank's "
          "share of the cores of its node, unless the launcher has given it one; or CPUs of the node "
          "(\"0-3,8\"), divided among its ranks in their order.");
  NRL_KEY(t, kernels.isa)
      .help(
          "Instruction set of the CPU kernels. auto: the best that the CPU supports, where avx512_bf16 (bf16 "
          "dot products) and avx512_amx (bf16 tiles) only count if they are faster than fp32 arithmetic, "
          "which is measured.");
  NRL_KEY(t, kernels.share_device)
      .help("Let several ranks of a node share one GPU; they take turns, so this is for testing.");
  NRL_KEY(t, kernels.autotune)
      .help(
          "GPU: time the GEMM kernels of every shape at start and use the fastest instead of the library's "
          "heuristic. The choices are kept in kernels.gemm_tuning, or in LOG_DIR.");
  NRL_KEY(t, kernels.gemm_tuning)
      .help(
          "GPU: choices of autotuned runs, a file (*.txt) or a directory with one per GPU and version of "
          "cuBLASLt. Without autotune it is only read, and must be for this GPU and version; shapes that it "
          "lacks use the library's heuristic.");
  NRL_KEY(t, kernels.tf32).resume(OnResume::reported).help("GPU: fp32 GEMMs in TF32 (10 mantissa bits).");
  NRL_KEY(t, kernels.deterministic)
      .help(
          "GPU: bitwise reproducible runs, attention gradients included, at a cost in memory and time. CPU "
          "runs always are.");
  add_memory(t);
  add_monitoring(t);
  add_live_views(t);
  add_alerting(t);
  add_profiling(t);
}

}  // namespace nrl::config_detail
