#include "apps/train/start/run_data.h"

#include <algorithm>
#include <iterator>

#include "apps/state/hf_files.h"
#include "apps/train/start/document_rules.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::train {
namespace {

constexpr const char* no_evaluation[] = {"loop.val_period=0", "loop.val_batches=null",
                                         "loop.val_at_start=false", "loop.val_at_end=false"};

// Options for `samples` samples of the training or validation part of the data; no sources if
// that part is not configured.
data::DatasetOptions dataset_options(const Config& config, int64_t vocab_size, data::Split part,
                                     int64_t samples) {
  const DatasetConfig& own = part == data::Split::validation && !config.data.validation.data_path.empty()
                                 ? config.data.validation
                                 : config.data.train;
  const bool separate = &own == &config.data.validation;
  data::DatasetOptions o;
  for (size_t i = 0; i < own.data_path.size(); ++i)
    o.sources.push_back({.prefix = own.data_path[i],
                         .weight = own.weights ? std::optional((*own.weights)[i]) : std::nullopt});
  if (config.data.split && !separate) {
    o.split = *config.data.split;
    o.part = part;
  } else if (part == data::Split::validation && !separate) {
    o.sources.clear();
  }
  o.sequence_length = config.policy.max_total_sequence_length;
  o.samples = samples;
  o.seed = static_cast<uint32_t>(data_seed(config));
  o.vocab_size = vocab_size;
  o.documents = document_rules(config);
  o.orders = std::make_shared<data::OrderFiles>(data::OrderFiles::of_node());
  return o;
}

// Sets max_steps from the length of an epoch.
void plan_steps(const Config& c, int64_t global_batch, TrainData& out) {
  const LoopConfig& loop = resolved_loop(c);
  out.max_steps = loop.max_num_steps.value_or(INT64_MAX);
  if (loop.max_num_epochs) {
    int64_t samples = 0;
    if (__builtin_mul_overflow(out.epoch_samples, *loop.max_num_epochs, &samples))
      fail(Exit::config, "{}: {} x {} samples are more than can be counted. Fix: lower it",
           loop_key(c, "max_num_epochs"), *loop.max_num_epochs, out.epoch_samples);
    const int64_t steps = samples / global_batch;
    if (steps == 0)
      fail(Exit::config,
           "{}: {} x {} samples are less than one global batch of {} samples. Fix: lower "
           "policy.train_global_batch_size, or add data",
           loop_key(c, "max_num_epochs"), *loop.max_num_epochs, out.epoch_samples, global_batch);
    out.max_steps = std::min(out.max_steps, steps);
  }
}

// Fails unless every token has the teacher's numbers that distillation reads.
void require_teacher(const Config& c, const data::ExampleSet& set, const char* name) {
  const int64_t wanted = c.distillation.topk, given = set.columns().top_k;
  const std::string file = clipped(set.files().front());
  if (given == 0)
    fail(
        Exit::config,
        "{}.data_path: the records of {} have no topk_ids and topk_logprobs, but algorithm distill reads the "
        "teacher's log-probabilities there. Fix: give other files (docs/examples.md)",
        name, file);
  if (given < wanted)
    fail(Exit::config,
         "distill.topk: {}, but the records of {} have {} of a teacher per token. Fix: distill.topk={}",
         wanted, file, counted(given, "id"), given);
}

// Fails if records lack numbers that the loss reads.
void require_columns(const Config& c, const data::ExampleSet& set, const char* name) {
  if (c.algorithm == Algorithm::distill) return require_teacher(c, set, name);
  if (c.algorithm != Algorithm::grpo) return;
  const data::ExampleColumns columns = set.columns();
  using Value = data::ExampleValue;
  using LogProbs = data::TokenLogProbs;
  const auto require = [&](bool has, const char* what, const char* why, const char* fix) {
    if (!has)
      fail(Exit::config, "{}.data_path: the records of {} have no {}, but {}. Fix: {}", name,
           clipped(set.files().front()), what, why, fix);
  };
  require(columns.has(Value::reward) || columns.has(Value::advantage), "reward or advantage",
          "algorithm grpo trains on them", "add one of them to every record");
  const bool sampler = columns.has(LogProbs::sampler), old = columns.has(LogProbs::old);
  const bool ratios = c.loss_fn.type != PolicyObjective::reinforce && !c.loss_fn.force_on_policy_ratio;
  require(!ratios || sampler || old, "logprobs", "the loss compares the policy with the one that sampled",
          "add logprobs, or set loss_fn.force_on_policy_ratio: true");
  require(!c.loss_fn.use_kl_in_reward || sampler || old, "logprobs",
          "loss_fn.use_kl_in_reward compares the policy before the update with the reference",
          "add logprobs, or set the key to false");
  const AdvantageEstimator estimator = c.rollout.adv_estimator;
  const bool by_group = estimator == AdvantageEstimator::grpo;
  if (columns.has(Value::advantage) && (!by_group || c.loss_fn.use_kl_in_reward))
    fail(Exit::config,
         "{}.data_path: the records of {} have advantages, but {} computes them from rewards. Fix: give them "
         "rewards without advantages",
         name, clipped(set.files().front()),
         by_group ? "loss_fn.use_kl_in_reward"
                  : fmt::format("grpo.adv_estimator.name: {}", name_of(estimator)));
  require(!c.loss_fn.use_importance_sampling_correction || (sampler && old), "logprobs and old_logprobs",
          "loss_fn.use_importance_sampling_correction compares them", "add both, or set the key to false");
}

std::unique_ptr<data::Tokenizer> required_tokenizer(const Config& c) {
  auto tokenizer = tokenizer_of_run(c);
  if (!tokenizer)
    fail(Exit::config, "policy.tokenizer.name must be given for algorithm {}: {}", name_of(c.algorithm),
         c.policy.model_name ? fmt::format("{} has no tokenizer", clipped(*c.policy.model_name))
                             : "the model is from scratch");
  return tokenizer;
}

std::shared_ptr<const data::Prompts> open_prompts(const Config& c, bool validation, int64_t vocab_size) {
  return std::make_shared<data::Prompts>(example_options(c, validation, vocab_size), *required_tokenizer(c));
}

std::shared_ptr<const data::Examples> open_examples(const Config& c, bool validation, int64_t vocab_size,
                                                    const ExampleOpening& opening) {
  const auto tokenizer = required_tokenizer(c);
  const char* const name = validation ? "data.validation" : "data.train";
  auto set = data::open_examples(example_options(c, validation, vocab_size), *tokenizer, opening.threads,
                                 opening.progress);
  // A format of `auto` is known only now.
  if (const std::string why = format_refusal(c.algorithm, set->format()); !why.empty())
    fail(Exit::config,
         "{}.data_path: the records of {} have format {}, but {}. Fix: give other files, or {}.format", name,
         clipped(set->files().front()), name_of(set->format()), why, name);
  require_columns(c, *set, name);
  if (opening.opened) opening.opened(name, *set);
  return set;
}

}  // namespace

data::ExampleOptions example_options(const Config& c, bool validation, int64_t vocab_size) {
  const DatasetConfig& set = validation ? c.data.validation : c.data.train;
  return {.inputs = set.data_path,
          .format = set.format,
          .chat_key = c.data.chat_key.value_or(""),
          .input_key = c.data.input_key,
          .output_key = c.data.output_key,
          .system_prompt_file = c.data.system_prompt_file.value_or(""),
          .prompt_file = c.data.prompt_file.value_or(""),
          .chat_template = c.policy.tokenizer.chat_template,
          .chat_template_kwargs = {},
          .template_date = c.data.template_date.value_or(""),
          .train_on = c.data.train_on,
          .max_length = c.policy.max_total_sequence_length,
          .on_overlong = c.policy.on_overlong,
          .special_tokens_in_text = c.data.special_tokens_in_text,
          .on_bad_record = c.data.on_bad_record,
          .vocab_size = vocab_size,
          .cache_dir = c.data.cache_dir.value_or("")};
}

TrainData plan_train_data(const Config& c, int64_t vocab_size, int64_t global_batch) {
  data::DatasetOptions options = dataset_options(c, vocab_size, data::Split::train, 1);
  data::open_sources(options);
  TrainData out;
  out.epoch_samples = data::samples_of_one_epoch(options);
  plan_steps(c, global_batch, out);
  out.samples = options.samples = std::max(out.max_steps, int64_t{1}) * global_batch;
  out.options = std::move(options);
  return out;
}

TrainData open_train_data(const Config& c, int64_t vocab_size, int64_t global_batch,
                          const ExampleOpening& opening) {
  if (generates_rollouts(c)) {
    TrainData out;
    out.prompts = open_prompts(c, false, vocab_size);
    out.epoch_samples = out.prompts->size() * c.rollout.num_generations_per_prompt;
    plan_steps(c, global_batch, out);
    return out;
  }
  if (trains_on_examples(c)) {
    TrainData out;
    out.examples = open_examples(c, false, vocab_size, opening);
    out.epoch_samples = out.examples->size();
    plan_steps(c, global_batch, out);
    return out;
  }
  TrainData out = plan_train_data(c, vocab_size, global_batch);
  out.dataset = data::open_token_dataset(out.options);
  return out;
}

void extend_train_data(TrainData& train, int64_t samples) {
  if (train.examples || train.prompts) return;  // epochs follow each other without an end
  train.dataset.reset();
  train.samples = train.options.samples = samples;
  train.dataset = data::open_token_dataset(train.options);
}

std::optional<ValidationData> open_validation_data(const Config& c, const TrainData& train,
                                                   int64_t vocab_size, int64_t global_batch,
                                                   const ExampleOpening& opening) {
  if (!evaluates(c)) return std::nullopt;
  if (generates_rollouts(c)) {
    ValidationData out;
    out.prompts = open_prompts(c, true, vocab_size);
    return out;
  }
  if (trains_on_examples(c)) {
    ValidationData out;
    out.examples = open_examples(c, true, vocab_size, opening);
    out.epoch_samples = out.examples->size();
    const int64_t all = (out.epoch_samples + global_batch - 1) / global_batch;
    out.batches = std::min(resolved_loop(c).val_batches.value_or(all), all);
    return out;
  }
  std::optional<ValidationData> out = plan_validation_data(c, train, global_batch);
  out->dataset = data::open_token_dataset(out->options);
  return out;
}

std::optional<ValidationData> plan_validation_data(const Config& c, const TrainData& train,
                                                   int64_t global_batch) {
  const LoopConfig& loop = resolved_loop(c);
  if (!evaluates(c)) return std::nullopt;
  ValidationData out;
  out.options = dataset_options(c, train.options.vocab_size, data::Split::validation, 1);
  NRL_CHECK(!out.options.sources.empty(), "the configuration was not checked");
  for (auto& source : out.options.sources)
    for (const auto& open : train.options.sources)
      if (source.prefix == open.prefix) source.file = open.file;
  data::open_sources(out.options);
  out.epoch_samples = data::samples_of_one_epoch(out.options);
  out.batches = loop.val_batches.value_or(std::max<int64_t>(out.epoch_samples / global_batch, 1));
  out.options.samples = out.batches * global_batch;
  return out;
}

data::LoaderOptions make_loader_options(const Config& config, const BatchPlan& batch,
                                        const plan::GridPosition& position) {
  data::LoaderOptions loading;
  loading.micro_batch = batch.micro;
  loading.data_parallel_rank = position.at.dp;
  loading.data_parallel_size = position.sizes.dp;
  loading.accumulation = batch.accumulation;
  loading.threads = static_cast<int>(config.data.num_workers);
  loading.prefetch = static_cast<int>(config.data.prefetch_batches);
  return loading;
}

std::vector<std::string> random_token_overrides() {
  static constexpr std::string_view ours[] = {"data.train.weights", "data.split", "data.validation"};
  std::vector<std::string> out = default_overrides(ours);
  out.insert(out.end(), std::begin(no_evaluation), std::end(no_evaluation));
  out.emplace_back("data.train.data_path=random-tokens");
  return out;
}

std::vector<std::string> steps_only_overrides(int64_t steps) {
  std::vector<std::string> out(std::begin(no_evaluation), std::end(no_evaluation));
  out.insert(out.end(), {"checkpointing.enabled=false", "logger.sample_period=0", "loop.max_num_epochs=null",
                         fmt::format("loop.max_num_steps={}", steps)});
  return out;
}

int64_t loss_tokens_of_all(const data::TokenDataset& dataset, int64_t tokens_per_step,
                           const plan::BatchCounts& mine, const parallel::Groups& ranks,
                           const model::ModelLayout& layout) {
  if (!dataset.documents().eod_mask_loss) return tokens_per_step;
  // Context-parallel ranks have read the same samples.
  auto sum = layout.context_rank == 0 ? static_cast<double>(mine.loss_tokens) : 0.0;
  ranks.host(parallel::group::dp_cp).all_reduce(std::span(&sum, 1));
  return std::max<int64_t>(static_cast<int64_t>(sum), 1);
}

}  // namespace nrl::train
