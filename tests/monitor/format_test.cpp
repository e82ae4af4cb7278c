#include "apps/monitor/format.h"

#include <cmath>
#include <cstdlib>
#include <ctime>

#include "tests/catch.h"
#include "tests/monitor/sample.h"

using namespace nrl;
using namespace nrl::monitor;

namespace {

// Columns of a text: code points outside escape sequences; -1 when it is not UTF-8.
int columns_of(const std::string& text) {
  int columns = 0;
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == 0x1b) {
      i = text.find('m', i);
      if (i == std::string::npos) return -1;
      ++i;
      continue;
    }
    const size_t length = c < 0x80 ? 1 : c >> 5 == 6 ? 2 : c >> 4 == 14 ? 3 : 0;
    if (length == 0 || i + length > text.size()) return -1;
    for (size_t k = 1; k < length; ++k)
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return -1;
    i += length;
    ++columns;
  }
  return columns;
}

const std::vector<double> loss_values = {9, 8, 7.5, 6, 5, 4, 3.5, 3.2, 3.3, 3.1, 3.05, 3};

}  // namespace

TEST_CASE("the step line", "[report]") {
  use_utc();
  const StepFacts f = sample_step();
  REQUIRE(step_line(f, f.time, {}, {}) ==
          "03:12:29 step   120/20000  loss 6.2310  lr 1.71e-04  gnorm 0.842  412.3k tok/s  mfu 47.0%  "
          "mem 41.6G  1.272s  data 0.3%  eta 7h01m");
  StepFacts fp8 = f;
  fp8.fp8 = "fp8 tensorwise";
  REQUIRE(step_line(fp8, f.time, {}, {}).find("  mfu 47.0%  fp8 tensorwise  mem 41.6G  ") !=
          std::string::npos);
}

TEST_CASE("the step line with several ranks, marks, a skipped update and unknown values", "[report]") {
  use_utc();
  StepFacts f = sample_step();
  f.world_size = 8;
  f.grad_norm = 3.911;
  REQUIRE(step_line(f, f.time, {0, 4.2}, {}) ==
          "03:12:29 step   120/20000  loss 6.2310  lr 1.71e-04  gnorm 3.911!(+4.2s)  412.3k tok/s "
          "(51.5k/rank)  mfu 47.0%  mem 41.6G  1.272s  data 0.3%  eta 7h01m");
  f.world_size = 1;
  f.mfu.reset();
  f.eta_s = -1;
  f.mem_bytes = 0;
  f.skipped = true;
  f.loss = NAN;
  f.grad_norm = INFINITY;
  REQUIRE(step_line(f, f.time, {NAN, NAN}, {}) ==
          "03:12:29 step   120/20000  loss nan!  lr 1.71e-04  gnorm inf!  412.3k tok/s  1.272s  data 0.3%  "
          "skipped");
  f.loss = -f.loss;
  f.grad_norm = -std::abs(double(NAN));  // as x86 makes it: with a sign
  REQUIRE(std::signbit(f.grad_norm));
  REQUIRE(step_line(f, f.time, {NAN, NAN}, {}) ==
          "03:12:29 step   120/20000  loss nan!  lr 1.71e-04  gnorm nan!  412.3k tok/s  1.272s  "
          "data 0.3%  skipped");
  REQUIRE(step_line(f, f.time, {NAN, 0}, {.color = true}).find("nan\x1b[31m!\x1b[0m") != std::string::npos);
}

TEST_CASE("the step line of a terminal keeps the time left", "[report]") {
  use_utc();
  StepFacts f = sample_step();
  REQUIRE(step_line(f, f.time, {}, {}, 80) ==
          "03:12:29 step   120/20000  loss 6.2310  gnorm 0.842  412.3k tok/s  eta 7h01m");
  REQUIRE(step_line(f, f.time, {}, {}, 40) == "03:12:29 step   120/20000  loss 6.2310  eta 7h01m");
  REQUIRE(step_line(f, f.time, {}, {}, 500) == step_line(f, f.time, {}, {}));
  f.world_size = 8;
  f.skipped = true;
  for (int columns = 70; columns < 200; ++columns)
    for (bool color : {false, true}) {
      const std::string line = step_line(f, f.time, {4.2, NAN}, {.color = color}, columns);
      CAPTURE(line);
      REQUIRE(columns_of(line) <= columns);
      REQUIRE(line.find("eta 7h01m") != std::string::npos);
      REQUIRE(line.find("skipped") != std::string::npos);
    }
}

TEST_CASE("a step without times divides nothing by zero", "[report]") {
  use_utc();
  StepFacts f;
  f.step = f.max_steps = 1;
  f.mem_bytes = 300 << 20;
  REQUIRE(step_line(f, 0, {}, {}) ==
          "00:00:00 step 1/1  loss 0.0000  lr 0.00e+00  gnorm 0.000  0 tok/s  mem 300.0M  0.000s  data 0.0%");
}

TEST_CASE("counts keep their width at every magnitude", "[report]") {
  REQUIRE(compact_count(0) == "0");
  REQUIRE(compact_count(999.4) == "999");
  REQUIRE(compact_count(999.6) == "1.0k");
  REQUIRE(compact_count(412300) == "412.3k");
  REQUIRE(compact_count(999960) == "1.00M");
  REQUIRE(compact_count(1.236e9) == "1.24G");
}

TEST_CASE("event and eval lines stand under the step line's fields", "[report]") {
  use_utc();
  REQUIRE(event_line(sample_time + 35, "ckpt", 144, 20000, "step-000144  13.8 GiB") ==
          "03:13:04 ckpt   144        step-000144  13.8 GiB");
  const EvalFacts eval = {144, 0, {{"val/web", 6.0021}, {"val/code", 5.1130}}, 4.1};
  REQUIRE(event_line(sample_time + 34, "eval", 144, 20000, eval_text(eval)) ==
          "03:13:03 eval   144        val/web 6.0021  val/code 5.1130  4.1s");
  const StepFacts f = sample_step();
  REQUIRE(step_line(f, f.time, {}, {}).find("loss") == event_line(0, "eval", 1, 20000, "loss").find("loss"));
  REQUIRE(event_line(0, "ckpt", 7, 0, "x") == "00:00:00 ckpt 7    x");
}

TEST_CASE("the bar", "[report]") {
  StepFacts f = sample_step();
  f.step = 4680;
  f.loss = 3.214;
  f.grad_norm = 0.61;
  f.tokens_per_s = 412000;
  f.eta_s = 5 * 3600 + 24 * 60;
  const std::vector<double> losses = {8, 7, 6, 5, 5, 4, 4, 3, 2, 2, 1, 1};
  REQUIRE(bar_line(f, losses, {}, 4500, 160, {.unicode = true}) ==
          "train  ███████▍                          23.4%  4680/20000  loss 3.214 █▇▆▅▅▄▄▃▂▂▁▁  gnorm 0.61  "
          "412k tok/s  mfu 47.0%  eta 5h24m  ckpt 4500");
  REQUIRE(bar_line(f, losses, {}, 4500, 80, {}) ==
          "train  ###.............  23.4%  4680/20000  loss 3.214  412k tok/s  eta 5h24m");
  REQUIRE(bar_line(f, losses, {}, 4500, 24, {}) == "train  ....  23.4%");
  REQUIRE(bar_line(f, losses, {}, 4500, 18, {}) == "23.4%  4680/20000");
  REQUIRE(bar_line(f, losses, {}, 4500, 4, {}) == "23.");
  f.step = f.max_steps;
  REQUIRE(bar_line(f, {}, {}, -1, 50, {}) == "train  ########## 100.0%  20000/20000  loss 3.214");
}

TEST_CASE("the bar never exceeds the terminal and stays UTF-8", "[report]") {
  StepFacts f = sample_step();
  for (bool unicode : {false, true})
    for (bool color : {false, true})
      for (int64_t step : {0, 1, 6789, 19999, 20000, 30000})
        for (int columns = 1; columns <= 200; ++columns) {
          f.step = step;
          f.loss = step == 1 ? NAN : 12.5;
          const std::string line =
              bar_line(f, loss_values, {step == 1 ? NAN : 4.5, -7.0}, 19000, columns, {color, unicode});
          const int width = columns_of(line);
          CAPTURE(columns, step, line);
          REQUIRE(width >= 1);
          REQUIRE(width <= columns);
          if (columns > 1) REQUIRE(width < columns);
          // A color that is switched on is switched off again.
          if (line.find('\x1b') != std::string::npos) REQUIRE(line.find("\x1b[0m") != std::string::npos);
          if (!unicode)
            for (char c : line) REQUIRE(static_cast<unsigned char>(c) < 0x80);
        }
}

TEST_CASE("sparklines", "[report]") {
  const TextStyle unicode = {.unicode = true};
  REQUIRE(sparkline(std::vector<double>{1, 2, 3}, unicode) == "▁▅█");
  REQUIRE(sparkline(std::vector<double>{2, 2}, unicode) == "▁▁");
  REQUIRE(sparkline(std::vector<double>{1, NAN, 3}, unicode) == "▁ █");
  REQUIRE(sparkline(std::vector<double>{NAN}, unicode) == " ");
  REQUIRE(sparkline(std::vector<double>{-1.7e308, 1.7e308}, unicode) == "▁█");
  REQUIRE(sparkline(std::vector<double>{}, unicode).empty());
  REQUIRE(sparkline(std::vector<double>{1, 2}, {}).empty());
}

TEST_CASE("labeled lines share a column", "[report]") {
  REQUIRE(labeled_lines({{"grid", "8 = dp 8"}, {"checkpoint", "a\nb"}, {"x", ""}}) ==
          "grid        8 = dp 8\n"
          "checkpoint  a\n"
          "            b\n"
          "x           \n");
}

TEST_CASE("the summary", "[report]") {
  RunSummary s;
  s.steps = 2311;
  s.max_steps = 20000;
  s.tokens = 1211629568;
  s.wall_s = 3192;
  s.mean_tokens_per_s = 379600;
  s.median_tokens_per_s = 412300;
  s.mfu = 0.4702;
  s.best_val_loss = 3.12341;
  s.best_val_step = 2000;
  s.times.seconds = {800, 10, 50, 100, 30, 10};
  s.kernels = {{"linear_forward", 400}, {"adamw", 80}};
  s.kernel_base_s = 800;
  s.checkpoint = "runs/a/step-002311";
  s.next = {"nrl-train report runs/a", "nrl-train generate runs/a/step-002311"};
  REQUIRE(summary_lines(s) ==
          "steps       2,311 of 20,000\n"
          "tokens      1.21 B\n"
          "wall        53m12s\n"
          "speed       mean 379.6k tok/s  median 412.3k tok/s  mfu 47.0%\n"
          "val loss    best 3.1234 at step 2,000\n"
          "time        compute 80.0%  exposed comm 5.0%  data 1.0%  eval 10.0%  ckpt 3.0%  other 1.0%\n"
          "kernels     linear_forward 50.0%  adamw 10.0%\n"
          "checkpoint  runs/a/step-002311\n"
          "next        nrl-train report runs/a\n"
          "            nrl-train generate runs/a/step-002311\n");
  s.kernel_base_s = 500;
  s.kernel_steps = "of steps 3-5";
  REQUIRE(summary_lines(s).find("kernels     linear_forward 80.0%  adamw 16.0%  of steps 3-5\n") !=
          std::string::npos);
  REQUIRE(summary_lines({}).find("checkpoint  none\n") != std::string::npos);
}

TEST_CASE("long header lines are wrapped under their text", "[report]") {
  REQUIRE(
      labeled_lines({{"memory", "weights 480 KiB  gradients 480 KiB  optimizer 960 KiB  = 2.24 MiB"}}, 50) ==
      "memory    weights 480 KiB  gradients 480 KiB\n"
      "          optimizer 960 KiB  = 2.24 MiB\n");
  // Words where there are no fields; a long path stays whole.
  REQUIRE(labeled_lines({{"a", "one two three four five six"}}, 30) ==
          "a         one two three four\n"
          "          five six\n");
  const std::string path(60, 'x');
  REQUIRE(labeled_lines({{"a", path + " b"}, {"c", ""}}, 40) ==
          "a         " + path + "\n          b\nc         \n");
  REQUIRE(labeled_lines({{"a", "b\n\nc"}}) == "a         b\n          \n          c\n");
}
