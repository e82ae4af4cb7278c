#include "apps/state/rank_group.h"

namespace nrl::train {

RankGroup rank_group(comm::Communicator& ranks) {
  RankGroup group;
  group.rank = ranks.rank();
  group.size = ranks.size();
  if (ranks.size() == 1) return group;
  group.broadcast = [&ranks](const std::string& text) {
    std::string copy = text;
    ranks.broadcast_text(copy, 0);
    return copy;
  };
  group.gather = [&ranks](const std::string& text) { return ranks.gather_texts_to(text, 0); };
  group.send = [&ranks](int to, const void* data, size_t bytes) {
    ranks.send(comm::ConstView{data, static_cast<int64_t>(bytes), DType::u8}, to);
  };
  group.receive = [&ranks](int from, void* data, size_t bytes) {
    ranks.recv(comm::View(data, static_cast<int64_t>(bytes), DType::u8), from);
  };
  return group;
}

}  // namespace nrl::train
