#include "apps/train/loop/rollout_source.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "apps/data/text_source.h"
#include "apps/monitor/timers.h"
#include "apps/plan/generation.h"
#include "apps/plan/host_memory.h"
#include "apps/plan/loss.h"
#include "apps/plan/memory_check.h"
#include "apps/plan/snapshot.h"
#include "apps/reward/rewards.h"
#include "apps/rollout/generator.h"
#include "apps/state/hf_files.h"
#include "apps/train/launch/agreed.h"
#include "apps/train/launch/faults.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/evaluator.h"
#include "apps/train/loop/example_numbers.h"
#include "apps/train/loop/policy_numbers.h"
#include "apps/train/loop/reference.h"
#include "apps/train/start/memory_fit.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/status.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "parallel/comm/mpi/mpi_options.h"

namespace nrl::train {
namespace {

constexpr int64_t equal_to_warn = 10, unscored_to_end = 5;

/// Returns the prompts of the validation data; unset if the run does not evaluate.
std::optional<int64_t> validation_prompts(const Run& run) {
  return run.validation ? std::optional(run.validation->prompts->size()) : std::nullopt;
}

/// Fails if the teacher's numbers do not fit into this rank's share of the host's memory, before the teacher
/// is read.
void require_host_memory(const Run& run) {
  const Config& c = run.config;
  const std::optional<int64_t> prompts = validation_prompts(run);
  const int64_t numbers = plan::teacher_number_bytes(c, prompts);
  if (numbers == 0) return;
  const bool on_host = run.plan().device == DeviceType::cpu;
  const double share = on_host ? static_cast<double>(run.placement.capacity())
                               : static_cast<double>(cpu::machine_memory()) / run.world.local_size();
  const plan::RunPlan& plan = run.plan();
  int64_t planned = plan.memory.bytes(memory::Tier::pinned) + plan.memory.bytes(memory::Tier::host);
  if (plan::takes_snapshot(c, plan, share)) planned += plan::snapshot_bytes(c, plan);
  if (run.world.size() > 1) planned += comm::mpi_resident_bytes;
  plan::HostFacts facts;
  // The program, the libraries, a GPU's driver and the data are resident by now, as is what the plan knows.
  facts.program = std::max<int64_t>(static_cast<int64_t>(cpu::resident_bytes()) - planned, 0);
  facts.threads = run.placement.host_threads();
  facts.memory = share;
  facts.validation_prompts = prompts;
  const int64_t left = plan::room_for_teacher_numbers(c, plan, facts, readable_reference_bytes(c, plan),
                                                      static_cast<int64_t>(share));
  if (numbers > left)
    fail(Exit::out_of_memory,
         "the teacher's numbers of {} completions take up to {} in each process, and a rank's share of the "
         "host's memory leaves {}. Fix: lower distill.topk, {} ids and logits for each token now, "
         "distill.num_prompts_per_step, {}or policy.generation.max_new_tokens",
         grouped(plan::taught_completions(c, prompts)), human_bytes(static_cast<uint64_t>(numbers)),
         human_bytes(static_cast<uint64_t>(std::max<int64_t>(left, 0))), grouped(c.distillation.topk),
         prompts ? "distill.max_val_samples " : "");
}

/// The memory of this rank's generator, where other models than the policy take `others` bytes.
plan::GenerationPlan generation_of(const Run& run, int64_t others) {
  const auto left = static_cast<int64_t>(run.placement.capacity()) - run.plan().memory.total_bytes() - others;
  plan::GenerationPlan plan = plan::plan_generation(run.config, run.plan(), left);
  if (!plan.fits)
    fail(Exit::out_of_memory,
         "generation: a sequence of {} tokens takes {} of cache, and the plan leaves {}. Fix: lower "
         "policy.max_total_sequence_length or the memory of training (docs/memory.md)",
         plan.limits.longest, human_bytes(static_cast<uint64_t>(plan.sequence_bytes)),
         human_bytes(static_cast<uint64_t>(std::max<int64_t>(left, 0))));
  return plan;
}

}  // namespace

struct RolloutSource::Tools {
  std::unique_ptr<data::Tokenizer> tokenizer;
  std::unique_ptr<rollout::Generator> generator;
  std::unique_ptr<reward::Rewards> rewards;
  std::unique_ptr<ReferenceModel> reference;  ///< null: the model of the start, if any

  std::vector<Completion> generate(std::span<const GenerationRequest> requests, double temperature,
                                   int64_t most, int64_t longest, const std::vector<int32_t>& end_ids,
                                   uint64_t seed) const {
    std::map<int64_t, size_t> places;  // by the numbers of completions
    for (const GenerationRequest& r : requests) {
      const auto prompt = std::make_shared<const std::vector<int32_t>>(r.prompt->ids);
      std::vector<rollout::Request> samples;
      for (int64_t i = 0; i < r.count; ++i) {
        places.emplace(r.first_sample + i, places.size());
        samples.push_back({.id = r.first_sample + i, .prompt = prompt});
      }
      generator->submit(samples, {.max_new_tokens = std::min(most, longest - std::ssize(*prompt)),
                                  .temperature = temperature,
                                  .stop_ids = end_ids,
                                  .seed = seed});
    }
    std::vector<Completion> out(places.size());
    while (std::optional<rollout::Completion> done = generator->next())
      out[places.at(done->id)] = {.ids = std::move(done->ids),
                                  .log_probs = std::move(done->log_probs),
                                  .ended = done->finish == rollout::Finish::stop};
    return out;
  }

  std::vector<Reward> judge(std::span<const RewardRequest> requests) const {
    std::vector<reward::Item> items;
    for (size_t i = 0; i < requests.size(); ++i) {
      const RewardRequest& r = requests[i];
      const bool same = i > 0 && r.prompt == requests[i - 1].prompt;
      items.push_back(
          {.record = &r.prompt->record,
           .where = r.prompt->where,
           .prompt = same ? items.back().prompt : data::with_replacements(tokenizer->decode(r.prompt->ids)),
           .completion = data::with_replacements(r.text),
           .tokens = r.tokens,
           .ended = r.ended});
    }
    std::vector<Reward> out;
    for (const reward::Judgement& judged : rewards->judge(items)) {
      Reward& r = out.emplace_back(Reward{.total = judged.total, .parts = {}});
      for (const std::optional<double>& part : judged.parts) r.parts.push_back(part.value_or(NAN));
    }
    return out;
  }
};

RolloutSource::RolloutSource(Run& run)
    : run_(run),
      tools_(std::make_unique<Tools>()),
      updates_(rollouts_at_once(run.config) / run.plan().batch.global),
      used_(updates_) {
  const Config& c = run.config;
  run_collectively(run.world, [&] { require_host_memory(run); });
  const std::optional<int64_t> answered = validation_prompts(run);
  if (c.loss_fn.reference_model && plan::needs_reference(c)) {
    tools_->reference = std::make_unique<ReferenceModel>(run);
    const bool teaches = c.algorithm == Algorithm::distill;
    notes_.push_back(fmt::format("{} {} beside the {}: {}", teaches ? "teacher" : "reference",
                                 clipped(*c.loss_fn.reference_model), teaches ? "student" : "policy",
                                 human_bytes(static_cast<uint64_t>(tools_->reference->bytes()))));
    if (teaches)
      notes_.push_back(
          fmt::format("teacher's numbers of {} completions: up to {} in the memory of each process",
                      grouped(plan::taught_completions(c, answered)),
                      human_bytes(static_cast<uint64_t>(plan::teacher_number_bytes(c, answered)))));
  }
  const int64_t others =
      plan::bytes_beside_plan(c, run.plan(), tools_->reference ? tools_->reference->bytes() : 0, answered);
  run_collectively(run.world, [&] {
    tools_->tokenizer = tokenizer_of_run(c);
    std::vector<model::ParameterView> views;
    for (const Tensor& weight : run.engine->weights()) views.push_back({weight, {}});
    const plan::GenerationPlan plan = generation_of(run, others);
    model::GenerationLimits limits = plan.limits;
    limits.vocabulary = tools_->tokenizer->vocab_size();
    auto generator = std::make_unique<rollout::LocalGenerator>(run.plan().spec, run.plan().parameters,
                                                               std::move(views), run.engine->exec(), limits,
                                                               plan.layout, &run.placement.groups());
    notes_.push_back("generation of " + plan.text());
    if (run.plan().device == DeviceType::cuda)
      notes_.push_back(generator->no_graphs().empty()
                           ? "generation replays decoding passes as CUDA graphs"
                           : "generation without CUDA graphs: " + generator->no_graphs());
    tools_->generator = std::move(generator);
    tools_->rewards = std::make_unique<reward::Rewards>(reward::parse_specs(c.reward), c.logger.log_dir);
    for (std::string& note : tools_->rewards->notes()) notes_.push_back("reward " + note);
    for (const data::Prompts* prompts :
         {run.train.prompts.get(), run.validation ? run.validation->prompts.get() : nullptr})
      for (int64_t i = 0; prompts && i < prompts->size(); ++i)
        tools_->rewards->check((*prompts)[i].record, (*prompts)[i].where);
    samples_.emplace(c.logger.log_dir, run.position.step, run.world.rank() == 0, samples_file);
  });
  const plan::GridPosition& position = run.placement.grid_position();
  const data::Prompts& prompts = *run.train.prompts;
  Generate generate = [this, &c, &prompts](std::span<const GenerationRequest> requests, double temperature) {
    const int64_t longest = c.policy.max_total_sequence_length;
    return tools_->generate(requests, temperature, c.rollout.max_new_tokens.value_or(longest), longest,
                            prompts.end_ids(), static_cast<uint64_t>(resolved_loop(c).seed));
  };
  RewardFunctions rewards{
      .names = tools_->rewards->names(),
      .judge = [this](std::span<const RewardRequest> requests) { return tools_->judge(requests); }};
  rollouts_ =
      std::make_unique<Rollouts>(c, prompts, *tools_->tokenizer,
                                 RolloutRanks{.dp = position.at.dp,
                                              .dp_size = position.sizes.dp,
                                              .judges = position.at.tp == 0,
                                              .all = &run.placement.groups().host(parallel::group::all)},
                                 std::move(generate), std::move(rewards));
}

RolloutSource::~RolloutSource() = default;

int64_t RolloutSource::begin() {
  if (complete()) make();
  ++used_;
  return steps_->begin();
}

StepSource::Totals RolloutSource::totals() {
  Totals totals = steps_->totals();
  totals.generated = !metrics_.empty();
  totals.metrics.insert(totals.metrics.begin(), metrics_.begin(), metrics_.end());
  metrics_.clear();
  return totals;
}

void RolloutSource::make() {
  const Config& c = run_.config;
  engine::Engine& engine = *run_.engine;
  const parallel::Groups& groups = run_.placement.groups();
  engine.finish_gathers();
  steps_.reset();  // the rollouts of the last steps, and the teacher's numbers of them
  tools_->generator->weights_changed(run_.position.updates);
  Rollouts::Made made = rollouts_->make(run_.position.prompts);
  metrics_ = std::move(made.metrics);
  metrics_.push_back({.name = "generation_s", .value = made.generation_s});
  fault::reach(status::Phase::evaluation, run_.position.step + 1);
  std::shared_ptr<const data::SequenceNumbers> old, reference;
  if (c.algorithm == Algorithm::distill) {
    const double begin = monitor::Timers::steady_seconds();
    tools_->reference->teach(made.set);
    metrics_.push_back({.name = "teacher_s", .value = monitor::Timers::steady_seconds() - begin});
  } else {
    metrics_.push_back({.name = "reward_s", .value = made.reward_s});
    if (reads_old_log_probs(c))
      old = compute_log_probs(c, engine, made.set, data::SequenceNumbers::Kind::by_row, groups);
    if (tools_->reference)
      reference = tools_->reference->log_probs(made.set);
    else if (plan::needs_reference(c))
      reference = compute_reference(c, engine, made.set, data::SequenceNumbers::Kind::by_row, groups);
  }
  if (const std::string failures = tools_->rewards->take_failures(); !failures.empty())
    log::warn("completions without a reward: {}", failures);
  // Before a failure, whose message refers to them.
  write_samples(run_.position.step + 1, made.samples, "train");
  unscored_ = c.reward.empty() || made.scored > 0 ? 0 : unscored_ + 1;
  if (unscored_ == unscored_to_end)
    run_collectively(run_.world, [] {
      fail(Exit::unavailable,
           "no completion of {} generations in a row has a reward, so that nothing is trained: the warnings "
           "above and samples.jsonl say why. Fix: mend what judges them and start the run again, which "
           "resumes from its last checkpoint",
           unscored_to_end);
    });
  equal_ = !c.reward.empty() && made.equal_groups == c.rollout.num_prompts_per_step ? equal_ + 1 : 0;
  if (equal_ == equal_to_warn && run_.world.rank() == 0)
    log::warn(
        "all rewards of a prompt's completions were equal, {} generations in a row: nothing is learned. "
        "samples.jsonl shows them; look at `reward`, or use harder or easier prompts",
        equal_);
  const auto numbers = example_numbers(c, made.set, reference, old);
  steps_ = example_source(c, made.set, run_.plan(), {.shuffle = false, .repeat = false, .numbers = numbers});
  used_ = 0;
}

RolloutSource::Evaluation RolloutSource::validate() {
  const Config& c = run_.config;
  engine::Engine& engine = *run_.engine;
  engine.finish_gathers();
  tools_->generator->weights_changed(run_.position.updates);
  const Rollouts::Made made = rollouts_->validate(*run_.validation->prompts);
  write_samples(run_.position.step, made.samples, "validation");
  Evaluation out{.metrics = made.metrics, .loss = {}};
  if (c.algorithm != Algorithm::distill) return out;
  tools_->reference->teach(made.set);
  const auto source =
      example_source(c, made.set, run_.plan(),
                     {.shuffle = false, .repeat = false, .numbers = example_numbers(c, made.set, nullptr)});
  const int64_t global = run_.plan().batch.global, batches = (made.set->size() + global - 1) / global;
  out.loss = mean_metrics(engine, *source, batches, run_.placement.groups()).front();
  note_validation_loss(run_.position, *out.loss);
  return out;
}

void RolloutSource::write_samples(int64_t step, const std::vector<JsonValue>& samples, const char* of) {
  try {
    for (JsonValue sample : samples) {
      sample.set("step", step);
      sample.set("of", of);
      samples_->append(sample);
    }
  } catch (const Error& e) {
    log::warn("{}; the run continues without it", e.what());
  }
}

}  // namespace nrl::train
