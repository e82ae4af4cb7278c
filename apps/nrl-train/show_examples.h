#pragma once
// nrl-train data show FILE: prints the examples that records become.

#include <cstdint>
#include <string>
#include <vector>

#include "apps/data/examples/example_options.h"
#include "apps/data/examples/example_set.h"
#include "apps/data/tokenizer.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace nrl::app {

struct ShowExamplesArgs {
  data::ExampleOptions options;
  std::string tokenizer;
  std::string format = "auto", train_on = "auto", on_overlong = "truncate", special_tokens = "allow",
              on_bad_record = "error";
  int64_t n = 3;
  bool ids = false;
  int workers = 0;                             ///< 0: all cores
  std::vector<const CLI::Option*> of_records;  ///< options that a configuration has instead
};

/// Adds the options, which `args` must outlive.
void add_show_examples(CLI::App* command, ShowExamplesArgs& args);

/// True if `path` looks like records rather than a configuration.
bool names_records(const std::string& path);

/// Makes the examples of the files `inputs` and prints them.
int show_examples(const ShowExamplesArgs& args, std::vector<std::string> inputs, bool json);

/// Prints the first `n` examples of a set and its summary.
int print_examples(const data::ExampleSet& set, const data::Tokenizer& tokenizer,
                   const ShowExamplesArgs& args, bool json);

}  // namespace nrl::app
