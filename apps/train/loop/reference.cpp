#include "apps/train/loop/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "apps/data/order_file.h"
#include "apps/plan/forward_plan.h"
#include "apps/plan/loss.h"
#include "apps/state/input_identity.h"
#include "apps/state/model_source.h"
#include "apps/state/run_state.h"
#include "apps/train/launch/launch.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/initial_state.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "core/ops/transfer.h"
#include "parallel/context/zigzag.h"

namespace nrl::train {

using Kind = data::SequenceNumbers::Kind;

namespace {

/// Notes which sequences the microbatches of a step have. Its numbers are zeros.
class SequencesOfRows final : public data::StepNumbers {
 public:
  struct Place {
    int64_t example;
    int sequence;
    int64_t first_row, rows;
  };
  explicit SequencesOfRows(const model::LossNeeds& needs) : needs_(needs) {}

  std::vector<int64_t> widths() const override {
    std::vector<int64_t> widths;
    for (const model::ColumnSpec& column : needs_.columns) widths.push_back(column.width);
    return widths;
  }
  void begin_step(std::span<const int64_t>, const data::ExampleStep&) override { places_.clear(); }
  void append(int64_t example, int sequence, int64_t rows, data::HostMicroBatch& batch) override {
    if (batch.sequences == 1) places_.emplace_back();
    places_.back().push_back({example, sequence, std::ssize(batch.tokens) - rows, rows});
    batch.sequence_values.resize(batch.sequence_values.size() + static_cast<size_t>(needs_.sequence_values));
    const std::vector<int64_t> of_columns = widths();
    for (size_t c = 0; c < of_columns.size(); ++c)
      batch.columns[c].resize(batch.columns[c].size() + static_cast<size_t>(rows * of_columns[c]));
  }
  /// Must be called after a microbatch was read, which may have no sequence.
  void end_microbatch(const data::HostMicroBatch& batch) {
    if (batch.sequences == 0) places_.emplace_back();
  }
  /// The places of the oldest microbatch that was not taken.
  std::vector<Place> take() {
    std::vector<Place> out = std::move(places_.front());
    places_.pop_front();
    return out;
  }

 private:
  const model::LossNeeds needs_;
  std::deque<std::vector<Place>> places_;
};

/// Runs the model forward over all examples. read(results, places) gets the results of each microbatch, and
/// its sequences.
using Read = std::function<void(const model::HeadOutput&, std::span<const SequencesOfRows::Place>)>;
void score(const Config& config, engine::Engine& engine,
           const std::shared_ptr<const data::Examples>& examples, const Read& read) {
  const plan::RunPlan& plan = engine.plan();
  const auto places = std::make_shared<SequencesOfRows>(plan.decoder->options().loss);
  const auto source =
      example_source(config, examples, plan, {.shuffle = false, .repeat = false, .numbers = places});
  const auto next = [&]() -> const data::HostMicroBatch& {
    const data::HostMicroBatch& batch = source->next().batch;
    places->end_microbatch(batch);
    return batch;
  };
  for (int64_t done = 0; done < examples->size(); done += plan.batch.global)
    engine.run_forward(
        source->begin(), next,
        [&](const model::MicroBatch&, const model::HeadOutput& results) { read(results, places->take()); },
        done == 0);
}

}  // namespace

std::shared_ptr<const data::SequenceNumbers> compute_log_probs(const Config& config, engine::Engine& engine,
                                                               std::shared_ptr<const data::Examples> examples,
                                                               Kind kind, const parallel::Groups& groups) {
  const plan::BatchShape& shape = engine.plan().tensors->shape();
  auto out = std::make_shared<data::SequenceNumbers>(*examples, kind);
  std::optional<parallel::ZigZag> share;
  if (shape.context > 1) share.emplace(shape.sequences, shape.length, shape.context, shape.context_rank);
  std::vector<float> log_probs;
  score(config, engine, examples,
        [&](const model::HeadOutput& results, std::span<const SequencesOfRows::Place> places) {
          log_probs.resize(static_cast<size_t>(results.log_prob.dim(0)));
          ops::download(engine.exec(), results.log_prob, log_probs.data());
          std::vector<double> rows(static_cast<size_t>(share ? shape.length : std::ssize(log_probs)));
          for (int64_t r = 0; r < std::ssize(log_probs); ++r)
            rows[static_cast<size_t>(share ? share->global_row(r) : r)] = static_cast<double>(log_probs[r]);
          for (const SequencesOfRows::Place& p : places)
            for (int64_t t = 0; t < p.rows; ++t)
              out->of(p.example, p.sequence)[kind == Kind::one ? 0 : t] += rows[p.first_row + t];
        });
  // Every rank has the rows of its examples, context and stage, and zeros elsewhere.
  groups.host(parallel::group::all).all_reduce(out->all());
  return out;
}

std::shared_ptr<const data::SequenceNumbers> compute_reference(const Config& config, engine::Engine& engine,
                                                               std::shared_ptr<const data::Examples> examples,
                                                               Kind kind, const parallel::Groups& groups) {
  const bool copy = plan::keeps_reference(config);
  const auto become = [&](bool reference) {
    if (copy)
      engine.exchange_reference();
    else
      engine.plan().decoder->use_adapters(!reference);
  };
  become(true);
  auto out = compute_log_probs(config, engine, std::move(examples), kind, groups);
  become(false);
  return out;
}

ReferenceModel::ReferenceModel(Run& run) : run_(run) {
  run_collectively(run.world, [&] {
    const Config& c = run.config;
    const plan::RunPlan& policy = run.plan();
    const std::string& directory = *c.loss_fn.reference_model;
    model::ModelSpec spec = load_model_directory(directory, {run.world.local_rank(), run.world.local_size()});
    require_logits(spec, "reference.model_name", directory);
    if (spec.vocab_size != policy.spec.vocab_size)
      fail(
          Exit::config,
          "reference.model_name: {} has a vocabulary of {} tokens, the policy one of {}. Fix: choose a model "
          "with the policy's tokenizer",
          clipped(directory), spec.vocab_size, policy.spec.vocab_size);
    const int64_t longest = c.policy.max_total_sequence_length;
    if (spec.learned_positions && spec.max_positions < longest)
      fail(Exit::config,
           "reference.model_name: {} has {} positions, fewer than policy.max_total_sequence_length: {}. Fix: "
           "lower that",
           clipped(directory), spec.max_positions, longest);
    const Placement& placement = run.placement;
    auto plan = plan::make_reference_plan(std::move(spec), c, policy);
    const int64_t left = static_cast<int64_t>(placement.capacity()) - policy.memory.total_bytes();
    if (plan->memory.total_bytes() > left)
      fail(Exit::out_of_memory,
           "reference.model_name: {} takes {}, and the plan of training leaves {}. Fix: choose a smaller "
           "model, "
           "or lower the memory of training (docs/memory.md)",
           clipped(directory), human_bytes(static_cast<uint64_t>(plan->memory.total_bytes())),
           human_bytes(static_cast<uint64_t>(std::max<int64_t>(left, 0))));
    engine_ = std::make_unique<engine::Engine>(std::move(plan), placement.groups(), placement.exec());
    with_state(*engine_, [&](const TrainState& state) {
      load_weights(directory, engine_->plan().spec, state.weights, state.staging);
    });
  });
}

std::shared_ptr<const data::SequenceNumbers> ReferenceModel::log_probs(
    std::shared_ptr<const data::Examples> examples) {
  return compute_log_probs(run_.config, *engine_, std::move(examples), Kind::by_row, run_.placement.groups());
}

void ReferenceModel::teach(const std::shared_ptr<data::RolloutSet>& rollouts) {
  const auto k = static_cast<size_t>(engine_->plan().decoder->options().loss.top_k);
  NRL_CHECK(k > 0 && engine_->plan().layout.context == 1);
  data::TopNumbers out{.top_k = static_cast<int64_t>(k), .ids = {}, .numbers = {}};
  out.ids.resize(static_cast<size_t>(rollouts->loss_tokens()) * k);
  out.numbers.resize(out.ids.size());
  std::vector<int32_t> ids;
  std::vector<float> numbers;
  score(run_.config, *engine_, rollouts,
        [&](const model::HeadOutput& results, std::span<const SequencesOfRows::Place> places) {
          ids.resize(static_cast<size_t>(results.top_ids.numel()));
          numbers.resize(ids.size());
          ops::download(engine_->exec(), results.top_ids, ids.data());
          ops::download(engine_->exec(), results.top_logits, numbers.data());
          for (const SequencesOfRows::Place& p : places) {
            auto to = static_cast<size_t>(rollouts->first_loss_token(p.example)) * k;
            for (int64_t t = 0; t < p.rows; ++t) {
              if (!rollouts->in_loss(p.example, p.sequence, t + 1))
                continue;  // the row predicts the next token
              const auto from = static_cast<std::ptrdiff_t>(static_cast<size_t>(p.first_row + t) * k);
              std::copy_n(ids.begin() + from, k, out.ids.begin() + static_cast<std::ptrdiff_t>(to));
              std::copy_n(numbers.begin() + from, k, out.numbers.begin() + static_cast<std::ptrdiff_t>(to));
              to += k;
            }
          }
        });
  // Every rank has the rows of its examples, and zeros elsewhere.
  comm::Communicator& ranks = run_.placement.groups().host(parallel::group::all);
  ranks.all_reduce(std::span(out.ids));
  ranks.all_reduce(std::span(out.numbers));
  if (!std::ranges::all_of(out.numbers, [](float x) { return std::isfinite(x); }))
    fail(Exit::data,
         "reference.model_name: {} gives logits that are not finite. Fix: check its weights and "
         "policy.precision",
         clipped(*run_.config.loss_fn.reference_model));
  rollouts->set_teacher(std::move(out));
}

namespace {

constexpr std::string_view magic = "nrl-train reference 1\n";

// Everything that the numbers depend on.
std::string key_of(const Run& run, const data::Examples& examples, Kind kind) {
  const Config& config = run.config;
  std::string model;
  for (const auto& [path, content] : identify_model(config)) model += content + "\n";
  std::string ids;
  const auto add = [&](const void* data, size_t bytes) { ids.append(static_cast<const char*>(data), bytes); };
  std::string digests;
  for (int64_t e = 0; e < examples.size(); ++e)
    for (int s = 0; s < examples.sequences_per_example(); ++s) {
      const std::span<const int32_t> tokens = examples.ids(e, s);
      const int32_t count = static_cast<int32_t>(tokens.size());
      add(&count, sizeof count);
      add(tokens.data(), tokens.size_bytes());
      for (int64_t t = 0; t < count; ++t) ids.push_back(examples.in_loss(e, s, t) ? 1 : 0);
      if (ids.size() > (size_t{1} << 20) || (e + 1 == examples.size())) {
        digests += data::digest(ids);
        ids.clear();
      }
    }
  const plan::RunPlan& plan = run.plan();
  const double inverse_temperature = plan.decoder->options().loss.inverse_temperature;
  if (inverse_temperature != 1) digests += fmt::format("{}", inverse_temperature);
  return data::digest(fmt::format("{}{}\n{}\n{}\n{} {} {}\n{}", model, config.policy.model_json, digests,
                                  static_cast<int>(kind), name_of(config.policy.precision),
                                  name_of(plan.recipe.weights()), config.policy.fp8_cfg.enabled,
                                  resolved_loop(config).seed));
}

std::string file_of(const Config& config, const DatasetConfig& data, const std::string& key) {
  const std::string& first = data.data_path.front();
  const std::string directory = config.data.cache_dir.value_or(parent_path(first)),
                    name = first.substr(first.find_last_of('/') + 1);
  return join_path(directory, fmt::format("{}.reference-{}.cache", name, key));
}

// False if there is no such file, or it is damaged.
bool read_numbers(const std::string& path, const std::string& key, std::span<double> values) {
  if (!path_exists(path)) return false;
  const std::string head = fmt::format("{}{}\n", magic, key);
  const uint64_t bytes = head.size() + values.size() * sizeof(double) + data::digest("").size();
  const std::string text = read_file(path, bytes + 1);
  const std::string_view content = std::string_view(text).substr(0, text.size() - data::digest("").size());
  if (text.size() != bytes || !text.starts_with(head) ||
      text.substr(content.size()) != data::digest(content)) {
    log::warn("{}: the file is damaged; the log-probabilities of the reference are computed again", path);
    return false;
  }
  std::memcpy(values.data(), content.data() + head.size(), values.size() * sizeof(double));
  return std::ranges::all_of(values, [](double v) { return std::isfinite(v); });
}

void write_numbers(const std::string& path, const std::string& key, std::span<const double> values) {
  std::string content = fmt::format("{}{}\n", magic, key);
  content.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  try {
    AtomicFile file(path);
    file.write(content);
    file.write(data::digest(content));
    file.commit();
  } catch (const Error& e) {
    log::warn("the log-probabilities of the reference are not kept for the next run: {}", e.what());
  }
}

// Must be called when other weights were loaded: the run's own ones again.
void restore_state(Run& run, monitor::StartPhases& phases) {
  const std::vector<std::string> warnings = run.warnings, changes = run.changes;
  initialize(run, phases, [] {});
  run.warnings = warnings;
  run.changes = changes;
}

// The model that the run began with, for the rollouts that it generates.
void keep_reference(Run& run, monitor::StartPhases& phases) {
  const bool other_weights = !run.resumed_from.empty();
  run_collectively(run.world, [&] {
    if (other_weights)
      load_initial_weights(run.config, *run.engine, {}, run.placement.exec().threads, phases);
    run.engine->keep_reference();
  });
  if (other_weights) restore_state(run, phases);
}

}  // namespace

void prepare_references(Run& run, monitor::StartPhases& phases) {
  const Config& c = run.config;
  if (plan::keeps_reference(c)) return keep_reference(run, phases);
  if (!plan::needs_reference(c) || generates_rollouts(c)) return;
  const auto kind = c.algorithm == Algorithm::dpo ? Kind::one : Kind::by_row;
  const parallel::Groups& groups = run.placement.groups();
  comm::World& world = run.world;
  bool other_weights = !run.resumed_from.empty(), loaded = false;
  const auto prepare = [&](const DatasetConfig& data, const std::shared_ptr<const data::Examples>& examples,
                           std::shared_ptr<const data::SequenceNumbers>& out) {
    phases.begin("reference", "log-probabilities of the reference");
    std::string key, path;
    auto stored = std::make_shared<data::SequenceNumbers>(*examples, kind);
    std::vector<double> found{0};
    run_collectively(world, [&] {
      if (world.rank() != 0) return;
      key = key_of(run, *examples, kind);
      path = file_of(c, data, key);
      found[0] = read_numbers(path, key, stored->all()) ? 1 : 0;
      if (found[0] == 0) std::ranges::fill(stored->all(), 0.0);
    });
    groups.host(parallel::group::all).all_reduce(std::span(found));
    if (found[0] > 0) {
      groups.host(parallel::group::all).all_reduce(stored->all());  // zeros but on rank 0
      out = std::move(stored);
      return;
    }
    if (std::exchange(other_weights, false)) {
      run_collectively(
          world, [&] { load_initial_weights(c, *run.engine, {}, run.placement.exec().threads, phases); });
      loaded = true;
    }
    phases.begin("reference",
                 fmt::format("log-probabilities of {} examples under the reference", examples->size()));
    out = compute_reference(c, *run.engine, examples, kind, groups);
    run_collectively(world, [&] {
      if (std::ranges::any_of(out->all(), [](double v) { return !std::isfinite(v); }))
        fail(Exit::data,
             "the reference model gives log-probabilities that are not finite. Fix: check its weights and "
             "policy.precision");
      if (world.rank() == 0) write_numbers(path, key, out->all());
    });
  };
  prepare(c.data.train, run.train.examples, run.train.reference);
  if (run.validation) prepare(c.data.validation, run.validation->examples, run.validation->reference);
  if (loaded) restore_state(run, phases);
}

}  // namespace nrl::train
