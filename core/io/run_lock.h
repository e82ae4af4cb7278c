#pragma once
// A lock on an output directory: one run at a time writes to it.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl {

/// Times of a lock; others than these only in tests.
struct LockTiming {
  double stale_after_s = 60;                    ///< age at which another host may take a lock over
  std::chrono::milliseconds heartbeat{10'000};  ///< interval between two heartbeats
};

/// The identity of a run and the number of its start. The text of `run_id` is a part of file names.
struct RunIdentity {
  std::string run_id;
  int attempt = 0;  ///< from 1; 0: not known

  bool known() const { return attempt > 0; }
};

/// 1 to 64 lower-case letters and digits.
bool is_run_id(std::string_view id);
/// NRL_RUN_ID and NRL_ATTEMPT, which a supervisor gives the processes of an attempt: it states that it has
/// ended all earlier ones. Not known without them. Error(Exit::usage) for anything else.
RunIdentity supervised_identity();

/// Holds DIR/run.lock: an open-file-description lock, which the kernel releases when the process dies,
/// containing the owner's {host, pid, boot id, start time}. Taken by one rank. Released, and the file
/// removed, on destruction.
///
/// A second run fails with Exit::cannot_create, naming the owner's pid, host and start. A dead owner's lock
/// is taken over: on the same host, or in another container of the same kernel (boot id), at once when the
/// kernel lock is free; from another host when its heartbeat is older than `stale_after_s`, whatever the
/// clocks say, for file systems that do not share locks between hosts, or at once if it is of an earlier
/// attempt of the same run, which the supervisor of this one has ended.
///
/// A thread, to which no signal is delivered, writes the heartbeat and looks whether another run has taken
/// the lock over, for example while this process was suspended. A heartbeat that cannot be written, and a
/// file that was removed, are a warning, once each. If the system refuses the thread, lost() does its work.
class RunLock {
 public:
  /// `identity`: of supervised_identity(). `name`: of the file.
  explicit RunLock(const std::string& directory, const LockTiming& timing = {}, RunIdentity identity = {},
                   std::string_view name = "run.lock");
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  const std::string& path() const { return path_; }
  /// Non-empty when a dead run's lock was taken over: a warning for the log.
  const std::string& takeover() const { return takeover_; }
  /// Non-empty once the thread has found that another run took the lock: a message that names it. This run
  /// must not write to the directory any more. Thread-safe.
  std::string lost();
  /// Looks at once. Fails with Exit::cannot_create and that message. With a known identity it also fails if
  /// the file is gone or cannot be read: a later attempt may have been here.
  void require_held() const;

 private:
  bool try_take();
  void start_heartbeat();
  void beat();
  std::string find_other_owner() const;

  std::string path_, takeover_;
  std::string owner_text_;  // content of the file
  RunIdentity identity_;
  LockTiming timing_;
  File file_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string lost_;
  bool leave_ = false;
  std::chrono::steady_clock::time_point last_beat_;  // without a thread
  bool beat_failed_ = false, removed_ = false;       // reported; of the thread
  std::thread thread_;
};

/// The owner that a lock file names.
struct LockOwner {
  RunIdentity identity;
  std::string host;
  bool ended = false;  ///< its process was on this host and is gone
};
/// DIR/run.lock. Unset if there is none; an owner that cannot be read has no host.
std::optional<LockOwner> read_lock_owner(const std::string& directory);

/// Removes what crashed runs left in a directory: the entries that `is_leftover` names. The lock proves that
/// no other run writes there. Returns the removed names.
std::vector<std::string> remove_leftovers(const std::string& directory, const RunLock& lock,
                                          const std::function<bool(std::string_view name)>& is_leftover);

/// The locks of all directories that a run writes to. A directory reached by several names is locked once.
class RunLocks {
 public:
  /// Creates missing directories, and fails like RunLock; then no lock is held and no directory was created.
  explicit RunLocks(std::vector<std::string> directories, const RunIdentity& identity = {});
  RunLocks(const RunLocks&) = delete;
  RunLocks& operator=(const RunLocks&) = delete;
  /// Also removes created directories that are still empty.
  ~RunLocks();

  /// The lock of one of the directories.
  const RunLock& of(const std::string& directory) const;
  /// The non-empty RunLock::takeover() texts.
  std::vector<std::string> takeovers() const;
  /// The first non-empty RunLock::lost() text.
  std::string lost() const;
  /// RunLock::require_held() of all.
  void require_held() const;

 private:
  void add(const std::string& directory, const RunIdentity& identity);
  void release();

  std::vector<std::string> made_;  // parents before children
  std::vector<std::pair<std::string, std::unique_ptr<RunLock>>> locks_;
};

}  // namespace nrl
