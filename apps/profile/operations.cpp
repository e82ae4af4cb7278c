// The ops of a step beside what the machine could reach.

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "apps/plan/parts.h"
#include "apps/profile/analyses.h"

namespace nrl::profile {
namespace {

constexpr double launch_bound_s = 5e-6;  // a shorter kernel of a GPU is limited by its launch

void sort_by_loss(std::vector<Operation>& operations) {
  std::stable_sort(operations.begin(), operations.end(),
                   [](const Operation& a, const Operation& b) { return a.lost() > b.lost(); });
}

/// Sums over the ops of the compute row. `key` gives the name and the part of an op, by its event.
template <class Key>
std::vector<Operation> sum_operations(const Recorded& recorded, const Rows& rows, const Key& key) {
  const std::vector<trace::Event>& events = recorded.window.events;
  std::map<int32_t, double> taken;  // seconds by event, by begin
  for (const Piece& p : rows.flatten(recorded.compute_row))
    if (p.event >= 0 && events[p.event].kind == trace::Kind::op)
      taken[p.event] += static_cast<double>(p.end - p.begin) * 1e-9;

  struct Sum {
    Operation operation;
    double memory = 0, written = 0;
    int64_t calls = 0;
  };
  std::map<std::pair<std::string_view, std::string_view>, Sum> sums;
  for (const auto& [index, seconds] : taken) {
    const trace::Event& e = events[index];
    Sum& sum = sums[key(index)];
    Operation& o = sum.operation;
    o.shortest = sum.calls == 0 ? seconds : std::min(o.shortest, seconds);
    o.longest = std::max(o.longest, seconds);
    o.seconds += seconds;
    ++sum.calls;
    if (e.call >= recorded.costs.size()) continue;
    const ops::Cost& cost = recorded.costs[e.call];
    const plan::Attainable limits = plan::attainable(cost, recorded.peaks);
    o.flops += cost.flops;
    o.bytes += cost.bytes();
    o.attainable += limits.seconds();
    sum.written += cost.written;
    o.arithmetic += limits.arithmetic;
    sum.memory += limits.memory;
  }
  const auto steps = static_cast<double>(recorded.step_begins.size() - 1);
  std::vector<Operation> operations;
  for (auto& [names, sum] : sums) {
    Operation& o = sum.operation;
    o.name = names.first;
    o.part = names.second;
    o.bound = recorded.on_device && o.seconds < launch_bound_s * static_cast<double>(sum.calls)
                  ? Bound::launch
              : o.arithmetic > sum.memory ? Bound::arithmetic
                                          : Bound::memory;
    o.calls = std::llround(static_cast<double>(sum.calls) / steps);
    o.written = std::llround(sum.written / steps);
    for (double* per_step : {&o.seconds, &o.flops, &o.bytes, &o.attainable, &o.arithmetic})
      *per_step /= steps;
    operations.push_back(std::move(o));
  }
  sort_by_loss(operations);
  return operations;
}

using Names = std::pair<std::string_view, std::string_view>;

}  // namespace

std::vector<Operation> operations_of(const Recorded& recorded, const Rows& rows) {
  return sum_operations(recorded, rows, [&](int32_t index) {
    const char* const name = recorded.window.events[index].name;
    const std::string_view part = plan::part_of(name, rows.place(index).range);
    return Names(name, part.empty() ? plan::other_ops : part);
  });
}

std::vector<Operation> layers_of(const Recorded& recorded, const Rows& rows) {
  std::map<int16_t, std::string_view> names;  // by Tag::layer
  for (const trace::Event& e : recorded.window.events)
    if (e.kind == trace::Kind::layer) names.emplace(e.tag.layer, e.name);
  return sum_operations(recorded, rows, [&](int32_t index) {
    const auto at = names.find(recorded.window.events[index].tag.layer);
    return Names(at == names.end() ? "no layer" : at->second, "");
  });
}

std::vector<Operation> merge_operations(std::vector<Operation> operations) {
  std::map<std::pair<std::string, std::string>, Operation> sums;
  for (Operation& o : operations) {
    const auto [at, fresh] = sums.try_emplace({o.name, o.part}, o);
    if (fresh) continue;
    Operation& sum = at->second;
    if (o.attainable > sum.attainable) sum.bound = o.bound;
    sum.shortest = std::min(sum.shortest, o.shortest);
    sum.longest = std::max(sum.longest, o.longest);
    sum.calls += o.calls;
    sum.written += o.written;
    sum.seconds += o.seconds;
    sum.flops += o.flops;
    sum.bytes += o.bytes;
    sum.attainable += o.attainable;
    sum.arithmetic += o.arithmetic;
  }
  operations.clear();
  for (auto& [key, sum] : sums) operations.push_back(std::move(sum));
  sort_by_loss(operations);
  return operations;
}

}  // namespace nrl::profile
