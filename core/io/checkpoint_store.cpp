#include "core/io/checkpoint_store.h"

#include <algorithm>
#include <charconv>

#include "core/io/crc32c.h"

namespace nrl {
namespace {

constexpr std::string_view step_prefix = "step-";
constexpr uint64_t max_manifest = uint64_t{1} << 30;

bool is_leftover(std::string_view name) {
  if (has_nonce(name, ".trash-") || has_nonce(name, "LATEST.tmp-")) return true;
  const size_t dot = name.find(".tmp-");
  return dot != std::string_view::npos && parse_step_directory_name(name.substr(0, dot)) &&
         has_nonce(name, name.substr(0, dot + 5));
}

uint32_t crc_of_range(const File& file, uint64_t begin, uint64_t end, uint32_t crc = 0) {
  std::string buffer(std::min<uint64_t>(end - begin, crc_chunk_bytes), '\0');
  for (uint64_t at = begin; at < end;) {
    const uint64_t n = std::min<uint64_t>(buffer.size(), end - at);
    file.pread_all(buffer.data(), n, at);
    crc = crc32c(buffer.data(), n, crc);
    at += n;
  }
  return crc;
}

// Lists the tensors of a damaged file whose checksums differ.
std::string locate_damage(const std::string& path, const CheckpointFile& entry,
                          const CheckpointManifest& manifest) {
  std::string found;
  try {
    const SafetensorsFile st(path, File::Links::refuse);
    const File file = File::open_read(path, File::Links::refuse);
    for (const auto& [name, tensor] : manifest.tensors) {
      for (const CheckpointShard& s : tensor.shards) {
        if (s.file != entry.name) continue;
        const TensorInfo& info = st.at(s.key);
        const uint64_t begin = st.data_offset() + info.begin, end = st.data_offset() + info.end;
        for (uint64_t at = begin; at < end; at += crc_chunk_bytes) {
          const uint64_t to = std::min(end, at + crc_chunk_bytes);
          const size_t chunk = (at - begin) / crc_chunk_bytes;
          const uint32_t wanted = chunk < s.chunks.size() ? s.chunks[chunk] : s.crc32c;
          if (crc_of_range(file, at, to) == wanted) continue;
          found += fmt::format("{}tensor \"{}\", bytes {} to {}", found.empty() ? "" : "; ", name, at, to);
        }
      }
    }
    if (found.empty() && path.ends_with(".safetensors")) {
      found = fmt::format("the header, bytes 0 to {}", st.data_offset());
    }
  } catch (const Error& e) {
    found = e.what();
  }
  return found;
}

void check_file(const std::string& dir, const CheckpointFile& entry, const CheckpointManifest& manifest,
                Validation level, std::vector<std::string>& problems) {
  const std::string path = join_path(dir, entry.name);
  if (!path_exists(path)) {
    problems.push_back(fmt::format("{}: missing {}", dir, entry.name));
    return;
  }
  const File file = File::open_read(path, File::Links::refuse);
  const uint64_t size = file.size();
  if (size != entry.bytes) {
    problems.push_back(fmt::format("{}: size {} != {} in {}", path, size, entry.bytes, manifest_name));
    return;
  }
  if (level == Validation::quick) return;
  const uint32_t crc = crc_of_range(file, 0, size);
  if (crc == entry.crc32c) return;
  const std::string where = entry.name.ends_with(".safetensors") ? locate_damage(path, entry, manifest) : "";
  problems.push_back(fmt::format("{}: damaged: CRC-32C {:08x}, {:08x} in {}{}{}", path, crc, entry.crc32c,
                                 manifest_name, where.empty() ? "" : ": ", where));
}

}  // namespace

std::string step_directory_name(int64_t step) {
  return fmt::format("{}{}", step_prefix, step);
}

std::optional<int64_t> parse_step_directory_name(std::string_view name) {
  if (!name.starts_with(step_prefix)) return {};
  const std::string_view digits = name.substr(step_prefix.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || step < 0 || name != step_directory_name(step)) return {};
  return step;
}

std::vector<std::string> validate_checkpoint(const std::string& path, Validation level) {
  std::vector<std::string> problems;
  try {
    const std::string manifest_path = join_path(path, manifest_name);
    if (!path_exists(manifest_path)) return {fmt::format("{}: missing {}", path, manifest_name)};
    const auto manifest = CheckpointManifest::from_text(
        read_file(manifest_path, max_manifest, File::Links::refuse), manifest_path);
    const size_t end = path.find_last_not_of('/');
    const std::string trimmed = path.substr(0, end == std::string::npos ? 0 : end + 1);
    const auto named = parse_step_directory_name(trimmed.substr(trimmed.rfind('/') + 1));
    if (named && *named != manifest.step) {
      problems.push_back(fmt::format("{}: {} is of step {}, the directory of step {}", path, manifest_name,
                                     manifest.step, *named));
    }
    for (const CheckpointFile& f : manifest.files) check_file(path, f, manifest, level, problems);
    if (level == Validation::full) {
      for (const auto& [name, tensor] : manifest.tensors) (void)shard_runs(name, tensor);
    }
  } catch (const Error& e) {
    problems.push_back(e.what());
  }
  return problems;
}

namespace {

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

std::vector<CheckpointEntry> list_checkpoints(const std::string& store, Validation level) {
  std::vector<CheckpointEntry> entries = find_steps(store);
  for (CheckpointEntry& e : entries) e.problems = validate_checkpoint(e.path, level);
  return entries;
}

ResumePoint find_resume(const std::string& store, Validation level) {
  ResumePoint point;
  for (CheckpointEntry& e : find_steps(store)) {
    e.problems = validate_checkpoint(e.path, level);
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
                                     const std::function<bool(int64_t step)>& pinned) {
  NRL_CHECK(keep_newest >= 1, "keep_newest {}", keep_newest);
  int kept = 0;
  std::vector<int64_t> removed;
  for (const CheckpointEntry& e : list_checkpoints(store, Validation::quick)) {
    if (!e.valid() || kept++ < keep_newest || (pinned && pinned(e.step))) continue;
    const std::string trash = join_path(store, ".trash-" + random_nonce());
    rename_path(e.path, trash);
    // Before removing files: a crash must not leave a partial checkpoint under its name.
    fsync_directory(store);
    remove_tree(trash);
    removed.push_back(e.step);
  }
  return removed;
}

std::vector<std::string> clean_store(const std::string& store, const RunLock& lock) {
  return remove_leftovers(store, lock, is_leftover);
}

}  // namespace nrl
