#pragma once
// Byte-pair encoding with ranked merges (Sennrich et al. 2016), as the `BPE` model of
// Hugging Face's tokenizer.json.

#include <array>
#include <cstdint>
#include <memory>
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
  /// no unknown token). Throws Error (`data`) on a piece of more than 1 GiB.
  int64_t encode(std::string_view piece, std::vector<int32_t>& out, Workspace& workspace) const;

  /// Id of a token, or -1.
  int32_t find(std::string_view token) const;

 private:
  struct MergeSlot {
    uint64_t key = UINT64_MAX;  // left id << 32 | right id
    int32_t rank = 0, result = 0;
  };

  const MergeSlot* find_merge(int32_t left, int32_t right) const;
  int64_t symbols_of(std::string_view piece, std::vector<int32_t>& ids) const;
  void merge_short(std::vector<int32_t>& ids, Workspace& workspace) const;
  void merge_long(std::vector<int32_t>& ids, Workspace& workspace) const;

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };

  const uint64_t instance_;  // identifies the model in thread-local workspaces
  Options options_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> tokens_;
  std::array<int32_t, 256> byte_ids_;
  std::vector<MergeSlot> merges_;  // open addressing, a power of two
};

}  // namespace nrl::data
