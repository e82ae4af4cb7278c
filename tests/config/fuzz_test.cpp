// Mutations of valid configurations: loading always returns, in bounded time, and errors have a position.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "core/base/philox.h"
#include "core/config/suite.h"
#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

class Mutator {
 public:
  Mutator(uint64_t seed, std::vector<std::string> corpus)
      : stream_(seed, "config-fuzz"), corpus_(std::move(corpus)) {}

  std::string next() {
    std::string text = corpus_[below(corpus_.size())];
    for (size_t n = 1 + below(4); n > 0; --n) mutate(text);
    return text;
  }
  size_t below(size_t n) { return n == 0 ? 0 : stream_.bits(counter_++) % n; }

 private:
  void mutate(std::string& text) {
    static const std::vector<std::string> tokens = {"[",
                                                    "]",
                                                    "{",
                                                    "}",
                                                    ",",
                                                    ":",
                                                    ": ",
                                                    "- ",
                                                    "? ",
                                                    "&a ",
                                                    "*a",
                                                    "!!int ",
                                                    "<<: ",
                                                    "\"",
                                                    "'",
                                                    "|\n",
                                                    ">\n",
                                                    "#",
                                                    "---\n",
                                                    "...\n",
                                                    "\n",
                                                    "\n\n  ",
                                                    "\t",
                                                    "%YAML 1.2\n",
                                                    "null",
                                                    "true",
                                                    "auto",
                                                    "0x1F",
                                                    "1e999",
                                                    "-1",
                                                    "010",
                                                    "${data.seed}",
                                                    "policy:",
                                                    "\xff",
                                                    std::string(1, '\0'),
                                                    "\xe2\x80\xa8",
                                                    "defaults: x\n",
                                                    "~",
                                                    "99999999999999999999",
                                                    "\\",
                                                    "@",
                                                    "`",
                                                    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
                                                    "{a: {a: {a: {a: {a: {a: {a: {a: ",
                                                    "- - - - - - - - - - - - "};
    const size_t at = below(text.size() + 1);
    const size_t length = std::min(text.size() - at, 1 + below(40));
    switch (below(9)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, text.substr(below(text.size() + 1), length));
        break;
      case 3: {
        const std::string& other = corpus_[below(corpus_.size())];
        text = text.substr(0, at) + other.substr(below(other.size() + 1));
        break;
      }
      case 4:
      case 5:
        text.insert(at, tokens[below(tokens.size())]);
        break;
      case 6: {  // a line again, somewhere
        const size_t begin = text.rfind('\n', at) == std::string::npos ? 0 : text.rfind('\n', at) + 1;
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string line = text.substr(begin, end - begin) + "\n";
        text.insert(std::min(text.find('\n', below(text.size() + 1)), text.size()), "\n" + line);
        break;
      }
      case 7:
        text.resize(at);
        break;
      default:  // another indentation
        text.insert(at, std::string(1 + below(5), ' '));
        break;
    }
    if (text.size() > 20000) text.resize(20000);
  }

  PhiloxStream stream_;
  uint64_t counter_ = 0;
  std::vector<std::string> corpus_;
};

std::string slurp(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE("mutated configurations are accepted or refused with a place", "[config][fuzz]") {
  const char* wanted = std::getenv("NRL_FUZZ_ITERATIONS");
  const char* seed_text = std::getenv("NRL_FUZZ_SEED");
  const long iterations = wanted ? std::atol(wanted) : 20000;
  const uint64_t seed = seed_text ? std::strtoull(seed_text, nullptr, 10) : 1;
  std::vector<std::string> corpus = {base_yaml};
  for (const char* name : {"llama-17m.yaml", "gpt2-124m.yaml", "quickstart.yaml"})
    corpus.push_back(slurp(std::string(NRL_SOURCE_DIR "/configs/") + name));
  corpus.push_back(dump_resolved(load_text(base_yaml)));
  for (const std::string& text : corpus) REQUIRE(load_text(text).ok());

  Mutator mutator(seed, corpus);
  long accepted = 0;
  double slowest = 0;
  for (long i = 0; i < iterations; ++i) {
    const std::string text = mutator.next();
    std::vector<std::string> overrides;
    if (i % 8 == 0) {
      const size_t at = mutator.below(text.size() + 1);
      overrides.push_back(text.substr(at, mutator.below(30)));
    }
    const auto start = std::chrono::steady_clock::now();
    const ConfigResult result = load_config_text(text, "no-such-folder/t.yaml", overrides);
    const std::string shown = render(result.diagnostics);
    slowest =
        std::max(slowest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    bool good = std::none_of(shown.begin(), shown.end(), [](char c) {
      return (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
    });
    if (result.ok()) {
      ++accepted;
      const ConfigResult again = load_text(dump_resolved(result));
      good = again.ok() && again.config == result.config;
      for (const int world : {1, 3})
        if (validate_for_world(result, world).empty()) resolve_batch(result.config, world);
    } else {
      Diagnostics all = result.diagnostics;
      const Diagnostics more = validate_for_world(result, 3);
      all.insert(all.end(), more.begin(), more.end());
      for (const Diagnostic& d : all) {
        const bool placed = d.line > 0 && d.column > 0 && d.file == "no-such-folder/t.yaml";
        good = good && !d.message.empty() && (placed || d.file.starts_with("command line: "));
      }
    }
    if (!good) {
      INFO("seed " << seed << ", iteration " << i);
      INFO(text);
      INFO(shown);
      FAIL("not placed, or not the same after a round trip");
    }
  }
  CAPTURE(slowest);
  CHECK(slowest < 2);
  CHECK(accepted > iterations / 100);
  CHECK(accepted < iterations);
  if (wanted) WARN(iterations << " inputs, " << accepted << " accepted, slowest " << slowest << " s");
}

TEST_CASE("mutated suites are accepted or refused with a place", "[config][fuzz]") {
  const std::string original = slurp(NRL_SOURCE_DIR "/configs/suites/claims.yaml");
  REQUIRE(load_suite_text(original, "s.yaml").ok());
  Mutator mutator(1, {original});
  int accepted = 0;
  constexpr int iterations = 3000;
  for (int i = 0; i < iterations; ++i) {
    const std::string text = mutator.next();
    const Suite suite = load_suite_text(text, "s.yaml");
    accepted += suite.ok();
    bool good = true;
    for (const Diagnostic& d : suite.diagnostics)
      good = good && !d.message.empty() && d.line > 0 && d.column > 0 && d.file == "s.yaml";
    for (const SuiteComparison& c : suite.comparisons)
      for (const SuitePromise& p : c.promises)
        good = good && (!suite.ok() || std::max(p.variant, p.than) < c.variants.size());
    if (!good) {
      INFO(text);
      INFO(render(suite.diagnostics));
      FAIL("not placed, or a promise without its variant");
    }
  }
  CHECK(accepted > iterations / 100);
  CHECK(accepted < iterations);
}
