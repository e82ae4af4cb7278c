#include "apps/rollout/pages.h"

#include <limits>
#include <utility>

#include "core/base/error.h"

namespace nrl::rollout {

Pages::Pages(int64_t count, int64_t page_tokens) : page_tokens_(page_tokens) {
  NRL_CHECK(count > 0 && count <= std::numeric_limits<int32_t>::max() && page_tokens > 0,
            "{} pages of {} tokens", count, page_tokens);
  users_.resize(static_cast<size_t>(count));
  for (int64_t page = count; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

std::optional<int32_t> Pages::take() {
  if (free_.empty()) return {};
  const int32_t page = free_.back();
  free_.pop_back();
  NRL_CHECK(users_[static_cast<size_t>(page)] == 0, "page {} is free and in use", page);
  users_[static_cast<size_t>(page)] = 1;
  return page;
}

bool Pages::extend(PageList& list, int64_t tokens) {
  const int64_t wanted = pages_of(tokens) - static_cast<int64_t>(list.size());
  if (wanted > free()) return false;
  for (int64_t i = 0; i < wanted; ++i) list.push_back(*take());
  return true;
}

bool Pages::make_writable(PageList& list, int64_t position, std::vector<PageCopy>& copies) {
  int32_t& page = list.at(static_cast<size_t>(position / page_tokens_));
  if (users(page) == 1) return true;
  const std::optional<int32_t> own = take();
  if (!own) return false;
  copies.push_back({page, *own});
  --users_[static_cast<size_t>(page)];
  page = *own;
  return true;
}

PageList Pages::share(const PageList& list) {
  for (const int32_t page : list) {
    NRL_CHECK(users(page) > 0, "page {} is shared, but free", page);
    ++users_[static_cast<size_t>(page)];
  }
  return list;
}

void Pages::release(PageList& list) {
  for (const int32_t page : std::exchange(list, {})) {
    NRL_CHECK(users(page) > 0, "page {} is released twice", page);
    if (--users_[static_cast<size_t>(page)] == 0) free_.push_back(page);
  }
}

}  // namespace nrl::rollout
