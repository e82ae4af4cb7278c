#pragma once
// One run at a time writes to an output directory.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl {

/// Holds DIR/run.lock: an open-file-description lock that the kernel drops when the process dies, and the
/// owner's {host, pid, boot id, start time} inside. Taken by one rank. Released, and the file removed, on
/// destruction.
///
/// A second run is refused with Error(Exit::cannot_create) that names the owner's pid, host and start. A lock
/// whose owner is dead is taken over: on this host when the kernel lock is free; from another host when its
/// heartbeat is older than `stale_after_s`, for file systems that do not carry locks between hosts.
class RunLock {
 public:
  explicit RunLock(const std::string& directory, double stale_after_s = 60);
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  const std::string& path() const { return path_; }
  /// Non-empty when a dead run's lock was taken over: a warning for the log.
  const std::string& takeover() const { return takeover_; }
  /// Shows other hosts that the run lives; call about every 10 seconds.
  void heartbeat() const;

 private:
  bool try_take(double stale_after_s);

  std::string path_, takeover_;
  File file_;
};

/// The locks of all directories that a run writes to. Directories reached by several names are locked once.
class RunLocks {
 public:
  /// Makes missing directories, and fails as RunLock does; then none is locked and none was made.
  explicit RunLocks(std::vector<std::string> directories);
  RunLocks(const RunLocks&) = delete;
  RunLocks& operator=(const RunLocks&) = delete;
  /// Also removes those directories it made that are still empty.
  ~RunLocks();

  /// The lock of one of the directories.
  const RunLock& of(const std::string& directory) const;
  /// RunLock::takeover() of each, where there is one.
  std::vector<std::string> takeovers() const;
  void heartbeat() const;

 private:
  void add(const std::string& directory);
  void release();

  std::vector<std::string> made_;  // parents before children
  std::vector<std::pair<std::string, std::unique_ptr<RunLock>>> locks_;
};

}  // namespace nrl
