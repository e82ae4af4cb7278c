#include "apps/monitor/terminal.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include "apps/monitor/format.h"
#include "apps/monitor/metrics.h"
#include "apps/monitor/statistics.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/io/json.h"

namespace nrl::monitor {
namespace {

constexpr double redraw_seconds = 0.2;
constexpr size_t spark_values = 12;
constexpr int default_columns = 80;  // for a bar without a terminal
constexpr std::string_view erase_line = "\r\x1b[K";

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

// The first variable that is set decides, as in setlocale(3).
bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    std::string value(environment(name));
    if (value.empty()) continue;
    for (char& c : value) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    return value.find("UTF-8") != std::string::npos || value.find("UTF8") != std::string::npos;
  }
  return false;
}

bool decide(TerminalOptions::Choice choice, bool by_environment) {
  return choice == TerminalOptions::Choice::by_environment ? by_environment
                                                           : choice == TerminalOptions::Choice::yes;
}

std::string json_dropped_text(int64_t lines) {
  return JsonValue::object({{"event", "dropped"}, {"time", wall_seconds()}, {"lines", lines}}).dump() + "\n";
}

std::string bar_dropped_text(int64_t lines) {
  return std::string(erase_line) + OutputQueue::plain_dropped_text(lines);
}

}  // namespace

int terminal_columns(int fd) {
  struct winsize size = {};
  if (::isatty(fd) == 0 || ::ioctl(fd, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col;
}

Progress resolve_progress(Progress wanted, int columns) {
  if (wanted != Progress::automatic) return wanted;
  return columns > 0 && environment("TERM") != "dumb" ? Progress::bar : Progress::plain;
}

struct Terminal::State {
  TerminalOptions options;
  Progress progress = Progress::plain;
  TextStyle style;

  OutlierDetector loss_outliers, norm_outliers;
  bool any_step = false;

  // The bar.
  bool bar_shown = false;
  double drawn_at = 0;
  StepFacts shown;
  StepMarks shown_marks;
  std::deque<double> losses;  // means over log_interval steps, newest last
  double loss_sum = 0;
  int64_t loss_count = 0;
  int64_t checkpoint_step = -1;

  void write(std::string_view text) {
    if (!options.active) return;
    if (options.write) {
      options.write(text);
    } else {
      output::write(output::Stream::out, text);
    }
  }

  // 0 if standard output is not a terminal.
  int columns() const { return options.columns ? options.columns() : terminal_columns(STDOUT_FILENO); }
  int header_columns() const {
    const int found = columns();
    return found > 0 ? std::min(found, most_header_columns) : most_header_columns;
  }

  std::string bar() const {
    const std::vector<double> values(losses.begin(), losses.end());
    const int found = columns();
    return bar_line(shown, values, shown_marks, checkpoint_step, found > 0 ? found : default_columns, style);
  }

  // Prints whole lines above the bar.
  void print(std::string_view lines) {
    if (!bar_shown) return write(lines);
    write(fmt::format("{}{}{}", erase_line, lines, bar()));
  }

  void print_json(const JsonValue& value) { write(value.dump() + "\n"); }
  JsonValue event_json(std::string_view event) const {
    return JsonValue::object({{"event", event}, {"time", options.clock()}});
  }

  void erase_bar() {
    if (bar_shown) write(erase_line);
    bar_shown = false;
  }

  void remember_loss(double loss) {
    loss_sum += loss;
    if (++loss_count < options.log_interval) return;
    losses.push_back(loss_sum / static_cast<double>(loss_count));
    if (losses.size() > spark_values) losses.pop_front();
    loss_sum = 0;
    loss_count = 0;
  }
};

Terminal::Terminal(TerminalOptions options) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.options = std::move(options);
  s.options.log_interval = std::max<int64_t>(1, s.options.log_interval);
  if (!s.options.clock) s.options.clock = wall_seconds;
  const int columns = s.columns();
  s.progress = resolve_progress(s.options.progress, columns);
  // https://no-color.org: present and not empty.
  const bool color = columns > 0 && environment("NO_COLOR").empty() && environment("TERM") != "dumb";
  s.style.color = s.progress != Progress::json && decide(s.options.color, color);
  s.style.unicode = decide(s.options.unicode, locale_is_utf8());
  if (!s.options.active || s.options.write) return;
  if (s.progress == Progress::json) output::set_dropped_text(json_dropped_text);
  if (s.progress == Progress::bar) output::set_dropped_text(bar_dropped_text);
}

Terminal::~Terminal() {
  state_->erase_bar();
}

void Terminal::set_max_steps(int64_t max_steps) {
  state_->options.max_steps = max_steps;
}

void Terminal::banner(const RunFacts& facts) {
  State& s = *state_;
  if (!s.options.active) return;
  if (s.progress == Progress::json) {
    JsonValue row = s.event_json("start");
    row.set("title", facts.title);
    JsonValue sections = JsonValue::object();
    for (const auto& [label, text] : facts.sections) sections.set(label, text);
    row.set("sections", sections);
    return s.print_json(row);
  }
  s.print(facts.title + "\n" + labeled_lines(facts.sections, s.header_columns()));
}

void Terminal::step(const StepFacts& facts) {
  State& s = *state_;
  if (!s.options.active) return;
  const double now = facts.time > 0 ? facts.time : s.options.clock();
  if (s.progress == Progress::json) {
    StepFacts dated = facts;
    dated.time = now;
    return s.print_json(step_row(dated));
  }
  s.options.max_steps = facts.max_steps;
  const StepMarks marks = {s.loss_outliers.add(facts.loss), s.norm_outliers.add(facts.grad_norm)};
  const bool first = !s.any_step, last = facts.step == facts.max_steps;
  s.any_step = true;
  if (s.progress == Progress::plain) {
    if (first || last || facts.skipped || facts.step % s.options.log_interval == 0)
      s.print(step_line(facts, now, marks, s.style, s.columns()) + "\n");
    return;
  }
  s.remember_loss(facts.loss);
  s.shown = facts;
  s.shown_marks = marks;
  const double since = s.options.clock() - s.drawn_at;
  // Negative if the wall clock was set back.
  if (s.bar_shown && !last && since >= 0 && since < redraw_seconds) return;
  s.write(fmt::format("\r{}\x1b[K", s.bar()));
  s.bar_shown = true;
  s.drawn_at = s.options.clock();
}

void Terminal::eval(const EvalFacts& facts) {
  State& s = *state_;
  if (!s.options.active) return;
  const double now = facts.time > 0 ? facts.time : s.options.clock();
  if (s.progress == Progress::json) {
    EvalFacts dated = facts;
    dated.time = now;
    return s.print_json(eval_row(dated));
  }
  s.print(event_line(now, "eval", facts.step, s.options.max_steps, eval_text(facts)) + "\n");
}

void Terminal::event(std::string_view kind, int64_t step, std::string_view text) {
  State& s = *state_;
  if (!s.options.active) return;
  if (kind == "ckpt") s.checkpoint_step = step;
  if (s.progress == Progress::json) {
    JsonValue row = s.event_json(kind);
    row.set("step", step);
    row.set("text", text);
    return s.print_json(row);
  }
  s.print(event_line(s.options.clock(), kind, step, s.options.max_steps, text) + "\n");
}

void Terminal::note(std::string_view text) {
  State& s = *state_;
  if (!s.options.active) return;
  if (s.progress == Progress::json) {
    JsonValue row = s.event_json("note");
    row.set("text", text);
    return s.print_json(row);
  }
  s.print(fmt::format("{} {}\n", clock_text(s.options.clock()), text));
}

void Terminal::warn(std::string_view text) {
  State& s = *state_;
  const bool redraw = s.bar_shown;
  s.erase_bar();
  log::warn_text(text);
  if (!redraw) return;
  s.write(s.bar());
  s.bar_shown = true;
}

void Terminal::summary(const RunSummary& summary) {
  State& s = *state_;
  if (!s.options.active) return;
  if (s.progress == Progress::json) {
    JsonValue row = s.event_json("summary");
    const JsonValue facts = summary_row(summary);
    for (const JsonMember& m : facts.members()) row.set(m.key, m.value);
    return s.print_json(row);
  }
  s.erase_bar();
  s.print(fmt::format("{} {}\n{}", clock_text(s.options.clock()), summary.outcome,
                      summary_lines(summary, s.header_columns())));
}

}  // namespace nrl::monitor
