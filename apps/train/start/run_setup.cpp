#include "apps/train/start/run_setup.h"

#include <algorithm>
#include <utility>

#include "apps/data/order_file.h"
#include "apps/plan/memory_check.h"
#include "apps/plan/snapshot.h"
#include "apps/state/hf_files.h"
#include "apps/state/input_identity.h"
#include "apps/state/snapshot.h"
#include "apps/train/launch/launch.h"
#include "apps/train/launch/run_control.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/memory_fit.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "core/ops/libraries.h"
#include "core/ops/peak.h"

namespace nrl::train {
namespace {

// {"attention", "forward: cuDNN 9.19.0; backward: our own kernels (...)"}: one line for each op.
std::vector<std::pair<std::string, std::string>> describe(const std::vector<ops::LibraryChoice>& choices) {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const ops::LibraryChoice& c : choices) {
    const std::string text = fmt::format("{}: {}", c.pass, c.implementation);
    const auto line =
        std::find_if(lines.begin(), lines.end(), [&c](const auto& l) { return l.first == c.op; });
    if (line == lines.end())
      lines.emplace_back(c.op, text);
    else
      line->second += "; " + text;
  }
  return lines;
}

// policy.attention.type: cudnn, where a pass of attention runs on other kernels.
void require_cudnn(const ConfigResult& config, const std::vector<ops::LibraryChoice>& choices) {
  for (const ops::LibraryChoice& c : choices)
    if (c.op == "attention" && !c.implementation.starts_with("cuDNN"))
      raise({diagnose(
          config, "policy.attention.type",
          fmt::format("policy.attention.type: cudnn, but attention {} runs on {}", c.pass, c.implementation),
          "", {"Fix: policy.attention.type: auto"})});
}

void add_order_warnings(Run& run, const data::DatasetOptions& options) {
  const std::vector<std::string>& found = options.orders->warnings();
  run.warnings.insert(run.warnings.end(), found.begin(), found.end());
}

// Counts of records that are no complete examples.
void add_example_warnings(Run& run, std::string_view key, const data::ExampleSet& set) {
  const data::ExampleCounts& c = set.counts();
  const auto add = [&](const data::RecordIncidents& found, std::string_view text) {
    if (found.count == 0) return;
    run.warnings.push_back(fmt::format("{}: {} of {} records {}, the first at {}", key, grouped(found.count),
                                       grouped(c.records), text, set.where(found.places.front())));
  };
  add(c.truncated, "are longer than policy.max_total_sequence_length and truncated");
  add(c.dropped, "are longer than policy.max_total_sequence_length and dropped");
  add(c.no_end_token, "have a turn or text that no end token follows, which is then not trained");
  add(c.special_text, "contain the name of a special token, which becomes that token");
  add(c.special_dropped, "contain the name of a special token and are dropped");
  add(c.without_loss, "have no token with a loss and are dropped");
  add(c.skipped, "cannot be used and are skipped");
}

// One rank reads the files for all ranks of its node that see the same ones.
Inputs identify_inputs_collectively(comm::World& world, const Config& config) {
  Inputs inputs;
  std::string places;
  run_collectively(world, [&] { places = data::digest(places_of_inputs(config)); });
  const std::vector<std::string> of_ranks = world.comm().gather_texts(places);
  bool reads = true;
  for (size_t r = 0; r < static_cast<size_t>(world.rank()); ++r)
    reads = reads && !(of_ranks[r] == places && world.nodes()[r] == world.nodes()[world.rank()]);
  run_collectively(world, [&] {
    if (reads) inputs = identify_inputs(config);
  });
  const std::vector<std::string> texts =
      world.comm().gather_texts_to(reads ? to_text(inputs.files) : std::string(), 0);
  run_collectively(world, [&] {
    if (world.rank() == 0) require_same_files(texts, world.hosts());
  });
  std::string text = to_text(inputs.files);
  world.comm().broadcast_text(text, 0);
  run_collectively(world, [&] {
    if (!reads) inputs = inputs_from_text(config, text);
  });
  return inputs;
}

void open_data(Run& run, const plan::RunPlan& plan, monitor::StartPhases& phases) {
  const Config& c = run.config;
  if (!c.data.train.data_path.empty())
    phases.begin("data", fmt::format("opening data {}{}", c.data.train.data_path.front(),
                                     c.data.train.data_path.size() > 1 ? ", ..." : ""));
  const int64_t global = plan.batch.global;
  const ExampleOpening opening{.threads = run.placement.exec().threads,
                               .opened = [&run](std::string_view key, const data::ExampleSet& set) {
                                 add_example_warnings(run, key, set);
                               }};
  run.train = open_train_data(c, plan.spec.vocab_size, global, opening);
  run.position.global_batch = global;
  run.validation = open_validation_data(c, run.train, plan.spec.vocab_size, global, opening);
  if (run.train.examples || run.train.prompts) return;
  add_order_warnings(run, run.train.options);
  run.position.dataset_samples = run.train.samples;
  if (!run.validation) return;
  ValidationData& validation = *run.validation;
  if (validation.epoch_samples < global)
    run.warnings.push_back(fmt::format(
        "the validation data has {} samples of {} tokens, less than one global batch of {}: samples "
        "repeat within an evaluation",
        validation.epoch_samples, validation.options.sequence_length, global));
  add_order_warnings(run, validation.options);
}

// Page-locked memory cannot be swapped out: asking for too much ends processes of the host, not the run.
void require_host_memory(const Config& config, const plan::RunPlan& plan, size_t share) {
  const auto offloaded = static_cast<size_t>(plan.memory.bytes(memory::Tier::host)),
             pinned = static_cast<size_t>(plan.memory.bytes(memory::Tier::pinned));
  const auto snapshot = static_cast<size_t>(plan::snapshot_bytes(config, plan));
  if (!config.checkpointing.is_async.is_auto() && plan::wants_snapshot(config) && pinned + snapshot > share)
    fail(Exit::out_of_memory,
         "checkpointing.is_async: true needs {} of page-locked memory for a copy of what a rank saves, "
         "besides {} of "
         "buffers, but its share of the host's memory is {}. Fix: is_async: auto, or fewer ranks per host",
         human_bytes(snapshot), human_bytes(pinned), human_bytes(share));
  if (offloaded == 0 || offloaded + pinned <= share) return;
  fail(Exit::out_of_memory,
       "a rank offloads {} and needs {} of page-locked buffers, but its share of the host's memory is {}. "
       "Fix: "
       "a smaller policy.offload_optimizer or policy.offload_activations, or fewer ranks per host",
       human_bytes(offloaded), human_bytes(pinned), human_bytes(share));
}

// Collective. Allocates the memory of the plan that was decided, or of one with a smaller microbatch.
std::unique_ptr<engine::Engine> allocate(Run& run, RankDecision& decision) {
  device::Runtime* device = run.placement.exec().device;
  std::unique_ptr<plan::RunPlan> plan = decision.take();
  for (;;) {
    std::unique_ptr<engine::Engine> engine;
    const std::string needed = plan::memory_line(plan->memory);
    const double total = plan::total(needed_memory(run.config, *plan));
    const comm::ErrorConsensus vote = attempt_collectively(run.world, [&] {
      if (device)
        require_host_memory(run.config, *plan,
                            cpu::machine_memory() / static_cast<size_t>(run.world.local_size()));
      try {
        engine = std::make_unique<engine::Engine>(std::move(plan), engine::training_options(run.config),
                                                  run.placement.groups(), run.placement.exec());
      } catch (const Error& e) {
        if (e.code() != Exit::out_of_memory) throw;
        fail(e.code(), "{}: the plan of the rank needs {}", e.what(), needed);
      }
    });
    if (vote.code == Exit::ok) return engine;
    engine.reset();
    plan = nullptr;
    if (vote.code == Exit::out_of_memory &&
        decision.take_less(fmt::format("rank {}: {}", vote.rank, vote.message))) {
      plan = decision.take();
      continue;
    }
    run_collectively(run.world, [&] {
      if (run.world.rank() != vote.rank) return;
      if (vote.code != Exit::out_of_memory) fail(vote.code, "{}", vote.message);
      const size_t free = device ? device->free_memory() : cpu::obtainable_memory(),
                   used = device ? device->properties().memory - free : cpu::resident_bytes();
      std::string text = vote.message;
      const auto note = [&](const std::string& line) { text += "\n  = " + line; };
      note(fmt::format("in use without it: {} {}; to be had: {}", human_bytes(used),
                       device ? "of the GPU" : "by this process", human_bytes(free)));
      if (const std::string text = decision.no_less(); !text.empty()) note(text);
      for (const std::string& line : decision.changes(std::min(static_cast<double>(free), total - 1)))
        note(line);
      fail(vote.code, "{}", text);
    });
  }
}

// Collective. Decides if checkpoints are saved beside the steps, alike on all ranks, and allocates the
// snapshot.
void prepare_snapshots(Run& run) {
  const Config& c = run.config;
  if (!plan::wants_snapshot(c)) {
    if (c.checkpointing.enabled && c.checkpointing.save_period > 0 && c.checkpointing.is_async.is_auto() &&
        c.policy.offload_optimizer.value > 0)
      run.saves = "at once: the optimizer state is offloaded (checkpointing.is_async: auto)";
    return;
  }
  const plan::RunPlan& plan = run.plan();
  const auto capacity =
      static_cast<double>(cpu::machine_memory()) / static_cast<double>(std::max(run.world.local_size(), 1));
  double least = plan::takes_snapshot(c, plan, capacity) ? 1 : 0;
  run.world.comm().all_reduce(std::span(&least, 1), comm::Reduce::min);
  std::vector<double> most{static_cast<double>(plan::snapshot_bytes(c, plan)),
                           -plan::room_for_snapshot(c, plan, capacity)};
  run.world.comm().all_reduce(most, comm::Reduce::max);
  if (least == 0) {
    run.saves = fmt::format(
        "at once: a copy of what a rank saves takes {}, more than the {} that the plan leaves "
        "(checkpointing.is_async: auto)",
        human_bytes(static_cast<uint64_t>(most[0])),
        human_bytes(static_cast<uint64_t>(std::max(-most[1], 0.0))));
    return;
  }
  std::unique_ptr<Snapshot> snapshot;
  run_collectively(
      run.world, [&] { snapshot = std::make_unique<Snapshot>(*run.engine, c.checkpointing.save_optimizer); });
  run.saver->take_snapshots(std::move(snapshot), run.engine->exec().device);
}

}  // namespace

std::unique_ptr<Run> set_up_run(comm::World& world, const ConfigResult& config,
                                monitor::StartPhases& phases) {
  phases.begin("device", "choosing the device and connecting the ranks");
  auto owned = std::make_unique<Run>(world, config);
  Run& run = *owned;
  const Config& c = run.config;
  const ops::Exec& exec = run.placement.exec();
  if (exec.device) {
    phases.add("context", run.placement.accelerator().context_seconds, "device");
    phases.add("libraries", run.placement.accelerator().library_seconds, "device");
  }
  const Inputs inputs = identify_inputs_collectively(world, c);
  phases.begin("plan", "planning the memory");
  RankDecision decision(world, run.config_result, run.placement);
  HfFiles hf;
  run_collectively(world, [&] {
    const plan::RunPlan& plan = decision.plan();
    open_data(run, plan, phases);
    run.record = make_record(c, plan.spec, plan.recipe.weights(), world.size(), inputs);
    if (plan.device == DeviceType::cpu) run.record["kernels.isa"] = name_of(plan::isa_for(c.kernels));
    if (world.rank() == 0 && c.checkpointing.enabled) {
      hf = collect_hf_files(c);
      const std::string warning = auto_tokenizer_warning(plan.spec, hf);
      if (!warning.empty()) log::warn("{}", warning);
    }
  });
  phases.begin(
      "memory",
      fmt::format("allocating {}", human_bytes(static_cast<uint64_t>(decision.plan().memory.total_bytes()))));
  run.engine = allocate(run, decision);
  run_collectively(world, [&] { run.engine->register_memory(); });
  run.record["policy.train_micro_batch_size"] = std::to_string(run.plan().batch.micro);
  if (decision.decision().reduced()) {
    run.repeatable = with_microbatch(run.config_result, run.plan().batch);
    if (world.rank() == 0) output::write(output::Stream::err, render(decision.warnings()));
  }
  run_collectively(world, [&] {
    run.saver = std::make_unique<CheckpointSaver>(world, run.repeatable, run.record, std::move(hf));
    run.saver->set_lease([] {
      const RunControl* control = RunControl::current();
      return !control || control->may_commit();
    });
    if (const RunLocks* locks = run.saver->locks())
      for (const std::string& takeover : locks->takeovers()) run.warnings.push_back(takeover);
  });
  prepare_snapshots(run);
  initialize(run, phases, [&] {
    phases.begin("kernels", "selecting the kernels");
    run.kernels = run.engine->require_kernels(run.engine->objective(), exec.device ? "the GPU" : "the CPU");
    if (!exec.libraries) return;
    if (c.policy.attention.type == AttentionType::cudnn)
      require_cudnn(run.config_result, exec.libraries->choices);
    run.library_choices = describe(exec.libraries->choices);
  });
  phases.begin("peak", "measuring the matmul peak");
  run.peak = peak_of(run.placement, run.plan().recipe.activations());
  return owned;
}

}  // namespace nrl::train
