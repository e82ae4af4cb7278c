#include "apps/train/loop/capture.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include <sys/resource.h>

#include "apps/machine/device_models.h"
#include "apps/plan/pipeline.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/libraries.h"
#include "core/ops/traced.h"
#include "core/trace/device_timeline.h"
#include "core/trace/trace.h"
#include "parallel/comm/world/clock_sync.h"

namespace nrl::train {
namespace {

/// Space for the events of `steps` steps with `calls` calls of ops each, besides which there are layers,
/// communication and waits. Limited: what does not fit is counted and reported.
size_t space_of(int64_t steps, size_t calls) {
  constexpr size_t most = size_t{1} << 22;  // 200 MB
  const size_t of_step = 3 * calls + 2000;
  return std::min<size_t>(most, static_cast<size_t>(steps) * of_step);
}

/// Migrations of all threads; 0 where the kernel does not tell.
int64_t count_migrations() {
  int64_t sum = 0;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream file(task.path() / "sched");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("se.nr_migrations")) continue;
      std::istringstream number(line.substr(line.find(':') + 1));
      int64_t migrations = 0;
      number >> migrations;
      sum += migrations;
      break;
    }
  }
  return sum;
}

/// Seconds in which this thread was on a run queue without a processor; 0 where the kernel does not tell.
double count_starved() {
  std::ifstream file("/proc/thread-self/schedstat");
  double running = 0, waiting = 0;  // nanoseconds
  return file >> running >> waiting ? waiting * 1e-9 : 0;
}

profile::HostCounters read_counters() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return {.cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime),
          .starved = count_starved(),
          .involuntary_switches = usage.ru_nivcsw,
          .migrations = count_migrations(),
          .resident_bytes = static_cast<int64_t>(cpu::resident_bytes()),
          .cores = cpu::available_cpus()};
}

/// Names an operation on all of its ranks: collectives by their number, messages by both ends, as ranks of
/// the group, their lane and their number in it.
using Key = std::array<int64_t, 4>;

std::optional<Key> key_of(const comm::LogEntry& entry, int rank) {
  const auto peer = static_cast<int64_t>(entry.peer);
  switch (entry.op) {
    case comm::Op::send:
      return Key{rank, peer, entry.lane, entry.message};
    case comm::Op::recv:
      return Key{peer, rank, entry.lane, entry.message};
    case comm::Op::exchange:
    case comm::Op::split:
      return std::nullopt;
    default:
      return Key{-1, -1, -1, static_cast<int64_t>(entry.seq)};
  }
}

/// When the ranks of a group arrived in its operations: fills last_arrival and waited of the messages with
/// the log's group `log_group`. Collective over `group`, which is for host memory.
void exchange_arrivals(comm::Communicator& group, uint32_t log_group, profile::Recorded& record) {
  constexpr size_t width = 5;  // key and time
  std::vector<std::pair<size_t, Key>> own;
  for (size_t i = 0; i < record.messages.size(); ++i)
    if (const auto key = key_of(record.messages[i], group.rank());
        key && record.messages[i].group == log_group)
      own.emplace_back(i, *key);
  auto most = static_cast<int64_t>(own.size());
  group.all_reduce(std::span(&most, 1), comm::Reduce::max);
  if (most == 0) return;
  std::vector<int64_t> sent(width * static_cast<size_t>(most), 0);  // a time of 0: no operation
  for (size_t i = 0; i < own.size(); ++i) {
    std::copy(own[i].second.begin(), own[i].second.end(), sent.begin() + static_cast<int64_t>(width * i));
    sent[width * i + width - 1] = record.messages[own[i].first].enqueued_ns;
  }
  std::vector<int64_t> all(sent.size() * static_cast<size_t>(group.size()));
  group.all_gather(std::span<const int64_t>(sent), std::span(all));
  struct Arrivals {
    int ranks = 0;
    int64_t last = 0, sum = 0;
  };
  std::map<Key, Arrivals> by_key;
  for (size_t i = 0; i < all.size(); i += width) {
    const int64_t time = all[i + width - 1];
    if (time == 0) continue;
    Arrivals& a = by_key[{all[i], all[i + 1], all[i + 2], all[i + 3]}];
    ++a.ranks;
    a.last = std::max(a.last, time);
    a.sum += time;
  }
  for (const auto& [i, key] : own) {
    const Arrivals& a = by_key.at(key);
    const bool message = key[0] >= 0;
    if (a.ranks != (message ? 2 : group.size())) continue;  // at the edge of the window
    record.last_arrival[i] = a.last;
    record.waited[i] = a.ranks * a.last - a.sum;
  }
}

/// Puts all times on the clock of rank 0. All windows begin with the earliest one, for times that are written
/// relative to it. Collective over the run.
void align(const Recording& run, profile::Recorded& record) {
  comm::Communicator& all = run.world.comm().host();
  const comm::ClockOffset own = comm::clock_offset(all);
  const auto shift = [&](int64_t& time) { time += time == 0 ? 0 : own.ns; };
  for (trace::Event& e : record.window.events) shift(e.begin), shift(e.end);
  shift(record.window.begin), shift(record.window.end);
  for (int64_t& begin : record.step_begins) shift(begin);
  for (comm::LogEntry& m : record.messages) shift(m.enqueued_ns), shift(m.started_ns), shift(m.ended_ns);
  const auto window = static_cast<double>(record.window.end - record.window.begin);
  all.all_reduce(std::span(&record.window.begin, 1), comm::Reduce::min);
  int64_t largest = own.error_ns;
  all.all_reduce(std::span(&largest, 1), comm::Reduce::max);
  if (largest == 0) return;  // one clock
  // The clocks also drift, in the time since the window began.
  constexpr double drift = 50e-6;
  record.clock_error = (static_cast<double>(own.error_ns + largest) + drift * window) * 1e-9;
}

void exchange_all_arrivals(const Recording& run, profile::Recorded& record) {
  record.last_arrival.assign(record.messages.size(), 0);
  record.waited.assign(record.messages.size(), 0);
  const auto exchange = [&](comm::Communicator& group, comm::Communicator& host) {
    if (group.size() == 1) return;
    exchange_arrivals(host, group.log_group(), record);
    if (host.log_group() != group.log_group()) exchange_arrivals(host, host.log_group(), record);
  };
  const parallel::Groups& groups = run.placement.groups();
  for (const parallel::GroupId& id : groups.ids())  // in one order on all ranks
    if (groups.member(id) && groups.collective(id)) exchange(groups[id], groups.host(id));
  exchange(run.world.comm(), run.world.comm().host());
}

std::vector<profile::GroupOfRanks> groups_of(const comm::World& world, const comm::CollectiveLog& log) {
  std::vector<profile::GroupOfRanks> out;
  for (const comm::LogGroup& group : log.groups()) {
    std::set<int> nodes;
    for (const int rank : group.members) nodes.insert(world.nodes()[rank]);
    out.push_back({.name = group.name,
                   .label = group.label,
                   .ranks = group.ranks,
                   .nodes = std::max(static_cast<int>(nodes.size()), 1),
                   .members = group.members});
  }
  return out;
}

/// The begins of the steps on the device: of their first ranges. The window ends with the last range.
std::vector<int64_t> begins_on_device(const profile::Recorded& record, size_t steps) {
  std::vector<int64_t> begins;
  int64_t end = 0;
  for (const trace::Event& e : record.window.events) {
    if (e.row != record.compute_row || e.tag.step < record.first_step) continue;
    if (e.tag.step == record.first_step + static_cast<int64_t>(begins.size()) && begins.size() < steps)
      begins.push_back(e.begin);
    end = std::max(end, e.end);
  }
  begins.push_back(end);
  return begins;
}

}  // namespace

profile::Peaks measure_peaks(const ops::Exec& exec) {
  profile::Peaks peaks;
  if (exec.device) {
    const device::Properties& properties = exec.device->properties();
    peaks.bf16_flops = machine::peak_flops(properties);
    peaks.fp8_flops = 2 * peaks.bf16_flops;
    if (const machine::DeviceModel* model = machine::model_of_device(properties)) {
      peaks.f32_flops = exec.libraries && exec.libraries->tf32 ? model->tf32_flops : model->f32_flops;
      peaks.copy = model->copy;
      peaks.link = model->node.bandwidth;
      peaks.network = model->network.bandwidth;
    }
    return peaks;
  }
  const machine::DeviceModel cpu = machine::measure_cpu_model(1, exec.threads);
  return {.f32_flops = cpu.f32_flops,
          .bf16_flops = cpu.f32_flops * native_factor(exec, DType::bf16),
          .copy = cpu.copy,
          .link = cpu.node.bandwidth,
          .network = cpu.network.bandwidth};
}

LocalCapture::LocalCapture(ops::Exec& exec, int64_t first, int64_t steps, size_t calls)
    : exec_(exec), first_(first) {
  const size_t space = space_of(steps, calls);
  costs_.reserve(std::min(space, static_cast<size_t>(steps) * (calls + calls / 4)));
  ops::collect_costs(&costs_);
  at_begin_ = read_counters();
  trace::start(trace::Mode::timeline, space);
  if (exec.device) trace::attach_device(*exec.device, exec.stream);
}

LocalCapture::~LocalCapture() {
  ops::collect_costs(nullptr);
}

void LocalCapture::begin_step() {
  begins_.push_back(comm::now_ns());
}

profile::Recorded LocalCapture::finish(bool ended) {
  profile::Recorded record;
  if (!ended) begins_.push_back(comm::now_ns());
  if (exec_.device) {
    exec_.device->synchronize();
    trace::collect_device();
  }
  record.window = trace::take();
  const profile::HostCounters now = read_counters();
  ops::collect_costs(nullptr);
  if (exec_.device) {
    trace::detach_device();
    trace::start(trace::Mode::off);
  }
  record.device = exec_.device ? exec_.device->properties().name : "cpu";
  record.first_step = first_;
  record.last_step = first_ + std::ssize(begins_) - 2;
  record.costs = std::exchange(costs_, {});
  record.on_device = exec_.device != nullptr;
  record.step_begins = begins_;
  if (record.on_device) {
    const std::vector<std::string>& rows = record.window.rows;
    const auto row = std::find(rows.begin(), rows.end(), trace::compute_row_name);
    record.compute_row = static_cast<uint16_t>(row - rows.begin());
    record.step_begins = begins_on_device(record, begins_.size() - 1);
  }
  record.counters = now;
  record.counters.cpu_seconds -= at_begin_.cpu_seconds;
  record.counters.starved -= at_begin_.starved;
  record.counters.involuntary_switches -= at_begin_.involuntary_switches;
  // Threads that have ended in the window took their count with them.
  record.counters.migrations = std::max<int64_t>(record.counters.migrations - at_begin_.migrations, 0);
  return record;
}

Capture::Capture(const Recording& of, int64_t first, int64_t steps, size_t calls)
    : of_(of), local_(of.engine.exec(), first, steps, calls) {
  of.world.collective_log().record();
}

profile::Recorded Capture::finish() {
  const comm::World& world = of_.world;
  comm::CollectiveLog& log = of_.world.collective_log();
  profile::Recorded record = local_.finish();
  record.messages = log.take();
  record.rank = world.rank();
  record.host = world.hosts()[static_cast<size_t>(world.rank())];
  record.groups = groups_of(world, log);
  const plan::RunPlan& plan = of_.plan();
  record.buffers = plan.memory.buffers();
  record.arena_bytes = plan.memory.total_bytes();
  if (plan.layout.stages > 1)
    record.bubble_fraction =
        plan::bubble(plan::schedule_options(of_.config.config, plan.layout, plan.batch.accumulation));
  align(of_, record);
  exchange_all_arrivals(of_, record);
  of_.world.comm().barrier();  // all ranks measure at once, as they work
  record.peaks = measure_peaks(of_.engine.exec());
  return record;
}

}  // namespace nrl::train
