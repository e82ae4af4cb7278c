#include "parallel/comm/launch_model.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace nrl::comm {

int LaunchModel::issue(int rank, std::string_view stream, const std::vector<MeetingPoint>& points,
                       std::string label, int after) {
  Rank& r = ranks_.at(static_cast<size_t>(rank));
  NRL_CHECK(after < std::ssize(r.operations));
  Operation op{{}, std::move(label), 0, after, r.waits.size()};
  op.stream = r.streams.try_emplace(std::string(stream), static_cast<int>(r.streams.size())).first->second;
  for (const MeetingPoint& point : points) {
    const auto [at, added] =
        meeting_of_.try_emplace({point.name, r.visits[point.name]++}, static_cast<int>(meetings_.size()));
    if (added) meetings_.push_back({point.ranks});
    Meeting& meeting = meetings_[at->second];
    NRL_CHECK(meeting.ranks == point.ranks && meeting.arrivals < meeting.ranks, "{} ranks meet at {}, not {}",
              meeting.ranks, point.name, point.ranks);
    ++meeting.arrivals;
    op.meetings.push_back(at->second);
  }
  r.operations.push_back(std::move(op));
  return static_cast<int>(r.operations.size()) - 1;
}

void LaunchModel::wait(int rank, int operation) {
  Rank& r = ranks_.at(static_cast<size_t>(rank));
  NRL_CHECK(operation >= 0 && operation < static_cast<int>(r.operations.size()));
  r.waits.push_back(operation);
}

int LaunchModel::streams() const {
  size_t most = 0;
  for (const Rank& r : ranks_) most = std::max(most, r.streams.size());
  return static_cast<int>(most);
}

int64_t LaunchModel::operations() const {
  int64_t sum = 0;
  for (const Rank& r : ranks_) sum += std::ssize(r.operations);
  return sum;
}

/// Starts whatever can start until nothing moves. With a rule that leaves no choice (no limit of kernels) the
/// result does not depend on the order in which that is done.
class LaunchModel::Run {
 public:
  Run(const LaunchModel& model, const LaunchRules& rules)
      : model_(model), rules_(rules), missing_(model.meetings_.size()) {
    for (size_t m = 0; m < missing_.size(); ++m) missing_[m] = model.meetings_[m].ranks;
    for (const Rank& r : model.ranks_) {
      State& s = states_.emplace_back();
      s.phases.resize(r.operations.size());
      s.queues.resize(r.streams.size());
      s.heads.resize(r.streams.size());
      for (size_t op = 0; op < r.operations.size(); ++op) s.queues[r.operations[op].stream].push_back(op);
    }
  }

  std::string hang() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < states_.size(); ++rank) moved = advance(rank) || moved;
    }
    std::string out;
    for (size_t rank = 0; rank < states_.size(); ++rank) {
      const State& s = states_[rank];
      const auto stuck =
          std::find_if(s.phases.begin(), s.phases.end(), [](Phase p) { return p != Phase::done; });
      if (stuck == s.phases.end()) continue;
      const auto first = static_cast<size_t>(stuck - s.phases.begin());
      out += fmt::format("{}rank {}: #{} {} {}", out.empty() ? "" : "; ", rank, first,
                         operations(rank)[first].label,
                         *stuck == Phase::running ? "waits for its partner" : "cannot start");
    }
    return out;
  }

 private:
  enum class Phase : uint8_t { queued, running, done };
  struct State {
    std::vector<Phase> phases;
    std::vector<std::vector<size_t>> queues;  // operations by stream
    std::vector<size_t> heads;                // of a queue: the first that is not done
    size_t waited = 0;                        // waits that are over
    size_t unstarted = 0, undone = 0;         // the first operation of that kind
    int running = 0;
  };

  const std::vector<Operation>& operations(size_t rank) const { return model_.ranks_[rank].operations; }

  bool advance(size_t rank) {
    State& s = states_[rank];
    const std::vector<int>& waits = model_.ranks_[rank].waits;
    bool moved = false;
    for (size_t q = 0; q < s.queues.size(); ++q)
      for (; s.heads[q] < s.queues[q].size(); ++s.heads[q]) {
        const size_t op = s.queues[q][s.heads[q]];
        if (s.phases[op] != Phase::running || !met(operations(rank)[op])) break;
        s.phases[op] = Phase::done;
        --s.running;
        moved = true;
      }
    for (; s.waited < waits.size() && s.phases[waits[s.waited]] == Phase::done; ++s.waited) moved = true;
    for (size_t op = next(s, rank); op < s.phases.size(); op = next(s, rank)) {
      s.phases[op] = Phase::running;
      ++s.running;
      for (const int m : operations(rank)[op].meetings) --missing_[m];
      moved = true;
    }
    return moved;
  }

  bool met(const Operation& op) const {
    return std::all_of(op.meetings.begin(), op.meetings.end(), [&](int m) { return missing_[m] == 0; });
  }

  /// The first operation by issue that may start now; the number of operations if there is none.
  size_t next(State& s, size_t rank) const {
    const size_t none = s.phases.size();
    while (s.unstarted < none && s.phases[s.unstarted] != Phase::queued) ++s.unstarted;
    while (s.undone < none && s.phases[s.undone] == Phase::done) ++s.undone;
    if (rules_.kernels > 0 && s.running >= rules_.kernels) return none;
    size_t first = none;
    for (size_t q = 0; q < s.queues.size(); ++q) {
      if (s.heads[q] == s.queues[q].size()) continue;
      const size_t op = s.queues[q][s.heads[q]];
      const Operation& o = operations(rank)[op];
      const bool issued = o.issued_at <= s.waited && (o.after < 0 || s.phases[o.after] == Phase::done);
      const bool in_turn = rules_.order == LaunchRules::Order::free ||
                           op == (rules_.order == LaunchRules::Order::issued ? s.unstarted : s.undone);
      if (s.phases[op] == Phase::queued && issued && in_turn) first = std::min(first, op);
    }
    return first;
  }

  const LaunchModel& model_;
  const LaunchRules rules_;
  std::vector<int> missing_;  // by meeting: ranks that have not started
  std::vector<State> states_;
};

std::string LaunchModel::hang(const LaunchRules& rules) const {
  return Run(*this, rules).hang();
}

}  // namespace nrl::comm
