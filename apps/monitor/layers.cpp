#include "apps/monitor/layers.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "apps/monitor/html.h"
#include "core/base/error.h"

namespace nrl::monitor {
namespace {

constexpr const char* names_key = "names";
constexpr size_t most_layers = 4096;

std::string place(const std::string& layer) {
  const bool block = !layer.empty() && layer.find_first_not_of("0123456789") == std::string::npos;
  return block ? "layer " + layer : "the " + layer;
}

// From blue over gray to red.
std::string color_of(double fraction) {
  const double f = std::clamp(fraction, 0.0, 1.0), side = std::abs(2 * f - 1);
  const auto mix = [&](int end) { return static_cast<int>(std::lround(225 + (end - 225) * side)); };
  return f < 0.5 ? fmt::format("#{:02x}{:02x}{:02x}", mix(42), mix(120), mix(214))
                 : fmt::format("#{:02x}{:02x}{:02x}", mix(192), mix(53), mix(47));
}

const LayerTable::Column* find(const LayerTable& table, const std::string& name) {
  for (const LayerTable::Column& column : table.columns)
    if (column.name == name) return &column;
  return nullptr;
}

std::string layer_map(const std::vector<const LayerRow*>& rows, const std::string& name,
                      const std::string& title) {
  double low = INFINITY, high = 0;
  size_t layers = 0;
  for (const LayerRow* row : rows) {
    const LayerTable::Column* column = find(row->table, name);
    if (!column) continue;
    layers = std::max(layers, column->values.size());
    for (const double v : column->values)
      if (std::isfinite(v) && v > 0) low = std::min(low, v), high = std::max(high, v);
  }
  if (!(high > 0)) return "";
  constexpr double width = 560, left = 64, right = 24, top = 30, bottom = 34;
  const double cell_width = (width - left - right) / static_cast<double>(rows.size()),
               cell_height = std::clamp(220.0 / static_cast<double>(layers), 3.0, 22.0),
               height = top + bottom + cell_height * static_cast<double>(layers);
  const double range = std::log(high / low);
  std::string s = fmt::format(
      "<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"{}\">\n<text class=\"title\" x=\"{}\" "
      "y=\"18\">{}: {:.3g} (blue) to {:.3g} (red), log scale</text>\n",
      width, height, html_escaped(title), left, html_escaped(title), low, high);
  const std::vector<std::string>& names = rows.back()->table.layers;
  const auto top_of = [&](size_t layer) {
    return height - bottom - cell_height * static_cast<double>(layer + 1);
  };
  for (size_t r = 0; r < rows.size(); ++r) {
    const LayerTable::Column* column = find(rows[r]->table, name);
    for (size_t l = 0; column && l < column->values.size(); ++l) {
      const double v = column->values[l];
      if (!std::isfinite(v) || v <= 0) continue;
      s += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"><title>{}, step "
          "{}: {:.4g}</title></rect>\n",
          left + cell_width * static_cast<double>(r), top_of(l), cell_width + 0.3, cell_height + 0.3,
          color_of(range > 0 ? std::log(v / low) / range : 0.5),
          html_escaped(l < names.size() ? place(names[l]) : std::string()), rows[r]->step, v);
    }
  }
  const size_t every = std::max<size_t>(1, (layers * 12 + 219) / 220);  // labels need about 12 units each
  for (size_t l = 0; l < std::min(layers, names.size()); l += every)
    s += fmt::format("<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{}</text>\n", left - 6,
                     top_of(l) + cell_height / 2 + 4, html_escaped(names[l]));
  for (const size_t r : {size_t{0}, rows.size() - 1})
    s += fmt::format("<text class=\"tick\" text-anchor=\"{}\" x=\"{}\" y=\"{:.0f}\">{}</text>\n",
                     r == 0 ? "start" : "end", r == 0 ? left : width - right, height - bottom + 18,
                     rows[r]->step);
  return s + "</svg>\n";
}

}  // namespace

JsonValue to_json(const LayerTable& table) {
  JsonValue json = JsonValue::object({{names_key, table.layers}});
  for (const LayerTable::Column& column : table.columns) {
    JsonValue values = JsonValue::array();
    for (const double v : column.values) values.push_back(std::isfinite(v) ? JsonValue(v) : JsonValue());
    json.set(column.name, values);
  }
  return json;
}

LayerTable layer_table_from(const JsonValue& json) {
  LayerTable table;
  for (const JsonValue& name : json.at(names_key).items()) table.layers.push_back(name.as_string());
  if (table.layers.size() > most_layers)
    fail(Exit::data, "{}{} layers; expected at most {}", json.where(), table.layers.size(), most_layers);
  for (const JsonMember& m : json.members()) {
    if (m.key == names_key) continue;
    LayerTable::Column column{.name = m.key};
    for (const JsonValue& v : m.value.items()) column.values.push_back(v.is_null() ? NAN : v.as_double());
    if (column.values.size() != table.layers.size())
      fail(Exit::data, "{}{} has {} values; expected one for each of {} layers", json.where(), m.key,
           column.values.size(), table.layers.size());
    table.columns.push_back(std::move(column));
  }
  return table;
}

std::vector<std::pair<std::string, double>> flat(const LayerTable& table) {
  std::vector<std::pair<std::string, double>> out;
  for (const LayerTable::Column& column : table.columns)
    for (size_t l = 0; l < column.values.size(); ++l)
      if (!std::isnan(column.values[l]))
        out.emplace_back(fmt::format("layers/{}/{}", table.layers[l], column.name), column.values[l]);
  return out;
}

std::string text_lines(const LayerTable& table) {
  size_t widest = 0;
  for (const LayerTable::Column& column : table.columns) widest = std::max(widest, column.name.size());
  std::string out;
  for (const LayerTable::Column& column : table.columns) {
    std::vector<std::pair<double, size_t>> values;
    for (size_t l = 0; l < column.values.size(); ++l)
      if (std::isfinite(column.values[l])) values.emplace_back(column.values[l], l);
    if (values.empty()) continue;
    std::sort(values.begin(), values.end());
    const auto [least, least_at] = values.front();
    const auto [largest, largest_at] = values.back();
    out += fmt::format("{:<{}}  median {:.4g}, least {:.4g} in {}, largest {:.4g} in {}\n", column.name,
                       widest, values[values.size() / 2].first, least, place(table.layers[least_at]), largest,
                       place(table.layers[largest_at]));
  }
  return out;
}

std::string layer_maps(const std::vector<LayerRow>& rows, const std::string& title, int most_columns) {
  if (rows.empty()) return "";
  const size_t shown = std::min(rows.size(), static_cast<size_t>(most_columns));
  std::vector<const LayerRow*> chosen;
  for (size_t i = 0; i < shown; ++i)
    chosen.push_back(&rows[shown == 1 ? rows.size() - 1 : i * (rows.size() - 1) / (shown - 1)]);
  std::string out;
  for (const LayerTable::Column& column : rows.back().table.columns)
    out += layer_map(chosen, column.name, column.name + " by layer" + title);
  return out;
}

}  // namespace nrl::monitor
