#pragma once
// A simulated device whose events appear incomplete while the test asks for it.
#include <atomic>
#include <memory>

#include "tests/sim/sim.h"

class BusyDevice final : public nrl::device::Runtime {
  using H = void*;
  using Size = size_t;

 public:
  explicit BusyDevice(const nrl::device::SimOptions& options = {}) : sim_(nrl::device::open_sim(options)) {
    properties_ = sim_->properties();
  }
  /// While true no event is done.
  std::atomic<bool> busy{false};

  bool done(H event) override { return !busy && sim_->done(event); }

  void bind_thread() override { sim_->bind_thread(); }
  void* allocate(Size n) override { return sim_->allocate(n); }
  void release(void* p) noexcept override { sim_->release(p); }
  void* allocate_pinned(Size n) override { return sim_->allocate_pinned(n); }
  void release_pinned(void* p) noexcept override { sim_->release_pinned(p); }
  Size free_memory() override { return sim_->free_memory(); }
  H create_stream(nrl::device::Priority priority) override { return sim_->create_stream(priority); }
  void destroy_stream(H stream) noexcept override { sim_->destroy_stream(stream); }
  void synchronize(H stream) override { sim_->synchronize(stream); }
  void synchronize() override { sim_->synchronize(); }
  H create_event(nrl::device::EventKind kind) override { return sim_->create_event(kind); }
  void destroy_event(H event) noexcept override { sim_->destroy_event(event); }
  void record(H event, H stream) override { sim_->record(event, stream); }
  void wait(H stream, H event) override { sim_->wait(stream, event); }
  void synchronize_event(H event) override { sim_->synchronize_event(event); }
  double elapsed_ms(H begin, H end) override { return sim_->elapsed_ms(begin, end); }
  void copy(void* to, const void* from, Size n, nrl::device::CopyKind kind, H stream) override {
    sim_->copy(to, from, n, kind, stream);
  }
  void fill(void* p, uint8_t value, Size n, H stream) override { sim_->fill(p, value, n, stream); }
  void call_host(void (*f)(void*), void* argument, H stream) override {
    sim_->call_host(f, argument, stream);
  }
  void begin_capture(H stream) override { sim_->begin_capture(stream); }
  bool capturing(H stream) override { return sim_->capturing(stream); }
  H end_capture(H stream) override { return sim_->end_capture(stream); }
  void discard_capture(H stream) noexcept override { sim_->discard_capture(stream); }
  void launch(H graph, H stream) override { sim_->launch(graph, stream); }
  void destroy_graph(H graph) noexcept override { sim_->destroy_graph(graph); }

 private:
  std::unique_ptr<nrl::device::Runtime> sim_;
};
