#include "apps/train/start/initial_state.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "apps/monitor/failure.h"
#include "apps/monitor/timers.h"
#include "apps/state/input_identity.h"
#include "apps/state/run_state.h"
#include "apps/train/launch/launch.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/parallel.h"
#include "core/io/checkpoint_store.h"

namespace nrl::train {
namespace {

/// True if the files of a model without adapters have the parameter.
bool in_model_files(const plan::RunPlan& p, int parameter) {
  const bool score = p.spec.head == model::HeadKind::scalar && parameter == p.parameters.head;
  return score ? !p.spec.new_head : !p.parameters.all[parameter].adapter;
}

/// `missing`: of parameters that are not in the files of the model; else of all.
void make_initial_weights(const Config& config, const plan::RunPlan& p, int threads, const TrainState& state,
                          bool missing) {
  const auto seed = static_cast<uint64_t>(resolved_loop(config).seed);
  std::vector<float> values;
  for (const engine::WeightSlice& weight : state.weights) {
    const model::Parameter& parameter = p.parameters.all[weight.parameter];
    if (missing && in_model_files(p, weight.parameter)) continue;
    const DType dtype = weight.values.dtype;
    fill_memory(state.staging, weight.values.data, weight.part.rows, weight.part.columns * size_of(dtype),
                [&](int64_t first, int64_t n, void* out) {
                  model::Part rows = weight.part;
                  rows.row += first;
                  rows.rows = n;
                  if (dtype == DType::f32) {
                    initial_values(p.spec, parameter, rows, seed, static_cast<float*>(out), threads);
                    return;
                  }
                  values.resize(static_cast<size_t>(rows.numel()));
                  initial_values(p.spec, parameter, rows, seed, values.data(), threads);
                  cpu::parallel_for(threads, rows.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
                    for (int64_t e = begin; e < end; ++e) {
                      const float value = values[e];
                      static_cast<uint16_t*>(out)[e] =
                          dtype == DType::f16 ? f16(value).bits : bf16(value).bits;
                    }
                  });
                });
  }
}

// Restores the position. If the batch or the length of the run changed, more samples may be needed.
void restore_position(Run& run, const Position& saved) {
  const int64_t global = run.plan().batch.global;
  const Position fresh = std::exchange(run.position, saved);
  run.position.global_batch = global;
  run.position.dataset_samples = fresh.dataset_samples;
  const int64_t needed = saved.consumed_samples + std::max<int64_t>(run.max_steps() - saved.step, 0) * global;
  if (needed > run.train.samples) {
    extend_train_data(run.train, needed);
    run.position.dataset_samples = run.train.samples;
  }
  // Within one epoch the order does not depend on the number of samples; Megatron's order of
  // several epochs does.
  if (run.position.dataset_samples != saved.dataset_samples &&
      std::max(run.position.dataset_samples, saved.dataset_samples) > run.train.epoch_samples)
    run.changes.push_back(
        fmt::format("sample order: {} samples -> {}, more than one epoch of {} (the order changes: some "
                    "samples may repeat or be missed)",
                    saved.dataset_samples, run.position.dataset_samples, run.train.epoch_samples));
}

// Calls load(state). On a GPU that is done by another thread, while this one does the work beside it; first
// that work if it times GEMMs, which must not compete with the load.
void load_state(engine::Engine& engine, bool timed, monitor::StartPhases& phases, const std::string& what,
                const WorkBeside& beside, const std::function<void(const TrainState&)>& load) {
  device::Runtime* const device = engine.exec().device;
  if (!device) {
    beside();
    phases.begin("weights", what);
    load(state_of(engine, nullptr));
    return;
  }
  if (timed) beside();
  const std::unique_ptr<Staging> staging = engine.staging();
  const TrainState state = state_of(engine, staging.get());
  std::exception_ptr error;
  double seconds = 0;
  std::thread thread = start_thread([&] {
    const double begin = monitor::Timers::steady_seconds();
    try {
      device->bind_thread();
      load(state);
      staging->finish();
    } catch (...) {
      error = std::current_exception();
    }
    seconds = monitor::Timers::steady_seconds() - begin;
  });
  struct Join {
    std::thread& thread;
    ~Join() {
      if (thread.joinable()) thread.join();
    }
  } const join{thread};
  if (!timed) beside();
  phases.begin("weights", what);
  thread.join();
  phases.add_beside("weights", seconds);
  if (error) std::rethrow_exception(error);
}

// Collective. The problems that the ranks found, alike on all ranks; empty: none.
std::vector<std::string> gather_problems(comm::World& world, const std::vector<std::string>& own) {
  constexpr size_t most = 4;  // of a rank
  std::vector<int32_t> any{own.empty() ? 0 : 1};
  world.comm().all_reduce(any, comm::Reduce::max);
  std::vector<std::string> all;
  if (any[0] == 0) return all;
  const std::vector<std::string> texts =
      world.comm().gather_texts(own.empty() ? "" : joined(own, "\n", most));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    for (std::string line; std::getline(lines, line);) {
      const std::string found = rank == 0 ? line : fmt::format("{} (found by rank {})", line, rank);
      // Several ranks may read the same damaged part.
      const auto same = [&](const std::string& other) { return other.starts_with(line); };
      if (std::none_of(all.begin(), all.end(), same)) all.push_back(found);
    }
  }
  return all;
}

// Position, changed settings and warnings of a resumed checkpoint; the engine holds the rest of its state.
struct Resumed {
  Position position;
  std::vector<std::string> changes, warnings;
};

// Reads the position and loads the state of the engine.
Resumed load_run(Run& run, CheckpointReader& reader, monitor::StartPhases& phases, const WorkBeside& beside) {
  Resumed out;
  out.position = read_position(reader);
  const SavedRecord before = read_record(reader, out.position.global_batch);
  if (!before.incomplete.empty()) out.warnings.push_back(before.incomplete);
  out.changes =
      compare_records(before.record, run.record, run.config.checkpointing.allow_changes, reader.path());
  load_state(*run.engine, run.config.kernels.autotune, phases,
             fmt::format("loading checkpoint {}", reader.path()), beside, [&](const TrainState& state) {
               load_base_of_adapters(run.config, run.plan(), run.placement.host_threads(), state);
               const std::string warning = load_checkpoint(reader, state);
               if (!warning.empty()) out.warnings.push_back(warning);
             });
  return out;
}

// Collective. Resumes from the checkpoint. Every rank verifies the data that it loads, and its share of what
// no rank loads. If a file is damaged, returns the problems, alike on all ranks: the run is as before, but
// for the state of the engine, which must be loaded again.
std::vector<std::string> resume_from(Run& run, const std::string& path, monitor::StartPhases& phases,
                                     const WorkBeside& beside,
                                     const std::function<void(Position&)>& adjust = {}) {
  comm::World& world = run.world;
  const std::vector<std::string> manifests =
      world.comm().gather_texts(to_text({identify_input(join_path(path, manifest_name))}));
  run_collectively(world, [&] { require_same_files(manifests, world.hosts()); });
  std::optional<CheckpointReader> reader;
  Resumed resumed;
  std::vector<std::string> problems;
  const comm::ErrorConsensus loaded = attempt_collectively(world, [&] {
    try {
      reader.emplace(path, world.rank(), world.size());
      resumed = load_run(run, *reader, phases, beside);
    } catch (const CheckpointDamage& e) {
      problems.push_back(e.what());
    }
  });
  // Before any other error: it may be a consequence on another rank.
  problems = gather_problems(world, problems);
  if (!problems.empty()) return problems;
  require_agreed(world, loaded);

  phases.begin("weights", fmt::format("verifying checkpoint {}", path));
  world.comm().all_reduce(reader->verified(), comm::Reduce::max);
  run_collectively(world, [&] { problems = reader->verify_rest(world.rank(), world.size()); });
  problems = gather_problems(world, problems);
  if (!problems.empty()) return problems;

  run_collectively(world, [&] {
    run.warnings.insert(run.warnings.end(), resumed.warnings.begin(), resumed.warnings.end());
    run.changes = std::move(resumed.changes);
    run.resumed_from = path;
    if (adjust) adjust(resumed.position);
    restore_position(run, resumed.position);
    run.engine->restore({.updates = resumed.position.updates,
                         .skipped_in_a_row = resumed.position.skipped_in_a_row,
                         .loss_scale = resumed.position.loss_scale,
                         .clean_steps = resumed.position.clean_steps});
  });
  return {};
}

/// True if failure.json says that the last attempt ended with silent data corruption.
bool ended_with_wrong_bits(const std::string& log_dir) {
  try {
    const auto failure = monitor::read_failure(log_dir);
    return failure && failure->exit_code == static_cast<int>(Exit::silent_corruption);
  } catch (const Error&) {
    return false;  // no record of an attempt; it is put aside
  }
}

}  // namespace

void load_base_of_adapters(const Config& config, const plan::RunPlan& plan, int threads,
                           const TrainState& state) {
  if (!plan.spec.trained.adapters) return;
  if (const auto& model = config.policy.model_name)
    load_weights(*model, plan.spec, state.weights, state.staging);
  else
    make_initial_weights(config, plan, threads, state, false);
}

void load_initial_weights(const Config& config, engine::Engine& engine, VerifyShare verify, int threads,
                          monitor::StartPhases& phases, const WorkBeside& beside) {
  const std::optional<std::string>& model = config.policy.model_name;
  const plan::RunPlan& plan = engine.plan();
  const std::string what =
      model ? fmt::format("loading weights from {}", *model) : "initializing the weights";
  load_state(engine, config.kernels.autotune, phases, what, beside, [&](const TrainState& state) {
    if (model) verify_model_directory(*model, verify);
    const bool adapters = static_cast<bool>(plan.spec.trained.adapters);
    if (model) load_weights(*model, plan.spec, state.weights, state.staging);
    if (!model || adapters || plan.spec.new_head)
      make_initial_weights(config, plan, threads, state, model.has_value());
    if (adapters && config.policy.lora.adapter)
      load_adapter(*config.policy.lora.adapter, plan.spec, state.weights, state.staging);
  });
  engine.weights_written();
}

void roll_back(Run& run, const std::string& path, const std::function<void(Position&)>& adjust) {
  monitor::StartPhases phases;
  const std::vector<std::string> problems = resume_from(
      run, path, phases, [] {}, adjust);
  if (!problems.empty())
    fail(Exit::data, "the checkpoint {} to go back to is damaged:\n{}", path, fmt::join(problems, "\n"));
  run_collectively(run.world, [&] {
    if (run.world.rank() != 0) return;
    const CheckpointingConfig& c = run.config.checkpointing;
    set_other_checkpoints_aside(c, path, run.saver->locks()->of(c.checkpoint_dir));
  });
}

void initialize(Run& run, monitor::StartPhases& phases, const WorkBeside& beside) {
  comm::World& world = run.world;
  const CheckpointingConfig& c = run.config.checkpointing;
  // The work beside the first load; another one follows if a checkpoint is damaged.
  bool worked = false;
  const WorkBeside once = [&] {
    if (!std::exchange(worked, true)) beside();
  };
  const auto earlier = static_cast<std::ptrdiff_t>(run.warnings.size());
  KnownDamage known;
  run_collectively(world, [&] {
    if (world.rank() == 0 && ended_with_wrong_bits(run.config.logger.log_dir))
      known = without_agreement(c, run.warnings);
  });
  std::string path;
  CheckpointChoice choice;
  for (;;) {
    // Rank 0 chooses the checkpoint; all read it.
    run_collectively(world, [&] {
      if (world.rank() == 0) choice = choose_checkpoint(c, known);
    });
    path = choice.path;
    world.comm().broadcast_text(path, 0);
    if (path.empty()) {
      run_collectively(world, [&] {
        // Every node may have its own copy of the directory, so the ranks of a node share its verification.
        load_initial_weights(run.config, *run.engine, {world.local_rank(), world.local_size()},
                             run.placement.host_threads(), phases, once);
      });
      break;
    }
    std::vector<std::string> problems = resume_from(run, path, phases, once);
    if (problems.empty()) break;
    known[path] = std::move(problems);
  }
  run.warnings.insert(run.warnings.begin() + earlier, choice.warnings.begin(), choice.warnings.end());
  // The checkpoint directory is only modified once the run is certain to start.
  run_collectively(world, [&] {
    if (world.rank() != 0 || !c.enabled) return;
    const RunLock& lock = run.saver->locks()->of(c.checkpoint_dir);
    clean_store(c.checkpoint_dir, lock);
    const std::string moved = set_other_checkpoints_aside(c, path, lock);
    if (!moved.empty()) run.warnings.push_back(moved);
  });
}

}  // namespace nrl::train
