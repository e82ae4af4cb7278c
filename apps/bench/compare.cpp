#include "apps/bench/compare.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "apps/bench/claims_page.h"
#include "apps/bench/history.h"
#include "apps/bench/machine.h"
#include "apps/bench/steps.h"
#include "apps/engine/step_traffic.h"
#include "apps/monitor/timers.h"
#include "apps/plan/dry_rank.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/decide.h"
#include "apps/train/start/placement.h"
#include "apps/train/start/run_config.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/sample.h"
#include "core/base/text.h"
#include "core/config/suite.h"
#include "core/io/atomic_file.h"

namespace nrl::bench {
namespace {

using memory::Category;

/// Bytes that the rank of this plan sends in a step.
double sent_bytes(std::unique_ptr<plan::RunPlan> plan, const Config& config) {
  const ops::DryDevice device = plan::usual_device(plan->device, plan->partials, plan->recipe);
  double sum = 0;
  for (const plan::Traffic& t : engine::step_traffic(plan, engine::training_options(config), device))
    if (t.purpose != comm::Purpose::scalars) sum += t.wire();
  plan.reset();  // before the device
  return sum;
}

std::string ratio_text(Quantity quantity, double ratio) {
  switch (quantity) {
    case Quantity::step_time:
      return change_text(ratio) + " time";
    case Quantity::speed:
      return fmt::format("{:.2f} times the speed", ratio);
    case Quantity::sent_bytes:
      return change_text(ratio) + " bytes";
    default:
      return change_text(ratio) + " memory";
  }
}

/// The measurements of a variant.
struct Row {
  std::string name, refused = {};
  Trial trial = {};
  std::vector<double> ratios = {}, ms = {};  ///< by round
  double ratio = 1, planned = 0, sent = 0;
  std::string machine = {};
  double probe = 0, time = 0;  ///< of the last round
  std::array<double, memory::category_count> bytes{};

  double of(Quantity q) const {
    switch (q) {
      case Quantity::step_time:
        return ratio;
      case Quantity::speed:
        return 1 / ratio;
      case Quantity::planned_bytes:
        return planned;
      case Quantity::activation_bytes:
        return bytes[static_cast<size_t>(Category::activations)];
      case Quantity::optimizer_bytes:
        return bytes[static_cast<size_t>(Category::optimizer)];
      case Quantity::sent_bytes:
        break;
    }
    return sent;
  }
};

class Comparison {
 public:
  Comparison(nrl::comm::World& world, const Args& args, const std::string& config,
             const SuiteComparison& spec)
      : world_(world),
        args_(args),
        config_(config),
        spec_(spec),
        timed_(args.quick ? 1 : args.steps.value_or(default_steps)) {}

  void run() {
    const int rounds = args_.quick ? 1 : 3;
    for (const SuiteVariant& v : spec_.variants) rows_.push_back({.name = v.name});
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < rows_.size(); ++i)
        if (rows_[i].refused.empty()) measure(i);
    for (Row& row : rows_)
      if (row.refused.empty()) row.ratio = median(row.ratios);
  }

  const JsonValue& machine() const { return machine_; }

  /// The figures of the variants for a file of --history.
  std::vector<HistoryEntry> history() const {
    std::vector<HistoryEntry> out;
    for (const Row& row : rows_) {
      if (!row.refused.empty()) continue;
      const auto [least, most] = std::minmax_element(row.ms.begin(), row.ms.end());
      HistoryEntry entry{
          .metric = "step_ms",
          .config = fmt::format("{}: {}, {} of {}", args_.suite, spec_.name, row.name, config_),
          .machine = row.machine,
          .commit = args_.commit.empty() ? std::string(NRL_VERSION) : args_.commit,
          .time = row.time,
          .value = median(row.ms),
          .interval = {*least, *most},
          .probe = row.probe};
      for (const std::string& key : args_.overrides) entry.config += " " + key;
      out.push_back(entry);
      entry.probe = 0;
      for (const auto& [metric, value] :
           {std::pair("planned_bytes", row.planned), {"sent_bytes", row.sent}}) {
        if (value <= 0) continue;
        entry.metric = metric;
        entry.value = value;
        entry.interval = {value, value};
        out.push_back(entry);
      }
    }
    return out;
  }

  /// Prints the table and the promises, and adds them to the report.
  void report(Report& out) const {
    log::info("model     {}", model_);
    log::info("ranks     {} of {}", world_.size(), machine_.get_string("name"));
    add(out, JsonValue::object({{"model", model_}, {"config", config_}, {"note", spec_.note}}));
    table(out);
    if (!spec_.note.empty()) log::info("{}", spec_.note);
    for (const SuitePromise& promise : spec_.promises) judge(promise, out);
  }

 private:
  void add(Report& out, JsonValue row) const {
    row.set("comparison", spec_.name);
    out.add(std::move(row));
  }

  void measure(size_t i) {
    Row& row = rows_[i];
    std::vector<std::string> overrides = args_.overrides;
    // The device that the first variant has found, so that one which it does not suit is refused when it is
    // loaded.
    if (!device_.empty()) overrides.push_back("device=" + device_);
    for (const std::string& ours : spec_.reset) overrides.push_back(ours);
    for (const std::string& ours : spec_.variants[i].overrides) overrides.push_back(ours);
    for (const std::string& ours : random_token_overrides(trial_warmup + timed_)) overrides.push_back(ours);
    if (args_.device != "auto") overrides.push_back("device=" + args_.device);
    Diagnostics found;
    train::RunSetting setting;
    setting.files = false;  // no data is read
    const auto config =
        i == 0 && row.ms.empty()
            ? std::optional(train::load_config_collectively(world_, config_, overrides, setting))
            : train::try_config_collectively(world_, config_, overrides, setting, found);
    if (!config) {
      const auto error = std::find_if(found.begin(), found.end(),
                                      [](const Diagnostic& d) { return d.severity == Severity::error; });
      row.refused = error == found.end() ? "refused" : error->message;
      return;
    }
    const Config& c = config->config;
    train::Placement placement(world_, *config);
    device_ = placement.device() == DeviceType::cuda ? "cuda" : "cpu";
    train::RankDecision decision(world_, *config, placement);
    DType activations = DType::f32;
    const auto plan_of = [&] {
      if (row.ms.empty()) row.sent = sent_bytes(decision.take(), c);
      auto plan = decision.take();
      activations = plan->recipe.activations();
      row.planned = static_cast<double>(plan->memory.total_bytes());
      for (int k = 0; k < memory::category_count; ++k)
        row.bytes[k] = static_cast<double>(plan->memory.bytes(static_cast<Category>(k)));
      if (i == 0) {
        model_ = fmt::format("{} parameters, {} x {} tokens a step", grouped(plan->whole().total()),
                             plan->batch.global, plan->sequence_length);
        machine_ = describe_device(placement.exec());
      }
      return plan;
    };
    row.trial = time_steps(world_, placement, *config, plan_of, timed_);
    row.ms.push_back(row.trial.step_ms);
    if (!args_.history.empty()) {
      row.machine = machine_of(placement, world_);
      row.probe = placement.device() == DeviceType::cuda ? 1 : train::peak_of(placement, activations);
      row.time = monitor::wall_seconds();
    }
    row.ratios.push_back(row.trial.step_ms / rows_[0].ms.back());
  }

  void table(Report& out) const {
    const auto text = [](double bytes) { return human_bytes(static_cast<uint64_t>(bytes)); };
    size_t width = 0;
    for (const Row& row : rows_) width = std::max(width, row.name.size());
    log::info("{:<{}} {:>10} {:>8} {:>10} {:>10} {:>10} {:>11} {:>10} {:>8} {:>10}", "", width, "step ms",
              "time", "weights", "gradients", "optimizer", "activations", "planned", "", "sent");
    for (const Row& row : rows_) {
      if (!row.refused.empty()) {
        log::info("{:<{}} refused: {}", row.name, width, row.refused);
        add(out, JsonValue::object({{"name", row.name}, {"refused", row.refused}}));
        continue;
      }
      const auto bytes = [&](Category c) { return row.bytes[static_cast<size_t>(c)]; };
      log::info("{:<{}} {:>10.1f} {:>8} {:>10} {:>10} {:>10} {:>11} {:>10} {:>8} {:>10}", row.name, width,
                median(row.ms), change_text(row.ratio), text(bytes(Category::weights)),
                text(bytes(Category::gradients)), text(bytes(Category::optimizer)),
                text(bytes(Category::activations)), text(row.planned),
                change_text(row.planned / rows_[0].planned), text(row.sent));
      JsonValue json = JsonValue::object({{"name", row.name},
                                          {"step_ms", median(row.ms)},
                                          {"time_ratio", row.ratio},
                                          {"planned_bytes", row.planned},
                                          {"used_bytes", row.trial.used_bytes},
                                          {"sent_bytes", row.sent}});
      for (int k = 0; k < memory::category_count; ++k)
        json.set(std::string(memory::name_of(static_cast<Category>(k))), row.bytes[k]);
      if (row.trial.copies) json.set("offload", row.trial.copies.json());
      add(out, std::move(json));
    }
    for (const Row& row : rows_)
      if (row.trial.copies) log::info("{:<{}} moves {}", row.name, width, row.trial.copies.text());
  }

  void judge(const SuitePromise& p, Report& out) const {
    const Row &row = rows_[p.variant], &than = rows_[p.than];
    const std::string& refused = row.refused.empty() ? than.refused : row.refused;
    const double base = than.of(p.quantity), ratio = base > 0 ? row.of(p.quantity) / base : 1;
    const std::string measured = refused.empty() ? ratio_text(p.quantity, ratio) : "refused";
    const std::string verdict = verdict_of(p, ratio, refused);
    JsonValue json = JsonValue::object({{"claim", p.claim},
                                        {"source", p.source},
                                        {"promised", p.promised},
                                        {"variant", row.name},
                                        {"measured", measured},
                                        {"verdict", verdict}});
    if (refused.empty()) json.set("ratio", ratio);
    if (verdict.starts_with("missed"))
      out.add_failure(fmt::format("{}, {}", spec_.name, row.name),
                      fmt::format("{}: the ratio is {:.4g}; {}", p.claim, ratio, verdict));
    log::info("claim     {}: {} ({}); here {}; {}", p.claim, p.promised, p.source, measured, verdict);
    add(out, std::move(json));
  }

  /// "held", "smaller" and "larger" than promised; "missed" beyond the suite's limits; else why there is no
  /// verdict.
  std::string verdict_of(const SuitePromise& p, double ratio, const std::string& refused) const {
    const bool judged = p.at_least || p.at_most, ranged = p.low || p.high;
    const bool timed = p.quantity == Quantity::step_time || p.quantity == Quantity::speed;
    if (!refused.empty()) return "not here: " + refused;
    if (!judged && !ranged) return "no figure to hold";
    if (p.device != DeviceKind::automatic && machine_.get_string("kind") != name_of(p.device))
      return p.device == DeviceKind::cuda ? "not measurable on a CPU" : "not measurable on a GPU";
    if (timed && args_.quick) return "not measured: a quick run";
    if (p.at_least && !(ratio >= *p.at_least)) return fmt::format("missed, at least {}", *p.at_least);
    if (p.at_most && !(ratio <= *p.at_most)) return fmt::format("missed, at most {}", *p.at_most);
    if (p.low && !(ratio >= *p.low)) return "smaller";
    if (p.high && !(ratio <= *p.high)) return "larger";
    return "held";
  }

  nrl::comm::World& world_;
  const Args& args_;
  const std::string& config_;
  const SuiteComparison& spec_;
  int timed_;
  std::vector<Row> rows_;
  std::string model_, device_;
  JsonValue machine_;
};

/// Collective: reads the suite on rank 0 and broadcasts it. Problems end in AgreedExit on all ranks.
Suite load_suite_collectively(nrl::comm::World& world, const std::string& path) {
  Suite suite;
  train::run_collectively(world, [&] {
    if (world.rank() == 0) suite = load_suite(path);
  });
  if (!suite.diagnostics.empty()) output::write(output::Stream::err, render(suite.diagnostics));
  const comm::ErrorConsensus consensus = comm::agree_on_error(world.comm(), exit_code(suite.diagnostics), "");
  if (consensus.code != Exit::ok) throw train::AgreedExit{consensus.code};
  world.comm().broadcast_text(suite.text, 0);
  return world.rank() == 0 ? suite : load_suite_text(suite.text, path);
}

}  // namespace

int compare(nrl::comm::World& world, const Args& args) {
  const Suite suite = load_suite_collectively(world, args.suite);
  const std::string& config = args.config.empty() ? suite.config : args.config;
  train::run_collectively(world, [&] {
    if (!config.empty()) return;
    fail(Exit::usage, "{} names no configuration. Fix: add config: FILE to it, or give one after it",
         args.suite);
  });
  Report out(args, {});
  out.set("suite", args.suite);
  out.set("config", config);
  out.set("ranks", world.size());
  for (const SuiteComparison& spec : suite.comparisons) {
    if (!selected(args, spec.name)) continue;
    const std::string missing = world.size() >= spec.ranks
                                    ? ""
                                    : fmt::format("skipped: needs {} ranks; there {} {}", spec.ranks,
                                                  world.size() == 1 ? "is" : "are", world.size());
    if (world.rank() == 0) log::info("==== {}{}{}", spec.name, missing.empty() ? "" : ": ", missing);
    if (!missing.empty()) {
      out.add(JsonValue::object({{"comparison", spec.name}, {"skipped", missing}}));
      continue;
    }
    const bool given = !args.config.empty();
    Comparison comparison(world, args, given || spec.config.empty() ? config : spec.config, spec);
    comparison.run();
    out.set("device", comparison.machine());
    if (world.rank() != 0) continue;
    comparison.report(out);
    if (!args.history.empty()) append_history(args.history, comparison.history());
  }
  int finished = 0;
  train::run_collectively(world, [&] {
    if (world.rank() != 0) return;
    finished = out.finish();
    if (args.page.empty()) return;
    std::vector<std::string> results{args.json};
    results.insert(results.end(), args.with.begin(), args.with.end());
    write_file_atomic(args.page, claims_page(results));
  });
  const auto code = static_cast<Exit>(finished);
  return static_cast<int>(comm::agree_on_error(world.comm(), code, "").code);
}

}  // namespace nrl::bench
