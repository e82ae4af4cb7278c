#pragma once
// NRL_FAULTS: faults that a run gives itself, so that what follows a real one can be tried on any machine.
//
//   NRL_FAULTS="kill:rank=3@step=5; io:rank=0@op=fsync#2:errno=ENOSPC" mpirun -n 4 nrl-train run.yaml
//
//   faults = fault {";" fault}     fault = kind ":" target "@" when [":" key=value {"," key=value}]
//   target = rank=N | node=N | all     when = step=N | op=NAME#COUNT

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/io/atomic_file.h"

namespace nrl::train::fault {

enum class Kind : uint8_t {
  kill,   ///< SIGKILL
  segv,   ///< SIGSEGV
  abort,  ///< SIGABRT
  stop,   ///< SIGSTOP
  hang,   ///< sleeps for `for` seconds, or forever
  slow,   ///< sleeps `seconds` in each of `steps` steps
  error,  ///< an Error with exit code 70, which the other ranks do not know of
  io,     ///< `times` operations of files fail with `errno`, or take `delay` seconds longer
  flip,   ///< a bit of a number changes
  nan,    ///< a number becomes NaN
  gpu,    ///< the driver tells the error `xid` of the rank's GPU
};

/// The memory that flip and nan change.
enum class Site : uint8_t {
  weight,    ///< a weight or a part of the optimizer state, when the step begins
  gradient,  ///< a gradient of this rank, before it is summed over the ranks
  repeat,    ///< the same, where a check repeats the step (reliability.recompute_check_period)
};

struct Fault {
  Kind kind = Kind::kill;
  int rank = -1, node = -1;                        ///< both -1: every rank
  int64_t step = 0;                                ///< from 1; io: 0
  status::Phase phase = status::Phase::computing;  ///< which of the step
  FileOp op = FileOp::write;
  int64_t count = 0;   ///< io: the first operation that it meets, from 1
  int64_t times = 1;   ///< io: operations; slow: steps
  double seconds = 0;  ///< of sleep; hang: 0 is forever
  int error = 0;       ///< errno; 0: none
  Site site = Site::weight;
  std::string tensor = {};  ///< flip, nan: as in a checkpoint; empty: the first one
  int64_t element = 0;      ///< flip, nan: of the rank's part of the tensor
  int bit = 0;              ///< flip: of the element, from 0, the lowest
  int xid = 0;              ///< gpu
  int attempt = 1;          ///< the session of the run (run.json) in which it happens; 0: in any
};

/// Reads NRL_FAULTS; none where it is not set. Fails like parse().
std::vector<Fault> requested();
/// Error(Exit::usage), with the position in the text and what may stand there.
std::vector<Fault> parse(std::string_view text);

/// "kill of rank 3 in step 5 (computing), attempt 1"
std::string describe(const Fault& fault);

/// Called by Kind::gpu; unset: the rank has no GPU, and the fault is an Error(Exit::usage).
void set_gpu_hook(std::function<void(int xid)> hook);

/// Arms the faults of this rank. Without any, reach() costs one load.
void arm(const std::vector<Fault>& faults, int rank, int node, int attempt);

namespace detail {
extern bool armed;
void reach(status::Phase phase, int64_t step);
std::vector<Fault> planted(Site site, int64_t step);
}  // namespace detail

/// Called where a phase of a step begins, by the thread of the steps. Does what is armed there.
inline void reach(status::Phase phase, int64_t step) {
  if (detail::armed) [[unlikely]]
    detail::reach(phase, step);
}

/// The faults of memory of this rank at `site` of a step, for the caller to plant.
inline std::vector<Fault> planted(Site site, int64_t step) {
  if (detail::armed) [[unlikely]]
    return detail::planted(site, step);
  return {};
}

}  // namespace nrl::train::fault
