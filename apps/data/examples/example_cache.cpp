#include "apps/data/examples/example_cache.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include <sys/mman.h>

#include "apps/data/examples/example_counts.h"
#include "apps/data/examples/rollout_numbers.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/io/crc32c.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr size_t cache_header_bytes = 4096;
constexpr std::string_view cache_magic = "nrlexmpl";
constexpr uint32_t cache_version = 2;
constexpr size_t cache_buffer_bytes = size_t{1} << 20;
constexpr uint64_t most_examples = uint64_t{1} << 36, most_tokens = uint64_t{1} << 42,
                   most_facts = uint64_t{64} << 20;

struct CacheHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_crc;  ///< of the header with 0 here
  uint32_t crc;         ///< of everything after the header
  uint32_t sequences;   ///< per example
  uint64_t examples, tokens, facts_bytes;
  uint32_t columns;  ///< bits, see column_bits()
  uint32_t top_k;
  uint64_t top_rows;
  char unused[cache_header_bytes - 64];
};
static_assert(sizeof(CacheHeader) == cache_header_bytes);

constexpr uint32_t groups_bit = uint32_t{1} << (example_values + token_log_probs);
// Columns that need one sequence per example.
constexpr uint32_t single_bits = ((uint32_t{1} << token_log_probs) - 1) << example_values | groups_bit;

uint32_t column_bits(const ExampleColumns& columns) {
  uint32_t bits = columns.groups ? groups_bit : 0;
  for (size_t v = 0; v < example_values; ++v) bits |= uint32_t{columns.values[v]} << v;
  for (size_t k = 0; k < token_log_probs; ++k) bits |= uint32_t{columns.log_probs[k]} << (example_values + k);
  return bits;
}

ExampleColumns columns_of(const CacheHeader& h) {
  ExampleColumns columns;
  for (size_t v = 0; v < example_values; ++v) columns.values[v] = (h.columns >> v & 1) != 0;
  for (size_t k = 0; k < token_log_probs; ++k)
    columns.log_probs[k] = (h.columns >> (example_values + k) & 1) != 0;
  columns.groups = (h.columns & groups_bit) != 0;
  columns.top_k = static_cast<int32_t>(h.top_k);
  return columns;
}

/// Bytes at which the arrays begin, from the end of the header on. Absent ones are empty.
struct CacheLayout {
  uint64_t ids, mask, first, loss, sources, groups, top_first, top_ids, top_log_probs, facts, end = 0;
  std::array<uint64_t, example_values> values;
  std::array<uint64_t, token_log_probs> log_probs;

  explicit CacheLayout(const CacheHeader& h) {
    const ExampleColumns columns = columns_of(h);
    const auto next = [&](uint64_t count, uint64_t bytes) {
      const uint64_t begin = end;
      end += (count * bytes + 7) / 8 * 8;
      return begin;
    };
    ids = next(h.tokens, sizeof(int32_t));
    mask = next((h.tokens + 63) / 64, sizeof(uint64_t));
    first = next(h.examples * h.sequences + 1, sizeof(uint64_t));
    loss = next(h.examples * h.sequences, sizeof(int32_t));
    sources = next(h.examples, sizeof(ExampleSource));
    for (size_t v = 0; v < example_values; ++v)
      values[v] = next(columns.values[v] ? h.examples : 0, sizeof(double));
    groups = next(columns.groups ? h.examples : 0, sizeof(int64_t));
    for (size_t k = 0; k < token_log_probs; ++k)
      log_probs[k] = next(columns.log_probs[k] ? h.tokens : 0, sizeof(float));
    top_first = next(columns.top_k > 0 ? h.examples + 1 : 0, sizeof(uint64_t));
    top_ids = next(h.top_rows * h.top_k, sizeof(int32_t));
    top_log_probs = next(h.top_rows * h.top_k, sizeof(float));
    facts = next(h.facts_bytes, 1);
  }
};

/// A part of the file, and the number that the words in it must be below after `mask` was applied.
struct Section {
  uint64_t begin, end;  ///< bytes, multiples of 8
  uint64_t mask = 0, bound = 1;
  std::string error = {};
};

// Every number of the file is in a section.
std::vector<Section> sections_of(const CacheLayout& at, int64_t vocab_size) {
  const std::string not_finite = "numbers that are not finite",
                    outside = fmt::format("ids outside the vocabulary of {}", vocab_size);
  const auto ids = [&](uint64_t begin, uint64_t end) {
    return Section{.begin = begin,
                   .end = end,
                   .mask = UINT32_MAX,
                   .bound = static_cast<uint64_t>(vocab_size),
                   .error = outside};
  };
  const auto f32 = [&](uint64_t begin, uint64_t end) {
    return Section{.begin = begin, .end = end, .mask = 0x7fffffff, .bound = 0x7f800000, .error = not_finite};
  };
  const auto f64 = [&](uint64_t begin, uint64_t end) {
    return Section{
        .begin = begin, .end = end, .mask = INT64_MAX, .bound = uint64_t{0x7ff} << 52, .error = not_finite};
  };
  return {ids(at.ids, at.mask),
          {.begin = at.mask, .end = at.values[0]},
          f64(at.values[0], at.groups),
          {.begin = at.groups, .end = at.log_probs[0]},
          f32(at.log_probs[0], at.top_first),
          {.begin = at.top_first, .end = at.top_ids},
          ids(at.top_ids, at.top_log_probs),
          f32(at.top_log_probs, at.facts),
          {.begin = at.facts, .end = at.end}};
}

// The largest word of `bytes` bytes after `mask` was applied.
template <class Word>
uint64_t largest(const std::byte* data, uint64_t bytes, uint64_t mask) {
  Word most = 0;
  const Word* const words = reinterpret_cast<const Word*>(data);
  for (uint64_t i = 0; i < bytes / sizeof(Word); ++i)
    most = std::max(most, static_cast<Word>(words[i] & static_cast<Word>(mask)));
  return most;
}

/// The check of a part of a section.
struct PartCheck {
  uint32_t crc = 0;
  uint64_t largest = 0;
};

PartCheck check_part(const std::byte* data, uint64_t begin, uint64_t end, uint64_t mask) {
  constexpr uint64_t block = uint64_t{1} << 20;
  PartCheck check;
  for (uint64_t at = begin; at < end; at += block) {
    const uint64_t bytes = std::min(block, end - at);
    check.crc = crc32c(data + at, bytes, check.crc);
    if (mask == 0) continue;
    check.largest = std::max(check.largest, mask > UINT32_MAX ? largest<uint64_t>(data + at, bytes, mask)
                                                              : largest<uint32_t>(data + at, bytes, mask));
  }
  return check;
}

// Calls `work` for all parts, on as many threads.
void in_parts(uint64_t parts, const std::function<void(uint64_t part)>& work) {
  std::vector<std::thread> workers;
  try {
    for (uint64_t part = 1; part < parts; ++part)
      workers.push_back(start_thread([&work, part] { work(part); }));
  } catch (const Error&) {  // no more threads: this one does the rest
  }
  for (uint64_t part = workers.size() + 1; part < parts; ++part) work(part);
  work(0);
  for (std::thread& worker : workers) worker.join();
}

uint64_t count_bits(std::span<const uint64_t> words, uint64_t begin, uint64_t end) {
  uint64_t count = 0;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bits = std::min(64 - at % 64, end - at);
    const uint64_t word = words[at / 64] >> (at % 64);
    count += static_cast<uint64_t>(std::popcount(bits < 64 ? word & ((uint64_t{1} << bits) - 1) : word));
    at += bits;
  }
  return count;
}

uint64_t mixed(uint64_t h, uint64_t value) {
  h = (h ^ value) * 0x9FB21C651E98DF25ull;
  return h ^ (h >> 29);
}

}  // namespace

void ExampleBatch::begin_record(const std::string& group) {
  if (group_count == 0) first_group = group;
  if (group_count == 0 || group.empty() || group != last_group) ++group_count;
  last_group = group;
}

size_t ExampleBatch::bytes() const {
  size_t numbers = top_ids.size() + top_log_probs.size();
  for (const auto& column : log_probs) numbers += column.size();
  size_t of_examples = groups.size();
  for (const auto& column : values) of_examples += column.size();
  return ids.size() * (sizeof(int32_t) + 1) + lengths.size() * sizeof(SequenceLength) +
         sources.size() * sizeof(ExampleSource) + numbers * sizeof(float) + of_examples * sizeof(double);
}

ExampleCacheWriter::ExampleCacheWriter(const std::string& path, int sequences, const ExampleColumns& columns)
    : file_(path),
      sequences_(sequences),
      columns_(columns),
      mask_(path),
      ends_(path),
      hashes_(path),
      loss_(path),
      sources_(path),
      groups_(path),
      top_first_(path),
      top_ids_(path),
      top_log_probs_(path) {
  for (size_t v = 0; v < example_values; ++v) values_.emplace_back(path);
  for (size_t k = 0; k < token_log_probs; ++k) log_probs_.emplace_back(path);
  if (columns.top_k > 0) top_first_.add(0);
  file_.write(std::string(cache_header_bytes, '\0'));
  ends_.add(0);
}

void ExampleCacheWriter::append(const void* data, size_t bytes) {
  crc_ = crc32c(data, bytes, crc_);
  position_ += bytes;
  buffer_.append(static_cast<const char*>(data), bytes);
  if (buffer_.size() >= cache_buffer_bytes) flush();
}

void ExampleCacheWriter::flush() {
  file_.write(buffer_);
  buffer_.clear();
}

void ExampleCacheWriter::pad() {
  constexpr char zeros[8] = {};
  append(zeros, static_cast<size_t>(-position_ % 8));
}

template <class T>
void ExampleCacheWriter::append_all(const Spool<T>& numbers) {
  numbers.read([&](std::span<const T> block) { append(block.data(), block.size_bytes()); });
  pad();
}

void ExampleCacheWriter::add(const ExampleBatch& batch) {
  NRL_CHECK(batch.lengths.size() == batch.sources.size() * static_cast<size_t>(sequences_) &&
            batch.mask.size() == batch.ids.size());
  append(batch.ids.data(), batch.ids.size() * sizeof(int32_t));
  auto bit = static_cast<uint64_t>(counts_.tokens);
  for (const uint8_t in_loss : batch.mask) {
    word_ |= uint64_t{in_loss} << (bit % 64);
    if (++bit % 64 == 0) {
      mask_.add(word_);
      word_ = 0;
    }
  }
  uint64_t hash = 0;
  size_t at = 0;
  for (size_t i = 0; i < batch.lengths.size(); ++i) {
    const SequenceLength& length = batch.lengths[i];
    if (i % static_cast<size_t>(sequences_) == 0) hash = 0;
    hash = mixed(hash, static_cast<uint64_t>(length.tokens));
    for (const size_t end = at + static_cast<size_t>(length.tokens); at < end; ++at)
      hash = mixed(hash, uint64_t{static_cast<uint32_t>(batch.ids[at])} << 1 | batch.mask[at]);
    if ((i + 1) % static_cast<size_t>(sequences_) == 0) hashes_.add(hash);
    counts_.tokens += length.tokens;
    counts_.loss_tokens += length.loss_tokens;
    ends_.add(static_cast<uint64_t>(counts_.tokens));
    loss_.add(length.loss_tokens);
  }
  for (ExampleSource source : batch.sources) {
    source.row += counts_.records;
    sources_.add(source);
  }
  add_columns(batch);
  counts_.sequences += static_cast<int64_t>(batch.lengths.size());
  counts_.examples += static_cast<int64_t>(batch.sources.size());
  add_counts(counts_, batch.counts);
}

void ExampleCacheWriter::add_columns(const ExampleBatch& batch) {
  const auto add_all = [](auto& spool, const auto& numbers, bool given, size_t count) {
    NRL_CHECK(numbers.size() == (given ? count : 0));
    for (const auto number : numbers) spool.add(number);
  };
  const size_t examples = batch.sources.size();
  for (size_t v = 0; v < example_values; ++v)
    add_all(values_[v], batch.values[v], columns_.values[v], examples);
  for (size_t k = 0; k < token_log_probs; ++k)
    add_all(log_probs_[k], batch.log_probs[k], columns_.log_probs[k], batch.ids.size());
  size_t rows = 0;
  if (columns_.top_k > 0) {
    for (const SequenceLength& length : batch.lengths) {
      rows += static_cast<size_t>(length.loss_tokens);
      top_first_.add(top_rows_ += static_cast<uint64_t>(length.loss_tokens));
    }
  }
  add_all(top_ids_, batch.top_ids, true, rows * static_cast<size_t>(columns_.top_k));
  add_all(top_log_probs_, batch.top_log_probs, true, rows * static_cast<size_t>(columns_.top_k));

  NRL_CHECK(batch.groups.size() == (columns_.groups ? examples : 0));
  if (batch.group_count == 0) return;
  const bool joins = !batch.first_group.empty() && batch.first_group == last_group_;
  const int64_t before = record_groups_ - (joins ? 1 : 0);
  for (const int64_t group : batch.groups) {
    if (before + group != last_record_group_) ++example_groups_;
    last_record_group_ = before + group;
    groups_.add(example_groups_ - 1);
  }
  record_groups_ = before + batch.group_count;
  last_group_ = batch.last_group;
}

// Sorts the hashes by parts that fit in memory.
int64_t ExampleCacheWriter::count_duplicates() const {
  constexpr int64_t part_hashes = int64_t{1} << 23;
  const auto parts = static_cast<uint64_t>(1 + hashes_.size() / part_hashes);
  int64_t duplicates = 0;
  std::vector<uint64_t> some;
  for (uint64_t part = 0; part < parts; ++part) {
    some.clear();
    hashes_.read([&](std::span<const uint64_t> block) {
      for (const uint64_t hash : block)
        if (hash % parts == part) some.push_back(hash);
    });
    std::sort(some.begin(), some.end());
    const auto distinct = std::unique(some.begin(), some.end());
    duplicates += some.end() - distinct;
  }
  return duplicates;
}

void ExampleCacheWriter::finish(const std::string& key) {
  counts_.duplicates = count_duplicates();
  if (counts_.tokens % 64 != 0) mask_.add(word_);
  pad();
  append_all(mask_);
  append_all(ends_);
  append_all(loss_);
  append_all(sources_);
  for (const auto& column : values_) append_all(column);
  append_all(groups_);
  for (const auto& column : log_probs_) append_all(column);
  append_all(top_first_);
  append_all(top_ids_);
  append_all(top_log_probs_);
  JsonValue facts = JsonValue::object({{"key", key}});
  facts.set("counts", counts_to_json(counts_));
  const std::string text = facts.dump();
  append(text.data(), text.size());
  pad();
  flush();

  CacheHeader h{};
  std::memcpy(h.magic, cache_magic.data(), cache_magic.size());
  h.version = cache_version;
  h.crc = crc_;
  h.sequences = static_cast<uint32_t>(sequences_);
  h.examples = static_cast<uint64_t>(counts_.examples);
  h.tokens = static_cast<uint64_t>(counts_.tokens);
  h.facts_bytes = text.size();
  h.columns = column_bits(columns_);
  h.top_k = static_cast<uint32_t>(columns_.top_k);
  h.top_rows = top_rows_;
  h.header_crc = crc32c(&h, sizeof h);
  NRL_CHECK(CacheLayout(h).end == position_);
  file_.file().pwrite_all(&h, sizeof h, 0);
  file_.commit();
}

ExampleCache::ExampleCache(const std::string& path, const std::string& key, int64_t vocab_size, int threads) {
  const File file = File::open_read(path, File::Links::refuse);
  bytes_ = file.size();
  if (bytes_ < cache_header_bytes)
    fail(Exit::data, "{}: {} bytes; expected at least {}", path, bytes_, cache_header_bytes);
  map_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    fail(Exit::io, "{}: cannot map: {}", path, std::strerror(errno));
  }
  try {
    check(path, key, vocab_size, threads);
    file.touch();  // in use
  } catch (...) {
    ::munmap(map_, bytes_);
    throw;
  }
}

ExampleCache::~ExampleCache() {
  if (map_) ::munmap(map_, bytes_);
}

void ExampleCache::check(const std::string& path, const std::string& key, int64_t vocab_size, int threads) {
  CacheHeader h;
  std::memcpy(&h, map_, sizeof h);
  const uint32_t header_crc = h.header_crc;
  h.header_crc = 0;
  if (std::string_view(h.magic, sizeof h.magic) != cache_magic)
    fail(Exit::data, "{}: not a cache of examples", path);
  if (h.version != cache_version)
    fail(Exit::data, "{}: version {}; expected {}", path, h.version, cache_version);
  if (crc32c(&h, sizeof h) != header_crc) fail(Exit::data, "{}: the header is damaged", path);
  if (h.examples > most_examples || h.tokens > most_tokens || h.facts_bytes > most_facts ||
      (h.sequences != 1 && h.sequences != 2) || h.columns >= 2 * groups_bit ||
      h.top_k > static_cast<uint32_t>(most_top_k) || h.top_rows > (h.top_k > 0 ? h.tokens : 0) ||
      (h.sequences == 2 && ((h.columns & single_bits) != 0 || h.top_k > 0)))
    fail(Exit::data, "{}: the sizes in its header are out of range", path);
  const CacheLayout at(h);
  if (bytes_ != cache_header_bytes + at.end)
    fail(Exit::data, "{}: {} bytes; expected {}", path, bytes_, cache_header_bytes + at.end);
  const std::byte* const data = static_cast<const std::byte*>(map_) + cache_header_bytes;
  const auto array = [&]<class T>(std::span<const T>& span, uint64_t begin, uint64_t count) {
    span = {reinterpret_cast<const T*>(data + begin), count};
  };
  const uint64_t sequences = h.examples * h.sequences;
  const ExampleColumns columns = columns_of(h);
  array(arrays_.ids, at.ids, h.tokens);
  array(arrays_.mask, at.mask, (h.tokens + 63) / 64);
  array(arrays_.first, at.first, sequences + 1);
  array(arrays_.loss, at.loss, sequences);
  array(arrays_.sources, at.sources, h.examples);
  for (size_t v = 0; v < example_values; ++v)
    array(arrays_.values[v], at.values[v], columns.values[v] ? h.examples : 0);
  array(arrays_.groups, at.groups, columns.groups ? h.examples : 0);
  for (size_t k = 0; k < token_log_probs; ++k)
    array(arrays_.log_probs[k], at.log_probs[k], columns.log_probs[k] ? h.tokens : 0);
  array(arrays_.top_first, at.top_first, columns.top_k > 0 ? h.examples + 1 : 0);
  array(arrays_.top_ids, at.top_ids, h.top_rows * h.top_k);
  array(arrays_.top_log_probs, at.top_log_probs, h.top_rows * h.top_k);

  // Several threads check a large file, each a part of every section.
  const std::vector<Section> sections = sections_of(at, vocab_size);
  const uint64_t parts = at.end > (4 << 20) ? static_cast<uint64_t>(std::max(threads, 1)) : 1;
  const auto part_of = [&](const Section& section, uint64_t part) {
    const uint64_t bytes = ((section.end - section.begin) / 8 + parts - 1) / parts * 8;
    return std::min(section.begin + part * bytes, section.end);
  };
  std::vector<PartCheck> checks(parts * sections.size());
  in_parts(parts, [&](uint64_t part) {
    for (size_t i = 0; i < sections.size(); ++i)
      checks[i * parts + part] =
          check_part(data, part_of(sections[i], part), part_of(sections[i], part + 1), sections[i].mask);
  });
  uint32_t crc = 0;
  for (size_t i = 0; i < sections.size(); ++i)
    for (uint64_t part = 0; part < parts; ++part)
      crc = crc32c_combine(crc, checks[i * parts + part].crc,
                           part_of(sections[i], part + 1) - part_of(sections[i], part));
  if (crc != h.crc) fail(Exit::data, "{}: damaged: its checksum does not match", path);

  const JsonValue facts =
      parse_json(std::string_view(reinterpret_cast<const char*>(data + at.facts), h.facts_bytes), path,
                 {.string_bytes = most_facts, .text_bytes = most_facts});
  facts_.key = facts.get_string("key");
  if (facts_.key != key) fail(Exit::data, "{}: made of other data or with other options", path);
  facts_.sequences = static_cast<int>(h.sequences);
  facts_.columns = columns;
  facts_.counts = counts_from_json(facts.at("counts"));

  for (size_t i = 0; i < sections.size(); ++i)
    for (uint64_t part = 0; part < parts; ++part)
      if (sections[i].begin < sections[i].end && checks[i * parts + part].largest >= sections[i].bound)
        fail(Exit::data, "{}: {}", path, sections[i].error);
  if (!index_is_consistent()) fail(Exit::data, "{}: the index of its sequences is inconsistent", path);
}

bool ExampleCache::index_is_consistent() const {
  const auto& [ids, mask, first, loss, sources, values, log_probs, groups, top_first, top_ids,
               top_log_probs] = arrays_;
  if (first[0] != 0 || first[loss.size()] != ids.size()) return false;
  for (size_t i = 0; i < loss.size(); ++i)
    if (first[i] >= first[i + 1] || first[i + 1] > ids.size() || first[i + 1] - first[i] > INT32_MAX ||
        loss[i] < 0 || count_bits(mask, first[i], first[i + 1]) != static_cast<uint64_t>(loss[i]) ||
        (mask[first[i] / 64] >> (first[i] % 64) & 1) != 0)
      return false;
  for (size_t i = 0; i < groups.size(); ++i)
    if (i == 0 ? groups[i] != 0 : groups[i] != groups[i - 1] && groups[i] != groups[i - 1] + 1) return false;
  if (top_first.empty()) return true;
  for (size_t i = 0; i < loss.size(); ++i)
    if (top_first[i + 1] - top_first[i] != static_cast<uint64_t>(loss[i])) return false;
  return top_first[0] == 0 &&
         top_first[loss.size()] * static_cast<uint64_t>(facts_.columns.top_k) == top_ids.size();
}

}  // namespace nrl::data
