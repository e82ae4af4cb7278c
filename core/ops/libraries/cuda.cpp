// The libraries of a GPU.

#include <dlfcn.h>

#include <spdlog/fmt/fmt.h>

#include "core/ops/attention_engine.h"
#include "core/ops/gemm/engine.h"
#include "core/ops/libraries.h"

namespace nrl::ops {

std::unique_ptr<Libraries> open_cuda_libraries(device::Runtime& runtime, const LibraryOptions& options) {
  auto libraries = std::make_unique<Libraries>();
  libraries->tf32 = options.tf32;
  libraries->gemm = gemm::open_cublaslt(runtime, options);
  libraries->attention =
      attention::open_cudnn(runtime, {.deterministic = options.deterministic}, libraries->why_no_attention);
  return libraries;
}

namespace {

/// " in FILE": the library that has this function.
std::string place_of(const void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname ? fmt::format(" in {}", info.dli_fname) : "";
}

}  // namespace

std::vector<std::string> cuda_library_versions() {
  std::vector<std::string> list{gemm::cublaslt_version() +
                                place_of(dlsym(RTLD_DEFAULT, "cublasLtGetVersion"))};
  // cuDNN is loaded when a run opens it, not before.
  void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
  using Version = size_t (*)();
  const auto version = library ? reinterpret_cast<Version>(dlsym(library, "cudnnGetVersion")) : nullptr;
  if (version) {
    const size_t dnn = version();
    list.push_back(fmt::format("cuDNN {}.{}.{}{}", dnn / 10000, dnn / 100 % 100, dnn % 100,
                               place_of(reinterpret_cast<const void*>(version))));
  } else {
    list.push_back("no cuDNN 9 can be loaded: attention runs on our own kernels");
  }
  return list;
}

}  // namespace nrl::ops
