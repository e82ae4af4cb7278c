// Bookkeeping of the pages of a key/value cache.
#include "apps/rollout/pages.h"

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl;
using rollout::PageCopy;
using rollout::PageList;
using rollout::Pages;

TEST_CASE("a list of pages grows by whole pages", "[rollout]") {
  Pages pages(4, 16);
  CHECK(pages.pages_of(0) == 0);
  CHECK(pages.pages_of(16) == 1);
  CHECK(pages.pages_of(17) == 2);
  PageList a, b;
  REQUIRE(pages.extend(a, 1));
  REQUIRE(pages.extend(a, 16));
  CHECK(a == PageList{0});
  REQUIRE(pages.extend(b, 33));
  CHECK(b == PageList{1, 2, 3});
  CHECK(pages.free() == 0);
  CHECK(!pages.extend(a, 17));
  CHECK(a == PageList{0});
  pages.release(b);
  CHECK(b.empty());
  CHECK(pages.free() == 3);
  REQUIRE(pages.extend(a, 48));
  CHECK(!pages.extend(b, 17));
  CHECK(pages.free() == 1);
}

TEST_CASE("the last user of a shared page writes it, others a copy", "[rollout]") {
  Pages pages(5, 4);
  PageList a;
  REQUIRE(pages.extend(a, 6));
  PageList b = pages.share(a), c = pages.share(a);
  CHECK(pages.users(a[1]) == 3);
  std::vector<PageCopy> copies;
  REQUIRE(pages.make_writable(b, 6, copies));
  CHECK(copies == std::vector<PageCopy>{{a[1], b[1]}});
  CHECK(b[1] != a[1]);
  CHECK(b[0] == a[0]);
  REQUIRE(pages.make_writable(c, 6, copies));
  REQUIRE(pages.make_writable(a, 6, copies));
  CHECK(copies.size() == 2);
  CHECK(pages.users(a[0]) == 3);
  CHECK(pages.users(a[1]) == 1);
  pages.release(a);
  CHECK(pages.free() == 2);
  pages.release(b);
  pages.release(c);
  CHECK(pages.free() == 5);
}

TEST_CASE("a copy without a free page changes nothing", "[rollout]") {
  Pages pages(1, 4);
  PageList a;
  REQUIRE(pages.extend(a, 2));
  PageList b = pages.share(a);
  std::vector<PageCopy> copies;
  CHECK(!pages.make_writable(b, 2, copies));
  CHECK(copies.empty());
  CHECK(b == a);
  CHECK(pages.users(0) == 2);
}

TEST_CASE("pages that are free cannot be shared or released", "[rollout]") {
  Pages pages(2, 4);
  PageList a;
  REQUIRE(pages.extend(a, 5));
  PageList stale = a;
  pages.release(a);
  CHECK_THROWS_AS(pages.share(stale), Error);
  CHECK_THROWS_AS(pages.release(stale), Error);
}
