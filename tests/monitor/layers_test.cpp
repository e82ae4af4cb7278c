// Statistics of layers in files and pages.
#include "apps/monitor/layers.h"

#include <cmath>
#include <fstream>
#include <string>

#include "apps/monitor/chart.h"
#include "apps/monitor/csv.h"
#include "apps/monitor/metrics.h"
#include "apps/monitor/prometheus.h"
#include "apps/monitor/rows.h"
#include "apps/monitor/run_history.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/monitor/sample.h"

using namespace nrl;
using namespace nrl::monitor;
using test::contains;

namespace {

LayerTable sample(double factor) {
  return {.layers = {"embedding", "0", "1", "head"},
          .columns = {{"grad_norm", {0.5 * factor, 0.25 * factor, 2 * factor, INFINITY}},
                      {"mlp_rms", {NAN, 1.5, 3, NAN}}}};
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++n;
  return n;
}

/// The log directory of a run of 40 steps with statistics every tenth.
struct Directory : test::TemporaryDirectory {
  Directory() {
    MetricsLog log(path(), 0);
    StepFacts f = sample_step();
    for (int64_t step = 1; step <= 40; ++step) {
      f.step = step;
      f.layers = step % 10 == 0 ? std::optional(sample(static_cast<double>(step))) : std::nullopt;
      log.step(f);
    }
  }
};

}  // namespace

TEST_CASE("statistics of layers are read back", "[layers]") {
  const JsonValue json = to_json(sample(1));
  CHECK(
      json.dump() ==
      R"({"names":["embedding","0","1","head"],"grad_norm":[0.5,0.25,2.0,null],"mlp_rms":[null,1.5,3.0,null]})");
  const LayerTable back = layer_table_from(parse_json(json.dump(), "row"));
  CHECK(to_json(back).dump() == json.dump());
  const auto values = flat(back);
  REQUIRE(values.size() == 5);
  CHECK(values[2] == std::pair<std::string, double>("layers/1/grad_norm", 2));
  CHECK(values[3].first == "layers/0/mlp_rms");
  for (const char* bad : {R"({"grad_norm":[1]})", R"({"names":["0"],"grad_norm":[1,2]})",
                          R"({"names":["0"],"grad_norm":["a"]})", R"({"names":"0"})",
                          R"({"names":["0"],"grad_norm":3})", "[]", R"({"names":[1]})"}) {
    CAPTURE(bad);
    REQUIRE_THROWS_AS(layer_table_from(parse_json(bad, "metrics.jsonl:3")), Error);
  }
}

TEST_CASE("statistics of layers are lines of text with the extremes", "[layers]") {
  CHECK(text_lines(sample(1)) ==
        "grad_norm  median 0.5, least 0.25 in layer 0, largest 2 in layer 1\n"
        "mlp_rms    median 3, least 1.5 in layer 0, largest 3 in layer 1\n");
  CHECK(text_lines({.layers = {"0"}, .columns = {{"mlp_rms", {NAN}}}}).empty());
}

TEST_CASE("a run's history, page and table have the statistics of its layers", "[layers]") {
  const Directory run;
  const RunHistory history = load_history(run.path());
  REQUIRE(history.layers.size() == 4);
  CHECK(history.layers[1].step == 20);
  CHECK(history.layers[1].table.columns[0].values[2] == 40);
  const std::string page = html_report(std::span(&history, 1));
  CHECK(count(page, "grad_norm by layer") == 2);  // the title and its label
  CHECK(count(page, "<title>layer 1, step 20: 40</title>") == 1);
  // Four steps of three finite gradient norms and two sizes of activations.
  CHECK(count(page, "<rect ") == 4 * (3 + 2));
  CHECK(count(page, "<svg") == count(page, "</svg>"));
  CHECK(count(layer_maps(history.layers, "", 2), "<rect ") == 2 * (3 + 2));
  CHECK(layer_maps({}, "").empty());
  const std::string csv = metrics_csv(run.path());
  const std::string head = csv.substr(0, csv.find('\n'));
  CHECK(contains(head, ",layers/0/grad_norm"));
  CHECK(contains(head, ",layers/1/mlp_rms"));
  CHECK(!contains(csv, "names"));
  CHECK(count(csv, "\n") == 41);
  // A step that is done again after a resume replaces the earlier one.
  {
    std::ofstream more(run / "metrics.jsonl", std::ios::app);
    StepFacts f = sample_step();
    f.step = 30;
    f.layers = sample(7);
    more << step_row(f).dump() << "\n";
  }
  const RunHistory again = load_history(run.path());
  REQUIRE(again.layers.size() == 3);
  CHECK(again.layers[2].table.columns[0].values[0] == 3.5);
}

TEST_CASE("statistics of layers are rows of sinks and metrics of Prometheus", "[layers]") {
  StepFacts f = sample_step();
  f.layers = sample(1);
  const Row row = sink_row(f);
  bool found = false;
  for (const auto& [name, value] : row.values) found = found || (name == "layers/1/mlp_rms" && value == 3);
  CHECK(found);
  MetricsState state;
  state.add(f);
  f.layers.reset();
  f.step += 1;
  state.add(f);  // the last ones stay
  const std::string text = metrics_text(state, false);
  CHECK(contains(text, "nrl_train_layer_grad_norm{layer=\"1\"} 2\n"));
  CHECK(count(text, "# TYPE nrl_train_layer_mlp_rms gauge") == 1);
  CHECK(!contains(text, "layer_mlp_rms{layer=\"head\"}"));
}
