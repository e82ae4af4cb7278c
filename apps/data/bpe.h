#pragma once
// Byte-pair encoding with ranked merges (Sennrich et al. 2016), as the `BPE` model of
// Hugging Face's tokenizer.json.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nrl::data {

/// Encodes pieces of text to token ids. Immutable; any number of threads may encode, each with
/// its own Workspace.
class BpeModel {
 public:
  struct Merge {
    int32_t left, right, result;  ///< ids
    int32_t rank;                 ///< lower ranks first; for equal ranks the leftmost pair
  };
  struct Options {
    bool byte_symbols = true;  ///< start from single bytes (byte-level BPE), else from characters
    /// A character without a token becomes the `<0xNN>` tokens of its bytes, if all exist.
    bool byte_fallback = false;
    bool ignore_merges = false;  ///< a piece that is itself a token is not split, regardless of the merges
    bool fuse_unknown = false;   ///< adjacent unknown characters become one unknown token
    int32_t unknown = -1;        ///< id for symbols without a token; -1: they are skipped
  };
  /// `tokens` maps the text of a token (raw bytes for byte-level BPE) to its id.
  BpeModel(const Options& options, std::unordered_map<std::string, int32_t> tokens,
           const std::vector<Merge>& merges);
  ~BpeModel();

  /// Scratch memory and a cache of recent pieces.
  class Workspace {
   public:
    Workspace();
    ~Workspace();

   private:
    friend class BpeModel;
    struct State;
    std::unique_ptr<State> state_;
  };

  /// The calling thread's workspace for this model.
  Workspace& workspace() const;

  /// Appends the ids of one piece and returns the number of skipped bytes, which have no token (and there is
  /// no unknown token). Adds the encoded bytes to encode_progress. Throws Error (`data`) on a piece of more
  /// than 1 GiB. `ends`: if not null, receives the offset of the end of each token in `piece`, plus `offset`;
  /// skipped bytes count to the token after them.
  int64_t encode(std::string_view piece, std::vector<int32_t>& out, Workspace& workspace,
                 std::vector<int64_t>* ends = nullptr, int64_t offset = 0) const;

  /// Id of a token, or -1.
  int32_t find(std::string_view token) const;

 private:
  struct MergeSlot {
    uint64_t key = UINT64_MAX;  // left id << 32 | right id
    int32_t rank = 0, result = 0;
  };

  /// Pairs of adjacent characters, by their last and first byte, that a merge may join. Merges on both sides
  /// of any other pair are independent, so that the text may be divided there.
  class Joins {
   public:
    /// Classes of characters: their last or first byte, or `mark` for U+2581, which stands for a space.
    static constexpr uint8_t mark = 0xFF;  // not a byte of UTF-8

    void add(uint8_t left, uint8_t right) { bits_[left][right / 64] |= uint64_t{1} << right % 64; }
    bool have(uint8_t left, uint8_t right) const { return bits_[left][right / 64] >> right % 64 & 1; }

   private:
    std::array<std::array<uint64_t, 4>, 256> bits_{};
  };

  void find_joins(const std::vector<Merge>& merges);
  void find_sizes();
  size_t part_end(std::string_view text, size_t begin, size_t& marks) const;
  int64_t encode_part(std::string_view part, std::vector<int32_t>& out, Workspace& workspace,
                      std::vector<int64_t>* ends, int64_t offset) const;
  bool add_known_ends(std::span<const int32_t> ids, size_t bytes, int64_t offset,
                      std::vector<int64_t>& ends) const;
  const MergeSlot* find_merge(int32_t left, int32_t right) const;
  int64_t symbols_of(std::string_view piece, std::vector<int32_t>& ids, std::vector<int32_t>* sizes) const;
  void merge_short(std::vector<int32_t>& ids) const;
  void merge_long(std::vector<int32_t>& ids, Workspace& workspace) const;

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };

  const uint64_t instance_;  // identifies the model in thread-local workspaces
  Options options_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> tokens_;
  std::array<int32_t, 256> byte_ids_;
  std::vector<uint8_t> sizes_;     // bytes of text that a token encodes, by id; 0: not known, or too many
  std::vector<MergeSlot> merges_;  // open addressing, a power of two
  std::unique_ptr<Joins> joins_;   // null: a piece must not be divided
};

}  // namespace nrl::data
