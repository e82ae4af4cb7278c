#include "apps/nrl-train/commands.h"

#include <charconv>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include <CLI/CLI.hpp>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

/// Implements add_config().
class ConfigOptions {
 public:
  ConfigOptions(std::string& path, std::vector<std::string>& overrides)
      : path_(path), overrides_(overrides) {}

  std::string& named() { return named_; }

  void take_first(std::string& file) {
    file = std::exchange(path_, "");
    if (overrides_.empty() || overrides_.front().find('=') != std::string::npos) return;
    path_ = overrides_.front();
    overrides_.erase(overrides_.begin());
  }

  void settle(bool required) {
    if (named_.empty()) {
      if (path_.empty() && required) throw CLI::RequiredError("CONFIG");
      return;
    }
    std::error_code no_file;
    if (path_.find('=') != std::string::npos)
      overrides_.insert(overrides_.begin(), path_);  // the first argument without a name
    else if (!path_.empty() && path_ != named_ && !std::filesystem::equivalent(path_, named_, no_file))
      fail(Exit::usage, "two configurations are given: '{}' and --config '{}'. Fix: leave one out", path_,
           named_);
    path_ = named_;
  }

 private:
  std::string& path_;
  std::vector<std::string>& overrides_;
  std::string named_;
};

}  // namespace

CLI::App* CommandLine::find(const std::string& name) {
  return app_.get_subcommand(name);
}

CLI::App* CommandLine::add(std::string name, std::string about, const std::string& examples,
                           CLI::App* group) {
  CLI::App* command = (group ? group : &app_)->add_subcommand(std::move(name), std::move(about));
  command->footer("Examples:\n" + examples);
  return command;
}

void CommandLine::on(CLI::App* command, std::function<int()> run) {
  command->callback([this, run = std::move(run)] { exit_code_ = run(); });
}

void add_config(CLI::App* command, std::string& path, std::vector<std::string>& overrides,
                const std::string& what, bool required, std::function<std::string*()> first) {
  const auto options = std::make_shared<ConfigOptions>(path, overrides);
  command->add_option("CONFIG", path, what);
  command->add_option("overrides", overrides, "key=value, e.g. policy.optimizer.lr=1e-4");
  command->add_option("--config", options->named(), "The same as CONFIG");
  command->parse_complete_callback([options, required, first = std::move(first)] {
    if (std::string* file = first()) options->take_first(*file);
    options->settle(required);
  });
}

CLI::Validator finite_range(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) -> std::string {
        double value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && value >= low && value <= high)
          return "";
        return fmt::format("expected a number from {} to {}, found '{}'", low, high, clipped(text));
      },
      fmt::format("FLOAT in [{} - {}]", low, high));
}

}  // namespace nrl::app
