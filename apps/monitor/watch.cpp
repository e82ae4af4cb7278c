#include "apps/monitor/watch.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/monitor/chart.h"
#include "apps/monitor/format.h"
#include "apps/monitor/metrics.h"
#include "apps/monitor/timers.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/io/atomic_file.h"

namespace nrl::monitor {
namespace {

constexpr size_t max_watched_line = size_t{1} << 20;
constexpr size_t shown_alerts = 5, shown_ranks = 8, shown_gpus = 16;
constexpr int narrow = 40;  // columns below which there are no charts
constexpr double quiet_s = 60;

double get(const std::map<std::string, double>& values, const char* name) {
  const auto found = values.find(name);
  return found == values.end() ? NAN : found->second;
}

double get(const Values& values, std::string_view name) {
  for (const auto& [key, value] : values)
    if (key == name) return value;
  return NAN;
}

// Fields that have a value, separated by two blanks.
class Fields {
 public:
  template <class... Args>
  void add(double value, fmt::format_string<double&, Args&...> text, Args&&... args) {
    if (std::isfinite(value)) text_ += (text_.empty() ? "" : "  ") + fmt::format(text, value, args...);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string used_text(double used, double total) {
  if (!std::isfinite(used)) return "";
  return std::isfinite(total) ? fmt::format("{:.1f} of {:.1f} GB", used * 1e-9, total * 1e-9)
                              : fmt::format("{:.1f} GB", used * 1e-9);
}

void add_line(std::vector<std::string>& lines, std::string_view text, int columns) {
  // Columns of a terminal are counted in characters; texts of files are made of those that take one.
  const std::string safe = masked(text);
  lines.push_back(
      safe.substr(0, complete_utf8(std::string_view(safe).substr(0, static_cast<size_t>(columns)))));
}

void add_run(std::vector<std::string>& lines, const WatchedRun& run, int columns, double now) {
  const auto& last = run.last;
  std::string head = run.history.name;
  if (run.last_time == 0) {
    add_line(lines, head + "  no steps yet" + (run.ending.empty() ? "" : ", " + run.ending), columns);
    return;
  }
  const double step = static_cast<double>(run.history.last_step);
  head += fmt::format("  step {}", run.history.last_step);
  if (run.max_steps && *run.max_steps > 0) {
    const auto most = static_cast<double>(*run.max_steps);
    head += fmt::format("/{}  {:.1f} %", *run.max_steps, 100 * step / most);
    const double ms = get(last, "step_ms");
    if (std::isfinite(ms) && step < most && now - run.last_time < quiet_s)
      head += "  eta " + human_duration((most - step) * ms * 1e-3);
  }
  if (now - run.last_time >= quiet_s)
    head += fmt::format("  last row {} ago", human_duration(now - run.last_time));
  if (!run.ending.empty()) head += "  " + run.ending;
  add_line(lines, head, columns);

  Fields values;
  values.add(get(last, "loss"), "loss {:.4f}");
  values.add(get(last, "tokens_per_s"), "{:.0f} tok/s");
  values.add(get(last, "val_loss"), "val_loss {:.4f}");
  values.add(get(last, "grad_norm"), "gnorm {:.3f}");
  values.add(get(last, "lr"), "lr {:.2e}");
  values.add(100 * get(last, "mfu"), "mfu {:.1f} %");
  add_line(lines, "  " + values.text(), columns);

  const double total = get(last, "step_ms"), data = get(last, "data_ms"), waiting = get(last, "comm_ms");
  Fields kernels, parts;
  kernels.add(get(last, "gemm_ms"), "gemm {:.1f}");
  kernels.add(get(last, "attention_ms"), "attention {:.1f}");
  parts.add(total - data - waiting, "computing {:.1f} ({})", kernels.text());
  parts.add(waiting, "communicating {:.1f}");
  parts.add(data, "data {:.1f}");
  if (std::isfinite(total))
    add_line(lines, fmt::format("  step {:.1f} ms: {}", total, parts.text()), columns);
  if (!run.history.layers.empty()) {
    const LayerRow& layers = run.history.layers.back();
    add_line(lines, fmt::format("  layers, step {}", layers.step), columns);
    std::string text = text_lines(layers.table);
    for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1))
      add_line(lines, "    " + text.substr(0, end), columns);
  }
  if (run.history.skipped > 0 || run.unreadable > 0)
    add_line(lines,
             fmt::format("  {} skipped, {} not readable", counted(run.history.skipped, "step"),
                         counted(run.unreadable, "line")),
             columns);
}

void add_node(std::vector<std::string>& lines, const NodeSample& node, int columns) {
  Fields fields;
  fields.add(100 * get(node.values, "cpu"), "cpu {:.0f} %");
  std::string text = fmt::format("  {}  {}", node.host, fields.text());
  if (const std::string memory =
          used_text(get(node.values, "mem_bytes"), get(node.values, "mem_total_bytes"));
      !memory.empty())
    text += "  memory " + memory;
  Fields rates;
  rates.add(1e-6 * get(node.values, "net_received_bytes_per_s"), "net in {:.1f} MB/s");
  rates.add(1e-6 * get(node.values, "net_sent_bytes_per_s"), "out {:.1f}");
  rates.add(1e-6 * get(node.values, "ib_received_bytes_per_s"), "ib in {:.1f} MB/s");
  rates.add(1e-6 * get(node.values, "ib_sent_bytes_per_s"), "out {:.1f}");
  rates.add(1e-9 * get(node.values, "disk_free_bytes"), "disk {:.0f} GB free");
  if (!rates.text().empty()) text += "  " + rates.text();
  add_line(lines, text, columns);
  for (size_t gpu = 0; gpu < shown_gpus; ++gpu) {
    const auto of = [&](const char* name) { return get(node.values, fmt::format("gpu.{}.{}", gpu, name)); };
    Fields state;
    state.add(100 * of("util"), "{:.0f} % busy");
    const std::string memory = used_text(of("mem_bytes"), of("mem_total_bytes"));
    if (state.text().empty() && memory.empty()) break;
    Fields more;
    more.add(of("power_watts"), "{:.0f} W");
    more.add(of("clock_mhz"), "{:.0f} MHz");
    more.add(of("temperature_celsius"), "{:.0f} C");
    add_line(lines, fmt::format("    gpu {}  {}  {}  {}", gpu, state.text(), memory, more.text()), columns);
  }
  for (const std::string& note : node.notes) add_line(lines, "    " + note, columns);
}

void add_ranks(std::vector<std::string>& lines, const Telemetry& t, int columns) {
  if (t.ranks.size() < 2) return;
  std::vector<const RankSample*> order;
  for (const RankSample& rank : t.ranks) order.push_back(&rank);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return a->score < b->score; });
  for (size_t i = 0; i < std::min(order.size(), shown_ranks); ++i) {
    const RankSample& r = *order[i];
    add_line(lines,
             fmt::format("  rank {}  score {:.2f}{}  own {:.1f} ms  waiting {:.1f} ms", r.rank, r.score,
                         r.score < slower_score ? " slow"
                         : r.score < slow_score ? " late"
                                                : "",
                         r.own_ms, r.waiting_ms),
             columns);
  }
  if (order.size() > shown_ranks)
    add_line(lines, fmt::format("  and {} more ranks", order.size() - shown_ranks), columns);
}

void add_chart(std::vector<std::string>& lines, std::span<const RunHistory> runs, Curve RunHistory::*curve,
               int columns, int height) {
  std::string chart = text_chart(runs, curve, std::clamp(columns - 16, 10, 120), height);
  if (chart.empty()) return;
  for (size_t end; (end = chart.find('\n')) != std::string::npos; chart.erase(0, end + 1))
    add_line(lines, chart.substr(0, end), columns);
}

}  // namespace

void LineFollower::read(const std::function<void(std::string_view)>& line,
                        const std::function<void()>& restart) {
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  const File file(fd, path_);
  struct stat now = {};
  if (::fstat(fd, &now) != 0 || !S_ISREG(now.st_mode)) return;
  const auto size = static_cast<uint64_t>(now.st_size);
  if (inode_ != 0 && (now.st_ino != inode_ || size < offset_)) {
    offset_ = 0;
    rest_.clear();
    skipping_ = false;
    restart();
  }
  inode_ = now.st_ino;
  std::array<char, 65536> buffer;
  ssize_t n = 0;
  while ((n = ::pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(offset_))) > 0) {
    offset_ += static_cast<uint64_t>(n);
    std::string_view text(buffer.data(), static_cast<size_t>(n));
    for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
      if (!std::exchange(skipping_, false)) {
        rest_ += text.substr(0, end);
        line(rest_);
      }
      rest_.clear();
    }
    if (!skipping_) rest_ += text;
    if (rest_.size() <= max_watched_line) continue;
    skipping_ = true;
    rest_.clear();
  }
}

WatchedRun::WatchedRun(const std::string& directory)
    : directory_(directory),
      metrics_(join_path(directory, metrics_file)),
      telemetry_(join_path(directory, telemetry_file)),
      alerts_(join_path(directory, alerts_file)) {
  if (!is_directory(directory))
    fail(Exit::no_input, "{}: no such directory. Fix: give the logger.log_dir of a run", directory);
  history.name = directory;
}

void WatchedRun::update() {
  JsonLimits limits;
  limits.text_bytes = max_watched_line;
  const auto parsed = [&](const std::function<void(const JsonValue&)>& use) {
    return [this, use, limits](std::string_view line) {
      try {
        use(parse_json(line, directory_, limits));
      } catch (const Error&) {
        ++unreadable;
      }
    };
  };
  metrics_.read(parsed([&](const JsonValue& row) {
                  add_row(history, row);
                  last_time = row.get_double("time", last_time);
                  if (row.contains("loss")) last.clear();
                  for (const JsonMember& member : row.members())
                    if (member.value.is_number()) last[member.key] = member.value.as_double();
                }),
                [&] {
                  history = RunHistory{.name = history.name};
                  last.clear();
                });
  telemetry_.read(parsed([&](const JsonValue& row) { telemetry = telemetry_from(row); }),
                  [&] { telemetry.reset(); });
  alerts_.read(parsed([&](const JsonValue& row) {
                 alerts.push_back(alert_from(row));
                 if (alerts.size() > shown_alerts) alerts.pop_front();
               }),
               [&] { alerts.clear(); });
  ending.clear();
  const std::string file = join_path(directory_, "run.json");
  if (!path_exists(file)) return;
  try {
    const JsonValue run = read_json(file, limits);
    const JsonValue::Array& sessions = run.at("sessions").items();
    if (sessions.empty()) return;
    const JsonValue* code = sessions.back().find("exit");
    const bool quiet = last_time > 0 && std::abs(wall_seconds() - last_time) >= quiet_s;
    if (code && !code->is_null())
      ending = fmt::format("ended, exit {}", code->as_int());
    else if (quiet)
      ending = "no end of session in run.json";
  } catch (const Error&) {
    ending = "run.json is not readable";
  }
}

std::string watch_text(std::span<const WatchedRun> runs, int columns, int rows, double now) {
  columns = std::max(columns, 10);
  std::vector<std::string> lines;
  for (const WatchedRun& run : runs) add_run(lines, run, columns, now);
  if (columns >= narrow) {
    std::vector<RunHistory> histories;
    for (const WatchedRun& run : runs) histories.push_back(run.history);
    add_chart(lines, histories, &RunHistory::loss, columns, 8);
    add_chart(lines, histories, &RunHistory::tokens_per_s, columns, 5);
  }
  for (const WatchedRun& run : runs) {
    if (!run.telemetry) continue;
    add_line(lines,
             fmt::format("machine{}, step {}", runs.size() > 1 ? " of " + run.history.name : "",
                         run.telemetry->step),
             columns);
    for (const NodeSample& node : run.telemetry->nodes) add_node(lines, node, columns);
    add_ranks(lines, *run.telemetry, columns);
  }
  for (const WatchedRun& run : runs) {
    if (run.alerts.empty()) continue;
    add_line(lines, "alerts" + (runs.size() > 1 ? " of " + run.history.name : std::string()), columns);
    for (const Alert& a : run.alerts)
      add_line(lines,
               fmt::format("  {} step {}  {}{}", clock_text(a.time), a.step,
                           a.cleared                         ? ""
                           : a.level == AlertLevel::critical ? "CRITICAL "
                                                             : "",
                           a.message),
               columns);
  }
  if (rows > 0 && lines.size() > static_cast<size_t>(rows)) lines.resize(static_cast<size_t>(rows));
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

}  // namespace nrl::monitor
