// nrl-train checkpoint verify: checks all checksums of a checkpoint, or of all checkpoints in a directory.

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/checkpoint_store.h"

namespace nrl::app {

int run_checkpoint_verify(const CheckpointArgs& args) {
  if (!is_directory(args.directory)) fail(Exit::no_input, "there is no directory '{}'", args.directory);
  std::vector<CheckpointEntry> entries;
  if (path_exists(join_path(args.directory, manifest_name))) {
    entries.push_back(
        {.path = args.directory, .problems = validate_checkpoint(args.directory, Validation::full)});
  } else {
    entries = list_checkpoints(args.directory, Validation::full);
  }
  if (entries.empty())
    fail(Exit::no_input, "{}: no checkpoint found; expected a step-N directory, or a directory of them",
         args.directory);
  bool all = true;
  for (const CheckpointEntry& entry : entries) {
    log::info("{}  {}", entry.valid() ? "ok     " : "DAMAGED", entry.path);
    for (const std::string& problem : entry.problems) log::info("         {}", problem);
    all = all && entry.valid();
  }
  return all ? 0 : static_cast<int>(Exit::data);
}

}  // namespace nrl::app
