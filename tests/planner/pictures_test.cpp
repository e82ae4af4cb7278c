// Drawings of plans.

#include "apps/planner/pictures.h"

#include <algorithm>
#include <sstream>

#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/planner/planned.h"
#include "tests/profile/check_page.h"

using namespace nrl;
using namespace nrl::planner;
using namespace nrl::test;

namespace {

/// Passes of a step by the schedule's formula: no bubble within them, each as long as `seconds`.
predict::StepTimeline two_stages() {
  using pipeline::ActionKind;
  predict::StepTimeline out;
  out.stages.resize(2);
  out.stages[0].passes = {{ActionKind::forward, 0, 0, 0, 1},
                          {ActionKind::forward, 0, 1, 1, 2},
                          {ActionKind::backward, 0, 0, 4, 6},
                          {ActionKind::backward, 0, 1, 6, 8}};
  out.stages[1].passes = {
      {ActionKind::forward, 0, 0, 1, 2},         {ActionKind::backward_data, 0, 0, 2, 3},
      {ActionKind::backward_weight, 0, 0, 3, 4}, {ActionKind::forward, 0, 1, 4, 5},
      {ActionKind::backward_data, 0, 1, 5, 6},   {ActionKind::backward_weight, 0, 1, 6, 7}};
  for (auto& stage : out.stages) stage.hidden = {stage.passes.size(), stage.passes.size()};
  return out;
}

}  // namespace

TEST_CASE("a pipeline as text has a column for each part of the time", "[pictures]") {
  // "stage 0 " and 16 columns: half a second each.
  CHECK(
      pipeline_text(two_stages(), 24) ==
      "stage 0 0011....aaaabbbb\n"
      "stage 1 ..00aa==11bb==..\n"
      "        0        8000 ms\n"
      "        0-9: forward, a-j: backward, of microbatches 0 to 9, 10 to 19, ...   =: weight gradients   .: "
      "bubble");
  // Two passes in a column: the first one of them, and no bubble.
  CHECK_THAT(pipeline_text(two_stages(), 12), ContainsSubstring("stage 0 0.ab\nstage 1 0a1=\n"));
  predict::StepTimeline many = two_stages();
  many.stages.resize(40, many.stages[0]);
  const std::string text = pipeline_text(many, 60, 16);
  CHECK(std::count(text.begin(), text.end(), '\n') == 16 + 1 + 1);
  CHECK_THAT(text, ContainsSubstring("stage 7 ") && ContainsSubstring("\n     ... \nstage 32 ") &&
                       !ContainsSubstring("stage 8 ") && !ContainsSubstring("stage 31"));
}

TEST_CASE("a drawing of a pipeline has a rectangle for each pass", "[pictures]") {
  predict::StepTimeline timeline = two_stages();
  const std::string svg = pipeline_svg(timeline);
  CHECK(occurrences(svg, "<rect") == 10);
  CHECK(occurrences(svg, "<title>") == 10);
  CHECK(occurrences(svg, "<title>stage 1, weight gradients of microbatch 1: 1000 ms at 6000 ms</title>") ==
        1);
  // The end of stage 0, the gradients that it waits for, and what these wait for.
  timeline.messages = {{.from = 0, .to = 1, .sender = 0, .receiver = 0, .begin = 1, .end = 1},
                       {.from = 0, .to = 1, .sender = 1, .receiver = 3, .begin = 2, .end = 2},
                       {.from = 1, .to = 0, .sender = 1, .receiver = 2, .begin = 3, .end = 4},
                       {.from = 1, .to = 0, .sender = 4, .receiver = 3, .begin = 6, .end = 6}};
  CHECK(predict::longest_path(timeline) ==
        std::vector<predict::PassIndex>{{0, 0}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 4}, {0, 3}});
  const std::string outlined = pipeline_svg(timeline);
  CHECK(occurrences(outlined, " path\"") == 7);
  CHECK(occurrences(outlined,
                    "<title>stage 0, backward of microbatch 1: 2000 ms at 6000 ms, on the longest path<") ==
        1);
  timeline.stages[1].hidden = {1, 5};
  CHECK(occurrences(pipeline_svg(timeline), "<rect") == 7);
  CHECK(occurrences(pipeline_svg(timeline), "<title>4 more passes: 4000 ms</title>") == 1);
}

TEST_CASE("the line through layouts has those that no other one excels", "[pictures]") {
  const std::vector<LayoutPoint> layouts{
      {"a", 1, 8 << 20}, {"<b>", 2, 4 << 20}, {"c", 3, 6 << 20}, {"d", 4, 2 << 20}};
  const std::string svg = layouts_svg(layouts);
  CHECK(occurrences(svg, "<circle") == 4);
  CHECK(occurrences(svg, "&lt;b&gt;: 2000 ms, 4.00 MiB") == 1);
  const size_t at = svg.find("class=\"front\" d=\"");
  REQUIRE(at != std::string::npos);
  const std::string line = svg.substr(at, svg.find("\">", at) - at);
  CHECK(std::count(line.begin(), line.end(), 'H') == 2);  // a, b and d
  CHECK(layouts_svg({}) == "");
}

TEST_CASE("the page of a plan is well-formed and has all passes", "[pictures]") {
  for (const auto& [world, keys] :
       {std::pair(1, std::vector<std::string>{"policy.train_micro_batch_size=4"}),
        std::pair(8, std::vector<std::string>{"distributed.pipeline_parallel_size=4",
                                              "distributed.virtual_pipeline_size=2"})}) {
    CAPTURE(fmt::format("{}", fmt::join(keys, " ")));
    const Planned planned(world, keys);
    const std::vector<LayoutPoint> layouts{{"dp 8", 1, 1 << 30}, {"dp 4 x tp 2", 1.1, 1 << 29}};
    const std::string page =
        plan_page("run.yaml: <8> ranks", planned.estimate, *planned.kept.stages, layouts);
    check_page(page);
    for (const char* heading : {"Parts of the step", "Passes of the stages", "Memory of rank", "Layouts"})
      CHECK(occurrences(page, std::string("<h2>") + heading) == 1);
    const auto stages = planned.kept.stages->layout().stages, chunks = planned.kept.stages->layout().chunks;
    const size_t passes =
        static_cast<size_t>(planned.kept.stages->microbatches()) * static_cast<size_t>(stages * chunks) * 2;
    CHECK(occurrences(page, "<title>stage ") == passes);
    CHECK(occurrences(page, "<circle") == 2);
    // Drawings without layouts have none.
    CHECK(occurrences(plan_page("run", planned.estimate, *planned.kept.stages), "<circle") == 0);
    const std::string text = pipeline_text(predict::step_timeline(
        *planned.kept.stages, planned.kept.stages->microbatches(), predict::Detail::none));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
  }
}
