#pragma once
// Suites of `nrl-train bench compare`: variants of a configuration, and promises about their cost.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/diagnostic.h"
#include "core/config/enums.h"

namespace nrl {

/// A configuration that differs from the base in some keys.
struct SuiteVariant {
  std::string name;
  std::vector<std::string> overrides;  ///< "key=value", with canonical keys
};

/// A statement about the ratio of a quantity of two variants.
struct SuitePromise {
  std::string claim, source, promised;  ///< texts for the reader
  Quantity quantity = Quantity::step_time;
  size_t variant = 0, than = 0;               ///< of SuiteComparison::variants
  std::optional<double> at_least, at_most;    ///< limits of the ratio; a ratio beyond them is a failure
  std::optional<double> low, high;            ///< the promised ratios; another one is reported, no failure
  DeviceKind device = DeviceKind::automatic;  ///< on which limits and promise hold; automatic: on any
};

struct SuiteComparison {
  std::string name, note;
  std::string config;              ///< path of its own base configuration; empty: the suite's
  int64_t ranks = 1;               ///< least number of ranks
  std::vector<std::string> reset;  ///< "key=default"; the variants override it
  std::vector<SuiteVariant> variants;
  std::vector<SuitePromise> promises;
};

struct Suite {
  std::string config;  ///< path of the base configuration; empty: none is named
  std::vector<SuiteComparison> comparisons;
  std::string text;  ///< of the file
  Diagnostics diagnostics;

  bool ok() const { return !has_errors(diagnostics); }
};

/// Reads a suite. Never throws for bad input: all problems are in `diagnostics`, also in the keys
/// of a variant. A missing file is a diagnostic with Exit::no_input.
Suite load_suite(const std::string& path);

/// The same from memory; `name` is the file name in messages, and `config:` is relative to its directory.
Suite load_suite_text(std::string_view text, const std::string& name);

}  // namespace nrl
