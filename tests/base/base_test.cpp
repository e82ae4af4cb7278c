#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "tests/catch.h"

using namespace nrl;

TEST_CASE("philox gives the published known answers", "[base]") {
  // Random123's kat_vectors for philox4x32-10.
  REQUIRE(philox4x32(0, 0, 0) == PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  REQUIRE(philox4x32(~0ull, ~0ull, ~0ull) == PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  REQUIRE(philox4x32(0x85a308d3243f6a88ull, 0x0370734413198a2eull, 0x299f31d0a4093822ull) ==
          PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("normal numbers have mean 0 and variance 1", "[base]") {
  PhiloxStream stream(7, "w");
  double sum = 0, squares = 0;
  constexpr int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = stream.normal(static_cast<uint64_t>(i));
    sum += x;
    squares += x * x;
  }
  REQUIRE(std::abs(sum / n) < 0.02);
  REQUIRE(std::abs(squares / n - 1) < 0.02);
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN and infinity", "[base]") {
  REQUIRE(float(bf16(1.0f)) == 1.0f);
  REQUIRE(float(bf16(1.00390625f)) == 1.0f);       // half way, even is below
  REQUIRE(float(bf16(1.01171875f)) == 1.015625f);  // half way, even is above
  REQUIRE(std::isnan(float(bf16(std::nanf("")))));
  REQUIRE(std::isinf(float(bf16(INFINITY))));
  REQUIRE(std::isinf(float(bf16(3.4e38f))));
}

TEST_CASE("nearest finds typing errors and other separators", "[base]") {
  const std::string_view words[] = {"tensor_parallel_size", "lr", "precision"};
  REQUIRE(nearest("tensor_paralel_size", words) == "tensor_parallel_size");
  REQUIRE(nearest("TensorParallelSize", words) == "tensor_parallel_size");
  REQUIRE(nearest("lrr", words) == "lr");
  REQUIRE(nearest("banana", words).empty());
}

TEST_CASE("control characters are escaped", "[base]") {
  using namespace std::string_literals;
  const std::pair<std::string, std::string> cases[] = {
      {"plain \xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80\n\ttab",
       "plain \xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80\n\ttab"},
      {"\x1b[31m\r\a\0\x7f"s, "\\x1b[31m\\r\\x07\\x00\\x7f"},
      {"\xc2\x9b \xe2\x80\xae \xe2\x81\xa6 \xe2\x80\xa8", "\\x9b \\u202e \\u2066 \\u2028"},
      {"\xff \xc0\xaf \xed\xa0\x80 \xe2\x80", "\\xff \\xc0\\xaf \\xed\\xa0\\x80 \\xe2\\x80"}};
  for (const auto& [text, shown] : cases) {
    REQUIRE(printable(text) == shown);
    REQUIRE(printable(shown) == shown);
  }
  REQUIRE(masked("a\x1b\xc3\xa9\xe2\x80\xae\xff.") == "a?\xc3\xa9??.");
}

TEST_CASE("values are cut between characters, messages in the middle of a line", "[base]") {
  REQUIRE(clipped("a\nb\tc") == "a\\nb\\tc");
  REQUIRE(clipped("abcdef", 6) == "abcdef");
  REQUIRE(clipped("abcdefg", 6) == "abcdef...");
  REQUIRE(clipped("abcde\xc3\xa9", 6) == "abcde...");
  REQUIRE(clipped(std::string(1 << 20, '\x1b'), 8) == "\\x1b\\x1b...");
  REQUIRE(message_text("one\ntwo\n", "  ") == "one\n  two\n");
  const std::string cut = message_text("short\n" + std::string(400, 'a') + std::string(5000, 'b') + "end");
  REQUIRE(cut.size() < 1100);
  REQUIRE(cut.find("bytes left out) ... bbb") != std::string::npos);
  REQUIRE(cut.ends_with("end"));
}

TEST_CASE("human units", "[base]") {
  REQUIRE(human_bytes(1536) == "1.50 KiB");
  REQUIRE(human_count(1236000000) == "1.24 B");
  REQUIRE(human_duration(25260) == "7h01m");
  REQUIRE(grouped(-1234567) == "-1,234,567");
}

TEST_CASE("a broken invariant says where", "[base]") {
  try {
    NRL_CHECK(1 == 2, "value {}", 3);
    FAIL();
  } catch (const Error& e) {
    REQUIRE(e.code() == Exit::internal);
    REQUIRE(std::string(e.what()).find("value 3") != std::string::npos);
  }
}
