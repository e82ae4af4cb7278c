#pragma once
#include "parallel/comm/world/world.h"

/// The world of the test program, made in main().
nrl::comm::World& test_world();

/// Bytes of a chunk of shared memory in this run (MpiOptions::shared_slot_bytes).
int64_t test_slot_bytes();
