#pragma once
// State of a node and of this process from /proc and /sys. A number that the system does not have, or that
// may not be read, is absent, never 0.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nrl::monitor {

/// Named numbers, in the base units of their names: "mem_bytes", "cpu" (a fraction), "power_watts".
using Values = std::vector<std::pair<std::string, double>>;

// Parsers of the kernel's files, pure functions of the text. Nothing where it has another form.

/// Processor time of all cores since boot, in ticks.
struct CpuTimes {
  uint64_t busy = 0, total = 0;
};
std::optional<CpuTimes> parse_proc_stat(std::string_view text);  ///< /proc/stat

/// The value of a line "NAME: NUMBER" or "NAME: NUMBER kB", the latter in bytes: of /proc/meminfo,
/// /proc/self/status, /proc/self/io.
std::optional<uint64_t> parse_field(std::string_view text, std::string_view name);

/// Bytes since boot.
struct Traffic {
  uint64_t received = 0, sent = 0;
};
std::optional<Traffic> parse_net_dev(std::string_view text);  ///< /proc/net/dev, without the loopback device

std::optional<uint64_t> parse_number(std::string_view text);  ///< a file that holds one number

/// Microjoules from `before` to `now` of a RAPL counter, which starts again at 0 above `range`.
uint64_t energy_difference(uint64_t before, uint64_t now, uint64_t range);

/// Samples a node and this process. Rates and the busy fraction cover the time since the previous sample, so
/// the first one has none. Not thread-safe.
class HostStats {
 public:
  /// `directory`: its file system's free space is sampled; empty: none. `root`: of /proc and /sys, for tests.
  explicit HostStats(std::string directory, std::string root = "");

  /// `now`: monotonic seconds. Numbers of the node: "cpu", "mem_bytes", "mem_total_bytes",
  /// "net_received_bytes_per_s", "net_sent_bytes_per_s", "ib_received_bytes_per_s", "ib_sent_bytes_per_s",
  /// "memory_corrected_errors", "memory_uncorrected_errors" (EDAC, since the start of the system),
  /// "energy_joules" (of its processors since the first sample), "disk_free_bytes".
  Values node(double now);
  /// Numbers of this process: "rss_bytes", "threads", "open_files", "read_bytes", "written_bytes" (since its
  /// start).
  Values process() const;

 private:
  std::optional<Traffic> infiniband() const;
  void add_rates(Values& values, const std::string& name, std::optional<Traffic> now, double seconds,
                 std::optional<Traffic>& before);
  std::optional<double> energy();

  std::string directory_, root_;
  std::optional<double> last_;
  std::optional<CpuTimes> cpu_;
  std::optional<Traffic> net_, ib_;
  std::map<std::string, uint64_t> rapl_;  // microjoules at the previous sample, by zone
  double joules_ = 0;
};

}  // namespace nrl::monitor
