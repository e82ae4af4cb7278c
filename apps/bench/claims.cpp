#include "apps/bench/claims.h"

#include <algorithm>
#include <cmath>

#include "apps/bench/machine.h"
#include "apps/bench/steps.h"
#include "apps/engine/step_traffic.h"
#include "apps/plan/recompute.h"
#include "apps/train/launch.h"
#include "apps/train/model_source.h"
#include "apps/train/placement.h"
#include "core/base/log.h"
#include "core/base/median.h"
#include "core/base/text.h"

namespace nrl::bench {
namespace {

using memory::Category;

struct Variant {
  std::string name;
  std::vector<std::string> overrides;
};

/// What a claim is about: a ratio of two variants.
enum class Quantity : uint8_t { time, speed, memory, activations, optimizer, sent };

struct Claim {
  const char* text;
  const char* source;
  const char* promised;
  const char* variant;
  Quantity quantity;
  const char* than = nullptr;  ///< a variant; null: the first
};

struct Benchmark {
  std::string name;
  std::vector<std::string_view> keys;  ///< and sections that have their default unless a variant sets them
  std::vector<Variant> variants;       ///< the first is what the others are compared with
  std::vector<Claim> claims;
  const char* note = "";
};

constexpr const char* framework_guide = "NeMo Framework, performance guide";
constexpr const char* memory_guide = "NeMo RL, memory optimization";

const std::vector<Benchmark>& benchmarks() {
  static const std::string bf16 = "policy.precision=bfloat16", fp8 = "policy.fp8_cfg.enabled=true",
                           aware = "policy.optimizer.use_precision_aware_optimizer=true";
  static const std::vector<Benchmark> all{
      {.name = "recompute",
       .keys = {plan::recompute_keys.begin(), plan::recompute_keys.end()},
       .variants = {{"keep everything", {"policy.recompute.granularity=none"}},
                    {"norm, activation", {"policy.recompute.modules=[norm,activation]"}},
                    {"core_attn", {"policy.recompute.modules=[core_attn]"}},
                    {"half of the layers", {"policy.checkpoint_ratio=0.5"}},
                    {"all layers", {"policy.gradient_checkpointing=true"}},
                    {"two layers at a time", {"policy.checkpoint_every=2"}}},
       .claims = {{"recomputing all layers costs time", framework_guide, "about 30 %", "all layers",
                   Quantity::time},
                  {"gradient checkpointing costs time", memory_guide, "about 20 %", "all layers",
                   Quantity::time},
                  {"gradient checkpointing saves memory", memory_guide, "about 50 %", "all layers",
                   Quantity::memory},
                  {"recomputing attention only costs little", framework_guide, "minimal", "core_attn",
                   Quantity::time},
                  {"activation checkpointing saves memory", memory_guide, "about 30 %", "norm, activation",
                   Quantity::memory},
                  {"activation checkpointing costs time", memory_guide, "about 15 %", "norm, activation",
                   Quantity::time}},
       .note = "All give the same bits."},
      {.name = "precision",
       .keys = {"policy.fp8_cfg.enabled", "policy.optimizer.use_precision_aware_optimizer",
                "policy.optimizer.exp_avg_dtype", "policy.optimizer.exp_avg_sq_dtype",
                "policy.optimizer.main_grads_dtype"},
       .variants = {{"float32", {"policy.precision=float32"}},
                    {"bfloat16", {"policy.precision=bfloat16"}},
                    {"float16", {"policy.precision=float16"}},
                    {"bfloat16, remainders", {"policy.precision=bfloat16", aware}},
                    {"bfloat16, bf16 moments",
                     {"policy.precision=bfloat16", aware, "policy.optimizer.exp_avg_dtype=bf16",
                      "policy.optimizer.exp_avg_sq_dtype=bf16"}}},
       .claims = {{"mixed precision saves memory", memory_guide, "about 50 %", "bfloat16", Quantity::memory},
                  {"mixed precision is faster", memory_guide, "about 10 %", "bfloat16", Quantity::speed},
                  {"fewer bits of optimizer state save memory", framework_guide, "no figure",
                   "bfloat16, bf16 moments", Quantity::memory}}},
      {.name = "fp8",
       .keys = {"policy.fp8_cfg.enabled", "policy.fp8_cfg.fp8_recipe", "policy.fp8_cfg.fp8_param"},
       .variants = {{"bfloat16", {bf16}},
                    {"tensorwise", {bf16, fp8, "policy.fp8_cfg.fp8_recipe=tensorwise"}},
                    {"delayed", {bf16, fp8, "policy.fp8_cfg.fp8_recipe=delayed"}},
                    {"blockwise", {bf16, fp8, "policy.fp8_cfg.fp8_recipe=blockwise"}},
                    {"mxfp8", {bf16, fp8, "policy.fp8_cfg.fp8_recipe=mxfp8"}}},
       .claims = {{"FP8 is faster than bfloat16", framework_guide, "1.2 to 1.5 times, on a GPU", "tensorwise",
                   Quantity::speed},
                  {"scales of tensors are faster than those of small blocks", framework_guide, "no figure",
                   "tensorwise", Quantity::speed, "blockwise"}},
       .note = "A CPU emulates FP8 in fp32, which is slower than bfloat16."},
      {.name = "offload",
       .keys = {plan::offload_keys.begin(), plan::offload_keys.end()},
       .variants = {{"on the device", {}},
                    {"half of the optimizer", {"policy.offload_optimizer=0.5"}},
                    {"optimizer", {"policy.offload_optimizer=true"}},
                    {"activations", {"policy.offload_activations=true"}},
                    {"both", {"policy.offload_optimizer=true", "policy.offload_activations=true"}}},
       .claims = {{"offloading the optimizer makes room for larger models", framework_guide, "no figure",
                   "optimizer", Quantity::memory},
                  {"what it costs depends on the link", framework_guide, "no figure", "optimizer",
                   Quantity::time},
                  {"offloading activations saves memory", framework_guide, "no figure", "activations",
                   Quantity::memory},
                  {"what it costs depends on the link", framework_guide, "no figure", "activations",
                   Quantity::time}},
       .note = "All give the same bits. A CPU moves them to a file."},
      {.name = "zero",
       .keys = {"distributed.dp_replicate_size"},
       .variants = {{"ddp", {"distributed.shard_strategy=ddp"}},
                    {"optim", {"distributed.shard_strategy=optim"}},
                    {"optim_grads", {"distributed.shard_strategy=optim_grads"}},
                    {"optim_grads_params", {"distributed.shard_strategy=optim_grads_params"}}},
       .claims = {{"a distributed optimizer divides its state by the ranks", framework_guide, "1 / ranks",
                   "optim", Quantity::optimizer},
                  {"a distributed optimizer sends no more bytes", framework_guide, "the same", "optim",
                   Quantity::sent}}},
  };
  return all;
}

struct Row {
  std::string name, refused = {};
  Trial trial = {};
  std::vector<double> ratios = {}, ms = {};  ///< by round
  double ratio = 1, planned = 0, sent = 0;
  std::array<double, memory::category_count> bytes{};

  double of(Quantity q) const {
    switch (q) {
      case Quantity::time:
        return ratio;
      case Quantity::speed:
        return 1 / ratio;
      case Quantity::memory:
        return planned;
      case Quantity::activations:
        return bytes[static_cast<size_t>(Category::activations)];
      case Quantity::optimizer:
        return bytes[static_cast<size_t>(Category::optimizer)];
      case Quantity::sent:
        break;
    }
    return sent;
  }
};

class Comparison {
 public:
  Comparison(nrl::comm::World& world, const Args& args, const Benchmark& benchmark)
      : world_(world),
        args_(args),
        benchmark_(benchmark),
        timed_(args.quick ? 1 : args.steps.value_or(default_steps)) {}

  int run() {
    const int rounds = args_.quick ? 1 : 3;
    for (const Variant& v : benchmark_.variants) rows_.push_back({.name = v.name});
    for (int round = 0; round < rounds; ++round)
      for (size_t i = 0; i < rows_.size(); ++i)
        if (rows_[i].refused.empty()) measure(i);
    for (Row& row : rows_)
      if (row.refused.empty()) row.ratio = median(row.ratios);
    return world_.rank() == 0 ? report() : 0;
  }

 private:
  void measure(size_t i) {
    Row& row = rows_[i];
    std::vector<std::string> overrides = args_.overrides;
    for (const std::string& ours : default_overrides(benchmark_.keys)) overrides.push_back(ours);
    for (const std::string& ours : benchmark_.variants[i].overrides) overrides.push_back(ours);
    for (const std::string& ours : random_token_overrides(trial_warmup + timed_)) overrides.push_back(ours);
    if (args_.device != "auto") overrides.push_back("device=" + args_.device);
    Diagnostics found;
    train::RunSetting setting;
    setting.files = false;  // no data is read
    const auto config =
        i == 0 ? std::optional(train::load_config_collectively(world_, args_.config, overrides, setting))
               : train::try_config_collectively(world_, args_.config, overrides, setting, found);
    if (!config) {
      row.refused = found.empty() ? "refused" : found.front().message;
      return;
    }
    const Config& c = config->config;
    train::Placement placement(world_, *config);
    const auto make_plan = [&] {
      return plan::make_run_plan(c, train::load_model_spec(*config), resolve_batch(c, world_.size()),
                                 placement.grid_position(), placement.device(), placement.host_threads(),
                                 false, placement.memory());
    };
    row.sent = sent_bytes(make_plan(), c);
    const auto plan_of = [&] {
      auto plan = make_plan();
      row.planned = static_cast<double>(plan->memory.total_bytes());
      for (int k = 0; k < memory::category_count; ++k)
        row.bytes[static_cast<size_t>(k)] = static_cast<double>(plan->memory.bytes(static_cast<Category>(k)));
      if (i == 0) {
        model_ = fmt::format("{} parameters, {} x {} tokens a step", grouped(plan->whole.total()),
                             plan->batch.global, plan->sequence_length);
        machine_ = describe_device(placement.exec());
      }
      return plan;
    };
    row.trial = time_steps(world_, placement, *config, plan_of, timed_);
    row.ms.push_back(row.trial.step_ms);
    row.ratios.push_back(row.trial.step_ms / rows_[0].ms.back());
  }

  /// That a rank sends in a step, without the scalars.
  static double sent_bytes(std::unique_ptr<plan::RunPlan> plan, const Config& config) {
    const plan::DryDevice device = plan::DryDevice::usual(plan->device, plan->partials);
    engine::LanguageModeling objective;
    double bytes = 0;
    for (const plan::Traffic& t :
         engine::step_traffic(plan, engine::training_options(config), objective, device))
      if (t.purpose != comm::Purpose::scalars) bytes += t.wire();
    plan.reset();  // before the device
    return bytes;
  }
  static std::string percent(double ratio) { return fmt::format("{:+.1f} %", 100 * (ratio - 1)); }

  std::string measured_text(const Claim& claim, const Row& row) const {
    if (!row.refused.empty() || !other_of(claim).refused.empty()) return "refused";
    const double ratio = ratio_of(claim, row);
    switch (claim.quantity) {
      case Quantity::time:
        return percent(ratio) + " time";
      case Quantity::speed:
        return fmt::format("{:.2f} times the speed", ratio);
      case Quantity::sent:
        return percent(ratio) + " bytes";
      default:
        return percent(ratio) + " memory";
    }
  }
  double ratio_of(const Claim& claim, const Row& row) const {
    const double base = other_of(claim).of(claim.quantity);
    return base > 0 ? row.of(claim.quantity) / base : 1;
  }

  const Row& row_named(const char* name) const {
    return *std::find_if(rows_.begin(), rows_.end(), [&](const Row& r) { return r.name == name; });
  }
  const Row& row_of(const Claim& claim) const { return row_named(claim.variant); }
  const Row& other_of(const Claim& claim) const { return claim.than ? row_named(claim.than) : rows_[0]; }

  int report() const {
    const auto text = [](double bytes) { return human_bytes(static_cast<uint64_t>(bytes)); };
    Report out(args_, machine_);
    out.set("config", args_.config);
    out.set("ranks", world_.size());
    out.set("model", model_);
    out.set("note", benchmark_.note);
    log::info("model     {}", model_);
    log::info("ranks     {} of {}", world_.size(), machine_.get_string("name"));
    size_t width = 0;
    for (const Row& row : rows_) width = std::max(width, row.name.size());
    log::info("{:<{}} {:>10} {:>8} {:>10} {:>10} {:>10} {:>11} {:>10} {:>8} {:>10}", "", width, "step ms",
              "time", "weights", "gradients", "optimizer", "activations", "planned", "", "sent");
    for (const Row& row : rows_) {
      if (!row.refused.empty()) {
        log::info("{:<{}} refused: {}", row.name, width, row.refused);
        out.add(JsonValue::object({{"name", row.name}, {"refused", row.refused}}));
        continue;
      }
      const auto bytes = [&](Category c) { return row.bytes[static_cast<size_t>(c)]; };
      log::info("{:<{}} {:>10.1f} {:>8} {:>10} {:>10} {:>10} {:>11} {:>10} {:>8} {:>10}", row.name, width,
                median(row.ms), percent(row.ratio), text(bytes(Category::weights)),
                text(bytes(Category::gradients)), text(bytes(Category::optimizer)),
                text(bytes(Category::activations)), text(row.planned),
                percent(row.planned / rows_[0].planned), text(row.sent));
      JsonValue json = JsonValue::object({{"name", row.name},
                                          {"step_ms", median(row.ms)},
                                          {"time_ratio", row.ratio},
                                          {"planned_bytes", row.planned},
                                          {"used_bytes", row.trial.used_bytes},
                                          {"sent_bytes", row.sent}});
      for (int k = 0; k < memory::category_count; ++k)
        json.set(std::string(memory::name_of(static_cast<Category>(k))), row.bytes[static_cast<size_t>(k)]);
      if (row.trial.copies) json.set("offload", row.trial.copies.json());
      out.add(std::move(json));
    }
    for (const Row& row : rows_)
      if (row.trial.copies) log::info("{:<{}} moves {}", row.name, width, row.trial.copies.text());
    if (*benchmark_.note) log::info("{}", benchmark_.note);
    for (const Claim& claim : benchmark_.claims) {
      const Row& row = row_of(claim);
      log::info("claim     {}: {} ({}); here {}", claim.text, claim.promised, claim.source,
                measured_text(claim, row));
      JsonValue json = JsonValue::object({{"claim", claim.text},
                                          {"source", claim.source},
                                          {"promised", claim.promised},
                                          {"variant", claim.variant},
                                          {"measured", measured_text(claim, row)}});
      if (row.refused.empty() && other_of(claim).refused.empty()) json.set("ratio", ratio_of(claim, row));
      out.add(std::move(json));
    }
    return out.finish();
  }

  nrl::comm::World& world_;
  const Args& args_;
  const Benchmark& benchmark_;
  int timed_;
  std::vector<Row> rows_;
  std::string model_;
  JsonValue machine_;
};

}  // namespace

std::vector<std::string> claim_benchmarks() {
  std::vector<std::string> names;
  for (const Benchmark& b : benchmarks()) names.push_back(b.name);
  return names;
}

bool is_claim_benchmark(const std::string& name) {
  const std::vector<std::string> names = claim_benchmarks();
  return std::find(names.begin(), names.end(), name) != names.end();
}

int claims(nrl::comm::World& world, const Args& args) {
  const auto& all = benchmarks();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Benchmark& b) { return b.name == args.benchmark; });
  return Comparison(world, args, *found).run();
}

}  // namespace nrl::bench
