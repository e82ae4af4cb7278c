#include "apps/data/order_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/device/cpu/file_memory.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"
#include "core/io/file_identity.h"

namespace nrl::data {
namespace {

constexpr size_t header_bytes = 4096;  // a page, so that the arrays are aligned
constexpr std::string_view order_magic = "nrlorder";
constexpr uint32_t order_version = 1;
constexpr uint64_t sample_bytes = 16 << 10;
constexpr time_t unused_seconds = time_t{30} * 24 * 3600;

struct OrderHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_crc;   ///< of the header with 0 here
  uint64_t bytes;        ///< of the arrays
  uint32_t samples_crc;  ///< samples_crc() of the arrays
  uint32_t key_bytes;
  char key[header_bytes - 32];
};
static_assert(sizeof(OrderHeader) == header_bytes);

// The checksum of samples notices a file that was not written whole, without reading all of it.
uint32_t samples_crc(const File& file, uint64_t bytes) {
  uint32_t crc = 0;
  std::vector<std::byte> sample;
  each_sample(bytes, sample_bytes, [&](uint64_t begin, uint64_t count) {
    sample.resize(count);
    file.pread_all(sample.data(), count, header_bytes + begin);
    crc = crc32c(sample.data(), count, crc);
  });
  return crc;
}

OrderHeader header_of(std::string_view key, const File& file, uint64_t bytes) {
  NRL_CHECK(key.size() <= sizeof(OrderHeader::key), "a key of {} bytes", key.size());
  OrderHeader h{};
  std::memcpy(h.magic, order_magic.data(), order_magic.size());
  h.version = order_version;
  h.bytes = bytes;
  h.samples_crc = samples_crc(file, bytes);
  h.key_bytes = static_cast<uint32_t>(key.size());
  std::memcpy(h.key, key.data(), key.size());
  h.header_crc = crc32c(&h, sizeof h);
  return h;
}

// Fails unless the directory belongs to this user alone: others could exchange files in it.
void require_private(const std::string& directory) {
  struct stat st {};
  if (::lstat(directory.c_str(), &st) != 0 && errno == ENOENT) {
    if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
      fail(Exit::cannot_create, "{}: cannot create: {}", directory, std::strerror(errno));
  }
  if (::lstat(directory.c_str(), &st) != 0)
    fail(Exit::cannot_create, "{}: {}", directory, std::strerror(errno));
  if (!S_ISDIR(st.st_mode) || st.st_uid != ::geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    fail(Exit::cannot_create, "{}: not a directory of this user that only it can write to", directory);
}

void require_space(const std::string& directory, int64_t bytes) {
  struct statvfs fs {};
  if (::statvfs(directory.c_str(), &fs) != 0) fail(Exit::io, "{}: {}", directory, std::strerror(errno));
  const uint64_t have = uint64_t{fs.f_bavail} * fs.f_frsize;
  const auto need = static_cast<uint64_t>(bytes) + static_cast<uint64_t>(bytes) / 20 + header_bytes;
  if (have < need)
    fail(Exit::io, "{}: {} free; expected {}", directory, human_bytes(have), human_bytes(need));
}

// Exclusive among the processes of the node; released at the end of the process at the latest.
class OrderLock {
 public:
  OrderLock(const std::string& path, bool wait)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600), path) {
    if (!file_.is_open()) fail(Exit::cannot_create, "{}: {}", path, std::strerror(errno));
    if (::flock(file_.fd(), LOCK_EX | LOCK_NB) == 0) {
      held_ = true;
      set_failed(false);
      return;
    }
    if (!wait) return;
    waited_ = true;
    int result = -1;
    do result = ::flock(file_.fd(), LOCK_EX);
    while (result != 0 && errno == EINTR);
    if (result != 0) fail(Exit::io, "{}: cannot lock: {}", path, std::strerror(errno));
    held_ = true;
  }

  /// False if it does not wait and another process holds the lock.
  bool held() const { return held_; }

  /// True if the process that was waited for could not store the order: the others then build theirs at the
  /// same time, not one after another.
  bool failed() const { return waited_ && file_.size() > 0; }
  void set_failed(bool failed) {
    if (::ftruncate(file_.fd(), failed ? 1 : 0) != 0)
      fail(Exit::io, "{}: {}", file_.path(), std::strerror(errno));
  }

 private:
  File file_;
  bool held_ = false, waited_ = false;
};

// A file in the directory of `path` that disappears when it is closed, also with this process.
File unnamed_file(const std::string& path) {
  File file = File::create(path + ".tmp-" + random_nonce());
  if (::unlink(file.path().c_str()) != 0)
    fail(Exit::io, "{}: cannot remove: {}", file.path(), std::strerror(errno));
  return file;
}

// Builds the order under a temporary name. The header is written last.
void store(const std::string& path, std::string_view key, const OrderBytes& bytes,
           const OrderFiles::Build& build) {
  const auto arrays = static_cast<uint64_t>(bytes.arrays);
  AtomicFile file(path);
  file.file().allocate(header_bytes + static_cast<uint64_t>(bytes.built));
  build(OrderSpace(file.file(), header_bytes, [&] { return unnamed_file(path); }));
  file.file().truncate(header_bytes + arrays);
  const OrderHeader header = header_of(key, file.file(), arrays);
  file.file().pwrite_all(&header, sizeof header, 0);
  file.commit();
}

// Leftovers of the order `name`, whose lock is held, and all files that were not used for a long time.
void remove_unused(const std::string& directory, const std::string& name) {
  for (const std::string& entry : list_directory(directory)) {
    const std::string path = join_path(directory, entry);
    struct stat st {};
    const bool old = ::lstat(path.c_str(), &st) == 0 && st.st_mtime + unused_seconds < std::time(nullptr);
    if (old || has_nonce(entry, name + ".tmp-")) remove_tree(path);
  }
}

// The message of the error; empty: none.
std::string attempt(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

}  // namespace

MappedOrder::~MappedOrder() {
  if (map_) ::munmap(map_, bytes_);
}

MappedOrder::MappedOrder(MappedOrder&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedOrder& MappedOrder::operator=(MappedOrder&& other) noexcept {
  std::swap(map_, other.map_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::span<const std::byte> MappedOrder::arrays() const {
  if (!map_) return {};
  return {static_cast<const std::byte*>(map_) + header_bytes, bytes_ - header_bytes};
}

OrderFiles OrderFiles::of_node() {
  const std::string name = fmt::format("nrl-train-orders-{}", ::geteuid());
  std::vector<std::string> directories;
  (void)attempt([&] { directories.push_back(join_path(cpu::scratch_directory(""), name)); });
  directories.push_back(join_path("/dev/shm", name));
  return OrderFiles(std::move(directories));
}

std::optional<MappedOrder> OrderFiles::open(std::string_view key, const OrderBytes& bytes, const Build& build,
                                            Wait wait) {
  NRL_CHECK(bytes.arrays >= 0 && bytes.built >= bytes.arrays && bytes.scratch >= 0);
  const std::string name = digest(key) + ".order";
  const auto arrays = static_cast<uint64_t>(bytes.arrays);
  const auto map = [&](const std::string& path) {
    const File file = File::open_read(path, File::Links::refuse);
    const auto length = header_bytes + arrays;
    if (file.size() != length) fail(Exit::data, "{}: {} bytes; expected {}", path, file.size(), length);
    void* p = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file.fd(), 0);
    if (p == MAP_FAILED) fail(Exit::io, "{}: cannot map: {}", path, std::strerror(errno));
    MappedOrder mapped(p, length);
    const OrderHeader want = header_of(key, file, arrays);
    if (std::memcmp(p, &want, sizeof want) != 0)
      fail(Exit::data, "{}: damaged, or not the order of this data", path);
    (void)attempt([&] { file.touch(); });  // in use
    return mapped;
  };
  std::string reasons;
  for (const std::string& directory : directories_) {
    std::optional<MappedOrder> mapped;
    std::exception_ptr build_error;
    bool busy = false;
    const std::string path = join_path(directory, name);
    const std::string reason = attempt([&] {
      require_private(directory);
      std::string damage;
      const auto map_existing = [&] {
        if (path_exists(path)) damage = attempt([&] { mapped = map(path); });
        return mapped.has_value();
      };
      if (map_existing()) return;
      require_space(directory, bytes.built + bytes.scratch);
      OrderLock lock(path + ".lock", wait == Wait::yes);
      busy = !lock.held();
      if (busy) return;
      if (map_existing()) return;
      if (lock.failed()) fail(Exit::io, "{}: another process could not store the order", directory);
      std::string failure;
      try {
        remove_unused(directory, name);
        store(path, key, bytes, build);
      } catch (const Error& e) {
        if (e.code() != Exit::io && e.code() != Exit::cannot_create) {
          build_error = std::current_exception();
          return;
        }
        failure = e.what();
      }
      if (failure.empty()) failure = attempt([&] { mapped = map(path); });
      if (!damage.empty()) warnings_.push_back(fmt::format("{}. The sample order was built again", damage));
      if (failure.empty()) return;
      lock.set_failed(true);
      fail(Exit::io, "{}", failure);
    });
    if (build_error) std::rethrow_exception(build_error);
    if (mapped || busy) return mapped;
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  if (wait == Wait::no) return std::nullopt;
  warnings_.push_back(
      fmt::format("the sample order of {} is not shared by the processes of a node, each holds its own: {}. "
                  "Fix: set TMPDIR "
                  "to a local directory with room for it",
                  human_bytes(arrays), reasons));
  return std::nullopt;
}

std::string digest(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return fmt::format("{:016x}{:08x}", h, crc32c(text.data(), text.size()));
}

}  // namespace nrl::data
