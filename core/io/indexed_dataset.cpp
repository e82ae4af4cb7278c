#include "core/io/indexed_dataset.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/base/philox.h"

namespace nrl {
namespace {

constexpr std::array<char, 9> file_magic = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr int64_t header_bytes = 34;  // magic 9, version 8, dtype 1, sequences 8, document index entries 8
constexpr uint8_t dtype_i32 = 4, dtype_u16 = 8;

int bytes_of_dtype(uint8_t code, const std::string& path) {
  switch (code) {
    case 1:
    case 2:
      return 1;
    case 3:
    case dtype_u16:
      return 2;
    case dtype_i32:
      return 4;
    case 5:
      return 8;
    case 6:
    case 7:
      fail(Exit::data, "{}: dtype {}: token ids must be integers, these are floating-point numbers", path,
           code);
    default:
      fail(Exit::data, "{}: dtype {} is unknown (1..8 are known)", path, code);
  }
}

/// Converts `out.size()` tokens of type T; returns the index of the first one outside [0, vocab_size), or -1.
template <class T>
int64_t to_int32(const char* raw, std::span<int32_t> out, int64_t vocab_size) {
  int64_t bad = -1;
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, raw + i * sizeof(T), sizeof(T));
    const bool fits = value >= T{0} && static_cast<uint64_t>(value) < static_cast<uint64_t>(vocab_size);
    if (!fits && bad < 0) bad = static_cast<int64_t>(i);
    out[i] = static_cast<int32_t>(value);
  }
  return bad;
}

/// Calls `take(i, value)` for `count` numbers of 8 bytes from byte `at` on, block by block.
template <class Take>
void read_i64(const File& file, int64_t at, int64_t count, Take&& take) {
  std::vector<int64_t> block(static_cast<size_t>(std::min<int64_t>(count, 1 << 16)));
  for (int64_t done = 0; done < count;) {
    const int64_t n = std::min(static_cast<int64_t>(block.size()), count - done);
    file.pread_all(block.data(), static_cast<size_t>(8 * n), static_cast<uint64_t>(at + 8 * done));
    for (int64_t i = 0; i < n; ++i) take(done + i, block[i]);
    done += n;
  }
}

int64_t one_token(uint8_t dtype, const char* raw) {
  const auto as = [&](auto zero) {
    std::memcpy(&zero, raw, sizeof(zero));
    return static_cast<int64_t>(zero);
  };
  switch (dtype) {
    case 1:
      return as(uint8_t{});
    case 2:
      return as(int8_t{});
    case 3:
      return as(int16_t{});
    case dtype_u16:
      return as(uint16_t{});
    case dtype_i32:
      return as(int32_t{});
    default:
      return as(int64_t{});
  }
}

}  // namespace

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix), bin_(File::open_read(prefix + ".bin")) {
  load_index(File::open_read(prefix + ".idx"), static_cast<int64_t>(bin_.size()));
}

void IndexedDataset::load_index(const File& file, int64_t bin_bytes) {
  const std::string& path = file.path();
  const auto bytes = static_cast<int64_t>(file.size());
  if (bytes < header_bytes)
    fail(Exit::data, "{}: {} bytes, the header alone has {}: truncated, or not an index", path, bytes,
         header_bytes);
  std::array<char, header_bytes> header;
  file.pread_all(header.data(), header_bytes, 0);
  if (!std::equal(file_magic.begin(), file_magic.end(), header.begin()))
    fail(Exit::data, "{}: magic: does not begin with \"MMIDIDX\", so it is not a Megatron index", path);
  uint64_t version = 0, sequences = 0, entries = 0;
  std::memcpy(&version, header.data() + 9, 8);
  std::memcpy(&dtype_, header.data() + 17, 1);
  std::memcpy(&sequences, header.data() + 18, 8);
  std::memcpy(&entries, header.data() + 26, 8);
  if (version != 1) fail(Exit::data, "{}: version {}: only version 1 is known", path, version);
  token_bytes_ = bytes_of_dtype(dtype_, path);

  // Bound both counts by the file size before using them.
  const auto body = static_cast<uint64_t>(bytes - header_bytes);
  if (sequences > body / 12)
    fail(Exit::data, "{}: sequence count {} needs more than the {} bytes of the file", path, sequences,
         bytes);
  if (sequences > static_cast<uint64_t>(max_sequences))
    fail(Exit::data, "{}: sequence count {}; expected at most {}. Fix: divide the data into several sources",
         path, sequences, max_sequences);
  if (entries == 0)
    fail(Exit::data, "{}: document count is 0: the document index must hold at least its end", path);
  if (entries > body / 8)
    fail(Exit::data, "{}: document count {} needs more than the {} bytes of the file", path, entries, bytes);
  const uint64_t expected = 12 * sequences + 8 * entries;
  const bool has_modes = body == expected + sequences && sequences > 0;
  if (body != expected && !has_modes)
    fail(Exit::data, "{}: size {} bytes, but {} sequences and {} document entries make {}", path, bytes,
         sequences, entries, expected + header_bytes);

  const auto n = static_cast<int64_t>(sequences);
  int64_t at = header_bytes;
  lengths_.resize(sequences);
  file.pread_all(lengths_.data(), 4 * n, at);
  at += 4 * n;
  // The stored byte offsets must agree with the lengths.
  offsets_.reserve(static_cast<size_t>((n + index_stride - 1) / index_stride));
  read_i64(file, at, n, [&](int64_t i, int64_t offset) {
    const int32_t length = lengths_[i];
    if (length < 0) fail(Exit::data, "{}: length of sequence {} is {}", path, i, length);
    if (offset != tokens_ * token_bytes_)
      fail(Exit::data, "{}: offset of sequence {} is byte {}, the lengths before it make {}", path, i, offset,
           tokens_ * token_bytes_);
    if (i % index_stride == 0) offsets_.push_back(tokens_);
    tokens_ += length;  // below bin_bytes / token_bytes + 2^31: cannot overflow
    if (tokens_ > bin_bytes / token_bytes_)
      fail(Exit::data, "{}: sequence {} ends at byte {}, but {}.bin has {} bytes", path, i,
           tokens_ * token_bytes_, prefix_, bin_bytes);
  });
  at += 8 * n;
  if (tokens_ * token_bytes_ != bin_bytes)
    fail(Exit::data, "{}.bin: size {} bytes, but the index counts {} tokens of {} bytes = {}", prefix_,
         bin_bytes, tokens_, token_bytes_, tokens_ * token_bytes_);

  documents_ = static_cast<int64_t>(entries) - 1;
  int64_t before = 0;
  bool one_each = documents_ == n;
  read_i64(file, at, static_cast<int64_t>(entries), [&](int64_t d, int64_t sequence) {
    if (d == 0 && sequence != 0)
      fail(Exit::data, "{}: document index begins with {}, not with 0", path, sequence);
    if (sequence < before)
      fail(Exit::data, "{}: document index falls from {} to {} at entry {}", path, before, sequence, d);
    one_each = one_each && sequence == d;
    before = sequence;
  });
  if (before != n)
    fail(Exit::data, "{}: document index ends with {}, but there are {} sequences", path, before, n);
  if (!one_each) {
    document_index_.resize(entries);
    file.pread_all(document_index_.data(), 8 * static_cast<int64_t>(entries), at);
  }
  at += 8 * static_cast<int64_t>(entries);

  if (has_modes) {
    std::vector<char> modes(sequences);
    file.pread_all(modes.data(), n, at);
    if (std::any_of(modes.begin(), modes.end(), [](char m) { return m != 0; }))
      fail(Exit::data, "{}: sequence modes: only text (mode 0) is supported, this is a multimodal dataset",
           path);
  }
}

int64_t IndexedDataset::first_token(int64_t sequence) const {
  int64_t token = offsets_[sequence / index_stride];
  for (int64_t i = sequence / index_stride * index_stride; i < sequence; ++i) token += lengths_[i];
  return token;
}

int64_t IndexedDataset::document_of(int64_t sequence) const {
  if (document_index_.empty()) return sequence;
  const auto after = std::upper_bound(document_index_.begin(), document_index_.end(), sequence);
  return after - document_index_.begin() - 1;
}

void IndexedDataset::read(int64_t sequence, int64_t offset, std::span<int32_t> out,
                          int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(out.size());
  NRL_CHECK(sequence >= 0 && sequence < sequences() && offset >= 0 && offset + count <= lengths_[sequence],
            "tokens {}+{} of sequence {} in {}", offset, count, sequence, prefix_);
  NRL_CHECK(vocab_size > 0 && vocab_size <= INT32_MAX, "vocab_size {}", vocab_size);
  const int64_t first = first_token(sequence) + offset;
  std::array<char, 65536> raw;
  const int64_t chunk = static_cast<int64_t>(raw.size()) / token_bytes_;
  for (int64_t done = 0; done < count; done += chunk) {
    const int64_t n = std::min(chunk, count - done);
    bin_.pread_all(raw.data(), static_cast<size_t>(n * token_bytes_),
                   static_cast<uint64_t>((first + done) * token_bytes_));
    const auto to = out.subspan(static_cast<size_t>(done), static_cast<size_t>(n));
    int64_t bad = -1;
    switch (dtype_) {
      case 1:
        bad = to_int32<uint8_t>(raw.data(), to, vocab_size);
        break;
      case 2:
        bad = to_int32<int8_t>(raw.data(), to, vocab_size);
        break;
      case 3:
        bad = to_int32<int16_t>(raw.data(), to, vocab_size);
        break;
      case dtype_u16:
        bad = to_int32<uint16_t>(raw.data(), to, vocab_size);
        break;
      case dtype_i32:
        bad = to_int32<int32_t>(raw.data(), to, vocab_size);
        break;
      default:
        bad = to_int32<int64_t>(raw.data(), to, vocab_size);
    }
    if (bad >= 0) {
      const int64_t token = one_token(dtype_, raw.data() + bad * token_bytes_);
      fail(Exit::data, "{}.bin: token {} at position {} (document {}) is {}", prefix_, token,
           first + done + bad, document_of(sequence),
           token < 0 ? std::string("negative") : fmt::format("not below vocab_size {}", vocab_size));
    }
  }
}

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size)
    : prefix_(prefix), vocab_size_(vocab_size), wide_(vocab_size >= 65500) {
  NRL_CHECK(vocab_size > 0 && vocab_size <= INT32_MAX, "vocab_size {}", vocab_size);
  const std::string nonce = random_nonce();
  bin_tmp_ = fmt::format("{}.bin.tmp-{}", prefix, nonce);
  idx_tmp_ = fmt::format("{}.idx.tmp-{}", prefix, nonce);
  bin_ = File::create(bin_tmp_);
}

IndexedDatasetWriter::~IndexedDatasetWriter() {
  if (finished_) return;
  std::remove(bin_tmp_.c_str());
  std::remove(idx_tmp_.c_str());
}

void IndexedDatasetWriter::flush() {
  bin_.pwrite_all(buffer_.data(), buffer_.size(), written_);
  written_ += buffer_.size();
  buffer_.clear();
}

void IndexedDatasetWriter::add_sequence(std::span<const int32_t> tokens) {
  NRL_CHECK(tokens.size() <= INT32_MAX, "a sequence of {} tokens", tokens.size());
  if (static_cast<int64_t>(lengths_.size()) >= max_sequences)
    fail(Exit::data, "{}: more than {} sequences. Fix: divide the input into several datasets", prefix_,
         max_sequences);
  constexpr size_t chunk_tokens = 1 << 18;
  for (size_t done = 0; done < tokens.size(); done += chunk_tokens) {
    const auto part = tokens.subspan(done, std::min(chunk_tokens, tokens.size() - done));
    uint32_t largest = 0;  // as unsigned numbers, of which negative ids are the largest
    for (const int32_t id : part) largest = std::max(largest, static_cast<uint32_t>(id));
    NRL_CHECK(largest < vocab_size_, "token {} with vocab_size {}", static_cast<int32_t>(largest),
              vocab_size_);
    const size_t at = buffer_.size();
    buffer_.resize(at + part.size() * token_bytes());
    if (wide_) {
      std::memcpy(buffer_.data() + at, part.data(), part.size_bytes());
    } else {
      for (size_t i = 0; i < part.size(); ++i) {
        const auto narrow = static_cast<uint16_t>(part[i]);
        std::memcpy(buffer_.data() + at + i * sizeof narrow, &narrow, sizeof narrow);
      }
    }
    if (buffer_.size() >= 4 * chunk_tokens) flush();
  }
  lengths_.push_back(static_cast<int32_t>(tokens.size()));
  tokens_ += static_cast<int64_t>(tokens.size());
}

void IndexedDatasetWriter::end_document() {
  document_index_.push_back(static_cast<int64_t>(lengths_.size()));
}

std::vector<int64_t> IndexedDatasetWriter::byte_offsets() const {
  std::vector<int64_t> offsets(lengths_.size());
  for (size_t i = 1; i < offsets.size(); ++i)
    offsets[i] = offsets[i - 1] + lengths_[i - 1] * static_cast<int64_t>(token_bytes());
  return offsets;
}

void IndexedDatasetWriter::shuffle_documents(uint64_t seed, const std::function<void()>& poll) {
  NRL_CHECK(!finished_ && document_index_.back() == static_cast<int64_t>(lengths_.size()),
            "the last document was not ended");
  flush();
  // Removed now, so that neither an error nor a crash leaves it behind; it remains readable while it is open.
  const File unshuffled = std::move(bin_);
  std::remove(bin_tmp_.c_str());
  bin_tmp_ = fmt::format("{}.bin.tmp-{}", prefix_, random_nonce());
  bin_ = File::create(bin_tmp_);
  written_ = 0;

  // Fisher-Yates.
  std::vector<int64_t> order(static_cast<size_t>(documents()));
  std::iota(order.begin(), order.end(), 0);
  const PhiloxStream random(seed, "prepare.documents");
  for (size_t i = order.size(); i > 1; --i) {
    const PhiloxBlock bits = random.block(i);
    const uint64_t number = uint64_t{bits[0]} << 32 | bits[1];
    std::swap(order[i - 1], order[number % i]);
  }

  const std::vector<int64_t> offsets = byte_offsets(), starts = std::move(document_index_);
  const std::vector<int32_t> lengths = std::move(lengths_);
  constexpr size_t piece = 1 << 20;
  document_index_ = {0};
  lengths_.clear();
  for (const int64_t document : order) {
    if (poll) poll();
    const auto begin = static_cast<size_t>(starts[document]);
    const auto end = static_cast<size_t>(starts[static_cast<size_t>(document) + 1]);
    uint64_t bytes = 0;
    for (size_t s = begin; s < end; ++s) bytes += static_cast<uint64_t>(lengths[s]) * token_bytes();
    for (uint64_t done = 0; done < bytes;) {
      const size_t at = buffer_.size(), count = std::min<uint64_t>(piece, bytes - done);
      buffer_.resize(at + count);
      unshuffled.pread_all(buffer_.data() + at, count, static_cast<uint64_t>(offsets[begin]) + done);
      done += count;
      if (buffer_.size() >= piece) flush();
    }
    lengths_.insert(lengths_.end(), lengths.begin() + static_cast<std::ptrdiff_t>(begin),
                    lengths.begin() + static_cast<std::ptrdiff_t>(end));
    end_document();
  }
}

void IndexedDatasetWriter::write_index() {
  File file = File::create(idx_tmp_);
  uint64_t at = 0;
  const auto put = [&](const void* data, size_t bytes) {
    file.pwrite_all(data, bytes, at);
    at += bytes;
  };
  std::array<char, header_bytes> header;
  const uint64_t version = 1, sequences = lengths_.size(), entries = document_index_.size();
  std::copy(file_magic.begin(), file_magic.end(), header.begin());
  std::memcpy(header.data() + 9, &version, 8);
  header[17] = static_cast<char>(wide_ ? dtype_i32 : dtype_u16);
  std::memcpy(header.data() + 18, &sequences, 8);
  std::memcpy(header.data() + 26, &entries, 8);
  put(header.data(), header.size());
  put(lengths_.data(), lengths_.size() * 4);
  const std::vector<int64_t> offsets = byte_offsets();
  put(offsets.data(), offsets.size() * 8);
  put(document_index_.data(), document_index_.size() * 8);
  file.sync();
  file.close();
}

void IndexedDatasetWriter::finish(const std::function<void()>& before_index) {
  NRL_CHECK(!finished_ && document_index_.back() == static_cast<int64_t>(lengths_.size()),
            "the last document was not ended");
  flush();
  bin_.sync();
  bin_.close();
  write_index();
  // The index is the commit mark: the old one is removed first, the new one renamed last. After a crash no
  // index may be next to another dataset's tokens.
  const std::string idx = prefix_ + ".idx", directory = parent_path(prefix_);
  if (std::remove(idx.c_str()) == 0)
    fsync_directory(directory);
  else if (errno != ENOENT)
    fail(Exit::cannot_create, "{}: cannot replace: {}", idx, std::strerror(errno));
  if (before_index) before_index();
  rename_path(bin_tmp_, prefix_ + ".bin");
  fsync_directory(directory);
  rename_path(idx_tmp_, idx);
  finished_ = true;
  fsync_directory(directory);
}

}  // namespace nrl
