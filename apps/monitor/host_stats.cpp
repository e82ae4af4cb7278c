#include "apps/monitor/host_stats.h"

#include <array>
#include <charconv>
#include <cstddef>

#include <dirent.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "core/device/cpu/edac.h"

namespace nrl::monitor {
namespace {

constexpr double infiniband_word = 4;  // bytes that its counters count as one

// Files of /proc have no size. Empty if the file cannot be read.
std::string text_of(const std::string& path) {
  std::string text;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  std::array<char, 8192> buffer;
  for (ssize_t n; text.size() < (size_t{1} << 20) && (n = ::read(fd, buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), static_cast<size_t>(n));
  ::close(fd);
  return text;
}

// Without "." and ".."; empty if there is no such directory.
std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  DIR* directory = ::opendir(path.c_str());
  if (!directory) return names;
  while (const dirent* entry = ::readdir(directory))
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  ::closedir(directory);
  return names;
}

std::string_view next_line(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

std::optional<uint64_t> next_number(std::string_view& text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  text.remove_prefix(begin);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return {};
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

void add(Values& values, const char* name, std::optional<uint64_t> value) {
  if (value) values.emplace_back(name, static_cast<double>(*value));
}

}  // namespace

std::optional<CpuTimes> parse_proc_stat(std::string_view text) {
  std::string_view line = next_line(text);
  if (!line.starts_with("cpu ")) return {};
  line.remove_prefix(4);
  CpuTimes times;
  int field = 0;
  // user, nice, system, idle, iowait, irq, softirq, steal. Guests are a part of user.
  for (; field < 8; ++field) {
    const auto ticks = next_number(line);
    if (!ticks) break;
    times.total += *ticks;
    if (field != 3 && field != 4) times.busy += *ticks;
  }
  return field >= 4 ? std::optional(times) : std::nullopt;
}

std::optional<uint64_t> parse_field(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    std::string_view line = next_line(text);
    if (!line.starts_with(name) || line.substr(name.size(), 1) != ":") continue;
    line.remove_prefix(name.size() + 1);
    const auto value = next_number(line);
    if (!value) return {};
    if (line.starts_with(" kB"))
      return *value > UINT64_MAX / 1024 ? std::nullopt : std::optional(*value * 1024);
    return value;
  }
  return {};
}

std::optional<Traffic> parse_net_dev(std::string_view text) {
  std::optional<Traffic> sum;
  while (!text.empty()) {
    std::string_view line = next_line(text);
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) continue;  // the head of the table
    const size_t begin = line.find_first_not_of(' ');
    if (line.substr(begin, colon - begin) == "lo") continue;
    line.remove_prefix(colon + 1);
    std::array<uint64_t, 9> fields{};
    for (uint64_t& field : fields) {
      const auto value = next_number(line);
      if (!value) return {};
      field = *value;
    }
    if (!sum) sum.emplace();
    sum->received += fields[0];
    sum->sent += fields[8];
  }
  return sum;
}

std::optional<uint64_t> parse_number(std::string_view text) {
  const auto value = next_number(text);
  return text.find_first_not_of(" \t\n") == std::string_view::npos ? value : std::nullopt;
}

uint64_t energy_difference(uint64_t before, uint64_t now, uint64_t range) {
  if (now >= before) return now - before;
  return range >= before ? range - before + now : 0;
}

HostStats::HostStats(std::string directory, std::string root)
    : directory_(std::move(directory)), root_(std::move(root)) {}

std::optional<Traffic> HostStats::infiniband() const {
  std::optional<Traffic> sum;
  const std::string adapters = root_ + "/sys/class/infiniband";
  for (const std::string& adapter : names_in(adapters)) {
    const std::string ports = adapters + "/" + adapter + "/ports";
    for (const std::string& port : names_in(ports)) {
      const std::string counters = ports + "/" + port + "/counters/";
      const auto received = parse_number(text_of(counters + "port_rcv_data"));
      const auto sent = parse_number(text_of(counters + "port_xmit_data"));
      if (!received || !sent) continue;
      if (!sum) sum.emplace();
      sum->received += *received;
      sum->sent += *sent;
    }
  }
  return sum;
}

std::optional<double> HostStats::energy() {
  const std::string zones = root_ + "/sys/class/powercap";
  bool any = false;
  for (const std::string& zone : names_in(zones)) {
    // Packages, "intel-rapl:0"; their parts, "intel-rapl:0:1", are contained in them.
    const size_t colon = zone.find(':');
    if (colon == std::string::npos || zone.find(':', colon + 1) != std::string::npos) continue;
    const auto now = parse_number(text_of(zones + "/" + zone + "/energy_uj"));
    const auto range = parse_number(text_of(zones + "/" + zone + "/max_energy_range_uj"));
    if (!now || !range) continue;
    any = true;
    const auto [before, first] = rapl_.emplace(zone, *now);
    if (!first) joules_ += static_cast<double>(energy_difference(before->second, *now, *range)) * 1e-6;
    before->second = *now;
  }
  return any ? std::optional(joules_) : std::nullopt;
}

void HostStats::add_rates(Values& values, const std::string& name, std::optional<Traffic> now, double seconds,
                          std::optional<Traffic>& before) {
  // A device that went away or was reset makes the sum fall.
  if (now && before && seconds > 0 && now->received >= before->received && now->sent >= before->sent) {
    values.emplace_back(name + "_received_bytes_per_s",
                        static_cast<double>(now->received - before->received) / seconds);
    values.emplace_back(name + "_sent_bytes_per_s", static_cast<double>(now->sent - before->sent) / seconds);
  }
  before = now;
}

Values HostStats::node(double now) {
  Values values;
  const double seconds = last_ ? now - *last_ : 0;
  const auto cpu = parse_proc_stat(text_of(root_ + "/proc/stat"));
  if (cpu && cpu_ && cpu->total > cpu_->total && cpu->busy >= cpu_->busy)
    values.emplace_back(
        "cpu", static_cast<double>(cpu->busy - cpu_->busy) / static_cast<double>(cpu->total - cpu_->total));
  cpu_ = cpu;
  const std::string memory = text_of(root_ + "/proc/meminfo");
  const auto total = parse_field(memory, "MemTotal"), available = parse_field(memory, "MemAvailable");
  if (total && available && *available <= *total) add(values, "mem_bytes", *total - *available);
  add(values, "mem_total_bytes", total);
  add_rates(values, "net", parse_net_dev(text_of(root_ + "/proc/net/dev")), seconds, net_);
  add_rates(values, "ib", infiniband(), seconds / infiniband_word, ib_);
  if (const auto errors = read_edac(root_)) {
    values.emplace_back("memory_corrected_errors", static_cast<double>(errors->corrected));
    values.emplace_back("memory_uncorrected_errors", static_cast<double>(errors->uncorrected));
  }
  if (const auto joules = energy()) values.emplace_back("energy_joules", *joules);
  if (struct statvfs space{}; !directory_.empty() && ::statvfs(directory_.c_str(), &space) == 0)
    values.emplace_back("disk_free_bytes",
                        static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize));
  last_ = now;
  return values;
}

Values HostStats::process() const {
  Values values;
  const std::string self = root_ + "/proc/self", status = text_of(self + "/status");
  add(values, "rss_bytes", parse_field(status, "VmRSS"));
  add(values, "threads", parse_field(status, "Threads"));
  // One of the entries is the directory that is being read.
  if (const size_t files = names_in(self + "/fd").size(); files > 0) add(values, "open_files", files - 1);
  const std::string io = text_of(self + "/io");
  add(values, "read_bytes", parse_field(io, "read_bytes"));
  add(values, "written_bytes", parse_field(io, "write_bytes"));
  return values;
}

}  // namespace nrl::monitor
