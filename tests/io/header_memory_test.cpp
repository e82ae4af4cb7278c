// The memory that opening a safetensors file with a hostile header takes. A program of its own: it
// counts every allocation.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include <malloc.h>

#include "core/io/safetensors.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

namespace {
std::atomic<size_t> in_use{0}, peak{0};

// The allocator's own word per block counts too.
size_t charged(void* p) {
  return malloc_usable_size(p) + sizeof(size_t);
}
}  // namespace

void* operator new(size_t bytes) {
  void* p = std::malloc(bytes);
  if (p == nullptr) throw std::bad_alloc();
  const size_t now = in_use += charged(p);
  size_t before = peak;
  while (before < now && !peak.compare_exchange_weak(before, now)) {
  }
  return p;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* p) noexcept {
  if (p != nullptr) in_use -= charged(p);
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  operator delete(p);
}

using namespace nrl;

namespace {

struct Measured {
  double per_byte = 0;  ///< peak over the header's size
  int code = 0;
};

Measured open_header(const std::string& path, std::string json, std::string_view data = "") {
  const uint64_t length = json.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  bytes += json;
  bytes += data;
  write_file_atomic(path, bytes);
  bytes = json = std::string();
  const size_t before = in_use;
  peak = before;
  const auto caught = test::error_of([&] { SafetensorsSet files(path); });
  // The constant part: buffers of the reader, and metadata.
  const double taken = static_cast<double>(peak - before) - (1 << 20);
  return {taken / static_cast<double>(length), caught.code};
}

std::string tensors(size_t bytes, const std::string& shape, const std::string& prefix = "") {
  std::string json = "{";
  for (int i = 0; json.size() < bytes; ++i)
    json += (i == 0 ? "\"" : ",\"") + prefix + fmt::format("{:x}", i) +
            "\":{\"dtype\":\"U8\",\"shape\":" + shape + ",\"data_offsets\":[0,0]}";
  return json + "}";
}

}  // namespace

TEST_CASE("a safetensors header takes at most four times its size") {
  const test::TemporaryDirectory dir;
  constexpr size_t size = size_t{4} << 20;
  const std::string path = dir / "f";
  const auto check = [&](const char* what, const Measured& m, int code) {
    CAPTURE(what, m.per_byte);
    CHECK(m.per_byte <= 4);
    CHECK(m.per_byte > 0.5);
    CHECK(m.code == code);
  };
  check("many tensors", open_header(path, tensors(size, "[0]")), 0);
  check("many tensors of 8 dimensions", open_header(path, tensors(size, "[0,1,1,1,1,1,1,1]")), 0);
  check("names of 17 bytes", open_header(path, tensors(size, "[0]", std::string(16, 'n'))), 0);
  check("many dimensions",
        open_header(
            path, "{\"a\":{\"shape\":[1" +
                      [&] {
                        std::string ones;
                        while (ones.size() < size) ones += ",1";
                        return ones;
                      }() +
                      "]}}"),
        65);
  check("one long name", open_header(path, "{\"" + std::string(size, 'n') + "\":1}"), 65);
  check("one long number", open_header(path, "{\"a\":" + std::string(size, '1') + "}"), 65);
  check("spaces", open_header(path, "{" + std::string(size, ' ') + "}"), 0);
  check("deep nesting", open_header(path, "{\"a\":" + std::string(size, '[') + "}"), 65);
  check("not a header", open_header(path, "{" + std::string(size, '{')), 65);
  std::string metadata = "{\"__metadata__\":{";
  for (int i = 0; metadata.size() < size; ++i)
    metadata += fmt::format("{}\"{:x}\":\"\"", i == 0 ? "" : ",", i);
  check("much metadata", open_header(path, metadata + "}}"), 65);
  std::string fields = "{";
  for (int i = 0; fields.size() < size; ++i) fields += fmt::format("{}\"data_offsets\":0", i == 0 ? "" : ",");
  check("what looks like many tensors", open_header(path, fields + "}"), 65);
}
