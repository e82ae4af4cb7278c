#pragma once
// Adapts a communicator to the interface of the checkpoint writer.

#include "core/io/checkpoint_store.h"
#include "parallel/comm/communicator.h"

namespace nrl::train {

/// All ranks of `ranks` as writers of a checkpoint. `ranks`, a communicator for host memory, must outlive it.
RankGroup rank_group(comm::Communicator& ranks);

}  // namespace nrl::train
