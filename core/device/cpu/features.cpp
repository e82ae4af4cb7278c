#include "core/device/cpu/features.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>

#include <sched.h>
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>
#endif

namespace nrl::cpu {

namespace {

#if defined(__x86_64__)
// Linux: Documentation/arch/x86/xstate.rst. Older headers do not have the numbers.
constexpr int get_permissions = 0x1022, request_permission = 0x1023;
constexpr unsigned tile_config = 17, tile_data = 18;  // of XCR0 and of the permissions

Amx find_amx() {
  constexpr unsigned osxsave = 1u << 27, amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  constexpr uint64_t tiles = uint64_t{1} << tile_config | uint64_t{1} << tile_data;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & amx_bf16) == 0 || (d & amx_tile) == 0) return {};
  unsigned low = 0, high = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & osxsave) != 0)
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & tiles) != tiles) return {true, "the operating system does not save its registers"};
  uint64_t permitted = 0;
  if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0 ||
      syscall(SYS_arch_prctl, get_permissions, &permitted) != 0)
    return {true, std::string("the operating system does not permit it: ") + std::strerror(errno)};
  if ((permitted & tiles) != tiles) return {true, "the operating system does not permit it"};
  return {true};
}
#else
Amx find_amx() {
  return {};
}
#endif

}  // namespace

const Amx& amx() {
  static const Amx found = find_amx();
  return found;
}

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return !__builtin_cpu_supports("avx512bf16")    ? Isa::avx512
           : amx().present && amx().problem.empty() ? Isa::avx512_amx
                                                    : Isa::avx512_bf16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::baseline;
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string text; std::getline(info, text);)
    if (text.rfind("model name", 0) == 0)
      if (const auto colon = text.find(": "); colon != std::string::npos) return text.substr(colon + 2);
  return "unknown processor";
}

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace nrl::cpu
