#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

std::vector<Action> single_stage_schedule(int microbatches) {
  std::vector<Action> actions;
  for (int m = 0; m < microbatches; ++m) {
    actions.push_back({ActionKind::forward, m});
    actions.push_back({ActionKind::backward, m, 0, m + 1 == microbatches});
  }
  actions.push_back({ActionKind::reduce});
  actions.push_back({ActionKind::step});
  return actions;
}

}  // namespace nrl::pipeline
