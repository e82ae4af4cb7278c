#pragma once
// Shared by the tests of core/io.

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/io/atomic_file.h"

namespace nrl::test {

/// A temporary directory. `Where::memory`: on /dev/shm where there is one, for tests that fsync
/// thousands of times.
class TemporaryDirectory {
 public:
  enum class Where { disk, memory };
  explicit TemporaryDirectory(Where where = Where::disk) {
    const std::string name = "nrl-io-" + random_nonce();
    std::error_code failed;
    if (where == Where::memory) {
      path_ = "/dev/shm/" + name;
      if (std::filesystem::create_directory(path_, failed)) return;
    }
    path_ = (std::filesystem::temp_directory_path() / name).string();
    std::filesystem::create_directories(path_);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return join_path(path_, name); }

 private:
  std::string path_;
};

/// The exit code and the text of the error that `f` throws; code 0 when it throws none.
struct Caught {
  int code = 0;
  std::string text;
};
template <class F>
Caught error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return {static_cast<int>(e.code()), e.what()};
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Iterations of the mutation tests (environment NRL_FUZZ_ITERATIONS, default 20,000 spread over the tests).
inline int fuzz_iterations() {
  const char* text = std::getenv("NRL_FUZZ_ITERATIONS");
  return text == nullptr ? 20000 : std::atoi(text);
}

/// `base` with one to four random byte edits: flips, replacements, insertions, removals,
/// truncation, number swaps.
inline std::string mutated(std::string base, uint64_t iteration, uint64_t seed = 1) {
  const PhiloxStream random(seed, iteration);
  uint64_t n = 0;
  const auto draw = [&](uint64_t below) { return below == 0 ? 0 : random.bits(n++) % below; };
  static const char* const words[] = {"0",  "-1",     "4294967296", "18446744073709551615", "1e400", "[]",
                                      "{}", "\"F4\"", "null",       "9223372036854775807",  "1.5",   "\xff"};
  for (uint64_t edits = 1 + draw(4); edits > 0; --edits) {
    const size_t at = draw(base.size() + 1);
    switch (draw(6)) {
      case 0:
        if (at < base.size()) base[at] = static_cast<char>(base[at] ^ (1u << draw(8)));
        break;
      case 1:
        if (at < base.size()) base[at] = "{}[]\",:0123456789-.eE\\ \x00\xc3"[draw(24)];
        break;
      case 2:
        base.insert(at, words[draw(std::size(words))]);
        break;
      case 3:
        base.erase(at, 1 + draw(8));
        break;
      case 4:
        if (draw(4) == 0) base.resize(at);
        break;
      default: {  // a copy of another part
        const size_t from = draw(base.size());
        base.insert(at, base.substr(from, draw(40)));
      }
    }
  }
  return base;
}

}  // namespace nrl::test
