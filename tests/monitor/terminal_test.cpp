#include "apps/monitor/terminal.h"

#include <cmath>
#include <cstdlib>
#include <string>

#include "core/base/error.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/monitor/sample.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

// What a terminal gets, with a clock and a width under the test's control.
struct Screen {
  double now = sample_time;
  int columns = 0;
  std::string text;

  TerminalOptions options(Progress progress) {
    use_utc();
    TerminalOptions o;
    o.progress = progress;
    o.max_steps = 20000;
    o.clock = [this] { return now; };
    o.columns = [this] { return columns; };
    o.write = [this](std::string_view piece) { text += piece; };
    o.color = TerminalOptions::Choice::no;
    o.unicode = TerminalOptions::Choice::no;
    return o;
  }
  std::string take() { return std::exchange(text, {}); }
};

StepFacts at_step(int64_t step) {
  StepFacts f = sample_step();
  f.step = step;
  f.time = 0;
  return f;
}

// Sets an environment variable for a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old, was_set_ = true;
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
  ~Environment() { was_set_ ? ::setenv(name_, old_.c_str(), 1) : ::unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool was_set_ = false;
};

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("a bar needs a terminal with a width", "[report]") {
  Environment term("TERM", "xterm");
  // The pseudo-terminal of mpirun has no width.
  REQUIRE(resolve_progress(Progress::automatic, 0) == Progress::plain);
  REQUIRE(resolve_progress(Progress::automatic, 80) == Progress::bar);
  REQUIRE(resolve_progress(Progress::json, 80) == Progress::json);
  REQUIRE(resolve_progress(Progress::bar, 0) == Progress::bar);
  Environment dumb("TERM", "dumb");
  REQUIRE(resolve_progress(Progress::automatic, 80) == Progress::plain);
  REQUIRE(terminal_columns(-1) == 0);
}

TEST_CASE("plain: the banner, a line every interval, events, the summary", "[report]") {
  Screen screen;
  TerminalOptions options = screen.options(Progress::automatic);
  options.log_interval = 20;
  Terminal terminal(std::move(options));
  terminal.banner({"nrl-train 0.1.0", {{"grid", "1 = dp 1"}, {"model", "llama"}}});
  REQUIRE(screen.take() ==
          "nrl-train 0.1.0\n"
          "grid      1 = dp 1\n"
          "model     llama\n");
  for (int64_t step = 101; step <= 140; ++step) terminal.step(at_step(step));
  const std::string lines = screen.take();
  REQUIRE(count(lines, "\n") == 3);  // the first, 120, 140
  REQUIRE(count(lines, " step   101/20000") == 1);
  REQUIRE(lines.find("03:12:29 step   120/20000  loss 6.2310  lr 1.71e-04  gnorm 0.842  412.3k tok/s  "
                     "mfu 47.0%  mem 41.6G  1.272s  data 0.3%  eta 7h01m\n") != std::string::npos);
  screen.now += 34;
  terminal.eval({144, 0, {{"val_loss", 6.0021}}, 4.1});
  terminal.event("ckpt", 144, "step-000144");
  terminal.note("signal SIGUSR1");
  REQUIRE(screen.take() ==
          "03:13:03 eval   144        val_loss 6.0021  4.1s\n"
          "03:13:03 ckpt   144        step-000144\n"
          "03:13:03 signal SIGUSR1\n");
  StepFacts skipped = at_step(141);
  skipped.skipped = true;
  terminal.step(skipped);
  terminal.step(at_step(142));
  REQUIRE(count(screen.take(), "\n") == 1);  // the skipped one only
  terminal.step(at_step(20000));
  REQUIRE(count(screen.take(), "step 20000/20000") == 1);  // the last one
  terminal.summary({.outcome = "done"});
  REQUIRE(screen.take().starts_with("03:13:03 done\nsteps       0\n"));
}

TEST_CASE("plain: a gradient norm far from the others is marked", "[report]") {
  Screen screen;
  Terminal terminal(screen.options(Progress::plain));
  for (int64_t step = 1; step <= 50; ++step) {
    StepFacts f = at_step(step);
    f.grad_norm = 1 + 0.1 * (step % 3);
    terminal.step(f);
  }
  REQUIRE(screen.take().find('!') == std::string::npos);
  StepFacts f = at_step(51);
  f.grad_norm = 9;
  terminal.step(f);
  REQUIRE(screen.take().find("gnorm 9.000!(+") != std::string::npos);
}

TEST_CASE("other ranks print nothing", "[report]") {
  for (Progress progress : {Progress::plain, Progress::bar, Progress::json}) {
    Screen screen;
    TerminalOptions options = screen.options(progress);
    options.active = false;
    Terminal terminal(std::move(options));
    terminal.banner({"t", {}});
    terminal.step(at_step(1));
    terminal.eval({});
    terminal.event("ckpt", 1, "x");
    terminal.note("x");
    terminal.summary({});
    REQUIRE(screen.text.empty());
  }
}

TEST_CASE("bar: at most five redraws a second, and the last step always", "[report]") {
  Screen screen;
  screen.columns = 100;
  Terminal terminal(screen.options(Progress::bar));
  for (int64_t step = 1; step <= 100; ++step) {
    terminal.step(at_step(step));
    screen.now += 0.01;
  }
  const std::string drawn = screen.take();
  REQUIRE(count(drawn, "train") == 5);
  REQUIRE(count(drawn, "\n") == 0);
  terminal.step(at_step(20000));
  REQUIRE(count(screen.take(), " 100.0%") == 1);
  screen.now -= 3600;  // a clock set back must not freeze the bar
  terminal.step(at_step(101));
  REQUIRE(count(screen.take(), "train") == 1);
}

TEST_CASE("bar: events scroll above it", "[report]") {
  Screen screen;
  screen.columns = 60;
  {
    Terminal terminal(screen.options(Progress::bar));
    terminal.note("before");
    REQUIRE(screen.take() == "03:12:29 before\n");
    terminal.step(at_step(120));
    const std::string bar = "train  ............   0.6%  120/20000  loss 6.231";
    REQUIRE(screen.take() == "\r" + bar + "\x1b[K");
    terminal.event("ckpt", 120, "saved");
    REQUIRE(screen.take() == "\r\x1b[K03:12:29 ckpt   120        saved\n" + bar);
    screen.columns = 200;  // the window was made wider
    terminal.note("x");
    REQUIRE(screen.take().find("ckpt 120") != std::string::npos);
  }
  REQUIRE(screen.take() == "\r\x1b[K");  // gone with the object
}

TEST_CASE("bar: asked for without a terminal it is 80 columns wide", "[report]") {
  Screen screen;
  Terminal terminal(screen.options(Progress::bar));
  terminal.step(at_step(1));
  REQUIRE(screen.take() ==
          "\rtrain  ................   0.0%  1/20000  loss 6.231  412k tok/s  eta 7h01m\x1b[K");
}

TEST_CASE("plain: lines fit the terminal, and are whole where there is none", "[report]") {
  for (int columns : {0, 80}) {
    Screen screen;
    screen.columns = columns;
    Terminal terminal(screen.options(Progress::plain));
    terminal.step(at_step(1));
    const std::string line = screen.take();
    REQUIRE(line.find("eta 7h01m") != std::string::npos);
    REQUIRE((line.find("data") != std::string::npos) == (columns == 0));
    std::string fields;
    for (int i = 0; i < 20; ++i) fields += "field 123456  ";
    terminal.banner({"t", {{"a", fields}}});
    const std::string banner = screen.take();
    for (size_t begin = 0, end; (end = banner.find('\n', begin)) != std::string::npos; begin = end + 1)
      REQUIRE(end - begin <= (columns == 0 ? 100 : 80));
  }
}

TEST_CASE("bar: NO_COLOR is honoured", "[report]") {
  Environment term("TERM", "xterm");
  for (const char* value : {static_cast<const char*>(nullptr), "", "1"}) {
    Environment no_color("NO_COLOR", value);
    Screen screen;
    screen.columns = 100;
    TerminalOptions options = screen.options(Progress::bar);
    options.color = TerminalOptions::Choice::by_environment;
    Terminal terminal(std::move(options));
    terminal.step(at_step(10000));
    const bool colored = screen.take().find("\x1b[36m") != std::string::npos;
    REQUIRE(colored == (value == nullptr || *value == '\0'));
  }
}

TEST_CASE("bar: block characters need a UTF-8 locale", "[report]") {
  Environment lang("LANG", "en_US.UTF-8"), ctype("LC_CTYPE", nullptr);
  for (const char* all : {"", "C", "de_DE.utf8"}) {
    Environment lc("LC_ALL", all);
    Screen screen;
    screen.columns = 100;
    TerminalOptions options = screen.options(Progress::bar);
    options.unicode = TerminalOptions::Choice::by_environment;
    Terminal terminal(std::move(options));
    terminal.step(at_step(10000));
    const bool blocks = screen.take().find("█") != std::string::npos;
    REQUIRE(blocks == (std::string(all) != "C"));
  }
}

TEST_CASE("json: every line is an object", "[report]") {
  Screen screen;
  screen.columns = 100;
  Terminal terminal(screen.options(Progress::json));
  terminal.banner({"nrl-train 0.1.0", {{"grid", "1"}}});
  StepFacts f = at_step(120);
  f.loss = NAN;
  terminal.step(f);
  terminal.eval({120, 0, {{"val_loss", 6.0021}}, 4.1});
  terminal.event("ckpt", 120, "saved \"here\"\n");
  terminal.note("bye");
  terminal.summary({.outcome = "done", .next = {"a", "b"}});
  std::vector<JsonValue> rows;
  const std::string text = screen.take();
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    REQUIRE(end != std::string::npos);
    rows.push_back(parse_json(text.substr(begin, end - begin), "stdout"));
    begin = end + 1;
  }
  REQUIRE(rows.size() == 6);
  REQUIRE(rows[0].get_string("event") == "start");
  REQUIRE(rows[0].at("sections").get_string("grid") == "1");
  REQUIRE(rows[1].get_int("step") == 120);
  REQUIRE(rows[1].at("loss").is_null());
  REQUIRE(rows[1].get_double("time") == sample_time);
  REQUIRE(rows[2].get_double("val_loss") == 6.0021);
  REQUIRE(rows[3].get_string("text") == "saved \"here\"\n");
  REQUIRE(rows[4].get_string("event") == "note");
  REQUIRE(rows[5].at("next").items().size() == 2);
}
