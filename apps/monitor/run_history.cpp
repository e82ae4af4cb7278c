#include "apps/monitor/run_history.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "apps/monitor/metrics.h"
#include "apps/monitor/run_file.h"
#include "core/base/error.h"
#include "core/base/sample.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::monitor {
namespace {

constexpr size_t max_line_bytes = size_t{1} << 20;

// After a resume from an older checkpoint a step may occur twice; the later row replaces the earlier one.
void add(Curve& curve, const JsonValue& row, int64_t step) {
  const JsonValue* value = row.find(curve.key);
  if (value == nullptr || value->is_null()) return;
  while (!curve.points.empty() && curve.points.back().step >= step) curve.points.pop_back();
  curve.points.push_back({step, value->as_double(), row.get_int("tokens", 0), row.get_double("time", 0)});
}

}  // namespace

double Curve::tail_mean(size_t count) const {
  const size_t n = std::min(count, points.size());
  double sum = 0;
  for (size_t i = points.size() - n; i < points.size(); ++i) sum += points[i].value;
  return sum / static_cast<double>(n);
}

double Curve::median() const {
  std::vector<double> values;
  for (const CurvePoint& p : points) values.push_back(p.value);
  return nrl::median(std::move(values));
}

void add_row(RunHistory& run, const JsonValue& row) {
  const int64_t step = row.get_int("step");
  for (Curve* curve : {&run.loss, &run.val_loss, &run.lr, &run.grad_norm, &run.tokens_per_s})
    add(*curve, row, step);
  if (!row.contains("loss")) return;
  if (const JsonValue* layers = row.find("layers")) {
    while (!run.layers.empty() && run.layers.back().step >= step) run.layers.pop_back();
    run.layers.push_back({step, layer_table_from(*layers)});
  }
  run.rows += 1;
  run.skipped += row.get_bool("skipped", false) ? 1 : 0;
  run.last_step = step;
  run.tokens = row.get_int("tokens", run.tokens);
}

void for_each_row(const std::string& path, const std::function<void(const JsonValue&)>& row) {
  const std::string inside = join_path(path, metrics_file);
  const std::string file = path_exists(inside) ? inside : path;
  std::ifstream in(file);
  std::string line;
  // Opening a directory succeeds, reading from it does not.
  if (!in || (in.peek() == std::ifstream::traits_type::eof() && !in.eof()))
    fail(Exit::no_input, "{}: no metrics.jsonl found. Fix: give the logger.log_dir of a run", path);
  JsonLimits limits;
  limits.text_bytes = max_line_bytes;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (in.eof()) break;  // no newline: the line is incomplete
    row(parse_json(line, fmt::format("{}:{}", file, number), limits));
  }
}

RunHistory load_history(const std::string& path) {
  RunHistory run;
  run.name = path;
  for_each_row(path, [&](const JsonValue& row) { add_row(run, row); });
  if (run.rows == 0 && run.val_loss.points.empty()) fail(Exit::data, "{}: no steps yet", path);
  if (const std::string sessions = join_path(path, run_file); path_exists(sessions))
    for (const RunSession& s : run_file_from(read_json(sessions), sessions).sessions)
      run.sessions.push_back(s.start);
  return run;
}

std::vector<CurveBucket> bucketed(const Curve& curve, int64_t first_step, int64_t last_step, int buckets) {
  std::vector<CurveBucket> out;
  const double span = static_cast<double>(last_step - first_step) + 1;
  int current = -1;
  int64_t count = 0;
  for (const CurvePoint& p : curve.points) {
    if (p.step < first_step || p.step > last_step) continue;
    const int at =
        std::min(buckets - 1, static_cast<int>(static_cast<double>(p.step - first_step) / span * buckets));
    if (at != current) {
      current = at;
      count = 0;
      out.push_back({0, 0, p.value, p.value});
    }
    CurveBucket& b = out.back();
    count += 1;
    b.step += (static_cast<double>(p.step) - b.step) / static_cast<double>(count);
    b.mean += (p.value - b.mean) / static_cast<double>(count);
    b.min = std::min(b.min, p.value);
    b.max = std::max(b.max, p.value);
  }
  return out;
}

}  // namespace nrl::monitor
