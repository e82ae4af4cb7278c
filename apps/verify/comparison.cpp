#include "apps/verify/comparison.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "core/base/text.h"

namespace nrl::verify {

std::string_view name_of(Kind kind) {
  constexpr std::string_view names[] = {"initial weight", "loss",       "gradient",
                                        "gradient norm",  "weight",     "evaluation",
                                        "skipped steps",  "loss scale", "checkpoint"};
  return names[static_cast<int>(kind)];
}

bool exact(Kind kind) {
  return kind == Kind::initial || kind == Kind::skipped || kind == Kind::loss_scale ||
         kind == Kind::checkpoint;
}

std::string_view name_of(Phase phase) {
  constexpr std::string_view names[] = {"", "resumed", "resumed on one rank"};
  return names[static_cast<int>(phase)];
}

double Check::severity() const {
  if (!problem.empty() || std::isnan(error)) return std::numeric_limits<double>::infinity();
  return limit > 0 ? error / limit : error > 0 ? std::numeric_limits<double>::infinity() : 0;
}

// Keeps the worst of a tensor over all steps.
void Comparison::add(Check check) {
  ok_ = ok_ && check.ok();
  Check& worst = checks_.try_emplace({check.kind, check.name}, check).first->second;
  if (check.severity() > worst.severity()) worst = std::move(check);
}

void Comparison::add_tensors(Kind kind, When when, const std::vector<Difference>& differences,
                             const std::vector<double>& errors, double limit) {
  if (kind != Kind::gradient) tensors_ = differences.size();
  for (size_t i = 0; i < differences.size(); ++i) {
    const Difference& d = differences[i];
    Check check{.kind = kind, .name = d.name, .error = errors[i], .limit = limit, .when = when};
    if (!check.ok()) check.rank = d.rank;
    if (d.counted != d.numel)
      check.problem = fmt::format("ranks count {} of its {} elements", grouped(d.counted), grouped(d.numel));
    add(std::move(check));
  }
}

void Comparison::initial_weights(const std::vector<Difference>& differences) {
  std::vector<double> unequal;
  for (const Difference& d : differences) unequal.push_back(static_cast<double>(d.unequal));
  add_tensors(Kind::initial, {}, differences, unequal, 0);
}

void Comparison::gradients(When when, const std::vector<Difference>& differences) {
  add_tensors(Kind::gradient, when, differences, gradient_errors(differences), limits_.gradient);
}

void Comparison::weights(When when, const std::vector<Difference>& differences, double slack) {
  add_tensors(Kind::weight, when, differences, weight_errors(differences), slack * limits_.weight);
}

void Comparison::add_scalar(Kind kind, When when, double error, double limit) {
  add({.kind = kind, .name = "", .error = error, .limit = limit, .when = when});
}

// `equal` on this rank.
void Comparison::add_equal(Kind kind, When when, bool equal, const std::string& problem) {
  double unequal = equal ? 0 : 1;
  world_.all_reduce(std::span(&unequal, 1), comm::Reduce::max);
  add({.kind = kind, .name = "", .when = when, .problem = unequal > 0 ? problem : ""});
}

// Every rank has these scalars; the one that differs most is compared.
void Comparison::step(When when, const Outcome& got, Outcome want, bool skips) {
  std::array<double, 4> wanted{want.loss, want.norm, want.loss_scale, want.skipped ? 1.0 : 0.0};
  world_.broadcast(comm::View(std::span(wanted)), 0);
  want = {.loss = wanted[0], .norm = wanted[1], .loss_scale = wanted[2], .skipped = wanted[3] > 0};
  const auto relative = [](double a, double b) { return a == b ? 0 : std::abs(a - b) / std::abs(b); };
  std::array<double, 2> errors{relative(got.loss, want.loss), relative(got.norm, want.norm)};
  // Gradients of a skipped step are not finite.
  if (skips && got.skipped && want.skipped && !std::isfinite(got.norm) && !std::isfinite(want.norm))
    errors[1] = 0;
  world_.all_reduce(std::span(errors), comm::Reduce::max);
  add_scalar(Kind::loss, when, errors[0], limits_.loss);
  add_scalar(Kind::norm, when, errors[1], limits_.norm);
  steps_.push_back({.when = when, .got = got, .want = want});
  if (!skips) return;
  add_equal(Kind::skipped, when, got.skipped == want.skipped,
            want.skipped ? "not skipped, unlike the reference" : "skipped, unlike the reference");
  if (want.loss_scale != 0 || got.loss_scale != 0)
    add_equal(Kind::loss_scale, when, got.loss_scale == want.loss_scale,
              fmt::format("{:g} instead of {:g}", got.loss_scale, want.loss_scale));
}

void Comparison::evaluation(When when, double got, double want) {
  world_.broadcast(comm::View(std::span(&want, 1)), 0);
  double error = std::abs(got - want) / std::abs(want);
  world_.all_reduce(std::span(&error, 1), comm::Reduce::max);
  add_scalar(Kind::evaluation, when, error, limits_.loss);
  steps_.push_back({.when = when, .evaluation = true, .got = {.loss = got}, .want = {.loss = want}});
}

std::vector<Check> Comparison::checks() const {
  std::vector<Check> out;
  for (const auto& [key, check] : checks_) out.push_back(check);
  std::stable_sort(out.begin(), out.end(),
                   [](const Check& a, const Check& b) { return a.severity() > b.severity(); });
  return out;
}

}  // namespace nrl::verify
