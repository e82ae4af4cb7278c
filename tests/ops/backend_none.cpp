// op_tests runs on this machine's processor only; gpu_tests has backend_cuda.cpp instead.

#include "tests/ops/backend.h"

namespace nrl::ops_test {

std::vector<Backend> cuda_backends(std::string& why_not) {
  why_not = "this program is not built for GPUs (see gpu_tests)";
  return {};
}

}  // namespace nrl::ops_test
