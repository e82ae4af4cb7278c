#include "apps/model/spec/recompute_rule.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include "core/config/enums.h"

namespace nrl::model {
namespace {

/// "0-3, 8", or "0, 2, ..., 14" for a constant step.
std::string numbers_text(const std::vector<int>& numbers) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    ranges.push_back(end - i == 1 ? std::to_string(numbers[i])
                                  : fmt::format("{}-{}", numbers[i], numbers[end - 1]));
    i = end;
  }
  constexpr size_t most = 4;
  const int step = numbers.size() > 1 ? numbers[1] - numbers[0] : 1;
  bool even = ranges.size() == numbers.size() && ranges.size() > most;
  for (size_t i = 1; i < numbers.size(); ++i) even = even && numbers[i] - numbers[i - 1] == step;
  if (even) return fmt::format("{}, {}, ..., {}", numbers[0], numbers[1], numbers.back());
  return fmt::format("{}", fmt::join(ranges, ", "));
}

/// "norm in layers 0-3; everything in layers 4-7" of the rules of these blocks. `count`: the number of all
/// described blocks.
template <class Rule>
std::vector<std::string> by_rule(std::span<const Rule> rules, std::span<const int> blocks, size_t count) {
  struct Group {
    Rule rule;
    std::vector<int> layers;
  };
  std::vector<Group> groups;
  for (const int block : blocks) {
    const Rule& rule = rules[block];
    if (rule.keeps_all()) continue;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.rule == rule; });
    if (group == groups.end()) group = groups.insert(groups.end(), {.rule = rule, .layers = {}});
    group->layers.push_back(block);
  }
  std::vector<std::string> parts;
  for (const Group& g : groups) {
    const std::string what = g.rule.all ? "everything" : fmt::format("{}", fmt::join(g.rule.modules, ", "));
    parts.push_back(
        g.layers.size() == count
            ? what
            : fmt::format("{} in layer{} {}", what, g.layers.size() == 1 ? "" : "s", numbers_text(g.layers)));
  }
  return parts;
}

/// Segments of several blocks whose first block keeps its input; `rest` gets the other blocks.
std::vector<std::string> segments_of(std::span<const RecomputeRule> rules, std::span<const int> blocks,
                                     std::vector<int>& rest) {
  std::vector<std::string> out;
  for (size_t i = 0; i < blocks.size();) {
    size_t end = i + 1;
    while (end < blocks.size() && rules[blocks[end]].input) ++end;
    if (end > i + 1)
      out.push_back(fmt::format("{}-{}", blocks[i], blocks[end - 1]));
    else
      rest.push_back(blocks[i]);
    i = end;
  }
  constexpr size_t most = 6;
  if (out.size() > most) {
    out[2] = "...";
    out.erase(out.begin() + 3, out.end() - 1);
  }
  return out;
}

}  // namespace

std::string_view every_rule() {
  static const std::string rules = fmt::format("{}", fmt::join(EnumNames<BlockModule>::names, " "));
  return rules;
}

memory::SlotSet recomputed_slots(const RecomputeRule& rule, const memory::LayerTable& table) {
  if (rule.all) return table.recomputable() & ~(rule.input ? 0 : table.inputs());
  memory::SlotSet slots = 0;
  for (const std::string& module : rule.modules) slots |= table.with_rule(module);
  return slots;
}

memory::SlotSet offloaded_slots(const OffloadRule& rule, const memory::LayerTable& table) {
  if (rule.all) return table.offloadable();
  memory::SlotSet slots = 0;
  for (const std::string& module : rule.modules) slots |= table.offloadable_with_rule(module);
  return slots;
}

std::string offload_text(std::span<const OffloadRule> rules, std::span<const int> blocks) {
  return fmt::format("{}", fmt::join(by_rule(rules, blocks, blocks.size()), "; "));
}

std::string recompute_text(std::span<const RecomputeRule> rules, std::span<const int> blocks) {
  std::vector<int> rest;
  const std::vector<std::string> segments = segments_of(rules, blocks, rest);
  std::vector<std::string> parts;
  if (!segments.empty())
    parts.push_back(
        fmt::format("everything in layers {}, each from its first input", fmt::join(segments, " | ")));
  for (std::string& part : by_rule(rules, std::span<const int>(rest), blocks.size()))
    parts.push_back(std::move(part));
  return fmt::format("{}", fmt::join(parts, "; "));
}

}  // namespace nrl::model
