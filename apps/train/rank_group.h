#pragma once
#include "core/io/checkpoint_store.h"
#include "parallel/comm/communicator.h"

namespace nrl::train {

/// All ranks of `ranks`, a communicator for host memory that must outlive it, as writers of a checkpoint.
RankGroup rank_group(comm::Communicator& ranks);

}  // namespace nrl::train
