#include "apps/monitor/csv.h"

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "apps/monitor/layers.h"
#include "apps/monitor/run_history.h"
#include "core/base/error.h"

namespace nrl::monitor {
namespace {

std::string cell(const JsonValue& value) {
  if (value.is_null()) return "";
  const std::string text = value.is_string() ? value.as_string() : value.dump();
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? "\"\"" : std::string(1, c);
  return out + "\"";
}

}  // namespace

std::string metrics_csv(const std::string& path) {
  std::vector<std::string> columns;
  std::unordered_map<std::string, size_t> index;
  // Cells by step. A step that occurs again, after a resume, replaces the later ones, as in load_history().
  std::map<int64_t, std::vector<std::string>> lines;
  for_each_row(path, [&](const JsonValue& row) {
    const int64_t step = row.get_int("step");
    if (row.contains("loss")) lines.erase(lines.lower_bound(step), lines.end());
    std::vector<std::string>& line = lines[step];
    const bool first = line.empty();
    const auto put = [&](const std::string& key, const JsonValue& value) {
      const auto [at, fresh] = index.emplace(key, columns.size());
      if (fresh) columns.push_back(key);
      if (line.size() < columns.size()) line.resize(columns.size());
      if (first || key != "time") line[at->second] = cell(value);
    };
    for (const JsonMember& m : row.members()) {
      if (m.key != "layers") {
        put(m.key, m.value);
        continue;
      }
      for (const auto& [name, value] : flat(layer_table_from(m.value))) put(name, value);
    }
  });
  if (lines.empty()) fail(Exit::data, "{}: no steps yet", path);
  std::string out;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i > 0) out += ',';
      if (i < cells.size()) out += cells[i];
    }
    out += '\n';
  };
  std::vector<std::string> names;
  for (const std::string& name : columns) names.push_back(cell(name));
  add_line(names);
  for (const auto& [step, cells] : lines) add_line(cells);
  return out;
}

}  // namespace nrl::monitor
