#include "apps/monitor/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <utility>

#include "apps/monitor/statistics.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::monitor {
namespace {

constexpr double gib = 1024.0 * 1024 * 1024;

std::string paint(std::string_view text, const char* code, const TextStyle& style) {
  if (!style.color || text.empty()) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

// A fixed number of digits; scientific notation for values that would not fit their column.
std::string number(double value, int digits) {
  return std::abs(value) < 1e5 || !std::isfinite(value) ? decimal(value, digits)
                                                        : fmt::format("{:.3e}", value);
}

std::string percent(double fraction) {
  return fmt::format("{:.1f}%", 100 * fraction);
}

double fraction_of(double part, double whole) {
  return whole > 0 ? part / whole : 0;
}

int digits_of(int64_t value) {
  return static_cast<int>(fmt::formatted_size("{}", value));
}

// "412k": three significant digits.
std::string short_count(double value) {
  static constexpr std::array units = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < units.size()) value /= 1000, ++unit;
  const int digits = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}{}", value, digits, units[unit]);
}

// A part of a line with its width in columns (without escape sequences).
struct Piece {
  std::string text;
  int width;
};

Piece ascii(std::string text) {
  const int width = static_cast<int>(text.size());
  return {std::move(text), width};
}

// `text` followed by an outlier mark.
Piece marked(std::string text, std::string_view mark, double distance, const TextStyle& style) {
  const int width = static_cast<int>(text.size() + mark.size());
  return {text + paint(mark, std::isnan(distance) ? "31" : "33", style), width};
}

// Fields with a greater `rank` are omitted first; those with rank 0 never.
struct Field {
  Piece piece;
  int rank = 0;
  int gap = 2;  // blanks before the field
};

// Joins the fields, omitting the least important ones until the line fits into `columns` (0: unlimited).
std::string fitted(std::vector<Field> fields, int columns) {
  std::erase_if(fields, [](const Field& f) { return f.piece.width == 0; });
  int width = 0;
  for (const Field& f : fields) width += f.gap + f.piece.width;
  while (columns > 0 && width > columns) {
    const auto last = std::ranges::max_element(fields, {}, &Field::rank);
    if (last == fields.end() || last->rank == 0) break;
    width -= last->gap + last->piece.width;
    fields.erase(last);
  }
  std::string line;
  for (const Field& f : fields) line += std::string(static_cast<size_t>(f.gap), ' ') + f.piece.text;
  return line;
}

// Splits off a line of at most `width` columns: the end of the line in `text`, and the begin of the next one.
std::pair<size_t, size_t> line_break(std::string_view text, size_t width) {
  if (text.size() <= width) return {text.size(), text.size()};
  size_t end = text.rfind("  ", width);
  if (end == std::string_view::npos || end < width / 3) end = text.rfind(' ', width);
  if (end == std::string_view::npos || end == 0) end = text.find(' ', width);  // long paths are not split
  if (end == std::string_view::npos) return {text.size(), text.size()};
  const size_t next = std::min(text.find_first_not_of(' ', end), text.size());
  while (end > 0 && text[end - 1] == ' ') --end;
  return {end, next};
}

Piece gauge(double fraction, int cells, const TextStyle& style) {
  fraction = std::clamp(fraction, 0.0, 1.0);
  std::string filled;
  int used = 0;
  if (style.unicode) {
    static constexpr std::array eighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const int parts = static_cast<int>(fraction * cells * 8);
    for (; used < parts / 8; ++used) filled += "█";
    if (parts % 8 != 0) filled += eighths[parts % 8], ++used;
  } else {
    used = static_cast<int>(fraction * cells);
    filled = std::string(static_cast<size_t>(used), '#');
  }
  const auto rest = static_cast<size_t>(cells - used);
  return {paint(filled, "36", style) + std::string(rest, style.unicode ? ' ' : '.'), cells};
}

}  // namespace

std::string clock_text(double time) {
  const auto seconds = static_cast<std::time_t>(std::floor(time));
  std::tm parts = {};
  ::localtime_r(&seconds, &parts);
  return fmt::format("{:02}:{:02}:{:02}", parts.tm_hour, parts.tm_min, parts.tm_sec);
}

std::string compact_count(double value) {
  if (value < 999.5) return fmt::format("{:.0f}", value);
  if (value < 999.95e3) return fmt::format("{:.1f}k", value / 1e3);
  if (value < 999.995e6) return fmt::format("{:.2f}M", value / 1e6);
  return fmt::format("{:.2f}G", value / 1e9);
}

std::string step_line(const StepFacts& f, double time, const StepMarks& marks, const TextStyle& style,
                      int columns) {
  std::vector<Field> fields;
  auto add = [&](int rank, std::string text, int gap = 2) {
    fields.push_back({ascii(std::move(text)), rank, gap});
  };
  auto add_marked = [&](int rank, std::string text, double distance) {
    fields.push_back({marked(std::move(text), outlier_mark(distance), distance, style), rank});
  };
  add(0, fmt::format("{} step {:>{}}/{}", clock_text(time), f.step, digits_of(f.max_steps), f.max_steps), 0);
  add_marked(0, "loss " + number(f.loss, 4), marks.loss);
  add(4, fmt::format("lr {:.2e}", f.lr));
  add_marked(2, "gnorm " + number(f.grad_norm, 3), marks.grad_norm);
  for (const Metric& metric : f.metrics)
    if (!metric.brief.empty()) add(4, fmt::format("{} {}", metric.brief, number(metric.value, 3)));
  if (f.router) add(6, fmt::format("load {:.2f}", f.router->load));
  add(1, compact_count(f.tokens_per_s) + " tok/s");
  if (f.world_size > 1) add(7, fmt::format("({}/rank)", compact_count(f.tokens_per_s / f.world_size)), 1);
  if (f.mfu) add(3, "mfu " + percent(*f.mfu));
  if (!f.fp8.empty()) add(8, f.fp8);
  if (f.mem_bytes > 0) {
    const auto bytes = static_cast<double>(f.mem_bytes);
    add(6, bytes >= gib ? fmt::format("mem {:.1f}G", bytes / gib)
                        : fmt::format("mem {:.1f}M", bytes / gib * 1024));
  }
  add(5, fmt::format("{:.3f}s", f.step_ms / 1e3));
  add(8, "data " + percent(fraction_of(f.data_ms, f.step_ms)));
  if (f.eta_s >= 0) add(0, "eta " + human_duration(f.eta_s));
  if (f.loss_scale) add(6, fmt::format("scale {:g}", *f.loss_scale));
  if (f.skipped) fields.push_back({{paint("skipped", "33", style), 7}, 0});
  return fitted(std::move(fields), columns);
}

std::string event_line(double time, std::string_view kind, int64_t step, int64_t max_steps,
                       std::string_view text) {
  const int width = digits_of(std::max(max_steps, step));
  const auto gap = static_cast<size_t>(width) + 3;  // "/20000  " of a step line
  return fmt::format("{} {:<4} {:>{}}{}{}", clock_text(time), kind, step, width, std::string(gap, ' '),
                     message_text(text));
}

std::string eval_text(const EvalFacts& facts) {
  std::string text;
  for (const auto& [name, loss] : facts.losses) text += fmt::format("{} {}  ", name, number(loss, 4));
  for (const Metric& metric : facts.metrics)
    if (!metric.brief.empty()) text += fmt::format("{} {}  ", metric.brief, number(metric.value, 3));
  return text + fmt::format("{:.1f}s", facts.seconds);
}

std::string sparkline(std::span<const double> values, const TextStyle& style) {
  if (!style.unicode) return {};
  static constexpr std::array levels = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  double least = INFINITY, greatest = -INFINITY;
  for (double v : values) {
    if (!std::isfinite(v)) continue;
    least = std::min(least, v);
    greatest = std::max(greatest, v);
  }
  std::string out;
  for (double v : values) {
    if (!std::isfinite(v)) {
      out += ' ';
      continue;
    }
    // Halved first, because the difference of two finite numbers may overflow.
    const double range = greatest / 2 - least / 2;
    const double height = range > 0 ? (v / 2 - least / 2) / range : 0;
    out += levels[static_cast<size_t>(std::clamp(height * 7 + 0.5, 0.0, 7.0))];
  }
  return out;
}

std::string bar_line(const StepFacts& f, std::span<const double> losses, const StepMarks& marks,
                     int64_t checkpoint_step, int columns, const TextStyle& style) {
  const int budget = std::max(1, columns - 1);
  const double done = fraction_of(static_cast<double>(f.step), static_cast<double>(f.max_steps));
  const Piece bar = gauge(done, std::clamp(columns / 5, 4, 32), style);

  std::string line;
  int width = 0;
  const std::string done_text = percent(done);
  const Piece head = {"train  " + bar.text + fmt::format(" {:>6}", done_text), 7 + bar.width + 1 + 6};
  if (head.width <= budget) {
    line = head.text;
    width = head.width;
  } else {
    line = done_text.substr(0, static_cast<size_t>(budget));
    width = static_cast<int>(line.size());
  }

  // The progress bar is too narrow to show the outlier's distance.
  auto value = [&](std::string text, double distance) {
    return marked(std::move(text), distance == 0 ? "" : "!", distance, style);
  };
  std::vector<Field> fields = {
      {ascii(fmt::format("{}/{}", f.step, f.max_steps)), 1},
      {value("loss " + number(f.loss, 3), marks.loss), 2},
      {{sparkline(losses, style), style.unicode ? static_cast<int>(losses.size()) : 0}, 5, 1},
      {value("gnorm " + number(f.grad_norm, 2), marks.grad_norm), 6},
      {ascii(short_count(f.tokens_per_s) + " tok/s"), 4}};
  if (f.mfu) fields.push_back({ascii("mfu " + percent(*f.mfu)), 7});
  if (f.eta_s >= 0) fields.push_back({ascii("eta " + human_duration(f.eta_s)), 3});
  if (checkpoint_step >= 0) fields.push_back({ascii(fmt::format("ckpt {}", checkpoint_step)), 8});
  return line + fitted(std::move(fields), std::max(1, budget - width));
}

std::string labeled_lines(const std::vector<std::pair<std::string, std::string>>& rows, int columns) {
  size_t column = 8;
  for (const auto& row : rows) column = std::max(column, row.first.size());
  column += 2;
  const auto width = static_cast<size_t>(std::max(columns - static_cast<int>(column), 20));
  std::string out;
  for (const auto& [label, given] : rows) {
    const std::string text = message_text(given);  // may contain arbitrary user input
    std::string start = label;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t newline = std::min(text.find('\n', begin), text.size());
      std::string_view line = std::string_view(text).substr(begin, newline - begin);
      do {
        const auto [end, next] = line_break(line, width);
        out += fmt::format("{:<{}}{}\n", std::exchange(start, ""), column, line.substr(0, end));
        line.remove_prefix(next);
      } while (!line.empty());
      begin = newline + 1;
    }
  }
  return out;
}

std::string summary_lines(const RunSummary& s, int columns) {
  std::vector<std::pair<std::string, std::string>> rows;
  rows.emplace_back("steps", s.max_steps > 0 ? fmt::format("{} of {}", grouped(s.steps), grouped(s.max_steps))
                                             : grouped(s.steps));
  rows.emplace_back("tokens", human_count(static_cast<double>(s.tokens)));
  rows.emplace_back("wall", human_duration(s.wall_s));
  std::string speed = fmt::format("mean {} tok/s  median {} tok/s", compact_count(s.mean_tokens_per_s),
                                  compact_count(s.median_tokens_per_s));
  if (s.mfu) speed += fmt::format("  mfu {}", percent(*s.mfu));
  rows.emplace_back("speed", speed);
  if (s.best_val_loss)
    rows.emplace_back(
        "val loss", fmt::format("best {} at step {}", number(*s.best_val_loss, 4), grouped(s.best_val_step)));
  static constexpr std::array<std::pair<RunSection, const char*>, run_sections> names = {{
      {RunSection::compute, "compute"},
      {RunSection::comm, "exposed comm"},
      {RunSection::data, "data"},
      {RunSection::eval, "eval"},
      {RunSection::checkpoint, "ckpt"},
      {RunSection::other, "other"},
  }};
  std::string times;
  for (const auto& [section, name] : names)
    times += fmt::format("{}{} {}", times.empty() ? "" : "  ", name,
                         percent(fraction_of(s.times[section], s.times.total())));
  rows.emplace_back("time", times);
  constexpr size_t shown = 6;
  std::string kernels;
  for (size_t i = 0; i < std::min(shown, s.kernels.size()) && s.kernel_base_s > 0; ++i)
    kernels += fmt::format("{}{} {}", kernels.empty() ? "" : "  ", s.kernels[i].first,
                           percent(s.kernels[i].second / s.kernel_base_s));
  if (!kernels.empty() && !s.kernel_steps.empty()) kernels += "  " + s.kernel_steps;
  if (!kernels.empty()) rows.emplace_back("kernels", kernels);
  constexpr size_t operations = 4;
  constexpr double least = 0.01;  // of the time of all operations
  const char* comm_label = "comm";
  double all_seconds = 0;
  std::vector<CommFacts> comm;
  for (const CommFacts& c : s.comm) {
    if (c.group == "world") continue;  // of the start and of checkpoints, not of steps
    comm.push_back(c);
    all_seconds += c.seconds;
  }
  const auto steps = static_cast<double>(std::max<int64_t>(s.steps, 1));
  for (size_t i = 0; i < std::min(operations, comm.size()); ++i) {
    const CommFacts& c = comm[i];
    if (c.seconds < least * all_seconds) continue;
    rows.emplace_back(
        std::exchange(comm_label, ""),
        fmt::format("{} {}  {}/step  {:.2f} GB/s bus{}  exposed {:.1f} ms/step, {} hidden", c.group,
                    c.operation, human_bytes(static_cast<uint64_t>(static_cast<double>(c.bytes) / steps)),
                    c.bus_bandwidth() * 1e-9, c.algorithm.empty() ? "" : " (" + c.algorithm + ")",
                    c.exposed_s * 1e3 / steps, percent(c.hidden())));
  }
  rows.emplace_back("checkpoint", s.checkpoint.empty() ? "none" : s.checkpoint);
  std::string next;
  for (const std::string& command : s.next) next += (next.empty() ? "" : "\n") + command;
  if (!next.empty()) rows.emplace_back("next", next);
  return labeled_lines(rows, columns);
}

}  // namespace nrl::monitor
