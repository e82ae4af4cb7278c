#include "core/ops/attention/gpu_flash.h"
#include "core/ops/cpu_families.h"

namespace nrl::ops::NRL_GPU {

void fill_attention(KernelTable& table) {
  table.attention_forward = flash_forward;
  table.attention_backward = flash_backward;
}

}  // namespace nrl::ops::NRL_GPU
