#include "apps/planner/progress.h"

#include <string>

#include <spdlog/fmt/fmt.h>

#include "core/base/text.h"

namespace nrl::planner {

void SearchProgress::operator()(size_t done, size_t total, double seconds) {
  constexpr double plain_seconds = 5, redraw_seconds = 0.2;
  if (seconds < next_ || done == total) return;
  next_ = seconds + (columns_ > 0 ? redraw_seconds : plain_seconds);
  const std::string text =
      fmt::format("searching: {} of {} layouts, {} so far", done, total, human_duration(seconds));
  write_(columns_ > 0 ? "\r\033[K" + text.substr(0, static_cast<size_t>(columns_ - 1)) : text + "\n");
  shown_ = true;
}

void SearchProgress::finish() {
  if (columns_ > 0 && shown_) write_("\r\033[K");
}

}  // namespace nrl::planner
