#include "parallel/comm/ledger.h"

#include "core/base/error.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

namespace nrl::comm {

std::string_view name_of(Op op) {
  constexpr std::string_view names[] = {"all_reduce",   "all_gather", "reduce_scatter", "all_to_all",
                                        "all_to_all_v", "broadcast",  "send",           "recv",
                                        "exchange",     "barrier",    "split"};
  return names[static_cast<int>(op)];
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Ledger::State {
  mutable std::mutex mutex;
  struct Group {
    std::string name, label;
  };
  struct Sum {
    int64_t count = 0, bytes = 0, busy_ns = 0, exposed_ns = 0;
  };
  std::vector<Group> groups;
  std::map<std::pair<std::string, Op>, uint32_t> index;  // into sums
  std::vector<Sum> sums;
  std::vector<LedgerEntry> ring;
  uint64_t next = 0;

  LedgerEntry* find(uint64_t id) {
    LedgerEntry& entry = ring[id % kCapacity];
    return entry.id == id ? &entry : nullptr;
  }
};

Ledger::Ledger() : state_(std::make_unique<State>()) {
  state_->ring.resize(kCapacity);
}
Ledger::~Ledger() = default;

uint32_t Ledger::add_group(std::string_view name, std::string_view label) {
  std::lock_guard lock(state_->mutex);
  state_->groups.push_back({std::string(name), std::string(label)});
  return static_cast<uint32_t>(state_->groups.size() - 1);
}

std::string Ledger::group_label(uint32_t group) const {
  std::lock_guard lock(state_->mutex);
  NRL_CHECK(group < state_->groups.size(), "ledger group {} of {}", group, state_->groups.size());
  return state_->groups[group].label;
}

LedgerTicket Ledger::enqueue(uint32_t group, uint64_t seq, Op op, DType dtype, int64_t bytes, int32_t peer) {
  std::lock_guard lock(state_->mutex);
  NRL_CHECK(group < state_->groups.size(), "ledger group {} of {}", group, state_->groups.size());
  const auto [it, added] =
      state_->index.try_emplace({state_->groups[group].name, op}, static_cast<uint32_t>(state_->sums.size()));
  if (added) state_->sums.emplace_back();
  State::Sum& sum = state_->sums[it->second];
  ++sum.count;
  sum.bytes += bytes;
  const uint64_t id = state_->next++;
  LedgerEntry& entry = state_->ring[id % kCapacity];
  entry = LedgerEntry{};
  entry.id = id;
  entry.seq = seq;
  entry.group = group;
  entry.op = op;
  entry.dtype = dtype;
  entry.peer = peer;
  entry.bytes = bytes;
  entry.enqueued_ns = now_ns();
  return {id, it->second, 0};
}

void Ledger::start(LedgerTicket& ticket) {
  std::lock_guard lock(state_->mutex);
  ticket.started_ns = now_ns();
  if (LedgerEntry* entry = state_->find(ticket.id)) {
    entry->started_ns = ticket.started_ns;
    entry->progress = Progress::running;
  }
}

void Ledger::finish(const LedgerTicket& ticket, bool failed, int64_t busy_ns) {
  std::lock_guard lock(state_->mutex);
  const int64_t now = now_ns();
  state_->sums[ticket.total].busy_ns += busy_ns >= 0 ? busy_ns : now - ticket.started_ns;
  if (LedgerEntry* entry = state_->find(ticket.id)) {
    entry->ended_ns = now;
    entry->progress = failed ? Progress::failed : Progress::done;
  }
}

void Ledger::expose(const LedgerTicket& ticket, int64_t ns) {
  std::lock_guard lock(state_->mutex);
  state_->sums[ticket.total].exposed_ns += ns;
  if (LedgerEntry* entry = state_->find(ticket.id)) entry->exposed_ns += ns;
}

std::vector<LedgerEntry> Ledger::latest(size_t count) const {
  std::lock_guard lock(state_->mutex);
  const uint64_t kept = std::min<uint64_t>({count, kCapacity, state_->next});
  std::vector<LedgerEntry> out;
  out.reserve(kept);
  for (uint64_t id = state_->next - kept; id < state_->next; ++id)
    out.push_back(state_->ring[id % kCapacity]);
  return out;
}

std::vector<LedgerTotal> Ledger::totals() const {
  std::lock_guard lock(state_->mutex);
  std::vector<LedgerTotal> out;
  for (const auto& [key, index] : state_->index) {
    const State::Sum& sum = state_->sums[index];
    if (sum.count == 0 && sum.busy_ns == 0 && sum.exposed_ns == 0) continue;
    out.push_back({key.first, key.second, sum.count, sum.bytes, static_cast<double>(sum.busy_ns) * 1e-9,
                   static_cast<double>(sum.exposed_ns) * 1e-9});
  }
  return out;
}

void Ledger::reset_totals() {
  std::lock_guard lock(state_->mutex);
  for (State::Sum& sum : state_->sums) sum = {};
}

}  // namespace nrl::comm
