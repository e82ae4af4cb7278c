#pragma once
// A temporary directory of all ranks.

#include <memory>
#include <string>

#include "parallel/comm/communicator.h"
#include "tests/io/io_test_util.h"

namespace nrl::test {

/// In memory; rank 0 makes and removes it. Collective.
struct SharedDirectory {
  explicit SharedDirectory(comm::Communicator& world) {
    if (world.rank() == 0) own = std::make_unique<TemporaryDirectory>(TemporaryDirectory::Where::memory);
    path = own ? own->path() : "";
    world.broadcast_text(path, 0);
  }
  std::unique_ptr<TemporaryDirectory> own;
  std::string path;
};

}  // namespace nrl::test
