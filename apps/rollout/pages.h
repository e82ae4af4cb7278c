#pragma once
// The pages of a key/value cache: which are free, and how many sequences use each. Host bookkeeping only; the
// memory belongs to model::GenerationPass.

#include <cstdint>
#include <optional>
#include <vector>

namespace nrl::rollout {

/// The contents of page `from` must be copied to page `to` before the next pass, in the order of a list.
struct PageCopy {
  int32_t from, to;
  bool operator==(const PageCopy&) const = default;
};

/// The pages of a sequence in the order of its tokens.
using PageList = std::vector<int32_t>;

class Pages {
 public:
  /// `count` pages of `page_tokens` tokens, all free.
  Pages(int64_t count, int64_t page_tokens);

  int64_t count() const { return static_cast<int64_t>(users_.size()); }
  int64_t page_tokens() const { return page_tokens_; }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t pages_of(int64_t tokens) const { return (tokens + page_tokens_ - 1) / page_tokens_; }
  /// Sequences that use the page; 0: it is free.
  int users(int32_t page) const { return users_[static_cast<size_t>(page)]; }

  /// Adds pages until `list` has room for `tokens` tokens. False, and no change, if too few are free.
  bool extend(PageList& list, int64_t tokens);
  /// Makes the page of the token at `position` one that only this list uses, which may need a copy. False,
  /// and no change, if it needs a page and none is free.
  bool make_writable(PageList& list, int64_t position, std::vector<PageCopy>& copies);
  /// Another list with the same pages.
  PageList share(const PageList& list);
  /// Empties the list. Pages without other users become free.
  void release(PageList& list);

 private:
  std::optional<int32_t> take();

  int64_t page_tokens_;
  std::vector<int> users_;
  std::vector<int32_t> free_;  ///< the page that is taken next comes last
};

}  // namespace nrl::rollout
