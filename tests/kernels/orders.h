#pragma once
// Helpers of tests that run kernels on the fiber engine.

#include <functional>
#include <string>

#include "core/device/kernel.h"
#include "tests/catch.h"

namespace nrl::kernel_test {

/// Runs `body` in several orders, on several numbers of OS threads and of blocks that take turns.
template <class Body>
void in_every_order(const Body& body) {
  const sim::Options before = sim::options();
  for (const sim::Options& options :
       {sim::Options{}, sim::Options{sim::Order::reverse, 1, 1}, sim::Options{sim::Order::random, 1, 1},
        sim::Options{sim::Order::random, 2, 1}, sim::Options{sim::Order::forward, 1, 3},
        sim::Options{sim::Order::random, 1, 1, 3}, sim::Options{sim::Order::random, 2, 2, 2}}) {
    sim::set_options(options);
    body();
  }
  sim::set_options(before);
}

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const sim::KernelError& e) {
    CHECK(e.code() == Exit::internal);
    return e.what();
  }
  return "no error";
}

}  // namespace nrl::kernel_test
