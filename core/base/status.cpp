#include "core/base/status.h"

#include <utility>

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
  copy(at->backward, from.backward);
  copy(at->waited_ns, from.waited_ns);
  for (size_t i = 0; i < phases; ++i) copy(at->own_ns[i], from.own_ns[i]);
  copy(at->signal, from.signal);
  copy(at->signal_sent, from.signal_sent);
  copy(at->signal_at, from.signal_at);
  detail::current.store(at, std::memory_order_release);
}

void enter(Phase phase) {
  static int64_t waited_before = 0;  // when the phase began
  Page& p = page();
  const Phase before = p.phase.load(std::memory_order_relaxed);
  if (before == phase) return;
  const auto now = static_cast<int64_t>(steady_seconds() * 1e9);
  const int64_t waited = p.waited_ns.load(std::memory_order_relaxed);
  p.own_ns[static_cast<size_t>(before)].fetch_add(
      now - p.phase_since.load(std::memory_order_relaxed) - (waited - std::exchange(waited_before, waited)),
      std::memory_order_relaxed);
  p.phase_since.store(now, std::memory_order_relaxed);
  p.phase.store(phase, std::memory_order_relaxed);
  made_progress();
}

}  // namespace nrl::status
