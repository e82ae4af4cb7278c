#include "apps/engine/step_watch.h"

#include <algorithm>

#include "parallel/comm/backoff.h"

namespace nrl::engine {

void StepWatch::begin(int64_t step, bool graph) {
  in_flight_.push_back({step, graph, in_flight_.empty()});
}

double StepWatch::limit(const Step& step, bool alone) const {
  const bool replayed = step.graph && times_.known() && !step.after_pause;
  const double least =
      alone      ? replayed ? limits_.graph_seconds : std::min(limits_.seconds, limits_.alone_seconds)
           : replayed ? limits_.graph_group_seconds
                 : limits_.seconds;
  return times_.limit(limits_.medians, least);
}

void StepWatch::wait(const device::Event& done, comm::Communicator& group) {
  const Step step = in_flight_.front();
  const int64_t begin = comm::now_ns();
  const double seconds = limit(step, group.size() == 1);
  comm::Backoff backoff(nullptr, 60);
  while (!done.done()) {
    group.check();
    if (static_cast<double>(comm::now_ns() - begin) < seconds * 1e9) {
      backoff.pause();
      continue;
    }
    const bool alone = group.size() == 1;
    const std::string usual = times_.known() ? fmt::format("; median step: {:.3g} s", times_.median()) : "";
    throw StepStuck(
        alone ? Exit::internal : Exit::peer_lost,
        fmt::format("step {} did not finish on rank {} within {:.3g} s{}: {}. Fix: look at {}dmesg (NVRM: "
                    "Xid) and nvidia-smi of {}",
                    step.number, group.members()[group.rank()], seconds, usual,
                    alone ? "a kernel or the driver hangs"
                          : fmt::format("a rank of {} is lost or hangs, or a kernel does", group.label()),
                    alone ? "" : "the output of the other ranks, ", alone ? "this host" : "their hosts"));
  }
  in_flight_.pop_front();
  const int64_t now = comm::now_ns();
  if (!step.after_pause) times_.add(static_cast<double>(now - last_end_ns_) / 1e9);
  last_end_ns_ = now;
}

}  // namespace nrl::engine
