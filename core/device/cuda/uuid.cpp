// Needs no toolkit: part of every build.

#include <cstdio>

#include "core/device/cuda/devices.h"

namespace nrl::cuda {

std::string uuid_text(const char* bytes) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char digits[4];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[i]));
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

}  // namespace nrl::cuda
