// The simulated device does what CUDA's documents say of streams, events, memory and captures, in any order
// that they allow.

#include "tests/sim/sim.h"

#include <csignal>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/device/kernel.h"
#include "tests/catch.h"

namespace {

using namespace nrl;
using device::CopyKind;
using device::Event;
using device::EventKind;
using device::Memory;
using device::Stream;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

__global__ void add_one(int* p, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) p[i] += 1;
}

__global__ void strays(int* p) {
  if (threadIdx.x < 3) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  p[threadIdx.x] = 1;
}

/// Ints on the device; `values()` waits for `stream`.
class Ints {
 public:
  Ints(device::Runtime& runtime, int n)
      : runtime_(&runtime), n_(n), memory_(runtime, Memory::Kind::device, static_cast<size_t>(n) * 4) {}
  int* get() const { return reinterpret_cast<int*>(memory_.data()); }
  void fill(uint8_t byte, const Stream& stream) const {
    runtime_->fill(get(), byte, memory_.size(), stream.get());
  }
  void add(const Stream& stream) const {
    NRL_LAUNCH((add_one), static_cast<unsigned>((n_ + 31) / 32), 32, 0, stream.get(), get(), n_);
  }
  std::vector<int> values(const Stream& stream) const {
    std::vector<int> v(static_cast<size_t>(n_));
    runtime_->copy(v.data(), get(), memory_.size(), CopyKind::device_to_host, stream.get());
    return v;
  }

 private:
  device::Runtime* runtime_;
  int n_;
  Memory memory_;
};

TEST_CASE("work of a stream runs in its order, and not before it must", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  std::vector<int> order;
  for (int i = 0; i < 20; ++i) device::sim_enqueue(stream.get(), [&order, i] { order.push_back(i); });
  REQUIRE(order.empty());
  stream.synchronize();
  std::vector<int> expected(20);
  std::iota(expected.begin(), expected.end(), 0);
  REQUIRE(order == expected);

  const Ints x(*runtime, 100);
  x.fill(0, stream);
  x.add(stream);
  x.add(stream);
  REQUIRE(x.values(stream) == std::vector<int>(100, 2));
}

TEST_CASE("a device that does not defer runs work at once", "[sim]") {
  const auto runtime = device::open_sim({.deferred = false});
  const Stream stream(*runtime);
  bool ran = false;
  device::sim_enqueue(stream.get(), [&] { ran = true; });
  REQUIRE(ran);
}

TEST_CASE("eager seeds run work before anybody waits", "[sim]") {
  int early = 0;
  for (uint64_t seed : {3, 4}) {
    const auto runtime = device::open_sim({.seed = seed});
    const Stream stream(*runtime);
    int ran = 0;
    for (int i = 0; i < 200; ++i) device::sim_enqueue(stream.get(), [&] { ++ran; });
    early += ran > 0;
    runtime->synchronize();
    REQUIRE(ran == 200);
  }
  REQUIRE(early == 2);
}

TEST_CASE("a full queue makes the host wait", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  int ran = 0;
  for (int i = 0; i < 5000; ++i) device::sim_enqueue(stream.get(), [&] { ++ran; });
  REQUIRE(ran > 3000);
  REQUIRE(ran < 5000);
  stream.synchronize();
  REQUIRE(ran == 5000);
}

/// A producer on one stream, a consumer on another; what the consumer saw.
int consume(uint64_t seed, bool waits) {
  const auto runtime = device::open_sim({.seed = seed});
  const Stream a(*runtime), b(*runtime);
  const Event ready(*runtime);
  const Ints x(*runtime, 8), y(*runtime, 8);
  x.fill(0, a);
  a.synchronize();
  for (int i = 0; i < 5; ++i) x.add(a);
  ready.record(a.get());
  if (waits) ready.wait_in(b.get());
  runtime->copy(y.get(), x.get(), 32, CopyKind::device_to_device, b.get());
  return y.values(b)[7];
}

TEST_CASE("a missing event wait becomes a wrong result", "[sim]") {
  int wrong = 0;
  std::vector<bool> seen(6, false);
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    REQUIRE(consume(seed, true) == 5);
    const int got = consume(seed, false);
    wrong += got != 5;
    seen[got] = true;
  }
  REQUIRE(wrong >= 10);
  REQUIRE(wrong < 40);  // and right in some order: that is why one order does not show it
  REQUIRE(seen[0]);     // long before
  REQUIRE((seen[1] || seen[2] || seen[3] || seen[4]));  // in the middle
}

TEST_CASE("the same seed gives the same order", "[sim]") {
  const auto order = [](uint64_t seed) {
    const auto runtime = device::open_sim({.seed = seed});
    const Stream a(*runtime), b(*runtime), c(*runtime);
    std::vector<int> v;
    for (int i = 0; i < 30; ++i)
      device::sim_enqueue((i % 3 == 0 ? a : i % 3 == 1 ? b : c).get(), [&v, i] { v.push_back(i); });
    runtime->synchronize();
    return v;
  };
  REQUIRE(order(5) == order(5));
  REQUIRE(order(5) != order(6));
}

TEST_CASE("pinned memory reused too early is seen", "[sim]") {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const auto runtime = device::open_sim({.seed = seed});
    const Stream stream(*runtime);
    const Ints x(*runtime, 4);
    const Memory pinned(*runtime, Memory::Kind::pinned, 16);
    std::memset(pinned.data(), 1, 16);
    runtime->copy(x.get(), pinned.data(), 16, CopyKind::host_to_device, stream.get());
    std::memset(pinned.data(), 2, 16);
    wrong += x.values(stream)[0] != 0x01010101;
  }
  REQUIRE(wrong >= 4);
}

TEST_CASE("pageable memory may be reused after the call", "[sim]") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const auto runtime = device::open_sim({.seed = seed});
    const Stream stream(*runtime);
    const Ints x(*runtime, 4);
    std::vector<int> v(4, 7);
    runtime->copy(x.get(), v.data(), 16, CopyKind::host_to_device, stream.get());
    v.assign(4, 8);
    REQUIRE(x.values(stream) == std::vector<int>(4, 7));  // the copy back is synchronous
  }
}

TEST_CASE("events: never recorded, recorded again, timed", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream a(*runtime), b(*runtime);
  const Event event(*runtime), begin(*runtime, EventKind::timed), end(*runtime, EventKind::timed);
  // Waiting for an event that was never recorded waits for nothing.
  REQUIRE(event.done());
  event.wait_in(a.get());
  event.synchronize();

  // A wait holds for the record() before it, not for later ones: here the later one comes after b's work.
  const Event between(*runtime);
  int step = 0;
  event.record(a.get());
  event.wait_in(b.get());
  device::sim_enqueue(b.get(), [&] { step = 1; });
  between.record(b.get());
  between.wait_in(a.get());
  device::sim_enqueue(a.get(), [&] { step *= 2; });
  event.record(a.get());
  b.synchronize();
  REQUIRE(step >= 1);
  event.synchronize();
  REQUIRE(step == 2);

  REQUIRE(contains(error_of([&] { runtime->elapsed_ms(begin.get(), end.get()); }), "not recorded"));
  begin.record(a.get());
  device::sim_enqueue(a.get(), [] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  end.record(a.get());
  REQUIRE(contains(error_of([&] { runtime->elapsed_ms(begin.get(), end.get()); }), "not done"));
  int polls = 0;
  while (!end.done()) REQUIRE(++polls < 1000);  // somebody who polls sees progress
  REQUIRE(runtime->elapsed_ms(begin.get(), end.get()) >= 2.9);
  event.record(a.get());
  event.synchronize();
  REQUIRE(contains(error_of([&] { runtime->elapsed_ms(begin.get(), event.get()); }), "not timed"));
}

TEST_CASE("a stream that was destroyed finishes its work", "[sim]") {
  const auto runtime = device::open_sim();
  int ran = 0;
  {
    const Stream stream(*runtime);
    device::sim_enqueue(stream.get(), [&] { ++ran; });
  }
  REQUIRE(ran == 0);
  runtime->synchronize();
  REQUIRE(ran == 1);
}

TEST_CASE("errors of work stay, and later calls tell of them", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime), other(*runtime);
  const Event event(*runtime);
  const Ints x(*runtime, 32);
  NRL_LAUNCH((strays), 1, 32, 0, stream.get(), x.get());
  bool later = false;
  device::sim_enqueue(stream.get(), [&] { later = true; });
  event.record(stream.get());
  event.wait_in(other.get());
  REQUIRE_THROWS_AS(stream.synchronize(), sim::KernelError);
  REQUIRE(contains(error_of([&] { other.synchronize(); }), "strays"));
  REQUIRE(contains(error_of([&] { (void)event.done(); }), "strays"));
  REQUIRE(contains(error_of([&] { x.add(other); }), "strays"));
  REQUIRE(contains(error_of([&] { Ints(*runtime, 1); }), "strays"));
  REQUIRE_FALSE(later);
}

TEST_CASE("memory: NaN at the start, limited, checked", "[sim]") {
  const auto runtime = device::open_sim({.memory = 1 << 20});
  const Stream stream(*runtime);
  {
    const Ints x(*runtime, 1000);
    REQUIRE(x.values(stream) == std::vector<int>(1000, -1));
    REQUIRE(runtime->free_memory() == (1 << 20) - 4000);
    REQUIRE(reinterpret_cast<uintptr_t>(x.get()) % 256 == 0);
    try {
      Memory(*runtime, Memory::Kind::device, 1 << 20);
      FAIL("more memory than there is");
    } catch (const Error& e) {
      REQUIRE(e.code() == Exit::out_of_memory);
      REQUIRE(contains(e.what(), "1048576"));
    }
    std::vector<int> host(1001);
    const auto copy = [&](void* to, const void* from, size_t n, CopyKind kind) {
      return error_of([&] { runtime->copy(to, from, n, kind, stream.get()); });
    };
    REQUIRE(contains(copy(x.get(), host.data(), 4004, CopyKind::host_to_device), "no block"));
    REQUIRE(contains(copy(host.data(), x.get() + 999, 8, CopyKind::device_to_host), "no block"));
    REQUIRE(contains(copy(x.get(), x.get(), 4, CopyKind::host_to_device), "host memory must be"));
    REQUIRE(contains(copy(host.data(), host.data(), 4, CopyKind::device_to_device), "no block"));
    REQUIRE(contains(error_of([&] { runtime->fill(host.data(), 0, 4, stream.get()); }), "no block"));
  }
  REQUIRE(runtime->free_memory() == 1 << 20);
}

TEST_CASE("release waits for the work that uses the memory", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  std::vector<int> v(4, 3);
  const Ints y(*runtime, 4);
  {
    const Ints x(*runtime, 4);
    runtime->copy(x.get(), v.data(), 16, CopyKind::host_to_device, stream.get());
    runtime->copy(y.get(), x.get(), 16, CopyKind::device_to_device, stream.get());
  }
  REQUIRE(y.values(stream) == v);
}

TEST_CASE("calls that CUDA forbids are errors", "[sim]") {
  const auto runtime = device::open_sim(), other = device::open_sim();
  const Stream stream(*runtime), foreign(*other);
  const Event event(*runtime);
  const device::StreamHandle gone = Stream(*runtime).get();
  REQUIRE(contains(error_of([&] { runtime->synchronize(gone); }), "destroyed"));
  REQUIRE(contains(error_of([&] { device::sim_enqueue(gone, [] {}); }), "destroyed"));
  REQUIRE(contains(error_of([&] { runtime->synchronize(foreign.get()); }), "no stream of this device"));
  REQUIRE(contains(error_of([&] { runtime->synchronize(nullptr); }), "no stream was given"));
  REQUIRE(contains(error_of([&] { other->record(event.get(), foreign.get()); }), "no event of this device"));

  const Ints rows(*runtime, 64);
  const auto copy_rows = [&](int64_t to, int64_t from) {
    return error_of([&] { runtime->copy_rows(rows.get() + 32, to, rows.get(), from, 8, 2, stream.get()); });
  };
  REQUIRE(copy_rows(8, 16).empty());
  REQUIRE(contains(copy_rows(4, 16), "copy_rows of 8 bytes with a pitch of 4"));
  REQUIRE(contains(copy_rows(16, 0), "with a pitch of 0"));
  REQUIRE(contains(copy_rows(16, int64_t{1} << 31), "with a pitch of 2147483648"));

  std::string unbound, bound;
  std::thread([&] {
    unbound = error_of([&] { device::sim_enqueue(stream.get(), [] {}); });
    runtime->bind_thread();
    bound = error_of([&] { device::sim_enqueue(stream.get(), [] {}); });
  }).join();
  REQUIRE(contains(unbound, "bind_thread"));
  REQUIRE(bound.empty());

  std::string inside;
  device::sim_enqueue(stream.get(), [&] { inside = error_of([&] { (void)runtime->free_memory(); }); });
  stream.synchronize();
  REQUIRE(contains(inside, "called by work of a stream"));
}

TEST_CASE("host functions run in stream order", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  std::vector<int> seen;
  device::sim_enqueue(stream.get(), [&] { seen.push_back(1); });
  runtime->call_host([](void* v) { static_cast<std::vector<int>*>(v)->push_back(2); }, &seen, stream.get());
  device::sim_enqueue(stream.get(), [&] { seen.push_back(3); });
  stream.synchronize();
  REQUIRE(seen == std::vector<int>{1, 2, 3});
}

TEST_CASE("several threads use one device", "[sim]") {
  const auto runtime = device::open_sim();
  std::vector<int> results(4, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      runtime->bind_thread();
      const Stream stream(*runtime);
      const Ints x(*runtime, 64);
      x.fill(0, stream);
      for (size_t i = 0; i <= t; ++i) x.add(stream);
      results[t] = x.values(stream)[63];
    });
  for (auto& t : threads) t.join();
  REQUIRE(results == std::vector<int>{1, 2, 3, 4});
}

TEST_CASE("leaks and unseen errors are reported when the device is destroyed", "[sim]") {
  std::string told;
  {
    const auto runtime = device::open_sim({.on_problem = [&](const std::string& text) { told = text; }});
    (void)runtime->create_event(EventKind::order);
    (void)runtime->allocate(12);
  }
  REQUIRE(contains(told, "1 events"));
  REQUIRE(contains(told, "1 blocks of device memory (12 bytes)"));
  told.clear();
  {
    const auto runtime = device::open_sim({.on_problem = [&](const std::string& text) { told = text; }});
    const Stream stream(*runtime);
    device::sim_enqueue(stream.get(), [] { fail(Exit::internal, "nobody looked"); });
  }
  REQUIRE(contains(told, "nobody looked"));
}

/// The signal that a child process running `f` dies of; 0: none.
int signal_of(const std::function<void()>& f) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int s : {SIGSEGV, SIGABRT}) std::signal(s, SIG_DFL);
    (void)!std::freopen("/dev/null", "w", stderr);
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

TEST_CASE("host code that touches device memory dies", "[sim]") {
  const auto runtime = device::open_sim();
  const Stream stream(*runtime);
  const Ints x(*runtime, 4);
  x.fill(1, stream);
  stream.synchronize();
  volatile int sink = 0;
  REQUIRE(signal_of([&] { sink = *x.get(); }) == SIGSEGV);
  // Kernels and the buffer's last byte are fine, the page behind it is not.
  const Memory page(*runtime, Memory::Kind::pinned, 4096);
  REQUIRE(signal_of([&] { sink = static_cast<int>(page.data()[4095]); }) == 0);
  REQUIRE(signal_of([&] { sink = static_cast<int>(page.data()[4096]); }) == SIGSEGV);
  REQUIRE(signal_of([&] { runtime->release(x.get() + 1); }) == SIGABRT);
}

}  // namespace
