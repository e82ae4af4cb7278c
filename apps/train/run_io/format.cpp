#include "apps/train/run_io/format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>

#include "apps/train/run_io/statistics.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

std::string paint(std::string_view text, const char* code, const TextStyle& style) {
  if (!style.color || text.empty()) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string painted_mark(double distance, const TextStyle& style) {
  return paint(outlier_mark(distance), std::isnan(distance) ? "31" : "33", style);
}

// Fixed digits for the usual values, few significant ones for those that would not fit their column.
std::string number(double value, int digits) {
  return std::abs(value) < 1e5 || !std::isfinite(value) ? fmt::format("{:.{}f}", value, digits)
                                                        : fmt::format("{:.3e}", value);
}

std::string percent(double share) {
  return fmt::format("{:.1f}%", 100 * share);
}

double share_of(double part, double whole) {
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

// A piece of the bar: what is printed, and how many columns it takes without escape sequences.
struct Piece {
  std::string text;
  int width;
};

Piece ascii(std::string text) {
  const int width = static_cast<int>(text.size());
  return {std::move(text), width};
}

Piece gauge(double share, int cells, const TextStyle& style) {
  share = std::clamp(share, 0.0, 1.0);
  std::string filled;
  int used = 0;
  if (style.unicode) {
    static constexpr std::array eighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const int parts = static_cast<int>(share * cells * 8);
    for (; used < parts / 8; ++used) filled += "█";
    if (parts % 8 != 0) filled += eighths[static_cast<size_t>(parts % 8)], ++used;
  } else {
    used = static_cast<int>(share * cells);
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

std::string step_line(const StepFacts& f, double time, const StepMarks& marks, const TextStyle& style) {
  std::string line = fmt::format(
      "{} step {:>{}}/{}  loss {}{}  lr {:.2e}  gnorm {}{}  {} tok/s", clock_text(time), f.step,
      digits_of(f.max_steps), f.max_steps, number(f.loss, 4), painted_mark(marks.loss, style), f.lr,
      number(f.grad_norm, 3), painted_mark(marks.grad_norm, style), compact_count(f.tokens_per_s));
  if (f.world_size > 1) line += fmt::format(" ({}/rank)", compact_count(f.tokens_per_s / f.world_size));
  if (f.mfu) line += fmt::format("  mfu {}", percent(*f.mfu));
  if (f.mem_bytes > 0) {
    const auto bytes = static_cast<double>(f.mem_bytes);
    line += bytes >= kGiB ? fmt::format("  mem {:.1f}G", bytes / kGiB)
                          : fmt::format("  mem {:.1f}M", bytes / kGiB * 1024);
  }
  line += fmt::format("  {:.3f}s  data {}", f.step_ms / 1e3, percent(share_of(f.data_ms, f.step_ms)));
  if (f.eta_s >= 0) line += fmt::format("  eta {}", human_duration(f.eta_s));
  if (f.skipped) line += "  " + paint("skipped", "33", style);
  return line;
}

std::string event_line(double time, std::string_view kind, int64_t step, int64_t max_steps,
                       std::string_view text) {
  const int width = digits_of(std::max(max_steps, step));
  const auto gap = static_cast<size_t>(width) + 3;  // "/20000  " of a step line
  return fmt::format("{} {:<4} {:>{}}{}{}", clock_text(time), kind, step, width, std::string(gap, ' '), text);
}

std::string eval_text(const EvalFacts& facts) {
  std::string text;
  for (const auto& [name, loss] : facts.losses) text += fmt::format("{} {}  ", name, number(loss, 4));
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
    // Halves: the difference of two finite numbers may overflow.
    const double range = greatest / 2 - least / 2;
    const double height = range > 0 ? (v / 2 - least / 2) / range : 0;
    out += levels[static_cast<size_t>(std::clamp(height * 7 + 0.5, 0.0, 7.0))];
  }
  return out;
}

std::string bar_line(const StepFacts& f, std::span<const double> losses, const StepMarks& marks,
                     int64_t checkpoint_step, int columns, const TextStyle& style) {
  const int budget = std::max(1, columns - 1);
  const double done = share_of(static_cast<double>(f.step), static_cast<double>(f.max_steps));
  const Piece bar = gauge(done, std::clamp(columns / 5, 4, 32), style);

  std::string line;
  int width = 0;
  const std::string share = percent(done);
  const Piece head = {"train  " + bar.text + fmt::format(" {:>6}", share), 7 + bar.width + 1 + 6};
  if (head.width <= budget) {
    line = head.text;
    width = head.width;
  } else {
    line = share.substr(0, static_cast<size_t>(budget));
    width = static_cast<int>(line.size());
  }

  bool full = false;
  auto add = [&](int gap, const Piece& piece) {
    full = full || width + gap + piece.width > budget;
    if (full || piece.width == 0) return;
    line += std::string(static_cast<size_t>(gap), ' ') + piece.text;
    width += gap + piece.width;
  };
  // A mark's colour takes no columns.
  auto marked = [&](std::string text, double distance) {
    if (distance == 0) return ascii(std::move(text));
    const int plain = static_cast<int>(text.size()) + 1;
    return Piece{text + paint("!", std::isnan(distance) ? "31" : "33", style), plain};
  };
  add(2, ascii(fmt::format("{}/{}", f.step, f.max_steps)));
  add(2, marked("loss " + number(f.loss, 3), marks.loss));
  add(1, {sparkline(losses, style), style.unicode ? static_cast<int>(losses.size()) : 0});
  add(2, marked("gnorm " + number(f.grad_norm, 2), marks.grad_norm));
  add(2, ascii(short_count(f.tokens_per_s) + " tok/s"));
  if (f.mfu) add(2, ascii("mfu " + percent(*f.mfu)));
  if (f.eta_s >= 0) add(2, ascii("eta " + human_duration(f.eta_s)));
  if (checkpoint_step >= 0) add(2, ascii(fmt::format("ckpt {}", checkpoint_step)));
  return line;
}

std::string labelled_lines(const std::vector<std::pair<std::string, std::string>>& rows) {
  size_t column = 8;
  for (const auto& row : rows) column = std::max(column, row.first.size());
  column += 2;
  std::string out;
  for (const auto& [label, text] : rows) {
    out += label + std::string(column - label.size(), ' ');
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
      out += text.substr(begin, end - begin) + "\n" + std::string(column, ' ');
    out += text.substr(begin) + "\n";
  }
  return out;
}

std::string summary_lines(const RunSummary& s) {
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
  static constexpr std::array<std::pair<RunSection, const char*>, kRunSections> names = {{
      {RunSection::compute, "compute"},
      {RunSection::comm, "exposed comm"},
      {RunSection::data, "data"},
      {RunSection::eval, "eval"},
      {RunSection::checkpoint, "ckpt"},
      {RunSection::other, "other"},
  }};
  std::string shares;
  for (const auto& [section, name] : names)
    shares += fmt::format("{}{} {}", shares.empty() ? "" : "  ", name,
                          percent(share_of(s.times[section], s.times.total())));
  rows.emplace_back("time", shares);
  constexpr size_t shown = 6;
  std::string kernels;
  const double compute = s.times[RunSection::compute];
  for (size_t i = 0; i < std::min(shown, s.kernels.size()) && compute > 0; ++i)
    kernels += fmt::format("{}{} {}", kernels.empty() ? "" : "  ", s.kernels[i].first,
                           percent(s.kernels[i].second / compute));
  if (!kernels.empty()) rows.emplace_back("kernels", kernels);
  rows.emplace_back("checkpoint", s.checkpoint.empty() ? "none was written" : s.checkpoint);
  std::string next;
  for (const std::string& command : s.next) next += (next.empty() ? "" : "\n") + command;
  if (!next.empty()) rows.emplace_back("next", next);
  return labelled_lines(rows);
}

}  // namespace nrl
