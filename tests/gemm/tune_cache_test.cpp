#include "core/ops/gemm/tune_cache.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "core/base/error.h"
#include "tests/catch.h"

namespace nrl::ops::gemm {
namespace {

using Access = TuneCache::Access;

struct Directory {
  std::string path = "tune-cache-" + std::to_string(getpid());
  Directory() { std::filesystem::create_directory(path); }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string file() const { return path + "/choices.txt"; }
  std::string text() const {
    std::ostringstream out;
    out << std::ifstream(file()).rdbuf();
    return out.str();
  }
  void write(const std::string& text) const { std::ofstream(file(), std::ios::binary) << text; }
};
const TuneCache::Algorithm one{1, 2, 3, 0xffffffffffffffffull, 5, 6, 7, 8}, two{8, 7, 6, 5, 4, 3, 2, 1};
const TuneTarget target{"A GPU", "library 1"};

TEST_CASE("choices come back as they were stored", "[gemm]") {
  const Directory directory;
  {
    TuneCache cache(directory.file(), target, Access::extend);
    REQUIRE(cache.size() == 0);
    cache.store("second", two);
    cache.store("first", two);
    cache.store("first", one);
  }
  const TuneCache again(directory.file(), target, Access::read);
  REQUIRE(again.size() == 2);
  REQUIRE(again.find("first") == one);
  REQUIRE(again.find("second") == two);
  REQUIRE_FALSE(again.find("third"));
  REQUIRE(directory.text() ==
          "nrl-gemm-tuning 2\ngpu A GPU\nlibrary library 1\n"
          "first 1 2 3 ffffffffffffffff 5 6 7 8\nsecond 8 7 6 5 4 3 2 1\n");
  // Nothing is left beside the file.
  REQUIRE(std::distance(std::filesystem::directory_iterator(directory.path), {}) == 1);
}

TEST_CASE("a directory has a file per GPU and library", "[gemm]") {
  const Directory directory;
  const TuneTarget other{"NVIDIA H100 80GB/x", "cuBLASLt 13.1.0"};
  REQUIRE(other.file_name() == "NVIDIA-H100-80GB-x_cuBLASLt-13.1.0.txt");
  const std::string path = directory.path + "/new/deep";  // created on the first store
  TuneCache(path, other, Access::extend).store("key", one);
  TuneCache(path, target, Access::extend).store("key", two);
  REQUIRE(TuneCache(path, other, Access::read).find("key") == one);
  REQUIRE(TuneCache(path, target, Access::read).find("key") == two);
  REQUIRE(TuneCache(path, target, Access::read).file() == path + "/A-GPU_library-1.txt");
}

// The message and exit code of the refusal of `text`.
std::string refusal(const Directory& directory, const std::string& text, Access access, Exit code) {
  directory.write(text);
  try {
    const TuneCache cache(directory.file(), target, access);
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  return "";
}

TEST_CASE("malformed files are refused with file and line", "[gemm]") {
  const Directory directory;
  const std::string head = "nrl-gemm-tuning 2\ngpu A GPU\nlibrary library 1\n", words = " 1 2 3 4 5 6 7 8\n";
  struct Bad {
    std::string text;
    int line;
    const char* part;
  };
  const Bad cases[] = {
      {"", 1, "expected \"nrl-gemm-tuning 2\""},
      {"nrl-gemm-tuning 1\ngpu A GPU\n", 1, "expected \"nrl-gemm-tuning 2\""},
      {"nrl-gemm-tuning 2\n", 2, "expected \"gpu A GPU\""},
      {"nrl-gemm-tuning 2\nGPU A GPU\n", 2, "expected \"gpu A GPU\""},
      {"nrl-gemm-tuning 2\ngpu Another\nlibrary library 1\n", 2,
       "timed with Another, but this run has A GPU"},
      {"nrl-gemm-tuning 2\ngpu A GPU\nlibrary library 2\n", 3, "timed with library 2"},
      {head + "key 1 2 3\n", 4, "eight hexadecimal words"},
      {head + "key" + words + "key 1 2 3 4 5 6 7 8 9\n", 5, "eight hexadecimal words"},
      {head + "key x 2 3 4 5 6 7 8\n", 4, "eight hexadecimal words"},
      {head + "key -1 2 3 4 5 6 7 8\n", 4, "eight hexadecimal words"},
      {head + "key 11112222333344445 2 3 4 5 6 7 8\n", 4, "eight hexadecimal words"},
      {head + "\n", 4, "eight hexadecimal words"},
      {head + std::string("\0\1\2binary\n", 10), 4, "eight hexadecimal words"},
      {head + "key" + words + "other" + words + "key" + words, 6, "every GEMM once"},
  };
  for (const Bad& bad : cases)
    for (const Access access : {Access::read, Access::extend}) {
      const std::string message = refusal(directory, bad.text, access, Exit::data);
      CAPTURE(bad.text, message);
      REQUIRE(message.starts_with(directory.file() + ":" + std::to_string(bad.line) + ": "));
      REQUIRE(message.find(bad.part) != std::string::npos);
    }
  REQUIRE(refusal(directory, head, Access::read, Exit::data).empty());
}

TEST_CASE("a missing file can be extended but not read", "[gemm]") {
  TuneCache kept("", target, Access::extend);
  kept.store("a", one);
  REQUIRE(kept.find("a") == one);
  TuneCache nowhere("/dev/null/file.txt", target, Access::extend);
  nowhere.store("a", one);  // a warning, not an error
  REQUIRE(nowhere.find("a") == one);
  REQUIRE(TuneCache("", target, Access::read).size() == 0);
  try {
    const TuneCache missing("no/such/directory", target, Access::read);
    FAIL("read a missing file");
  } catch (const Error& error) {
    REQUIRE(error.code() == Exit::no_input);
    const std::string message = error.what();
    REQUIRE(message.find("A GPU with library 1: no/such/directory/A-GPU_library-1.txt") != std::string::npos);
  }
}

}  // namespace
}  // namespace nrl::ops::gemm
