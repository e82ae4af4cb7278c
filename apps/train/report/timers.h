#pragma once
// Where the run's wall time went, by section.

#include <array>
#include <chrono>
#include <cstddef>

namespace nrl::train {

/// The wall clock: seconds since the epoch.
inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// The time shares of the summary. `other` is start-up, logging and whatever no scope covers.
enum class RunSection { compute, data, comm, eval, checkpoint, other };
inline constexpr size_t kRunSections = 6;

/// Seconds by section.
struct SectionTimes {
  std::array<double, kRunSections> seconds{};
  double operator[](RunSection s) const { return seconds[static_cast<size_t>(s)]; }
  double total() const {
    double sum = 0;
    for (double s : seconds) sum += s;
    return sum;
  }
  SectionTimes operator-(const SectionTimes& earlier) const {
    SectionTimes out;
    for (size_t i = 0; i < kRunSections; ++i) out.seconds[i] = seconds[i] - earlier.seconds[i];
    return out;
  }
};

/// A stopwatch whose time always belongs to exactly one section: a scope inside another one stops the outer
/// one's time while it lives, so the sections add up to the wall time. One thread only.
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
    ~Scope() { timers_.enter(outer_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Timers& timers_;
    RunSection outer_;
  };
  Scope time(RunSection section) { return Scope(*this, section); }

  /// Books `seconds` that were counted under `from` to `to`: for exposed communication that the collective
  /// log measures inside the compute section.
  void move(RunSection from, RunSection to, double seconds) {
    times_.seconds[static_cast<size_t>(from)] -= seconds;
    times_.seconds[static_cast<size_t>(to)] += seconds;
  }

  /// Everything up to now, the running section included. Subtract two of them for one step's times.
  SectionTimes times() {
    enter(current_);
    return times_;
  }

  static double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  RunSection enter(RunSection section) {
    const double now = clock_();
    times_.seconds[static_cast<size_t>(current_)] += now - since_;
    since_ = now;
    const RunSection outer = current_;
    current_ = section;
    return outer;
  }

  Clock clock_;
  double since_;
  RunSection current_ = RunSection::other;
  SectionTimes times_;
};

}  // namespace nrl::train
