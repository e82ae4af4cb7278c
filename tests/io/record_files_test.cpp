#include "core/io/record_files.h"

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/philox.h"
#include "core/io/atomic_file.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/io/record_reader.h"

using namespace nrl;

namespace {

std::vector<std::string> random_records(int count, uint64_t longest) {
  const PhiloxStream random(11, "records");
  std::vector<std::string> out;
  for (uint64_t i = 0; i < static_cast<uint64_t>(count); ++i)
    out.emplace_back(random.bits(2 * i) % longest, static_cast<char>(random.bits(2 * i + 1)));
  return out;
}

// No damage may give records that were not written: a reader stops or throws.
void check_damage(const std::string& file, const std::vector<std::string>& records, const auto& read) {
  int found = 0;
  for (int i = 0; i < test::fuzz_iterations() / 20; ++i) {
    const std::string bad = test::mutated(file, static_cast<uint64_t>(i));
    try {
      const std::vector<std::string> got = read(bad);
      for (size_t r = 0; r < got.size() && bad != file; ++r)
        found += r < records.size() && got[r] == records[r] ? 0 : 1;
    } catch (const std::runtime_error&) {
    }
  }
  CHECK(found == 0);
}

}  // namespace

TEST_CASE("TFRecords have the framing of TensorFlow", "[io]") {
  // tf.io.TFRecordWriter of b"abc".
  const std::string bytes = tf_record("abc");
  REQUIRE(bytes.size() == 19);
  CHECK(bytes.substr(0, 8) == std::string("\x03\0\0\0\0\0\0\0", 8));
  CHECK(bytes.substr(12, 3) == "abc");
  std::string file;
  const auto records = random_records(40, 300);
  for (const std::string& r : records) file += tf_record(r);
  CHECK(test::tf_records(file) == records);
  for (size_t cut = 0; cut < file.size(); cut += 13) {
    const auto kept = test::tf_records(std::string_view(file).substr(0, cut));
    CHECK(kept == std::vector<std::string>(records.begin(),
                                           records.begin() + static_cast<std::ptrdiff_t>(kept.size())));
  }
  check_damage(file, records, [](const std::string& bad) { return test::tf_records(bad); });
}

TEST_CASE("records of a log go over the ends of blocks", "[io]") {
  for (const size_t begin : {size_t{0}, size_t{7}, size_t{32768 - 7}, size_t{32768 - 6}, size_t{40000}}) {
    CAPTURE(begin);
    std::string file(begin, 'x');
    LevelLogFrames frames(begin);
    auto records = random_records(60, 5000);
    records.emplace_back(200000, 'y');
    records.emplace_back();
    for (size_t left = 0; left < 16; ++left) {  // records that end at every distance from the end of a block
      const size_t used = file.size() % 32768;
      records.emplace_back(used + 7 + left < 32768 ? 32768 - used - 7 - left : 1, 'z');
      file.clear();
      file.assign(begin, 'x');
      frames = LevelLogFrames(begin);
      for (const std::string& r : records) file += frames.frame(r);
    }
    CHECK(test::level_log_records(file, begin) == records);
    for (size_t cut = begin; cut < file.size(); cut += 997) {
      const auto kept = test::level_log_records(std::string_view(file).substr(0, cut), begin);
      CHECK(kept == std::vector<std::string>(records.begin(),
                                             records.begin() + static_cast<std::ptrdiff_t>(kept.size())));
    }
  }
}

TEST_CASE("a log is read back up to damage", "[io]") {
  const test::TemporaryDirectory dir;
  const auto records = random_records(60, 9000);
  LevelLogFrames frames(7);
  std::string text(7, 'x');
  std::vector<uint64_t> ends;
  for (const std::string& r : records) {
    text += frames.frame(r);
    ends.push_back(text.size());
  }
  const auto read = [&](const std::string& content) {
    write_file_atomic(dir / "log", content);
    const File file = File::open_read(dir / "log");
    LevelLogReader reader(file, 7);
    size_t count = 0;
    while (const auto record = reader.next()) {
      REQUIRE(count < records.size());
      REQUIRE(record->data == records[count]);
      if (count > 0) REQUIRE(record->offset >= ends[count - 1]);
      if (count > 0) REQUIRE(record->offset < ends[count - 1] + 7);
      count += 1;
    }
    return count;
  };
  CHECK(read(text) == records.size());
  CHECK(read(text.substr(0, 7)) == 0);
  CHECK(read(text.substr(0, 3)) == 0);
  for (size_t i = 0; i < records.size(); i += 7) {
    CHECK(read(text.substr(0, ends[i])) == i + 1);
    CHECK(read(text.substr(0, ends[i] - 1)) == i);
    std::string bad = text;
    bad[ends[i] - 1] = static_cast<char>(bad[ends[i] - 1] ^ 4);
    CHECK(read(bad) == i);
  }
  for (uint64_t i = 0; i < 200; ++i) {  // never more than was written
    const std::string bad = test::mutated(text, i, 5);
    write_file_atomic(dir / "log", bad);
    const File file = File::open_read(dir / "log");
    LevelLogReader reader(file, 7);
    while (const auto record = reader.next()) CHECK(record->data.size() <= bad.size());
  }
}

TEST_CASE("damage to a log is noticed", "[io]") {
  LevelLogFrames frames(7);
  std::string file(7, 'x');
  const auto records = random_records(30, 4000);
  for (const std::string& r : records) file += frames.frame(r);
  std::string bad = file;
  bad[20] = static_cast<char>(bad[20] ^ 1);
  CHECK_THROWS_AS(test::level_log_records(bad, 7), std::runtime_error);
}
