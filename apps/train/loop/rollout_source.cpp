#include "apps/train/loop/rollout_source.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/model/inference.h"
#include "apps/plan/loss.h"
#include "apps/reward/rewards.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/example_numbers.h"
#include "apps/train/loop/reference.h"
#include "apps/train/state/hf_files.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/philox.h"
#include "core/io/atomic_file.h"

namespace nrl::train {
namespace {

// TEMPORARY generator until rollout::Generator lands.
std::vector<Completion> slow_generate(model::Inference& inference,
                                      std::span<const GenerationRequest> requests, double temperature,
                                      uint64_t seed, int64_t most, int64_t longest,
                                      const std::vector<int32_t>& end_ids, int64_t vocab, int64_t tokens) {
  std::vector<Completion> out;
  const PhiloxStream random(seed, "rollout");
  for (const GenerationRequest& r : requests)
    for (int64_t s = 0; s < r.count; ++s) {
      inference.reset();
      std::span<const float> logits = inference.append(r.prompt->ids);
      Completion& c = out.emplace_back();
      for (int64_t n = 0;; ++n) {
        double top = -INFINITY, best = -INFINITY, sum = 0;
        int32_t id = 0;
        for (const float z : logits) top = std::max(top, static_cast<double>(z));
        for (size_t v = 0; v < logits.size(); ++v) {
          const double z = static_cast<double>(logits[v]);
          sum += std::exp(z - top);
          const double u =
              random.uniform(static_cast<uint64_t>(((r.first_sample + s) * 4096 + n) * vocab + v));
          const double g = temperature > 0 ? z / temperature - std::log(-std::log(u + 1e-12)) : z;
          if (g > best && static_cast<int64_t>(v) < tokens) best = g, id = static_cast<int32_t>(v);
        }
        c.ids.push_back(id);
        c.log_probs.push_back(
            static_cast<float>(static_cast<double>(logits[static_cast<size_t>(id)]) - top - std::log(sum)));
        c.ended = std::ranges::find(end_ids, id) != end_ids.end();
        if (c.ended || std::ssize(c.ids) == most || std::ssize(r.prompt->ids) + std::ssize(c.ids) >= longest)
          break;
        logits = inference.append(std::span(&id, 1));
      }
    }
  return out;
}

}  // namespace

struct RolloutSource::Tools {
  std::unique_ptr<data::Tokenizer> tokenizer;
  std::unique_ptr<model::Inference> inference;
  std::unique_ptr<reward::Rewards> rewards;

  std::vector<Reward> judge(std::span<const RewardRequest> requests) const {
    std::vector<reward::Item> items;
    for (const RewardRequest& r : requests)
      items.push_back({.record = &r.prompt->record,
                       .where = r.prompt->where,
                       .prompt = tokenizer->decode(r.prompt->ids),
                       .completion = r.text,
                       .tokens = r.tokens,
                       .ended = r.ended});
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
  run_collectively(run.world, [&] {
    tools_->tokenizer = tokenizer_of_run(c);
    std::vector<model::ParameterView> views;
    for (const Tensor& weight : run.engine->weights()) views.push_back({weight, {}});
    tools_->inference =
        std::make_unique<model::Inference>(run.plan().spec, run.plan().parameters, std::move(views),
                                           run.engine->exec(), c.policy.max_total_sequence_length);
    tools_->rewards = std::make_unique<reward::Rewards>(reward::parse_specs(c.reward), c.logger.log_dir);
    for (const data::Prompts* prompts :
         {run.train.prompts.get(), run.validation ? run.validation->prompts.get() : nullptr})
      for (int64_t i = 0; prompts && i < prompts->size(); ++i)
        tools_->rewards->check((*prompts)[i].record, (*prompts)[i].where);
    if (run.world.rank() == 0) samples_ = AppendFile(join_path(c.logger.log_dir, "samples.jsonl"));
  });
  const plan::GridPosition& position = run.placement.grid_position();
  const data::Prompts& prompts = *run.train.prompts;
  Generate generate = [this, &c, &prompts](std::span<const GenerationRequest> requests, double temperature) {
    return slow_generate(*tools_->inference, requests, temperature,
                         static_cast<uint64_t>(resolved_loop(c).seed),
                         c.rollout.max_new_tokens.value_or(c.policy.max_total_sequence_length),
                         c.policy.max_total_sequence_length, prompts.end_ids(), run_.plan().spec.vocab_size,
                         tools_->tokenizer->vocab_size());
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
  totals.metrics = std::exchange(metrics_, {});
  return totals;
}

void RolloutSource::make() {
  const Config& c = run_.config;
  engine::Engine& engine = *run_.engine;
  const parallel::Groups& groups = run_.placement.groups();
  engine.finish_gathers();
  Rollouts::Made made = rollouts_->make(run_.position.prompts);
  metrics_ = std::move(made.metrics);
  metrics_.push_back({.name = "generation_s", .value = made.generation_s});
  metrics_.push_back({.name = "reward_s", .value = made.reward_s});
  // Without them the loss compares with the step's own log-probabilities, or compares nothing.
  std::shared_ptr<const data::SequenceNumbers> old, reference;
  if (!c.loss_fn.force_on_policy_ratio && c.loss_fn.type != PolicyObjective::reinforce) {
    old = compute_log_probs(c, engine, made.set, data::SequenceNumbers::Kind::by_row, groups);
    double error = 0, tokens = 0;
    for (int64_t e = 0; e < made.set->size(); ++e) {
      const data::Rollout& r = made.set->rollouts()[static_cast<size_t>(e)];
      for (size_t t = 0; r.trained && t < r.log_probs.size(); ++t, ++tokens)
        error += std::exp(std::abs(old->of(e, 0)[static_cast<size_t>(r.prompt_tokens) - 1 + t] -
                                   static_cast<double>(r.log_probs[t])));
    }
    metrics_.push_back({.name = "token_mult_prob_error", .value = tokens > 0 ? error / tokens : 1});
  }
  if (plan::needs_reference(c)) {
    run_.plan().decoder->use_adapters(false);
    reference = compute_log_probs(c, engine, made.set, data::SequenceNumbers::Kind::by_row, groups);
    run_.plan().decoder->use_adapters(true);
  }
  if (const std::string failures = tools_->rewards->take_failures(); !failures.empty())
    log::warn("completions without a reward: {}", failures);
  write_samples(made.samples, "train");
  const auto numbers = example_numbers(c, made.set, reference, old);
  steps_ = example_source(c, made.set, run_.plan(), {.shuffle = false, .repeat = false, .numbers = numbers});
  used_ = 0;
}

Rollouts::Made RolloutSource::validate() {
  run_.engine->finish_gathers();
  Rollouts::Made made = rollouts_->validate(*run_.validation->prompts);
  write_samples(made.samples, "validation");
  return made;
}

void RolloutSource::write_samples(const std::vector<JsonValue>& samples, const char* of) {
  if (!samples_.is_open()) return;
  std::string text;
  for (JsonValue sample : samples) {
    sample.set("step", run_.position.step);
    sample.set("of", of);
    text += sample.dump() + "\n";
  }
  try {
    samples_.append(text);
  } catch (const Error& e) {
    log::warn("{}; the run continues without it", e.what());
    samples_ = AppendFile();
  }
}

}  // namespace nrl::train
