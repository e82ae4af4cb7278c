#include "core/trace/nvtx.h"

#include <cstdlib>

#include <nvtx3/nvToolsExt.h>

namespace nrl::trace::detail {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("nrl-train");
  return handle;
}

}  // namespace

bool nvtx_wanted() {
  const char* path = std::getenv("NVTX_INJECTION64_PATH");
  return path && *path;
}

void nvtx_push(const char* name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void nvtx_pop() {
  nvtxDomainRangePop(domain());
}

}  // namespace nrl::trace::detail
