// nrl-train diagnose: the rank that a run which hangs, or failed, waited for.

#include <cstdio>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/diagnosis/records.h"
#include "apps/nrl-train/commands.h"
#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::app {
namespace {

struct DiagnoseArgs {
  std::string log_dir;
  bool json = false;
};

// 1: the records name no rank.
int run_diagnose(const DiagnoseArgs& args) {
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
  std::fputs(text.c_str(), stdout);
  return named ? 0 : 1;
}

}  // namespace

void add_diagnose(CommandLine& line) {
  const auto args = std::make_shared<DiagnoseArgs>();
  CLI::App* c = line.add("diagnose", "Name the rank that a run which hangs, or failed, waited for",
                         "  nrl-train diagnose results/quickstart/logs\n"
                         "  nrl-train diagnose results/quickstart/logs --json");
  c->add_option("log_dir", args->log_dir, "Log directory of the run (logger.log_dir)")->required();
  c->add_flag("--json", args->json, "Print JSON");
  line.on(c, [args] { return run_diagnose(*args); });
}

}  // namespace nrl::app
