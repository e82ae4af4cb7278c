#pragma once
// Marks functions that GPU kernels call as well.

#ifdef __CUDACC__
#define NRL_HOST_DEVICE __host__ __device__
#else
#define NRL_HOST_DEVICE
#endif
