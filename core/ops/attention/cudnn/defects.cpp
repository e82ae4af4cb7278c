#include "core/ops/attention/cudnn/defects.h"

#include <limits>

#include <spdlog/fmt/fmt.h>

namespace nrl::ops::attention {
namespace {

enum class Effect : uint8_t { refused, not_captured };

/// A rule holds from version `first` to `last` where `concerns` says so.
struct Defect {
  int first, last;
  Effect effect;
  bool (*concerns)(const Problem& p, int major);
  const char* reason;  ///< what the library does; follows its name in messages
};

constexpr int any = std::numeric_limits<int>::max();
constexpr int hopper = 9;
constexpr int64_t tile = 128;  ///< keys of a block on Hopper

bool backward(const Problem& p) {
  return p.direction == Direction::backward;
}

constexpr Defect defects[] = {
    // NVIDIA/TransformerEngine issue 2186: gradients become NaN, mended in 9.18. Clearing the workspace is
    // not enough: on an H200, 9.14 gave wrong dk and dv with it and wrote outside of them; 9.19 does not.
    {0, 91799, Effect::refused,
     [](const Problem& p, int major) { return major == hopper && backward(p) && !p.equal; },
     "gives wrong gradients of sequences of different lengths on Hopper; 9.18 or later does not"},
    // NVIDIA/cudnn-frontend pull request 628, pytorch/pytorch issue 196678; 9.30 has it. The keys that fill
    // up the last tile are not masked: exp(0 - lse) overflows in rows whose lse is below -88.7. A causal mask
    // hides them; for fewer queries than keys this is not confirmed.
    {0, any, Effect::refused,
     [](const Problem& p, int major) {
       return major == hopper && backward(p) && p.equal && !(p.causal && p.self) &&
              p.key.rows % tile == tile / 2;
     },
     "gives NaN gradients on Hopper for queries with very negative scores where the keys are not their own "
     "behind a causal mask, and 64 over a multiple of 128"},
    // NVIDIA/TransformerEngine pull request 2344: illegal memory accesses.
    {91300, 91499, Effect::not_captured, [](const Problem& p, int) { return !p.causal && p.key.rows > 1024; },
     "accesses memory out of bounds in CUDA graphs for more than 1,024 keys without a causal mask; 9.15 or "
     "later does not"},
    // cudnn-frontend then masks the end of each sequence by lengths that every call copies from a temporary
    // of its own in pageable host memory.
    {0, 91500, Effect::not_captured,
     [](const Problem& p, int) { return backward(p) && p.equal && p.key.rows % tile != 0; },
     "reads host memory in every call for gradients of sequences that are no multiple of 128 tokens; 9.15.1 "
     "or later does not"},
    // NVIDIA/cudnn-frontend issue 1071.
    {92600, 92699, Effect::refused,
     [](const Problem& p, int) {
       return backward(p) && p.sequences == 1 && p.heads == 1 && p.query.rows == 1;
     },
     "crashes while it plans gradients of one query of one head"},
};

const Defect* find(Effect effect, const Problem& p, const CudnnVersion& v) {
  for (const Defect& d : defects)
    if (d.effect == effect && v.version >= d.first && v.version <= d.last && d.concerns(p, v.major))
      return &d;
  return nullptr;
}

std::string reason_of(const Defect* d, const CudnnVersion& v) {
  return d ? fmt::format("cuDNN {} {}", cudnn_version_text(v.version), d->reason) : "";
}

}  // namespace

std::string defect_reason(const Problem& p, const CudnnVersion& v) {
  return reason_of(find(Effect::refused, p, v), v);
}

std::string uncapturable_reason(const Problem& p, const CudnnVersion& v) {
  return reason_of(find(Effect::not_captured, p, v), v);
}

std::string assumed_defect_reason(const Problem& p, int major) {
  constexpr int version = 91900;
  return defect_reason(p, {version, major});
}

std::string cudnn_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace nrl::ops::attention
