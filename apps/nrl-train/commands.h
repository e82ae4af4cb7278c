#pragma once
// Every subcommand has a file cmd_<name>.cpp: its arguments, their help with examples, and its function.
// main.cpp lists the subcommands. CLI11 is slow to compile: only .cpp files include it.

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace nrl::app {

/// Describes the subcommands to the parser.
class CommandLine {
 public:
  explicit CommandLine(CLI::App& app) : app_(app) {}

  /// Adds a subcommand, or one of `group`. `examples` ends its --help.
  CLI::App* add(std::string name, std::string about, const std::string& examples, CLI::App* group = nullptr);
  /// A group that was added.
  CLI::App* find(const std::string& name);
  /// `run` executes the subcommand and returns the exit code of the process; errors are thrown as nrl::Error.
  /// It owns the arguments, which the parser has filled by then.
  void on(CLI::App* command, std::function<int()> run);

  int exit_code() const { return exit_code_; }

 private:
  CLI::App& app_;
  int exit_code_ = 0;
};

/// Adds a subcommand to the parser.
using AddCommand = void(CommandLine& line);

/// A configuration file and its "key=value" overrides.
struct ConfigArgs {
  std::string path;
  std::vector<std::string> overrides;
};

/// Adds "CONFIG key=value ..." and "--config CONFIG key=value ..." to a subcommand, which `path` and
/// `overrides` must outlive. `first`: of a command that takes another file before CONFIG, where that goes;
/// null: it takes none.
void add_config(
    CLI::App* command, std::string& path, std::vector<std::string>& overrides,
    const std::string& what = "YAML file", bool required = true,
    std::function<std::string*()> first = [] { return nullptr; });
inline void add_config(CLI::App* command, ConfigArgs& config) {
  add_config(command, config.path, config.overrides);
}

/// Prints the tables of a profile, after an empty line, with predicted gains. `path`: as of profile show.
void print_profile(const std::string& path);

/// A number in [low, high]. CLI11's own range accepts NaN.
CLI::Validator finite_range(double low, double high);

}  // namespace nrl::app
