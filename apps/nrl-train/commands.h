#pragma once
// The subcommands and their arguments. main.cpp parses the command line; each subcommand has its own file.
// Every function returns the exit code of the process; errors are thrown as nrl::Error.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/bench/batch_size.h"
#include "apps/bench/bench.h"
#include "apps/bench/compare.h"

namespace nrl::app {

/// A configuration file and its "key=value" overrides.
struct ConfigArgs {
  std::string path;
  std::vector<std::string> overrides;
};

struct PlanArgs {
  ConfigArgs config;
  int world = 1;                ///< ranks to plan for
  std::string device = "auto";  ///< auto: as configured; cpu, cuda, or the name of a GPU (plan::DeviceModel)
  bool buffers = false;         ///< list every buffer
  std::optional<int> program = {};         ///< print the program of this rank alone
  int search = 0;                          ///< number of layouts to show instead of the configured one
  std::optional<double> expert_load = {};  ///< of the search
};

struct VerifyArgs {
  ConfigArgs config;
  int64_t steps = 2;
  int64_t undisturbed = 0;  ///< 0: compare after every step
  bool random_tokens = false;
  std::string layouts = "configured";  ///< configured or auto
  int64_t sample = 0;                  ///< of layouts auto; 0: all
};

struct PrepareArgs {
  std::vector<std::string> input;
  std::string tokenizer = "bytes";
  std::string output;
  std::string jsonl_key = "text";
  std::string invalid_utf8 = "error";  ///< error, replace or skip
  std::string on_bad_line = "error";   ///< error or skip
  bool append_eod = true;
  std::optional<uint64_t> shuffle_documents;  ///< seed
  int workers = 0;                            ///< 0: all cores
};

struct DataShowArgs {
  ConfigArgs config;
  std::string steps = "1:2";    ///< first:end, counted from 1, end exclusive
  std::string split = "train";  ///< train or validation
  bool json = false;
};

struct GenerateArgs {
  std::string directory;
  std::string prompt;
  std::string tokenizer;  ///< empty: that of the directory
  int64_t max_tokens = 100;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1.0;
  uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
};

struct EvalArgs {
  std::string directory;
  std::vector<std::string> data;  ///< prefixes of token files
  int64_t sequence_length = 0;    ///< 0: as in training
  int64_t micro_batch = 4;
  int64_t max_tokens = 0;  ///< of each dataset; 0: all
  std::string device = "auto";
  int threads = 0;
  bool json = false;
};

struct ReportArgs {
  std::vector<std::string> runs;  ///< log directories, or metrics.jsonl files
  std::string html;               ///< page to write; empty: none
};

struct CheckpointArgs {
  std::string directory;
};

/// The examples at the end of a subcommand's --help ("data show" for one of a group);
/// empty for an unknown name.
std::string_view examples_of(std::string_view command);

int run_train(const ConfigArgs& args);
int run_plan(const PlanArgs& args);
int run_verify(const VerifyArgs& args);
int run_prepare_command(const PrepareArgs& args);
int run_data_show(const DataShowArgs& args);
int run_generate(const GenerateArgs& args);
int run_eval(const EvalArgs& args);
int run_explain(const std::string& key);
int run_config_docs();
int run_doctor();
int run_report(const ReportArgs& args);
int run_tune(const bench::TuneArgs& args);
int run_bench(const bench::Args& args);
int run_checkpoint_verify(const CheckpointArgs& args);

}  // namespace nrl::app
