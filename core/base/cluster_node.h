#pragma once

#include <string>

namespace nrl {

/// A node of a job and how many ranks it has. The nodes of a job, in order, have consecutive ranks from 0.
struct ClusterNode {
  std::string name;
  int ranks = 0;
  bool operator==(const ClusterNode&) const = default;
};

}  // namespace nrl
