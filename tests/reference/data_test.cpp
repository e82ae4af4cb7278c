// The order of the samples has the properties that it is for.

#include "tests/reference/data.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "tests/catch.h"

using namespace reference;

namespace {

// Two files of 50 and 30 documents. The vocabulary is large, so that a piece of text tells where it is from.
class Files {
 public:
  Files() {
    std::string pattern = (std::filesystem::temp_directory_path() / "nrl-reference-XXXXXX").string();
    directory_ = mkdtemp(pattern.data());
    write_token_file(path("a"), 60000, 50, 1);
    write_token_file(path("b"), 60000, 30, 2);
  }
  ~Files() { std::filesystem::remove_all(directory_); }
  std::string path(const std::string& name) const { return directory_ + "/" + name; }

 private:
  std::string directory_;
};

Tokens stream_of(const std::vector<Tokens>& documents, size_t begin, size_t end) {
  Tokens stream;
  for (size_t d = begin; d < end; ++d) stream.insert(stream.end(), documents[d].begin(), documents[d].end());
  return stream;
}

// How many of these tokens are in none of the documents [begin, end).
int64_t foreign_tokens(const Tokens& sample, const std::vector<Tokens>& documents, size_t begin, size_t end) {
  const Tokens own = stream_of(documents, begin, end);
  const std::set<int32_t> known(own.begin(), own.end());
  return std::count_if(sample.begin(), sample.end(), [&](int32_t t) { return known.count(t) == 0; });
}

}  // namespace

TEST_CASE("an epoch holds every token of its part once", "[reference]") {
  const Files files;
  DataSettings data;
  data.paths = {files.path("a")};
  data.split = {8, 2, 0};
  data.sequence_length = 7;
  data.seed = 3;
  const std::vector<Tokens> documents = read_token_file(files.path("a"));
  for (const auto& [part, begin, end] : {std::tuple{0, 0u, 40u}, std::tuple{1, 40u, 50u}}) {
    const int64_t count = epoch_samples(data, part);
    const std::vector<Tokens> samples = make_samples(data, part, count);
    REQUIRE(samples.size() == static_cast<size_t>(count));
    std::map<int32_t, int> left;
    for (const int32_t token : stream_of(documents, begin, end)) ++left[token];
    int64_t in_order = 0;
    for (const Tokens& sample : samples) {
      REQUIRE(sample.size() == 8);
      REQUIRE(foreign_tokens(sample, documents, begin, end) == 0);
      // The last token is the next sample's first.
      for (size_t i = 0; i + 1 < sample.size(); ++i) REQUIRE(--left[sample[i]] >= 0);
      const Tokens stream = stream_of(documents, begin, end);
      in_order +=
          std::search(stream.begin(), stream.end(), sample.begin(), sample.begin() + 2) != stream.end();
    }
    REQUIRE(in_order > count / 2);  // pieces of text, but where two documents meet
  }
}

TEST_CASE("a blend keeps its shares within one sample", "[reference]") {
  const Files files;
  DataSettings data;
  data.paths = {files.path("a"), files.path("b")};
  data.weights = {3, 1};
  data.sequence_length = 7;
  data.seed = 3;
  const std::vector<Tokens> a = read_token_file(files.path("a"));
  const std::vector<Tokens> samples = make_samples(data, 0, 120);
  double from_a = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    from_a += foreign_tokens(samples[i], a, 0, a.size()) == 0;
    REQUIRE(std::abs(from_a - 0.75 * static_cast<double>(i + 1)) <= 1);
  }
}
