#include "core/base/error.h"

namespace nrl::detail {

void check_failed(const char* condition, const char* file, int line, const std::string& text) {
  std::string_view path(file);
  if (auto slash = path.rfind('/'); slash != std::string_view::npos) path.remove_prefix(slash + 1);
  throw Error(Exit::internal, fmt::format("internal error at {}:{}: {}{}{} (this is a bug in nrl-train)",
                                          path, line, condition, text.empty() ? "" : ": ", text));
}

}  // namespace nrl::detail
