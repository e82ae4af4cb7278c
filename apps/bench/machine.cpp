#include "apps/bench/machine.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <span>

#include <unistd.h>

#include "apps/machine/device_models.h"
#include "core/base/log.h"
#include "core/base/philox.h"
#include "core/base/sample.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/parallel.h"
#include "core/device/cpu/threads.h"
#include "core/io/atomic_file.h"
#include "core/ops/cpu_choice.h"
#include "core/ops/transfer.h"

namespace nrl::bench {
namespace {

constexpr int64_t pattern_elements = 1 << 18;

const std::vector<float>& normal_pattern() {
  static const std::vector<float> pattern = [] {
    std::vector<float> values(pattern_elements);
    const PhiloxStream stream(1, "bench");
    for (uint64_t i = 0; i < pattern_elements / 4; ++i) {
      const auto four = stream.normals(i);
      for (uint64_t k = 0; k < 4; ++k) values[i * 4 + k] = static_cast<float>(four[k]);
    }
    return values;
  }();
  return pattern;
}

std::string processor_text(int threads) {
  return fmt::format("{}, {} threads, {}", cpu::processor_name(), threads, name_of(ops::cpu_choice().isa));
}

}  // namespace

JsonValue describe_device(const ops::Exec& exec) {
  if (!exec.device)
    return JsonValue::object(
        {{"kind", "cpu"}, {"name", processor_text(exec.threads)}, {"threads", exec.threads}});
  const device::Properties& p = exec.device->properties();
  return JsonValue::object({{"kind", "cuda"},
                            {"name", p.name},
                            {"simulated", p.simulated},
                            {"compute_capability", fmt::format("{}.{}", p.major, p.minor)},
                            {"multiprocessors", p.multiprocessors},
                            {"memory_bytes", p.memory},
                            {"l2_bytes", p.l2_cache},
                            {"sheet_bandwidth", p.memory_bandwidth},
                            {"sheet_flops", machine::peak_flops(p)}});
}

Machine::Machine(const std::string& device, bool quick) : quick_(quick) {
  std::string why_not;
  const bool found = device != "cpu" && !train::accelerator_backend().devices(why_not).empty();
  if (device == "cuda" && !found)
    fail(Exit::unavailable, "--device cuda: {}. Fix: use --device cpu or auto, or see nrl-train doctor",
         why_not);
  if (!found) {
    exec_.kernels = &ops::cpu_kernels(ops::cpu_choice().isa);
    exec_.threads = cpu::available_cores();
    cpu::use_threads(exec_.threads);
    name_ = processor_text(exec_.threads);
    cache_bytes_ = machine::processor_cache();
    return;
  }
  accelerator_ = train::open_accelerator(0, {});
  exec_ = accelerator_.exec();
  describe_gpu();
}

Machine::Machine(const ops::Exec& exec, bool quick) : exec_(exec), quick_(quick) {
  exec_.workspace = {};
  if (gpu()) {
    describe_gpu();
    return;
  }
  name_ = processor_text(exec_.threads);
  cache_bytes_ = machine::processor_cache();
}

void Machine::describe_gpu() {
  const device::Properties& p = exec_.device->properties();
  name_ = p.name;
  cache_bytes_ = p.l2_cache;
  begin_ = device::Event(*exec_.device, device::EventKind::timed);
  end_ = device::Event(*exec_.device, device::EventKind::timed);
}

void Machine::need_workspace(size_t bytes) {
  if (bytes <= exec_.workspace.size) return;
  ops::synchronize(exec_);
  if (gpu()) {
    device_workspace_ = {};
    device_workspace_ = device::Memory(*exec_.device, device::Memory::Kind::device, bytes);
    exec_.workspace = {device_workspace_.data(), bytes};
  } else {
    host_workspace_ = cpu::HostMemory(bytes);
    exec_.workspace = {host_workspace_.data(), bytes};
  }
}

int Machine::sets(double bytes) const {
  constexpr int max_sets = 8;
  const double needed = 3.0 * static_cast<double>(cache_bytes_) / std::max(bytes, 1.0);
  return quick_ ? 1 : 1 + static_cast<int>(std::min<double>(max_sets - 1, std::ceil(needed)));
}

double Machine::round(const std::function<void(int)>& work, int& next, int calls) {
  if (!gpu()) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) work(next++);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / calls;
  }
  begin_.record(exec_.stream);
  for (int i = 0; i < calls; ++i) work(next++);
  end_.record(exec_.stream);
  end_.synchronize();
  return exec_.device->elapsed_ms(begin_.get(), end_.get()) * 1e-3 / calls;
}

double Machine::seconds(const std::function<void(int)>& work, int sets) {
  int next = 0;
  for (int i = 0; i < (quick_ ? 1 : sets); ++i) work(next++);  // warm-up: page faults, kernel selection
  ops::synchronize(exec_);
  if (quick_) return round(work, next, 1);
  // A round on a GPU is long enough to hide the overhead of events and of the first launch. A round on a CPU
  // is one call, and the fastest counts: it was disturbed least by other programs.
  constexpr double round_seconds = 0.02, all_seconds = 0.3;
  const double estimate = std::max(round(work, next, gpu() ? sets : 1), 1e-7);
  const int calls = gpu() ? static_cast<int>(std::clamp(round_seconds / estimate, double(sets), 2000.0)) : 1;
  std::vector<double> rounds;
  double total = 0;
  while (rounds.size() < 3 || (total < all_seconds && rounds.size() < 25)) {
    rounds.push_back(round(work, next, calls));
    total += rounds.back() * calls;
  }
  return gpu() ? median(rounds) : *std::min_element(rounds.begin(), rounds.end());
}

double Machine::copy_bandwidth() {
  return copy_bandwidth_ > 0 ? copy_bandwidth_ : copy_bandwidth_again();
}

double Machine::copy_bandwidth_again() {
  const int64_t bytes = quick_ ? int64_t{1} << 20 : gpu() ? int64_t{256} << 20 : int64_t{64} << 20;
  const int count = sets(2.0 * static_cast<double>(bytes));
  Tensors memory(*this);
  std::vector<Tensor> from, to;
  for (int i = 0; i < count; ++i) {
    from.push_back(memory.normal(DType::f32, {bytes / 4}));
    to.push_back(memory.constant(DType::f32, {bytes / 4}, 0));
  }
  const double t = seconds(
      [&](int i) {
        const auto k = static_cast<size_t>(i % count);
        if (gpu()) {
          exec_.device->copy(to[k].data, from[k].data, static_cast<size_t>(bytes),
                             device::CopyKind::device_to_device, exec_.stream);
          return;
        }
        cpu::parallel_for(exec_.threads, bytes, 1 << 20, [&](int64_t begin, int64_t end) {
          std::memcpy(static_cast<char*>(to[k].data) + begin, static_cast<const char*>(from[k].data) + begin,
                      static_cast<size_t>(end - begin));
        });
      },
      count);
  ops::synchronize(exec_);
  return copy_bandwidth_ = std::max(copy_bandwidth_, 2.0 * static_cast<double>(bytes) / t);
}

Tensor Tensors::allocate(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t = make_tensor(nullptr, dtype, shape);
  const auto bytes = static_cast<size_t>(t.bytes());
  if (machine_.gpu()) {
    device_.emplace_back(*machine_.exec().device, device::Memory::Kind::device, bytes);
    t.data = device_.back().data();
  } else {
    host_.emplace_back(bytes);
    t.data = host_.back().data();
  }
  return t;
}

Tensor Tensors::filled(DType dtype, std::initializer_list<int64_t> shape, const void* pattern,
                       size_t pattern_bytes) {
  const Tensor t = allocate(dtype, shape);
  ops::Exec& e = machine_.exec();
  const auto bytes = static_cast<size_t>(t.bytes());
  size_t done = std::min(bytes, pattern_bytes);
  ops::upload(e, make_tensor(t.data, dtype, {static_cast<int64_t>(done) / size_of(dtype)}), pattern);
  // Doubles the filled part until the tensor is full.
  auto* at = static_cast<std::byte*>(t.data);
  while (done < bytes) {
    const size_t more = std::min(done, bytes - done);
    if (machine_.gpu())
      e.device->copy(at + done, at, more, device::CopyKind::device_to_device, e.stream);
    else
      std::memcpy(at + done, at, more);
    done += more;
  }
  ops::synchronize(e);
  return t;
}

template <class Value>
Tensor Tensors::filled_with(DType dtype, std::initializer_list<int64_t> shape, const Value& value) {
  const auto as = [&]<class T>(T) {
    std::vector<T> values(pattern_elements);
    for (size_t i = 0; i < values.size(); ++i) values[i] = T(value(i));
    return filled(dtype, shape, values.data(), values.size() * sizeof(T));
  };
  if (dtype == DType::bf16) return as(bf16());
  if (dtype == DType::f16) return as(f16());
  NRL_CHECK(dtype == DType::f32);
  return as(0.0f);
}

Tensor Tensors::normal(DType dtype, std::initializer_list<int64_t> shape, double scale) {
  const std::vector<float>& normals = normal_pattern();
  return filled_with(dtype, shape, [&](size_t i) { return normals[i] * static_cast<float>(scale); });
}

Tensor Tensors::integers(std::initializer_list<int64_t> shape, int64_t below) {
  const PhiloxStream stream(2, "bench");
  std::vector<int32_t> values(pattern_elements);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<int32_t>(stream.bits(i) % static_cast<uint64_t>(below));
  return filled(DType::i32, shape, values.data(), values.size() * sizeof(int32_t));
}

Tensor Tensors::arithmetic(int64_t n, int64_t first, int64_t step) {
  std::vector<int32_t> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<int32_t>(first + i * step);
  return copy_of(DType::i32, {n}, values.data());
}

Tensor Tensors::constant(DType dtype, std::initializer_list<int64_t> shape, double value) {
  return filled_with(dtype, shape, [&](size_t) { return static_cast<float>(value); });
}

Tensor Tensors::copy_of(DType dtype, std::initializer_list<int64_t> shape, const void* values) {
  const Tensor t = allocate(dtype, shape);
  ops::upload(machine_.exec(), t, values);
  return t;
}

Report::Report(const Args& args, JsonValue device) : path_(args.json), only_(args.only) {
  head_ = JsonValue::object({{"bench", args.benchmark},
                             {"program", std::string("nrl-train ") + NRL_VERSION},
                             {"quick", args.quick},
                             {"device", std::move(device)}});
}

void Report::add_failure(const std::string& name, const std::string& why) {
  failed_ = true;
  log::error_text(fmt::format("{}: {}", name, why));
  add(JsonValue::object({{"name", name}, {"error", why}}));
}

int Report::finish() {
  if (rows_.empty() && !only_.empty()) log::warn("--only {}: there is no such case", only_);
  if (!path_.empty()) {
    std::string text = head_.dump();
    text.pop_back();
    text += ",\"rows\":[";
    for (size_t i = 0; i < rows_.size(); ++i) text += (i ? ",\n" : "\n") + rows_[i].dump();
    write_file_atomic(path_, text + "\n]}\n");
  }
  return static_cast<int>(failed_ ? Exit::internal : Exit::ok);
}

}  // namespace nrl::bench
