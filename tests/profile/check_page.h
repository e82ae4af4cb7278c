#pragma once
// Checks of HTML pages.

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.h"

namespace nrl::test {

inline size_t occurrences(std::string_view text, std::string_view of) {
  size_t n = 0;
  for (size_t at = text.find(of); at != std::string_view::npos; at = text.find(of, at + of.size())) ++n;
  return n;
}

// Checks that tags are closed in order, and that nothing is loaded or run.
inline void check_page(const std::string& page) {
  REQUIRE(page.starts_with("<!doctype html>\n"));
  const std::set<std::string, std::less<>> empty_elements{"meta", "br"};
  std::vector<std::string> open;
  for (size_t at = page.find('<', 15); at != std::string::npos; at = page.find('<', at + 1)) {
    const size_t end = page.find('>', at);
    REQUIRE(end != std::string::npos);
    std::string tag = page.substr(at + 1, end - at - 1);
    REQUIRE(tag.find('<') == std::string::npos);
    if (tag.starts_with("/")) {
      REQUIRE(!open.empty());
      REQUIRE(open.back() == tag.substr(1));
      open.pop_back();
    } else if (const std::string name = tag.substr(0, tag.find_first_of(" /\n"));
               !tag.ends_with("/") && !empty_elements.count(name)) {
      open.push_back(name);
    }
  }
  CHECK(open.empty());
  for (const std::string_view word :
       {"<script", "http:", "https:", "src=", "@import", "url(", "onload", "nan", "inf"}) {
    INFO(word);
    CHECK(occurrences(page, word) == 0);
  }
}

}  // namespace nrl::test
