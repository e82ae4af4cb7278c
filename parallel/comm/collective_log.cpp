#include "parallel/comm/collective_log.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include <spdlog/fmt/ranges.h>

#include "core/base/error.h"
#include "core/base/status.h"

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

namespace {

constexpr int64_t most_members = 1'000'000;

bool read_number(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= INT32_MAX;
}

// The text up to the separator, which is removed with it.
std::string_view take_until(std::string_view& text, char separator) {
  const size_t at = std::min(text.find(separator), text.size());
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(std::min(at + 1, text.size()));
  return taken;
}

}  // namespace

std::string to_line(const LogGroup& group) {
  const std::vector<int>& m = group.members;
  const int distance = m.size() > 1 ? m[1] - m[0] : 1;
  bool even = !m.empty();
  for (size_t i = 1; i < m.size(); ++i) even = even && m[i] - m[i - 1] == distance;
  return fmt::format("{} {} {} {}", group.name, group.ranks,
                     even && distance > 0 ? fmt::format("{}:{}:{}", m.front(), distance, m.size())
                                          : fmt::format("{},", fmt::join(m, ",")),
                     group.label);
}

bool from_line(std::string_view line, LogGroup& group) {
  group = {};
  group.name = take_until(line, ' ');
  int64_t number = 0;
  if (group.name.empty() || !read_number(take_until(line, ' '), number)) return false;
  group.ranks = static_cast<int>(number);
  std::string_view members = take_until(line, ' ');
  group.label = line;
  if (members.find(':') == std::string_view::npos) {
    while (members.size() > 1) {
      if (!read_number(take_until(members, ','), number)) return false;
      group.members.push_back(static_cast<int>(number));
    }
    return true;
  }
  int64_t first = 0, distance = 0, count = 0;
  if (!read_number(take_until(members, ':'), first) || !read_number(take_until(members, ':'), distance) ||
      !read_number(members, count) || count > most_members || first + distance * count > INT32_MAX)
    return false;
  for (int64_t i = 0; i < count; ++i) group.members.push_back(static_cast<int>(first + i * distance));
  return true;
}

struct CollectiveLog::State {
  mutable std::mutex mutex;
  struct Sum {
    int64_t count = 0, bytes = 0, most_bytes = 0, busy_ns = 0, exposed_ns = 0;
    int ranks = 1;
    std::string_view algorithm;
  };
  std::vector<LogGroup> groups;
  std::vector<uint64_t> numbers;                         // of groups: a hash of name and members
  std::map<std::pair<std::string, Op>, uint32_t> index;  // into sums
  std::vector<Sum> sums;
  std::vector<LogEntry> own_ring;
  LogEntry* ring = nullptr;  // capacity entries
  Memory memory;             // empty: own_ring
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

  void write_group(const LogGroup& group) {
    if (!memory.groups) return;
    const std::string line = to_line(group) + "\n";
    const uint32_t used = memory.group_bytes_used->load(std::memory_order_relaxed);
    if (used + line.size() > memory.group_bytes) return;  // readers know later groups by their number only
    std::memcpy(memory.groups + used, line.data(), line.size());
    memory.group_bytes_used->store(used + static_cast<uint32_t>(line.size()), std::memory_order_release);
  }
};

static_assert(std::is_trivially_copyable_v<LogEntry>);

CollectiveLog::CollectiveLog() : state_(std::make_unique<State>()) {
  state_->own_ring.resize(capacity);
  state_->ring = state_->own_ring.data();
}
CollectiveLog::~CollectiveLog() = default;

uint32_t CollectiveLog::add_group(std::string_view name, std::string_view label, int ranks,
                                  std::vector<int> members, int self) {
  std::lock_guard lock(state_->mutex);
  state_->groups.push_back({std::string(name), std::string(label), ranks, std::move(members), self});
  const LogGroup& group = state_->groups.back();
  state_->write_group(group);
  state_->numbers.push_back(
      std::hash<std::string>()(fmt::format("{}:{}", group.name, fmt::join(group.members, ","))));
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
  if (state_->memory.next) state_->memory.next->store(state_->next, std::memory_order_release);
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
  status::made_progress();
}

void CollectiveLog::expose(const LogTicket& ticket, int64_t ns) {
  std::lock_guard lock(state_->mutex);
  state_->sums[ticket.total].exposed_ns += ns;
  state_->change(ticket.id, [&](LogEntry& entry) { entry.exposed_ns += ns; });
}

void CollectiveLog::place(const Memory& memory) {
  std::lock_guard lock(state_->mutex);
  State& s = *state_;
  LogEntry* to = memory.entries ? memory.entries : s.own_ring.data();
  if (to == s.ring) return;
  std::copy_n(s.ring, capacity, to);
  s.ring = to;
  s.memory = memory;
  for (const LogGroup& group : s.groups) s.write_group(group);
  if (memory.next) memory.next->store(s.next, std::memory_order_release);
}

bool CollectiveLog::try_pending(uint64_t id, Pending& pending) const {
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock) return false;
  const LogEntry& e = state_->ring[id % capacity];
  if (e.id != id || e.enqueued_ns == 0 || e.progress >= Progress::done) return false;
  const LogGroup& group = state_->groups[e.group];
  const bool message = (e.op == Op::send || e.op == Op::recv) && e.peer >= 0 &&
                       static_cast<size_t>(e.peer) < group.members.size();
  pending = {.group = state_->numbers[e.group],
             .sequence = e.seq,
             .bytes = e.bytes,
             .ranks = group.ranks,
             .call = static_cast<uint32_t>(e.op) << 8 | static_cast<uint32_t>(e.dtype)};
  if (message) {
    // Two ranks exchange messages of a lane in two directions, which are numbered apart.
    const auto peer = static_cast<uint64_t>(group.members[static_cast<size_t>(e.peer)]),
               self = static_cast<uint64_t>(group.self);
    const uint64_t sender = e.op == Op::send ? self : peer, receiver = e.op == Op::send ? peer : self;
    pending.group ^= ((sender << 32 | receiver) * 0x9e3779b97f4a7c15u) ^ static_cast<uint64_t>(e.lane) << 20;
    pending.sequence = static_cast<uint64_t>(e.message);
    pending.ranks = 2;
    pending.call = static_cast<uint32_t>(Op::send) << 8 | static_cast<uint32_t>(e.dtype);
    *fmt::format_to_n(pending.text, sizeof pending.text - 1, "{} {} rank {}", name_of(e.op),
                      e.op == Op::send ? "to" : "from", peer)
         .out = 0;
  } else {
    *fmt::format_to_n(pending.text, sizeof pending.text - 1, "{} of {}", name_of(e.op), group.label).out = 0;
  }
  return true;
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
