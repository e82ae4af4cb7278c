// Sample orders in files that the processes of a node share.
#include "apps/data/order_file.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "apps/data/block_shuffle.h"
#include "apps/data/gpt_index.h"
#include "core/device/cpu/memory.h"
#include "core/io/atomic_file.h"
#include "core/io/crc32c.h"
#include "core/io/file_identity.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using nrl::test::contains;
using nrl::test::error_of;
using nrl::test::TemporaryDirectory;

namespace {

constexpr int64_t any_size = 0;

std::vector<int64_t> numbers(int64_t count, int64_t first) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

// Opens the order `key`, whose array is `values`; `builds` counts how often it was built.
std::optional<MappedOrder> open_numbers(OrderFiles& files, std::string_view key,
                                        const std::vector<int64_t>& values, std::atomic<int>& builds) {
  const auto bytes = static_cast<int64_t>(values.size() * 8);
  return files.open(key, {.arrays = bytes, .built = bytes + 800}, [&](const OrderSpace& space) {
    ++builds;
    space.write(8, std::span(values).subspan(1));
    space.write(0, std::span(values).first(1));
  });
}

bool holds(const std::optional<MappedOrder>& order, const std::vector<int64_t>& values) {
  return order && order->arrays().size() == values.size() * 8 &&
         std::memcmp(order->arrays().data(), values.data(), values.size() * 8) == 0;
}

std::vector<std::string> orders_in(const std::string& directory) {
  std::vector<std::string> out;
  for (const std::string& name : list_directory(directory))
    if (!name.ends_with(".lock")) out.push_back(name);
  return out;
}

std::vector<int32_t> lengths_of(int count) {
  std::vector<int32_t> out;
  for (int i = 0; i < count; ++i) out.push_back(i * 7 % 23 + 1);
  return out;
}

}  // namespace

TEST_CASE("an order is built once, and mapped by those that come later", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int64_t> values = numbers(1000, 5), others = numbers(1000, 6);
  std::atomic<int> builds = 0;
  {
    OrderFiles files({dir / "orders"}, any_size);
    CHECK(holds(open_numbers(files, "a", values, builds), values));
    CHECK(holds(open_numbers(files, "a", values, builds), values));
    CHECK(builds == 1);
  }
  OrderFiles later({dir / "orders"}, any_size);
  const auto mapped = open_numbers(later, "a", others, builds);  // not built: what the file holds
  CHECK(holds(mapped, values));
  CHECK(builds == 1);
  CHECK(holds(open_numbers(later, "b", others, builds), others));
  CHECK(builds == 2);
  CHECK(later.warnings().empty());
  const std::vector<std::string> names = orders_in(dir / "orders");
  REQUIRE(names.size() == 2);
  struct stat st {};
  REQUIRE(::stat((dir / "orders").c_str(), &st) == 0);
  CHECK((st.st_mode & 0777) == 0700);

  // A mapping outlives its file.
  for (const std::string& name : names) remove_tree(join_path(dir / "orders", name));
  CHECK(holds(mapped, values));
}

TEST_CASE("of several processes that need an order at the same time one builds it", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int64_t> values = numbers(50'000, 1);
  std::atomic<int> builds = 0, good = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      OrderFiles files({dir / "orders"}, any_size);
      good += holds(open_numbers(files, "a", values, builds), values);
    });
  for (std::thread& t : threads) t.join();
  CHECK(builds == 1);
  CHECK(good == 8);
}

TEST_CASE("processes that prepare several orders build them at the same time", "[order]") {
  const TemporaryDirectory dir;
  std::atomic<bool> building = false, other_built = false;
  const auto wait_for = [](const std::atomic<bool>& flag) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!flag && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return flag.load();
  };
  const std::vector<char> zeros(8);
  const auto write = [&](const OrderSpace& space) { space.write(0, std::span(zeros)); };
  std::thread first([&] {
    OrderFiles files({dir / "orders"}, any_size);
    files.prepare("a", {8, 8}, [&](const OrderSpace& space) {
      building = true;
      CHECK(wait_for(other_built));
      write(space);
    });
  });
  CHECK(wait_for(building));
  OrderFiles files({dir / "orders"}, any_size);
  int builds = 0;
  const auto build = [&](const OrderSpace& space) { ++builds, write(space); };
  files.prepare("a", {8, 8}, build);  // another one builds it
  CHECK(builds == 0);
  files.prepare("b", {8, 8}, build);
  other_built = true;
  CHECK(files.open("a", {8, 8}, build));  // waits
  files.prepare("b", {8, 8}, build);      // stored
  first.join();
  CHECK(builds == 1);
  CHECK(files.warnings().empty());
  CHECK(orders_in(dir / "orders").size() == 2);
}

TEST_CASE("a damaged order file is built again", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int64_t> values = numbers(1000, 5);
  std::atomic<int> builds = 0;
  OrderFiles first({dir / "orders"}, any_size);
  REQUIRE(open_numbers(first, "a", values, builds));
  const std::string path = join_path(dir / "orders", orders_in(dir / "orders").at(0));
  const std::string good = read_file(path, 1 << 20);
  REQUIRE(good.size() == 4096 + 8000);
  std::vector<std::string> bad{"", good.substr(0, 100), good.substr(0, good.size() - 1), good + "x"};
  for (const size_t at : {size_t{0}, size_t{8}, size_t{12}, size_t{16}, size_t{24}, size_t{28}, size_t{32},
                          size_t{4095}, size_t{4096}, size_t{8000}, good.size() - 1}) {
    bad.push_back(good);
    bad.back()[at] ^= 1;
  }
  for (const std::string& text : bad) {
    write_file_atomic(path, text);
    builds = 0;
    OrderFiles files({dir / "orders"}, any_size);
    CHECK(holds(open_numbers(files, "a", values, builds), values));
    CHECK(builds == 1);
    REQUIRE(files.warnings().size() == 1);
    CHECK(contains(files.warnings()[0], path));
    CHECK(contains(files.warnings()[0], "The sample order was built again"));
    CHECK((read_file(path, 1 << 20) == good));
  }
}

TEST_CASE("an order that cannot be stored is no error", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int64_t> values = numbers(1000, 5);
  std::atomic<int> builds = 0;
  write_file_atomic(dir / "file", "");
  make_directory(dir / "open");
  REQUIRE(::chmod((dir / "open").c_str(), 0777) == 0);
  REQUIRE(::symlink((dir / "open").c_str(), (dir / "link").c_str()) == 0);
  const std::vector<std::string> unusable{dir / "file", dir / "open", dir / "link", dir / "no/such"};
  OrderFiles none(unusable, any_size);
  CHECK_FALSE(open_numbers(none, "a", values, builds));
  CHECK(builds == 0);
  REQUIRE(none.warnings().size() == 1);
  for (const std::string& directory : unusable) CHECK(contains(none.warnings()[0], directory));
  CHECK(contains(none.warnings()[0], "each holds its own"));

  // The next directory is taken instead.
  std::vector<std::string> some = unusable;
  some.push_back(dir / "good");
  OrderFiles files(some, any_size);
  CHECK(holds(open_numbers(files, "a", values, builds), values));
  CHECK(files.warnings().empty());

  // A disk that becomes full.
  OrderFiles full({dir / "full"}, any_size);
  set_file_op_hook([](FileOp op, const std::string&) { return op == FileOp::write ? ENOSPC : 0; });
  const auto stored = open_numbers(full, "a", values, builds);
  set_file_op_hook(nullptr);
  CHECK_FALSE(stored);
  CHECK(full.warnings().size() == 1);
  CHECK(orders_in(dir / "full").empty());
  OrderFiles again({dir / "full"}, any_size);
  CHECK(holds(open_numbers(again, "a", values, builds), values));
  CHECK(again.warnings().empty());
  CHECK(error_of([&] {
          again.open("c", {8, 8}, [](const OrderSpace&) { fail(Exit::data, "no data"); });
        }).text == "no data");

  // More than any disk has: nothing is built for it.
  const auto not_built = [](const OrderSpace&) { fail(Exit::internal, "built"); };
  constexpr int64_t huge = int64_t{1} << 60;
  for (const OrderBytes& bytes : {OrderBytes{huge, huge, 0}, OrderBytes{8, huge, 0}, OrderBytes{8, 8, huge}})
    CHECK_FALSE(again.open("d", bytes, not_built));
}

TEST_CASE("files that were not used for long, and leftovers of a crash, are removed", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int64_t> values = numbers(10, 5);
  std::atomic<int> builds = 0;
  OrderFiles files({dir / "orders"}, any_size);
  REQUIRE(open_numbers(files, "a", values, builds));
  const std::string name = orders_in(dir / "orders").at(0), path = join_path(dir / "orders", name);
  const timespec long_ago[2] = {{1000, 0}, {1000, 0}};
  REQUIRE(::utimensat(AT_FDCWD, path.c_str(), long_ago, 0) == 0);
  REQUIRE(open_numbers(files, "a", values, builds));  // used
  REQUIRE(open_numbers(files, "b", values, builds));
  CHECK(orders_in(dir / "orders").size() == 2);
  REQUIRE(::utimensat(AT_FDCWD, path.c_str(), long_ago, 0) == 0);
  const std::string leftover = join_path(dir / "orders", digest("c") + ".order.tmp-0123456789abcdef");
  write_file_atomic(leftover, "part");
  REQUIRE(open_numbers(files, "c", values, builds));
  CHECK_FALSE(path_exists(path));
  CHECK_FALSE(path_exists(leftover));
  CHECK(orders_in(dir / "orders").size() == 2);
}

TEST_CASE("a builder that is killed leaves nothing that counts as an order", "[order]") {
  static int left;  // operations until the process ends
  const TemporaryDirectory dir;
  const std::vector<int32_t> lengths = lengths_of(200);
  const GptPlan plan = plan_gpt_index(lengths, {0, 200}, 16, 120, "a");
  const ShuffleOptions blocks{.block = 64, .threads = 1};
  const GptIndex memory(plan, lengths, 1);
  int ended = 0;
  for (bool killed = true; killed; ++ended) {
    const std::string directory = dir / fmt::format("orders-{}", ended);
    const pid_t child = ::fork();
    if (child == 0) {
      left = ended;
      set_file_op_hook([](FileOp, const std::string&) {
        if (left-- == 0) ::_exit(7);
        return 0;
      });
      OrderFiles files({directory}, any_size);
      (void)GptIndex(plan, lengths, 1, &files, blocks);
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    killed = WEXITSTATUS(status) != 0;
    const auto before = is_directory(directory) ? orders_in(directory) : std::vector<std::string>();
    const bool whole = before.size() == 1 && before[0].ends_with(".order");
    CHECK((killed || whole));
    OrderFiles files({directory}, any_size);
    const GptIndex index(plan, lengths, 1, &files, blocks);
    CHECK(files.warnings().empty());
    CHECK(std::ranges::equal(index.documents(), memory.documents()));
    CHECK(std::ranges::equal(index.shuffle(), memory.shuffle()));
    const auto after = orders_in(directory);
    REQUIRE(after.size() == 1);
    CHECK(after[0].ends_with(".order"));
  }
  CHECK(ended > 25);
}

TEST_CASE("a shuffle in blocks is the one in memory", "[order]") {
  const TemporaryDirectory dir;
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const auto count = static_cast<int64_t>(round < 50 ? round : random() % 3000);
    const ShuffleOptions options{.block = int64_t{1} << (random() % 10),
                                 .threads = 1 + static_cast<int>(random() % 3)};
    const uint32_t seed = random();
    const auto squares = [](int64_t first, std::span<uint32_t> values) {
      for (uint32_t& value : values) value = static_cast<uint32_t>(first * first), ++first;
    };
    std::vector<uint32_t> want(static_cast<size_t>(count)), got(want.size());
    squares(0, want);
    NumpyRandomState expected(seed), state(seed);
    expected.shuffle(std::span(want));
    const File file = File::create(dir / fmt::format("array-{}", round));
    const OrderSpace space(file, 100, [&] { return File::create(dir / fmt::format("scratch-{}", round)); });
    shuffle_into(space, 20, count, state, squares, options);
    space.read(20, std::span(got));
    CHECK(got == want);
    uint32_t next[2][1];
    expected.draw(1000, next[0], [](uint32_t) {});
    state.draw(1000, next[1], [](uint32_t) {});
    CHECK(next[0][0] == next[1][0]);
    const std::string scratch = dir / fmt::format("scratch-{}", round);
    CHECK(path_exists(scratch) == (options.scratch(count) > 0));
    if (path_exists(scratch))
      CHECK(static_cast<int64_t>(File::open_read(scratch).size()) == options.scratch(count));
  }
}

TEST_CASE("an order is built in a file with the planned memory and space", "[order]") {
  static int64_t most;
  static uint64_t largest;
  const TemporaryDirectory dir;
  const std::vector<int32_t> lengths(5'000'000, 16);
  const GptPlan plan = plan_gpt_index(lengths, {0, 5'000'000}, 16, 4'900'000, "a");
  const ShuffleOptions blocks{.block = int64_t{1} << 18, .threads = 2};
  OrderFiles files({dir / "orders"}, any_size);
  cpu::release_free_heap();
  const int64_t before = cpu::resident_memory().anonymous;
  most = 0, largest = 0;
  set_file_op_hook([](FileOp op, const std::string& path) {
    if (op == FileOp::write) most = std::max(most, cpu::resident_memory().anonymous);
    struct stat st {};
    if (op == FileOp::truncate && ::stat(path.c_str(), &st) == 0) largest = static_cast<uint64_t>(st.st_size);
    return 0;
  });
  const GptIndex index(plan, lengths, 1, &files, blocks);
  set_file_op_hook(nullptr);
  CHECK(files.warnings().empty());
  const int64_t planned = plan.build_memory(blocks);
  CHECK(planned == 5 << 20);
#if !defined(__SANITIZE_ADDRESS__)  // its heap keeps what was freed before and uses it again
  CHECK(most - before > planned / 2);
#endif
  CHECK(most - before <
        planned + (4 << 20));  // buffers of a fixed size, stacks; in memory it takes 20 MB more
  CHECK(largest == static_cast<uint64_t>(plan.bytes(blocks).built) + 4096);
}

TEST_CASE("an order from a file is the one in memory", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int32_t> lengths = lengths_of(500);
  // Each differs from the first in one thing that the order depends on.
  struct Case {
    SplitPart part{0, 500};
    int64_t sequence_length = 16, samples = 900;
    uint32_t seed = 1;
    int changed_length = -1;
  };
  const std::vector<Case> cases{{},
                                {.part = {0, 499}},
                                {.part = {.first = 0, .last = 500, .skip = 0, .drop = 1, .by_tokens = true}},
                                {.sequence_length = 17},
                                {.samples = 901},
                                {.seed = 2},
                                {.changed_length = 77}};
  for (const Case& c : cases) {
    std::vector<int32_t> own = lengths;
    if (c.changed_length >= 0) std::swap(own[77], own[78]);
    const GptPlan plan = plan_gpt_index(own, c.part, c.sequence_length, c.samples, "a");
    const GptIndex memory(plan, own, c.seed);
    OrderFiles files({dir / "orders"}, any_size), other({dir / "blocks"}, any_size);
    for (int time = 0; time < 3; ++time) {
      const GptIndex index(plan, own, c.seed, time < 2 ? &files : &other,
                           time < 2 ? ShuffleOptions{} : ShuffleOptions{.block = 64});
      CHECK(std::ranges::equal(index.documents(), memory.documents()));
      CHECK(std::ranges::equal(index.shuffle(), memory.shuffle()));
      for (int64_t i = 0; i < index.samples(); ++i) {
        REQUIRE(index.start(i).document == memory.start(i).document);
        REQUIRE(index.start(i).offset == memory.start(i).offset);
      }
    }
    CHECK(files.warnings().empty());
  }
  CHECK(orders_in(dir / "orders").size() == cases.size());

  const GptPlan plan = plan_gpt_index(lengths, {0, 500}, 16, 900, "a");
  OrderFiles large({dir / "large"}, plan.bytes().arrays + 1), unusable({dir / "no/such"}, any_size);
  CHECK(GptIndex(plan, lengths, 1, &large).samples() == 900);
  CHECK_FALSE(path_exists(dir / "large"));
  const GptIndex fallback(plan, lengths, 1, &unusable);
  CHECK(std::ranges::equal(fallback.shuffle(), GptIndex(plan, lengths, 1).shuffle()));
  CHECK(unusable.warnings().size() == 1);
}

TEST_CASE("the order of a blend from a file is the one in memory", "[order]") {
  const TemporaryDirectory dir;
  OrderFiles files({dir / "orders"}, any_size);
  const std::vector<int64_t> available{9000, 8000, 7000};
  for (const std::vector<double>& weights : {std::vector<double>{5, 3, 2}, std::vector<double>{5, 2, 3}}) {
    const std::vector<double> shares = normalized_weights(weights);
    const BlendIndex memory(shares, available, 10'000);
    for (int time = 0; time < 2; ++time) {
      const BlendIndex index(shares, available, 10'000, &files);
      REQUIRE(index.samples() == 10'000);
      for (int64_t k = 0; k < 10'000; ++k) {
        REQUIRE(index.at(k).dataset == memory.at(k).dataset);
        REQUIRE(index.at(k).sample == memory.at(k).sample);
      }
    }
  }
  CHECK(orders_in(dir / "orders").size() == 2);
  CHECK(files.warnings().empty());
}

// NRL_BENCH_SAMPLES: samples of the largest order; 1.8e9 are 15 T tokens, and need 20 GB in TMPDIR.
TEST_CASE("time and memory to build, store and map an order", "[.bench]") {
  using Clock = std::chrono::steady_clock;
  const char* scratch = std::getenv("TMPDIR");
  const std::string directory = join_path(scratch && *scratch ? scratch : "/var/tmp", "nrl-order-bench");
  const char* largest = std::getenv("NRL_BENCH_SAMPLES");
  for (const int64_t samples : {int64_t{1'000'000}, int64_t{79'000'000},
                                largest ? static_cast<int64_t>(std::strtod(largest, nullptr)) : 0}) {
    if (samples == 0) continue;
    // 8192 tokens per sample in documents of 8,000, or at most 3e8 of them: one of the sources of a blend.
    const int64_t count = std::min<int64_t>(samples * 8192 / 8000, 300'000'000);
    const std::vector<int32_t> lengths(static_cast<size_t>(count),
                                       static_cast<int32_t>(samples * 8192 / count));
    const GptPlan plan = plan_gpt_index(lengths, {0, count}, 8192, samples * 99 / 100, "bench");
    const int64_t before = cpu::resident_memory().anonymous;
    uint32_t sum = 0;
    const auto measure = [&](const char* what, OrderFiles* files) {
      const auto begin = Clock::now();
      const std::clock_t processor = std::clock();
      std::atomic<bool> done = false;
      std::atomic<int64_t> most = 0;
      std::thread watch([&] {
        while (!done) {
          most = std::max(most.load(), cpu::resident_memory().anonymous - before);
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      });
      const GptIndex index(plan, lengths, 1, files);
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      const double work = static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC;
      done = true;
      watch.join();
      const uint32_t crc = crc32c(index.shuffle().data(), index.shuffle().size_bytes(),
                                  crc32c(index.documents().data(), index.documents().size_bytes()));
      CHECK((sum == 0 || crc == sum));
      sum = crc;
      fmt::print("  {}: {:.2f} s, {:.2f} s of work, at most {:.0f} MB of anonymous memory\n", what, seconds,
                 work, static_cast<double>(most) / 1e6);
      std::fflush(stdout);
    };
    const OrderBytes bytes = plan.bytes();
    fmt::print(
        "{} samples, {} documents: {} B, {} B and {} B of scratch while built in a file; planned {} B of "
        "memory\n",
        plan.kept, count, bytes.arrays, bytes.built, bytes.scratch, plan.build_memory());
    {
      OrderFiles files({directory}, any_size);
      measure("first process of a node", &files);
      measure("others and later starts", &files);
      CHECK(files.warnings().empty());
    }
    remove_tree(directory);
    measure("in memory", nullptr);
  }
}

TEST_CASE("a stored order that the samples of its checksum miss reads no memory of others", "[order]") {
  const TemporaryDirectory dir;
  const std::vector<int32_t> lengths = lengths_of(600'000);
  const GptPlan plan = plan_gpt_index(lengths, {0, 600'000}, 16, 1000, "a");
  OrderFiles files({dir / "orders"}, any_size);
  (void)GptIndex(plan, lengths, 1, &files);
  const std::string path = join_path(dir / "orders", orders_in(dir / "orders").at(0));
  std::string text = read_file(path, 1 << 24);
  // All of the file is spoiled that is in no sampled block.
  const auto bytes = static_cast<size_t>(plan.bytes().arrays), step = (bytes - 16384) / 63;
  REQUIRE(step > 32768);
  const std::string good = text;
  std::memset(text.data() + 4096, 0x7f, bytes);
  each_sample(bytes, 16384, [&](uint64_t begin, uint64_t count) {
    text.replace(4096 + begin, count, good, 4096 + begin, count);
  });
  write_file_atomic(path, text);
  const GptIndex damaged(plan, lengths, 1, &files);
  CHECK(files.warnings().empty());
  int refused = 0;
  for (int64_t i = 0; i < damaged.samples(); ++i) {
    const auto caught = error_of([&] {
      const GptIndex::Start start = damaged.start(i);
      (void)damaged.sequence(start.document);
    });
    refused += caught.code == 65 || caught.code == 70;
  }
  CHECK(refused > 0);
}
