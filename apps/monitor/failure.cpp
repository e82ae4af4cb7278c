#include "apps/monitor/failure.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include "core/io/append_file.h"
#include "core/io/atomic_file.h"

namespace nrl::monitor {
namespace {

constexpr size_t most_bytes = size_t{64} << 10;
/// The size of failure.space: a text of this length is written in place.
constexpr size_t space_bytes = size_t{16} << 10;

/// The reserved space under this name, or a new file if there is none.
File take_space(const std::string& log_dir, const std::string& path) {
  if (::rename(join_path(log_dir, failure_space_file).c_str(), path.c_str()) != 0) return File::create(path);
  const int fd = ::open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) fail(Exit::io, "{}: cannot open: {}", path, std::strerror(errno));
  return {fd, path};
}

}  // namespace

std::string kind_of(Exit code) {
  switch (code) {
    case Exit::usage:
      return "usage";
    case Exit::data:
      return "data";
    case Exit::no_input:
      return "no_input";
    case Exit::unavailable:
      return "unavailable";
    case Exit::internal:
      return "internal";
    case Exit::out_of_memory:
      return "out_of_memory";
    case Exit::cannot_create:
      return "cannot_create";
    case Exit::io:
      return "io";
    case Exit::config:
      return "config";
    case Exit::diverged:
      return "diverged";
    case Exit::peer_lost:
      return "peer_lost";
    case Exit::silent_corruption:
      return "silent_corruption";
    default:
      return "unknown";
  }
}

bool is_retryable(Exit code) {
  return code == Exit::peer_lost || code == Exit::silent_corruption || code == Exit::io ||
         code == Exit::out_of_memory;
}

JsonValue to_json(const Failure& f) {
  return JsonValue::object({{"kind", f.kind},
                            {"exit_code", f.exit_code},
                            {"retryable", f.retryable},
                            {"text", f.text},
                            {"run_id", f.run_id},
                            {"attempt", f.attempt},
                            {"rank", f.rank ? JsonValue(*f.rank) : JsonValue()},
                            {"host", f.host},
                            {"pid", f.pid},
                            {"phase", f.phase},
                            {"step", f.step},
                            {"last_completed_step", f.completed},
                            {"last_checkpoint", f.checkpoint.empty() ? JsonValue() : JsonValue(f.checkpoint)},
                            {"failed_at", f.failed_at}});
}

Failure failure_from(const JsonValue& json, const std::string& where) {
  try {
    Failure f;
    f.kind = json.get_string("kind");
    f.exit_code = static_cast<int>(json.get_int("exit_code"));
    f.retryable = json.get_bool("retryable");
    f.text = json.get_string("text");
    f.run_id = json.get_string("run_id");
    f.attempt = static_cast<int>(json.get_int("attempt"));
    if (const JsonValue& rank = json.at("rank"); !rank.is_null()) f.rank = static_cast<int>(rank.as_int());
    f.host = json.get_string("host");
    f.pid = json.get_int("pid");
    f.phase = json.get_string("phase");
    f.step = json.get_int("step");
    f.completed = json.get_int("last_completed_step");
    if (const JsonValue& path = json.at("last_checkpoint"); !path.is_null()) f.checkpoint = path.as_string();
    f.failed_at = json.get_double("failed_at");
    return f;
  } catch (const Error& e) {
    fail(Exit::data, "{}: is no record of a failure: {}", where, e.what());
  }
}

void reserve_failure_space(const std::string& log_dir) {
  // Zeros that are written occupy space where fallocate does not exist.
  write_file_atomic(join_path(log_dir, failure_space_file), std::string(space_bytes, '\0'), Durable::no);
}

void release_failure_space(const std::string& log_dir) {
  remove_tree(join_path(log_dir, failure_space_file));
}

bool write_failure(const std::string& log_dir, const Failure& failure) {
  const std::string path = join_path(log_dir, failure_file);
  if (path_exists(path)) return false;
  // link() fails if another rank was first, where a rename would replace its file.
  const std::string temporary = path + ".tmp-" + random_nonce();
  const File file = take_space(log_dir, temporary);
  const std::string text = to_json(failure).dump(2) + "\n";
  file.pwrite_all(text.data(), text.size(), 0);
  file.truncate(text.size());
  const bool linked = ::link(temporary.c_str(), path.c_str()) == 0;
  const int error = errno;
  ::unlink(temporary.c_str());
  if (!linked && error != EEXIST) fail(Exit::io, "{}: cannot create: {}", path, std::strerror(error));
  return linked;
}

void sync_failure(const std::string& log_dir) {
  File::open_read(join_path(log_dir, failure_file), File::Links::refuse).sync();
}

std::optional<Failure> read_failure(const std::string& log_dir) {
  const std::string path = join_path(log_dir, failure_file);
  if (!path_exists(path)) return {};
  return failure_from(parse_json(read_file(path, most_bytes, File::Links::refuse), path), path);
}

void put_failure_aside(const std::string& log_dir) {
  const std::string path = join_path(log_dir, failure_file);
  if (!path_exists(path)) return;
  try {
    const Failure failure = *read_failure(log_dir);
    const AppendFile lines(join_path(log_dir, failures_file));
    lines.append(to_json(failure).dump() + "\n");
  } catch (const Error& e) {
    if (e.code() != Exit::data) throw;
  }
  remove_tree(path);
}

}  // namespace nrl::monitor
