#include "apps/launch/health.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include <sys/statvfs.h>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/process.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/edac.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/device/cuda/devices.h"
#include "core/device/cuda/nvml.h"

namespace nrl::launch {
namespace {

constexpr int64_t least_memory = int64_t{256} << 20, least_shared = int64_t{16} << 20;
constexpr int edge = 64;  // of the matrices
constexpr size_t max_line = size_t{64} << 10;

// Products of small whole numbers: exact in fp32 in every order of summation.
class Multiplication {
 public:
  explicit Multiplication(int seed) {
    for (int i = 0; i < edge * edge; ++i) {
      a_[static_cast<size_t>(i)] = static_cast<float>((i * 7 + seed) % 31 - 15);
      b_[static_cast<size_t>(i)] = static_cast<float>((i * 5 + 3 * seed) % 29 - 14);
    }
    for (int r = 0; r < edge; ++r)
      for (int c = 0; c < edge; ++c) {
        int sum = 0;
        for (int k = 0; k < edge; ++k) sum += static_cast<int>(a_[at(r, k)]) * static_cast<int>(b_[at(k, c)]);
        expected_[at(r, c)] = static_cast<float>(sum);
      }
  }
  bool exact() {
    result_.fill(0);
    for (int r = 0; r < edge; ++r)
      for (int k = 0; k < edge; ++k)
        for (int c = 0; c < edge; ++c) result_[at(r, c)] += a_[at(r, k)] * b_[at(k, c)];
    return result_ == expected_;
  }

 private:
  static size_t at(int row, int column) { return static_cast<size_t>(row * edge + column); }
  std::array<float, static_cast<size_t>(edge) * edge> a_, b_, expected_, result_;
};

// Returns the number of products; false in `exact` if one was wrong.
int64_t multiply(double seconds, bool& exact) {
  std::atomic<int64_t> products{0};
  std::atomic<bool> right{true};
  const double end = steady_seconds() + seconds;
  std::vector<std::thread> threads;
  for (int t = 0; t < std::clamp(cpu::available_cores(), 1, 256); ++t)
    threads.push_back(start_thread([&, t] {
      const auto work = std::make_unique<Multiplication>(t);
      do {  // at least one, however busy the host is
        if (!work->exact()) right = false;
        ++products;
      } while (right && steady_seconds() < end);
    }));
  for (std::thread& thread : threads) thread.join();
  exact = right;
  return products;
}

// Errors of a GPU's memory that a reset or an exchange must mend.
void examine_gpus(const HealthSources& sources, std::vector<std::string> uuids,
                  std::vector<std::string>& problems) {
  if (!sources.gpus.empty()) uuids = sources.gpus;
  const std::unique_ptr<cuda::Nvml> nvml = uuids.empty() ? nullptr : cuda::open_nvml(sources.nvml);
  if (!nvml) return;
  for (const std::string& uuid : uuids) {
    const auto state = nvml->state(uuid);
    const auto problem = [&](const std::string& text) {
      problems.push_back(fmt::format("GPU {}: {}", uuid, text));
    };
    if (!state)
      problem("the driver does not answer");
    else if (state->remap_failed)
      problem("a row of its memory cannot be remapped");
    else if (state->remap_pending)
      problem("rows of its memory are remapped at the next reset");
    else if (state->ecc_errors.value_or(0) > 0)
      problem(fmt::format("{} since the driver was loaded",
                          counted(static_cast<int64_t>(*state->ecc_errors), "uncorrectable memory error")));
  }
}

}  // namespace

Health examine(double seconds, const HealthSources& sources) {
  Health h;
  h.host = host_name();
  h.memory_bytes = static_cast<int64_t>(cpu::obtainable_memory());
  if (h.memory_bytes < least_memory)
    h.problems.push_back(
        fmt::format("only {} of memory are available", human_bytes(static_cast<uint64_t>(h.memory_bytes))));
  struct statvfs shared;
  if (::statvfs("/dev/shm", &shared) == 0) {
    h.shared_bytes = static_cast<int64_t>(shared.f_bavail) * static_cast<int64_t>(shared.f_frsize);
    if (h.shared_bytes < least_shared)
      h.problems.push_back(
          fmt::format("/dev/shm has room for {} only", human_bytes(static_cast<uint64_t>(h.shared_bytes))));
  }
  const cuda::Status cuda = cuda::query();
  h.gpus = static_cast<int>(cuda.devices.size());
  if (cuda.built && !cuda.driver.empty() && cuda.devices.empty()) h.problems.push_back(cuda.problem);
  std::vector<std::string> uuids;
  for (const auto& device : cuda.devices) uuids.push_back(device.uuid);
  examine_gpus(sources, std::move(uuids), h.problems);
  if (const auto edac = read_edac(sources.root); edac && edac->uncorrected > 0)
    h.problems.push_back(fmt::format("{} since the start of the system",
                                     counted(edac->uncorrected, "uncorrected memory error")));
  bool exact = true;
  h.products = multiply(seconds, exact);
  if (!exact) h.problems.push_back("a product of whole numbers was wrong");
  return h;
}

JsonValue to_json(const Health& h) {
  return JsonValue::object({{"host", h.host},
                            {"healthy", h.problems.empty()},
                            {"problems", h.problems},
                            {"memory_bytes", h.memory_bytes},
                            {"shared_bytes", h.shared_bytes},
                            {"gpus", h.gpus},
                            {"products", h.products}});
}

std::string problem_in(const std::string& output) {
  for (size_t begin = 0; begin < output.size();) {
    const size_t end = std::min(output.find('\n', begin), output.size());
    const std::string_view line(output.data() + begin, end - begin);
    begin = end + 1;
    if (!line.starts_with("{\"host\"") || line.size() > max_line) continue;
    try {
      const JsonValue json = parse_json(line, "health");
      if (json.get_bool("healthy")) return {};
      for (const JsonValue& problem : json.at("problems").items()) return clipped(problem.as_string());
    } catch (const Error&) {
    }
  }
  return "the health check does not answer";
}

}  // namespace nrl::launch
