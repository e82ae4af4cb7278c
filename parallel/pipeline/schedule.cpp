#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

std::vector<Action> single_stage_schedule(int microbatches) {
  std::vector<Action> actions;
  for (int m = 0; m < microbatches; ++m) {
    const bool last = m + 1 == microbatches;
    actions.push_back({ActionKind::forward, m, 0, last});
    actions.push_back({ActionKind::backward, m, 0, last});
  }
  actions.push_back({ActionKind::reduce});
  actions.push_back({ActionKind::step});
  return actions;
}

}  // namespace nrl::pipeline
