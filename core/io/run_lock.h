#pragma once
// A lock on an output directory: one run at a time writes to it.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl {

/// Holds DIR/run.lock: an open-file-description lock, which the kernel releases when the process dies,
/// containing the owner's {host, pid, boot id, start time}. Taken by one rank. Released, and the file
/// removed, on destruction.
///
/// A second run fails with Exit::cannot_create, naming the owner's pid, host and start. A dead owner's lock
/// is taken over: on the same host when the kernel lock is free; from another host when its heartbeat is
/// older than `stale_after_s`, for file systems that do not share locks between hosts.
class RunLock {
 public:
  explicit RunLock(const std::string& directory, double stale_after_s = 60);
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  const std::string& path() const { return path_; }
  /// Non-empty when a dead run's lock was taken over: a warning for the log.
  const std::string& takeover() const { return takeover_; }
  /// Tells other hosts that the run is alive; call about every 10 seconds.
  void heartbeat() const;

 private:
  bool try_take(double stale_after_s);

  std::string path_, takeover_;
  File file_;
};

/// Removes what crashed runs left in a directory: the entries that `is_leftover` names. The lock proves that
/// no other run writes there. Returns the removed names.
std::vector<std::string> remove_leftovers(const std::string& directory, const RunLock& lock,
                                          const std::function<bool(std::string_view name)>& is_leftover);

/// The locks of all directories that a run writes to. A directory reached by several names is locked once.
class RunLocks {
 public:
  /// Creates missing directories, and fails like RunLock; then no lock is held and no directory was created.
  explicit RunLocks(std::vector<std::string> directories);
  RunLocks(const RunLocks&) = delete;
  RunLocks& operator=(const RunLocks&) = delete;
  /// Also removes created directories that are still empty.
  ~RunLocks();

  /// The lock of one of the directories.
  const RunLock& of(const std::string& directory) const;
  /// The non-empty RunLock::takeover() texts.
  std::vector<std::string> takeovers() const;
  void heartbeat() const;

 private:
  void add(const std::string& directory);
  void release();

  std::vector<std::string> made_;  // parents before children
  std::vector<std::pair<std::string, std::unique_ptr<RunLock>>> locks_;
};

}  // namespace nrl
