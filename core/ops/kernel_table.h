#pragma once
// The typed table of kernels that a backend fills. A null entry is an op the backend does not have: coverage
// is checked before a run (coverage.h), so that nothing fails in the middle of one.

#include <bit>

#include "core/device/cpu/features.h"
#include "core/ops/cost.h"
#include "core/ops/ops_list.h"

namespace nrl::ops {

struct KernelTable {
#define NRL_ENTRY(entry, Args) void (*entry)(Exec&, const Args&) = nullptr;
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
  Bf16Products bf16_products = Bf16Products::upcast;  ///< CPU: of linear layers and attention
};

/// Names an entry of the table.
enum class Kernel : uint8_t {
#define NRL_ENTRY(entry, Args) entry,
  NRL_KERNELS(NRL_ENTRY)
#undef NRL_ENTRY
};

/// A set of entries of the table.
class KernelSet {
 public:
  void add(Kernel k) { bits_ |= bit(k); }
  bool contains(Kernel k) const { return (bits_ & bit(k)) != 0; }
  int size() const { return std::popcount(bits_); }
  KernelSet operator|(KernelSet other) const {
    other.bits_ |= bits_;
    return other;
  }
  bool operator==(const KernelSet&) const = default;

 private:
  static uint64_t bit(Kernel k) { return uint64_t{1} << static_cast<int>(k); }
  uint64_t bits_ = 0;
};

const char* name_of(Kernel kernel);

/// Every op calls this first. While a run's kernels are collected (Exec::needed) it adds `kernel`, notes the
/// cost() and the workspace() of the call where they are collected, and returns true; the op must then return
/// without having done anything.
template <class Arguments>
bool noted(Exec& exec, Kernel kernel, const Arguments& a) {
  if (!exec.needed) return false;
  exec.needed->add(kernel);
  if (exec.calls) note_call(exec, name_of(kernel), cost(exec, a));
  if constexpr (requires { workspace(exec, a); })
    if (exec.scratch) note_scratch(exec, workspace(exec, a));
  return true;
}

/// The CPU's kernels for an instruction set (which the processor must have).
const KernelTable& cpu_kernels(cpu::Isa isa);

/// Their bf16_products, also where the processor does not have them: a plan is made on any machine.
constexpr Bf16Products bf16_products(cpu::Isa isa) {
  return isa == cpu::Isa::avx512_amx    ? Bf16Products::amx
         : isa == cpu::Isa::avx512_bf16 ? Bf16Products::native
                                        : Bf16Products::upcast;
}

/// The GPU's kernels (core/ops/<op>/cuda.cu). Exit::unavailable if the build has no CUDA.
const KernelTable& cuda_kernels();

}  // namespace nrl::ops
