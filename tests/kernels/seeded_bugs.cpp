// Kernels with seeded bugs, each with a fixed twin: proves that the fiber engine and the sanitizers report
// the one and not the other. Built three times: plain, with the address and undefined-behavior sanitizers,
// and with the thread sanitizer.
//
//   seeded_bugs_BUILD check             every bug that this build can see, in a process of its own
//   seeded_bugs_BUILD run NAME [fixed]  one kernel

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/device/kernel.h"

namespace {

using nrl::kernel::all_lanes;
using nrl::kernel::load_floats;

constexpr int threads = 64;
constexpr int blocks = 8;

/// Global memory of the kernels; `out` and `in` have exactly the elements that a correct kernel may touch.
struct Memory {
  std::vector<float> out = std::vector<float>(threads * blocks, 0.0f);
  std::vector<float> in = std::vector<float>(4 * threads, 2.0f);
  unsigned arrived[2] = {};
};

// --- shared memory and barriers ------------------------------------------------------------------

__global__ void read_after_write(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (fixed) __syncthreads();
  out[threadIdx.x] = s[threads - 1 - threadIdx.x];
}

__global__ void write_after_read(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  for (int i = 0; i < 2; ++i) {
    s[threadIdx.x] = static_cast<float>(i);
    __syncthreads();
    out[threadIdx.x] += s[threads - 1 - threadIdx.x];
    if (fixed) __syncthreads();
  }
}

__global__ void unwritten(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  if (fixed || threadIdx.x < threads - 1) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void unwritten_dynamic(float* out, bool fixed) {
  NRL_DYN_SHARED(float, s);
  if (fixed || threadIdx.x > 0) s[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void divergent_barrier(float* out, bool fixed) {
  if (fixed) __syncthreads();
  if (threadIdx.x < threads / 2) {
    if (!fixed) __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    if (!fixed) __syncthreads();
    out[threadIdx.x] = 2;
  }
}

__global__ void deadlock(float* out, bool fixed) {
  // Without the other lanes of its mask, the first warp waits for ever; the second waits for the first.
  if (threadIdx.x == 0 || fixed) __syncwarp();
  if (threadIdx.x == 1 && !fixed) __syncthreads();
  if (threadIdx.x >= 32 || fixed) __syncthreads();
  out[threadIdx.x] = 1;
}

// --- warps ---------------------------------------------------------------------------------------

__global__ void lane_not_in_mask(float* out, bool fixed) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_xor_sync(fixed ? 0xffu : 0x0fu, 1.0f, 1);
}

__global__ void inactive_lane(float* out, bool fixed) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, 1.0f, 8, fixed ? 16 : 32);
}

__global__ void mixed_operations(float* out, bool fixed) {
  if (fixed || threadIdx.x % 2 == 0) {
    out[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
  } else {
    out[threadIdx.x] = static_cast<float>(__ballot_sync(all_lanes, 1));
  }
}

__global__ void missing_syncwarp(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  s[threadIdx.x] = 1;
  if (fixed) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}

// --- asynchronous copies -------------------------------------------------------------------------

__global__ void missing_wait(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  if (fixed) nrl_cp_async_wait<0>();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threadIdx.x].x;
  nrl_cp_async_wait<0>();
}

__global__ void wait_for_too_few(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [2][threads]);
  for (int stage = 0; stage < 2; ++stage) {
    nrl_cp_async16(&s[stage][threadIdx.x], in + threadIdx.x * 4);
    nrl_cp_async_commit();
  }
  if (fixed) {
    nrl_cp_async_wait<0>();
  } else {
    nrl_cp_async_wait<1>();
  }
  out[threadIdx.x] = reinterpret_cast<const float4*>(s[1])[threadIdx.x].x;
}

__global__ void wait_without_barrier(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  if (fixed) __syncthreads();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threads - 1 - threadIdx.x].x;
}

/// Two buffers in turn. The one that is not waited for has an older tile, not NaN from the start.
__global__ void missing_wait_of_a_stage(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [2][threads]);
  for (int tile = 0; tile < 4; ++tile) {
    if (tile == 0) {
      nrl_cp_async16(&s[0][threadIdx.x], in + threadIdx.x * 4);
      nrl_cp_async_commit();
    }
    if (fixed || tile < 2) nrl_cp_async_wait<0>();
    __syncthreads();
    if (tile < 3) nrl_cp_async16(&s[(tile + 1) % 2][threadIdx.x], in + threadIdx.x * 4);
    nrl_cp_async_commit();
    out[threadIdx.x] += reinterpret_cast<const float4*>(s[tile % 2])[threadIdx.x].x;
  }
  nrl_cp_async_wait<0>();
}

/// The next tile is copied over one that another warp may still be reading.
__global__ void copy_over_a_tile_in_use(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = reinterpret_cast<const float4*>(s)[threads - 1 - threadIdx.x].x;
  if (fixed) __syncthreads();
  nrl_cp_async16(&s[threadIdx.x], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  __syncthreads();
  nrl_cp_async_wait<0>();
}

// --- matrices in shared memory -------------------------------------------------------------------

__device__ __forceinline__ float first_of_matrix(const void* row) {
  unsigned f[4];
  nrl_ldmatrix_x4<false>(f, row, 0);
  return __uint_as_float(f[0]);
}

__global__ void misaligned_matrix(float* out, bool fixed) {
  NRL_SHARED(uint4, s, [threads + 1]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  out[threadIdx.x] = first_of_matrix(reinterpret_cast<const char*>(&s[threadIdx.x]) + (fixed ? 0 : 8));
}

__global__ void matrix_outside_tile(float* out, bool fixed) {
  NRL_DYN_SHARED(uint4, s);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  out[threadIdx.x] = first_of_matrix(&s[threadIdx.x + (fixed ? 0 : 1)]);
}

__global__ void matrix_before_barrier(float* out, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  s[threadIdx.x] = make_uint4(0, 0, 0, 0);
  if (fixed) __syncthreads();
  out[threadIdx.x] = first_of_matrix(&s[(threadIdx.x + 32) % threads]);
}

// --- blocks in turn ------------------------------------------------------------------------------

/// Each block adds to a sum after the block before it; `arrived` is the counter of turns.
__global__ void sum_out_of_turn(float* out, unsigned* arrived, bool fixed) {
  NRL_SHARED(unsigned, ticket, [1]);
  if (threadIdx.x == 0) ticket[0] = atomicAdd(arrived + 1, 1u);
  __syncthreads();
  if (fixed && threadIdx.x == 0) nrl_wait_for_signal(arrived, ticket[0], "its turn");
  __syncthreads();
  out[threadIdx.x] += 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) nrl_signal(arrived, ticket[0] + 1);
}

/// The numbers of blocks instead of tickets: the GPU may start the others first and have no room for this
/// one.
__global__ void turn_without_ticket(float* out, unsigned* arrived, bool fixed) {
  if (threadIdx.x != 0) return;
  const unsigned number = fixed ? atomicAdd(arrived + 1, 1u) : gridDim.x - 1 - blockIdx.x;
  nrl_wait_for_signal(arrived, number, "its turn");
  out[0] += 1.0f;
  nrl_signal(arrived, number + 1);
}

/// The last block but one sends no signal to the last one.
__global__ void missing_signal(float* out, unsigned* arrived, bool fixed) {
  if (threadIdx.x != 0) return;
  const unsigned number = atomicAdd(arrived + 1, 1u);
  if (number > 0) nrl_wait_for_signal(arrived, number, "its turn");
  out[0] += 1.0f;
  if (fixed || number < blocks - 2) nrl_signal(arrived, number + 1);
}

// --- races between blocks ------------------------------------------------------------------------

__global__ void block_race(float* out, bool fixed) {
  if (threadIdx.x != 0) return;
  if (fixed) {
    atomicAdd(out, 1.0f);
  } else {
    out[0] += 1.0f;
  }
}

/// The last block to arrive adds up what the others left.
__global__ void missing_fence(float* out, unsigned* arrived, bool fixed) {
  if (threadIdx.x != 0) return;
  out[1 + blockIdx.x % (blocks - 1)] = 1.0f;
  if (fixed) __threadfence();
  if (atomicAdd(arrived, 1u) != gridDim.x - 1) return;
  if (fixed) __threadfence();
  for (unsigned i = 1; i < blocks; ++i) out[0] += out[i];
}

// --- bounds and alignment ------------------------------------------------------------------------

__global__ void outside_static(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  float* row = s;
  row[threadIdx.x + (fixed ? 0 : 1)] = 1;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}

__global__ void outside_dynamic(float* out, bool fixed) {
  NRL_DYN_SHARED(float, s);
  s[threadIdx.x + (fixed ? 0 : 1)] = 1;
  __syncthreads();
  out[threadIdx.x] = fixed ? s[threadIdx.x] : 0;
}

__global__ void outside_global(float* out, bool fixed) {
  out[blockIdx.x * blockDim.x + threadIdx.x + (fixed ? 0 : 1)] = 1;
}

__global__ void outside_local(float* out, bool fixed) {
  float values[4];
  for (int i = 0; i < 4; ++i) values[i] = 1;
  out[threadIdx.x] = values[(threadIdx.x + 1) % (fixed ? 4 : 5)];
}

/// One access of 16 bytes.
__device__ __forceinline__ float first_of_four(const float* p) {
  float v[4];
  load_floats(p, v);
  return v[0];
}

__global__ void vector_past_the_end(float* out, const float* in, bool fixed) {
  out[threadIdx.x] = first_of_four(in + (threadIdx.x + (fixed ? 0 : 1)) * 4);
}

__global__ void copy_past_the_end(float* out, const float* in, bool fixed) {
  NRL_SHARED(uint4, s, [threads]);
  nrl_cp_async16(&s[threadIdx.x + (fixed ? 0 : 1)], in + threadIdx.x * 4);
  nrl_cp_async_commit();
  nrl_cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void misaligned_global(float* out, const float* in, bool fixed) {
  out[threadIdx.x] = first_of_four(in + threadIdx.x * 2 - threadIdx.x % 2 * (fixed ? 2 : 0));
}

__global__ void misaligned_shared(float* out, bool fixed) {
  NRL_SHARED(float, s, [threads]);
  NRL_SHARED(float4, v, [threads]);
  s[threadIdx.x] = 1;
  v[threadIdx.x] = make_float4(1, 1, 1, 1);
  __syncthreads();
  out[threadIdx.x] = first_of_four(fixed ? reinterpret_cast<const float*>(v) : s);
}

/// Offsets of large tensors must be computed in 64 bits.
__global__ void overflowing_offset(float* out, int row, int columns, bool fixed) {
  const int64_t offset = fixed ? static_cast<int64_t>(row) * columns : row * columns;
  if (offset < 0) out[threadIdx.x] = 1;
}

// --- what the hardware refuses -------------------------------------------------------------------

__global__ void nothing(float* out) {
  if (blockIdx.y == 0 && threadIdx.z == 0) out[threadIdx.x] = 1;
}

__global__ void much_static(float* out, bool fixed) {
  NRL_SHARED(float, a, [8 * 1024]);
  a[threadIdx.x] = 1;
  if (!fixed) {
    NRL_SHARED(float, b, [8 * 1024]);
    b[threadIdx.x] = 1;
  }
  out[threadIdx.x] = a[threadIdx.x];
}

// --- the table -----------------------------------------------------------------------------------

struct Bug {
  const char* name;
  void (*launch)(Memory&, bool fixed);
  const char* plain;  ///< what this build must say; null when it cannot see the bug
  const char* address;
  const char* thread;
};

constexpr const char* nan = "NaN in the result";
constexpr const char* race = "ThreadSanitizer: data race";
constexpr const char* bounds = "ERROR: AddressSanitizer";

#define LAUNCH(kernel, grid, shared, ...)                                            \
  [](Memory& m, [[maybe_unused]] bool fixed) {                                       \
    NRL_LAUNCH((kernel), grid, threads, shared, nullptr, m.out.data(), __VA_ARGS__); \
  }
constexpr size_t dynamic = threads * sizeof(float), tile = threads * sizeof(uint4);

const Bug bugs[] = {
    {"read_after_write", LAUNCH(read_after_write, 1, 0, fixed), nan, nan, race},
    {"write_after_read", LAUNCH(write_after_read, 1, 0, fixed), nullptr, nullptr, race},
    {"unwritten", LAUNCH(unwritten, 1, 0, fixed), nan, nan, nan},
    {"unwritten_dynamic", LAUNCH(unwritten_dynamic, 1, dynamic, fixed), nan, nan, nan},
    {"divergent_barrier", LAUNCH(divergent_barrier, 1, 0, fixed), "divergent __syncthreads",
     "divergent __syncthreads", "divergent __syncthreads"},
    {"deadlock", LAUNCH(deadlock, 1, 0, fixed), "deadlock", "deadlock", "deadlock"},
    {"lane_not_in_mask", LAUNCH(lane_not_in_mask, 1, 0, fixed), "is not in its mask", "is not in its mask",
     "is not in its mask"},
    {"inactive_lane", LAUNCH(inactive_lane, 1, 0, fixed), "does not take part", "does not take part",
     "does not take part"},
    {"mixed_operations", LAUNCH(mixed_operations, 1, 0, fixed), "different operations",
     "different operations", "different operations"},
    {"missing_syncwarp", LAUNCH(missing_syncwarp, 1, 0, fixed), nan, nan, race},
    {"missing_wait", LAUNCH(missing_wait, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"wait_for_too_few", LAUNCH(wait_for_too_few, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"wait_without_barrier", LAUNCH(wait_without_barrier, 1, 0, m.in.data(), fixed), nan, nan, race},
    {"missing_wait_of_a_stage", LAUNCH(missing_wait_of_a_stage, 1, 0, m.in.data(), fixed), nan, nan, nan},
    {"copy_over_a_tile_in_use", LAUNCH(copy_over_a_tile_in_use, 1, 0, m.in.data(), fixed), nan, nan, race},
    {"misaligned_matrix", LAUNCH(misaligned_matrix, 1, tile, fixed), "not aligned", "not aligned",
     "not aligned"},
    {"matrix_outside_tile", LAUNCH(matrix_outside_tile, 1, tile, fixed), nullptr, bounds, nullptr},
    {"matrix_before_barrier", LAUNCH(matrix_before_barrier, 1, 0, fixed), nan, nan, race},
    {"sum_out_of_turn", LAUNCH(sum_out_of_turn, blocks, 0, m.arrived, fixed), nullptr, nullptr, race},
    {"turn_without_ticket", LAUNCH(turn_without_ticket, blocks, 0, m.arrived, fixed), "has not run",
     "has not run", "has not run"},
    {"missing_signal", LAUNCH(missing_signal, blocks, 0, m.arrived, fixed), "waits for its turn",
     "waits for its turn", "waits for its turn"},
    {"block_race", LAUNCH(block_race, blocks, 0, fixed), nullptr, nullptr, race},
    {"missing_fence", LAUNCH(missing_fence, blocks - 1, 0, m.arrived, fixed), nullptr, nullptr, race},
    {"outside_static", LAUNCH(outside_static, 1, 0, fixed), nullptr, bounds, nullptr},
    {"outside_dynamic", LAUNCH(outside_dynamic, 1, dynamic, fixed), nullptr, bounds, nullptr},
    {"outside_global", LAUNCH(outside_global, blocks, 0, fixed), nullptr, bounds, nullptr},
    {"outside_local", LAUNCH(outside_local, 1, 0, fixed), nullptr, "seeded_bugs.cpp", nullptr},
    {"vector_past_the_end", LAUNCH(vector_past_the_end, 1, 0, m.in.data(), fixed), nullptr, bounds, nullptr},
    {"copy_past_the_end", LAUNCH(copy_past_the_end, 1, 0, m.in.data(), fixed), nullptr, bounds, nullptr},
    {"misaligned_global", LAUNCH(misaligned_global, 1, 0, m.in.data(), fixed), "not aligned", "not aligned",
     "not aligned"},
    {"misaligned_shared", LAUNCH(misaligned_shared, 1, 0, fixed), "not aligned", "not aligned",
     "not aligned"},
    {"overflowing_offset", LAUNCH(overflowing_offset, 1, 0, 1 << 16, 1 << 16, fixed), nullptr,
     "signed integer overflow", nullptr},
    {"much_static", LAUNCH(much_static, 1, 0, fixed), "static shared memory", "static shared memory",
     "static shared memory"},
    {"much_static_and_dynamic",
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((much_static), 1, threads, (fixed ? 190 : 200) * 1024, nullptr, m.out.data(), true);
     },
     "of dynamic shared memory are more", "of dynamic shared memory are more",
     "of dynamic shared memory are more"},
    {"much_unasked",  // together more than a GPU gives to a launch that does not ask for dynamic memory
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((much_static), 1, threads, (fixed ? 16 : 20) * 1024, nullptr, m.out.data(), true);
     },
     "of dynamic shared memory are more", "of dynamic shared memory are more",
     "of dynamic shared memory are more"},
    {"much_dynamic",
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((nothing), 1, threads, (fixed ? 227 : 228) * 1024, nullptr, m.out.data());
     },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"many_threads",
     [](Memory& m, bool fixed) { NRL_LAUNCH((nothing), 1, fixed ? 64 : 2048, 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"deep_block",
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((nothing), 1, dim3(1, 1, fixed ? 64 : 65), 0, nullptr, m.out.data());
     },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"wide_grid",
     [](Memory& m, bool fixed) {
       NRL_LAUNCH((nothing), dim3(1, fixed ? 4 : 65536), 1, 0, nullptr, m.out.data());
     },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
    {"empty_grid",
     [](Memory& m, bool fixed) { NRL_LAUNCH((nothing), fixed ? 1 : 0, 1, 0, nullptr, m.out.data()); },
     "a GPU refuses", "a GPU refuses", "a GPU refuses"},
};

// --- running them --------------------------------------------------------------------------------

constexpr const char* clean = "nothing wrong";

int run(std::string_view name, bool fixed) {
  for (const Bug& bug : bugs) {
    if (name != bug.name) continue;
    Memory memory;
    try {
      bug.launch(memory, fixed);
      // Again: the thread sanitizer tells other pairs of blocks apart in every second launch.
      memory.arrived[0] = memory.arrived[1] = 0;
      bug.launch(memory, fixed);
    } catch (const nrl::sim::KernelError& e) {
      std::printf("KernelError: %s\n", e.what());
      return 1;
    }
    for (float x : memory.out) {
      if (std::isnan(x)) {
        std::printf("%s\n", nan);
        return 1;
      }
    }
    std::printf("%s\n", clean);
    return 0;
  }
  std::printf("there is no kernel %s\n", std::string(name).c_str());
  return 64;
}

/// Output of this program with the arguments.
std::string output_of(const std::string& self, const std::string& arguments) {
  const std::string command = "'" + self + "' run " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return "cannot start " + command;
  std::string text;
  std::array<char, 4096> part;
  while (const size_t n = fread(part.data(), 1, part.size(), pipe)) text.append(part.data(), n);
  pclose(pipe);
  return text;
}

int check(const std::string& self) {
  int failures = 0, seen = 0;
  auto expect = [&failures](const std::string& what, const std::string& output, const char* text) {
    if (output.find(text) != output.npos) return;
    ++failures;
    std::printf("FAILED %s: no \"%s\" in:\n%s\n", what.c_str(), text, output.c_str());
  };
  for (const Bug& bug : bugs) {
    const char* expected = bug.NRL_BUILD;
    if (expected) {
      ++seen;
      const std::string output = output_of(self, bug.name);
      expect(bug.name, output, expected);
      // Every report names the place: kernels by name, memory errors and races by file and line.
      if (expected != nan)
        expect(bug.name, output, output.find("KernelError") == output.npos ? "seeded_bugs.cpp:" : "kernel ");
    }
    expect(std::string(bug.name) + " fixed", output_of(self, std::string(bug.name) + " fixed"), clean);
  }
  std::printf("%d seeded bugs reported, %d failures\n", seen, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return check(argv[0]);
  if (mode == "run" && argc > 2) return run(argv[2], argc > 3 && std::strcmp(argv[3], "fixed") == 0);
  std::fprintf(stderr, "usage: seeded_bugs check | run NAME [fixed]\n");
  return 64;
}
