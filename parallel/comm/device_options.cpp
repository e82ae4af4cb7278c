#include "parallel/comm/device_options.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "core/base/error.h"

namespace nrl::comm {

namespace {

constexpr int multi_rank_version = 23000;  // 2.30
constexpr int most_ctas = 32;              // as many as NCCL takes by itself

std::string version_text(const NcclSupport& nccl) {
  return fmt::format("{}.{}.{}", nccl.version / 10000, nccl.version / 100 % 100, nccl.version % 100);
}

/// The first two ranks that share a device; nullopt when none do.
std::optional<std::pair<size_t, size_t>> shared_device(std::span<const std::string> devices) {
  std::map<std::string_view, size_t> first;
  for (size_t r = 0; r < devices.size(); ++r) {
    const auto [at, added] = first.try_emplace(devices[r], r);
    if (!added) return std::pair{at->second, r};
  }
  return std::nullopt;
}

}  // namespace

std::string nccl_unsupported_reason(std::span<const std::string> devices, const NcclSupport& nccl) {
  if (!nccl.built) return "this build has no NCCL";
  for (size_t r = 0; r < devices.size(); ++r)
    if (devices[r] == "simulated") return fmt::format("rank {} has a simulated device", r);
  const auto shared = shared_device(devices);
  if (!shared) return "";
  const std::string who =
      fmt::format("ranks {} and {} share device {}", shared->first, shared->second, devices[shared->first]);
  if (nccl.version < multi_rank_version)
    return fmt::format("{}, which NCCL {} cannot do (2.30 can)", who, version_text(nccl));
  if (!nccl.multi_rank_gpu)
    return fmt::format("{}, which NCCL does only with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment", who);
  return "";
}

DeviceCommChoice choose_device_comm(std::optional<DeviceCommKind> requested,
                                    std::span<const std::string> devices, const NcclSupport& nccl) {
  if (requested == DeviceCommKind::staged) return {DeviceCommKind::staged, "as configured"};
  const std::string reason = nccl_unsupported_reason(devices, nccl);
  if (requested == DeviceCommKind::nccl) {
    if (!reason.empty())
      fail(Exit::unavailable,
           "distributed.backend: nccl cannot be used: {}. Fix: set distributed.backend: staged, which goes "
           "through host memory",
           reason);
    return {DeviceCommKind::nccl, "as configured"};
  }
  if (devices.size() <= 1) return {DeviceCommKind::staged, "there is one rank only"};
  if (!reason.empty()) return {DeviceCommKind::staged, reason};
  if (shared_device(devices))  // supported, but experimental: only on request
    return {DeviceCommKind::staged, "ranks share a device"};
  return {DeviceCommKind::nccl, "every rank has a device of its own"};
}

int nccl_ctas(int multiprocessors, int kernels) {
  NRL_CHECK(multiprocessors > 0 && kernels > 0, "{} kernels on {} multiprocessors", kernels, multiprocessors);
  const int each = multiprocessors * 3 / 4 / kernels;
  if (each == 0)
    fail(Exit::unavailable,
         "this layout communicates in {} NCCL groups per rank, whose kernels do not fit side by side on {} "
         "multiprocessors. Fix: use a layout with fewer axes, or distributed.backend: staged",
         kernels, multiprocessors);
  return std::min(each, most_ctas);
}

}  // namespace nrl::comm
