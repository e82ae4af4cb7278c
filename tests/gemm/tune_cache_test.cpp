#include "core/ops/gemm/tune_cache.h"

#include <cstdio>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "tests/catch.h"

namespace nrl::ops::gemm {
namespace {

struct File {
  std::string path = "tune-cache-" + std::to_string(getpid()) + ".txt";
  ~File() { std::remove(path.c_str()); }
  std::string text() const {
    std::ostringstream out;
    out << std::ifstream(path).rdbuf();
    return out.str();
  }
};
const TuneCache::Algorithm one{1, 2, 3, 0xffffffffffffffffull, 5, 6, 7, 8}, two{8, 7, 6, 5, 4, 3, 2, 1};

TEST_CASE("choices come back as they were stored", "[gemm]") {
  const File file;
  {
    TuneCache cache(file.path, "library 1 GPU");
    REQUIRE(cache.size() == 0);
    cache.store("first", one);
    cache.store("second", two);
  }
  const TuneCache again(file.path, "library 1 GPU");
  REQUIRE(again.size() == 2);
  REQUIRE(again.find("first") == one);
  REQUIRE(again.find("second") == two);
  REQUIRE_FALSE(again.find("third"));
  REQUIRE(TuneCache(file.path, "library 2 GPU").size() == 0);
}

TEST_CASE("damaged lines are left out and overwritten", "[gemm]") {
  const File file;
  {
    TuneCache cache(file.path, "header");
    cache.store("good", one);
  }
  std::string text = file.text();
  std::ofstream(file.path) << text << "short 1 2 3\nlong 1 2 3 4 5 6 7 8 9\nwords x y\n\n\0binary";
  TuneCache cache(file.path, "header");
  REQUIRE(cache.size() == 1);
  REQUIRE(cache.find("good") == one);
  cache.store("new", two);
  REQUIRE(TuneCache(file.path, "header").size() == 2);
  REQUIRE(file.text().find("short") == std::string::npos);
}

TEST_CASE("without a path nothing is kept", "[gemm]") {
  TuneCache cache("", "header");
  cache.store("a", one);
  REQUIRE(cache.find("a") == one);
  TuneCache nowhere("no/such/folder/file", "header");
  nowhere.store("a", one);  // a warning, not an error
  REQUIRE(nowhere.find("a") == one);
}

}  // namespace
}  // namespace nrl::ops::gemm
