#pragma once
// Wall time of a run by section.

#include <array>
#include <chrono>
#include <cstddef>
#include <exception>

#include "core/base/clock.h"
#include "core/base/status.h"

namespace nrl::monitor {

/// The wall clock: seconds since the epoch.
inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// `time`, or the wall clock where it is 0 (StepFacts::time).
inline double time_or_now(double time) {
  return time > 0 ? time : wall_seconds();
}

/// The sections of the summary. `other` is start-up, logging and everything outside a scope.
enum class RunSection { compute, data, comm, eval, checkpoint, other };
inline constexpr size_t run_sections = 6;

/// Seconds by section.
struct SectionTimes {
  std::array<double, run_sections> seconds{};
  double operator[](RunSection s) const { return seconds[static_cast<size_t>(s)]; }
  double total() const {
    double sum = 0;
    for (double s : seconds) sum += s;
    return sum;
  }
  SectionTimes operator-(const SectionTimes& earlier) const {
    SectionTimes out;
    for (size_t i = 0; i < run_sections; ++i) out.seconds[i] = seconds[i] - earlier.seconds[i];
    return out;
  }
};

/// A stopwatch that always counts for exactly one section: a nested scope pauses the outer one, so that the
/// sections add up to the wall time. Not thread-safe.
///
///   Timers timers;
///   { auto scope = timers.time(RunSection::data); batch = next(); }
class Timers {
 public:
  /// Monotonic seconds.
  using Clock = double (*)();
  explicit Timers(Clock clock = steady_seconds) : clock_(clock), since_(clock()) {}

  class [[nodiscard]] Scope {
   public:
    Scope(Timers& timers, RunSection section) : timers_(timers), outer_(timers.enter(section)) {}
    // A failure is reported in the phase that it happened in.
    ~Scope() { timers_.enter(outer_, std::uncaught_exceptions() == 0); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Timers& timers_;
    RunSection outer_;
  };
  Scope time(RunSection section) { return Scope(*this, section); }

  /// Moves `seconds` from one section to another: for exposed communication, which the collective log
  /// measures within the compute section.
  void move(RunSection from, RunSection to, double seconds) {
    times_.seconds[static_cast<size_t>(from)] -= seconds;
    times_.seconds[static_cast<size_t>(to)] += seconds;
  }

  /// The times up to now. The difference of two calls gives the times of a step.
  SectionTimes times() {
    enter(current_);
    return times_;
  }

  static double steady_seconds() { return nrl::steady_seconds(); }

 private:
  static status::Phase phase_of(RunSection section) {
    switch (section) {
      case RunSection::compute:
      case RunSection::comm:
        return status::Phase::computing;
      case RunSection::data:
        return status::Phase::data;
      case RunSection::eval:
        return status::Phase::evaluation;
      case RunSection::checkpoint:
        return status::Phase::checkpoint;
      default:
        return status::Phase::between;
    }
  }

  RunSection enter(RunSection section, bool shows = true) {
    const double now = clock_();
    times_.seconds[static_cast<size_t>(current_)] += now - since_;
    since_ = now;
    const RunSection outer = current_;
    current_ = section;
    if (shows) status::enter(phase_of(section));
    return outer;
  }

  Clock clock_;
  double since_;
  RunSection current_ = RunSection::other;
  SectionTimes times_;
};

}  // namespace nrl::monitor
