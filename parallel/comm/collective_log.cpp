#include "parallel/comm/collective_log.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "core/base/error.h"

namespace nrl::comm {

std::string_view name_of(Op op) {
  constexpr std::string_view names[] = {"all_reduce",   "all_gather", "reduce_scatter", "all_to_all",
                                        "all_to_all_v", "broadcast",  "send",           "recv",
                                        "exchange",     "barrier",    "split"};
  return names[static_cast<int>(op)];
}

double wire_bytes(Op op, double bytes, int ranks) {
  const double others = static_cast<double>(ranks - 1) / std::max(ranks, 1);
  switch (op) {
    case Op::all_reduce:
      return 2 * others * bytes;
    case Op::all_gather:
    case Op::reduce_scatter:
    case Op::all_to_all:
      return others * bytes;
    case Op::recv:
    case Op::barrier:
    case Op::split:
      return 0;
    default:
      return ranks > 1 ? bytes : 0;
  }
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct CollectiveLog::State {
  mutable std::mutex mutex;
  struct Sum {
    int64_t count = 0, bytes = 0, most_bytes = 0, busy_ns = 0, exposed_ns = 0;
    int ranks = 1;
    std::string_view algorithm;
  };
  std::vector<LogGroup> groups;
  std::map<std::pair<std::string, Op>, uint32_t> index;  // into sums
  std::vector<Sum> sums;
  std::vector<LogEntry> ring;
  uint64_t next = 0;
  bool records = false;
  std::vector<LogEntry> kept;  // of a window, with consecutive ids

  /// Changes the entry where it is still held.
  template <class Change>
  void change(uint64_t id, const Change& apply) {
    if (LogEntry& entry = ring[id % capacity]; entry.id == id) apply(entry);
    if (!kept.empty() && id >= kept.front().id && id - kept.front().id < kept.size())
      apply(kept[id - kept.front().id]);
  }
};

CollectiveLog::CollectiveLog() : state_(std::make_unique<State>()) {
  state_->ring.resize(capacity);
}
CollectiveLog::~CollectiveLog() = default;

uint32_t CollectiveLog::add_group(std::string_view name, std::string_view label, int ranks,
                                  std::vector<int> members) {
  std::lock_guard lock(state_->mutex);
  state_->groups.push_back({std::string(name), std::string(label), ranks, std::move(members)});
  return static_cast<uint32_t>(state_->groups.size() - 1);
}

std::vector<LogGroup> CollectiveLog::groups() const {
  std::lock_guard lock(state_->mutex);
  return state_->groups;
}

std::string CollectiveLog::group_label(uint32_t group) const {
  std::lock_guard lock(state_->mutex);
  NRL_CHECK(group < state_->groups.size(), "collective log: group {} of {}", group, state_->groups.size());
  return state_->groups[group].label;
}

LogTicket CollectiveLog::enqueue(uint32_t group, uint64_t seq, Op op, DType dtype, int64_t bytes,
                                 int32_t peer, std::string_view algorithm, const MessageNumber& number) {
  std::lock_guard lock(state_->mutex);
  NRL_CHECK(group < state_->groups.size(), "collective log: group {} of {}", group, state_->groups.size());
  const auto [it, added] =
      state_->index.try_emplace({state_->groups[group].name, op}, static_cast<uint32_t>(state_->sums.size()));
  if (added) state_->sums.emplace_back();
  State::Sum& sum = state_->sums[it->second];
  ++sum.count;
  sum.bytes += bytes;
  sum.ranks = state_->groups[group].ranks;
  if (bytes >= sum.most_bytes) {
    sum.most_bytes = bytes;
    sum.algorithm = algorithm;
  }
  const uint64_t id = state_->next++;
  LogEntry& entry = state_->ring[id % capacity];
  entry = LogEntry{};
  entry.id = id;
  entry.seq = seq;
  entry.group = group;
  entry.op = op;
  entry.dtype = dtype;
  entry.peer = peer;
  entry.lane = number.lane;
  entry.message = number.message;
  entry.bytes = bytes;
  entry.enqueued_ns = now_ns();
  if (state_->records) state_->kept.push_back(entry);
  return {id, it->second, 0};
}

void CollectiveLog::start(LogTicket& ticket) {
  std::lock_guard lock(state_->mutex);
  ticket.started_ns = now_ns();
  state_->change(ticket.id, [&](LogEntry& entry) {
    entry.started_ns = ticket.started_ns;
    entry.progress = Progress::running;
  });
}

void CollectiveLog::finish(const LogTicket& ticket, bool failed, int64_t busy_ns) {
  std::lock_guard lock(state_->mutex);
  const int64_t now = now_ns();
  state_->sums[ticket.total].busy_ns += busy_ns >= 0 ? busy_ns : now - ticket.started_ns;
  state_->change(ticket.id, [&](LogEntry& entry) {
    entry.ended_ns = now;
    entry.progress = failed ? Progress::failed : Progress::done;
  });
}

void CollectiveLog::expose(const LogTicket& ticket, int64_t ns) {
  std::lock_guard lock(state_->mutex);
  state_->sums[ticket.total].exposed_ns += ns;
  state_->change(ticket.id, [&](LogEntry& entry) { entry.exposed_ns += ns; });
}

std::vector<LogEntry> CollectiveLog::latest(size_t count) const {
  std::lock_guard lock(state_->mutex);
  const uint64_t kept = std::min<uint64_t>({count, capacity, state_->next});
  std::vector<LogEntry> out;
  out.reserve(kept);
  for (uint64_t id = state_->next - kept; id < state_->next; ++id) out.push_back(state_->ring[id % capacity]);
  return out;
}

void CollectiveLog::record() {
  std::lock_guard lock(state_->mutex);
  state_->kept.clear();
  state_->records = true;
}

std::vector<LogEntry> CollectiveLog::take() {
  std::lock_guard lock(state_->mutex);
  state_->records = false;
  std::vector<LogEntry> out = std::exchange(state_->kept, {});
  std::erase_if(out, [](const LogEntry& entry) { return entry.progress != Progress::done; });
  std::stable_sort(out.begin(), out.end(),
                   [](const LogEntry& a, const LogEntry& b) { return a.started_ns < b.started_ns; });
  return out;
}

std::vector<LogTotal> CollectiveLog::totals() const {
  std::lock_guard lock(state_->mutex);
  std::vector<LogTotal> out;
  for (const auto& [key, index] : state_->index) {
    const State::Sum& sum = state_->sums[index];
    if (sum.count == 0 && sum.busy_ns == 0 && sum.exposed_ns == 0) continue;
    out.push_back({key.first, key.second, sum.ranks, sum.algorithm, sum.count, sum.bytes,
                   static_cast<double>(sum.busy_ns) * 1e-9, static_cast<double>(sum.exposed_ns) * 1e-9});
  }
  return out;
}

void CollectiveLog::reset_totals() {
  std::lock_guard lock(state_->mutex);
  for (State::Sum& sum : state_->sums) sum = {};
}

}  // namespace nrl::comm
