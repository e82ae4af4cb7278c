#include "apps/monitor/communication.h"

#include <array>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::monitor {

JsonValue to_json(const Communication& communication) {
  JsonValue operations = JsonValue::array({});
  for (const CommFacts& c : communication.operations)
    operations.push_back(JsonValue::object({{"group", c.group},
                                            {"operation", c.operation},
                                            {"algorithm", c.algorithm},
                                            {"ranks", int64_t{c.ranks}},
                                            {"count", c.count},
                                            {"bytes", c.bytes},
                                            {"wire_bytes", c.wire_bytes},
                                            {"seconds", c.seconds},
                                            {"exposed_s", c.exposed_s},
                                            {"bus_bytes_per_s", c.bus_bandwidth()}}));
  return JsonValue::object({{"steps", communication.steps}, {"operations", std::move(operations)}});
}

Communication communication_from(const JsonValue& json, const std::string& where) {
  try {
    Communication out;
    out.steps = json.get_int("steps");
    for (const JsonValue& row : json.at("operations").items())
      out.operations.push_back({.group = row.get_string("group"),
                                .operation = row.get_string("operation"),
                                .algorithm = row.get_string("algorithm"),
                                .ranks = static_cast<int>(row.get_int("ranks")),
                                .count = row.get_int("count"),
                                .bytes = row.get_int("bytes"),
                                .wire_bytes = row.get_double("wire_bytes"),
                                .seconds = row.get_double("seconds"),
                                .exposed_s = row.get_double("exposed_s")});
    return out;
  } catch (const Error& e) {
    fail(Exit::data, "{}: no table of communication: {}. Fix: remove the file", where, e.what());
  }
}

std::string text_table(const Communication& communication) {
  constexpr std::array headings = {"group", "operation",  "ranks",  "calls",    "bytes",     "sent",
                                   "ms",    "exposed ms", "hidden", "GB/s bus", "carried by"};
  using Row = std::array<std::string, headings.size()>;
  std::vector<Row> rows{Row{}};
  std::copy(headings.begin(), headings.end(), rows[0].begin());
  const auto steps = static_cast<double>(std::max<int64_t>(communication.steps, 1));
  for (const CommFacts& c : communication.operations) {
    const auto bytes = [&](double all) { return human_bytes(static_cast<uint64_t>(all / steps)); };
    rows.push_back(
        {c.group, c.operation, std::to_string(c.ranks),
         fmt::format("{:.1f}", static_cast<double>(c.count) / steps), bytes(static_cast<double>(c.bytes)),
         bytes(c.wire_bytes), fmt::format("{:.2f}", c.seconds * 1e3 / steps),
         fmt::format("{:.2f}", c.exposed_s * 1e3 / steps), fmt::format("{:.0f}%", 100 * c.hidden()),
         fmt::format("{:.2f}", c.bus_bandwidth() * 1e-9), c.algorithm});
  }
  std::array<size_t, headings.size()> widths{};
  for (const Row& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string out;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const bool left = i < 2 || i + 1 == row.size();
      line += i == 0 ? "" : "  ";
      line += left ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace nrl::monitor
