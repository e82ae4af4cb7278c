#include "core/base/status.h"

#include "core/base/clock.h"

namespace nrl::status {
namespace {

Page own;

template <class T>
void copy(std::atomic<T>& to, const std::atomic<T>& from) {
  to.store(from.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace

namespace detail {
std::atomic<Page*> current{&own};
}

std::string_view name_of(Phase phase) {
  constexpr std::string_view names[phases] = {"starting",   "computing", "data",     "evaluation",
                                              "checkpoint", "between",   "finishing"};
  const auto index = static_cast<size_t>(phase);
  return index < phases ? names[index] : "unknown";
}

void place(Page* at) {
  if (!at) at = &own;
  const Page& from = page();
  if (at == &from) return;
  copy(at->progress, from.progress);
  copy(at->step, from.step);
  copy(at->completed, from.completed);
  copy(at->phase_since, from.phase_since);
  copy(at->wait_since, from.wait_since);
  copy(at->wait_id, from.wait_id);
  copy(at->phase, from.phase);
  copy(at->microbatch, from.microbatch);
  copy(at->layer, from.layer);
  detail::current.store(at, std::memory_order_release);
}

void enter(Phase phase) {
  Page& p = page();
  if (p.phase.load(std::memory_order_relaxed) == phase) return;
  p.phase_since.store(static_cast<int64_t>(steady_seconds() * 1e9), std::memory_order_relaxed);
  p.phase.store(phase, std::memory_order_relaxed);
  made_progress();
}

}  // namespace nrl::status
