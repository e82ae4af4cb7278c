#pragma once
#include "parallel/comm/world.h"

/// The world of the test program, made in main().
nrl::comm::World& test_world();
