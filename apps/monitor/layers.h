#pragma once
// Statistics of layers (LayerTable) as JSON, as text and as a map of layers and steps.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/monitor/facts.h"
#include "core/io/json.h"

namespace nrl::monitor {

/// The member "layers" of a row of metrics.jsonl: {"names": ["embedding", "0", ...], "grad_norm": [0.5, null,
/// ...], ...}; values that are not finite are null.
JsonValue to_json(const LayerTable& table);
/// Inverse of to_json(). Throws Error(Exit::data) with the place for anything else.
LayerTable layer_table_from(const JsonValue& json);

/// Every value that is not NaN under a name of its own, "layers/0/grad_norm".
std::vector<std::pair<std::string, double>> flat(const LayerTable& table);

/// One line per column: "grad_norm  median 0.034, least 0.0012 in layer 7, largest 1.83 in the embedding".
std::string text_lines(const LayerTable& table);

/// The table of a step.
struct LayerRow {
  int64_t step = 0;
  LayerTable table = {};
};

/// A map as SVG for each column: layers from bottom to top, steps from left to right, colors on a logarithmic
/// scale. At most `most_columns` steps are shown, evenly chosen. Empty without rows.
std::string layer_maps(const std::vector<LayerRow>& rows, const std::string& title, int most_columns = 100);

}  // namespace nrl::monitor
