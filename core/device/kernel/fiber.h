#pragma once
// Runs CUDA kernel source on the CPU: one block at a time, one fiber per CUDA thread.
#include <sys/mman.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>
#include "core/device/sim/sim.h"
#if !defined(__x86_64__)
#define NRL_CPU_UCONTEXT 1
#endif
#ifdef NRL_CPU_UCONTEXT
#include <ucontext.h>
#endif

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define NRL_CPU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define NRL_CPU_TSAN 1
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define NRL_CPU_FN __attribute__((no_sanitize("thread"), noinline))
#else
#define NRL_CPU_FN
#endif

// ---- CUDA spellings; the toolkit's host headers may have defined some ------------------------
#undef __host__
#undef __device__
#undef __global__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __align__
#undef __grid_constant__
#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static thread_local  // plain CUDA spelling works; NRL_SHARED also poisons and counts

#if !defined(__VECTOR_TYPES_H__)  // layout and alignment as CUDA's
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned X = 1, unsigned Y = 1, unsigned Z = 1) : x(X), y(Y), z(Z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
#endif

#ifndef NRL_CPU_UCONTEXT
// void nrl_cpu_ctx_switch(void** save_sp, void* new_sp): callee-saved registers, then the stack pointer.
extern "C" void nrl_cpu_ctx_switch(void** save_sp, void* new_sp);
__asm__(
    ".pushsection .text.nrl_cpu_ctx_switch,\"ax\",@progbits\n"
    ".weak nrl_cpu_ctx_switch\n.type nrl_cpu_ctx_switch,@function\n.p2align 4\n"
    "nrl_cpu_ctx_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n popq %rcx\n jmpq *%rcx\n"
    ".size nrl_cpu_ctx_switch,.-nrl_cpu_ctx_switch\n.popsection\n");
#endif

namespace nrl::fiber {

struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxDynSmem = 227 * 1024;  // sm_90 opt-in limit
constexpr size_t kMaxStaticSmem = 48 * 1024;
#if defined(NRL_CPU_ASAN)
constexpr size_t kStack = 256 * 1024;
#else
constexpr size_t kStack = 64 * 1024;
#endif
constexpr size_t kSmemArea = (kMaxDynSmem + kMaxStaticSmem + 4095) & ~size_t(4095);

using CollFn = void (*)(void* const* lane, unsigned participants);
enum class St : uint8_t { Fresh, Ready, InWarpOp, InBarrier, Done };

struct Stack {
  void* sp = nullptr;
  char* base = nullptr;
  void* asan = nullptr;
  unsigned color = 0;
#ifdef NRL_CPU_UCONTEXT
  ucontext_t uc;
#endif
};

struct Lane {  // one CUDA thread
  ::uint3 tid;
  St st;
  Stack* stack;   // where it is suspended
  unsigned mask;  // the warp collective it waits in
  CollFn fn;
  void* payload;
  const char* file;  // call site, for reports
  int line;
  void* tsan;
  char* acq;  // TSan: what to acquire after a warp op
};

struct Block;
inline thread_local Block* g_blk = nullptr;
inline thread_local Lane* g_cur = nullptr;
inline void fiber_main();

struct Block {
  ::dim3 grid, block;
  ::uint3 bid{0, 0, 0};
  int n = 0, alive = 0, next = 0, warpEnd = 0;
  bool failed = false;
  Lane lane[kMaxThreads];
  short order[kMaxThreads];  // execution order: a permutation inside each warp
  short worder[kMaxThreads / kWarp];
  unsigned aliveBits[kMaxThreads / kWarp], waitBits[kMaxThreads / kWarp];  // per warp
  Stack sched;                                                             // the scheduler's own context
  Stack* running = nullptr;
  Stack* retired = nullptr;  // a stack whose fiber has just ended
  std::vector<Stack*> idle;
  std::vector<Stack*> all;
  void (*body)(void*) = nullptr;
  void* arg = nullptr;
  const char* barFile = nullptr;
  int barLine = 0, barCount = 0, barAcc = 0, barOut = 0, epoch = 0, epochW = 0;
  char barSync[2], warpSync[kMaxThreads][2];  // addresses for TSan only
  char* smem = nullptr;                       // dynamic shared memory, then the static arena
  char* sta = nullptr;
  size_t dynBytes = 0, staTop = 0;
  struct Slot {
    const void* key;
    char* p;
  } slot[64];
  int slots = 0;
  char error[512];
  const void* schedBottom = nullptr;
  size_t schedSize = 0;
  void* tsanSched = nullptr;

  Block() {
    smem = static_cast<char*>(map(nullptr, kSmemArea));
    sta = smem + kMaxDynSmem;
  }
  Block(const Block&) = delete;
  ~Block() {
    unpoison(smem, kSmemArea);
    munmap(smem, kSmemArea);
    for (Stack* s : all) {
      unpoison(s->base, kStack);
      munmap(s->base, kStack);
      delete s;
    }
  }
  static void* map(void* at, size_t bytes) {
    void* p = mmap(at, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0), -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return p;
  }
  static void poison(void* p, size_t b) {
    (void)p;
    (void)b;
#ifdef NRL_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(p, b);
#endif
  }
  static void unpoison(void* p, size_t b) {
    (void)p;
    (void)b;
#ifdef NRL_CPU_ASAN
    ASAN_UNPOISON_MEMORY_REGION(p, b);
#endif
  }

  // ---- stacks and switching ----
  NRL_CPU_FN Stack* getStack() {
    Stack* s;
    if (!idle.empty()) {
      s = idle.back();
      idle.pop_back();
    } else {
      s = new Stack;
      s->base = static_cast<char*>(map(nullptr, kStack));
      mprotect(s->base, 4096, PROT_NONE);  // guard page
      s->color = unsigned(all.size());
      all.push_back(s);
    }
    unpoison(s->base + 4096, kStack - 4096);
    s->asan = nullptr;
#ifndef NRL_CPU_UCONTEXT
    // staggered tops: equal offsets in every stack would fight for the same cache sets
    void** top = reinterpret_cast<void**>(s->base + kStack - (s->color * 832 & 4032));
    *--top = nullptr;  // return address slot: entry rsp is 16n+8
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    s->sp = top;
#else
    getcontext(&s->uc);
    s->uc.uc_stack.ss_sp = s->base;
    s->uc.uc_stack.ss_size = kStack;
    s->uc.uc_link = nullptr;
    makecontext(&s->uc, reinterpret_cast<void (*)()>(&fiber_main), 0);
#endif
    return s;
  }
  NRL_CPU_FN void jump(Stack* from, Stack* to, bool dying = false) {
    (void)dying;
#ifdef NRL_CPU_ASAN
    __sanitizer_start_switch_fiber(dying ? nullptr : &from->asan, to == &sched ? schedBottom : to->base,
                                   to == &sched ? schedSize : kStack);
#endif
#ifndef NRL_CPU_UCONTEXT
    nrl_cpu_ctx_switch(&from->sp, to->sp);
#else
    swapcontext(&from->uc, &to->uc);
#endif
#ifdef NRL_CPU_ASAN
    __sanitizer_finish_switch_fiber(from->asan, nullptr, nullptr);
#endif
  }
  NRL_CPU_FN void suspend() {  // the running lane gives way to the scheduler
    Stack* me = running;
    g_cur->stack = me;
#ifdef NRL_CPU_TSAN
    __tsan_switch_to_fiber(tsanSched, 1);
#endif
    jump(me, &sched);
  }
  NRL_CPU_FN void into(Stack* s, Lane* l) {
    g_cur = l;
    running = s;
    retired = nullptr;
#ifdef NRL_CPU_TSAN
    if (l) __tsan_switch_to_fiber(l->tsan, 1);
#endif
    jump(&sched, s);
#ifndef NRL_CPU_TSAN  // there each CUDA thread keeps a stack of its own for the whole block
    if (retired) idle.push_back(retired);
#endif
  }
  NRL_CPU_FN void loop() {  // on a fiber: run unstarted lanes until one suspends or none is left
    while (next < warpEnd && !failed) {
      Lane* l = &lane[order[next++]];
      l->st = St::Ready;
      g_cur = l;
#ifdef NRL_CPU_TSAN
      __tsan_switch_to_fiber(l->tsan, 1);
#endif
      body(arg);
#ifdef NRL_CPU_TSAN
      __tsan_release(&grid);
      __tsan_switch_to_fiber(tsanSched, 1);
#endif
      exited(g_cur);
#ifdef NRL_CPU_TSAN
      break;
#endif
    }
    retired = running;
  }

  // ---- scheduler ----
  NRL_CPU_FN bool runWarp(int w) {  // until no lane of the warp can run; true if any ran
    const int lo = w * kWarp, hi = std::min(n, lo + kWarp);
    bool any = false, again = true;
    if (lane[order[lo]].st == St::Fresh) {
      next = lo;
      warpEnd = hi;
      while (next < warpEnd && !failed) {
        into(getStack(), nullptr);
        any = true;
      }
    }
    while (again && !failed) {
      again = false;
      for (int i = lo; i < hi && !failed; ++i) {
        Lane* l = &lane[order[i]];
        if (l->st == St::Ready) {
          into(l->stack, l);
          any = again = true;
        }
      }
    }
    return any;
  }
  NRL_CPU_FN void runBlock() {
    alive = n;
    barCount = barAcc = 0;
    slots = 0;
    staTop = 0;
    failed = false;
#ifdef NRL_CPU_TSAN  // fresh shadow: blocks share stacks and shared memory here but not on a GPU
    tsanSched = __tsan_get_current_fiber();
    map(smem, kSmemArea);
    idle = all;
    for (Stack* s : all) map(s->base + 4096, kStack - 4096);
#endif
    unpoison(smem, kMaxDynSmem);
    std::memset(smem, 0xFF, dynBytes);  // NaN in fp32, bf16 and fp8
    poison(smem + dynBytes, kMaxDynSmem - dynBytes);
    poison(sta, kMaxStaticSmem);
    for (int t = 0; t < n; ++t) {
      Lane& l = lane[t];
      l.tid.x = t % block.x;
      l.tid.y = t / block.x % block.y;
      l.tid.z = t / (block.x * block.y);
      l.st = St::Fresh;
      l.stack = nullptr;
      l.file = nullptr;
      l.tsan = nullptr;
#ifdef NRL_CPU_TSAN
      l.tsan = __tsan_create_fiber(0);
#endif
    }
    const int nw = (n + kWarp - 1) / kWarp;
    for (int w = 0; w < nw; ++w) {
      waitBits[w] = 0;
      aliveBits[w] = n - w * kWarp >= kWarp ? ~0u : (1u << (n - w * kWarp)) - 1;
    }
    while (alive > 0 && !failed) {
      bool progress = false;
      for (int w = 0; w < nw && !failed; ++w) progress |= runWarp(worder[w]);
      if (!progress && alive > 0 && !failed) reportDeadlock();
    }
#ifdef NRL_CPU_TSAN
    for (int t = 0; t < n; ++t) __tsan_destroy_fiber(lane[t].tsan);
#endif
    if (failed) {  // suspended fibers are abandoned; their stacks are kept
      idle = all;
#ifdef NRL_CPU_TSAN
      __tsan_acquire(error);
#endif
      throw KernelError("block (" + std::to_string(bid.x) + "," + std::to_string(bid.y) + "," +
                        std::to_string(bid.z) + "): " + error);
    }
  }
  void reportDeadlock() {
    failed = true;
    size_t o = size_t(std::snprintf(error, sizeof error, "deadlock, %d threads left:", alive));
    const char* f = nullptr;
    int ln = -1;
    for (int t = 0; t < n && o + 120 < sizeof error; ++t) {
      const Lane& l = lane[t];
      if (l.st == St::Done || (l.file == f && l.line == ln)) continue;
      f = l.file;
      ln = l.line;
      o += size_t(std::snprintf(error + o, sizeof error - o, " thread %d.. at %s %s:%d (mask %08x);", t,
                                l.st == St::InBarrier ? "barrier" : "warp op", f ? f : "?", ln,
                                l.st == St::InWarpOp ? l.mask : 0));
    }
  }
  NRL_CPU_FN void fail() {  // from a CUDA thread: leave for good
    failed = true;
    g_cur->st = St::InBarrier;
#ifdef NRL_CPU_TSAN
    __tsan_release(error);
#endif
    suspend();
    std::abort();
  }

  // ---- block barrier; returns the sum of acc over the block ----
  NRL_CPU_FN void release() {
    barOut = barAcc;
    barAcc = 0;
    barCount = 0;
    ++epoch;
    for (int t = 0; t < n; ++t)
      if (lane[t].st == St::InBarrier) lane[t].st = St::Ready;
  }
  NRL_CPU_FN int barrier(int acc, const char* file, int line) {
    Lane* me = g_cur;
    if (barCount && (barLine != line || barFile != file)) {
      std::snprintf(error, sizeof error, "divergent __syncthreads: %s:%d and %s:%d", barFile, barLine, file,
                    line);
      fail();
    }
    barFile = me->file = file;
    barLine = me->line = line;
    barAcc += acc;
#ifdef NRL_CPU_TSAN  // two objects in turn: a late waker must not see arrivals at the next barrier
    char* sync = &barSync[epoch & 1];
    __tsan_release(sync);
#endif
    if (++barCount == alive)
      release();
    else {
      me->st = St::InBarrier;
      suspend();
    }
#ifdef NRL_CPU_TSAN
    __tsan_acquire(sync);
#endif
    return barOut;
  }

  // ---- warp collective: the last lane to arrive runs fn over every participant's payload ----
  NRL_CPU_FN bool complete(int base, int cnt, unsigned mask, CollFn fn) {
    const int w = base / kWarp;
    if (mask & aliveBits[w] & ~waitBits[w]) return false;
    unsigned part = 0;
    void* p[kWarp] = {};
    for (int i = 0; i < cnt; ++i) {
      if (!(mask >> i & 1)) continue;
      Lane& o = lane[base + i];
      if (o.st == St::Done) continue;  // as hardware: exited lanes drop out
      if (o.st != St::InWarpOp || o.mask != mask) return false;
      if (o.fn != fn) {
        std::snprintf(error, sizeof error, "lanes of mask %08x are in different warp ops (%s:%d)", mask,
                      o.file, o.line);
        failed = true;
        return false;
      }
      part |= 1u << i;
      p[i] = o.payload;
#ifdef NRL_CPU_TSAN
      __tsan_acquire(&o.mask);
#endif
    }
    fn(p, part);
#ifdef NRL_CPU_TSAN
    char* done = &warpSync[int(g_cur - lane)][++epochW & 1];
    __tsan_release(done);
    for (int i = 0; i < cnt; ++i)
      if (part >> i & 1) lane[base + i].acq = done;
#endif
    waitBits[w] &= ~part;
    for (int i = 0; i < cnt; ++i)
      if (part >> i & 1) lane[base + i].st = St::Ready;
    return true;
  }
  NRL_CPU_FN void collective(unsigned mask, CollFn fn, void* payload, const char* file, int line) {
    Lane* me = g_cur;
    const int t = int(me - lane), base = t & ~(kWarp - 1), cnt = std::min(kWarp, n - base);
    if (!(mask >> (t - base) & 1)) {
      std::snprintf(error, sizeof error, "%s:%d: calling lane is not in mask %08x", file, line, mask);
      fail();
    }
    me->mask = mask;
    me->fn = fn;
    me->payload = payload;
    me->file = file;
    me->line = line;
    me->st = St::InWarpOp;
    waitBits[base / kWarp] |= 1u << (t - base);
#ifdef NRL_CPU_TSAN
    __tsan_release(&me->mask);
#endif
    if (!complete(base, cnt, mask, fn)) {
      if (failed) fail();
      suspend();
    }
#ifdef NRL_CPU_TSAN
    __tsan_acquire(me->acq);
#endif
  }
  NRL_CPU_FN void exited(Lane* l) {  // may complete what others wait for
    l->st = St::Done;
    const int t = int(l - lane), base = t & ~(kWarp - 1), cnt = std::min(kWarp, n - base);
    aliveBits[base / kWarp] &= ~(1u << (t - base));
    if (barCount == --alive && barCount) release();
    if (!waitBits[base / kWarp]) return;
    for (int i = 0; i < cnt && !failed; ++i) {
      Lane& o = lane[base + i];
      if (o.st == St::InWarpOp && (o.mask >> (t - base) & 1)) complete(base, cnt, o.mask, o.fn);
    }
  }

  // ---- static shared memory: one slot per declaration, poisoned per block ----
  NRL_CPU_FN void* shared(const void* key, size_t bytes, size_t align) {
    for (int i = 0; i < slots; ++i)
      if (slot[i].key == key) return slot[i].p;
    size_t o = (staTop + align - 1) & ~(align - 1);
    if (o + bytes > kMaxStaticSmem || slots == 64) {
      std::snprintf(error, sizeof error, "static shared memory over %zu bytes", kMaxStaticSmem);
      fail();
    }
    staTop = o + bytes + 32;  // 32 bytes stay poisoned between arrays under ASan
    unpoison(sta + o, bytes);
    for (size_t i = 0; i < bytes; ++i) const_cast<volatile char*>(sta)[o + i] = char(0xFF);
    slot[slots++] = {key, sta + o};
    return sta + o;
  }
};

inline void fiber_main() {
#ifdef NRL_CPU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &g_blk->schedBottom, &g_blk->schedSize);
#endif
  g_blk->loop();
  g_blk->jump(g_blk->running, &g_blk->sched, true);
  std::abort();
}

// ---- launch ----------------------------------------------------------------------------------
struct Config {
  int mode = 0;
  unsigned seed = 1;
  int threads = 1;
};  // mode 0 forward, 1 reverse, 2 random
inline Config& config() {
  static Config c = [] {
    Config k;
    if (const char* o = std::getenv("NRL_CPU_ORDER")) {
      k.mode = o[0] == 'r' && o[1] == 'e' ? 1 : o[0] == 'r' ? 2 : 0;
      if (const char* s = std::strchr(o, ':')) k.seed = unsigned(std::atoi(s + 1));
    }
    if (const char* t = std::getenv("NRL_CPU_THREADS")) k.threads = std::max(1, std::atoi(t));
    return k;
  }();
  return c;
}

inline void runGrid(::dim3 grid, ::dim3 block, size_t smem, void (*body)(void*), void* arg) {
  const size_t n = size_t(block.x) * block.y * block.z, nb = size_t(grid.x) * grid.y * grid.z;
  if (n == 0 || n > kMaxThreads || nb == 0 || grid.y > 65535 || grid.z > 65535)
    throw KernelError("invalid launch configuration");
  if (smem > kMaxDynSmem) throw KernelError("dynamic shared memory over the sm_90 limit");
  const Config cfg = config();
  std::vector<unsigned> blocks(nb);
  for (size_t i = 0; i < nb; ++i) blocks[i] = unsigned(cfg.mode == 1 ? nb - 1 - i : i);
  std::mt19937 rng(cfg.seed);
  if (cfg.mode == 2) std::shuffle(blocks.begin(), blocks.end(), rng);
  std::atomic<size_t> take{0};
  auto worker = [&](unsigned seed) {
    static thread_local Block B;  // its stacks are reused from launch to launch
    if (g_blk) throw KernelError("nested launch");
    g_blk = &B;
    struct Off {
      ~Off() {
        g_blk = nullptr;
        g_cur = nullptr;
      }
    } off;
    B.grid = grid;
    B.block = block;
    B.n = int(n);
    B.dynBytes = smem;
    B.body = body;
    B.arg = arg;
    std::mt19937 r(seed);
    const int nw = int((n + kWarp - 1) / kWarp);
    for (size_t k; (k = take.fetch_add(1)) < nb;) {
      for (int i = 0; i < B.n; ++i) B.order[i] = short(i);
      for (int w = 0; w < nw; ++w) {
        B.worder[w] = short(w);
        short *lo = B.order + w * kWarp, *hi = B.order + std::min<int>(B.n, (w + 1) * kWarp);
        if (cfg.mode == 1) std::reverse(lo, hi);
        if (cfg.mode == 2) std::shuffle(lo, hi, r);
      }
      if (cfg.mode == 1) std::reverse(B.worder, B.worder + nw);
      if (cfg.mode == 2) std::shuffle(B.worder, B.worder + nw, r);
      const unsigned b = blocks[k];
      B.bid.x = b % grid.x;
      B.bid.y = b / grid.x % grid.y;
      B.bid.z = b / (grid.x * grid.y);
      B.runBlock();
    }
#ifdef NRL_CPU_TSAN
    __tsan_acquire(&B.grid);
#endif
  };
  const int T = int(std::min<size_t>(size_t(cfg.threads), nb));
  if (T <= 1) {
    worker(cfg.seed);
    return;
  }
  std::exception_ptr err;
  std::atomic_flag once = ATOMIC_FLAG_INIT;
  std::vector<std::thread> pool;
  for (int i = 0; i < T; ++i)
    pool.emplace_back([&, i] {
      try {
        worker(cfg.seed + unsigned(i));
      } catch (...) {
        take = nb;
        if (!once.test_and_set()) err = std::current_exception();
      }
    });
  for (auto& t : pool) t.join();
  if (err) std::rethrow_exception(err);
}

template <class... P, class... A>
void launch(void* stream, void (*kernel)(P...), ::dim3 grid, ::dim3 block, size_t smem, A&&... a) {
  struct Call {
    void (*k)(P...);
    std::tuple<std::decay_t<P>...> args;
  };
  ::nrl::device::sim_enqueue(stream, [c = Call{kernel, {static_cast<std::decay_t<P>>(std::forward<A>(a))...}},
                                      grid, block, smem]() mutable {
    runGrid(
        grid, block, smem,
        [](void* p) {
          Call& q = *static_cast<Call*>(p);
          std::apply([&](auto&... x) { q.k(x...); }, q.args);
        },
        &c);
  });
}

// ---- warp operations --------------------------------------------------------------------------
inline int laneId() {
  return int(g_cur - g_blk->lane) & (kWarp - 1);
}

template <class T>
struct ShflP {
  T in, out;
  int src;
};
template <class T>
void shflFn(void* const* p, unsigned part) {
  for (int i = 0; i < kWarp; ++i)
    if (part >> i & 1) {
      auto* m = static_cast<ShflP<T>*>(p[i]);
      if (part >> m->src & 1)
        m->out = static_cast<ShflP<T>*>(p[m->src])->in;
      else
        m->src = -1;
    }
}
template <class T>
T shfl(unsigned mask, T v, int src, const char* file, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  ShflP<T> p{v, v, src};
  g_blk->collective(mask, &shflFn<T>, &p, file, line);
  if (p.src < 0) {
    std::snprintf(g_blk->error, sizeof g_blk->error, "%s:%d: shuffle reads inactive lane %d", file, line,
                  src);
    g_blk->fail();
  }
  return p.out;
}
struct VoteP {
  unsigned in, out;
};
inline void ballotFn(void* const* p, unsigned part) {
  unsigned b = 0;
  for (int i = 0; i < kWarp; ++i)
    if (part >> i & 1 && static_cast<VoteP*>(p[i])->in) b |= 1u << i;
  for (int i = 0; i < kWarp; ++i)
    if (part >> i & 1) static_cast<VoteP*>(p[i])->out = b;
}
inline void syncFn(void* const*, unsigned) {}
inline unsigned ballot(unsigned mask, bool pred, const char* f, int l) {
  VoteP p{pred, 0};
  g_blk->collective(mask, &ballotFn, &p, f, l);
  return p.out;
}
template <class T>
T atomicRmw(T* p, T (*op)(T, T), T v) {
  T o, w;
  __atomic_load(p, &o, __ATOMIC_RELAXED);
  do w = op(o, v);
  while (!__atomic_compare_exchange(p, &o, &w, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return o;
}

}  // namespace nrl::fiber

#define NRL_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ::nrl::fiber::launch(stream, kernel, grid, block, smem __VA_OPT__(, ) __VA_ARGS__)
// NRL_SHARED(float, red, [32]);  NRL_SHARED(float, tile, [32][33]);  NRL_SHARED(float, scale);
#define NRL_SHARED(type, name, ...)                                                                    \
  using name##_shared_t = type __VA_ARGS__;                                                            \
  name##_shared_t& name = *static_cast<name##_shared_t*>([]() -> void* {                               \
    static char key;                                                                                   \
    return ::nrl::fiber::g_blk->shared(&key, sizeof(name##_shared_t),                                  \
                                       alignof(name##_shared_t) < 16 ? 16 : alignof(name##_shared_t)); \
  }())
#define NRL_DYN_SHARED(type, name) type* name = reinterpret_cast<type*>(::nrl::fiber::g_blk->smem)

// ---- built-in variables, barriers and warp intrinsics under their CUDA names ---------------------
namespace nrl::fiber {
NRL_CPU_FN inline ::uint3 getTid() {
  return g_cur->tid;
}
NRL_CPU_FN inline ::uint3 getBid() {
  return g_blk->bid;
}
NRL_CPU_FN inline ::dim3 getBlock() {
  return g_blk->block;
}
NRL_CPU_FN inline ::dim3 getGrid() {
  return g_blk->grid;
}
}  // namespace nrl::fiber
#define threadIdx (::nrl::fiber::getTid())
#define blockIdx (::nrl::fiber::getBid())
#define blockDim (::nrl::fiber::getBlock())
#define gridDim (::nrl::fiber::getGrid())
constexpr int warpSize = 32;

#define __syncthreads() ((void)::nrl::fiber::g_blk->barrier(0, __FILE__, __LINE__))
#define __syncthreads_count(p) (::nrl::fiber::g_blk->barrier((p) ? 1 : 0, __FILE__, __LINE__))
#define __syncthreads_or(p) (::nrl::fiber::g_blk->barrier((p) ? 1 : 0, __FILE__, __LINE__) != 0)
#define __syncthreads_and(p) (::nrl::fiber::g_blk->barrier((p) ? 0 : 1, __FILE__, __LINE__) == 0)

#define NRL_SITE const char *f = __builtin_FILE(), int l = __builtin_LINE()
inline void __syncwarp(unsigned mask = 0xffffffffu, NRL_SITE) {
  char c;
  nrl::fiber::g_blk->collective(mask, &nrl::fiber::syncFn, &c, f, l);
}
inline unsigned __ballot_sync(unsigned mask, int p, NRL_SITE) {
  return nrl::fiber::ballot(mask, p != 0, f, l);
}
inline int __any_sync(unsigned mask, int p, NRL_SITE) {
  return nrl::fiber::ballot(mask, p != 0, f, l) != 0;
}
inline int __all_sync(unsigned mask, int p, NRL_SITE) {
  return nrl::fiber::ballot(mask, p == 0, f, l) == 0;
}
template <class T>
T __shfl_sync(unsigned m, T v, int src, int w = 32, NRL_SITE) {
  return nrl::fiber::shfl(m, v, (src & (w - 1)) | (nrl::fiber::laneId() & ~(w - 1)), f, l);
}
template <class T>
T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, NRL_SITE) {
  const int me = nrl::fiber::laneId(), s = me - int(d);
  return nrl::fiber::shfl(m, v, s < (me & ~(w - 1)) ? me : s, f, l);
}
template <class T>
T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, NRL_SITE) {
  const int me = nrl::fiber::laneId(), s = me + int(d);
  return nrl::fiber::shfl(m, v, s > (me | (w - 1)) ? me : s, f, l);
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, NRL_SITE) {
  const int me = nrl::fiber::laneId(), s = me ^ x;
  return nrl::fiber::shfl(m, v, s > (me | (w - 1)) ? me : s, f, l);
}

// ---- atomics ------------------------------------------------------------------------------------
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return nrl::fiber::atomicRmw<T>(
      p, [](T a, T b) { return T(a + b); }, v);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::fiber::atomicRmw<T>(
      p, [](T a, T b) { return a < b ? b : a; }, v);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  static_assert(std::is_integral_v<T>);
  return nrl::fiber::atomicRmw<T>(
      p, [](T a, T b) { return b < a ? b : a; }, v);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return nrl::fiber::atomicRmw<T>(
      p, [](T, T b) { return b; }, v);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> cmp, std::type_identity_t<T> v) {
  __atomic_compare_exchange(p, &cmp, &v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return cmp;
}
inline void __threadfence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void __threadfence_block() {}

// ---- device math and memory intrinsics ----------------------------------------------------------
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __uint_as_float(unsigned u) {
  float r;
  std::memcpy(&r, &u, 4);
  return r;
}
inline unsigned __float_as_uint(float x) {
  unsigned r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline float __int_as_float(int u) {
  float r;
  std::memcpy(&r, &u, 4);
  return r;
}
inline int __float_as_int(float x) {
  int r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz(unsigned(x)) : 32;
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> v) {
  *p = v;
}
using std::max;
using std::min;

// ---- tensor-core tile and asynchronous copy, as the project's PTX wrappers would call them ----------
namespace nrl::fiber {
struct MmaP {
  const unsigned* a;
  const unsigned* b;
  const float* c;
  float* d;
};
inline float bf(unsigned w, int half) {
  return __uint_as_float((half ? w >> 16 : w & 0xffffu) << 16);
}
// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, PTX fragment layout
inline void mmaFn(void* const* p, unsigned) {
  float A[16][16], B[16][8];
  for (int l = 0; l < kWarp; ++l) {
    auto* m = static_cast<MmaP*>(p[l]);
    const int g = l >> 2, t = (l & 3) * 2;
    for (int r = 0; r < 4; ++r)
      for (int h = 0; h < 2; ++h) A[g + (r & 1) * 8][t + h + (r >> 1) * 8] = bf(m->a[r], h);
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h) B[t + h + r * 8][g] = bf(m->b[r], h);
  }
  for (int l = 0; l < kWarp; ++l) {
    auto* m = static_cast<MmaP*>(p[l]);
    const int g = l >> 2, t = (l & 3) * 2;
    for (int i = 0; i < 4; ++i) {
      float s = m->c[i];
      for (int k = 0; k < 16; ++k) s += A[g + (i >> 1) * 8][k] * B[k][t + (i & 1)];
      m->d[i] = s;
    }
  }
}
struct CpQueue {
  struct E {
    void* d;
    const void* s;
    int n, group;
  } e[64];
  int n = 0, group = 0;
};
NRL_CPU_FN inline CpQueue& cpq() {  // per CUDA thread; copies are applied as late as the program allows
  static thread_local CpQueue q[kMaxThreads];
  return q[g_cur - g_blk->lane];
}
NRL_CPU_FN inline void cpFlush(CpQueue& q, int before) {
  int k = 0;
  for (int i = 0; i < q.n; ++i)
    if (q.e[i].group < before)
      std::memcpy(q.e[i].d, q.e[i].s, size_t(q.e[i].n));
    else
      q.e[k++] = q.e[i];
  q.n = k;
}
}  // namespace nrl::fiber
inline void nrl_mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c, NRL_SITE) {
  float t[4] = {c[0], c[1], c[2], c[3]};
  nrl::fiber::MmaP p{a, b, t, d};
  nrl::fiber::g_blk->collective(0xffffffffu, &nrl::fiber::mmaFn, &p, f, l);
}
NRL_CPU_FN inline void nrl_cp_async16(void* dst, const void* src) {
  auto& q = nrl::fiber::cpq();
  if (q.n == 64) nrl::fiber::cpFlush(q, q.group + 1);
  q.e[q.n++] = {dst, src, 16, q.group};
}
NRL_CPU_FN inline void nrl_cp_async_commit() {
  ++nrl::fiber::cpq().group;
}
template <int N>
NRL_CPU_FN void nrl_cp_async_wait() {
  auto& q = nrl::fiber::cpq();
  nrl::fiber::cpFlush(q, q.group - N);
}
