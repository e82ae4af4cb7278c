#include "apps/train/loop/integrity.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/device/cpu/features.h"
#include "core/ops/kernel_table.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::train;
using test::contains;
using test::error_of;

TEST_CASE("the replica that most others contradict is wrong", "[integrity]") {
  const auto wrong = [](std::vector<int64_t> hashes, std::vector<int> ranks) {
    return compare("t", hashes, ranks);
  };
  CHECK(wrong({5, 5, 9}, {0, 2, 4}).ranks == std::vector<int>{4});
  CHECK(wrong({5, 5, 9}, {0, 2, 4}).majority);
  CHECK(wrong({9, 5, 5, 7, 5}, {8, 6, 4, 2, 0}).ranks == std::vector<int>{2, 8});
  CHECK(wrong({-1, 1}, {3, 1}).ranks == std::vector<int>{1, 3});
  CHECK(!wrong({-1, 1}, {3, 1}).majority);
  CHECK(wrong({1, 1, 2, 2}, {0, 1, 2, 3}).ranks.size() == 4);
  CHECK(wrong({1, 2, 3}, {0, 1, 2}).ranks.size() == 3);
}

TEST_CASE("majorities decide, then the rank that most pairs have in common", "[integrity]") {
  const auto pair = [](int a, int b) { return Difference{.tensor = "t", .ranks = {a, b}}; };
  const auto one = [](int a) { return Difference{.tensor = "t", .ranks = {a}, .majority = true}; };
  CHECK(suspects({}).empty());
  CHECK(suspects(std::vector{pair(0, 1)}) == std::vector<int>{0, 1});
  CHECK(suspects(std::vector{pair(0, 1), pair(1, 3)}) == std::vector<int>{1});
  CHECK(suspects(std::vector{pair(0, 1), one(3), pair(0, 3)}) == std::vector<int>{3});
  CHECK(suspects(std::vector{one(3), one(3), one(1)}) == std::vector<int>{1, 3});
}

TEST_CASE("faults of memory change one number", "[integrity]") {
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  std::vector<float> values{1, 2, 3};
  const Tensor t = make_tensor(values.data(), DType::f32, {3});
  plant(exec, t, {.kind = fault::Kind::flip, .element = 1, .bit = 31});
  CHECK(values == std::vector<float>{1, -2, 3});
  plant(exec, t, {.kind = fault::Kind::nan, .element = 2});
  CHECK(values[1] == -2);
  CHECK(std::isnan(values[2]));
  std::vector<uint16_t> halves{0x3f80, 0x3f80};
  const Tensor bf = make_tensor(halves.data(), DType::bf16, {2});
  plant(exec, bf, {.kind = fault::Kind::flip, .element = 0, .bit = 0});
  CHECK(halves == std::vector<uint16_t>{0x3f81, 0x3f80});
  plant(exec, bf, {.kind = fault::Kind::nan, .element = 1});
  CHECK(halves == std::vector<uint16_t>{0x3f81, 0xffff});
  const auto beyond = error_of([&] { plant(exec, t, {.kind = fault::Kind::flip, .element = 3}); });
  CHECK(beyond.code == 64);
  CHECK(contains(beyond.text, "element 3 of the first tensor does not exist: this rank has 3"));
  CHECK(error_of([&] { plant(exec, bf, {.kind = fault::Kind::flip, .bit = 16}); }).code == 64);
}
