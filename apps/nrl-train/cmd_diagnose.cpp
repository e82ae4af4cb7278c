// nrl-train diagnose: the rank that a run which hangs, or failed, waited for.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/diagnosis/records.h"
#include "apps/diagnosis/stacks_text.h"
#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

struct DiagnoseArgs {
  std::string log_dir;
  int64_t live = 0;  ///< a process
  bool json = false;
};

// The threads of the culprits and of two other ranks.
std::string stacks_text(const diagnosis::Records& records, const diagnosis::Diagnosis& found) {
  std::string text;
  int others = 2;
  for (const bool culprits : {true, false})
    for (const diagnosis::ProcessStacks& s : records.stacks) {
      const bool culprit = std::binary_search(found.culprits.begin(), found.culprits.end(), s.rank) ||
                           (records.failure && records.failure->rank == s.rank);
      if (culprit == culprits && (culprit || others-- > 0))
        text += fmt::format("threads of rank {} when the run was ended:\n{}", s.rank, text_of(s));
    }
  return text;
}

// 1: the records name no rank.
int run_diagnose(const DiagnoseArgs& args) {
  if (args.live > 0) {
    std::fputs(diagnosis::describe_live(args.live).c_str(), stdout);
    return 0;
  }
  if (args.log_dir.empty())
    fail(Exit::usage,
         "diagnose needs the log directory of a run, e.g. nrl-train diagnose results/quickstart/logs");
  const diagnosis::Records records = diagnosis::read_records(args.log_dir);
  for (const std::string& text : records.unreadable) log::warn("{}", text);
  if (records.ranks.empty() && !records.failure)
    fail(Exit::no_input,
         "{}: no records of the last attempt: it ended as it should, or ran on another host. Fix: run this "
         "command on the host of the run",
         args.log_dir);
  const diagnosis::Diagnosis found = diagnosis::diagnose(records.ranks);
  const bool named = found.cause != diagnosis::Cause::none || (records.failure && records.failure->rank);
  if (args.json) {
    JsonValue json = json_of(found, records.ranks);
    json.set("run_id", records.run_id);
    json.set("attempt", records.attempt);
    json.set("failure", records.failure ? to_json(*records.failure) : JsonValue());
    std::fputs((json.dump(2) + "\n").c_str(), stdout);
    return named ? 0 : 1;
  }
  std::string text = fmt::format("run {}, attempt {}\n", records.run_id, records.attempt);
  if (records.failure) {
    const monitor::Failure& f = *records.failure;
    text += fmt::format(
        "failure: {} (exit {}){}: {}\n", f.kind, f.exit_code,
        f.rank ? fmt::format(", rank {} on {}, {} of step {}", *f.rank, f.host, f.phase, f.step) : "",
        message_text(f.text));
    if (f.retryable)
      text += fmt::format("the same command again may succeed{}\n",
                          f.checkpoint.empty() ? "" : ", from " + f.checkpoint);
  }
  if (!records.ranks.empty()) text += text_of(found, records.ranks);
  text += stacks_text(records, found);
  std::fputs(text.c_str(), stdout);
  return named ? 0 : 1;
}

}  // namespace

void add_diagnose(CommandLine& line) {
  const auto args = std::make_shared<DiagnoseArgs>();
  CLI::App* c = line.add("diagnose", "Name the rank that a run which hangs, or failed, waited for",
                         "  nrl-train diagnose results/quickstart/logs\n"
                         "  nrl-train diagnose results/quickstart/logs --json\n"
                         "  nrl-train diagnose --live 4711");
  CLI::Option* const log_dir =
      c->add_option("log_dir", args->log_dir, "Log directory of the run (logger.log_dir)");
  c->add_option(
       "--live", args->live,
       "Instead: the threads of this process of this host, what they wait for, and, if tracing it is "
       "permitted, their functions")
      ->check(CLI::PositiveNumber)
      ->excludes(log_dir);
  c->add_flag("--json", args->json, "Print JSON");
  line.on(c, [args] { return run_diagnose(*args); });
}

}  // namespace nrl::app
