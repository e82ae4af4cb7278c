#include "apps/tune/batch_size.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "apps/bench/steps.h"
#include "apps/engine/step_traffic.h"
#include "apps/plan/host_memory.h"
#include "apps/plan/memory_check.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/device_choice.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/initial_state.h"
#include "apps/train/start/program_size.h"
#include "apps/train/start/run_check.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/device/cpu/memory.h"
#include "parallel/comm/mpi/mpi_options.h"

namespace nrl::tune {
namespace {

constexpr size_t most_measured = 8;  // sizes, unless they are listed

struct Size {
  BatchPlan batch;
  double bytes = 0;    ///< that the plan of the largest rank needs
  bool fits = false;   ///< on every rank
  double used = 0;     ///< bytes of the largest rank while it trained; 0: not measured
  double step_ms = 0;  ///< of the slowest rank
  double tokens_per_s() const { return static_cast<double>(batch.tokens_per_step) / step_ms * 1e3; }
};

class Tuner {
 public:
  Tuner(nrl::comm::World& world, const BatchSizeArgs& args, const ConfigResult& config)
      : world_(world), args_(args), config_(config), placement_(world, config) {
    const ops::Exec& exec = placement_.exec();
    capacity_ = exec.device ? static_cast<double>(exec.device->properties().memory)
                            : static_cast<double>(cpu::machine_memory()) / world.local_size();
    // With several ranks the MPI library, which host_memory() adds, is in it already.
    program_ = train::measure_program(config.config, placement_.host_threads()) -
               (world.size() > 1 ? nrl::comm::mpi_resident_bytes : 0);
    budget_ = config.config.memory.max_memory * capacity_;
  }

  int run() {
    print_machine();
    std::vector<Size> sizes = candidates();
    const size_t count = fitting(sizes);
    if (count == 0) {
      if (first())
        log::error_text(fmt::format(
            "no microbatch fits: even {} sequence{} per rank need{} {}, more than the budget of {}. Fix: {}",
            sizes.front().batch.micro, sizes.front().batch.micro == 1 ? "" : "s",
            sizes.front().batch.micro == 1 ? "s" : "", text(sizes.front().bytes), text(budget_),
            "recompute or shard more (nrl-train plan), or raise --max-memory"));
      return static_cast<int>(Exit::out_of_memory);
    }
    if (first())
      log::info("   micro  accumulate      planned   of budget         used     step ms    tokens/s");
    std::vector<Size*> measured;
    for (size_t i = count; i-- > 0 && measured.size() < most();) measured.push_back(&sizes[i]);
    std::reverse(measured.begin(), measured.end());
    for (Size* size : measured) {
      measure(*size);
      if (first())
        log::info("{:>8} {:>11} {:>12} {:>10.1f}% {:>12} {:>11.1f} {:>11}", size->batch.micro,
                  size->batch.accumulation, text(size->bytes), 100 * size->bytes / budget_, text(size->used),
                  size->step_ms, grouped(std::llround(size->tokens_per_s())));
    }
    report(sizes, count, measured);
    const bool kept = measured.back()->used <= budget_;
    return static_cast<int>(kept ? Exit::ok : Exit::out_of_memory);
  }

 private:
  bool first() const { return world_.rank() == 0; }
  size_t most() const { return args_.sizes.empty() ? most_measured : args_.sizes.size(); }
  static std::string text(double bytes) { return human_bytes(static_cast<uint64_t>(bytes)); }

  double greatest(double value) const {
    world_.comm().all_reduce(std::span(&value, 1), nrl::comm::Reduce::max);
    return value;
  }

  void print_machine() const {
    const double least = -greatest(-budget_);
    if (first())
      log::info("budget    {} per rank: {:.3g} % of {}", text(least), 100 * budget_ / capacity_,
                placement_.exec().device ? "the GPU"
                : world_.local_size() == 1
                    ? "this machine, for the whole process"
                    : fmt::format("its share of this machine ({} ranks), for the whole process",
                                  world_.local_size()));
  }

  void print_skipped(const std::vector<int64_t>& sizes, const std::string& why) const {
    if (!sizes.empty() && first()) log::info("skipped   {}: {}", fmt::join(sizes, ", "), why);
  }

  // Valid configurations, by size.
  std::vector<Size> candidates() {
    const BatchPlan configured = resolve_batch(config_.config, world_.size());
    const int64_t each = each_ = configured.global / configured.data_parallel;
    std::vector<int64_t> micros = args_.sizes, skipped;
    if (micros.empty())
      for (int64_t d = 1; d * d <= each; ++d)
        if (each % d == 0) micros.insert(micros.end(), {d, each / d});
    std::sort(micros.begin(), micros.end());
    micros.erase(std::unique(micros.begin(), micros.end()), micros.end());
    std::copy_if(micros.begin(), micros.end(), std::back_inserter(skipped),
                 [&](int64_t micro) { return each % micro != 0; });
    std::erase_if(micros, [&](int64_t micro) { return each % micro != 0; });
    const std::string batch =
        fmt::format("the {} sequences of a rank (train_global_batch_size {} / data parallel {})", each,
                    configured.global, configured.data_parallel);
    if (micros.empty())
      fail(Exit::usage, "--sizes: {} divides {}. Fix: name one of its divisors, or leave --sizes out",
           skipped.size() == 1 ? fmt::format("{} is no number that", skipped[0])
                               : fmt::format("none of {}", fmt::join(skipped, ", ")),
           batch);
    print_skipped(skipped, fmt::format("{} not divide {}", skipped.size() == 1 ? "does" : "do", batch));
    std::vector<Size> sizes;
    std::string why;
    skipped.clear();
    for (const int64_t micro : micros) {
      Size size{.batch = configured};
      size.batch.micro = micro;
      size.batch.accumulation = each / micro;
      ConfigResult changed = train::with_microbatch(config_, size.batch);
      train::check_but_memory(changed, {.world = world_.size(), .files = false});
      if (changed.ok()) {
        sizes.push_back(size);
        continue;
      }
      skipped.push_back(micro);
      why = changed.diagnostics.front().message;
    }
    if (!sizes.empty()) print_skipped(skipped, why);
    if (sizes.empty())
      fail(Exit::config, "no microbatch suits the configuration. Fix: see nrl-train plan with one of {}",
           fmt::join(micros, ", "));
    return sizes;
  }

  std::unique_ptr<plan::RunPlan> plan_of(const ConfigResult& config) const {
    return train::plan_rank(config, train::load_model_spec(config),
                            resolve_batch(config.config, world_.size()), placement_);
  }

  // Sets bytes and fits. Needs grow with the size, so that few sizes are planned. Returns how many fit.
  size_t fitting(std::vector<Size>& sizes) const {
    const auto fits = [&](Size& size) {
      double share = 0;
      train::run_collectively(world_, [&] {
        const ConfigResult config = train::with_microbatch(config_, size.batch);
        const plan::CategoryBytes least = plan::minimum_memory(config.config, train::load_model_spec(config),
                                                               size.batch, placement_.device());
        size.bytes = plan::total(least);
        if (size.bytes <= budget_) {
          std::unique_ptr<plan::RunPlan> planned = plan_of(config);
          size.bytes = static_cast<double>(planned->memory.total_bytes()) + process_memory(config, planned);
        }
        share = size.bytes / budget_;
      });
      size.bytes = greatest(size.bytes);
      return size.fits = greatest(share) <= 1;
    };
    size_t low = 0, high = sizes.size();  // all below `low` fit, none from `high` on
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (fits(sizes[middle]))
        low = middle + 1;
      else
        high = middle;
    }
    for (size_t i = 0; i < low; ++i)
      if (!sizes[i].fits && low - i <= most()) fits(sizes[i]);
    return low;
  }

  // The memory of the process on a CPU beside its arena.
  double process_memory(const ConfigResult& config, std::unique_ptr<plan::RunPlan>& planned) const {
    if (placement_.exec().device) return 0;
    const std::vector<plan::Traffic> traffic =
        engine::step_traffic(planned, engine::training_options(config.config), dry_);
    plan::HostFacts facts;
    facts.program = program_;
    facts.threads = placement_.host_threads();
    facts.training = false;
    facts.traffic = traffic;
    return static_cast<double>(plan::sum_of(plan::host_memory(config.config, *planned, facts)));
  }

  void measure(Size& size) {
    const ConfigResult config = train::with_microbatch(config_, size.batch);
    const bench::Trial trial = bench::time_steps(
        world_, placement_, config, [&] { return plan_of(config); }, args_.steps);
    size.step_ms = trial.step_ms;
    size.used = trial.used_bytes;
  }

  void report(const std::vector<Size>& sizes, size_t count, const std::vector<Size*>& measured) const {
    if (!first()) return;
    const Size& largest = *measured.back();
    const Size& fastest = **std::max_element(
        measured.begin(), measured.end(),
        [](const Size* a, const Size* b) { return a->tokens_per_s() < b->tokens_per_s(); });
    const auto line = [this](std::string_view name, const Size& size, const std::string& more) {
      log::info("{:<9} policy.train_micro_batch_size: {:<8} # {}", name, size.batch.micro, more);
      if (config_.config.policy.gradient_accumulation_steps)  // given too, so that both must change
        log::info("{:<9} policy.gradient_accumulation_steps: {}", "", size.batch.accumulation);
    };
    line("fastest", fastest, fmt::format("{} tokens/s", grouped(std::llround(fastest.tokens_per_s()))));
    const std::string limit = count < sizes.size()
                                  ? fmt::format("{} sequences need {}, which does not fit",
                                                sizes[count].batch.micro, text(sizes[count].bytes))
                              : largest.batch.micro == each_ ? "no larger size divides the batch"
                              : args_.sizes.empty()          ? "larger ones do not suit the configuration"
                                                             : "a larger one may fit, but --sizes has none";
    line("largest", largest,
         fmt::format("{} tokens/s; {}", grouped(std::llround(largest.tokens_per_s())), limit));
    if (largest.used > budget_)
      log::warn("the largest size took {} while it trained, more than the budget of {}", text(largest.used),
                text(budget_));
  }

  nrl::comm::World& world_;
  const BatchSizeArgs& args_;
  const ConfigResult& config_;
  train::Placement placement_;
  const ops::DryDevice dry_ = ops::DryDevice(placement_.host_threads());
  double capacity_ = 0, budget_ = 0;
  int64_t each_ = 0;     // sequences of a rank in a step
  int64_t program_ = 0;  // resident bytes before the first engine
};

}  // namespace

int tune_batch_size(nrl::comm::World& world, const BatchSizeArgs& args) {
  std::vector<std::string> overrides = args.overrides;
  for (const std::string& ours : bench::random_token_overrides(bench::trial_warmup + args.steps))
    overrides.push_back(ours);
  if (args.max_memory) overrides.push_back(fmt::format("memory.max_memory={}", *args.max_memory));
  const ConfigResult config =
      train::load_config_collectively(world, args.config, overrides, {.files = false, .memory = false});
  return Tuner(world, args, config).run();
}

}  // namespace nrl::tune
