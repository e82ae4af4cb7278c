#include "apps/train/loop/nan_search.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/base/text.h"
#include "core/io/json.h"

namespace nrl::train {
namespace {

using engine::BadTensor;

std::string text_of(const std::optional<BadTensor>& bad) {
  return bad ? to_json(*bad).dump() : std::string();
}

std::vector<std::string> gather(Run& run, const std::optional<BadTensor>& own) {
  run.engine->finish_gathers();
  return run.world.comm().gather_texts(text_of(own));
}

bool any(std::span<const std::string> found) {
  return std::any_of(found.begin(), found.end(), [](const std::string& text) { return !text.empty(); });
}

}  // namespace

NanCheck nan_check(const Config& config, bool gpu) {
  if (!config.monitoring.enabled) return NanCheck::off;
  return config.monitoring.nan_check.value_or(gpu ? NanCheck::loss : NanCheck::all);
}

std::string first_bad_tensor(std::span<const std::string> found, std::span<const std::string> hosts,
                             int64_t microbatches) {
  std::optional<BadTensor> first;
  std::vector<size_t> ranks;  // that found the same tensor first
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].empty()) continue;
    BadTensor bad = engine::bad_tensor_from(parse_json(found[rank], fmt::format("rank {}", rank)));
    if (first && bad.order > first->order) continue;
    if (!first || bad.order < first->order) ranks.clear();
    if (ranks.empty()) first = std::move(bad);
    ranks.push_back(rank);
  }
  if (!first) return {};
  std::string where;
  if (!first->operation.empty()) where += fmt::format("step {}; ", first->operation);
  where += ranks.size() == 1 ? fmt::format("rank {}", ranks.front())
                             : fmt::format("on each of ranks {}", fmt::join(ranks, ", "));
  if (ranks.size() == 1 &&
      std::any_of(hosts.begin(), hosts.end(), [&](const auto& h) { return h != hosts[0]; }))
    where += fmt::format(", {}", hosts[ranks.front()]);
  if (first->microbatch >= 0)
    where += fmt::format("; microbatch {} of {}", first->microbatch + 1, microbatches);
  if (!first->pass.empty()) where += fmt::format(", {}", first->pass);
  std::string text = fmt::format("first in {} ({}): {} of {} values are not finite", first->name, where,
                                 grouped(first->bad), grouped(first->count));
  if (!first->bad_input.empty())
    text += fmt::format("; its input {} is not either", first->bad_input);
  else if (first->largest_input)
    text += fmt::format("; its inputs were, up to {:.2g}", *first->largest_input);
  return text;
}

std::string search_nan(Run& run, NanCheck level, int64_t step, double loss, double grad_norm) {
  const auto is = [](double value) { return std::isfinite(value) ? "finite" : "not finite"; };
  const std::string numbers = fmt::format("the loss is {}, the gradient norm {}", is(loss), is(grad_norm));
  const std::string samples =
      fmt::format("Samples: nrl-train data show CONFIG --steps {}:{}", step, step + 1);
  if (level == NanCheck::loss) return numbers;
  const engine::Engine& e = *run.engine;
  const auto describe = [&](std::span<const std::string> found) {
    return first_bad_tensor(found, run.world.hosts(), e.plan().batch.accumulation);
  };
  std::vector<std::string> found = gather(run, engine::find_bad_weight(*run.engine));
  if (any(found)) return describe(found);
  found = gather(run, engine::find_bad_tensor(*run.engine, run.engine->objective(), level));
  if (any(found)) return fmt::format("{}. The weights are finite. {}", describe(found), samples);
  if (std::isfinite(loss) && e.plan().position.sizes.dp > 1)
    return fmt::format(
        "{}. The gradients of every rank are finite when the step is repeated: their sum over the "
        "data-parallel "
        "ranks overflows, or a rank computed another result from the same bits (then suspect its hardware)",
        numbers);
  return fmt::format(
      "not reproduced: {}, but all of it is finite when the step is repeated. A rank computed another result "
      "from the same bits: suspect hardware (silent data corruption)",
      numbers);
}

}  // namespace nrl::train
