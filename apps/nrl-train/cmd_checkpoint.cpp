// nrl-train checkpoint verify: checks all checksums and counters of a checkpoint, or of all in a directory.
// nrl-train checkpoint merge: adds an adapter to the weights of its base model.

#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "apps/state/merge_adapter.h"
#include "apps/state/model_source.h"
#include "apps/state/resume.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/io/checkpoint_store.h"

namespace nrl::app {
namespace {

struct CheckpointArgs {
  std::string directory;
  std::string output;  ///< of merge
};

int run_checkpoint_verify(const CheckpointArgs& args) {
  if (!is_directory(args.directory)) fail(Exit::no_input, "there is no directory '{}'", args.directory);
  std::vector<CheckpointEntry> entries;
  if (path_exists(join_path(args.directory, manifest_name))) {
    entries.push_back({.path = args.directory, .problems = {}});
  } else {
    entries = list_checkpoints(args.directory, Validation::none);
  }
  if (entries.empty())
    fail(Exit::no_input, "{}: no checkpoint found; expected a step-N directory, or a directory of them",
         args.directory);
  bool all = true;
  for (CheckpointEntry& entry : entries) {
    entry.problems = train::verify_checkpoint(entry.path);
    log::info("{}  {}", entry.valid() ? "ok     " : "DAMAGED", entry.path);
    constexpr std::string_view line = "\n         ";
    if (!entry.valid())
      log::info("{}", bounded_lines(fmt::format("{}{}", line.substr(1), joined(entry.problems, line))));
    all = all && entry.valid();
  }
  return all ? 0 : static_cast<int>(Exit::data);
}

int run_checkpoint_merge(const CheckpointArgs& args) {
  std::string note;
  const std::string directory = train::find_model_directory(args.directory, note);
  if (!note.empty()) log::warn_text(note);
  train::merge_adapter(directory, args.output);
  log::info("wrote {}, the base model of {} with the adapter in its weights", args.output, directory);
  return 0;
}

}  // namespace

void add_checkpoint(CommandLine& line) {
  const auto args = std::make_shared<CheckpointArgs>();
  CLI::App* ck = line.add("checkpoint", "Inspect checkpoints, merge adapters",
                          "  nrl-train checkpoint verify results/quickstart/checkpoints");
  ck->require_subcommand(1);
  CLI::App* c =
      line.add("verify", "Verify all checksums of a checkpoint, or of all checkpoints in a directory",
               "  nrl-train checkpoint verify results/quickstart/checkpoints\n"
               "  nrl-train checkpoint verify results/quickstart/checkpoints/step-500",
               ck);
  c->add_option("directory", args->directory, "Checkpoint (step-N), or a directory of checkpoints")
      ->required();
  line.on(c, [args] { return run_checkpoint_verify(*args); });
  CLI::App* merge = line.add(
      "merge",
      "Write the base model of an adapter with the adapter in its weights, as a Hugging Face directory",
      "  nrl-train checkpoint merge results/lora/checkpoints --output models/merged\n"
      "  nrl-train checkpoint merge adapters/alpaca --output models/merged",
      ck);
  merge
      ->add_option(
          "directory", args->directory,
          "Adapter: a checkpoint of a LoRA run (step-N), a directory of them, or one that PEFT wrote")
      ->required();
  merge->add_option("--output", args->output, "Directory to write; must not exist")->required();
  line.on(merge, [args] { return run_checkpoint_merge(*args); });
}

}  // namespace nrl::app
