#include "apps/engine/step_scalars.h"

#include <algorithm>
#include <cmath>

#include "core/ops/transfer.h"

namespace nrl::engine {

using S = ops::StepScalar;

namespace {

constexpr size_t bytes = S::count * sizeof(double);
// Rank 0's requests for a gathering and a checkpoint are fractions of S::stop, whose whole part counts the
// ranks that were asked to stop: the sums have no element more for them.
constexpr double gather_request = 0x1p-20, save_request = 0x1p-21;
// Requests for a window are a smaller fraction: exact for up to 2^18 ranks that ask and 2^12 that stop.
constexpr double profile_request = 0x1p-40;
constexpr size_t host_values = S::updates;  // the leading scalars, which the host sets
static_assert(S::learning_rate == S::sums && S::norm_limit + 1 == S::updates);

}  // namespace

StepScalars::StepScalars(const Tensor& scalars, double* host, const LossScale& loss_scale, ops::Exec& exec)
    : scalars_(scalars), loss_scale_(loss_scale), exec_(&exec), host_(host) {
  restore({});
  if (!exec.device) return;
  for (device::Event& event : copied_back_) event = device::Event(*exec.device);
}

double* StepScalars::host_scalars(int64_t step) const {
  if (!exec_->device) return scalars_.ptr<double>();
  return host_ + step % buffers * S::count;
}

void StepScalars::restore(const StepCounters& c) {
  double values[S::count] = {};
  values[S::updates] = static_cast<double>(c.updates);
  values[S::skipped_in_a_row] = static_cast<double>(c.skipped_in_a_row);
  const bool adapts = loss_scale_.growth_interval > 0 && c.loss_scale > 0;
  values[S::loss_scale] = adapts ? c.loss_scale : loss_scale_.initial;
  values[S::clean_steps] = adapts ? static_cast<double>(c.clean_steps) : 0;
  ops::upload(*exec_, scalars_, values);
}

void StepScalars::begin(double learning_rate, const StepRequests& asks, const StepBounds& bounds) {
  NRL_CHECK(in_flight_ < buffers, "more than {} steps in flight", buffers);
  double* values = host_scalars(begun_);
  std::fill(values, values + S::sums, 0.0);
  values[S::stop] = (asks.stop ? 1 : 0) + (asks.gather ? gather_request : 0) +
                    (asks.save ? save_request : 0) + (asks.profile ? profile_request : 0);
  values[S::learning_rate] = learning_rate;
  values[S::loss_factor] = bounds.loss_factor;
  values[S::loss_limit] = bounds.loss;
  values[S::norm_limit] = bounds.grad_norm;
  ++in_flight_;
  ++begun_;
  if (exec_->device)
    exec_->device->copy(scalars_.data, values, host_values * sizeof(double), device::CopyKind::host_to_device,
                        exec_->stream);
}

void StepScalars::finish() {
  if (!exec_->device) return;
  const int64_t step = begun_ - 1;
  exec_->device->copy(host_scalars(step), scalars_.data, bytes, device::CopyKind::device_to_host,
                      exec_->stream);
  copied_back_[step % buffers].record(exec_->stream);
}

const device::Event* StepScalars::oldest() const {
  NRL_CHECK(in_flight_ > 0);
  return exec_->device ? &copied_back_[(begun_ - in_flight_) % buffers] : nullptr;
}

StepResult StepScalars::collect() {
  NRL_CHECK(in_flight_ > 0);
  const int64_t step = begun_ - in_flight_--;
  if (exec_->device) copied_back_[step % buffers].synchronize();
  const double* v = host_scalars(step);
  StepResult r;
  std::copy_n(v + S::metrics, S::max_metrics, r.metrics.begin());
  std::copy_n(v + S::router, r.router.size(), r.router.begin());
  r.grad_norm = v[S::grad_norm];
  r.updates = static_cast<int64_t>(v[S::updates]);
  r.skipped_in_a_row = static_cast<int64_t>(v[S::skipped_in_a_row]);
  r.skipped = v[S::skip] != 0;
  double asked = v[S::stop];
  const auto take = [&](double request) {
    const bool found = asked >= request;
    if (found) asked -= request;
    return found;
  };
  r.asked.stop = asked >= 1;
  asked -= std::floor(asked);
  r.asked.gather = take(gather_request);
  r.asked.save = take(save_request);
  r.asked.profile = asked >= profile_request;
  r.overflow = v[S::overflow] != 0;
  r.limited = v[S::limited] != 0;
  r.used_loss_scale = v[S::used_loss_scale];
  r.loss_scale = loss_scale_.active() ? v[S::loss_scale] : 0;
  r.clean_steps = static_cast<int64_t>(v[S::clean_steps]);
  return r;
}

}  // namespace nrl::engine
