// Device communicators: order against streams, choice of the backend, errors.
#include <cstring>
#include <functional>

#include "core/base/error.h"
#include "parallel/comm/world/make_device.h"
#include "parallel/data/grad_reducer.h"
#include "tests/catch.h"
#include "tests/comm/backends.h"
#include "tests/comm/world_fixture.h"
#include "tests/sim/sim.h"

using namespace nrl;
using namespace nrl::comm;

namespace {

Communicator& world() {
  return test_world().comm();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A separate backend on a simulated device with this seed.
std::unique_ptr<Backend> staged(uint64_t seed, int64_t slot_bytes = 1 << 16) {
  device::SimOptions options;
  options.seed = seed * 7919 + static_cast<uint64_t>(world().rank());
  std::shared_ptr<device::Runtime> runtime = device::open_sim(options);
  DeviceCommOptions small;
  small.staged_slot_bytes = slot_bytes;
  auto comm = make_device_communicator(DeviceCommKind::staged, world(), *runtime, small);
  return std::make_unique<Backend>("staged", std::move(comm), std::move(runtime));
}

/// The error that f ends with.
Error error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e;
  }
  return Error(Exit::ok, "");
}

constexpr size_t element_count = 40000;

/// One producer, an all_reduce and one consumer; true when the consumer saw the right sum. `ordered` false:
/// the operation is not ordered by the stream. `waits` false: the consumer's stream does not wait.
bool right_result(uint64_t seed, bool ordered, bool waits) {
  const auto backend = staged(seed);
  device::Runtime& runtime = *backend->runtime();
  const device::StreamHandle stream = backend->stream().native;
  const size_t bytes = element_count * sizeof(int32_t);
  const device::Memory data(runtime, device::Memory::Kind::device, bytes);
  const device::Memory pinned(runtime, device::Memory::Kind::pinned, bytes);
  for (int i = 0; i <= 8; ++i)  // the last value is what is summed
    runtime.fill(data.data(), static_cast<uint8_t>(i == 8 ? 1 : 100 + i), bytes, stream);
  const View view(data.data(), element_count, DType::i32);
  Handle h = backend->comm().all_reduce_async(view, Reduce::sum, ordered ? backend->stream() : StreamRef{});
  const device::Stream other(runtime);
  if (waits) {
    h.wait();
    runtime.copy(pinned.data(), data.data(), bytes, device::CopyKind::device_to_host, stream);
    backend->idle();
  } else {  // reads while the operation is in flight
    h.wait();
    runtime.copy(pinned.data(), data.data(), bytes, device::CopyKind::device_to_host, other.get());
    other.synchronize();
  }
  std::vector<int32_t> got(element_count);
  std::memcpy(got.data(), pinned.data(), bytes);
  runtime.synchronize();
  return got == std::vector<int32_t>(element_count, 0x01010101 * world().size());
}

int64_t agreed_count(int64_t own) {
  std::vector<int64_t> sum = {own};
  world().all_reduce(sum);
  return sum[0];
}

}  // namespace

TEST_CASE("staged operations come after the stream's work, and the stream's later work after them",
          "[device]") {
  for (uint64_t seed = 1; seed <= 8; ++seed) REQUIRE(right_result(seed, true, true));
}

TEST_CASE("a missing order on either side shows as a wrong result", "[device]") {
  if (world().size() == 1) return;  // nothing moves
#ifdef __SANITIZE_THREAD__
  return;  // which reports it as the data race that it is
#endif
  int64_t no_producer_order = 0, no_consumer_order = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    no_producer_order += !right_result(seed, false, true);
    no_consumer_order += !right_result(seed, true, false);
  }
  REQUIRE(agreed_count(no_producer_order) > 0);
  REQUIRE(agreed_count(no_consumer_order) > 0);
}

TEST_CASE("operations on device and on host memory share one order", "[device]") {
  const auto backend = staged(5);
  const float n = static_cast<float>(world().size());
  for (int round = 0; round < 10; ++round) {
    // The host operation is issued while the device's waits for its producer; ranks are not in step.
    Data<float> data(*backend, 30000, 1.0f);
    Handle first = backend->comm().all_reduce_async(data, Reduce::sum, backend->stream());
    std::vector<float> host(1000, 2.0f);
    if ((round + world().rank()) % 2 == 0) {
      Handle second = world().all_reduce_async(host);
      first.wait();
      second.wait();
    } else {
      world().all_reduce(host);
      first.wait();
    }
    REQUIRE(data.read() == std::vector<float>(30000, n));
    REQUIRE(host == std::vector<float>(1000, 2 * n));
  }
}

TEST_CASE("a single rank orders copies by the stream and never dereferences device memory", "[device]") {
  const auto alone = world().subgroup(std::vector<int>{world().rank()}, "alone");
  std::shared_ptr<device::Runtime> runtime = device::open_sim({});
  Backend backend("alone", make_device_communicator(DeviceCommKind::nccl, *alone, *runtime), runtime);
  // Addresses that nothing can be read from.
  float* const nowhere = reinterpret_cast<float*>(4096);
  const std::span<float> data(nowhere, 100);
  backend.comm().all_reduce_async(View(data), Reduce::sum, backend.stream()).wait();
  backend.comm().all_gather_async(View(data), View(data), backend.stream()).wait();
  backend.comm().reduce_scatter_async(View(data), View(data), Reduce::max, backend.stream()).wait();
  backend.comm().broadcast_async(View(data), 0, backend.stream()).wait();
  backend.comm().all_reduce(View(data));
  backend.comm().barrier();
  Data<float> in(backend, 100, 3.0f), out(backend, 100), third(backend, 100);
  backend.comm().all_gather_async(in, out, backend.stream()).wait();
  backend.comm()
      .exchange_async({Message::send(out, 0, 4), Message::recv(third, 0, 4)}, backend.stream())
      .wait();
  REQUIRE(third.read() == std::vector<float>(100, 3.0f));
  REQUIRE(backend.comm().gather_texts("x") == std::vector<std::string>{"x"});
}

TEST_CASE("texts of a device group go through host memory", "[device]") {
  const auto backend = staged(6);
  REQUIRE(&backend->comm().host() == &world());
  const auto texts = backend->comm().gather_texts("rank " + std::to_string(world().rank()));
  REQUIRE(texts.size() == static_cast<size_t>(world().size()));
  REQUIRE(texts.back() == "rank " + std::to_string(world().size() - 1));
  std::string text = world().rank() == 0 ? "from the root" : "";
  backend->comm().broadcast_text(text, 0);
  REQUIRE(text == "from the root");
  backend->comm().check();
}

TEST_CASE("staged communication is logged once", "[device]") {
  const auto backend = staged(8);
  const auto group = backend->comm().split(0, world().rank(), "staged-counted");
  test_world().collective_log().reset_totals();
  Data<float> data(*backend, 50000, 1.0f);
  group->all_reduce_async(data, Reduce::sum, backend->stream()).wait();
  backend->idle();
  int seen = 0;
  for (const LogTotal& t : test_world().collective_log().totals()) {
    if (t.group != "staged-counted") continue;
    ++seen;
    REQUIRE(t.count == 1);
    REQUIRE(t.bytes == 200000);
    REQUIRE(t.busy_seconds > 0);
    REQUIRE(t.exposed_seconds > 0);
  }
  REQUIRE(seen == 1);
}

TEST_CASE("a failing staged operation reports its error in wait()", "[device]") {
  if (world().size() < 2) return;
  const auto backend = staged(9);
  Data<float> data(*backend, 7, 1.0f);
  if (world().rank() == 0) {
    backend->comm().send_async(data.part(0, 5), 1, 9, backend->stream()).wait();
  } else if (world().rank() == 1) {
    Handle h = backend->comm().recv_async(data, 0, 9, backend->stream());
    const Error e = error_of([&] { h.wait(); });
    REQUIRE(e.code() == Exit::internal);
    REQUIRE(contains(e.what(), "received 20"));
  }
}

TEST_CASE("capturing staged communication into a graph is refused", "[device]") {
  if (world().size() == 1) return;
  device::Runtime* runtime = nullptr;
  const auto backend = staged(10);
  runtime = backend->runtime();
  Data<float> data(*backend, 7, 1.0f);
  backend->idle();
  runtime->begin_capture(backend->stream().native);
  const Error e =
      error_of([&] { backend->comm().all_reduce_async(data, Reduce::sum, backend->stream()).wait(); });
  const device::Graph graph(*runtime, runtime->end_capture(backend->stream().native));
  REQUIRE(contains(e.what(), "cannot be captured into a graph"));
  REQUIRE(backend->comm().outstanding() == 0);
  backend->all_reduce(data);  // goes on
  REQUIRE(data.read()[6] == static_cast<float>(world().size()));
}

TEST_CASE("staging buffers must be equal on all ranks and large enough", "[device]") {
  if (world().size() == 1) return;
  const auto runtime = device::open_sim({});
  DeviceCommOptions options;
  options.staged_slot_bytes = 64;
  REQUIRE(error_of([&] {
            make_device_communicator(DeviceCommKind::staged, world(), *runtime, options);
          }).code() == Exit::config);
  options.staged_slot_bytes = 65536 + 64 * world().rank();
  REQUIRE(error_of([&] {
            make_device_communicator(DeviceCommKind::staged, world(), *runtime, options);
          }).code() == Exit::internal);
}

TEST_CASE("unsupported NCCL is refused with a fix", "[device]") {
  if (world().size() == 1) return;
  const auto runtime = device::open_sim({});
  const Error e = error_of([&] { make_device_communicator(DeviceCommKind::nccl, world(), *runtime); });
  REQUIRE(e.code() == Exit::unavailable);
  REQUIRE(contains(e.what(), "distributed.backend: staged"));
}

TEST_CASE("the backend of device memory is chosen from devices and library", "[device]") {
  using Kind = DeviceCommKind;
  const std::vector<std::string> own = {"GPU-a", "GPU-b", "GPU-c"}, shared = {"GPU-a", "GPU-b", "GPU-a"},
                                 one = {"GPU-a"}, simulated = {"simulated", "simulated"};
  const NcclSupport none{}, old{true, 22809, true}, young{true, 23203, false}, allowed{true, 23203, true};
  const auto choice = [](std::optional<Kind> wanted, const auto& devices, const NcclSupport& nccl) {
    return choose_device_comm(wanted, devices, nccl);
  };
  REQUIRE(choice({}, own, old).kind == Kind::nccl);
  REQUIRE(choice({}, own, none).kind == Kind::staged);
  REQUIRE(contains(choice({}, own, none).why, "no NCCL"));
  REQUIRE(choice({}, one, old).kind == Kind::staged);
  REQUIRE(choice({}, simulated, allowed).kind == Kind::staged);
  REQUIRE(choice({}, shared, old).kind == Kind::staged);
  REQUIRE(contains(choice({}, shared, old).why, "ranks 0 and 2 share device GPU-a"));
  REQUIRE(contains(choice({}, shared, old).why, "2.28.9"));
  REQUIRE(contains(choice({}, shared, young).why, "NCCL_MULTI_RANK_GPU_ENABLE=1"));
  REQUIRE(choice({}, shared, allowed).kind == Kind::staged);  // experimental: only on request
  REQUIRE(choice(Kind::nccl, shared, allowed).kind == Kind::nccl);
  REQUIRE(choice(Kind::staged, own, old).kind == Kind::staged);
  for (const NcclSupport& nccl : {none, old, young}) {
    const Error e = error_of([&] { choice(Kind::nccl, shared, nccl); });
    REQUIRE(e.code() == Exit::unavailable);
    REQUIRE(contains(e.what(), "distributed.backend: staged"));
  }
}

TEST_CASE("kernels of all NCCL groups fit on the device beside computation", "[device]") {
  REQUIRE(nccl_ctas(132, 1) == 32);
  for (const int multiprocessors : {48, 108, 132, 148})
    for (int kernels = 1; kernels <= 16; ++kernels) {
      const int each = nccl_ctas(multiprocessors, kernels);
      REQUIRE(each >= 1);
      REQUIRE(each * kernels * 4 <= multiprocessors * 3);
    }
  const Error e = error_of([] { nccl_ctas(8, 7); });
  REQUIRE(e.code() == Exit::unavailable);
  REQUIRE(contains(e.what(), "in 7 NCCL groups per rank"));
}

TEST_CASE("gradients on a device are reduced to the bits that host memory gets", "[device][reducer]") {
  const int n = world().size(), me = world().rank();
  std::vector<parallel::ParamSpec> params;
  for (int i = 0; i < 12; ++i) params.push_back({"p" + std::to_string(i), 1000 + 7919 * i % 30000});
  const parallel::FlatBuckets layout(params, 40000, n);
  const auto total = static_cast<size_t>(layout.total());
  std::vector<float> start(total);
  for (size_t i = 0; i < total; ++i)
    start[i] = static_cast<float>((i * 31 + static_cast<size_t>(me) * 17) % 257) * 0.37f - 40.0f;
  for (uint64_t seed = 20; seed < 23; ++seed) {
    for (const parallel::ShardingStrategy& strategy : {parallel::sharding::ddp, parallel::sharding::optim}) {
      for (bool overlap : {false, true}) {
        const auto backend = staged(seed);
        std::vector<float> expected = start;
        const auto flat_tensor = [&](float* data) {
          return parallel::GradMemory{make_tensor(data, DType::f32, {layout.total()})};
        };
        const parallel::ReduceOptions options{.strategy = strategy, .overlap = overlap};
        ops::Exec host_exec, device_exec;  // sums in f32 need no kernels
        device_exec.stream = backend->stream().native;
        parallel::GradReducer on_host(layout, flat_tensor(expected.data()), {&world()}, options, host_exec);
        Data<float> grads(*backend, total), weights(*backend, total);
        const std::span<float> flat(static_cast<float*>(grads.view().data), total);
        parallel::GradReducer on_device(layout, flat_tensor(flat.data()), {&backend->comm()}, options,
                                        device_exec);
        on_device.start();
        on_host.start();
        const Data<float> source(*backend, start);
        for (int p = static_cast<int>(params.size()); p-- > 0;) {
          // The gradient is produced right before it is reported, by work that has not run.
          const parallel::ParamPlace& place = layout.place(p);
          backend->runtime()->copy(
              flat.data() + place.start,
              static_cast<const float*>(const_cast<Data<float>&>(source).view().data) + place.start,
              static_cast<size_t>(params[p].numel) * sizeof(float), device::CopyKind::device_to_device,
              backend->stream().native);
          on_device.ready(p);
        }
        for (int p = 0; p < static_cast<int>(params.size()); ++p) on_host.ready(p);
        on_device.finish();
        on_host.finish();
        const auto& got = grads.read();
        int64_t bad = 0;
        for (int p = 0; p < static_cast<int>(params.size()); ++p) {
          const parallel::ParamPlace& place = layout.place(p);
          const parallel::ElementRange own = layout.shard(place.bucket, me);
          for (int64_t i = place.start; i < place.start + params[p].numel; ++i) {
            if (strategy.optimizer_state && (i < own.begin || i >= own.end)) continue;
            const auto at = static_cast<size_t>(i);
            bad += std::memcmp(&got[at], &expected[at], sizeof(float)) != 0;
          }
        }
        REQUIRE(bad == 0);
        if (!strategy.optimizer_state) continue;
        // Updated shards come back whole.
        on_host.start_gather(std::span(expected));
        on_device.start_gather(grads);
        on_host.wait_gathers();
        on_device.wait_gathers();
        const auto& whole = grads.read();
        for (int p = 0; p < static_cast<int>(params.size()); ++p) {
          const auto begin = static_cast<size_t>(layout.place(p).start);
          const auto numel = static_cast<size_t>(params[p].numel);
          bad += std::memcmp(&whole[begin], &expected[begin], numel * sizeof(float)) != 0;
        }
        REQUIRE(bad == 0);
      }
    }
  }
}
