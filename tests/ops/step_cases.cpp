#include <array>
#include <cmath>

#include "core/ops/step.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;

struct Given {
  double squared_norm = 4, metric = -30, updates = 0, skipped = 0;
};

Buffer scalars_of(const Given& given) {
  Buffer s(DType::f64, {StepScalar::count});
  s.set(StepScalar::squared_norm, given.squared_norm);
  s.set(StepScalar::metrics, given.metric);
  s.set(StepScalar::learning_rate, 1e-3);
  s.set(StepScalar::updates, given.updates);
  s.set(StepScalar::skipped_in_a_row, given.skipped);
  s.set(StepScalar::grad_scale, 0.125);
  return s;
}

DecideStep decision(const Buffer& scalars, double max_norm, int64_t max_skipped = 0) {
  return {.scalars = scalars, .max_norm = max_norm, .beta1 = 0.9, .beta2 = 0.95, .max_skipped = max_skipped};
}

void expect_near(const Buffer& s, StepScalar::Index place, double want, const std::string& what) {
  const double got = s.get(place);
  expect(std::fabs(got - want) <= 1e-14 * std::fabs(want),
         fmt::format("{}: {} is {}, wanted {}", what, static_cast<int>(place), got, want));
}

void decide(Exec& e, const DecideStep& a) {
  decide_step(e, a);
  synchronize(e);
}

void taken(Exec& e) {
  // Clipped from 2 to 0.5, the eighth update.
  Buffer s = scalars_of({.updates = 7, .skipped = 2});
  decide(e, decision(s, 0.5));
  expect_near(s, StepScalar::grad_norm, 2, "norm");
  expect_near(s, StepScalar::skip, 0, "skip");
  expect_near(s, StepScalar::updates, 8, "updates");
  expect_near(s, StepScalar::skipped_in_a_row, 0, "skipped in a row");
  expect_near(s, StepScalar::grad_scale, 0.5 / (2 + 1e-6), "clip");
  expect_near(s, StepScalar::correction1, 1 - std::pow(0.9, 8), "correction 1");
  expect_near(s, StepScalar::correction2, 1 - std::pow(0.95, 8), "correction 2");
  expect_near(s, StepScalar::learning_rate, 1e-3, "learning rate");
  for (double max_norm : {0.0, 2.5}) {  // no clipping; a norm that is small enough
    s = scalars_of({});
    decide(e, decision(s, max_norm));
    expect_near(s, StepScalar::grad_scale, 1, "not clipped");
  }
}

void skipped(Exec& e) {
  for (const Given& given :
       {Given{.squared_norm = INFINITY, .updates = 3}, Given{.squared_norm = NAN, .updates = 3},
        Given{.metric = NAN, .updates = 3}, Given{.metric = -INFINITY, .updates = 3}}) {
    Buffer s = scalars_of(given);
    decide(e, decision(s, 1));
    decide(e, decision(s, 1));
    expect_near(s, StepScalar::skip, 1, "skip");
    expect_near(s, StepScalar::updates, 3, "updates");
    expect_near(s, StepScalar::skipped_in_a_row, 2, "skipped in a row");
    expect_near(s, StepScalar::grad_scale, 0.125, "grad_scale");
  }
}

void halted(Exec& e) {
  Buffer s = scalars_of({.skipped = 2});
  decide(e, decision(s, 1, 3));
  expect_near(s, StepScalar::skip, 0, "two skipped steps of three");
  s = scalars_of({.skipped = 3});
  decide(e, decision(s, 1, 3));
  decide(e, decision(s, 1, 3));
  expect_near(s, StepScalar::skip, 1, "three skipped steps of three");
  expect_near(s, StepScalar::skipped_in_a_row, 5, "counted on");
}

void limited(Exec& e) {
  // The loss is 1.5, the norm 2.
  const auto decided = [&](double factor, double loss, double norm, const Given& given) {
    Buffer s = scalars_of(given);
    s.set(StepScalar::loss_factor, factor);
    s.set(StepScalar::loss_limit, loss);
    s.set(StepScalar::norm_limit, norm);
    decide(e, decision(s, 1, 3));
    return s;
  };
  const Given given{.updates = 3, .skipped = 2};
  for (const auto& [factor, loss, norm] : {std::array{-0.05, 1.4, 0.0}, {-0.05, 2.0, 1.9}, {0.0, 0.0, 1.9}}) {
    const Buffer s = decided(factor, loss, norm, given);
    expect_near(s, StepScalar::limited, 1, "limited");
    expect_near(s, StepScalar::skip, 1, "skip");
    expect_near(s, StepScalar::updates, 3, "updates");
    expect_near(s, StepScalar::skipped_in_a_row, 0, "a finite step ends the row");
    expect_near(s, StepScalar::grad_scale, 0.125, "grad_scale");
  }
  for (const auto& [factor, loss, norm] :
       {std::array{-0.05, 1.6, 2.1}, {0.0, -5.0, 0.0}, {-0.05, 1.6, 0.0}, {-0.05, 1.6, 2.0}}) {
    const Buffer s = decided(factor, loss, norm, given);
    expect_near(s, StepScalar::limited, 0, "within limits");
    expect_near(s, StepScalar::skip, 0, "skip");
    expect_near(s, StepScalar::updates, 4, "updates");
  }
  // A step that is not finite is not limited, and one after the run has ended is not either.
  for (const Given& bad : {Given{.metric = -INFINITY, .skipped = 1},
                           Given{.squared_norm = INFINITY, .skipped = 1}, Given{.skipped = 3}}) {
    const Buffer s = decided(-0.05, 1.4, 1, bad);
    expect_near(s, StepScalar::limited, 0, "not limited");
    expect_near(s, StepScalar::skip, 1, "skip");
    expect_near(s, StepScalar::skipped_in_a_row, bad.skipped + 1, "counted");
  }
}

void scaled(Exec& e) {
  // Gradients of a loss that is multiplied by 1024.
  Buffer s = scalars_of({.squared_norm = 4.0 * 1024 * 1024, .updates = 7});
  s.set(StepScalar::loss_scale, 1024);
  DecideStep a = decision(s, 0.5);
  decide(e, a);
  expect_near(s, StepScalar::grad_norm, 2, "norm");
  expect_near(s, StepScalar::grad_scale, 0.5 / (2 + 1e-6) / 1024, "clip");
  expect_near(s, StepScalar::loss_scale, 1024, "fixed scale");
  a.growth_interval = 2;
  decide(e, a);
  expect_near(s, StepScalar::loss_scale, 1024, "scale after one step");
  decide(e, a);
  expect_near(s, StepScalar::used_loss_scale, 1024, "scale of the second step");
  expect_near(s, StepScalar::loss_scale, 2048, "scale after two steps");
  expect_near(s, StepScalar::clean_steps, 0, "steps since");
  s.set(StepScalar::loss_scale, largest_loss_scale);
  decide(e, a);
  decide(e, a);
  expect_near(s, StepScalar::loss_scale, largest_loss_scale, "largest scale");
}

void overflowed(Exec& e) {
  Buffer s = scalars_of({.squared_norm = INFINITY, .updates = 7, .skipped = 1});
  s.set(StepScalar::loss_scale, 4);
  s.set(StepScalar::clean_steps, 5);
  DecideStep a = decision(s, 0.5, 3);
  a.growth_interval = 2000;
  for (const double want : {2.0, 1.0}) {
    decide(e, a);
    expect_near(s, StepScalar::skip, 1, "skip");
    expect_near(s, StepScalar::overflow, 1, "overflow");
    expect_near(s, StepScalar::loss_scale, want, "scale");
    expect_near(s, StepScalar::clean_steps, 0, "steps since");
    expect_near(s, StepScalar::updates, 7, "updates");
    expect_near(s, StepScalar::skipped_in_a_row, 1, "not counted");
  }
  decide(e, a);  // with the smallest scale
  expect_near(s, StepScalar::overflow, 0, "no overflow");
  expect_near(s, StepScalar::skipped_in_a_row, 2, "counted");
  // A loss that is not finite is not the scale's fault, nor is any step after the run has ended.
  for (const Given& given : {Given{.metric = NAN}, Given{.squared_norm = INFINITY, .skipped = 3}}) {
    s = scalars_of(given);
    s.set(StepScalar::loss_scale, 4);
    a.scalars = s;
    decide(e, a);
    expect_near(s, StepScalar::skip, 1, "skip");
    expect_near(s, StepScalar::overflow, 0, "no overflow");
    expect_near(s, StepScalar::loss_scale, 4, "scale");
    expect_near(s, StepScalar::skipped_in_a_row, given.skipped + 1, "counted");
  }
}

}  // namespace

NRL_OP_CASES(step) {
  registry.properties.push_back({"step.scaled", scaled});
  registry.properties.push_back({"step.limited", limited});
  registry.properties.push_back({"step.overflowed", overflowed});
  registry.properties.push_back({"step.taken", taken});
  registry.properties.push_back({"step.skipped", skipped});
  registry.properties.push_back({"step.halted", halted});
  for (double norm : {0.0, 4.0})
    registry.tests.push_back({fmt::format("decide_step norm {}", norm),
                              [=](Exec& e) -> Outputs {
                                Buffer s = scalars_of({.squared_norm = norm, .updates = 12345});
                                decide(e, decision(s, 1));
                                return {{"scalars", s}};
                              },
                              true});
}

}  // namespace nrl::ops_test
