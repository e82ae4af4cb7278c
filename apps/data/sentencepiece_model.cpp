#include "apps/data/sentencepiece_model.h"

#include <bit>
#include <cstring>

namespace nrl::data {
namespace {

using Model = SentencePieceModel;
using Type = Model::PieceType;

// Reads the wire format of protocol buffers; ok() is false after the first malformed byte.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  /// Moves to the next field; false at the end.
  bool next() {
    if (!ok_ || rest_.empty()) return false;
    const uint64_t tag = varint();
    field = tag >> 3;
    text = {};
    value = 0;
    switch (tag & 7) {
      case 0:
        value = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        text = take(varint());
        break;
      case 5:
        if (const std::string_view four = take(4); ok_) {
          uint32_t bits;
          std::memcpy(&bits, four.data(), 4);
          value = bits;
        }
        break;
      default:
        ok_ = false;
    }
    return ok_;
  }

  uint64_t field = 0, value = 0;
  std::string_view text;

 private:
  uint64_t varint() {
    uint64_t result = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(rest_[0]);
      rest_.remove_prefix(1);
      result |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return result;
    }
    ok_ = false;
    return 0;
  }
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view part = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return part;
  }

  std::string_view rest_;
  bool ok_ = true;
};

bool read_piece(std::string_view bytes, Model::Piece& piece) {
  WireReader r(bytes);
  while (r.next()) {
    if (r.field == 1) piece.text = r.text;
    if (r.field == 2) piece.score = std::bit_cast<float>(static_cast<uint32_t>(r.value));
    if (r.field == 3) {
      if (r.value < 1 || r.value > 6) return false;
      piece.type = static_cast<Type>(r.value);
    }
  }
  return r.ok();
}

bool read_trainer(std::string_view bytes, Model& model) {
  WireReader r(bytes);
  while (r.next()) {
    if (r.field == 3) {
      if (r.value < 1 || r.value > 4) return false;
      model.algorithm = static_cast<Model::Algorithm>(r.value);
    }
    if (r.field == 24) model.whitespace_as_suffix = r.value != 0;
    if (r.field == 35) model.byte_fallback = r.value != 0;
  }
  return r.ok();
}

bool read_normalizer(std::string_view bytes, Model& model) {
  WireReader r(bytes);
  while (r.next()) {
    if (r.field == 2) model.charsmap = r.text;
    if (r.field == 3) model.add_dummy_prefix = r.value != 0;
    if (r.field == 4) model.remove_extra_whitespaces = r.value != 0;
    if (r.field == 5) model.escape_whitespaces = r.value != 0;
  }
  return r.ok();
}

bool read_span(std::string_view bytes, SentencePieceSpan& span) {
  WireReader r(bytes);
  while (r.next()) {
    if (r.field == 2) span.id = static_cast<int32_t>(r.value);
    if (r.field == 5) span.end = static_cast<int64_t>(r.value);
  }
  return r.ok();
}

}  // namespace

std::optional<std::vector<SentencePieceSpan>> sentencepiece_spans(std::string_view bytes) {
  std::vector<SentencePieceSpan> spans;
  WireReader r(bytes);
  while (r.next())
    if (r.field == 2 && !read_span(r.text, spans.emplace_back())) return std::nullopt;
  if (!r.ok()) return std::nullopt;
  return spans;
}

std::optional<Model> Model::parse(std::string_view bytes) {
  Model model;
  WireReader r(bytes);
  while (r.next()) {
    bool good = true;
    if (r.field == 1) good = read_piece(r.text, model.pieces.emplace_back());
    if (r.field == 2) good = read_trainer(r.text, model);
    if (r.field == 3) good = read_normalizer(r.text, model);
    if (!good) return std::nullopt;
  }
  if (!r.ok()) return std::nullopt;
  return model;
}

}  // namespace nrl::data
