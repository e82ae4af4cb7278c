#include "apps/data/examples/example_cache.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include <sys/mman.h>

#include "apps/data/examples/example_counts.h"
#include "core/base/error.h"
#include "core/base/threads.h"
#include "core/io/crc32c.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr size_t cache_header_bytes = 4096;
constexpr std::string_view cache_magic = "nrlexmpl";
constexpr uint32_t cache_version = 1;
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
  char unused[cache_header_bytes - 48];
};
static_assert(sizeof(CacheHeader) == cache_header_bytes);

/// Bytes at which the arrays begin, from the end of the header on.
struct CacheLayout {
  uint64_t mask, first, loss, sources, margins, facts, end;

  explicit CacheLayout(const CacheHeader& h) {
    const uint64_t sequences = h.examples * h.sequences;
    const auto aligned = [](uint64_t bytes) { return (bytes + 7) / 8 * 8; };
    mask = aligned(h.tokens * 4);
    first = mask + (h.tokens + 63) / 64 * 8;
    loss = first + (sequences + 1) * 8;
    sources = loss + aligned(sequences * 4);
    margins = sources + h.examples * sizeof(ExampleSource);
    facts = margins + (h.sequences == 2 ? h.examples * 8 : 0);
    end = facts + aligned(h.facts_bytes);
  }
};

uint64_t mixed(uint64_t h, uint64_t value) {
  h = (h ^ value) * 0x9FB21C651E98DF25ull;
  return h ^ (h >> 29);
}

}  // namespace

ExampleCacheWriter::ExampleCacheWriter(const std::string& path, int sequences)
    : file_(path),
      sequences_(sequences),
      mask_(path),
      ends_(path),
      hashes_(path),
      loss_(path),
      sources_(path),
      margins_(path) {
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
            batch.margins.size() == batch.sources.size() && batch.mask.size() == batch.ids.size());
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
  if (sequences_ == 2)
    for (const double margin : batch.margins) margins_.add(margin);
  counts_.sequences += static_cast<int64_t>(batch.lengths.size());
  counts_.examples += static_cast<int64_t>(batch.sources.size());
  add_counts(counts_, batch.counts);
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
  append_all(margins_);
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
      (h.sequences != 1 && h.sequences != 2))
    fail(Exit::data, "{}: the sizes in its header are out of range", path);
  const CacheLayout at(h);
  if (bytes_ != cache_header_bytes + at.end)
    fail(Exit::data, "{}: {} bytes; expected {}", path, bytes_, cache_header_bytes + at.end);
  const std::byte* const data = static_cast<const std::byte*>(map_) + cache_header_bytes;
  const auto array = [&]<class T>(std::span<const T>& span, uint64_t begin, uint64_t count) {
    span = {reinterpret_cast<const T*>(data + begin), count};
  };
  const uint64_t sequences = h.examples * h.sequences;
  array(ids_, 0, h.tokens);
  array(mask_, at.mask, (h.tokens + 63) / 64);
  array(first_, at.first, sequences + 1);
  array(loss_, at.loss, sequences);
  array(sources_, at.sources, h.examples);
  array(margins_, at.margins, h.sequences == 2 ? h.examples : 0);

  // The ids are most of the file: several threads check them, each a part.
  const auto parts = static_cast<uint64_t>(std::max(threads, 1));
  const uint64_t part_ids = (h.tokens + parts - 1) / parts;
  std::vector<uint32_t> crcs(parts), largest(parts);
  const auto check_part = [&](uint64_t part) {
    const uint64_t end = std::min((part + 1) * part_ids, h.tokens);
    uint32_t crc = 0, most = 0;
    for (uint64_t i = std::min(part * part_ids, h.tokens); i < end;) {
      const uint64_t count = std::min<uint64_t>(end - i, 1 << 18);
      crc = crc32c(&ids_[i], count * 4, crc);
      for (const int32_t id : ids_.subspan(i, count)) most = std::max(most, static_cast<uint32_t>(id));
      i += count;
    }
    crcs[part] = crc;
    largest[part] = most;
  };
  std::vector<std::thread> workers;
  try {
    for (uint64_t part = 1; part < parts && h.tokens > (1 << 20); ++part)
      workers.push_back(start_thread([&, part] { check_part(part); }));
  } catch (const Error&) {  // no more threads: this one does the rest
  }
  for (uint64_t part = workers.size() + 1; part < parts; ++part) check_part(part);
  check_part(0);
  for (std::thread& worker : workers) worker.join();
  uint32_t crc = crcs[0];
  for (uint64_t part = 1; part < parts; ++part) {
    const uint64_t begin = std::min(part * part_ids, h.tokens), end = std::min(begin + part_ids, h.tokens);
    if (end > begin) crc = crc32c_combine(crc, crcs[part], (end - begin) * 4);
  }
  crc = crc32c(data + h.tokens * 4, at.end - h.tokens * 4, crc);
  if (crc != h.crc) fail(Exit::data, "{}: damaged: its checksum does not match", path);

  const JsonValue facts =
      parse_json(std::string_view(reinterpret_cast<const char*>(data + at.facts), h.facts_bytes), path,
                 {.string_bytes = most_facts, .text_bytes = most_facts});
  facts_.key = facts.get_string("key");
  if (facts_.key != key) fail(Exit::data, "{}: made of other data or with other options", path);
  facts_.sequences = static_cast<int>(h.sequences);
  facts_.counts = counts_from_json(facts.at("counts"));

  if (h.tokens > 0 && *std::max_element(largest.begin(), largest.end()) >= static_cast<uint64_t>(vocab_size))
    fail(Exit::data, "{}: ids outside the vocabulary of {}", path, vocab_size);
  bool ordered = first_[0] == 0 && first_[sequences] == h.tokens;
  for (uint64_t i = 0; i < sequences && ordered; ++i)
    ordered = first_[i] < first_[i + 1] && first_[i + 1] - first_[i] <= INT32_MAX &&
              static_cast<uint64_t>(loss_[i]) < first_[i + 1] - first_[i];
  if (!ordered) fail(Exit::data, "{}: the index of its sequences is inconsistent", path);
}

}  // namespace nrl::data
