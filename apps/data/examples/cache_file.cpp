#include "apps/data/examples/cache_file.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/data/examples/record.h"
#include "apps/data/order_file.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/file_identity.h"

namespace nrl::data {
namespace {

namespace fs = std::filesystem;

// Must change with every change of the code that gives other tokens or masks for the same records.
constexpr int examples_version = 1;
constexpr std::string_view cache_infix = ".examples-", cache_suffix = ".cache";
constexpr time_t unused_cache_seconds = time_t{30} * 24 * 3600, leftover_seconds = time_t{24} * 3600;

bool is_cache_name(std::string_view name) {
  const size_t at = name.find(cache_infix);
  if (at == std::string_view::npos) return false;
  name.remove_prefix(at + cache_infix.size());
  const size_t end = name.find(cache_suffix);
  if (end == std::string_view::npos) return false;
  name.remove_prefix(end + cache_suffix.size());
  return name.empty() || name == ".lock" || name.starts_with(".tmp-");
}

std::optional<struct stat> status_of(const std::string& path) {
  struct stat st {};
  if (::lstat(path.c_str(), &st) != 0) return std::nullopt;
  return st;
}

/// Exclusive among the processes that build one cache. Its file exists while it is held; one that a killed
/// process has left is used again.
class CacheLock {
 public:
  /// Waits for another process; throws the error with which that has failed.
  CacheLock(std::string path, const std::function<void()>& waiting) : path_(std::move(path)) {
    while (!try_lock()) {
      waited_ = true;
      waiting();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  }
  ~CacheLock() {
    if (held_) ::unlink(path_.c_str());
  }
  CacheLock(const CacheLock&) = delete;
  CacheLock& operator=(const CacheLock&) = delete;

  bool held() const { return held_; }  ///< false where the file system has no locks
  bool waited() const { return waited_; }

  /// Hands the error to the processes that wait, which would fail as well, one after another.
  void set_failure(const Error& error) const {
    if (!held_) return;
    const std::string text = fmt::format("{} {}", static_cast<int>(error.code()), error.what());
    (void)!::pwrite(file_.fd(), text.data(), text.size(), 0);
  }

 private:
  // Returns false while another process holds the lock.
  bool try_lock() {
    if (!file_.is_open())
      file_ = File(::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644), path_);
    if (!file_.is_open()) return true;  // the cache cannot be written either, which is reported there
    if (::flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK && errno != EINTR;
    struct stat locked {};
    const auto named = status_of(path_);
    held_ = ::fstat(file_.fd(), &locked) == 0 && named && named->st_ino == locked.st_ino &&
            named->st_dev == locked.st_dev;
    if (held_) return true;
    // The holder has removed the file.
    throw_failure();
    file_ = File();
    return false;
  }

  void throw_failure() const {
    std::string text(std::min<uint64_t>(file_.size(), 1 << 16), '\0');
    file_.pread_all(text.data(), text.size(), 0);
    int code = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, code);
    if (error == std::errc() && rest != end) throw Error(static_cast<Exit>(code), std::string(rest + 1, end));
  }

  std::string path_;
  File file_;
  bool held_ = false, waited_ = false;
};

}  // namespace

std::string example_key(const ExampleOptions& o, const std::vector<InputFile>& files,
                        const Tokenizer& tokenizer, const std::string& template_text) {
  std::string key = fmt::format("nrl-train examples {}\n", examples_version);
  const auto add = [&](std::string_view name, const std::string& value) {
    key += fmt::format("{}: {} {}\n", name, value.size(), digest(value));
  };
  for (const InputFile& file : files) {
    struct stat st {};
    if (::stat(file.path.c_str(), &st) != 0) fail(Exit::no_input, "{}: {}", file.path, std::strerror(errno));
    key += fmt::format("file: {}, changed {}.{:09}, {} {}\n", identify_file_by_samples(file.path).text(),
                       st.st_mtim.tv_sec, st.st_mtim.tv_nsec, static_cast<int>(file.compression), file.jsonl);
  }
  key += fmt::format("tokenizer: {} {}\n", tokenizer.kind(), tokenizer.vocab_size());
  for (const Tokenizer::File& file : tokenizer.files())
    if (!file.derived) add(file.name, file.content);
  key += fmt::format("ends: {} {}\n", tokenizer.bos().value_or(-1), fmt::join(tokenizer.eos_ids(), " "));
  for (const auto& [name, text] : tokenizer.special_tokens()) add(name, text);
  key += fmt::format("format: {}, train_on: {}, max_length: {}, {} {} {} {} {} {}\n", name_of(o.format),
                     name_of(o.train_on), o.max_length, name_of(o.on_overlong),
                     name_of(o.special_tokens_in_text), name_of(o.on_bad_record), o.vocab_size, o.add_bos,
                     o.add_eos);
  for (const std::string* name : {&o.text_key, &o.chat_key, &o.tools_key, &o.input_key, &o.output_key,
                                  &o.prompt_key, &o.chosen_key, &o.rejected_key, &o.template_date})
    add("name", *name);
  for (const std::string* path : {&o.system_prompt_file, &o.prompt_file})
    add("prompt", path->empty() ? "" : "=" + read_file(*path, max_prompt_file_bytes));
  add("template", template_text);
  add("kwargs", o.chat_template_kwargs.dump());
  return key;
}

CacheDirectory::CacheDirectory(const ExampleOptions& options) {
  std::error_code error;
  fs::path input = fs::absolute(options.inputs.at(0), error).lexically_normal();
  if (input.filename().empty()) input = input.parent_path();
  directory_ = options.cache_dir.empty() ? input.parent_path().string() : options.cache_dir;
  if (directory_.empty()) directory_ = ".";
  constexpr size_t longest_name = 160;
  stem_ = join_path(directory_, input.filename().string().substr(0, longest_name) + std::string(cache_infix));
}

std::vector<InputFile> CacheDirectory::without_caches(std::vector<InputFile> files) {
  std::erase_if(files, [](const InputFile& file) {
    return is_cache_name(std::string_view(file.path).substr(file.path.rfind('/') + 1));
  });
  return files;
}

void CacheDirectory::remove_unused() const {
  const time_t now = std::time(nullptr);
  const std::string name = stem_.substr(stem_.rfind('/') + 1);
  for (const std::string& entry : list_directory(directory_)) {
    if (!entry.starts_with(name) || !is_cache_name(entry)) continue;
    const std::string path = join_path(directory_, entry);
    const auto st = status_of(path);
    const bool whole = entry.ends_with(cache_suffix);
    if (st && st->st_mtime + (whole ? unused_cache_seconds : leftover_seconds) < now) remove_tree(path);
  }
}

std::unique_ptr<const ExampleCache> CacheDirectory::open(const std::string& key, int64_t vocab_size,
                                                         int threads,
                                                         const std::function<void(const std::string&)>& build,
                                                         const std::function<void()>& waiting,
                                                         std::vector<std::string>& notes) const {
  const std::string path = stem_ + digest(key) + std::string(cache_suffix);
  std::string damage;
  const auto existing = [&]() -> std::unique_ptr<const ExampleCache> {
    if (!path_exists(path)) return nullptr;
    try {
      return std::make_unique<const ExampleCache>(path, key, vocab_size, threads);
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
      damage = e.what();
      return nullptr;
    }
  };
  if (auto cache = existing()) return cache;
  try {
    make_directories(directory_);
    const CacheLock lock(path + ".lock", waiting);
    if (lock.waited())
      if (auto cache = existing()) return cache;
    if (lock.held()) remove_unused();
    try {
      build(path);
    } catch (const Error& e) {
      lock.set_failure(e);
      throw;
    }
  } catch (const Error& e) {
    if (e.code() != Exit::cannot_create) throw;
    fail(e.code(), "{}. Fix: set data.cache_dir to a directory for the tokens of the data", e.what());
  }
  if (!damage.empty()) notes.push_back(fmt::format("{}. The examples were made again", damage));
  return std::make_unique<const ExampleCache>(path, key, vocab_size, threads);
}

}  // namespace nrl::data
