#pragma once
// The share of a run's time that is training, with failures and checkpoints. Failures come at random times,
// exponentially distributed, also during restarts (J. T. Daly, "A higher order estimate of the optimum
// checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006).

namespace nrl::predict {

/// Seconds.
struct Interruptions {
  double mtbf = 0;     ///< mean time between failures of any rank; infinite: none
  double stall = 0;    ///< training stops for a checkpoint
  double lag = 0;      ///< after the stall, until a run can resume from it: a save beside the next steps
  double restart = 0;  ///< from a failure until training resumes, loading included
};

/// Training time over elapsed time with a checkpoint after every `interval` seconds of training:
///   t / (M e^((R+l)/M) (e^((t+d)/M) - 1)),
/// Daly's expected time between checkpoints with stall d, restart R and MTBF M. A lag l adds to the restart:
/// all that was trained between the snapshot and its completion is trained again.
double goodput(double interval, const Interruptions& i);

/// The interval with the highest goodput; infinite without failures. It is where the derivative of goodput()
/// is 0, ln(1 - t/M) + (t + d)/M = 0: Daly's sqrt(2 d M) for d << M.
double best_interval(const Interruptions& i);

}  // namespace nrl::predict
