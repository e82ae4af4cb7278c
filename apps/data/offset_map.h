#pragma once
// Maps offsets in a rewritten text (normalized, or with marked spaces) to offsets in the text before.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace nrl::data {

/// The parts of a text that were replaced by parts of another size. The rest is unchanged.
class OffsetMap {
 public:
  /// The bytes from the end of the last change to `begin` are unchanged, then `from` bytes were replaced by
  /// `to` bytes. `begin` and `to` count bytes of the new text.
  void add(size_t begin, size_t from, size_t to) {
    if (from == to && from <= 1) return;
    const int64_t shift = changes_.back().shift + static_cast<int64_t>(from) - static_cast<int64_t>(to);
    changes_.push_back({begin, begin + to, from, shift});
  }
  void reserve(size_t changes) { changes_.reserve(changes + 2); }
  /// The new text was cut to this size: the bytes behind have no counterpart.
  void cut(size_t size) {
    while (changes_.size() > 1 && changes_.back().end > size) changes_.pop_back();
  }

  /// Replaces increasing offsets in the new text by offsets in the text before, not decreasing. An offset
  /// within a change lies within the replaced bytes, or at their beginning if there is one; an offset where
  /// bytes were removed is behind them.
  void convert(std::span<int64_t> offsets) {
    if (changes_.size() == 1) return;
    changes_.push_back({SIZE_MAX, SIZE_MAX, 0, 0});  // ends the search
    const Change* next = &changes_[1];
    for (int64_t& offset : offsets) {
      const auto at = static_cast<size_t>(offset);
      next += next->end <= at;  // without a branch, which would be hard to predict
      while (next->end <= at) ++next;
      offset = next->begin < at ? within(*next, at) : offset + next[-1].shift;
    }
    changes_.pop_back();
  }

 private:
  struct Change {
    size_t begin, end;  // in the new text
    size_t from;        // replaced bytes
    int64_t shift;      // from the new text to the text before, after the change
  };

  // In proportion, but at least a byte, so that the first token has a part of the text.
  static int64_t within(const Change& change, size_t at) {
    const size_t part = (at - change.begin) * change.from / (change.end - change.begin);
    const size_t most = std::max<size_t>(change.from, 1) - 1;
    const int64_t begin = static_cast<int64_t>(change.end) + change.shift - static_cast<int64_t>(change.from);
    return begin + static_cast<int64_t>(std::min(std::max<size_t>(part, 1), most));
  }

  std::vector<Change> changes_{{0, 0, 0, 0}};  // the first one changes nothing
};

/// The maps of several steps in order.
using OffsetMaps = std::vector<OffsetMap>;

/// Converts offsets in the text of the last step to offsets in the text before the first one.
inline void convert(OffsetMaps& maps, std::span<int64_t> offsets) {
  for (auto map = maps.rbegin(); map != maps.rend(); ++map) map->convert(offsets);
}

}  // namespace nrl::data
