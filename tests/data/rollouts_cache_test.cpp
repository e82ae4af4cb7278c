// The file that keeps the numbers of rollouts: the same by any number of threads; damage.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "apps/data/examples/example_cache.h"
#include "apps/data/examples/example_set.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/data/example_files.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

/// The numbers of a record, drawn at random.
struct Drawn {
  std::vector<int32_t> ids;
  double reward = 0;
  std::vector<float> sampler, old;
  std::vector<int32_t> top_ids;
  std::vector<float> top;
  int64_t group = 0;
};

constexpr int32_t prompt_tokens = 2, top_k = 3;

Drawn drawn(int number) {
  const PhiloxStream random(11, static_cast<uint64_t>(number));
  uint64_t n = 0;
  const auto log_prob = [&] { return -static_cast<float>(random.bits(n++) % 4096) / 256; };
  Drawn d;
  d.group = number / 7;
  d.reward = static_cast<double>(random.bits(n++) % 1000) / 3;
  const int completion = 1 + static_cast<int>(random.bits(n++) % 9);
  for (int i = 0; i < prompt_tokens + completion; ++i)
    d.ids.push_back(static_cast<int32_t>(random.bits(n++) % 257));
  for (int i = 0; i < completion; ++i) {
    d.sampler.push_back(log_prob());
    d.old.push_back(log_prob());
    for (int k = 0; k < top_k; ++k) {
      d.top_ids.push_back(static_cast<int32_t>(random.bits(n++) % 80) + 80 * k);
      d.top.push_back(log_prob());
    }
  }
  return d;
}

template <class T>
JsonValue numbers(std::span<const T> values) {
  JsonValue list = JsonValue::array();
  for (const T value : values) list.push_back(JsonValue(value));
  return list;
}
JsonValue numbers(std::span<const float> values) {
  JsonValue list = JsonValue::array();
  for (const float value : values) list.push_back(static_cast<double>(value));
  return list;
}

std::string line_of(const Drawn& d) {
  const std::span<const int32_t> ids = d.ids;
  JsonValue top_ids = JsonValue::array(), top = JsonValue::array();
  for (size_t i = 0; i < d.sampler.size(); ++i) {
    top_ids.push_back(numbers(std::span<const int32_t>(d.top_ids).subspan(i * top_k, top_k)));
    top.push_back(numbers(std::span<const float>(d.top).subspan(i * top_k, top_k)));
  }
  return JsonValue::object({{"prompt_ids", numbers(ids.first(prompt_tokens))},
                            {"completion_ids", numbers(ids.subspan(prompt_tokens))},
                            {"reward", d.reward},
                            {"group", d.group},
                            {"logprobs", numbers(std::span<const float>(d.sampler))},
                            {"old_logprobs", numbers(std::span<const float>(d.old))},
                            {"topk_ids", std::move(top_ids)},
                            {"topk_logprobs", std::move(top)}})
             .dump() +
         "\n";
}

std::string lines_of(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i) lines += line_of(drawn(i));
  return lines;
}

std::string cache_of(const Records& records) {
  for (const std::string& name : list_directory(records.dir.path()))
    if (name.ends_with(".cache")) return records.dir / name;
  return {};
}

bool equal_tokens(std::span<const float> stored, const std::vector<float>& expected) {
  if (stored.size() != expected.size() + prompt_tokens) return false;
  for (size_t t = 0; t < stored.size(); ++t)
    if (stored[t] != (t < prompt_tokens ? 0 : expected[t - prompt_tokens])) return false;
  return true;
}

// Where the numbers of a small cache begin, computed from the description of the file.
struct Offsets {
  size_t tokens, rows, examples;
  size_t ids, mask, first, loss, sources, reward, groups, sampler, old, top_first, top_ids, top, facts;

  Offsets(size_t token_count, size_t row_count, size_t example_count)
      : tokens(token_count), rows(row_count), examples(example_count) {
    size_t at = 4096;
    const auto next = [&](size_t bytes) {
      const size_t begin = at;
      at += (bytes + 7) / 8 * 8;
      return begin;
    };
    ids = next(tokens * 4);
    mask = next((tokens + 63) / 64 * 8);
    first = next((examples + 1) * 8);
    loss = next(examples * 4);
    sources = next(examples * 24);
    reward = next(examples * 8);
    groups = next(examples * 8);
    sampler = next(tokens * 4);
    old = next(tokens * 4);
    top_first = next((examples + 1) * 8);
    top_ids = next(rows * top_k * 4);
    top = next(rows * top_k * 4);
    facts = at;
  }
};

struct SmallCache {
  Records records;
  std::string path, whole, key;
  Offsets at;

  explicit SmallCache(int count) : records(lines_of(count)), at(0, 0, 0) {
    records.options.format = ExampleFormat::rollouts;
    (void)records.open();
    path = cache_of(records);
    whole = read_file(path, most_cache_bytes);
    key = key_in(whole);
    size_t tokens = 0, rows = 0;
    for (int i = 0; i < count; ++i) {
      tokens += drawn(i).ids.size();
      rows += drawn(i).sampler.size();
    }
    at = Offsets(tokens, rows, static_cast<size_t>(count));
    REQUIRE(whole.substr(at.facts, 7) == "{\"key\":");
  }
};

}  // namespace

TEST_CASE("rollouts: a cache gives back all numbers, the same made by any number of threads",
          "[examples][cache][rollouts]") {
  constexpr int count = 4000;  // several chunks; groups go across them
  Records records(lines_of(count));
  records.options.format = ExampleFormat::rollouts;
  (void)records.open(1);
  const std::string path = cache_of(records);
  const std::string first = read_file(path, most_cache_bytes);
  remove_tree(path);
  (void)records.open(4);
  CHECK(read_file(path, most_cache_bytes) == first);
  const auto set = records.open(3);  // mapped and checked by several threads
  REQUIRE(set->size() == count);
  int same = 0;
  for (int i = 0; i < count; ++i) {
    const Drawn d = drawn(i);
    same += std::ranges::equal(set->ids(i, 0), d.ids) && set->value(i, ExampleValue::reward) == d.reward &&
            equal_tokens(set->log_probs(i, TokenLogProbs::sampler), d.sampler) &&
            equal_tokens(set->log_probs(i, TokenLogProbs::old), d.old) &&
            std::ranges::equal(set->top_ids(i), d.top_ids) &&
            std::ranges::equal(set->top_log_probs(i), d.top) && set->group(i) == d.group;
  }
  CHECK(same == count);
}

TEST_CASE("rollouts: the first record that differs is reported by any number of threads",
          "[examples][cache][rollouts]") {
  std::string lines = lines_of(4000);
  lines += "{\"prompt_ids\": [1], \"completion_ids\": [2]}\n" + line_of(drawn(1)) + "{}\n";
  Records records(lines);
  records.options.format = ExampleFormat::rollouts;
  for (const int threads : {1, 4}) {
    const Caught caught = error_of([&] { (void)records.open(threads); });
    CHECK(contains(caught.text, "data.jsonl:4001: \"reward\" is missing"));
    CHECK(contains(caught.text, "data.jsonl:1 has it"));
  }
  CHECK(cache_of(records).empty());
}

TEST_CASE("rollouts: a forged cache is refused", "[examples][cache][rollouts]") {
  const SmallCache cache(9);
  const Offsets& at = cache.at;
  const auto opens = [&] { ExampleCache(cache.path, cache.key, 257, 2); };
  CHECK(error_of(opens).code == 0);
  const auto refused = [&](const char* message, const std::function<void(std::string&)>& forge) {
    std::string forged = cache.whole;
    forge(forged);
    seal(forged);
    write_file_atomic(cache.path, forged);
    const Caught caught = error_of(opens);
    CHECK(caught.code == static_cast<int>(Exit::data));
    CHECK(contains(caught.text, message));
  };
  const auto put = [](size_t place, auto value) {
    return [=](std::string& text) { std::memcpy(text.data() + place, &value, sizeof value); };
  };
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = HUGE_VAL;
  const char* const not_finite = "numbers that are not finite";
  for (const size_t example : {size_t{0}, at.examples - 1}) {
    refused(not_finite, put(at.reward + example * 8, nan));
    refused(not_finite, put(at.reward + example * 8, -infinite));
  }
  for (const size_t begin : {at.sampler, at.old})
    for (const size_t token : {size_t{0}, at.tokens - 1}) {
      refused(not_finite, put(begin + token * 4, static_cast<float>(nan)));
      refused(not_finite, put(begin + token * 4, static_cast<float>(-infinite)));
    }
  for (const size_t i : {size_t{0}, at.rows * top_k - 1}) {
    refused(not_finite, put(at.top + i * 4, static_cast<float>(infinite)));
    refused("ids outside the vocabulary of 257", put(at.top_ids + i * 4, int32_t{257}));
    refused("ids outside the vocabulary of 257", put(at.top_ids + i * 4, int32_t{-1}));
  }
  const char* const inconsistent = "inconsistent";
  refused(inconsistent, put(at.groups, int64_t{1}));
  refused(inconsistent, put(at.groups + 8, int64_t{2}));
  refused(inconsistent, put(at.groups + 8 * 8, int64_t{0}));
  refused(inconsistent, put(at.top_first, uint64_t{1}));
  refused(inconsistent, put(at.top_first + 8, uint64_t{at.rows}));
  refused(inconsistent, put(at.top_first + 9 * 8, uint64_t{at.rows + 1}));
  refused(inconsistent, put(at.top_first + 9 * 8, uint64_t{at.rows - 1}));
  // Another number of loss tokens than the mask has; a loss of the first token.
  refused(inconsistent, [&](std::string& text) { text[at.loss] ^= 1; });
  refused(inconsistent, [&](std::string& text) { text[at.mask] ^= 1; });
  refused(inconsistent, [&](std::string& text) { text[at.mask] ^= 0xc; });
  // Columns that the file has not, or whose rows are too many.
  refused("bytes; expected", put(48, uint32_t{0}));
  refused("out of range", put(48, uint32_t{1} << 6));
  refused("bytes; expected", put(52, uint32_t{top_k + 1}));
  refused("out of range", put(52, uint32_t{1} << 20));
  refused("out of range", put(52, uint32_t{0}));
  refused("bytes; expected", put(56, uint64_t{at.rows + 2}));
  refused("out of range", put(56, uint64_t{at.tokens + 1}));
  refused("out of range", put(20, uint32_t{2}));  // pairs have no groups
}

TEST_CASE("rollouts: every damaged byte is noticed", "[examples][cache][rollouts]") {
  const SmallCache cache(3);
  for (size_t i = 0; i < cache.whole.size(); i += i < 64 || i >= 4096 ? 1 : 97) {
    std::string damaged = cache.whole;
    damaged[i] ^= 0x20;
    write_file_atomic(cache.path, damaged);
    const Caught caught = error_of([&] { ExampleCache(cache.path, cache.key, 257, 1); });
    CAPTURE(i);
    CHECK(caught.code == static_cast<int>(Exit::data));
  }
  const auto set = cache.records.open();
  CHECK(set->size() == 3);
  CHECK(read_file(cache.path, most_cache_bytes) == cache.whole);
}

TEST_CASE("rollouts: a mutation of a cache is refused, or within its bounds",
          "[examples][cache][rollouts][fuzz]") {
  const SmallCache cache(5);
  const std::string facts = cache.whole.substr(cache.at.facts);
  const std::string arrays = cache.whole.substr(4096, cache.at.facts - 4096);
  int opened = 0, refused = 0;
  for (int i = 0; i < fuzz_iterations() / 20; ++i) {
    const auto number = static_cast<uint64_t>(i);
    std::string header = cache.whole.substr(0, 4096), text = arrays;
    if (i % 4 == 0) {
      header = mutated(header.substr(0, 64), number);
      header.resize(4096);
    } else {
      text = mutated(arrays, number);
      if (i % 2 == 0) text.resize(arrays.size());
    }
    std::string file = header + text + facts;
    seal(file);
    write_file_atomic(cache.path, file);
    const Caught caught = error_of([&] {
      const ExampleCache open(cache.path, cache.key, 257, 1);
      ++opened;
      const ExampleCache::Arrays& a = open.arrays();
      const auto k = static_cast<uint64_t>(open.facts().columns.top_k);
      for (size_t e = 0; e < static_cast<size_t>(open.examples()); ++e) {
        double sum = 0;
        uint64_t loss = 0;
        for (uint64_t t = a.first[e]; t < a.first[e + 1]; ++t) {
          REQUIRE(a.ids[t] >= 0);
          REQUIRE(a.ids[t] < 257);
          loss += a.mask[t / 64] >> (t % 64) & 1;
          for (const auto& column : a.log_probs) sum += column.empty() ? 0 : column[t];
        }
        REQUIRE(loss == static_cast<uint64_t>(a.loss[e]));
        for (uint64_t row = k > 0 ? a.top_first[e] * k : 0; k > 0 && row < a.top_first[e + 1] * k; ++row)
          sum += a.top_log_probs[row] + static_cast<float>(a.top_ids[row]);
        for (const auto& column : a.values) sum += column.empty() ? 0 : std::fmod(column[e], 1.0);
        REQUIRE(std::isfinite(sum));
      }
    });
    refused += caught.code != 0;
    if (caught.code != 0) CHECK(caught.code == static_cast<int>(Exit::data));
  }
  CHECK(opened > 0);
  CHECK(refused > 0);
}
