#pragma once
// What main.cpp sees of the registered cases.

#include "tests/ops/cases.h"

namespace nrl::ops_test {

std::vector<Register>& registrars();

}  // namespace nrl::ops_test
