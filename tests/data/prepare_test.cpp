#include "apps/data/prepare.h"

#include <atomic>

#include <zlib.h>
#include <zstd.h>

#include "apps/data/encode_progress.h"
#include "apps/data/manifest.h"
#include "apps/data/prepare_report.h"
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
    std::vector<int32_t> tokens(static_cast<size_t>(data.lengths()[s]));
    data.read(s, 0, tokens, tokenizer->vocab_size());
    CHECK(tokens.back() == tokenizer->eos());
    documents.push_back(tokenizer->decode(tokens));
  }
  return documents;
}

std::string gzip(const std::string& text) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  const size_t size = ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3);
  REQUIRE(!ZSTD_isError(size));
  out.resize(size);
  return out;
}

std::string read_all(const std::string& path, size_t step = 1 << 16) {
  TextStream stream(path, compression_of(path));
  std::string all, part(step, '\0');
  while (const size_t count = stream.read(part.data(), part.size())) all += part.substr(0, count);
  CHECK(stream.file_position() == stream.file_bytes());
  return all;
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
  auto options = options_for(dir, {"in", "last.md"});
  options.text.invalid_utf8 = InvalidUtf8::skip;
  const PrepareSummary summary = run_prepare(options, [&](const PrepareProgress& p) {
    ++calls;
    end = p;
  });
  CHECK(documents_of(dir / "out/data") ==
        std::vector<std::string>{"first", "second", "one\nline", "caf\xc3\xa9", "last"});
  CHECK(summary.documents == 5);
  CHECK(summary.counts.invalid_utf8.locations ==
        std::vector<std::string>{dir / "in/sub/c.bin" + ":1: not UTF-8 text: byte 0x00 at byte 0 of the file",
                                 dir / "in/sub/d" + ":1: not UTF-8 text: byte 0xe9 at byte 6 of the file"});
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
  options.text.bad_line = BadLine::skip;
  const PrepareSummary summary = run_prepare(options);
  CHECK(summary.counts.bad_lines.count == 2);
  REQUIRE(summary.counts.bad_lines.locations.size() == 2);
  CHECK(contains(summary.counts.bad_lines.locations[0], dir / "x.jsonl:2:"));
  CHECK(contains(summary.counts.bad_lines.locations[1], dir / "x.jsonl:3:"));
  CHECK(summary.documents == 2);

  // A failing run leaves the dataset that was there.
  const std::string before = read_file(options.output + ".idx", 1 << 20);
  options.text.bad_line = BadLine::error;
  CHECK(error_of([&] { run_prepare(options); }).code == 65);
  CHECK(read_file(options.output + ".idx", 1 << 20) == before);
  CHECK(list_directory(dir / "out") == std::vector<std::string>{"data.bin", "data.dataset.json", "data.idx"});

  CHECK(error_of([&] { run_prepare(options_for(dir, {"missing"})); }).code == 66);
  CHECK(error_of([&] { run_prepare(options_for(dir, {"ok.txt"}, "train-sentencepiece:x")); }).code == 64);
  write_file_atomic(dir / "none.txt", "");
  CHECK(error_of([&] { run_prepare(options_for(dir, {"none.txt"})); }).code == 65);
}

TEST_CASE("invalid UTF-8 is named with its place, replaced or left out", "[prepare]") {
  const TemporaryDirectory dir;
  // The maximal subparts of the Unicode Standard, tables 3-8 to 3-11.
  const std::string subparts =
      "\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41|\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41|"
      "\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42|\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41";
  const std::string r = "\xEF\xBF\xBD";
  const auto times = [&](int n) {
    std::string all;
    while (n-- > 0) all += r;
    return all;
  };
  const std::string replaced =
      times(8) + "A|" + times(8) + "A|" + times(5) + "A" + times(2) + "B|" + times(4) + "A";
  write_file_atomic(dir / "a.txt",
                    "\xEF\xBB\xBF"
                    "one\n" +
                        subparts);
  write_file_atomic(dir / "b.jsonl", "{\"text\": \"good\"}\n{\"text\": \"" + subparts + "\"}\n");
  write_file_atomic(dir / "cut.txt", "end \xE2\x82");
  auto options = options_for(dir, {"a.txt", "b.jsonl", "cut.txt"});

  const auto refused = [&](const char* name, const std::string& place) {
    const Caught caught = error_of([&] { run_prepare(options_for(dir, {name})); });
    CHECK(caught.code == 65);
    INFO(caught.text);
    CHECK(contains(caught.text, dir / name + place));
    CHECK(contains(caught.text, "--invalid-utf8 replace"));
    CHECK(list_directory(dir / "out").empty());
  };
  refused("a.txt", ":2: not UTF-8 text: byte 0xc0 at byte 7 of the file");
  refused("b.jsonl", ":2: not UTF-8 text: byte 0xc0 at byte 27 of the file");
  refused("cut.txt", ":1: not UTF-8 text: byte 0xe2 at byte 4 of the file");

  options.text.invalid_utf8 = InvalidUtf8::replace;
  PrepareSummary summary = run_prepare(options);
  CHECK(documents_of(dir / "out/data") ==
        std::vector<std::string>{"one\n" + replaced, "good", replaced, "end " + r});
  CHECK(summary.counts.invalid_utf8.count == 3);

  options.text.invalid_utf8 = InvalidUtf8::skip;
  summary = run_prepare(options);
  CHECK(documents_of(dir / "out/data") == std::vector<std::string>{"good"});
  CHECK(summary.counts.invalid_utf8.count == 3);
  CHECK(summary.counts.invalid_utf8.locations.size() == 3);
}

TEST_CASE("compressed files are their text, in members and frames of any number", "[prepare]") {
  const TemporaryDirectory dir;
  std::string text;
  for (int i = 0; i < 60000; ++i) text += fmt::format("line {} of the text\n", i * 7919);
  const std::string half = text.substr(0, 300001), rest = text.substr(300001);
  write_file_atomic(dir / "one.gz", gzip(text));
  write_file_atomic(dir / "two.gz", gzip(half) + gzip("") + gzip(rest) + std::string(512, '\0'));
  write_file_atomic(dir / "one.zst", zstd(text));
  write_file_atomic(dir / "two.zst", zstd(half) + zstd("") + zstd(rest));
  write_file_atomic(dir / "none.gz", gzip(""));
  write_file_atomic(dir / "none.zst", zstd(""));
  for (const char* name : {"one.gz", "two.gz", "one.zst", "two.zst"})
    for (const size_t step : {size_t{777}, size_t{1} << 20}) CHECK(read_all(dir / name, step) == text);
  CHECK(read_all(dir / "none.gz").empty());
  CHECK(read_all(dir / "none.zst").empty());

  // Cut or damaged anywhere: refused by name, or (a damaged checksum of zstd aside) the same text.
  for (const std::string& name : {std::string("one.gz"), std::string("one.zst")}) {
    const std::string whole = read_file(dir / name, 1 << 24);
    for (size_t cut = 0; cut < whole.size(); cut += 1 + whole.size() / 60) {
      write_file_atomic(dir / ("bad-" + name), whole.substr(0, cut));
      const Caught caught = error_of([&] { read_all(dir / ("bad-" + name)); });
      CHECK(caught.code == 65);
      CHECK(contains(caught.text, dir / ("bad-" + name) + ": truncated:"));
    }
    for (int i = 0; i < 60; ++i) {
      write_file_atomic(dir / ("bad-" + name), mutated(whole, static_cast<uint64_t>(i)));
      const Caught caught = error_of([&] { read_all(dir / ("bad-" + name)); });
      if (caught.code != 0) CHECK(caught.code == 65);
    }
    write_file_atomic(dir / ("bad-" + name), whole + "garbage");
    CHECK(error_of([&] { read_all(dir / ("bad-" + name)); }).code == 65);
    write_file_atomic(dir / ("bad-" + name), "plain text");
    const Caught caught = error_of([&] { read_all(dir / ("bad-" + name)); });
    CHECK(contains(caught.text, "invalid " + std::string(name.ends_with("gz") ? "gzip" : "zstd") + " data"));
  }
}

TEST_CASE("directories of compressed JSON lines give the same dataset as plain ones", "[prepare]") {
  const TemporaryDirectory dir;
  make_directories(dir / "plain");
  make_directories(dir / "packed");
  std::string a, b, c;
  for (int i = 0; i < 30000; ++i) {
    a += fmt::format("{{\"text\": \"a{} {}\"}}\n", i, std::string(static_cast<size_t>(i * 31 % 97), 'x'));
    b += fmt::format("{{\"id\": {}, \"text\": \"b{}\"}}\n", i, i);
  }
  c = "{\"text\": \"no line end\"}";
  write_file_atomic(dir / "plain/a.jsonl", a);
  write_file_atomic(dir / "plain/b.json", b);
  write_file_atomic(dir / "plain/c.jsonl", c);
  write_file_atomic(dir / "plain/d.txt", "text");
  write_file_atomic(dir / "packed/a.jsonl.gz", gzip(a.substr(0, 500000)) + gzip(a.substr(500000)));
  write_file_atomic(dir / "packed/b.json.zst", zstd(b));
  write_file_atomic(dir / "packed/c.jsonl.zst", zstd(c));
  write_file_atomic(dir / "packed/d.txt.gz", gzip("text"));
  std::string expected;
  for (const char* folder : {"plain", "packed"})
    for (const int workers : {1, 3}) {
      auto options = options_for(dir, {folder});
      options.workers = workers;
      PrepareProgress end;
      const PrepareSummary summary = run_prepare(options, [&](const PrepareProgress& p) { end = p; });
      CHECK(summary.documents == 60002);
      CHECK(end.bytes_done == end.bytes);
      CHECK(end.files_done == 4);
      const std::string bin = read_file(options.output + ".bin", 1 << 28);
      if (expected.empty()) expected = bin;
      CHECK(bin == expected);
    }

  // The place of a bad line is that of the decompressed text.
  write_file_atomic(dir / "bad.jsonl.gz", gzip(a + "oops\n"));
  CHECK(contains(error_of([&] { run_prepare(options_for(dir, {"bad.jsonl.gz"})); }).text, ".gz:30001:"));
  write_file_atomic(dir / "bad.jsonl.zst", zstd(a + "\xff\n"));
  CHECK(contains(
      error_of([&] { run_prepare(options_for(dir, {"bad.jsonl.zst"})); }).text,
      fmt::format("bad.jsonl.zst:30001: not UTF-8 text: byte 0xff at byte {} of the decompressed text",
                  a.size())));
}

TEST_CASE("what is not text or JSON lines is refused by name", "[prepare]") {
  const TemporaryDirectory dir;
  make_directories(dir / "in");
  write_file_atomic(dir / "in/part-0.parquet", "PAR1");
  CHECK(contains(error_of([&] { run_prepare(options_for(dir, {"in"})); }).text, "part-0.parquet: Parquet"));

  // A document that expands to far more than its size.
  write_file_atomic(dir / "bomb.txt.gz", gzip(std::string(size_t{80} << 20, 'x')));
  const Caught bomb = error_of([&] { run_prepare(options_for(dir, {"bomb.txt.gz"})); });
  CHECK(bomb.code == 65);
  CHECK(contains(bomb.text, "bomb.txt.gz: the document is too long: more than 64.0 MiB, out of"));
  write_file_atomic(dir / "bomb.jsonl.gz", gzip(std::string(size_t{80} << 20, ' ')));
  CHECK(contains(error_of([&] { run_prepare(options_for(dir, {"bomb.jsonl.gz"})); }).text,
                 "bomb.jsonl.gz:1: the line is too long"));

  // A .json file without lines is a text like others, and is counted.
  write_file_atomic(dir / "settings.json", "{\n  \"text\": 1\n}\n");
  const PrepareSummary summary = run_prepare(options_for(dir, {"settings.json"}));
  CHECK(summary.documents == 1);
  CHECK(summary.json_as_text.locations == std::vector<std::string>{dir / "settings.json"});
}

TEST_CASE("a request to stop leaves nothing behind", "[prepare]") {
  const TemporaryDirectory dir;
  write_file_atomic(dir / "a.txt", "text");
  auto options = options_for(dir, {"a.txt"});
  // Polled at the beginning of the phase, and before the files get their names.
  for (int polls = 0; polls < 2; ++polls) {
    int left = polls;
    options.stop = [&] { return left-- == 0; };
    CHECK_THROWS_AS(run_prepare(options), PrepareStopped);
    CHECK(list_directory(dir / "out").empty());
  }
  int polls = 0;
  options.stop = [&] { return ++polls > 2; };
  run_prepare(options);
  CHECK(polls == 2);
}

TEST_CASE("progress has the time left, on a terminal and in plain lines", "[prepare]") {
  using Phase = PrepareProgress::Phase;
  PrepareProgress p;
  p.bytes = int64_t{4} << 30;
  p.bytes_done = int64_t{1} << 30;
  p.tokens = 300'000'000;
  p.seconds = 20;
  CHECK(progress_text(p) == "tokenizing: 25%, 1.00 GiB of 4.00 GiB, 51.2 MiB/s, 1m00s left, 300 M tokens");
  std::vector<std::string> lines;
  PrepareReport plain(0, [&](std::string_view text) { lines.emplace_back(text); });
  for (int tick = 0; tick < 60; ++tick) {
    p.phase = tick < 20 ? Phase::sampling : tick < 40 ? Phase::training_tokenizer : Phase::tokenizing;
    p.seconds = tick % 20;
    plain(p);
  }
  plain.finish();
  REQUIRE(lines.size() == 12);
  CHECK(lines[0] == "reading a sample ...\n");
  CHECK(contains(lines[1], "reading a sample: 25%"));
  CHECK(lines[4] == "training the tokenizer ...\n");
  CHECK(lines[5] == "training the tokenizer: 5s so far\n");
  CHECK(lines[8] == "tokenizing ...\n");

  lines.clear();
  PrepareReport bar(60, [&](std::string_view text) { lines.emplace_back(text); });
  bar(p);
  bar.finish();
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].size() == 59 + 4);
  CHECK(contains(lines[0], "[#####...............] tokenizing: 25%"));
  CHECK(lines[1] == "\r\033[K");
}

TEST_CASE("a tokenizer is trained on any text, as large as the text allows", "[prepare]") {
  const TemporaryDirectory dir;
  for (const std::string text : {"x", "a b\nc", "hello hello hello\n"}) {
    write_file_atomic(dir / "a.txt", text);
    const PrepareSummary summary = run_prepare(options_for(dir, {"a.txt"}, "train-sentencepiece:4096"));
    CHECK(summary.vocab_wanted == 4096);
    CHECK(summary.vocab_size > 259);
    CHECK(summary.vocab_size < 300);
    CHECK(documents_of(dir / "out/data") == std::vector<std::string>{text});
  }
}

TEST_CASE("a tokenizer counts what it has encoded of a long text", "[prepare]") {
  const auto tokenizer = make_tokenizer("hf:" + std::string(NRL_TEST_DATA) + "/fixtures/gpt2.json");
  const std::string text = "some words and 123 numbers\n";
  std::atomic<int64_t> bytes = 0;
  encode_progress = &bytes;
  tokenizer->encode(text);
  encode_progress = nullptr;
  CHECK(bytes == static_cast<int64_t>(text.size()));
  tokenizer->encode(text);
  CHECK(bytes == static_cast<int64_t>(text.size()));
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
