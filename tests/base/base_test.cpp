#include "core/base/cpu_list.h"
#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "tests/catch.h"

using namespace nrl;

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

TEST_CASE("f16 holds every half and rounds to nearest even", "[base]") {
  const auto half = [](uint32_t bits) {
    f16 h;
    h.bits = static_cast<uint16_t>(bits);
    return h;
  };
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const uint32_t exponent = bits >> 10, mantissa = bits & 1023;
    const float value =
        exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                      : std::ldexp(static_cast<float>(mantissa + 1024), static_cast<int>(exponent) - 25);
    // Between this one and the next; behind the last one lies 65536, which is infinity.
    const float next = bits == 0x7bff ? 65536.0f : float(half(bits + 1)), middle = value + (next - value) / 2;
    const bool right = float(half(bits)) == value && float(half(bits | 0x8000)) == -value &&
                       f16(value).bits == bits && f16(-value).bits == (bits | 0x8000) &&
                       f16(middle).bits == bits + (bits & 1) &&
                       f16(std::nextafter(middle, 0.0f)).bits == bits &&
                       f16(std::nextafter(middle, INFINITY)).bits == bits + 1;
    if (!right) FAIL(bits);
  }
  REQUIRE(f16(INFINITY).bits == 0x7c00);
  REQUIRE(f16(-3e38f).bits == 0xfc00);
  REQUIRE(std::isinf(float(half(0xfc00))));
  REQUIRE(std::isnan(float(f16(std::nanf("")))));
  REQUIRE(std::isnan(float(half(0x7c01))));
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

TEST_CASE("a long message keeps its first and last lines, a long list its first items", "[base]") {
  REQUIRE(bounded_lines("short\n") == "short\n");
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "line " + std::to_string(i) + "\n";
  const std::string cut = bounded_lines(text + "Fix: this");
  REQUIRE(cut.size() <= max_message);
  REQUIRE(cut.starts_with("line 0\nline 1\n"));
  REQUIRE(cut.ends_with("line 999\nFix: this"));
  REQUIRE(cut.find(" lines left out)\nline ") != std::string::npos);
  REQUIRE(bounded_lines(std::string(50000, 'x'), 500).size() <= 500);
  REQUIRE(bounded_lines(std::string(50000, '\n'), 500).size() <= 500);

  const std::vector<std::string> items{"a", "b", "c"};
  REQUIRE(joined(items) == "a, b, c");
  REQUIRE(joined(items, "; ", 2) == "a; b and 1 more");
  REQUIRE(joined(items, "\n  ", 1) == "a\n  and 2 more");
  REQUIRE(joined({}) == "");
  const std::string_view two[] = {"a", "b"}, three[] = {"a", "b", "c"};
  REQUIRE(alternatives(std::span(two).first(1)) == "a");
  REQUIRE(alternatives(two) == "a or b");
  REQUIRE(alternatives(three) == "a, b or c");
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

TEST_CASE("lists of CPUs are read as taskset writes them", "[base]") {
  using Cpus = std::vector<int>;
  CHECK(parse_cpu_list("0") == Cpus{0});
  CHECK(parse_cpu_list("0-3,8") == Cpus{0, 1, 2, 3, 8});
  CHECK(parse_cpu_list("8,0-1") == Cpus{8, 0, 1});
  for (const char* wrong : {"", ",", "1,", "-1", "3-1", "1-", "a", "1 2", "1,1", "0-3,2", "1048576",
                            "0-9999999999", "+1", "0-1048575,0-1048575"}) {
    INFO(wrong);
    CHECK_FALSE(parse_cpu_list(wrong));
  }
  CHECK(cpu_list_text(Cpus{0, 1, 2, 8}) == "0-2,8");
  CHECK(cpu_list_text(Cpus{}).empty());
  // Any text is a list or none; a list is written and read back.
  const PhiloxStream random(3, "cpus");
  constexpr std::string_view letters = "0123456789-,,--x ";
  int lists = 0;
  for (uint64_t trial = 0; trial < 20000; ++trial) {
    std::string text;
    for (uint64_t i = 0; i < 1 + trial % 7; ++i)
      text += letters[static_cast<size_t>(random.uniform(trial * 8 + i) *
                                          static_cast<float>(letters.size() - 1))];
    const auto cpus = parse_cpu_list(text);
    if (!cpus || cpus->size() > 1000) continue;
    ++lists;
    CHECK(parse_cpu_list(cpu_list_text(*cpus)) == cpus);
  }
  CHECK(lists > 100);
}
