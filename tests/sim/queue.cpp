#include "tests/sim/queue.h"

#include <algorithm>

namespace nrl::sim {

bool Capture::joined(const std::vector<int>& tail) const {
  std::vector<bool> before(graph->nodes.size(), false);
  for (int node : tail) before[node] = true;
  // A node's predecessors have lower numbers.
  for (size_t i = graph->nodes.size(); i-- > 0;) {
    if (!before[i]) return false;
    for (int node : graph->nodes[i].after) before[node] = true;
  }
  return true;
}

Replay::Replay(std::shared_ptr<Graph> graph)
    : graph_(std::move(graph)), after_(graph_->nodes.size()), left_(graph_->nodes.size()) {
  for (size_t i = 0; i < graph_->nodes.size(); ++i) {
    const auto& before = graph_->nodes[i].after;
    missing_.push_back(static_cast<int>(before.size()));
    for (int node : before) after_[node].push_back(static_cast<int>(i));
    if (before.empty()) ready_.push_back(static_cast<int>(i));
  }
}

int Replay::take(std::mt19937_64& random) {
  std::swap(ready_[random() % ready_.size()], ready_.back());
  const int node = ready_.back();
  ready_.pop_back();
  return node;
}

void Replay::finish(int node) {
  --left_;
  for (int next : after_[node])
    if (--missing_[next] == 0) ready_.push_back(next);
}

void merge(std::vector<int>& nodes, const std::vector<int>& more) {
  for (int node : more)
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
}

}  // namespace nrl::sim
