#pragma once
// The OpenMP threads of this process: how they wait, and whether the system allows them.

namespace nrl::cpu {

/// Makes OpenMP threads that wait for work spin for about 0.1 ms and then sleep, where the environment does
/// not say how they wait. GCC's OpenMP reads its environment before main, so the program starts itself again
/// with GOMP_SPINCOUNT set, once. Before that, where OpenMP binds threads (OMP_PLACES, OMP_PROC_BIND), the
/// calling thread gets the CPUs of all places instead of the first one's. To be called first in main. Fails
/// with Exit::config where the system refuses CPUs.
void prepare_openmp(char** argv);

/// Sets the number of threads of parallel regions that the calling thread begins, and starts them. Fails
/// with Exit::out_of_memory and the name of the limit where the system refuses them (OpenMP itself would
/// end the program).
void use_threads(int threads);

}  // namespace nrl::cpu
