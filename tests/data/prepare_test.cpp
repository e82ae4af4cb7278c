#include "apps/data/prepare.h"

#include "apps/data/manifest.h"
#include "core/io/indexed_dataset.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

PrepareOptions options_for(const TemporaryDirectory& dir, std::vector<std::string> inputs,
                           const std::string& tokenizer = "bytes") {
  PrepareOptions options;
  for (const std::string& input : inputs) options.inputs.push_back(dir / input);
  options.output = dir / "out/data";
  options.tokenizer = tokenizer;
  return options;
}

std::vector<std::string> documents_of(const std::string& prefix) {
  const IndexedDataset data(prefix);
  const auto tokenizer = tokenizer_of_dataset(prefix);
  std::vector<std::string> documents;
  for (int64_t s = 0; s < data.sequences(); ++s) {
    std::vector<int32_t> tokens(static_cast<size_t>(data.lengths()[static_cast<size_t>(s)]));
    data.read(s, 0, tokens, tokenizer->vocab_size());
    CHECK(tokens.back() == tokenizer->eos());
    documents.push_back(tokenizer->decode(tokens));
  }
  return documents;
}

}  // namespace

TEST_CASE("files, folders and JSON lines become documents in order", "[prepare]") {
  const TemporaryDirectory dir;
  make_directories(dir / "in/sub");
  write_file_atomic(dir / "in/b.txt", "second");
  write_file_atomic(dir / "in/a.txt",
                    "\xEF\xBB\xBF"
                    "first");
  write_file_atomic(dir / "in/empty", "");
  write_file_atomic(dir / "in/sub/c.bin", std::string("\0\1\2", 3));
  write_file_atomic(dir / "in/sub/d", "latin \xe9");
  write_file_atomic(dir / "in/z.jsonl",
                    "{\"text\": \"one\\nline\"}\n\n{\"x\": 1, \"text\": \"caf\\u00e9\"}\r\n{\"text\": \"\"}");
  write_file_atomic(dir / "last.md", "last");
  int calls = 0;
  PrepareProgress end;
  const PrepareSummary summary =
      run_prepare(options_for(dir, {"in", "last.md"}), [&](const PrepareProgress& p) {
        ++calls;
        end = p;
      });
  CHECK(documents_of(dir / "out/data") ==
        std::vector<std::string>{"first", "second", "one\nline", "caf\xc3\xa9", "last"});
  CHECK(summary.documents == 5);
  CHECK(summary.binary_files == 2);
  CHECK(summary.tokens == 5 + 6 + 8 + 5 + 4 + 5);
  CHECK(summary.text_bytes == summary.tokens - 5);
  CHECK(calls >= 1);
  CHECK(end.files_done == end.files);
  CHECK(end.bytes_done == end.bytes);
  CHECK(list_directory(dir / "out") == std::vector<std::string>{"data.bin", "data.dataset.json", "data.idx"});
}

TEST_CASE("the number of workers does not change the dataset", "[prepare]") {
  const TemporaryDirectory dir;
  make_directories(dir / "in");
  std::string lines;
  for (int i = 0; i < 200; ++i) {
    write_file_atomic(dir / fmt::format("in/{:03}.txt", i),
                      fmt::format("int main{}() {{ return {}; }}\n", i, i * i));
    lines += fmt::format("{{\"text\": \"the other {}\"}}\n",
                         std::string(static_cast<size_t>(i * 97 % 20000), 'x'));
  }
  write_file_atomic(dir / "in/big.jsonl", lines);
  std::string expected_bin, expected_idx;
  for (const std::string& tokenizer :
       {std::string("bytes"), "hf:" + std::string(NRL_TEST_DATA) + "/fixtures/gpt2.json",
        std::string("train-sentencepiece:400")}) {
    expected_bin.clear();
    for (const int workers : {1, 2, 5}) {
      auto options = options_for(dir, {"in"}, tokenizer);
      options.workers = workers;
      const PrepareSummary summary = run_prepare(options);
      CHECK(summary.documents == 400);
      const std::string bin = read_file(options.output + ".bin", 1 << 28);
      const std::string idx = read_file(options.output + ".idx", 1 << 28);
      if (expected_bin.empty()) expected_bin = bin, expected_idx = idx;
      CHECK(bin == expected_bin);
      CHECK(idx == expected_idx);
    }
    CHECK(documents_of(dir / "out/data")[7] == "int main7() { return 49; }\n");
  }
  CHECK(path_exists(dir / "out/data.model"));
  CHECK(path_exists(dir / "out/data.tokenizer.json"));
}

TEST_CASE("bad input is named by file and line, and leaves nothing", "[prepare]") {
  const TemporaryDirectory dir;
  write_file_atomic(dir / "ok.txt", "fine");
  const auto refused = [&](const std::string& content, const std::string& part,
                           const char* name = "x.jsonl") {
    write_file_atomic(dir / name, content);
    const Caught caught = error_of([&] { run_prepare(options_for(dir, {"ok.txt", name})); });
    INFO(caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, dir / name + part));
    CHECK(list_directory(dir / "out").empty());
  };
  const std::string good = "{\"text\": \"a\"}\n";
  refused(good + "{\"text\": \"a\"\n", ":2:");
  refused(good + good + "{\"body\": \"a\"}\n", ":3:");
  refused(good + "\n{\"text\": 5}\n", ":3:");
  refused("[1]\n", ":1: expected a JSON object, found an array");
  refused(good + "{\"text\": \"\xff\"}\n", ":2:");
  refused(good + "{\"text\": \"\\ud800\"}\n", ":2:");
  refused(good + std::string("{\"text\": \"\0\"}\n", 14), ":2:");
  refused(
      "text\nb\xff"
      "d",
      ":2: not UTF-8 text: byte 0xff", "bad.txt");

  auto options = options_for(dir, {"x.jsonl"});
  write_file_atomic(dir / "x.jsonl", good + "oops\n{\"text\": 5}\n" + good);
  options.skip_bad_lines = true;
  const PrepareSummary summary = run_prepare(options);
  CHECK(summary.bad_lines == 2);
  CHECK(summary.documents == 2);

  // A failing run leaves the dataset that was there.
  const std::string before = read_file(options.output + ".idx", 1 << 20);
  options.skip_bad_lines = false;
  CHECK(error_of([&] { run_prepare(options); }).code == 65);
  CHECK(read_file(options.output + ".idx", 1 << 20) == before);
  CHECK(list_directory(dir / "out") == std::vector<std::string>{"data.bin", "data.dataset.json", "data.idx"});

  CHECK(error_of([&] { run_prepare(options_for(dir, {"missing"})); }).code == 66);
  CHECK(error_of([&] { run_prepare(options_for(dir, {"ok.txt"}, "train-sentencepiece:x")); }).code == 64);
  write_file_atomic(dir / "none.txt", "");
  CHECK(error_of([&] { run_prepare(options_for(dir, {"none.txt"})); }).code == 65);
}

TEST_CASE("a dataset without a manifest has no tokenizer, a foreign one is refused", "[prepare]") {
  const TemporaryDirectory dir;
  write_file_atomic(dir / "ok.txt", "fine");
  run_prepare(options_for(dir, {"ok.txt"}));
  const auto manifest = read_manifest(dir / "out/data");
  REQUIRE(manifest);
  CHECK(manifest->vocab_size == 257);
  CHECK(manifest->eod == 256);
  CHECK(manifest->tokens == 5);
  const std::string path = dir / "out/data.dataset.json";
  std::string text = read_file(path, 1 << 20);
  const auto refused = [&](const std::string& from, const std::string& to, int code) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    write_file_atomic(path, changed);
    CHECK(error_of([&] { tokenizer_of_dataset(dir / "out/data"); }).code == code);
  };
  refused("\"tokenizer_file\": \"\"", "\"tokenizer_file\": \"../x\"", 65);
  refused("257", "258", 65);
  refused("nrl-train dataset", "else", 65);
  refused("\"bytes\"", "\"words\"", 65);
  remove_tree(path);
  CHECK_FALSE(read_manifest(dir / "out/data"));
  CHECK(error_of([&] { tokenizer_of_dataset(dir / "out/data"); }).code == 66);
}
