#include "apps/diagnosis/flight_files.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>

#include <sys/stat.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "parallel/comm/flight.h"

namespace nrl::diagnosis {
namespace {

constexpr double seconds_of_a_day = 86400;

std::string directory_of_user() {
  return fmt::format("/dev/shm/nrl-{}", ::geteuid());
}

// Another user may have made a directory of this name first.
void make_own_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    fail(Exit::io, "{}: cannot create: {}", path, std::strerror(errno));
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() ||
      (found.st_mode & 0077) != 0)
    fail(Exit::io, "{}: is not a directory of this user alone", path);
}

std::vector<std::string> names_in(const std::string& directory) {
  try {
    return is_directory(directory) ? list_directory(directory) : std::vector<std::string>();
  } catch (const Error&) {
    return {};
  }
}

template <class Work>
bool succeeds(const Work& work) {
  try {
    work();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool save_one(const std::string& from, const std::string& to) {
  return succeeds([&] {
    if (path_exists(to)) return;
    make_directories(parent_path(to));
    // Without fsync: the launcher may kill this process 0.3 s after a rank has died.
    write_file_atomic(to, read_file(from, comm::most_flight_bytes, File::Links::refuse), Durable::no);
  });
}

bool read_whole(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0;
}

void remove_old_attempts(const std::string& log_dir) {
  std::vector<int> attempts;
  const std::string root = join_path(log_dir, "flight");
  for (const std::string& name : names_in(root))
    if (int attempt = 0;
        name.starts_with("attempt-") && read_whole(std::string_view(name).substr(8), attempt))
      attempts.push_back(attempt);
  std::sort(attempts.begin(), attempts.end());
  for (size_t i = 0; i + kept_attempts < attempts.size(); ++i)
    succeeds([&] { remove_tree(saved_flights(log_dir, attempts[i])); });
}

void remove_stale_runs(std::string_view run_id) {
  const std::string root = directory_of_user();
  for (const std::string& name : names_in(root)) {
    const std::string path = join_path(root, name);
    struct stat found {};
    if (name == run_id || ::lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) ||
        found.st_uid != ::geteuid())
      continue;
    // A living run writes to its files in place, which changes no time: the directory's is of the last start.
    double youngest = std::difftime(std::time(nullptr), found.st_mtime);
    for (const std::string& file : names_in(path))
      if (struct stat of{}; ::lstat(join_path(path, file).c_str(), &of) == 0)
        youngest = std::min(youngest, std::difftime(std::time(nullptr), of.st_mtime));
    if (youngest > seconds_of_a_day) succeeds([&] { remove_tree(path); });
  }
}

}  // namespace

std::string flight_directory(std::string_view run_id) {
  return join_path(directory_of_user(), std::string(run_id));
}

std::string make_flight_directory(std::string_view run_id) {
  make_own_directory(directory_of_user());
  std::string path = flight_directory(run_id);
  make_own_directory(path);
  return path;
}

std::string flight_name(int rank, int attempt) {
  return fmt::format("rank-{}.attempt-{}.flight", rank, attempt);
}

bool parse_flight_name(std::string_view name, int& rank, int& attempt) {
  constexpr std::string_view begin = "rank-", middle = ".attempt-", end = ".flight";
  const size_t at = name.find(middle);
  if (!name.starts_with(begin) || !name.ends_with(end) || at == std::string_view::npos ||
      at + middle.size() + end.size() > name.size())
    return false;
  name.remove_suffix(end.size());
  return read_whole(name.substr(begin.size(), at - begin.size()), rank) &&
         read_whole(name.substr(at + middle.size()), attempt);
}

std::string saved_flights(const std::string& log_dir, int attempt) {
  return join_path(join_path(log_dir, "flight"), fmt::format("attempt-{}", attempt));
}

int save_flights(const std::string& log_dir, std::string_view run_id, int attempt) {
  const std::string from = flight_directory(run_id);
  int saved = 0;
  for (const std::string& name : names_in(from)) {
    int rank = 0, of = 0;
    if (!parse_flight_name(name, rank, of) || of != attempt ||
        !save_one(join_path(from, name), join_path(saved_flights(log_dir, attempt), name)))
      continue;
    ::unlink(join_path(from, name).c_str());
    ++saved;
  }
  return saved;
}

void collect_flights(const std::string& log_dir, std::string_view run_id, int now) {
  const std::string from = flight_directory(run_id);
  for (const std::string& name : names_in(from)) {
    int rank = 0, attempt = 0;
    if (!parse_flight_name(name, rank, attempt) || attempt >= now) continue;
    save_one(join_path(from, name), join_path(saved_flights(log_dir, attempt), name));
    ::unlink(join_path(from, name).c_str());
  }
  remove_old_attempts(log_dir);
  remove_stale_runs(run_id);
}

void leave_flights(std::string_view run_id) {
  ::rmdir(flight_directory(run_id).c_str());
  ::rmdir(directory_of_user().c_str());
}

}  // namespace nrl::diagnosis
