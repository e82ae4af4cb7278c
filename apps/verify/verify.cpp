#include "apps/verify/verify.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/run_config.h"
#include "apps/train/start/run_data.h"
#include "apps/verify/layouts.h"
#include "apps/verify/random_tokens.h"
#include "apps/verify/report.h"
#include "apps/verify/trial.h"
#include "apps/verify/undisturbed.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"
#include "parallel/grid/nodes.h"

namespace nrl::verify {
namespace {

// True if all data files of the configuration are there, and are examples or tokens.
bool data_exists(const Config& config) {
  if (generates_rollouts(config)) return false;  // random rollouts take the place of generated ones
  const std::vector<std::string>& paths = config.data.train.data_path;
  for (const std::string& path : paths)
    if (trains_on_examples(config) ? !path_exists(path)
                                   : !path_exists(path + ".idx") || !path_exists(path + ".bin"))
      return false;
  return !paths.empty();
}

// The samples of `steps` steps.
train::TrainData open_data(comm::World& world, const ConfigResult& config, int64_t steps, bool random) {
  train::TrainData data;
  train::run_collectively(world, [&] {
    if (random) {
      data = random_tokens(config, steps);
      return;
    }
    // In the order of the run, so that the steps are the first ones of training.
    const Config& c = config.config;
    const int64_t global = c.policy.train_global_batch_size;
    data = train::open_train_data(c, train::load_model_spec(config).vocab_size, global);
    if (data.samples < steps * global) train::extend_train_data(data, steps * global);
  });
  return data;
}

// Why layouts are refused, and how many.
using Refused = std::map<std::string, int64_t>;

const Diagnostic* first_error(const Diagnostics& found) {
  const auto at = std::find_if(found.begin(), found.end(),
                               [](const Diagnostic& d) { return d.severity == Severity::error; });
  return at == found.end() ? nullptr : &*at;
}

/// Finds the layouts that the configuration allows. A value that is not supported is not tried again with
/// others.
class Candidates {
 public:
  Candidates(const Options& options, std::vector<std::string> overrides, const train::RunSetting& setting)
      : path_(options.config), overrides_(std::move(overrides)), setting_(setting) {}

  /// Why it is not allowed; empty if it is.
  std::string refusal(const std::vector<std::string>& layout) {
    for (const std::string& value : layout)
      if (const auto at = never_.find(value); at != never_.end()) return at->second;
    const Diagnostics found = problems(layout);
    const Diagnostic* error = first_error(found);
    if (!error) return {};
    const auto says = [&](const char* text) { return error->message.find(text) != std::string::npos; };
    if (says("not supported yet") || says("has no experts"))
      for (const std::string& value : layout)
        if (value.starts_with(error->key + "=")) never_[value] = error->message;
    return error->message;
  }

 private:
  Diagnostics problems(const std::vector<std::string>& more) const {
    std::vector<std::string> overrides = overrides_;
    overrides.insert(overrides.end(), more.begin(), more.end());
    ConfigResult result = load_config(path_, overrides);
    train::check_tried_run(result, setting_);
    return result.diagnostics;
  }

  const std::string path_;
  const std::vector<std::string> overrides_;
  const train::RunSetting setting_;
  std::map<std::string, std::string> never_;  // the reason, by "key=value"
};

/// Runs trials as the options say.
class Trials {
 public:
  Trials(comm::World& world, const Options& options, const train::TrainData& data)
      : world_(world), options_(options), data_(data) {
    if (options.undisturbed > 0 && options.layouts != Which::list) chain_.emplace(world);
  }

  TrialResult run(const ConfigResult& config) {
    return chain_ ? run_undisturbed_trial(world_, config, data_, options_.undisturbed, *chain_)
                  : run_trial(world_, config, data_, options_.steps);
  }

 private:
  comm::World& world_;
  const Options& options_;
  const train::TrainData& data_;
  std::optional<CheckpointChain> chain_;
};

// Graphs are captured after some steps; before, an undisturbed step would not be one.
void require_captured_steps(comm::World& world, const Options& options, const Config& config) {
  train::run_collectively(world, [&] {
    if (options.undisturbed > 0 && config.policy.cuda_graph &&
        options.undisturbed <= engine::Engine::immediate_steps)
      fail(Exit::config,
           "--undisturbed {}: policy.cuda_graph captures a step after the first {}, so that none would be a "
           "graph. Fix: --undisturbed {}",
           options.undisturbed, engine::Engine::immediate_steps, engine::Engine::immediate_steps + 2);
  });
}

int verify_layouts(comm::World& world, const Options& options, const std::vector<std::string>& overrides,
                   const ConfigResult& config, const train::TrainData& data,
                   const train::RunSetting& setting) {
  Refused refused;
  const Layouts all = all_layouts(config.config, train::load_model_spec(config).layers, world.size());
  std::string chosen;  // by rank 0: "0 3 4"
  Sample sample;
  train::run_collectively(world, [&] {
    if (world.rank() != 0) return;
    train::RunSetting own = setting;
    own.world = world.size(), own.local = world.local_size();
    own.nodes = parallel::nodes_of(world.nodes(), world.hosts());
    Candidates candidates(options, overrides, own);
    const auto valid = [&](size_t i) {
      const std::string why = candidates.refusal(all.overrides(i));
      if (!why.empty()) ++refused[why];
      return why.empty();
    };
    if (options.sample > 0) {
      sample = take_sample(all, options.sample, valid);
    } else {
      for (size_t i = 0; i < all.size(); ++i)
        if (valid(i)) sample.layouts.push_back(i);
    }
    for (const size_t i : sample.layouts) chosen += fmt::format("{} ", i);
  });
  world.comm().broadcast_text(chosen, 0);
  const bool list = options.layouts == Which::list;
  Trials trials(world, options, data);
  if (!list) log::info("{}", layout_header());
  int64_t passed = 0, failed = 0, listed = 0;
  std::istringstream indices(chosen);
  for (size_t i = 0; indices >> i;) {
    if (list) {
      log::info("{}", all.name(i));
      ++listed;
      continue;
    }
    std::vector<std::string> own = overrides;
    const std::vector<std::string> values = all.overrides(i);
    own.insert(own.end(), values.begin(), values.end());
    Diagnostics found;
    try {
      if (const auto result = train::try_config_collectively(world, options.config, own, setting, found)) {
        const TrialResult trial = trials.run(*result);
        log::info("{}", layout_row(all.name(i), trial));
        ++(trial.passed() ? passed : failed);
      } else {
        ++refused[found.empty() ? "" : first_error(found)->message];
      }
    } catch (const train::AgreedExit& agreed) {  // the device or its memory; the message is printed
      const bool storage = agreed.code == Exit::io || agreed.code == Exit::cannot_create;
      if (agreed.code == Exit::internal || storage) throw;
      ++refused[fmt::format("exit {}", static_cast<int>(agreed.code))];
    }
  }
  int64_t refusals = 0;
  for (const auto& [reason, count] : refused) {
    log::info("refused {:>6} x {}", count, reason);
    refusals += count;
  }
  std::string part;
  if (passed + failed + listed + refusals < static_cast<int64_t>(all.size()))
    part = fmt::format(" (a sample of {} layouts{})", all.size(),
                       sample.strength == 0 ? ""
                                            : fmt::format(", with every {} of values that is allowed",
                                                          sample.strength == 2 ? "pair" : "triple"));
  if (list)
    log::info("{} valid layouts, {} refused{}", listed, refusals, part);
  else
    log::info("{}{} of {} valid layouts verified{}, {} refused{}", failed > 0 ? "MISMATCH: " : "", passed,
              passed + failed,
              options.undisturbed > 0 ? fmt::format(" ({} undisturbed, evaluation, checkpoints)",
                                                    counted(2 * options.undisturbed, "step"))
                                      : "",
              refusals, part);
  return static_cast<int>(failed > 0 ? Exit::internal : Exit::ok);
}

}  // namespace

int verify(comm::World& world, const Options& options) {
  std::vector<std::string> overrides = options.overrides;
  std::string random;
  train::run_collectively(world, [&] {
    if (world.rank() != 0) return;
    const ConfigResult probe = load_config(options.config, overrides);
    if (options.random_tokens || !probe.ok() || !data_exists(probe.config)) random = "yes";
  });
  world.comm().broadcast_text(random, 0);
  if (!random.empty())
    for (const std::string& ours : train::random_token_overrides()) overrides.push_back(ours);
  train::RunSetting setting;
  setting.files = false;
  train::RunSetting first = setting;
  first.grid = options.layouts == Which::configured;
  const ConfigResult config = train::load_config_collectively(world, options.config, overrides, first);
  require_captured_steps(world, options, config.config);
  const int64_t batches = options.undisturbed > 0 ? undisturbed_batches(options.undisturbed) : options.steps;
  const auto data = open_data(world, config, batches, !random.empty());
  log::info("data        {}", data.examples ? data.examples->describe() : data.dataset->describe());
  if (options.layouts != Which::configured)
    return verify_layouts(world, options, overrides, config, data, setting);
  const TrialResult result = Trials(world, options, data).run(config);
  print_trial(result);
  log::info("{}", verdict(result));
  return static_cast<int>(result.passed() ? Exit::ok : Exit::internal);
}

}  // namespace nrl::verify
