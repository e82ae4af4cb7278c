// nrl-train explain: documentation of configuration keys.

#include <cstdio>

#include "apps/nrl-train/commands.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/config/load.h"

namespace nrl::app {

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

}  // namespace nrl::app
