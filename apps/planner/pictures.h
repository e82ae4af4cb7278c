#pragma once
// Drawings of a plan: the pipeline of its step as text and on a page, memory over time, the parts of the step
// and the layouts of a search. The page is self-contained, without scripts or external files.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/planner/planned_run.h"
#include "apps/predict/step_timeline.h"

namespace nrl::planner {

/// The passes of the stages over the time of the schedule, in lines of at most `columns` characters and
/// `rows` stages: of more, the first and the last ones. A column shows the pass that takes most of it.
std::string pipeline_text(const predict::StepTimeline& timeline, int columns = 100, int rows = 16);

/// The same as a drawing: a rectangle for each pass, outlined on the longest path of several stages, and one
/// for those that are hidden in a stage. `seconds`: least length of the axis.
std::string pipeline_svg(const predict::StepTimeline& timeline, double seconds = 0);

struct LayoutPoint {
  std::string name;
  double seconds = 0;  ///< of a step
  int64_t memory = 0;  ///< bytes of the rank that needs most
};
/// Points over memory and time with a line through those that no other one excels in both. Empty without
/// points.
std::string layouts_svg(std::span<const LayoutPoint> layouts);

/// `heading`: what is planned. `layouts`: of a search, the best one first, which the plan is of. `plans`: of
/// the stages that were not dry-run, by stage; empty: the drawing of memory considers the others alone.
std::string plan_page(const std::string& heading, const RunEstimate& estimate,
                      const predict::DryStages& stages, std::span<const LayoutPoint> layouts = {},
                      std::span<const plan::RunPlan* const> plans = {});

}  // namespace nrl::planner
