#include "apps/verify/report.h"

#include <algorithm>
#include <cmath>

#include "core/base/log.h"
#include "core/base/text.h"

namespace nrl::verify {
namespace {

constexpr int rows_of_kind = 4;
// As the steps compute them: what follows from a difference comes after it.
constexpr Kind kinds[] = {Kind::initial, Kind::gradient,   Kind::loss,    Kind::norm,      Kind::evaluation,
                          Kind::weight,  Kind::checkpoint, Kind::skipped, Kind::loss_scale};

std::string place(const Check& c) {
  std::string text = c.when.step > 0 ? fmt::format("step {}", c.when.step) : "at start";
  if (c.when.phase != Phase::trained) text += fmt::format(", {}", name_of(c.when.phase));
  if (c.rank >= 0) text += fmt::format(", rank {}", c.rank);
  return text;
}

std::string subject(const Check& c) {
  return c.name.empty() ? std::string(name_of(c.kind)) : fmt::format("{} {}", name_of(c.kind), c.name);
}

std::string value(const Check& c) {
  if (!c.problem.empty()) return c.problem;
  if (exact(c.kind)) return c.error > 0 ? fmt::format("{:.0f} elements", c.error) : "equal";
  return std::isnan(c.error) ? decimal(c.error, 1) : fmt::format("{:.1e}", c.error);
}

std::string limit(const Check& c) {
  return exact(c.kind) ? "equal" : fmt::format("{:.0e}", c.limit);
}

void print_step(const ComparedStep& s) {
  const std::string resumed =
      s.when.phase == Phase::trained ? "" : fmt::format("  {}", name_of(s.when.phase));
  std::string text = fmt::format("{} and {}", decimal(s.got.loss, 7), decimal(s.want.loss, 7));
  if (s.evaluation) return log::info("evaluation  loss {}, after step {}{}", text, s.when.step, resumed);
  text += fmt::format(", gradient norm {} and {}", decimal(s.got.norm, 6), decimal(s.want.norm, 6));
  if (s.got.loss_scale > 0)
    text += fmt::format(", loss scale {:g} and {:g}", s.got.loss_scale, s.want.loss_scale);
  for (const auto& [skipped, run] :
       {std::pair(s.got.skipped, "layout"), std::pair(s.want.skipped, "reference")})
    if (skipped) text += fmt::format(", skipped by the {}", run);
  log::info("step {:<6} loss {}{}", s.when.step, text, resumed);
}

// The steps of the trial that the reference skipped, and their number, for exact kinds of scalars.
std::string exact_subject(const Check& c, const TrialResult& r) {
  int64_t steps = 0, skipped = 0;
  for (const ComparedStep& s : r.steps) {
    if (s.evaluation) continue;
    ++steps;
    skipped += s.want.skipped ? 1 : 0;
  }
  return c.kind == Kind::skipped ? fmt::format("{} of {}", skipped, counted(steps, "compared step"))
                                 : fmt::format("after each of {}", counted(steps, "compared step"));
}

}  // namespace

void print_trial(const TrialResult& r) {
  log::info("layout      {}, {}", r.grid, r.options);
  log::info("reference   rank 0 alone: ddp, no overlap, no recomputation");
  log::info("model       {}", r.model);
  log::info("batch       {} sequences of {} tokens a step", r.sequences, grouped(r.length));
  log::info("update      AdamW, lr {:g}, eps 1/sqrt(parameters)", learning_rate);
  for (const ComparedStep& step : r.steps) print_step(step);
  if (!r.checkpoints.empty()) log::info("checkpoint  {}", r.checkpoints);
  log::info("{:<14} {:<52} {:>8} {:>8}  where", "compared", "worst of all steps", "differs", "limit");
  for (const Kind kind : kinds) {
    std::vector<const Check*> checks;
    for (const Check& c : r.checks)
      if (c.kind == kind) checks.push_back(&c);
    const auto bad = std::count_if(checks.begin(), checks.end(), [](const Check* c) { return !c->ok(); });
    if (kind == Kind::initial && bad == 0) {
      log::info("{:<14} {:<52} {:>8} {:>8}", name_of(kind),
                fmt::format("all {} tensors, bitwise", checks.size()), "equal", "equal");
      continue;
    }
    const size_t shown = std::min(checks.size(), static_cast<size_t>(rows_of_kind));
    for (size_t i = 0; i < shown; ++i) {
      const Check& c = *checks[i];
      const bool exact_scalar = c.name.empty() && exact(kind), equal = exact_scalar && c.ok();
      const std::string subject = exact_scalar ? exact_subject(c, r) : c.name;
      log::info("{:<14} {:<52} {:>8} {:>8}{}", name_of(c.kind), subject, value(c), limit(c),
                equal ? "" : fmt::format("  {}{}", place(c), c.ok() ? "" : "  MISMATCH"));
    }
    if (checks.size() > shown)
      log::info("{:<14} {} more tensors, {} of them beyond the limit", "", checks.size() - shown,
                std::max<int64_t>(bad - rows_of_kind, 0));
  }
}

std::string verdict(const TrialResult& r) {
  if (r.passed())
    return fmt::format("verified: {} trains as one rank does ({}{}, {} tensors, {:.1f} s)", r.grid,
                       counted(r.optimizer_steps, r.checkpoints.empty() ? "step" : "undisturbed step"),
                       r.checkpoints.empty() ? "" : ", evaluation, checkpoints", r.tensors, r.seconds);
  std::string text;
  for (const Kind kind : kinds) {
    int64_t bad = 0;
    const Check* worst = nullptr;
    for (const Check& c : r.checks)
      if (c.kind == kind && !c.ok() && ++bad == 1) worst = &c;
    if (!worst) continue;
    text += fmt::format("{}{}: {}, limit {}, {}", text.empty() ? "" : "; ", subject(*worst), value(*worst),
                        limit(*worst), place(*worst));
    if (bad > 1) text += fmt::format(" (worst of {})", bad);
  }
  return fmt::format("MISMATCH: {} does not train as one rank does: {}", r.grid, text);
}

std::string layout_header() {
  return fmt::format("{:<44} {:>8} {:>8} {:>7}  {}", "layout", "differs", "limit", "time", "worst");
}

std::string layout_row(const std::string& name, const TrialResult& r) {
  const Check& worst = r.checks.front();
  return fmt::format("{:<44} {:>8} {:>8} {:>5.1f} s  {}{}", name, value(worst), limit(worst), r.seconds,
                     subject(worst), r.passed() ? "" : fmt::format(", {}  MISMATCH", place(worst)));
}

}  // namespace nrl::verify
