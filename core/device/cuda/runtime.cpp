// The CUDA runtime behind device::Runtime. libcuda is never linked: the runtime loads it.

#include "core/device/runtime.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>

#include "core/base/error.h"
#include "core/base/shared_memory.h"
#include "core/base/text.h"
#include "core/device/cuda/devices.h"
#include "core/device/cuda/nvml.h"

namespace nrl::device {
namespace {

/// What to do about an error, where that is known.
const char* advice(cudaError_t error) {
  switch (error) {
    case cudaErrorLaunchFailure:
      return "; an earlier kernel caused it. One that waited in vain for another block has said so above, "
             "one that waited for its own loads has not: CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer tells";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
      return "; an earlier kernel caused it: CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer tells which";
    case cudaErrorLaunchTimeout:
      return "; a kernel ran longer than the display's watchdog allows: use a GPU without a display";
    case cudaErrorECCUncorrectable:
      return "; the GPU's memory has an error that cannot be corrected: reset or replace the GPU";
    case cudaErrorDevicesUnavailable:
      return "; the GPU is busy, or in an exclusive compute mode and in use by another process";
    case cudaErrorNoKernelImageForDevice:
      return "; the build has no kernels for this GPU: see nrl-train doctor";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return "; the step has a call that cannot be captured. Fix: set policy.cuda_graph: false";
    default:
      return "";
  }
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would be blamed for it
  fail(Exit::internal, "{}: {} ({}){}", call, cudaGetErrorString(error), cudaGetErrorName(error),
       advice(error));
}
#define NRL_CUDA(call) check(call, #call)

/// Lets this thread make calls that a capture of its own forbids, although they do it no harm.
class Relaxed {
 public:
  Relaxed() { NRL_CUDA(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

cudaStream_t stream_of(StreamHandle handle) {
  return static_cast<cudaStream_t>(handle);
}
cudaEvent_t event_of(EventHandle handle) {
  return static_cast<cudaEvent_t>(handle);
}

/// For calls that release: earlier errors are reported by other calls.
void ignore(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}

class Cuda final : public Runtime {
 public:
  explicit Cuda(int ordinal);

  void bind_thread() override { NRL_CUDA(cudaSetDevice(properties_.ordinal)); }

  void* allocate(size_t bytes) override {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // this one is not sticky
      fail(Exit::out_of_memory, "the GPU has {} free of {}, {} are needed", human_bytes(free_memory()),
           human_bytes(properties_.memory), human_bytes(bytes));
    }
    check(error, "cudaMalloc");
    return p;
  }
  void release(void* p) noexcept override { ignore(cudaFree(p)); }
  void* allocate_pinned(size_t bytes) override {
    void* p = nullptr;
    const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      fail(Exit::out_of_memory, "{} of host memory cannot be page-locked; free memory, or raise ulimit -l",
           human_bytes(bytes));
    }
    check(error, "cudaHostAlloc");
    return std::memset(p, 0, bytes);
  }
  void release_pinned(void* p) noexcept override { ignore(cudaFreeHost(p)); }
  size_t free_memory() override {
    size_t free = 0, total = 0;
    NRL_CUDA(cudaMemGetInfo(&free, &total));
    return free;
  }

  StreamHandle create_stream(Priority priority) override {
    int least = 0, greatest = 0;
    NRL_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    NRL_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                          priority == Priority::high ? greatest : least));
    return stream;
  }
  void destroy_stream(StreamHandle stream) noexcept override { ignore(cudaStreamDestroy(stream_of(stream))); }
  void synchronize(StreamHandle stream) override { NRL_CUDA(cudaStreamSynchronize(stream_of(stream))); }
  void synchronize() override { NRL_CUDA(cudaDeviceSynchronize()); }
  void profiler(bool on) override { NRL_CUDA(on ? cudaProfilerStart() : cudaProfilerStop()); }

  EventHandle create_event(EventKind kind) override {
    cudaEvent_t event = nullptr;
    NRL_CUDA(cudaEventCreateWithFlags(&event,
                                      kind == EventKind::timed ? cudaEventDefault : cudaEventDisableTiming));
    return event;
  }
  void destroy_event(EventHandle event) noexcept override { ignore(cudaEventDestroy(event_of(event))); }
  void record(EventHandle event, StreamHandle stream) override {
    NRL_CUDA(cudaEventRecord(event_of(event), stream_of(stream)));
  }
  void wait(StreamHandle stream, EventHandle event) override {
    NRL_CUDA(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
  }
  bool done(EventHandle event) override {
    const Relaxed relaxed;
    const cudaError_t state = cudaEventQuery(event_of(event));
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // it counts as an error, and would be the next launch's
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }
  void synchronize_event(EventHandle event) override { NRL_CUDA(cudaEventSynchronize(event_of(event))); }
  double elapsed_ms(EventHandle begin, EventHandle end) override {
    float ms = 0;
    NRL_CUDA(cudaEventElapsedTime(&ms, event_of(begin), event_of(end)));
    return static_cast<double>(ms);
  }

  void copy(void* to, const void* from, size_t bytes, CopyKind kind, StreamHandle stream) override {
    const cudaMemcpyKind direction = kind == CopyKind::host_to_device   ? cudaMemcpyHostToDevice
                                     : kind == CopyKind::device_to_host ? cudaMemcpyDeviceToHost
                                                                        : cudaMemcpyDeviceToDevice;
    NRL_CUDA(cudaMemcpyAsync(to, from, bytes, direction, stream_of(stream)));
  }
  void copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, size_t bytes, int64_t rows,
                 StreamHandle stream) override {
    NRL_CUDA(cudaMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                               bytes, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                               stream_of(stream)));
  }
  void fill(void* p, uint8_t value, size_t bytes, StreamHandle stream) override {
    NRL_CUDA(cudaMemsetAsync(p, value, bytes, stream_of(stream)));
  }
  void call_host(void (*function)(void*), void* argument, StreamHandle stream) override {
    NRL_CUDA(cudaLaunchHostFunc(stream_of(stream), function, argument));
  }

  void begin_capture(StreamHandle stream) override {
    // Thread-local: other threads (data, communication) may allocate and wait meanwhile.
    NRL_CUDA(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
  }
  bool capturing(StreamHandle stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    NRL_CUDA(cudaStreamIsCapturing(stream_of(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  GraphHandle end_capture(StreamHandle stream) override {
    cudaGraph_t graph = nullptr;
    NRL_CUDA(cudaStreamEndCapture(stream_of(stream), &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t error = cudaGraphInstantiateWithFlags(&executable, graph, 0);
    ignore(cudaGraphDestroy(graph));
    check(error, "cudaGraphInstantiateWithFlags");
    if (const cudaError_t upload = cudaGraphUpload(executable, stream_of(stream)); upload != cudaSuccess) {
      ignore(cudaGraphExecDestroy(executable));
      check(upload, "cudaGraphUpload");
    }
    return executable;
  }
  void discard_capture(StreamHandle stream) noexcept override {
    cudaGraph_t graph = nullptr;
    ignore(cudaStreamEndCapture(stream_of(stream), &graph));
    if (graph) ignore(cudaGraphDestroy(graph));
  }
  void launch(GraphHandle graph, StreamHandle stream) override {
    NRL_CUDA(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)));
  }
  void destroy_graph(GraphHandle graph) noexcept override {
    ignore(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
  }
};

Cuda::Cuda(int ordinal) {
  NRL_CUDA(cudaSetDevice(ordinal));
  cudaDeviceProp p{};
  NRL_CUDA(cudaGetDeviceProperties(&p, ordinal));
  properties_.name = p.name;
  properties_.ordinal = ordinal;
  properties_.major = p.major;
  properties_.minor = p.minor;
  properties_.multiprocessors = p.multiProcessorCount;
  properties_.memory = p.totalGlobalMem;
  properties_.shared_memory_optin = p.sharedMemPerBlockOptin;
  properties_.l2_cache = static_cast<size_t>(p.l2CacheSize);
  properties_.uuid = cuda::uuid_text(p.uuid.bytes);
  properties_.memory_bandwidth = cuda::bandwidth_of(ordinal);
}

}  // namespace

std::unique_ptr<Runtime> open_cuda(int ordinal) {
  const cuda::Status status = cuda::query();
  if (!status.problem.empty()) fail(Exit::unavailable, "there is no GPU to use: {}", status.problem);
  const auto devices = static_cast<int>(status.devices.size());
  if (ordinal < 0 || ordinal >= devices)
    fail(Exit::unavailable, "GPU {} is asked for, this process sees {}", ordinal, devices);
  const cuda::DeviceInfo& d = status.devices[ordinal];
  if (!d.fits || d.prohibited)
    fail(Exit::unavailable, "GPU {}, {}, cannot be used: {}", ordinal, d.name,
         d.prohibited ? "it is in compute mode PROHIBITED"
                      : fmt::format("it has compute capability {}.{}, and this build has kernels for {}",
                                    d.major, d.minor, status.architectures));
  return std::make_unique<Cuda>(ordinal);
}

void check_launch(const char* kernel) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    fail(Exit::internal, "launching {} failed: {} ({}){}", kernel, cudaGetErrorString(error),
         cudaGetErrorName(error), advice(error));
}

// A process uses one device, so that what is known of a kernel holds for all of its launches.

void allow_shared_memory(const void* kernel, size_t bytes) {
  if (bytes <= dynamic_shared_unasked) return;
  static std::mutex mutex;
  static std::unordered_map<const void*, size_t> allowed;
  const std::lock_guard lock(mutex);
  size_t& most = allowed[kernel];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute of a kernel's shared memory");
  most = bytes;
}

int resident_blocks(const void* kernel, int threads) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> known;
  const std::lock_guard lock(mutex);
  int& blocks = known[{kernel, threads}];
  if (blocks > 0) return blocks;
  int found = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks = std::max(found, 1);
}

}  // namespace nrl::device
