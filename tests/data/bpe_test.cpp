// Byte-pair encoding against the definition: merge the pair of least rank, the leftmost first.

#include "apps/data/bpe.h"

#include "apps/data/piece_cache.h"
#include "core/base/philox.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::data;

namespace {

using Ids = std::vector<int32_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : stream_(seed, 0) {}
  uint64_t below(uint64_t n) { return stream_.bits(counter_++) % n; }

 private:
  PhiloxStream stream_;
  uint64_t counter_ = 0;
};

/// A random vocabulary over a few characters, two of them of several bytes.
struct Vocabulary {
  std::vector<std::string> characters = {"a", "b", "c", "\u00e9", "\u2581", "\u2019", "."};
  std::unordered_map<std::string, int32_t> tokens;
  std::vector<std::string> texts;
  std::vector<BpeModel::Merge> merges;

  Vocabulary(bool bytes, int count, Random& random) {
    if (bytes) {
      for (int b = 0; b < 256; ++b) add(std::string(1, static_cast<char>(b)));
    } else {
      for (int b = 0; b < 256; ++b) add(fmt::format("<0x{:02X}>", b));
      for (const std::string& c : characters) add(c);
    }
    for (int rank = 0; rank < count; ++rank) {
      const auto any = [&] {
        const size_t first = bytes ? 0 : 256;
        if (bytes && random.below(2) == 0) return tokens.at(std::string(1, "abc."[random.below(4)]));
        return static_cast<int32_t>(first + random.below(texts.size() - first));
      };
      const int32_t left = any(), right = any();
      const std::string text = texts[left] + texts[right];
      if (tokens.count(text) == 0) add(text);
      merges.push_back({left, right, tokens.at(text), rank});
    }
  }
  void add(const std::string& text) {
    tokens.emplace(text, static_cast<int32_t>(texts.size()));
    texts.push_back(text);
  }
  std::string text(Random& random, size_t length) const {
    std::string result;
    for (size_t i = 0; i < length; ++i) result += characters[random.below(characters.size())];
    return result;
  }

  // `ids` of single symbols, merged.
  Ids merged(Ids ids) const {
    while (true) {
      const BpeModel::Merge* best = nullptr;
      size_t at = 0;
      for (size_t i = 0; i + 1 < ids.size(); ++i)
        for (size_t m = merges.size(); m-- > 0;)  // the last of equal pairs counts
          if (merges[m].left == ids[i] && merges[m].right == ids[i + 1]) {
            if (best == nullptr || merges[m].rank < best->rank) best = &merges[m], at = i;
            break;
          }
      if (best == nullptr) return ids;
      ids[at] = best->result;
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
  }
};

}  // namespace

TEST_CASE("pieces of any length are merged in the order of ranks", "[tokenizer][bpe]") {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    const bool bytes = seed % 2 == 0;
    // Few merges leave places at which a piece is divided, many leave none.
    const Vocabulary vocabulary(bytes, seed % 4 < 2 ? 5 : 60, random);
    BpeModel::Options options;
    options.byte_symbols = bytes;
    options.byte_fallback = !bytes;
    options.ignore_merges = seed % 3 == 2;
    const BpeModel model(options, vocabulary.tokens, vocabulary.merges);
    for (int i = 0; i < 150; ++i) {
      const std::string text = vocabulary.text(random, 1 + random.below(i % 10 == 0 ? 200 : 20));
      Ids symbols;
      for (size_t at = 0; at < text.size();) {
        size_t end = at + 1;
        while (!bytes && end < text.size() && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) ++end;
        symbols.push_back(model.find(std::string_view(text).substr(at, end - at)));
        at = end;
      }
      const int32_t whole = options.ignore_merges ? model.find(text) : -1;
      const Ids expected = whole >= 0 ? Ids{whole} : vocabulary.merged(symbols);
      CAPTURE(seed, text);
      for (int round = 0; round < 2; ++round) {  // then from the cache
        Ids ids;
        CHECK(model.encode(text, ids, model.workspace()) == 0);
        REQUIRE(ids == expected);
      }
    }
  }
}

TEST_CASE("merges with the ids of bytes or of the unknown token keep a piece whole", "[tokenizer][bpe]") {
  // z has no token: it becomes the id of its byte or the unknown token, and then merges with a.
  for (const bool fallback : {false, true}) {
    std::unordered_map<std::string, int32_t> tokens = {{"a", 300}, {"?", 301}, {"joined", 302}};
    for (int b = 0; b < 256; ++b) tokens.emplace(fmt::format("<0x{:02X}>", b), b);
    BpeModel::Options options;
    options.byte_symbols = false;
    options.byte_fallback = fallback;
    options.unknown = 301;
    const BpeModel model(options, tokens, {{fallback ? 'z' : 301, 300, 302, 0}});
    Ids ids;
    model.encode("aza", ids, model.workspace());
    CHECK(ids == Ids{300, 302});
  }
}

TEST_CASE("a symbol without a token vanishes before its neighbors merge", "[tokenizer][bpe]") {
  for (const bool bytes : {false, true}) {
    BpeModel::Options options;
    options.byte_symbols = bytes;
    options.byte_fallback = false;
    const BpeModel model(options, {{"a", 0}, {"b", 1}, {"ab", 2}}, {{0, 1, 2, 0}});
    for (const size_t count : {1, 4, 12, 50}) {  // in the cache of pieces and beyond
      std::string text;
      for (size_t i = 0; i < count; ++i) text += "axb";
      CAPTURE(bytes, count);
      Ids ids;
      model.encode(text, ids, model.workspace());
      CHECK(ids == Ids(count, 2));
    }
  }
}

TEST_CASE("a cache of pieces tells all of them apart", "[tokenizer][bpe]") {
  Random random(1);
  std::vector<std::string> pieces;
  for (size_t length = 1; length <= PieceCache::max_bytes; ++length) {
    std::string piece(length, 'a');
    pieces.push_back(piece);
    for (size_t i = 0; i < length; ++i) {
      std::string other = piece;
      other[i] = i % 2 == 0 ? 'b' : '\0';
      pieces.push_back(other);
    }
  }
  for (size_t i = 0; i < pieces.size(); ++i)
    for (size_t k = 0; k < pieces.size(); ++k) {
      const bool same = PieceCache::key(pieces[i]).holds(PieceCache::key(pieces[k]));
      if (same != (i == k)) FAIL(i << " and " << k);
    }
  PieceCache cache;
  CHECK_FALSE(cache.slot(PieceCache::key("a")).holds(PieceCache::key("a")));
  cache.slot(PieceCache::key("a")) = PieceCache::key("a");
  CHECK(cache.slot(PieceCache::key("a")).holds(PieceCache::key("a")));
}
