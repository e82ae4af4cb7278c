#include "core/io/indexed_dataset.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

void write_sample(const std::string& prefix, int64_t vocab, int32_t top) {
  IndexedDatasetWriter writer(prefix, vocab);
  writer.add_sequence(std::vector<int32_t>{1, 2, 3});
  writer.add_sequence(std::vector<int32_t>{});
  writer.end_document();
  writer.add_sequence(std::vector<int32_t>{4, top});
  writer.end_document();
  writer.finish();
}

std::string slurp(const std::string& path) {
  return read_file(path, 1 << 20);
}

}  // namespace

TEST_CASE("a token file comes back as it was written", "[indexed]") {
  const TemporaryDirectory dir;
  for (const auto& [vocab, top, size] :
       {std::tuple<int64_t, int32_t, int>{65499, 65498, 2}, {65500, 65499, 4}}) {
    const std::string prefix = dir / fmt::format("v{}", vocab);
    write_sample(prefix, vocab, top);
    const IndexedDataset data(prefix);
    CHECK(data.token_bytes() == size);
    CHECK(data.sequences() == 3);
    CHECK(data.documents() == 2);
    CHECK(data.tokens() == 5);
    CHECK(data.document_of(1) == 0);
    CHECK(data.document_of(2) == 1);
    std::vector<int32_t> two(2);
    data.read(0, 1, two);
    CHECK(two == std::vector<int32_t>{2, 3});
    data.read(2, 0, two);
    CHECK(two == std::vector<int32_t>{4, top});
    const Caught bad = error_of([&] { data.read(2, 0, two, 100); });
    CHECK(bad.code == 65);
    CHECK(bad.text == fmt::format("{}.bin: token {} at position 4 (document 1) is not below vocab_size 100",
                                  prefix, top));
    CHECK(error_of([&] { data.read(2, 0, two, top); }).code == 65);
    CHECK(error_of([&] { data.read(2, 0, two, top + 1); }).code == 0);
    CHECK(error_of([&] { data.read(2, 1, two); }).code == 70);
  }
}

TEST_CASE("shuffled documents are the same documents in another order", "[indexed]") {
  const TemporaryDirectory dir;
  const auto documents = [&](const std::string& name, std::optional<uint64_t> seed) {
    IndexedDatasetWriter writer(dir / name, 100000);
    for (int32_t d = 0; d < 50; ++d) {
      // Two sequences; one document is larger than the pieces in which the tokens are copied.
      writer.add_sequence(std::vector<int32_t>(d == 7 ? 600000 : static_cast<size_t>(d % 5), 2 * d));
      writer.add_sequence(std::vector<int32_t>(static_cast<size_t>(d % 3 + 1), 2 * d + 1));
      writer.end_document();
    }
    int polls = 0;
    if (seed) writer.shuffle_documents(*seed, [&] { ++polls; });
    CHECK(polls == (seed ? 50 : 0));
    writer.finish();
    const IndexedDataset data(dir / name);
    REQUIRE(data.documents() == 50);
    REQUIRE(data.sequences() == 100);
    std::vector<int32_t> order;
    for (int32_t s = 0; s < 100; s += 2) {
      int32_t id = 0;
      data.read(s + 1, 0, {&id, 1});
      const int32_t d = id / 2;
      order.push_back(d);
      CHECK(data.document_of(s + 1) == s / 2);
      REQUIRE(data.lengths()[s] == (d == 7 ? 600000 : d % 5));
      REQUIRE(data.lengths()[static_cast<size_t>(s) + 1] == d % 3 + 1);
      std::vector<int32_t> tokens(static_cast<size_t>(data.lengths()[s]));
      data.read(s, 0, tokens);
      CHECK(std::all_of(tokens.begin(), tokens.end(), [&](int32_t token) { return token == 2 * d; }));
    }
    return order;
  };
  std::vector<int32_t> in_order(50);
  std::iota(in_order.begin(), in_order.end(), 0);
  CHECK(documents("plain", {}) == in_order);
  std::vector<int32_t> first = documents("first", 1);
  CHECK(first == documents("again", 1));
  CHECK(first != documents("other", 2));
  CHECK(first != in_order);
  std::sort(first.begin(), first.end());
  CHECK(first == in_order);
  CHECK(list_directory(dir / "").size() == 8);  // no temporary file
}

TEST_CASE("token files larger than the blocks in which they are read and written", "[indexed]") {
  const TemporaryDirectory dir;
  for (int64_t vocab : {60000, 100000}) {
    const auto token = [vocab](size_t i) {
      return static_cast<int32_t>((i * 7919) % static_cast<size_t>(vocab));
    };
    std::vector<int32_t> all(300007);
    for (size_t i = 0; i < all.size(); ++i) all[i] = token(i);
    const std::string prefix = dir / fmt::format("v{}", vocab);
    IndexedDatasetWriter writer(prefix, vocab);
    writer.add_sequence(std::span(all).first(200000));
    writer.end_document();
    for (size_t i = 200000; i < all.size(); ++i) {
      writer.add_sequence(std::span(all).subspan(i, 1));
      writer.end_document();
    }
    writer.finish();
    const IndexedDataset data(prefix);
    REQUIRE(data.sequences() == 100008);
    CHECK(data.documents() == 100008);
    std::vector<int32_t> read(199990);
    data.read(0, 10, read);
    CHECK(std::equal(read.begin(), read.end(), all.begin() + 10));
    read.resize(1);
    int64_t wrong = 0;
    for (int64_t i = 1; i < data.sequences(); ++i) {
      data.read(i, 0, read);
      wrong += read[0] != all[199999 + i] || data.document_of(i) != i;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("the bytes of an index are Megatron's", "[indexed]") {
  const TemporaryDirectory dir;
  write_sample(dir / "d", 300, 299);
  std::string expected("MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08\3\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 34);
  expected += std::string("\3\0\0\0\0\0\0\0\2\0\0\0", 12);
  expected += std::string("\0\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0", 24);
  expected += std::string("\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 24);
  CHECK(slurp(dir / "d.idx") == expected);
  CHECK(slurp(dir / "d.bin") == std::string("\1\0\2\0\3\0\4\0\x2b\1", 10));
}

TEST_CASE("a writer that is not finished leaves nothing, one that is leaves two files", "[indexed]") {
  const TemporaryDirectory dir;
  {
    IndexedDatasetWriter writer(dir / "d", 300);
    writer.add_sequence(std::vector<int32_t>{1});
    CHECK(error_of([&] { writer.add_sequence(std::vector<int32_t>{300}); }).code == 70);
  }
  CHECK(list_directory(dir.path()).empty());
  write_sample(dir / "d", 300, 299);
  write_sample(dir / "d", 300, 298);  // replaces
  CHECK(list_directory(dir.path()) == std::vector<std::string>{"d.bin", "d.idx"});
}

TEST_CASE("a malformed index is refused by the field that is wrong", "[indexed]") {
  const TemporaryDirectory dir;
  const std::string prefix = dir / "d";
  write_sample(prefix, 300, 299);
  const std::string idx = slurp(prefix + ".idx"), bin = slurp(prefix + ".bin");
  const auto put = [&](const std::string& i, const std::string& b) {
    write_file_atomic(prefix + ".idx", i);
    write_file_atomic(prefix + ".bin", b);
  };
  const auto refused = [&](const std::string& i, const std::string& b, const std::string& part) {
    put(i, b);
    const Caught caught = error_of([&] { IndexedDataset data(prefix); });
    INFO(caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, part));
    CHECK(contains(caught.text, prefix));
  };
  const auto with = [&](size_t at, auto value) {
    std::string text = idx;
    std::memcpy(text.data() + at, &value, sizeof(value));
    return text;
  };
  refused(with(0, 'X'), bin, "magic");
  refused(with(9, uint64_t{2}), bin, "version 2");
  refused(with(17, uint8_t{99}), bin, "dtype 99");
  refused(with(17, uint8_t{7}), bin, "dtype 7");
  refused(with(18, uint64_t{1} << 62), bin, "sequence count");
  refused(with(18, ~uint64_t{0}), bin, "sequence count");
  refused(with(18, uint64_t{2}), bin, "size");
  refused(with(26, ~uint64_t{0}), bin, "document count");
  refused(with(26, uint64_t{0}), bin, "document count");
  refused(with(34, int32_t{-1}), bin, "length of sequence 0 is -1");
  refused(with(34, int32_t{INT32_MAX}), bin, "sequence 0 ends at byte");
  refused(with(54, int64_t{5}), bin, "offset of sequence 1 is byte 5");
  refused(with(54, int64_t{-1}), bin, "offset of sequence 1");
  refused(with(70, int64_t{1}), bin, "begins with 1");
  refused(with(78, int64_t{4}), bin, "falls from 4 to 3");
  refused(with(86, int64_t{2}), bin, "ends with 2");
  refused(idx + 'x', bin, "size");
  refused(idx + "xyz", bin, "multimodal");
  refused(idx.substr(0, idx.size() - 1), bin, "size");
  refused(idx.substr(0, 33), bin, "truncated");
  refused("", bin, "truncated");
  refused(idx, bin + 'x', "size 11 bytes");
  refused(idx, bin.substr(1), "ends at byte 10");
  refused(idx, "", "has 0 bytes");
  put(idx + std::string(3, '\0'), bin);
  CHECK(IndexedDataset(prefix).tokens() == 5);  // text with the optional modes
  std::filesystem::remove(prefix + ".idx");
  CHECK(error_of([&] { IndexedDataset data(prefix); }).code == 66);
}

TEST_CASE("no mutation of an index does harm", "[indexed][fuzz]") {
  const TemporaryDirectory dir;
  const std::string prefix = dir / "d";
  write_sample(prefix, 300, 299);
  const std::string idx = slurp(prefix + ".idx");
  int opened = 0;
  for (int i = 0; i < fuzz_iterations() / 20; ++i) {
    const std::string path = prefix + ".idx";
    std::filesystem::remove(path);
    const std::string text = mutated(idx, static_cast<uint64_t>(i));
    File::create(path).pwrite_all(text.data(), text.size(), 0);
    const Caught caught = error_of([&] {
      const IndexedDataset data(prefix);
      ++opened;
      for (int64_t s = 0; s < data.sequences(); ++s) {
        std::vector<int32_t> all(static_cast<size_t>(data.lengths()[s]));
        data.read(s, 0, all);
      }
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
  }
  CHECK(opened < fuzz_iterations() / 40);
}

TEST_CASE("more sequences than an order can number are refused before memory is taken", "[indexed]") {
  const TemporaryDirectory dir;
  write_sample(dir / "few", 100, 99);
  std::string header = slurp(dir / "few.idx").substr(0, 34);
  const uint64_t sequences = uint64_t{1} << 31, entries = 1;
  std::memcpy(header.data() + 18, &sequences, 8);
  std::memcpy(header.data() + 26, &entries, 8);
  const File index = File::create(dir / "many.idx");  // without blocks on the disk
  index.pwrite_all(header.data(), header.size(), 0);
  index.truncate(34 + 12 * sequences + 8 * entries);
  write_file_atomic(dir / "many.bin", "");
  const Caught caught = error_of([&] { IndexedDataset(dir / "many"); });
  CHECK(caught.code == 65);
  CHECK(contains(caught.text, "sequence count 2147483648; expected at most 2147483647"));
}
