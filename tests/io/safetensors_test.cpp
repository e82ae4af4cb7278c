#include "core/io/safetensors.h"

#include <cstring>
#include <limits>

#include "core/io/crc32c.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using test::contains;
using test::error_of;
using test::TemporaryDirectory;

namespace {

std::string with_length(const std::string& header, const std::string& data = {}) {
  const uint64_t n = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &n, 8);
  return file + header + data;
}

void put(const std::string& path, const std::string& bytes) {
  remove_tree(path);
  const File file = File::create(path);
  file.pwrite_all(bytes.data(), bytes.size(), 0);
}

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2)
    out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

// Written by the Python package safetensors 0.8.0: save(..., metadata={"format": "pt"}).
const std::string golden_file = with_length(
    R"({"__metadata__":{"format":"pt"},"scalar":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
    R"("d":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},"empty":{"dtype":"F32","shape":[0,4],)"
    R"("data_offsets":[16,16]},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[16,40]},"i":{"dtype":"I32",)"
    R"("shape":[1,2],"data_offsets":[40,48]},"bf":{"dtype":"BF16","shape":[2],"data_offsets":[48,52]},)"
    R"("b.half":{"dtype":"F16","shape":[2],"data_offsets":[52,56]},"u16":{"dtype":"U16","shape":[1],)"
    R"("data_offsets":[56,58]},"u8":{"dtype":"U8","shape":[3],"data_offsets":[58,61]}}     )",
    from_hex(
        "07000000000000009a9999999999b93f000000000000803e0000003f0000403f0000803f0000a03fffffffff02000000"
        "c03f40c0003c00c1ffff0102ff"));

const std::vector<TensorSpec> golden_specs = {
    {"w", DType::f32, {2, 3}},     {"scalar", DType::i64, {}}, {"b.half", DType::f16, {2}},
    {"empty", DType::f32, {0, 4}}, {"u8", DType::u8, {3}},     {"u16", DType::u16, {1}},
    {"d", DType::f64, {1}},        {"i", DType::i32, {1, 2}},  {"bf", DType::bf16, {2}}};

}  // namespace

TEST_CASE("safetensors: files of the Python package are read") {
  const TemporaryDirectory dir;
  put(dir / "g.safetensors", golden_file);
  const SafetensorsFile file(dir / "g.safetensors");
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.tensors().size() == 9);
  CHECK(file.tensors()[0].name == "scalar");
  float w[6];
  file.read(file.at("w"), w, sizeof w);
  for (int i = 0; i < 6; ++i) CHECK(w[i] == static_cast<float>(i) / 4);
  float row[3];
  file.read_rows(file.at("w"), 1, 1, row);
  CHECK(row[0] == 0.75f);
  int64_t scalar = 0;
  file.read(file.at("scalar"), &scalar, 8);
  CHECK(scalar == 7);
  bf16 bf[2];
  file.read(file.at("bf"), bf, sizeof bf);
  CHECK(static_cast<float>(bf[1]) == -3.0f);
  CHECK(file.at("empty").bytes() == 0);
  CHECK(file.at("empty").row_elements() == 4);
  CHECK(file.find("none") == nullptr);
}

TEST_CASE("safetensors: our files are the Python package's, byte for byte") {
  const TemporaryDirectory dir;
  put(dir / "g", golden_file);
  const SafetensorsFile golden(dir / "g");
  SafetensorsWriter writer(dir / "o", golden_specs);
  for (const TensorSpec& spec : golden_specs) {
    const TensorInfo& info = golden.at(spec.name);
    CHECK(info.dtype == spec.dtype);
    std::string data(info.bytes(), '\0');
    golden.read(info, data.data(), data.size());
    writer.write(spec.name, data.data(), data.size());
  }
  writer.finish();
  CHECK(read_file(dir / "o", 1000) == golden_file);
  CHECK(writer.bytes() == golden_file.size());
  CHECK(SafetensorsWriter::file_bytes(golden_specs, {}) == golden_file.size());
  CHECK(writer.file_crc() == crc32c(golden_file.data(), golden_file.size()));
}

TEST_CASE("safetensors: slices in any order, checksums from memory") {
  const TemporaryDirectory dir;
  std::vector<float> data(700'001);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 1000);
  const size_t bytes = data.size() * 4;
  const auto* raw = reinterpret_cast<const char*>(data.data());
  const TensorSpec spec{"x", DType::f32, {static_cast<int64_t>(data.size())}};
  std::vector<uint64_t> cuts = {0, 4, 400'000, 1'048'576, 1'048'580, 2'500'000, bytes};
  SafetensorsWriter writer(dir / "f", {spec});
  for (size_t i : {4, 0, 2, 5, 1, 3}) {
    writer.write_slice("x", cuts[i], raw + cuts[i], cuts[i + 1] - cuts[i]);
  }
  writer.finish();
  const TensorChecksum& sum = writer.checksum("x");
  CHECK(sum.crc == crc32c(raw, bytes));
  REQUIRE(sum.chunks.size() == 3);
  CHECK(sum.chunks[1] == crc32c(raw + crc_chunk_bytes, crc_chunk_bytes));
  CHECK(sum.chunks[2] == crc32c(raw + 2 * crc_chunk_bytes, bytes - 2 * crc_chunk_bytes));
  const std::string file = read_file(dir / "f", 10'000'000);
  CHECK(writer.file_crc() == crc32c(file.data(), file.size()));
  CHECK(std::memcmp(file.data() + file.size() - bytes, raw, bytes) == 0);

  // A byte written twice, a byte never written, a slice that cuts an element, a name that was not declared.
  SafetensorsWriter twice(dir / "f2", {spec});
  twice.write("x", raw, bytes);
  twice.write_slice("x", 8, raw, 4);
  CHECK(contains(error_of([&] { twice.finish(); }).text, "twice"));
  SafetensorsWriter never(dir / "f3", {spec});
  never.write_slice("x", 0, raw, bytes - 4);
  CHECK(contains(error_of([&] { never.finish(); }).text, "never"));
  CHECK(error_of([&] { never.write_slice("x", 2, raw, 4); }).code == 70);
  CHECK(error_of([&] { never.write_slice("x", bytes, raw, 4); }).code == 70);
  CHECK(error_of([&] { never.write("y", raw, bytes); }).code == 70);
  CHECK(error_of([&] { SafetensorsWriter(dir / "f3", {spec}); }).code == 73);
  CHECK(error_of([&] { SafetensorsWriter(dir / "f4", {spec, spec}); }).code == 70);
}

TEST_CASE("safetensors: the writer can refuse NaN and infinity") {
  const TemporaryDirectory dir;
  SafetensorsWriter::Options options;
  options.refuse_non_finite = true;
  int n = 0;
  const auto code = [&](DType dtype, auto value) {
    SafetensorsWriter w(dir / std::to_string(n++), {{"x", dtype, {2}}}, options);
    const decltype(value) data[2] = {decltype(value){}, value};
    return error_of([&] { w.write("x", data, sizeof data); }).code;
  };
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(code(DType::f32, inf) == 79);
  CHECK(code(DType::f32, std::numeric_limits<float>::quiet_NaN()) == 79);
  CHECK(code(DType::f32, std::numeric_limits<float>::max()) == 0);
  CHECK(code(DType::bf16, bf16(-inf)) == 79);
  CHECK(code(DType::bf16, bf16(3.0f)) == 0);
  CHECK(code(DType::f16, uint16_t{0x7c01}) == 79);
  CHECK(code(DType::f64, -static_cast<double>(inf)) == 79);
  CHECK(code(DType::i32, int32_t{-1}) == 0);
}

TEST_CASE("safetensors: malformed files are refused with the cause (G1 to G4)") {
  const TemporaryDirectory dir;
  const std::string path = dir / "bad";
  const auto refused = [&](const std::string& bytes, const std::string& part) {
    put(path, bytes);
    const auto caught = error_of([&] { SafetensorsFile file(path); });
    CAPTURE(bytes.substr(0, 200), part, caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, path));
    CHECK(contains(caught.text, part));
  };
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const std::string four(4, 'd');
  // G1: length and text of the header
  refused("", "0 bytes");
  refused(std::string(7, '\0'), "7 bytes");
  refused(with_length(std::string(10, ' ')).substr(0, 17), "header length 10");
  refused(std::string(8, '\xff') + "{}", "header length 18446744073709551615");
  refused(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + "{}", "header length 100000001");
  refused(with_length(""), "");
  refused(with_length("{\"\xff\":1}"), "");
  refused(with_length("hello"), "");
  refused(with_length("[]"), "expected an object");
  refused(with_length("{} x"), "");
  refused(with_length("{}", "x"), "1 bytes after the last tensor");
  refused(golden_file.substr(0, golden_file.size() - 1), "truncated");
  refused(golden_file + "x", "1 bytes after");
  // G2: offsets
  refused(with_length(one("F32", "[1]", "[4,8]"), four + four), "gap");
  refused(
      with_length(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],)"
                  R"("data_offsets":[2,6]}})",
                  "123456"),
      "overlap");
  refused(with_length(one("F32", "[1]", "[4,0]"), four), "data_offsets [4, 0]");
  refused(with_length(one("F32", "[1]", "[-4,0]"), four), "");
  refused(with_length(one("F32", "[1]", "[0.0,4]"), four), "");
  refused(with_length(one("F32", "[2]", "[0,8]"), four), "truncated");
  refused(with_length(one("F32", "[1]", "[0,2,4]"), four), "3 entries");
  refused(with_length(one("F32", "[1]", "[9223372036854775808,9223372036854775812]"), four), "gap");
  refused(with_length(one("F32", "[1]", "[18446744073709551615,3]"), four), "data_offsets");
  std::string many = "{";
  for (int i = 0; i < 100'000; ++i) {
    many += (i == 0 ? "" : ",") + ("\"t" + std::to_string(i)) +
            R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  }
  refused(with_length(many + "}", four), "overlap");
  // G3: shapes
  refused(with_length(one("F32", "[4294967296,4294967296]", "[0,0]")), "overflows");
  refused(with_length(one("F32", "[0,4294967296,4294967296]", "[0,0]")), "overflows");
  refused(with_length(one("F32", "[9223372036854775807]", "[0,4]"), four), "overflows");
  refused(with_length(one("F32", "[9223372036854775808]", "[0,4]"), four), "integer");
  refused(with_length(one("F32", "[-1]", "[0,4]"), four), "negative");
  refused(with_length(one("F32", "[1.5]", "[0,4]"), four), "integer");
  refused(with_length(one("F32", "[0]", "[0,4]"), four), "data_offsets");
  std::string thousand = "[1";
  for (int i = 1; i < 1000; ++i) thousand += ",1";
  refused(with_length(one("F32", thousand + "]", "[0,4]"), four), "1000 dimensions");
  // G4: element types
  refused(with_length(one("BF16", "[1]", "[0,4]"), four), "data_offsets");
  refused(with_length(one("F33", "[1]", "[0,4]"), four), "unknown dtype");
  refused(with_length(one("F4", "[1]", "[0,1]"), "d"), "whole bytes");
  // other
  refused(with_length(R"({"x":{"dtype":"F32","shape":[1]}})"), "data_offsets");
  refused(with_length(R"({"__metadata__":{"a":1}})"), "");
  refused(with_length(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[],)"
                      R"("data_offsets":[0,1]}})",
                      "x"),
          "twice");
  refused(with_length(R"({"__metadata__":{"a":"1","a":"2"}})"), "twice");
  refused(with_length(R"({"x":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}})", "x"), "twice");
  refused(with_length(R"({"x":{"dtype":"U8","shape":[],"data_offsets":[0,1],"y":1}})", "x"),
          "more than dtype");
  refused(with_length(R"({"x":[1]})"), "an array");
  refused(with_length(R"({"x\u001b[31m":7})"), R"("x\x1b[31m" holds a number)");
  // and what is allowed
  put(path, with_length("  {}  "));
  CHECK(SafetensorsFile(path).tensors().empty());
  put(path, with_length(one("F4", "[2]", "[0,1]"), "d"));
  CHECK_FALSE(SafetensorsFile(path).at("x").dtype.has_value());
  CHECK(error_of([&] { SafetensorsFile(dir / "none"); }).code == 66);
}

TEST_CASE("safetensors: files of other formats are recognized") {
  const TemporaryDirectory dir;
  using namespace std::string_literals;
  const std::pair<std::string, std::string> formats[] = {
      {"PK\3\4\0\0\x08\x08"s + std::string(200, 'x'), "zip archive"},
      // One whose first eight bytes are a possible length.
      {"PK\1\0\0\0\0\0"s + std::string(100'000, 'x'), "expected an object"},
      {"\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19."s, "pickle"},
      {"GGUF\3\0\0\0\1\0\0\0"s, "GGUF"},
      {"\x93NUMPY\1\0v\0{'descr'"s, "NumPy"},
      {"\x89HDF\r\n\x1a\n\0\0"s, "HDF5"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"s, "git lfs pull"},
      {"\n<!DOCTYPE html>\n<html>"s, "HTML page"},
      {"<HTML><head>"s, "HTML page"},
      {"{\"error\":\"Repository not found\"}"s, "plain JSON"},
      {"\x1f\x8b\x08\0\0\0\0\0\0"s, "gzip"}};
  for (const auto& [bytes, name] : formats) {
    put(dir / "f", bytes);
    const auto caught = error_of([&] { SafetensorsFile file(dir / "f"); });
    CAPTURE(name, caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, name));
  }
  put(dir / "pytorch_model.bin", "PK\3\4");
  const auto caught = error_of([&] { SafetensorsSet{dir.path()}; });
  CHECK(caught.code == 66);
  CHECK(contains(caught.text, "pytorch_model.bin is another format"));
}

TEST_CASE("safetensors: shards behind an index") {
  const TemporaryDirectory dir;
  const float a[2] = {1, 2}, b[2] = {3, 4};
  for (const auto& [file, name, data] : {std::tuple{"model-00001-of-00002.safetensors", "a", a},
                                         {"model-00002-of-00002.safetensors", "b", b}}) {
    SafetensorsWriter w(dir / file, {{name, DType::f32, {2}}});
    w.write(name, data, 8);
    w.finish();
  }
  const std::string index = dir / "model.safetensors.index.json";
  write_file_atomic(
      index, safetensors_index(
                 {{"a", "model-00001-of-00002.safetensors"}, {"b", "model-00002-of-00002.safetensors"}}, 16));
  CHECK(read_json(index).at("metadata").get_int("total_size") == 16);
  const SafetensorsSet set(dir.path());
  CHECK(set.names() == std::vector<std::string>{"a", "b"});
  CHECK(set.total_bytes() == 16);
  float x[2];
  set.read("b", x, 8);
  CHECK(x[1] == 4);
  set.read_rows("a", 1, 1, x);
  CHECK(x[0] == 2);
  CHECK(SafetensorsSet(dir / "model-00001-of-00002.safetensors").names().size() == 1);
  CHECK(error_of([&] { set.at("c"); }).code == 65);

  const auto with_index = [&](const std::string& text) {
    put(index, text);
    return error_of([&] { SafetensorsSet{dir.path()}; });
  };
  for (const char* name : {"../x", "/etc/passwd", "a/b", "", ".."}) {
    const auto caught = with_index(std::string(R"({"weight_map":{"a":")") + name + "\"}}");
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, "plain file name"));
  }
  CHECK(contains(with_index(R"({"weight_map":{"a":"none.safetensors"}})").text, "missing shard"));
  CHECK(contains(with_index(R"({"weight_map":{"b":"model-00001-of-00002.safetensors"}})").text, "is not in"));
  CHECK(contains(with_index(R"({"weight_map":{"a":"model-00002-of-00002.safetensors",)"
                            R"("b":"model-00001-of-00002.safetensors"}})")
                     .text,
                 "is not in"));
  CHECK(with_index("{}").code == 65);
  CHECK(with_index(R"({"weight_map":[]})").code == 65);
  remove_tree(index);
  CHECK(error_of([&] { SafetensorsSet{dir.path()}; }).code == 66);
}

TEST_CASE("safetensors: mutated files are read or refused") {
  const TemporaryDirectory dir;
  int accepted = 0;
  const std::string header = golden_file.substr(8, golden_file.size() - 8 - 61);
  const std::string data = golden_file.substr(golden_file.size() - 61);
  for (int i = 0; i < test::fuzz_iterations() / 4; ++i) {
    // Half of them keep the length right, so that the mutation gets past the first check.
    const auto n = static_cast<uint64_t>(i);
    put(dir / "m",
        i % 2 == 0 ? test::mutated(golden_file, n, 2) : with_length(test::mutated(header, n, 3), data));
    const auto caught = error_of([&] {
      const SafetensorsFile file(dir / "m");
      for (const TensorInfo& t : file.tensors()) {
        std::string bytes(t.bytes(), '\0');
        file.read(t, bytes.data(), bytes.size());
      }
      ++accepted;
    });
    REQUIRE((caught.code == 0 || caught.code == 65));
  }
  CHECK(accepted > 0);
}
