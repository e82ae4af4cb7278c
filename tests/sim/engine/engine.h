#pragma once
// Runs grids of CUDA threads on the CPU: one fiber per CUDA thread, one block at a time per OS thread or
// several that take turns at their barriers. Kernels reach it through CUDA's names (fiber.h).
//
// Undefined behavior becomes visible. A barrier that not all threads reach, a deadlock, a lane
// outside its mask, a shuffle from a lane that is not there, a misaligned 16-byte access, a launch that the
// hardware refuses, a wait for a block that may not have started: KernelError. Shared memory starts as NaN,
// cp.async lands as late as allowed and leaves NaN at its destination until then. Under the
// address sanitizer shared arrays have guarded ends, under the thread sanitizer every CUDA thread is a
// thread, so that races inside a block and between blocks are reported.
//
// Environment: NRL_SIM_ORDER=forward|reverse|random[:seed] is the order of blocks, warps and lanes,
// NRL_SIM_THREADS the number of OS threads a grid is dealt to (1), NRL_SIM_RESIDENT the number of blocks that
// take turns on each (1).

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/base/shared_memory.h"
#include "tests/sim/engine/cuda_names.h"
#include "tests/sim/engine/enqueue.h"

namespace nrl::sim {

/// A place in a kernel file; as a default argument: of the caller.
using Site = std::source_location;

inline constexpr int warp_size = 32;
inline constexpr int max_threads = 1024;                  ///< of a block
inline constexpr size_t max_shared = size_t{227} * 1024;  ///< static and dynamic, bytes of a block (sm_90)
inline constexpr size_t max_static_shared = shared_memory_unasked;
inline constexpr size_t max_arguments = 4096;  ///< bytes of a kernel's arguments

/// A kernel did what CUDA forbids. The text names kernel, block, thread and source line.
class KernelError : public Error {
 public:
  explicit KernelError(const std::string& text) : Error(Exit::internal, text) {}
};

enum class Order : uint8_t { forward, reverse, random };

struct Options {
  Order order = Order::forward;
  uint64_t seed = 1;  ///< of Order::random
  int threads = 1;    ///< OS threads of a launch
  int resident = 1;   ///< blocks of an OS thread that take turns at their barriers, in that order
  double block_wait_seconds = 10;  ///< the longest wait for the signal of another block
};

/// Those of the environment until set_options(); Exit::usage when a variable has no meaning.
Options options();
/// Of all launches from now on. Not while one is running.
void set_options(const Options& options);

/// CUDA's built-in variables.
struct ThreadView {
  ::uint3 index;  ///< threadIdx
  int lane;       ///< in its warp
};
struct BlockView {
  ::uint3 index;              ///< blockIdx
  ::dim3 dim, grid;           ///< blockDim, gridDim
  std::byte* dynamic_shared;  ///< NaN bytes at the start of the block
};
inline constinit thread_local const ThreadView* current_thread = nullptr;
inline constinit thread_local const BlockView* current_block = nullptr;

/// Ends the grid with a KernelError; called by the CUDA thread that found the error.
[[noreturn]] void fail_thread(std::string text, const Site& at);

/// __syncthreads; the sum of `value` over the block.
int barrier(int value, const Site& at);

/// An operation of the lanes of a warp. The last lane to arrive applies it to the payloads of all `lanes`
/// (bits); payloads of other lanes are null. As in CUDA, only __syncwarp orders the memory accesses of the
/// lanes: shuffles, votes and matrix operations exchange values alone. `apply` runs on one lane but accesses
/// the registers of all, so it must be NRL_EXCHANGE.
struct WarpOp {
  const char* name;
  void (*apply)(void* const* payloads, unsigned lanes);
  bool whole_warp = false;     ///< all 32 lanes must take part
  bool orders_memory = false;  ///< accesses before it happen before those after it, among its lanes
};
/// The thread sanitizer must not see a function's accesses.
#define NRL_EXCHANGE __attribute__((no_sanitize_thread))
void collective(unsigned mask, const WarpOp& op, void* payload, const Site& at);

/// The static shared array of this block that is declared at `key`.
void* shared_array(const void* key, size_t bytes, size_t align, const Site& at);
bool in_shared_memory(const void* p, size_t bytes);

/// cp.async operations of one CUDA thread that have not been carried out.
struct AsyncCopies {
  static constexpr int capacity = 64;
  struct Copy {
    void* to;
    const void* from;  ///< null: zeros
    int group;
  };
  Copy copy[capacity];
  int count = 0;
  int group = 0;  ///< the one that is open
};
AsyncCopies& async_copies();

/// The wait of a block for another one, which must have started before.
class BlockWait {
 public:
  /// Lets other threads and blocks run. KernelError, which says what was waited for, when no block that has
  /// started can give the signal, or when other OS threads have not given it for
  /// Options::block_wait_seconds.
  void pause(const char* waited_for, const Site& at);

 private:
  std::chrono::steady_clock::time_point first_ = {};
  double most_seconds_ = 0;
};

struct Launch {
  ::dim3 grid, block;
  size_t shared;            ///< bytes of dynamic shared memory
  std::string_view kernel;  ///< for messages; outlives the launch
};
/// KernelError when the hardware would refuse it.
void check_launch(const Launch& launch, size_t argument_bytes);
/// Calls body(arguments) once per CUDA thread. Throws the first error.
void run_grid(const Launch& launch, void (*body)(void*), void* arguments);

/// NRL_LAUNCH: enqueues kernel(arguments...) on a stream of the simulated device (null: runs it at once).
template <class... P, class... A>
void launch(std::string_view name, void* stream, void (*kernel)(P...), ::dim3 grid, ::dim3 block,
            size_t shared, A&&... arguments) {
  static_assert(sizeof...(P) == sizeof...(A), "another number of arguments than the kernel takes");
  struct Call {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> arguments;
  };
  if (name.starts_with('(')) name = name.substr(1, name.size() - 2);
  const Launch shape{grid, block, shared, name};
  check_launch(shape, sizeof(std::tuple<std::decay_t<P>...>));
  device::sim_enqueue(
      stream,
      [shape, call = Call{kernel, {static_cast<std::decay_t<P>>(std::forward<A>(arguments))...}}]() mutable {
        run_grid(
            shape,
            [](void* p) {
              const Call& c = *static_cast<const Call*>(p);
              std::apply(c.kernel, c.arguments);
            },
            &call);
      });
}

}  // namespace nrl::sim
