#include "core/trace/nvtx.h"

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include <nvtx3/nvToolsExt.h>

namespace nrl::trace::detail {
namespace {

/// The categories, and their colors; of ops see color_of().
constexpr struct {
  const char* name;
  uint32_t color;
} kinds[] = {
    {"step", 0x4B6B7A},      {"phase", 0x4B6B7A},         {"layer", 0x9AA6B2},  {"op", 0x9AA6B2},
    {"recompute", 0xB8860B}, {"communication", 0xD9541E}, {"wait", 0xC0356F},   {"message", 0xA04FC4},
    {"copy", 0x7A7A1A},      {"data", 0x1A9A6C},          {"report", 0x9AA6B2}, {"other", 0x9AA6B2},
};
static_assert(std::size(kinds) == static_cast<size_t>(Kind::other) + 1);

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = [] {
    const nvtxDomainHandle_t made = nvtxDomainCreateA("nrl-train");
    // Category 0 means none.
    for (size_t i = 0; i < std::size(kinds); ++i)
      nvtxDomainNameCategoryA(made, static_cast<uint32_t>(i + 1), kinds[i].name);
    return made;
  }();
  return handle;
}

/// Opaque. Ops by their name: GEMMs, attention, the optimizer, and the memory-bound ones.
uint32_t color_of(std::string_view name, Kind kind) {
  constexpr uint32_t opaque = 0xFF000000;
  uint32_t color = kinds[static_cast<size_t>(kind)].color;
  if (kind == Kind::op) {
    if (name.starts_with("linear") || name.starts_with("grouped_linear")) color = 0x76B900;
    if (name.starts_with("attention")) color = 0x2A78D6;
    if (name == "adamw") color = 0x4B6B7A;
  }
  return opaque | color;
}

}  // namespace

bool nvtx_wanted() {
  const char* path = std::getenv("NVTX_INJECTION64_PATH");
  return path && *path;
}

void nvtx_push(const char* name, Kind kind, double payload) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.category = static_cast<uint32_t>(kind) + 1;
  attributes.colorType = NVTX_COLOR_ARGB;
  attributes.color = color_of(name, kind);
  if (payload > 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    attributes.payload.ullValue = static_cast<uint64_t>(payload);
  }
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void nvtx_pop() {
  nvtxDomainRangePop(domain());
}

}  // namespace nrl::trace::detail
