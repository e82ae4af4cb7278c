#include "core/io/file_identity.h"

#include "core/base/finite.h"
#include "core/io/crc32c.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;

namespace {

void write_text(const std::string& path, const std::string& text) {
  remove_tree(path);
  const File file = File::create(path);
  file.pwrite_all(text.data(), text.size(), 0);
}

}  // namespace

TEST_CASE("the identity of a file changes with its size and its content") {
  const TemporaryDirectory dir;
  const std::string path = dir / "f";
  write_text(path, "123456789");
  CHECK(identify_file(path).text() == "9 bytes, CRC-32C e3069283");
  CHECK(identify_file_by_samples(path) == identify_file(path));
  write_text(path, "");
  CHECK(identify_file_by_samples(path) == FileIdentity{});
  CHECK(error_of([&] { identify_file(dir / "none"); }).code == 66);

  std::string text((size_t{5} << 20) + 17, 'a');
  write_text(path, text);
  const FileIdentity whole = identify_file(path), sampled = identify_file_by_samples(path);
  CHECK(whole.bytes == text.size());
  for (const size_t at : {size_t{0}, text.size() - 1, text.size() / 2}) {
    text[at] = 'b';
    write_text(path, text);
    CHECK(identify_file(path) != whole);
    if (at != text.size() / 2) CHECK(identify_file_by_samples(path) != sampled);
    text[at] = 'a';
  }
  write_text(path, text + "a");
  CHECK(identify_file_by_samples(path) != sampled);
}

// What checkpoints have recorded must stay comparable.
TEST_CASE("the sampled identity is of 64 blocks of 64 KiB at equal distances") {
  const TemporaryDirectory dir;
  std::string text((size_t{9} << 20) + 12345, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  write_text(dir / "f", text);
  std::string blocks;
  for (uint64_t i = 0; i < 64; ++i) blocks += text.substr((text.size() - 65536) * i / 63, 65536);
  CHECK(identify_file_by_samples(dir / "f") ==
        FileIdentity{text.size(), crc32c(blocks.data(), blocks.size())});
  text.resize(size_t{4} << 20);  // all of it
  write_text(dir / "f", text);
  CHECK(identify_file_by_samples(dir / "f") == FileIdentity{text.size(), crc32c(text.data(), text.size())});
}

TEST_CASE("NaN and infinity are counted in every floating-point type") {
  const float f32[] = {1, NAN, -INFINITY, 3e38f, 0, INFINITY};
  CHECK(count_non_finite(DType::f32, f32, sizeof f32) == 3);
  const uint16_t low[] = {0x7f80, 0x7c00, 0x7e01, 0xffc0, 0};
  CHECK(count_non_finite(DType::bf16, low, sizeof low) == 2);
  CHECK(count_non_finite(DType::f16, low, sizeof low) == 4);
  const double f64[] = {NAN, 1e300};
  CHECK(count_non_finite(DType::f64, f64, sizeof f64) == 1);
  CHECK(count_non_finite(DType::i32, f32, sizeof f32) == 0);
}
