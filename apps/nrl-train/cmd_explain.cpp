// nrl-train explain: documentation of configuration keys.

#include <cstdio>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/config/load.h"

namespace nrl::app {
namespace {

int run_explain(const std::string& key) {
  bool known = true;
  const std::string text = explain(key, &known);
  std::fputs(printable(text).c_str(), known ? stdout : stderr);
  return known ? 0 : static_cast<int>(Exit::usage);
}

int run_config_docs() {
  std::fputs(config_markdown().c_str(), stdout);
  return 0;
}

}  // namespace

void add_explain(CommandLine& line) {
  struct Args {
    std::string key;
    bool markdown = false;
  };
  const auto args = std::make_shared<Args>();
  CLI::App* c = line.add(
      "explain", "Explain a configuration key or section",
      "  nrl-train explain policy.optimizer.lr\n"
      "  nrl-train explain learning_rate          the name in another program, or a word to search for\n"
      "  nrl-train explain policy.scheduler       all keys of a section");
  c->add_option("key", args->key,
                "A key, a section, the name of a key in another program, or a word to search for");
  c->add_flag("--markdown", args->markdown, "Print docs/configuration.md");
  line.on(c, [args] { return args->markdown ? run_config_docs() : run_explain(args->key); });
}

}  // namespace nrl::app
