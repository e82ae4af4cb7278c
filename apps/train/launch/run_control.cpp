#include "apps/train/launch/run_control.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include <unistd.h>

#include "apps/train/launch/run_records.h"
#include "core/base/clock.h"
#include "core/base/fatal_signals.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/status.h"

namespace nrl::train {
namespace {

constexpr double start_seconds = 1800;
constexpr std::chrono::milliseconds flush_limit{400};

std::atomic<RunControl*> the_control{nullptr};

std::string_view phase_name(uint8_t phase) {
  return status::name_of(static_cast<status::Phase>(phase));
}

std::string text_of(control::Notice notice, int rank) {
  switch (notice) {
    case control::Notice::link_lost:
      return fmt::format("rank {} cannot be reached; training goes on as long as steps complete", rank);
    case control::Notice::link_restored:
      return fmt::format("rank {} can be reached again", rank);
    default:
      return fmt::format("rank {} is under a debugger: no time limits until it goes on", rank);
  }
}

// Ranks of the control plane are the launcher's.
control::Bootstrap bootstrap_of(comm::World& world) {
  const std::vector<int>& launched = world.launched();
  std::vector<int> rank_of(launched.size());  // by the launcher's
  for (size_t r = 0; r < launched.size(); ++r)
    rank_of[static_cast<size_t>(launched[r])] = static_cast<int>(r);
  control::Bootstrap b;
  b.rank = launched[static_cast<size_t>(world.rank())];
  b.size = world.size();
  b.node = world.nodes()[static_cast<size_t>(world.rank())];
  b.broadcast = [&world, root = rank_of[0]](std::span<std::byte> data) {
    world.comm().broadcast({data.data(), static_cast<int64_t>(data.size()), DType::u8}, root);
  };
  b.allgather = [&world, rank_of](std::span<const std::byte> own, std::span<std::byte> all) {
    std::vector<std::byte> ordered(all.size());
    world.comm().all_gather({own.data(), static_cast<int64_t>(own.size()), DType::u8},
                            {ordered.data(), static_cast<int64_t>(ordered.size()), DType::u8});
    for (size_t r = 0; r < rank_of.size(); ++r)
      std::copy_n(ordered.data() + static_cast<size_t>(rank_of[r]) * own.size(), own.size(),
                  all.data() + r * own.size());
  };
  return b;
}

}  // namespace

WatchdogLimits watchdog_limits(const ReliabilityConfig& config) {
  return {.seconds = config.step_timeout_seconds.value_or(0)};
}

control::Options control_options(const ReliabilityConfig& config) {
  control::Options options;
  options.require = config.control == ControlMode::require;
  options.interface = config.interface.value_or("");
  options.heartbeat_timeout_s = config.heartbeat_timeout_seconds;
  options.network_timeout_s = config.network_timeout_seconds;
  options.paces = config.stragglers;
  return options;
}

RunControl* RunControl::current() {
  return the_control.load();
}

RunControl::RunControl() {
  if (comm::launched_with_peers()) control_ = std::make_unique<control::Control>(start_seconds, true);
  the_control = this;
}

RunControl::~RunControl() {
  fatal_signals::set_hook(nullptr);
  the_control = nullptr;
  control_.reset();
}

void RunControl::connect(comm::World& world, const ReliabilityConfig& config) {
  if (connected_ || !control_) return;
  if (config.control == ControlMode::off || world.size() == 1) {
    control_.reset();
    return;
  }
  world_ = &world;
  stacks_ = config.stacks;
  watchdog_ = Watchdog(watchdog_limits(config));
  control::Hooks hooks;
  hooks.sample = [this] { return sample(); };
  hooks.phase_name = phase_name;
  hooks.leave = [this](const control::Failure& failure) { leave(failure); };
  hooks.notice = [](control::Notice notice, int rank) { log::warn_text(text_of(notice, rank)); };
  hooks.last_words = last_words;
  const std::string warning = control_->connect(control_options(config), bootstrap_of(world), hooks);
  connected_ = true;
  fatal_signals::install();
  fatal_signals::set_hook([] {
    if (RunControl* control = the_control.load()) control->control_->dying();
  });
  if (!warning.empty() && world.rank() == 0) log::warn_text(warning);
}

std::vector<control::Control::PaceReading> RunControl::paces() const {
  std::vector<control::Control::PaceReading> out;
  if (!connected_) return out;
  const auto launched = control_->paces();
  if (launched.empty()) return out;
  for (const int rank : world_->launched()) out.push_back(launched[static_cast<size_t>(rank)]);
  return out;
}

void RunControl::last_words(control::Text<398>& text) {
  const status::Page& page = status::page();
  text.append("by ");
  text.append(
      fatal_signals::describe(page.signal.load(), page.signal_sent.load() != 0, page.signal_at.load()));
  const int layer = page.layer.load(std::memory_order_relaxed);
  if (layer < 0 || page.phase.load(std::memory_order_relaxed) != status::Phase::computing) return;
  std::array<char, 48> place;
  const auto end = fmt::format_to_n(place.data(), place.size(), ", in {} of layer {}",
                                    page.backward.load() ? "backward" : "forward", layer);
  text.append({place.data(), std::min(end.size, place.size())});
}

void RunControl::fail(const Error& error) {
  const bool secondary = error.code() == Exit::peer_lost;
  control_->fail(secondary ? control::Evidence::secondary : control::Evidence::error,
                 static_cast<int>(error.code()), error.what());
}

void RunControl::hangs(const Error& error) {
  control_->fail(control::Evidence::hang, static_cast<int>(error.code()), error.what(),
                 control::Kind::rank_hung);
}

void RunControl::gpu_failed(std::string_view text) {
  control_->fail(control::Evidence::error, static_cast<int>(Exit::peer_lost), text, control::Kind::gpu);
}

void RunControl::finish() {
  if (connected_) control_->finish();
}

control::StatusSample RunControl::sample() {
  const status::Page& page = status::page();
  const double now = steady_seconds();
  const Watchdog::Finding found = watchdog_.look(page, now);
  const auto since = [&](int64_t ns) {
    return ns == 0 ? 0 : std::max<control::Nanos>(0, static_cast<control::Nanos>(now * 1e9) - ns);
  };
  control::StatusSample s;
  s.step = page.completed.load(std::memory_order_relaxed) + 1;
  s.progress = page.progress.load(std::memory_order_relaxed);
  s.phase = static_cast<uint8_t>(page.phase.load(std::memory_order_relaxed));
  s.in_phase = static_cast<control::Nanos>(found.silent_s * 1e9);
  s.median_step = static_cast<control::Nanos>(found.median_step_s * 1e9);
  s.over_limit = found.over ? 1 : 0;
  const auto own = [&](status::Phase phase) {
    return page.own_ns[static_cast<size_t>(phase)].load(std::memory_order_relaxed);
  };
  s.own_data = own(status::Phase::data);
  s.own = s.own_data + own(status::Phase::computing);
  const int64_t waits = page.wait_since.load(std::memory_order_relaxed);
  comm::CollectiveLog::Pending pending;
  if (waits != 0 &&
      world_->collective_log().try_pending(page.wait_id.load(std::memory_order_relaxed), pending)) {
    s.wait.group = pending.group;
    s.wait.sequence = pending.sequence;
    s.wait.bytes = static_cast<uint64_t>(pending.bytes);
    s.wait.waiting = since(waits);
    s.wait.ranks = static_cast<uint32_t>(pending.ranks);
    s.wait.operation = pending.call;
    s.wait.text.assign(pending.text);
  }
  return s;
}

// On the control plane's helper thread.
void RunControl::leave(const control::Failure& failure) {
  const control::Verdict& v = failure.verdict;
  const auto code = static_cast<Exit>(v.exit_code);
  std::string text(v.text.view());
  if (const std::string_view remedy = control::remedy_of(v.kind); !remedy.empty())
    text += fmt::format(". {}", remedy);
  // A rank that failed by itself has printed its message, which may be longer than the verdict's.
  if (failure.decided_here && v.kind != control::Kind::error) log::error_text(text);
  if (RunRecords* records = RunRecords::current()) {
    monitor::Failure record = records->describe(code, text);
    record.kind = v.kind == control::Kind::error ? monitor::kind_of(code) : control::name_of(v.kind);
    const std::vector<int>& launched = world_->launched();
    const auto rank = std::find(launched.begin(), launched.end(), v.ranks[0]);
    record.rank = v.rank_count > 0 && rank != launched.end()
                      ? std::optional<int>(static_cast<int>(rank - launched.begin()))
                      : std::nullopt;
    if (record.rank) record.host = world_->hosts()[static_cast<size_t>(*record.rank)];
    record.pid = 0;
    record.phase = phase_name(v.phase);
    record.step = v.step;
    if (failure.decided_here)
      records->failed(std::move(record));
    else
      records->keep_flights();
  }
  output::flush_in_handler(flush_limit);
  if (stacks_) keep_stacks(v);
}

// Last: what stops here may hold locks. Of a large run, only a few ranks keep their stacks.
void RunControl::keep_stacks(const control::Verdict& v) {
  constexpr int all_below = 64;
  const RunRecords* records = RunRecords::current();
  if (!records) return;
  const std::vector<int>& launched = world_->launched();
  const int own = launched[static_cast<size_t>(world_->rank())];
  const auto culprits = v.culprits();
  const auto is_culprit = [&](int rank) {
    return std::find(culprits.begin(), culprits.end(), rank) != culprits.end();
  };
  if (v.kind == control::Kind::rank_stopped && control_->topology().leader()) {
    for (int r = 0; r < world_->size(); ++r) {
      const int rank = launched[static_cast<size_t>(r)], pid = rank == own ? 0 : control_->process_of(rank);
      if (is_culprit(rank) && pid != 0) records->keep_stacks(r, pid);
    }
  }
  const bool hangs = v.kind == control::Kind::rank_hung || v.kind == control::Kind::mismatch ||
                     v.kind == control::Kind::network;
  if (hangs && (world_->size() <= all_below || own < 2 || is_culprit(own)))
    records->keep_stacks(world_->rank(), ::getpid());
}

}  // namespace nrl::train
