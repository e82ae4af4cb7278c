#pragma once
// How kernels and the simulated GEMM enqueue work on the simulated device (device.cpp).

#include <functional>

namespace nrl::device {

/// Enqueues host code on a stream (device::StreamHandle): `work` runs in stream order, again at every launch
/// of a graph that captured it. It must not wait for other threads. `stream` null runs it at once.
void sim_enqueue(void* stream, std::function<void()> work);

}  // namespace nrl::device
