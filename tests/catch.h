#pragma once
// Catch2 v3 or v2, whichever is installed.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>

/// The name of this matcher in v3.
inline auto ContainsSubstring(const std::string& text) {
  return Catch::Contains(text);
}
#endif
