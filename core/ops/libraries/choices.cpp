#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "core/base/log.h"
#include "core/ops/libraries.h"

namespace nrl::ops {

void note_choice(const Exec& exec, LibraryChoice choice) {
  std::vector<LibraryChoice>& known = exec.libraries->choices;
  if (std::find(known.begin(), known.end(), choice) != known.end()) return;
  if (!exec.needed) log::line(fmt::format("{} {}: {}", choice.op, choice.pass, choice.implementation));
  known.push_back(std::move(choice));
}

}  // namespace nrl::ops
