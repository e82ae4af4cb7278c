#include "apps/diagnosis/stacks.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "core/io/atomic_file.h"

extern void* __libc_stack_end;  // of the dynamic linker: above it lie the arguments and the environment

namespace nrl::diagnosis {
namespace {

constexpr char magic[8] = {'N', 'R', 'L', 'S', 'T', 'K', '0', '1'};
constexpr size_t most_maps = size_t{1} << 20;
constexpr int copy_milliseconds = 300, thread_milliseconds = 50;

// The layout of the file: a header, records of threads, their stacks, the maps.
struct Header {
  char magic[8];
  uint32_t record_bytes, threads, maps_bytes;
  int32_t rank, attempt, unused;
  int64_t pid;
};
struct Record {
  int64_t id;
  uint64_t begin;
  uint64_t registers[stack_registers];
  uint32_t stack_bytes;
  uint8_t copied;
  char state, name[18], wchan[64], syscall[160];
};
static_assert(std::is_trivially_copyable_v<Record>);
constexpr uint64_t most_file_bytes =
    sizeof(Header) + most_threads * (sizeof(Record) + most_stack_bytes) + most_maps;

template <size_t n>
void put(char (&to)[n], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), n - 1));
}

template <size_t n>
std::string printable(const char (&from)[n]) {
  std::string text(from, strnlen(from, n));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

std::string text_in(const std::string& path, size_t most) {
  std::ifstream in(path);
  std::string text(most, '\0');
  in.read(text.data(), static_cast<std::streamsize>(most));
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

std::string line_in(const std::string& path) {
  const std::string text = text_in(path, 4096);
  return text.substr(0, text.find('\n'));
}

// The mappings whose rights ("r-xp") have `letter` at `place`.
std::vector<Mapping> mappings(std::string_view maps, size_t place, char letter) {
  std::vector<Mapping> out;
  while (!maps.empty()) {
    const size_t end = std::min(maps.find('\n'), maps.size());
    const std::string line(maps.substr(0, end));
    maps.remove_prefix(std::min(end + 1, maps.size()));
    unsigned long long begin = 0, last = 0, offset = 0;
    char rights[5] = {};
    int path = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx %4s %llx %*s %*s %n", &begin, &last, rights, &offset, &path) >=
            4 &&
        rights[place] == letter && begin < last && path > 0)
      out.push_back({begin, last, offset, line.substr(static_cast<size_t>(path))});
  }
  return out;
}

#ifdef __x86_64__
// The handler of a thread writes it.
struct Capture {
  pid_t thread = 0;
  std::array<uint64_t, stack_registers> registers{};
  std::atomic<bool> done{false};
};
std::atomic<Capture*> capture{nullptr};

extern "C" void on_copy_signal(int, siginfo_t*, void* context) {
  Capture* const mine = capture.load();
  if (mine && mine->thread == static_cast<pid_t>(::syscall(SYS_gettid))) {
    constexpr int order[stack_registers] = {REG_RAX, REG_RDX, REG_RCX, REG_RBX, REG_RSI, REG_RDI,
                                            REG_RBP, REG_RSP, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                            REG_R12, REG_R13, REG_R14, REG_R15, REG_RIP};
    const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
    for (size_t i = 0; i < stack_registers; ++i)
      mine->registers[i] = static_cast<uint64_t>(registers[order[i]]);
    mine->done.store(true);
  }
  for (;;) ::pause();  // its stack stays as it is
}

// Stops a thread for good; false if it does not answer.
bool stop(Capture& c, int signal, int milliseconds) {
  capture.store(&c);
  if (::syscall(SYS_tgkill, ::getpid(), c.thread, signal) != 0) return false;
  const timespec pause{0, 1'000'000};
  for (int i = 0; i < milliseconds && !c.done.load(); ++i) ::nanosleep(&pause, nullptr);
  return c.done.load();
}

// Takes no lock and no memory once the first thread has been stopped.
void copy_stacks(std::vector<Record>& records, std::vector<char>& stacks, const std::string& maps) {
  const std::vector<Mapping> ranges = mappings(maps, 0, 'r');
  static std::array<Capture, most_threads> captures;  // stays: a thread may answer late
  const int signal = SIGRTMIN + 4;
  struct sigaction action = {};
  sigfillset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  action.sa_sigaction = on_copy_signal;
  ::sigaction(signal, &action, nullptr);
  const auto self = static_cast<pid_t>(::syscall(SYS_gettid));
  int left = copy_milliseconds;
  for (size_t i = 0; i < records.size() && left > 0; ++i) {
    Record& r = records[i];
    Capture& c = captures[i];
    if (r.id == self) continue;
    c.thread = static_cast<pid_t>(r.id);
    if (!stop(c, signal, std::min(left, thread_milliseconds))) {
      left -= thread_milliseconds;
      continue;
    }
    std::copy(c.registers.begin(), c.registers.end(), r.registers);
    r.copied = 1;
    r.begin = c.registers[stack_pointer];
    for (const Mapping& range : ranges) {
      if (r.begin < range.begin || r.begin >= range.end) continue;
      uint64_t end = range.end;
      const auto arguments = reinterpret_cast<uint64_t>(__libc_stack_end);  // NOLINT: an address
      if (arguments > r.begin && arguments < end) end = arguments;
      r.stack_bytes = static_cast<uint32_t>(std::min<uint64_t>(end - r.begin, most_stack_bytes));
      std::memcpy(stacks.data() + i * most_stack_bytes, reinterpret_cast<const void*>(r.begin),  // NOLINT
                  r.stack_bytes);
    }
  }
}
#else
void copy_stacks(std::vector<Record>&, std::vector<char>&, const std::string&) {}
#endif

bool write_all(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd, at, bytes);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

std::string stacks_name(int rank, int attempt) {
  return fmt::format("rank-{}.attempt-{}.stacks", rank, attempt);
}

std::vector<ThreadStack> threads_of(int64_t pid) {
  std::vector<ThreadStack> out;
  std::error_code error;
  const std::string tasks = fmt::format("/proc/{}/task", pid);
  for (const auto& entry : std::filesystem::directory_iterator(tasks, error)) {
    ThreadStack t;
    const std::string directory = entry.path().string(), id = entry.path().filename().string();
    std::from_chars(id.data(), id.data() + id.size(), t.id);
    t.name = line_in(directory + "/comm");
    const std::string stat = line_in(directory + "/stat");
    const size_t bracket = stat.rfind(')');
    if (t.id == 0 || bracket == std::string::npos || bracket + 2 >= stat.size()) continue;  // has ended
    t.state = stat[bracket + 2];
    t.wchan = line_in(directory + "/wchan");
    if (t.wchan == "0") t.wchan.clear();
    t.syscall = line_in(directory + "/syscall");
    out.push_back(std::move(t));
  }
  std::sort(out.begin(), out.end(), [](const ThreadStack& a, const ThreadStack& b) { return a.id < b.id; });
  if (out.size() > most_threads) out.resize(most_threads);
  return out;
}

void save_stacks(const std::string& path, int rank, int attempt, int64_t pid) {
  const std::vector<ThreadStack> threads = threads_of(pid);
  const std::string maps = text_in(fmt::format("/proc/{}/maps", pid), most_maps);
  std::vector<Record> records(threads.size());
  std::vector<char> stacks(threads.size() * most_stack_bytes);
  for (size_t i = 0; i < threads.size(); ++i) {
    records[i].id = threads[i].id;
    records[i].state = threads[i].state;
    put(records[i].name, threads[i].name);
    put(records[i].wchan, threads[i].wchan);
    put(records[i].syscall, threads[i].syscall);
  }
  Header header{};
  std::memcpy(header.magic, magic, sizeof magic);
  header.record_bytes = sizeof(Record);
  header.threads = static_cast<uint32_t>(records.size());
  header.maps_bytes = static_cast<uint32_t>(maps.size());
  header.rank = rank;
  header.attempt = attempt;
  header.pid = pid;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) fail(Exit::io, "{}: cannot create: {}", path, std::strerror(errno));
  if (pid == ::getpid()) copy_stacks(records, stacks, maps);
  bool written =
      write_all(fd, &header, sizeof header) && write_all(fd, records.data(), records.size() * sizeof(Record));
  for (size_t i = 0; i < records.size() && written; ++i)
    written = write_all(fd, stacks.data() + i * most_stack_bytes, records[i].stack_bytes);
  written = written && write_all(fd, maps.data(), maps.size());
  ::close(fd);
  if (!written) ::unlink(path.c_str());
}

ProcessStacks read_stacks(const std::string& path) {
  const std::string text = read_file(path, most_file_bytes, File::Links::refuse);
  const auto refuse = [&](std::string_view what) {
    fail(Exit::data, "{}: {}. Fix: read it with the version of nrl-train that wrote it", path, what);
  };
  size_t at = 0;
  const auto take = [&](void* to, size_t bytes) {
    if (text.size() - at < bytes) refuse("is a damaged file of stacks");
    std::memcpy(to, text.data() + at, bytes);
    at += bytes;
  };
  Header header;
  if (text.size() < sizeof header || std::memcmp(text.data(), magic, sizeof magic) != 0)
    refuse("is not a file of stacks");
  take(&header, sizeof header);
  if (header.record_bytes != sizeof(Record)) refuse("is a file of stacks of another version");
  if (header.threads > most_threads || header.maps_bytes > most_maps || header.rank < 0 ||
      header.attempt < 0 || header.pid < 0)
    refuse("is a damaged file of stacks");
  ProcessStacks out{
      .rank = header.rank, .attempt = header.attempt, .pid = header.pid, .threads = {}, .maps = {}};
  std::vector<Record> records(header.threads);
  take(records.data(), records.size() * sizeof(Record));
  for (const Record& r : records) {
    if (r.stack_bytes > most_stack_bytes) refuse("is a damaged file of stacks");
    ThreadStack t{.id = r.id,
                  .name = printable(r.name),
                  .state = r.state > ' ' && r.state <= '~' ? r.state : '?',
                  .wchan = printable(r.wchan),
                  .syscall = printable(r.syscall),
                  .copied = r.copied == 1,
                  .begin = r.begin,
                  .bytes = std::string(r.stack_bytes, '\0')};
    std::copy(std::begin(r.registers), std::end(r.registers), t.registers.begin());
    take(t.bytes.data(), t.bytes.size());
    out.threads.push_back(std::move(t));
  }
  out.maps.resize(header.maps_bytes);
  take(out.maps.data(), out.maps.size());
  if (at != text.size()) refuse("is a damaged file of stacks");
  return out;
}

std::vector<Mapping> executable_mappings(std::string_view maps) {
  return mappings(maps, 2, 'x');
}

}  // namespace nrl::diagnosis
