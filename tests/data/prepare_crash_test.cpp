// What a crash may leave of `prepare` over an older dataset.
#include "apps/data/manifest.h"
#include "apps/data/prepare.h"
#include "core/io/indexed_dataset.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/durability.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

// As bytes both have 9 tokens, so that an index fits the .bin of the other.
const std::string old_text = "abc\nabcd\n", new_text = "hijklmno\n";

void prepare(const TemporaryDirectory& dir, const std::string& text, const std::string& tokenizer) {
  remove_tree(dir / "in.jsonl");
  std::string lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    lines += "{\"text\": \"" + text.substr(at, end - at) + "\"}\n";
    at = end + 1;
  }
  write_file_atomic(dir / "in.jsonl", lines);
  PrepareOptions options;
  options.inputs = {dir / "in.jsonl"};
  options.output = dir / "root/out/data";
  options.tokenizer = tokenizer;
  options.workers = 1;
  run_prepare(options);
}

// Documents on a line each, decoded with the tokenizer stored next to the dataset, and whose it is.
std::string read_back(const std::string& prefix) {
  const IndexedDataset data(prefix);
  const auto manifest = read_manifest(prefix);
  REQUIRE(manifest.has_value());
  CHECK(manifest->documents == data.documents());
  CHECK(manifest->tokens == data.tokens());
  const auto tokenizer = tokenizer_of_dataset(prefix);
  std::string text = fmt::format("{}\n", tokenizer->kind());
  for (int64_t s = 0; s < data.sequences(); ++s) {
    std::vector<int32_t> tokens(static_cast<size_t>(data.lengths()[s]));
    data.read(s, 0, tokens, tokenizer->vocab_size());
    tokens.pop_back();
    text += tokenizer->decode(tokens) + "\n";
  }
  return text;
}

}  // namespace

TEST_CASE("after a crash a dataset is the old one, the new one, or has no index", "[prepare]") {
  const std::string gpt2 = "hf:" + std::string(NRL_TEST_DATA) + "/fixtures/gpt2.json";
  struct Case {
    std::string old_tokenizer, tokenizer, kind;
  };
  for (const auto& [old_tokenizer, tokenizer, kind] :
       {Case{"", "bytes", "bytes"}, {"bytes", "bytes", "bytes"}, {"bytes", gpt2, "hf"}}) {
    CAPTURE(old_tokenizer, tokenizer);
    const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
    make_directories(dir / "root");
    if (!old_tokenizer.empty()) prepare(dir, old_text, old_tokenizer);
    Recorder recorder(dir / "root");
    prepare(dir, new_text, tokenizer);
    recorder.promise();
    recorder.stop();
    int old_ones = 0, none = 0, new_ones = 0;
    recorder.for_each_crash([&](const std::string& left, bool promised, const std::string& what) {
      CAPTURE(what);
      const std::string prefix = join_path(left, "out/data");
      const bool index = path_exists(prefix + ".idx");
      const std::string found = index ? read_back(prefix) : "";
      const bool is_old = found == old_tokenizer + "\n" + old_text, is_new = found == kind + "\n" + new_text;
      CHECK((!index || is_old || is_new));
      if (promised) CHECK(is_new);
      ++(is_new ? new_ones : is_old ? old_ones : none);
    });
    CHECK((old_ones > 0) == !old_tokenizer.empty());
    CHECK(none > 0);
    CHECK(new_ones > 0);
  }
}
