#include "parallel/comm/flight.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/base/process.h"
#include "core/io/atomic_file.h"

namespace nrl::comm {
namespace {

constexpr char magic[8] = {'N', 'R', 'L', 'F', 'L', 'T', '0', '1'};
constexpr size_t group_bytes = size_t{64} << 10;

// The layout of the file. It is read by the same build of the program on the same kind of machine only, so
// the sizes below are the version.
struct Layout {
  char magic[8];
  uint32_t bytes, entry_bytes, page_bytes, capacity;
  int32_t attempt, rank, ranks, node;
  int64_t pid, start_ticks, created_us, created_ns;
  char host[64], boot_id[64], run_id[64];
  alignas(64) status::Page page;
  alignas(64) std::atomic<uint64_t> next;
  std::atomic<uint32_t> group_bytes_used;
  alignas(64) char groups[group_bytes];
  alignas(64) LogEntry entries[CollectiveLog::capacity];
};
static_assert(sizeof(Layout) <= most_flight_bytes);

template <size_t n>
void put(char (&to)[n], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), n - 1));
}

// Printable text up to the first other character.
template <size_t n>
std::string text_of(const char (&from)[n]) {
  std::string text(from, strnlen(from, n));
  return text.substr(
      0, std::find_if(text.begin(), text.end(), [](char c) { return c < '!' || c > '~'; }) - text.begin());
}

}  // namespace

FlightIdentity this_process() {
  FlightIdentity identity;
  identity.host = host_name();
  identity.boot_id = boot_id();
  identity.pid = ::getpid();
  identity.start_ticks = start_ticks_of(identity.pid);
  return identity;
}

FlightFile::FlightFile(std::string path, const FlightIdentity& identity, CollectiveLog& log)
    : path_(std::move(path)), log_(log) {
  ::unlink(path_.c_str());
  const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) fail(Exit::io, "{}: cannot create: {}", path_, std::strerror(errno));
  const File file(fd, path_);
  // Reserved, not only sized: a write to memory that is full would be SIGBUS.
  if (const int error = ::posix_fallocate(fd, 0, sizeof(Layout)); error != 0) {
    ::unlink(path_.c_str());
    fail(Exit::io, "{}: cannot reserve {} bytes: {}", path_, sizeof(Layout), std::strerror(error));
  }
  memory_ = ::mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory_ == MAP_FAILED) {
    ::unlink(path_.c_str());
    fail(Exit::io, "{}: cannot map: {}", path_, std::strerror(errno));
  }
  auto& f = *new (memory_) Layout;
  f.bytes = sizeof(Layout);
  f.entry_bytes = sizeof(LogEntry);
  f.page_bytes = sizeof(status::Page);
  f.capacity = CollectiveLog::capacity;
  f.attempt = identity.attempt;
  f.rank = identity.rank;
  f.ranks = identity.ranks;
  f.node = identity.node;
  f.pid = identity.pid;
  f.start_ticks = identity.start_ticks;
  f.created_us = std::chrono::duration_cast<std::chrono::microseconds>(
                     std::chrono::system_clock::now().time_since_epoch())
                     .count();
  f.created_ns = now_ns();
  put(f.host, identity.host);
  put(f.boot_id, identity.boot_id);
  put(f.run_id, identity.run_id);
  status::place(&f.page);
  log_.place({.entries = f.entries,
              .next = &f.next,
              .groups = f.groups,
              .group_bytes = group_bytes,
              .group_bytes_used = &f.group_bytes_used});
  std::memcpy(f.magic, magic, sizeof magic);  // last: a reader refuses a file that is not complete
}

FlightFile::~FlightFile() {
  log_.place({});
  status::place(nullptr);
  // The memory stays mapped: other threads may have the address of the page, and count in it.
}

void FlightFile::remove() {
  ::unlink(path_.c_str());
}

Flight read_flight(const std::string& path) {
  const std::string text = read_file(path, most_flight_bytes, File::Links::refuse);
  const auto refuse = [&](std::string_view what) {
    fail(Exit::data, "{}: {}. Fix: read it with the version of nrl-train that wrote it", path, what);
  };
  if (text.size() < sizeof magic || std::memcmp(text.data(), magic, sizeof magic) != 0)
    refuse("is not a flight file");
  if (text.size() != sizeof(Layout)) refuse("is a flight file of another size");
  const auto owned = std::make_unique<Layout>();
  std::memcpy(static_cast<void*>(owned.get()), text.data(), sizeof(Layout));
  const Layout& f = *owned;
  if (f.bytes != sizeof(Layout) || f.entry_bytes != sizeof(LogEntry) ||
      f.page_bytes != sizeof(status::Page) || f.capacity != CollectiveLog::capacity)
    refuse("is a flight file of another version");
  if (f.ranks < 1 || f.rank < 0 || f.rank >= f.ranks || f.node < 0 || f.attempt < 0 || f.pid < 0 ||
      static_cast<uint8_t>(f.page.phase.load()) >= status::phases || f.group_bytes_used.load() > group_bytes)
    refuse("is a damaged flight file");
  Flight flight;
  flight.identity = {text_of(f.run_id), f.attempt,          f.rank, f.ranks,      f.node,
                     text_of(f.host),   text_of(f.boot_id), f.pid,  f.start_ticks};
  flight.created = static_cast<double>(f.created_us) * 1e-6;
  flight.created_ns = f.created_ns;
  flight.progress = f.page.progress;
  flight.step = f.page.step;
  flight.completed = f.page.completed;
  flight.phase_since_ns = f.page.phase_since;
  flight.wait_since_ns = f.page.wait_since;
  flight.wait_id = f.page.wait_id;
  flight.phase = f.page.phase;
  flight.microbatch = f.page.microbatch;
  flight.layer = f.page.layer;
  flight.backward = f.page.backward;
  flight.signal = f.page.signal;
  flight.signal_sent = f.page.signal_sent != 0;
  flight.signal_at = f.page.signal_at;
  std::string_view lines(f.groups, f.group_bytes_used.load());
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    LogGroup group;
    if (!from_line(lines.substr(0, end), group)) refuse("names a group of ranks that is none");
    flight.groups.push_back(std::move(group));
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  const uint64_t next = f.next;
  for (uint64_t i = 0; i < CollectiveLog::capacity; ++i) {
    const LogEntry& entry = f.entries[i];
    // One that is being written, or was never.
    if (entry.enqueued_ns == 0 || entry.id >= next || entry.id % CollectiveLog::capacity != i) continue;
    if (entry.op > Op::split || entry.progress > Progress::failed || entry.group >= flight.groups.size() ||
        entry.dtype > DType::u8 || entry.bytes < 0)
      continue;
    flight.entries.push_back(entry);
  }
  std::sort(flight.entries.begin(), flight.entries.end(),
            [](const LogEntry& a, const LogEntry& b) { return a.id < b.id; });
  return flight;
}

}  // namespace nrl::comm
