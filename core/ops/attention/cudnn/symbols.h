#pragma once
// cudnn-frontend calls these instead of dlopen and dlsym. They resolve the CUDA runtime to the copy that is
// linked into this program.

namespace nrl::ops::attention {

void* open_library(const char* name, int flags);
void* find_symbol(void* library, const char* name);

}  // namespace nrl::ops::attention
