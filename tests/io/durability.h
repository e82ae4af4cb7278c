#pragma once
// A model of the data that a file system may lose in a crash. A Recorder watches a directory tree through the
// hook of core/io/atomic_file.h while code writes to it; for_each_crash() then builds on disk what a crash at
// each recorded point may leave:
//
// - Bytes of a file that were not fsynced may be lost: the file is empty, cut, or garbage of full length.
// - An entry of a directory (from a create, rename or remove) is certain once that directory was fsynced; a
//   rename between directories needs both.
// - Other operations may have reached the disk, each as a whole and in any order, except that operations on
//   one name keep their order and that a new directory precedes its entries.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/io/atomic_file.h"

namespace nrl::test {

/// Records from construction to stop(); one at a time. What is there at the start counts as durable.
class Recorder {
 public:
  explicit Recorder(std::string root);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  /// Marks a promise as kept: later crash states carry its number.
  void promise();
  void stop();

  /// Calls `check(directory, promised, what)` with every different state that a crash may leave, as a tree in
  /// `directory`; `what` describes it for messages.
  using Check = std::function<void(const std::string& directory, bool promised, const std::string& what)>;
  void for_each_crash(const Check& check) const;

 private:
  friend class CrashStates;
  using Inode = uint64_t;
  struct Node {
    bool directory = false;
    std::string content;
    std::map<std::string, Inode> entries;
  };
  using Tree = std::map<Inode, Node>;
  /// The tree before an operation.
  struct Moment {
    Tree tree;
    FileOp op;
    Inode target;   ///< of an fsync
    bool promised;  ///< promise() came before
  };

  static int hook(FileOp op, const std::string& path);
  void look(FileOp op, const std::string& path);
  Inode walk(const std::string& path, Tree& tree);

  std::string root_;
  Inode root_inode_ = 0;
  bool promised_ = false;
  std::vector<Moment> moments_;
  std::map<Inode, File> held_;  // open, so that no inode is used again
  std::mutex mutex_;
};

}  // namespace nrl::test
