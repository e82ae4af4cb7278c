#pragma once
// Runs of the trainer inside the test program: token files made by hand, a configuration, and everything that
// a run leaves behind.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <sys/wait.h>

#include "apps/data/gpt_dataset.h"
#include "apps/model/spec/spec.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/run_config.h"
#include "apps/train/trainer.h"
#include "core/base/philox.h"
#include "core/io/indexed_dataset.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/train/captured_output.h"
#include "tests/train/json_lines.h"

namespace nrl::test {

using Rows = std::vector<JsonValue>;

/// A run on one rank, as its user sees it.
struct Finished {
  Exit code = Exit::ok;
  std::string out, err;  ///< standard output and standard error
};

/// A directory with token files, a configuration of a tiny model, and the runs made with it.
class Workbench {
 public:
  static constexpr int64_t sequence = 8, global = 4;  ///< T and the global batch of every run here

  Workbench() { write_tokens("corpus", random_tokens(2000, 1)); }

  const std::string& path() const { return directory_.path(); }
  std::string operator/(const std::string& name) const { return directory_ / name; }
  std::string read(const std::string& name) const { return read_file(directory_ / name, size_t{1} << 28); }

  static std::vector<int32_t> random_tokens(int64_t count, uint64_t seed) {
    const PhiloxStream random(seed, "tokens");
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i)
      tokens.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) % 256));
    return tokens;
  }
  /// One document.
  void write_tokens(const std::string& name, const std::vector<int32_t>& tokens) const {
    IndexedDatasetWriter writer(directory_ / name, 272);
    writer.add_sequence(tokens);
    writer.end_document();
    writer.finish();
  }

  /// Model keys of the configuration, as YAML.
  std::string model =
      "{model_type: llama, vocab_size: 272, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
      "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}";

  /// The configuration of a run whose logs and checkpoints are in the directory NAME.
  std::string yaml(const std::string& name) const {
    return fmt::format(
        "policy:\n"
        "  model: {0}\n"
        "  train_global_batch_size: {1}\n"
        "  train_micro_batch_size: 2\n"
        "  max_total_sequence_length: {2}\n"
        "  optimizer: {{lr: 1.0e-2}}\n"
        "  scheduler: {{lr_decay_style: constant}}\n"
        "loop: {{max_num_steps: 4, seed: 7}}\n"
        "data: {{train: {{data_path: {3}/corpus}}, num_workers: 0}}\n"
        "checkpointing: {{checkpoint_dir: {3}/{4}/checkpoints, save_period: 0}}\n"
        "logger: {{log_dir: {3}/{4}/logs, log_interval: 1, progress: plain}}\n"
        "device: cpu\n"
        "kernels: {{num_threads: 1}}\n",
        model, global, sequence, path(), name);
  }

  Finished run(const std::string& name, const std::vector<std::string>& overrides = {}) const {
    const std::string file = directory_ / (name + ".yaml");
    std::ofstream(file) << yaml(name);
    Finished finished;
    const CapturedOutput captured(directory_ / "out.txt", directory_ / "err.txt");
    try {
      const auto world = comm::World::init();
      finished.code = train::train(*world, train::load_config_collectively(*world, file, overrides));
    } catch (const train::AgreedExit& agreed) {
      finished.code = agreed.code;
    } catch (const Error& error) {
      finished.code = error.code();
      std::fprintf(stderr, "%s\n", error.what());
    }
    captured.restore();
    finished.out = read("out.txt");
    finished.err = read("err.txt");
    return finished;
  }

  /// The same with the binary under mpirun. `launcher`: the command up to the configuration.
  Finished run_ranks(const std::string& launcher, const std::string& name,
                     const std::vector<std::string>& overrides) const {
    const std::string file = directory_ / (name + ".yaml");
    std::ofstream(file) << yaml(name);
    std::string command = launcher + " " + file;
    for (const std::string& assignment : overrides) command += " '" + assignment + "'";
    command += " >" + directory_ / "out.txt" + " 2>" + directory_ / "err.txt";
    const int status = std::system(command.c_str());
    REQUIRE(WIFEXITED(status));
    return {static_cast<Exit>(WEXITSTATUS(status)), read("out.txt"), read("err.txt")};
  }

  /// Every row of a run's metrics.jsonl.
  Rows rows(const std::string& name) const {
    const std::string path = name + "/logs/metrics.jsonl";
    return std::filesystem::exists(directory_ / path) ? json_lines(read(path), path) : Rows{};
  }
  /// Those of training steps.
  Rows steps(const std::string& name) const {
    Rows out = rows(name);
    std::erase_if(out, [](const JsonValue& row) { return !row.contains("loss"); });
    return out;
  }
  /// A field of the rows of training steps; NaN where it is null.
  std::vector<double> values(const std::string& name, std::string_view field) const {
    std::vector<double> out;
    for (const JsonValue& row : steps(name))
      out.push_back(row.at(field).is_null() ? std::nan("") : row.get_double(field));
    return out;
  }
  std::vector<int64_t> step_numbers(const std::string& name) const {
    std::vector<int64_t> out;
    for (const JsonValue& row : steps(name)) out.push_back(row.get_int("step"));
    return out;
  }
  /// What a run's checkpoint directory holds, in alphabetical order, without the lock.
  std::vector<std::string> checkpoints(const std::string& name) const {
    std::vector<std::string> out;
    const std::string store = directory_ / (name + "/checkpoints");
    if (!std::filesystem::exists(store)) return out;
    for (const auto& entry : std::filesystem::directory_iterator(store))
      if (entry.path().filename() != "run.lock") out.push_back(entry.path().filename());
    std::sort(out.begin(), out.end());
    return out;
  }
  /// The position that a checkpoint of a run holds.
  JsonValue position(const std::string& name, int64_t step) const {
    const std::string text = read(fmt::format("{}/checkpoints/step-{}/manifest.json", name, step));
    return parse_json(text, "manifest.json").at("state");
  }
  std::string weights(const std::string& name, int64_t step) const {
    return read(fmt::format("{}/checkpoints/step-{}/model.safetensors", name, step));
  }

 private:
  TemporaryDirectory directory_{TemporaryDirectory::Where::memory};
};

}  // namespace nrl::test
