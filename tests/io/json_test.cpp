#include "core/io/json.h"

#include <cmath>
#include <limits>

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using test::contains;
using test::error_of;

TEST_CASE("json keeps order, numbers and text exactly") {
  const std::string text =
      R"({"z":1,"a":[true,false,null,-9223372036854775808,18446744073709551615,0.1,1e-300,5.0],"s":"\"\\\n\u0001äЖ𝄞"})";
  const JsonValue v = parse_json(text, "t");
  CHECK(v.dump() == text);
  CHECK(v.get_int("z") == 1);
  const auto& a = v.at("a").items();
  CHECK(a[3].as_int() == std::numeric_limits<int64_t>::min());
  CHECK(a[4].as_uint() == std::numeric_limits<uint64_t>::max());
  CHECK(a[5].as_double() == 0.1);
  CHECK(a[7].dump() == "5.0");
  CHECK(v.get_string("s") == "\"\\\n\x01äЖ𝄞");
  CHECK(parse_json(v.dump(2), "t").dump() == text);
  CHECK(parse_json("\"\\ud834\\udd1e\"", "t").as_string() == "𝄞");
}

TEST_CASE("json doubles read back bit for bit") {
  const PhiloxStream random(3, "json");
  for (uint64_t i = 0; i < 20000; ++i) {
    const uint64_t bits = uint64_t{random.bits(2 * i)} << 32 | random.bits(2 * i + 1);
    const auto d = std::bit_cast<double>(bits);
    if (!std::isfinite(d)) continue;
    const double back = parse_json(JsonValue(d).dump(), "t").as_double();
    REQUIRE(std::bit_cast<uint64_t>(back) == bits);
  }
  CHECK(std::bit_cast<uint64_t>(parse_json(JsonValue(-0.0).dump(), "t").as_double()) == uint64_t{1} << 63);
  const JsonValue nan(std::nan(""));
  CHECK(nan.dump() == "null");
  CHECK(error_of([&] { (void)nan.dump(0, JsonValue::NonFinite::refuse); }).code == 70);
}

TEST_CASE("json builds values in code") {
  JsonValue v = JsonValue::object({{"a", 1}, {"b", JsonValue::array({1.5, "x", true, nullptr})}});
  v.set("a", uint64_t{7});
  v.set("c", std::vector<int64_t>{1, 2});
  CHECK(v.dump() == R"({"a":7,"b":[1.5,"x",true,null],"c":[1,2]})");
  CHECK(JsonValue("\xff").dump() == "\"\\ufffd\"");
  JsonValue big;
  for (int i = 0; i < 100; ++i) big.set("k" + std::to_string(i), i);
  const JsonValue copy = big;
  CHECK(copy.get_int("k57") == 57);
  CHECK(copy.find("k100") == nullptr);
  CHECK(copy.get_int("none", 5) == 5);
}

TEST_CASE("json errors name line and column") {
  const auto text_of = [](const std::string& text) { return error_of([&] { parse_json(text, "f.json"); }); };
  CHECK(contains(text_of("{\n \"a\": 1,\n  \"a\": 2}").text, "f.json:3:3: the key \"a\" occurs twice"));
  CHECK(contains(text_of("{\"a\":\n  tru}").text, "f.json:2:"));
  const JsonValue v = parse_json("{\"a\":\n [1, \"x\\\"y\", -12.5 ],\n\"n\": null}", "f.json");
  CHECK(contains(error_of([&] { v.get_int("a"); }).text, "f.json:2:2: \"a\" must be an integer"));
  CHECK(contains(error_of([&] { v.at("a").items()[1].as_int(); }).text, "f.json:2:6: "));
  CHECK(contains(error_of([&] { v.at("a").items()[2].as_int(); }).text, "f.json:2:14: "));
  CHECK(contains(error_of([&] { v.at("n").as_int(); }).text, "f.json:3:6: "));
  CHECK(contains(error_of([&] { v.at("b"); }).text, "\"b\" is missing"));
  CHECK(error_of([&] { v.at("b"); }).code == 65);
}

TEST_CASE("json refuses what is not strict") {
  const std::vector<std::string> bad = {"",
                                        " ",
                                        "{",
                                        "[1,]",
                                        "{\"a\":1,}",
                                        "{a:1}",
                                        "'a'",
                                        "01",
                                        "1.",
                                        ".5",
                                        "+1",
                                        "0x10",
                                        "NaN",
                                        "Infinity",
                                        "1e400",
                                        "\"\x01\"",
                                        "\"\\x\"",
                                        "\"\\ud800\"",
                                        "\"\xc0\x80\"",
                                        "\"\xed\xa0\x80\"",
                                        "\"\xff\"",
                                        "// c\n1",
                                        "1 2",
                                        "{} x",
                                        std::string("{}\0x", 4),
                                        std::string("\0", 1),
                                        "\xef\xbb\xbf{}",
                                        "[1",
                                        "\"abc",
                                        "tru",
                                        "{\"a\" 1}",
                                        std::string(100000, '['),
                                        "{\"a\":{\"b\":1,\"b\":2}}"};
  for (const std::string& text : bad) {
    CAPTURE(text.substr(0, 40));
    CHECK(error_of([&] { parse_json(text, "t"); }).code == 65);
  }
  JsonLimits limits;
  limits.depth = 2;
  CHECK_NOTHROW(parse_json("[[1]]", "t", limits));
  CHECK(contains(error_of([&] { parse_json("[[[1]]]", "t", limits); }).text, "t:1:3: nested deeper than 2"));
  limits.string_bytes = 3;
  CHECK(error_of([&] { parse_json("\"abcd\"", "t", limits); }).code == 65);
  limits.values = 3;
  CHECK(error_of([&] { parse_json("[1,2,3]", "t", limits); }).code == 65);
  limits.text_bytes = 2;
  CHECK(error_of([&] { parse_json("[ ]", "t", limits); }).code == 65);
}

TEST_CASE("json: mutated text is read or refused, and what is read survives a round trip") {
  const std::string base =
      R"({"format":"nrl","step":120,"t":{"w":{"dtype":"f32","shape":[2,3],"x":-1.5e-7}},"u":"é\n"})";
  int accepted = 0;
  for (int i = 0; i < test::fuzz_iterations() / 2; ++i) {
    const std::string text = test::mutated(base, static_cast<uint64_t>(i));
    const auto caught = error_of([&] {
      const std::string once = parse_json(text, "t").dump();
      REQUIRE(parse_json(once, "t").dump() == once);
      ++accepted;
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
  }
  CHECK(accepted > 0);
}
