#include "core/io/run_lock.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/process.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/io/json.h"

namespace nrl {
namespace {

struct Owner {
  std::string host, boot_id, since;
  int64_t pid = 0;
  int64_t start_ticks = 0;  // of the process, since boot: detects a reused pid
  RunIdentity identity = {};

  JsonValue to_json() const {
    JsonValue json = JsonValue::object(
        {{"host", host}, {"pid", pid}, {"boot_id", boot_id}, {"start_ticks", start_ticks}, {"since", since}});
    if (identity.known()) {
      json.set("run_id", identity.run_id);
      json.set("attempt", identity.attempt);
    }
    return json;
  }
  bool on_this_kernel() const { return !boot_id.empty() && boot_id == nrl::boot_id(); }
  bool on_this_boot() const { return host == host_name() && on_this_kernel(); }
  bool lives_here() const { return start_ticks != 0 && start_ticks_of(pid) == start_ticks; }
};

Owner ourselves() {
  char since[32] = {};
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::strftime(since, sizeof since, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return {host_name(), boot_id(), since, ::getpid(), start_ticks_of(::getpid())};
}

// The owner of an unreadable or partially written lock has an empty name.
Owner parse_owner(const std::string& text, const std::string& path) {
  Owner owner;
  try {
    const JsonValue v = parse_json(text, path);
    owner.host = v.get_string("host");
    owner.pid = v.get_int("pid");
    owner.boot_id = v.get_string("boot_id");
    owner.start_ticks = v.get_int("start_ticks");
    owner.since = v.get_string("since");
    owner.identity.run_id = v.get_string("run_id", "");
    owner.identity.attempt =
        static_cast<int>(std::clamp<int64_t>(v.get_int("attempt", 0), 0, std::numeric_limits<int>::max()));
  } catch (const Error&) {
    owner = Owner();
  }
  return owner;
}

std::string read_text(const File& file) {
  std::string text(std::min<uint64_t>(file.size(), 4096), '\0');
  file.pread_all(text.data(), text.size(), 0);
  return text;
}

Owner read_owner(const File& file) {
  try {
    return parse_owner(read_text(file), file.path());
  } catch (const Error&) {
    return {};
  }
}

std::string describe(const Owner& o) {
  if (o.host.empty()) return "an unknown run";
  return fmt::format("pid {} on {} since {}", o.pid, o.host, o.since);
}

// True if `other` is of an attempt that the supervisor of `self` has ended.
bool is_earlier(const Owner& other, const RunIdentity& self) {
  return self.known() && other.identity.known() && other.identity.run_id == self.run_id &&
         other.identity.attempt < self.attempt;
}

[[noreturn]] void refuse(const std::string& path, const Owner& o, const std::string& hint) {
  fail(Exit::cannot_create, "{}: locked by {}. {}", path, describe(o), hint);
}

}  // namespace

bool is_run_id(std::string_view id) {
  return !id.empty() && id.size() <= 64 && std::all_of(id.begin(), id.end(), [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z');
  });
}

RunIdentity supervised_identity() {
  const char *id = std::getenv("NRL_RUN_ID"), *number = std::getenv("NRL_ATTEMPT");
  if (!id && !number) return {};
  RunIdentity identity{.run_id = id ? id : ""};
  const std::string_view digits = number ? number : "";
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), identity.attempt);
  if (!is_run_id(identity.run_id) || error != std::errc() || end != digits.data() + digits.size() ||
      identity.attempt < 1)
    fail(Exit::usage,
         "NRL_RUN_ID and NRL_ATTEMPT are '{}' and '{}'; expected lower-case letters and digits, and a number "
         "from 1. Fix: unset both; nrl-train launch sets them",
         clipped(identity.run_id), clipped(digits));
  return identity;
}

RunLock::RunLock(const std::string& directory, const LockTiming& timing, RunIdentity identity,
                 std::string_view name)
    : path_(join_path(directory, name)), identity_(std::move(identity)), timing_(timing) {
  // An attempt fails only if the owner removed the file between our open() and our lock.
  for (int i = 0; i < 100; ++i) {
    if (!try_take()) continue;
    start_heartbeat();
    return;
  }
  fail(Exit::cannot_create, "{}: keeps being removed while it is being locked", path_);
}

bool RunLock::try_take() {
  const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) fail(Exit::cannot_create, "{}: cannot create: {}", path_, std::strerror(errno));
  file_ = File(fd, path_);
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  bool kernel_lock = true;
  if (::fcntl(fd, F_OFD_SETLK, &whole) != 0) {
    if (errno == EAGAIN || errno == EACCES) {
      const Owner owner = read_owner(file_);
      if (owner.host == host_name() || !is_earlier(owner, identity_))
        refuse(path_, owner, "Fix: choose another output directory, or stop that run");
      // A file server keeps the lock of a lost host for a while; its file loses the name.
      ::unlink(path_.c_str());
      return false;
    }
    if (errno != ENOLCK && errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
      fail(Exit::io, "{}: cannot lock: {}", path_, std::strerror(errno));
    }
    kernel_lock = false;  // no locks on this file system: rely on the recorded owner
  }
  struct stat opened, named;
  if (::fstat(fd, &opened) != 0) fail(Exit::io, "{}: cannot stat: {}", path_, std::strerror(errno));
  if (::stat(path_.c_str(), &named) != 0 || named.st_ino != opened.st_ino || named.st_dev != opened.st_dev)
    return false;

  Owner self = ourselves();
  self.identity = identity_;
  if (opened.st_size > 0) {
    const Owner owner = read_owner(file_);
    const double age = std::difftime(std::time(nullptr), opened.st_mtime);
    if (owner.on_this_boot() && !kernel_lock && owner.lives_here()) {
      refuse(path_, owner, "Fix: choose another output directory, or stop that run");
    }
    // A container has its own host name and process numbers, but shares the kernel, which holds the lock of
    // every process that lives.
    const bool ended = kernel_lock && owner.on_this_kernel();
    if (owner.host != self.host && !owner.host.empty() && !ended && !is_earlier(owner, identity_)) {
      if (age < timing_.stale_after_s)
        refuse(path_, owner,
               fmt::format("Its last heartbeat is {} old. Fix: if that run is dead, start again after {} or "
                           "remove the file",
                           human_duration(age), human_duration(timing_.stale_after_s)));
      // The clocks of two hosts may differ, and this one may have jumped.
      const auto watched = timing_.heartbeat + timing_.heartbeat / 10;
      log::warn("{}: looking for {:.0f} s whether {} still beats", path_,
                std::chrono::duration<double>(watched).count(), describe(owner));
      std::this_thread::sleep_for(watched);
      struct stat later;
      if (::fstat(fd, &later) == 0 &&
          (later.st_mtim.tv_sec != opened.st_mtim.tv_sec || later.st_mtim.tv_nsec != opened.st_mtim.tv_nsec))
        refuse(path_, owner,
               "Its heartbeat goes on; the clocks of the hosts differ. Fix: choose another output directory, "
               "or stop that run");
    }
    takeover_ = fmt::format("{}: taken over from {}, which did not exit cleanly", path_, describe(owner));
  }
  owner_text_ = self.to_json().dump(1) + "\n";
  if (::ftruncate(fd, 0) != 0) fail(Exit::io, "{}: cannot truncate: {}", path_, std::strerror(errno));
  file_.pwrite_all(owner_text_.data(), owner_text_.size(), 0);
  file_.sync();
  if (!kernel_lock) {
    // If several runs start simultaneously, the last one to write owns the lock.
    ::usleep(200'000);
    const Owner now = read_owner(file_);
    if (now.host != self.host || now.pid != self.pid) refuse(path_, now, "It started at the same time");
  }
  return true;
}

RunLock::~RunLock() {
  {
    const std::lock_guard lock(mutex_);
    leave_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  // Removed while the lock is held: the file cannot belong to another run, unless one has taken it over.
  try {
    if (read_text(File::open_read(path_, File::Links::refuse)) == owner_text_) ::unlink(path_.c_str());
  } catch (const Error&) {
  }
}

void RunLock::start_heartbeat() {
  try {
    thread_ = start_thread_without_signals([this] {
      std::unique_lock lock(mutex_);
      while (!changed_.wait_for(lock, timing_.heartbeat, [this] { return leave_; })) {
        lock.unlock();
        beat();
        lock.lock();
        if (!lost_.empty()) return;
      }
    });
  } catch (const Error& e) {
    log::warn("{}: its heartbeat waits for the steps of the run: {}", path_, e.what());
    last_beat_ = std::chrono::steady_clock::now();
  }
}

void RunLock::beat() {
  if (std::string other = find_other_owner(); !other.empty()) {
    const std::lock_guard lock(mutex_);
    lost_ = std::move(other);
    return;
  }
  if (!path_exists(path_) && !std::exchange(removed_, true))
    log::warn("{}: was removed while this run is writing to the directory: another run can start there",
              path_);
  try {
    file_.touch();
  } catch (const Error& e) {
    if (std::exchange(beat_failed_, true)) return;
    log::warn(
        "the heartbeat of the lock failed: {}. A run on another host may take the directory over after {}",
        e.what(), human_duration(timing_.stale_after_s));
  }
}

// The message of lost() if the file names another run. A file that cannot be read, or is being written,
// proves nothing.
std::string RunLock::find_other_owner() const {
  std::string text;
  try {
    text = read_text(File::open_read(path_, File::Links::refuse));
  } catch (const Error&) {
    return {};
  }
  if (text == owner_text_) return {};
  const Owner other = parse_owner(text, path_);
  if (other.host.empty()) return {};
  return fmt::format(
      "{}: this run has lost the lock to {}; two runs must not write to one directory, so this one stops "
      "without "
      "saving. Fix: stop one of the runs; this one can start again in another directory",
      path_, describe(other));
}

std::string RunLock::lost() {
  if (const auto now = std::chrono::steady_clock::now();
      !thread_.joinable() && now - last_beat_ >= timing_.heartbeat) {
    last_beat_ = now;
    beat();
  }
  const std::lock_guard lock(mutex_);
  return lost_;
}

void RunLock::require_held() const {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = lost_;  // also when the other run is over
  }
  if (text.empty()) text = find_other_owner();
  if (text.empty() && identity_.known()) {
    try {
      if (read_text(File::open_read(path_, File::Links::refuse)) != owner_text_)
        text = fmt::format("{}: is damaged", path_);
    } catch (const Error& e) {
      text = e.what();
    }
    if (!text.empty())
      text += fmt::format(
          "; attempt {} of run {} saves nothing without its lock: a later attempt may have begun. Fix: start "
          "nrl-train launch again",
          identity_.attempt, identity_.run_id);
  }
  if (!text.empty()) fail(Exit::cannot_create, "{}", text);
}

std::optional<LockOwner> read_lock_owner(const std::string& directory) {
  const std::string path = join_path(directory, "run.lock");
  if (!path_exists(path)) return {};
  Owner owner;
  try {
    owner = read_owner(File::open_read(path, File::Links::refuse));
  } catch (const Error&) {
  }
  return LockOwner{.identity = owner.identity,
                   .host = owner.host,
                   .ended = owner.host == host_name() && !(owner.on_this_boot() && owner.lives_here())};
}

std::vector<std::string> remove_leftovers(const std::string& directory, const RunLock& lock,
                                          const std::function<bool(std::string_view name)>& is_leftover) {
  NRL_CHECK(path_exists(lock.path()), "the lock {} was removed", lock.path());
  std::vector<std::string> removed;
  if (!path_exists(directory)) return removed;
  for (const std::string& name : list_directory(directory)) {
    if (!is_leftover(name)) continue;
    remove_tree(join_path(directory, name));
    removed.push_back(name);
  }
  return removed;
}

RunLocks::RunLocks(std::vector<std::string> directories, const RunIdentity& identity) {
  // Existing directories first: only they can be locked by another run, and nothing is created before
  // that is known.
  std::stable_partition(directories.begin(), directories.end(), is_directory);
  try {
    for (const std::string& directory : directories) add(directory, identity);
  } catch (...) {
    release();
    throw;
  }
}

RunLocks::~RunLocks() {
  release();
}

void RunLocks::add(const std::string& directory, const RunIdentity& identity) {
  std::vector<std::string> missing;
  for (std::string path = directory; !path_exists(path); path = parent_path(path)) missing.push_back(path);
  made_.insert(made_.end(), missing.rbegin(), missing.rend());
  make_directories(directory);
  for (const auto& [locked, lock] : locks_)
    if (same_directory(locked, directory)) return;
  locks_.emplace_back(directory, std::make_unique<RunLock>(directory, LockTiming(), identity));
}

void RunLocks::release() {
  locks_.clear();
  for (auto path = made_.rbegin(); path != made_.rend(); ++path) ::rmdir(path->c_str());
  made_.clear();
}

const RunLock& RunLocks::of(const std::string& directory) const {
  for (const auto& [locked, lock] : locks_)
    if (same_directory(locked, directory)) return *lock;
  fail(Exit::internal, "{} is not locked", directory);
}

std::vector<std::string> RunLocks::takeovers() const {
  std::vector<std::string> texts;
  for (const auto& [directory, lock] : locks_)
    if (!lock->takeover().empty()) texts.push_back(lock->takeover());
  return texts;
}

std::string RunLocks::lost() const {
  for (const auto& [directory, lock] : locks_)
    if (std::string text = lock->lost(); !text.empty()) return text;
  return {};
}

void RunLocks::require_held() const {
  for (const auto& [directory, lock] : locks_) lock->require_held();
}

}  // namespace nrl
