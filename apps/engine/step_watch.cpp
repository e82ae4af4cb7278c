#include "apps/engine/step_watch.h"

#include <algorithm>
#include <vector>

#include "core/base/sample.h"
#include "parallel/comm/backoff.h"

namespace nrl::engine {
namespace {

constexpr size_t history = 33;     // the median is taken of this many steps
constexpr size_t least_known = 3;  // with fewer there is no median

double median(const std::deque<double>& values) {
  return nrl::median({values.begin(), values.end()});
}

}  // namespace

void StepWatch::begin(int64_t step, bool graph) {
  in_flight_.push_back({step, graph, in_flight_.empty()});
}

double StepWatch::limit(const Step& step, bool alone) const {
  const bool known = seconds_.size() >= least_known;
  const bool replayed = step.graph && known && !step.after_pause;
  const double least =
      alone      ? replayed ? limits_.graph_seconds : std::min(limits_.seconds, limits_.alone_seconds)
           : replayed ? limits_.graph_group_seconds
                 : limits_.seconds;
  return known ? std::max(least, limits_.medians * median(seconds_)) : least;
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
    const std::string usual =
        seconds_.size() < least_known ? "" : fmt::format("; median step: {:.3g} s", median(seconds_));
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
  if (!step.after_pause) {
    seconds_.push_back(static_cast<double>(now - last_end_ns_) / 1e9);
    if (seconds_.size() > history) seconds_.pop_front();
  }
  last_end_ns_ = now;
}

}  // namespace nrl::engine
