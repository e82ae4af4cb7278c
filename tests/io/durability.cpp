#include "tests/io/durability.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "tests/io/io_test_util.h"

namespace nrl::test {
namespace {

Recorder* g_recorder = nullptr;

constexpr int random_states = 3;  // for each crash, beside the systematic ones

}  // namespace

Recorder::Recorder(std::string root) : root_(std::move(root)) {
  look(FileOp::create, "");
  g_recorder = this;
  set_file_op_hook(hook);
}

Recorder::~Recorder() {
  if (g_recorder == this) stop();
}

void Recorder::stop() {
  set_file_op_hook(nullptr);
  g_recorder = nullptr;
  look(FileOp::create, "");
}

void Recorder::promise() {
  const std::lock_guard lock(mutex_);
  promised_ = true;
}

int Recorder::hook(FileOp op, const std::string& path) {
  g_recorder->look(op, path);
  return 0;
}

void Recorder::look(FileOp op, const std::string& path) {
  const std::lock_guard lock(mutex_);
  Moment moment{{}, op, 0, promised_};
  root_inode_ = walk(root_, moment.tree);
  struct stat st;
  if (op == FileOp::fsync && ::stat(path.c_str(), &st) == 0) moment.target = st.st_ino;
  moments_.push_back(std::move(moment));
}

Recorder::Inode Recorder::walk(const std::string& path, Tree& tree) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat st;
  if (fd < 0 || ::fstat(fd, &st) != 0) fail(Exit::io, "{}: cannot be looked at", path);
  File file(fd, path);
  Node& node = tree[st.st_ino];
  node.directory = S_ISDIR(st.st_mode);
  if (node.directory) {
    for (const std::string& name : list_directory(path))
      node.entries[name] = walk(join_path(path, name), tree);
  } else {
    node.content.resize(static_cast<size_t>(st.st_size));
    file.pread_all(node.content.data(), node.content.size(), 0);
  }
  held_.try_emplace(st.st_ino, std::move(file));
  return st.st_ino;
}

/// The states of one recording.
class CrashStates {
 public:
  using Inode = Recorder::Inode;
  using State = std::map<std::string, std::optional<std::string>>;  // path -> content; nothing: a directory
  enum class Lost { nothing, all, half, garbage };

  explicit CrashStates(const Recorder& recorder) : r_(recorder) {
    for (size_t m = 1; m < r_.moments_.size(); ++m) operations_.push_back(changes(m));
  }

  // The states of a crash just before the operation of moment `m`.
  void visit(size_t m, const std::function<void(const State&, const std::string&)>& take) {
    crash_ = m;
    contents();
    const std::vector<bool> nothing(m, false), everything(m, true);
    const auto states = [&](const std::vector<bool>& reached, const std::string& what) {
      take(build(reached, Lost::all), what + ", unsynced data empty");
      take(build(reached, Lost::garbage), what + ", unsynced data garbage");
    };
    states(nothing, "no entry that was not fsynced");
    states(everything, "all entries");
    take(build(everything, Lost::half), "all entries, unsynced data cut");
    take(build(everything, Lost::nothing), "nothing lost");
    // One operation alone before all others, or after all others.
    for (size_t i = 0; i < m; ++i) {
      if (operations_[i].empty()) continue;
      std::vector<bool> alone = nothing, without = everything;
      add(i, alone);
      remove(i, without);
      take(build(alone, Lost::nothing),
           fmt::format("of the entries that were not fsynced only operation {}", i));
      take(build(without, Lost::nothing), fmt::format("all entries but operation {}", i));
    }
    for (int k = 0; k < random_states; ++k) {
      const PhiloxStream random(m, fmt::format("crash {}", k));
      std::vector<bool> some = nothing;
      for (size_t i = 0; i < m; ++i)
        if (random.bits(i) % 2 == 0) add(i, some);
      take(build(some, std::nullopt, &random), fmt::format("a mixture, number {}", k));
    }
  }

 private:
  struct Change {
    Inode directory;
    std::string name;
    std::optional<Inode> to;
    bool created = false;  ///< `to` is new
  };
  using Operation = std::vector<Change>;

  // What changed in directories between moment m - 1 and m.
  Operation changes(size_t m) const {
    Operation operation;
    const Recorder::Tree &before = r_.moments_[m - 1].tree, &after = r_.moments_[m].tree;
    const auto entries = [](const Recorder::Tree& tree, Inode directory) {
      const auto it = tree.find(directory);
      return it == tree.end() ? std::map<std::string, Inode>() : it->second.entries;
    };
    std::set<Inode> directories;
    for (const Recorder::Tree* tree : {&before, &after})
      for (const auto& [inode, node] : *tree)
        if (node.directory) directories.insert(inode);
    for (const Inode directory : directories) {
      const auto was = entries(before, directory), is = entries(after, directory);
      for (const auto& [name, inode] : was)
        if (!is.contains(name)) operation.push_back({directory, name, {}, false});
      for (const auto& [name, inode] : is)
        if (const auto it = was.find(name); it == was.end() || it->second != inode)
          operation.push_back({directory, name, inode, !before.contains(inode)});
    }
    return operation;
  }

  static bool depends(const Operation& later, const Operation& earlier) {
    for (const Change& l : later)
      for (const Change& e : earlier)
        if ((l.directory == e.directory && l.name == e.name) || (e.created && e.to == l.directory))
          return true;
    return false;
  }

  // Operation i and all that it needs.
  void add(size_t i, std::vector<bool>& reached) const {
    reached[i] = true;
    for (size_t j = i; j-- > 0;)
      if (!reached[j] && depends(operations_[i], operations_[j])) add(j, reached);
  }
  // Operation i and all that need it.
  void remove(size_t i, std::vector<bool>& reached) const {
    reached[i] = false;
    for (size_t j = i + 1; j < reached.size(); ++j)
      if (reached[j] && depends(operations_[j], operations_[i])) remove(j, reached);
  }

  // Contents at the crash: as written, and as fsynced.
  void contents() {
    written_.clear();
    synced_.clear();
    number_.clear();
    for (size_t m = 0; m <= crash_; ++m) {
      const Recorder::Moment& moment = r_.moments_[m];
      for (const auto& [inode, node] : moment.tree) {
        if (node.directory) continue;
        written_[inode] = node.content;
        number_.try_emplace(inode, number_.size());
      }
      if (m == 0) synced_ = written_;
      if (m == crash_ || moment.op != FileOp::fsync) continue;
      if (const auto it = moment.tree.find(moment.target); it != moment.tree.end())
        synced_[moment.target] = it->second.content;
    }
  }

  std::string content(Inode inode, Lost lost) const {
    const std::string& written = written_.at(inode);
    const auto it = synced_.find(inode);
    const std::string synced = it == synced_.end() ? "" : it->second;
    if (lost == Lost::nothing || written == synced) return written;
    const size_t more = written.size() > synced.size() ? written.size() - synced.size() : 0;
    switch (lost) {
      case Lost::half:
        return synced + written.substr(written.size() - more, more / 2);
      case Lost::garbage:
        return synced + std::string(more, '\xa5');
      default:
        return synced;
    }
  }

  // `reached[i]`: operation i reached the disk on its own. `lost`: nothing for a draw for each file.
  State build(const std::vector<bool>& reached, std::optional<Lost> lost,
              const PhiloxStream* random = nullptr) const {
    std::map<Inode, std::map<std::string, Inode>> entries;
    for (const auto& [inode, node] : r_.moments_[0].tree)
      if (node.directory) entries[inode] = node.entries;
    for (size_t i = 0; i < crash_; ++i) {
      for (const Change& change : operations_[i]) {
        if (!reached[i] && !fsynced(change.directory, i)) continue;
        if (change.to) {
          entries[change.directory][change.name] = *change.to;
        } else {
          entries[change.directory].erase(change.name);
        }
      }
    }
    State state;
    const std::function<void(Inode, const std::string&)> walk = [&](Inode directory,
                                                                    const std::string& path) {
      for (const auto& [name, inode] : entries[directory]) {
        const std::string full = join_path(path, name);
        if (!written_.contains(inode)) {
          state[full] = std::nullopt;
          walk(inode, full);
        } else {
          state[full] =
              content(inode, lost ? *lost : static_cast<Lost>(random->bits(1000 + number_.at(inode)) % 4));
        }
      }
    };
    walk(r_.root_inode_, "");
    return state;
  }

  // Operation i is what happened between moments i and i + 1.
  bool fsynced(Inode directory, size_t i) const {
    for (size_t m = i + 1; m < crash_; ++m)
      if (r_.moments_[m].op == FileOp::fsync && r_.moments_[m].target == directory) return true;
    return false;
  }

  const Recorder& r_;
  std::vector<Operation> operations_;
  size_t crash_ = 0;
  std::map<Inode, std::string> written_, synced_;
  std::map<Inode, size_t> number_;  // of files in the order of their creation
};

void Recorder::for_each_crash(const Check& check) const {
  CrashStates states(*this);
  std::set<std::pair<bool, CrashStates::State>> seen;
  for (size_t m = 1; m < moments_.size(); ++m) {
    const bool promised = moments_[m].promised;
    states.visit(m, [&](const CrashStates::State& state, const std::string& what) {
      if (!seen.emplace(promised, state).second) return;
      const TemporaryDirectory directory(TemporaryDirectory::Where::memory);
      for (const auto& [path, content] : state) {
        if (!content) {
          make_directory(directory / path);
          continue;
        }
        const File file = File::create(directory / path);
        file.pwrite_all(content->data(), content->size(), 0);
      }
      check(directory.path(), promised, fmt::format("crash before operation {}: {}", m, what));
    });
  }
}

}  // namespace nrl::test
