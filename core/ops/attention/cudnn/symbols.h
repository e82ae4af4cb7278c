#pragma once
// Replacements for dlopen and dlsym in cudnn-frontend, which resolve the CUDA runtime to the one that is
// linked into this program.

namespace nrl::ops::attention {

void* open_library(const char* name, int flags);
void* find_symbol(void* library, const char* name);

}  // namespace nrl::ops::attention
