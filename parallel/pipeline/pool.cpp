#include "parallel/pipeline/pool.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace nrl::pipeline {

Stashes Stashes::in_turn(const std::vector<int>& counts, int microbatches) {
  Stashes out;
  for (const int count : counts) {
    std::vector<int> numbers;
    for (int m = 0; m < microbatches; ++m) numbers.push_back(m % count);
    out.add(out.chunks(), std::move(numbers));
  }
  return out;
}

void Stashes::add(int pool, std::vector<int> numbers) {
  counts_.resize(std::max(counts_.size(), static_cast<size_t>(pool) + 1));
  for (const int number : numbers) counts_[pool] = std::max(counts_[pool], number + 1);
  chunks_.push_back({pool, std::move(numbers)});
}

int Stashes::of(int chunk, int microbatch) const {
  const std::vector<int>& numbers = chunks_[chunk].numbers;
  NRL_CHECK(microbatch >= 0 && static_cast<size_t>(microbatch) < numbers.size(),
            "no stash for chunk {}, microbatch {}", chunk, microbatch);
  return numbers[microbatch];
}

bool Stashes::extends(const Stashes& fewer) const {
  const auto begins_with = [](const Chunk& a, const Chunk& b) {
    return a.pool == b.pool && a.numbers.size() >= b.numbers.size() &&
           std::equal(b.numbers.begin(), b.numbers.end(), a.numbers.begin());
  };
  return counts_ == fewer.counts_ &&
         std::equal(chunks_.begin(), chunks_.end(), fewer.chunks_.begin(), fewer.chunks_.end(), begins_with);
}

}  // namespace nrl::pipeline
