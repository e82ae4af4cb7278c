#include "apps/data/text_stream.h"

#include <algorithm>
#include <vector>

#include <zlib.h>
#include <zstd.h>

#include "core/base/error.h"
#include "core/io/atomic_file.h"

namespace nrl::data {

// Reads plain text; compressed formats override read().
struct TextStream::Source {
  explicit Source(const std::string& path) : file(File::open_read(path)), size(file.size()) {}
  virtual ~Source() = default;

  virtual size_t read(char* to, size_t bytes) {
    const auto count = static_cast<size_t>(std::min<uint64_t>(bytes, size - position));
    file.pread_all(to, count, position);
    position += count;
    return count;
  }
  virtual uint64_t consumed() const { return position; }

  File file;
  uint64_t size = 0, position = 0;
};

namespace {

// Buffers compressed bytes for decode(), which decompresses some of them.
class Decompressor : public TextStream::Source {
 public:
  Decompressor(const std::string& path, const char* format) : Source(path), format_(format) {}

  size_t read(char* to, size_t bytes) override {
    size_t done = 0;
    while (done < bytes) {
      if (begin_ == end_) refill();
      // An empty block alone is not the end: a decoder may hold back text that did not fit.
      const size_t written = decode(to + done, bytes - done);
      done += written;
      if (written == 0 && begin_ == end_ && position == size) {
        if (inside_ || !any_)
          fail(Exit::data,
               "{}: truncated: its {} data is incomplete at the end of the file, byte {}. "
               "Fix: copy or compress the file again",
               file.path(), format_, size);
        break;
      }
    }
    return done;
  }
  uint64_t consumed() const override { return position - (end_ - begin_); }

 protected:
  virtual size_t decode(char* to, size_t bytes) = 0;

  [[noreturn]] void damaged(const std::string& why) const {
    fail(Exit::data,
         "{}: invalid {} data at byte {}: {}. Fix: copy or compress the file again, or correct its suffix",
         file.path(), format_, consumed(), why);
  }

  const char* format_;
  std::vector<char> block_ = std::vector<char>(size_t{256} << 10);
  size_t begin_ = 0, end_ = 0;  // the rest of the block
  bool inside_ = false;         // within a member or frame
  bool any_ = false;            // a member or frame has begun

 private:
  void refill() {
    begin_ = 0;
    end_ = Source::read(block_.data(), block_.size());
  }
};

class Gzip final : public Decompressor {
 public:
  explicit Gzip(const std::string& path) : Decompressor(path, "gzip") {
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) throw std::bad_alloc();
  }
  ~Gzip() override { inflateEnd(&stream_); }

 private:
  size_t decode(char* to, size_t bytes) override {
    if (!inside_) {
      // Like gzip, treats zeros after a member as padding.
      while (any_ && begin_ < end_ && block_[begin_] == 0) ++begin_;
      if (begin_ == end_) return 0;
      inflateReset(&stream_);
      inside_ = any_ = true;
    }
    stream_.next_in = reinterpret_cast<Bytef*>(block_.data() + begin_);
    stream_.avail_in = static_cast<uInt>(end_ - begin_);
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(std::min<size_t>(bytes, size_t{1} << 30));
    const uInt room = stream_.avail_out;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    if (status == Z_MEM_ERROR) throw std::bad_alloc();
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
      damaged(stream_.msg != nullptr ? stream_.msg : "unknown error");
    begin_ = end_ - stream_.avail_in;
    inside_ = status != Z_STREAM_END;
    return room - stream_.avail_out;
  }

  z_stream stream_{};
};

class Zstd final : public Decompressor {
 public:
  explicit Zstd(const std::string& path) : Decompressor(path, "zstd"), stream_(ZSTD_createDStream()) {
    if (stream_ == nullptr) throw std::bad_alloc();
  }
  ~Zstd() override { ZSTD_freeDStream(stream_); }

 private:
  size_t decode(char* to, size_t bytes) override {
    ZSTD_inBuffer in{block_.data(), end_, begin_};
    ZSTD_outBuffer out{to, bytes, 0};
    const size_t status = ZSTD_decompressStream(stream_, &out, &in);
    if (ZSTD_isError(status)) damaged(ZSTD_getErrorName(status));
    const bool moved = in.pos > begin_ || out.pos > 0;
    begin_ = in.pos;
    if (moved) inside_ = status != 0, any_ = true;
    return out.pos;
  }

  ZSTD_DStream* stream_;
};

}  // namespace

Compression compression_of(const std::string& path) {
  if (path.ends_with(".gz")) return Compression::gzip;
  if (path.ends_with(".zst")) return Compression::zstd;
  return Compression::none;
}

TextStream::TextStream(const std::string& path, Compression compression) {
  switch (compression) {
    case Compression::gzip:
      source_ = std::make_unique<Gzip>(path);
      break;
    case Compression::zstd:
      source_ = std::make_unique<Zstd>(path);
      break;
    default:
      source_ = std::make_unique<Source>(path);
  }
}

TextStream::~TextStream() = default;

size_t TextStream::read(char* to, size_t bytes) {
  return source_->read(to, bytes);
}

int64_t TextStream::file_bytes() const {
  return static_cast<int64_t>(source_->size);
}

int64_t TextStream::file_position() const {
  return static_cast<int64_t>(source_->consumed());
}

}  // namespace nrl::data
