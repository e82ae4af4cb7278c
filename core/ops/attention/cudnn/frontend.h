#pragma once
// cudnn-frontend, cuDNN's header-only C++ interface. Only cudnn.cpp may include it: it takes half a minute to
// compile and defines a global variable.

#include <dlfcn.h>

#include "core/ops/attention/cudnn/symbols.h"

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
// Its JSON library is another version of ours under the same names.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define dlopen(name, flags) ::nrl::ops::attention::open_library(name, flags)
#define dlsym(library, name) ::nrl::ops::attention::find_symbol(library, name)
#include <cudnn_frontend.h>
#undef dlopen
#undef dlsym

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}
