#include "core/io/checkpoint_store.h"

#include <algorithm>

#include <fcntl.h>

#include "core/io/checkpoint_reader.h"

namespace nrl {
namespace {

bool is_leftover(std::string_view name) {
  if (has_nonce(name, ".trash-") || has_nonce(name, "LATEST.tmp-")) return true;
  const size_t dot = name.find(".tmp-");
  return dot != std::string_view::npos && parse_step_directory_name(name.substr(0, dot)) &&
         has_nonce(name, name.substr(0, dot + 5));
}

std::vector<std::string> validate(const std::string& path, bool quick, const std::function<bool()>& stop) {
  OpenedManifest opened = open_manifest(path);
  std::vector<std::string> problems = std::move(opened.problems);
  if (quick || opened.manifest.files.empty()) return problems;
  const std::vector<std::string> more =
      CheckpointReader(path, std::move(opened.manifest)).verify_rest(0, 1, opened.unusable, stop);
  problems.insert(problems.end(), more.begin(), more.end());
  return problems;
}

// Every step-N, newest first, not yet validated.
std::vector<CheckpointEntry> find_steps(const std::string& store) {
  std::vector<CheckpointEntry> entries;
  if (!path_exists(store)) return entries;
  for (const std::string& name : list_directory(store)) {
    if (const auto step = parse_step_directory_name(name))
      entries.push_back({*step, join_path(store, name), {}});
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return entries;
}

// Why LATEST does not name `expected`; empty when it does.
std::string latest_problem(const std::string& store, const std::string& expected) {
  const std::string path = join_path(store, "LATEST");
  if (!path_exists(path)) return fmt::format("{} is missing", path);
  try {
    std::string text = read_file(path, 256);
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    if (text == expected) return {};
    if (!parse_step_directory_name(text)) return fmt::format("{} does not name a checkpoint", path);
    if (!path_exists(join_path(store, text)))
      return fmt::format("{} names {}, which does not exist", path, text);
    return fmt::format("{} names {}", path, text);
  } catch (const Error& e) {
    return e.what();
  }
}

}  // namespace

std::vector<std::string> validate_checkpoint(const std::string& path, Validation level) {
  if (level == Validation::none) return {};
  return validate(path, level == Validation::quick, {});
}

std::vector<std::string> verify_saved(const std::string& path, const std::function<bool()>& stop) {
  for (const std::string& name : list_directory(path)) {
    // Pages that are not on disk yet stay; a commit has written all.
    const File file = File::open_read(join_path(path, name));
    ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  }
  const std::vector<std::string> problems = validate(path, false, stop);
  const std::string mark = join_path(path, verified_name);
  if (problems.empty() && !(stop && stop()) && !path_exists(mark)) {
    File::create(mark).sync();  // empty, so that no part of it can be left
    fsync_directory(path);
  }
  return problems;
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& store, Validation level) {
  std::vector<CheckpointEntry> entries = find_steps(store);
  for (CheckpointEntry& e : entries) e.problems = validate_checkpoint(e.path, level);
  return entries;
}

ResumePoint find_resume(const std::string& store, Validation level, const KnownDamage& known) {
  ResumePoint point;
  for (CheckpointEntry& e : find_steps(store)) {
    const auto found = known.find(e.path);
    e.problems = found == known.end() ? validate_checkpoint(e.path, level) : found->second;
    if (e.valid()) {
      point.checkpoint = e;
      break;
    }
    point.rejected.push_back(std::move(e));
  }
  if (point.checkpoint) {
    const std::string name = step_directory_name(point.checkpoint->step);
    if (const std::string problem = latest_problem(store, name); !problem.empty()) {
      point.warnings.push_back(fmt::format("{}; the newest valid checkpoint is {}", problem, name));
    }
  }
  return point;
}

std::string set_checkpoints_aside(const std::string& store, int64_t step, const RunLock& lock) {
  NRL_CHECK(path_exists(lock.path()), "the lock {} was removed", lock.path());
  std::vector<std::string> moved, kept;
  for (const CheckpointEntry& e : find_steps(store))
    (e.step > step ? moved : kept).push_back(step_directory_name(e.step));
  if (moved.empty()) return {};
  std::string aside;
  for (int k = 1; aside.empty() || path_exists(aside); ++k)
    aside = join_path(store, fmt::format("previous-{}", k));
  // Update LATEST first: it must name an existing checkpoint after a crash at any point.
  const std::string latest = join_path(store, "LATEST");
  if (kept.empty()) {
    remove_tree(latest);
    fsync_directory(store);
  } else {
    write_file_atomic(latest, kept.front() + "\n");
  }
  make_directory(aside);
  for (const std::string& name : moved) rename_path(join_path(store, name), join_path(aside, name));
  fsync_directory(aside);  // the new names must be durable before the old ones disappear
  fsync_directory(store);
  return aside;
}

std::vector<int64_t> apply_retention(const std::string& store, int keep_newest,
                                     const std::function<bool(int64_t step)>& pinned,
                                     std::set<int64_t>* known) {
  NRL_CHECK(keep_newest >= 1, "keep_newest {}", keep_newest);
  const auto valid = [&](const CheckpointEntry& e) {
    if (known && known->contains(e.step) && path_exists(join_path(e.path, manifest_name))) return true;
    const bool good = validate_checkpoint(e.path, Validation::quick).empty();
    if (known && good) known->insert(e.step);
    return good;
  };
  int kept = 0;
  bool kept_verified = false;
  std::vector<int64_t> removed;
  for (const CheckpointEntry& e : find_steps(store)) {
    if (!valid(e)) continue;
    const bool newest_verified = !kept_verified && path_exists(join_path(e.path, verified_name));
    kept_verified = kept_verified || newest_verified;
    if (kept++ < keep_newest || newest_verified || (pinned && pinned(e.step))) continue;
    const std::string trash = join_path(store, ".trash-" + random_nonce());
    rename_path(e.path, trash);
    // Before removing files: a crash must not leave a partial checkpoint under its name.
    fsync_directory(store);
    remove_tree(trash);
    if (known) known->erase(e.step);
    removed.push_back(e.step);
  }
  return removed;
}

std::vector<std::string> clean_store(const std::string& store, const RunLock& lock) {
  return remove_leftovers(store, lock, is_leftover);
}

}  // namespace nrl
