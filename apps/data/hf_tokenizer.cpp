// tokenizer.json of Hugging Face's `tokenizers` with a BPE model: GPT-2, Llama 2 and 3, Mistral, Qwen and
// their kin.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

#include "apps/data/bpe.h"
#include "apps/data/encode_progress.h"
#include "apps/data/hf_pipeline.h"
#include "apps/data/tokenizer.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr uint64_t kMaxFileBytes = 64ull << 20;

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool strip_left = false, strip_right = false;
};

bool is_space(char32_t c) {
  return c == ' ' || (c >= 9 && c <= 13) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

/// Finds the leftmost token of a list in a text, the longest of those that begin there.
class AddedTokens {
 public:
  void add(AddedToken token) {
    auto& list = by_first_[static_cast<uint8_t>(token.content[0])];
    const auto shorter = [&](const AddedToken& o) { return o.content.size() < token.content.size(); };
    list.insert(std::find_if(list.begin(), list.end(), shorter), std::move(token));
    any_ = true;
  }

  /// Calls gap(begin, end) for the text between tokens, empty or not, and token(id) for the tokens.
  template <class Gap, class Found>
  void split(std::string_view text, Gap&& gap, Found&& found) const {
    size_t done = 0;
    for (size_t at = 0; any_ && at < text.size();) {
      const auto& list = by_first_[static_cast<uint8_t>(text[at])];
      const auto match = std::find_if(list.begin(), list.end(), [&](const AddedToken& t) {
        return text.substr(at).starts_with(t.content);
      });
      if (match == list.end()) {
        ++at;
        continue;
      }
      size_t begin = at, end = at + match->content.size();
      if (match->strip_left) begin = space_before(text, done, begin);
      if (match->strip_right) end = space_after(text, end);
      gap(done, begin);
      found(match->id);
      done = at = end;
    }
    gap(done, text.size());
  }

 private:
  static size_t space_after(std::string_view text, size_t at) {
    for (size_t next = at; next < text.size() && is_space(next_character(text, next));) at = next;
    return at;
  }
  static size_t space_before(std::string_view text, size_t limit, size_t at) {
    while (at > limit) {
      size_t begin = at - 1;
      while (begin > limit && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
      size_t cursor = begin;
      if (!is_space(next_character(text, cursor))) break;
      at = begin;
    }
    return at;
  }

  std::array<std::vector<AddedToken>, 256> by_first_;
  bool any_ = false;
};

class HfTokenizer final : public Tokenizer {
 public:
  explicit HfTokenizer(const std::string& path) : text_(read_file(path, kMaxFileBytes)) {
    const JsonValue root = parse_json(text_, path);
    pipeline_ = std::make_unique<HfPipeline>(root.find("normalizer"), root.find("pre_tokenizer"));
    const JsonValue& model = root.at("model");
    read_vocabulary(model, root.find("added_tokens"));
    read_model(model);
    read_names(path);
  }

  void encode(std::string_view text, std::vector<int32_t>& out) const override {
    if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos)
      fail(Exit::data, "the text is not valid UTF-8 at byte {}", bad);
    thread_local Cache cache;
    if (cache.owner != id_) cache = {id_, std::make_unique<BpeModel::Workspace>()};
    const std::function<void(std::string_view)> model = [&](std::string_view piece) {
      bpe_->encode(piece, out, *cache.workspace);
      if (encode_progress)
        encode_progress->fetch_add(static_cast<int64_t>(piece.size()), std::memory_order_relaxed);
    };
    const auto push = [&](int32_t id) { out.push_back(id); };
    raw_added_.split(
        text,
        [&](size_t begin, size_t end) {
          std::string_view segment = text.substr(begin, end - begin);
          std::string normalised;
          if (pipeline_->normalises()) segment = normalised = pipeline_->normalise(segment);
          normalised_added_.split(
              segment,
              [&](size_t b, size_t e) {
                pipeline_->split(segment.substr(b, e - b), begin == 0 && b == 0, model);
              },
              push);
        },
        push);
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    bool first = !pipeline_->byte_level() && pipeline_->adds_space();
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size())
        fail(Exit::data, "token {} is not in the vocabulary of {}", id, vocab_size());
      const Token& token = tokens_[static_cast<size_t>(id)];
      if (token.special) continue;
      text += first && token.text.starts_with(' ') ? token.text.substr(1) : token.text;
      first = false;
    }
    return text;
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> eos() const override { return eos_; }
  std::string_view kind() const override { return "hf"; }
  std::vector<File> files() const override {
    std::vector<File> all{{"tokenizer.json", text_}};
    if (!config_text_.empty()) all.push_back({"tokenizer_config.json", config_text_});
    return all;
  }

 private:
  struct Token {
    std::string text;  // decoded
    bool special = false;
  };
  struct Cache {
    uint64_t owner = 0;
    std::unique_ptr<BpeModel::Workspace> workspace;
  };

  Token& token_at(int32_t id) {
    if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
    return tokens_[static_cast<size_t>(id)];
  }

  // What a model token stands for in text.
  std::string decoded(const std::string& token) const {
    std::string text;
    if (pipeline_->byte_level()) return byte_level_bytes(token, text) ? text : token;
    if (token.size() == 6 && token.starts_with("<0x") && token.ends_with('>')) {
      char* end = nullptr;
      const long byte = std::strtol(token.c_str() + 3, &end, 16);
      if (end == token.c_str() + 5) return std::string(1, static_cast<char>(byte));
    }
    constexpr std::string_view mark = "\u2581";
    for (size_t at = 0; at < token.size();) {
      const bool space = std::string_view(token).substr(at).starts_with(mark);
      text += space ? ' ' : token[at];
      at += space ? mark.size() : 1;
    }
    return text;
  }

  void read_vocabulary(const JsonValue& model, const JsonValue* added) {
    if (const std::string type = model.get_string("type", "BPE"); type != "BPE")
      fail(Exit::data, "{}the model type '{}' is not supported, only BPE is", model.where(), type);
    const JsonObject& vocab = model.at("vocab").members();
    const size_t entries = vocab.size() + (added ? added->items().size() : 0);
    const auto id_of = [&](const JsonValue& value) {
      const int64_t id = value.as_int();
      // Ids index tables: a few holes are fine, one id in the billions is not.
      if (id < 0 || static_cast<size_t>(id) >= 4 * entries + 65536)
        fail(Exit::data, "{}token id {} is out of range for {} tokens", value.where(), id, entries);
      return static_cast<int32_t>(id);
    };
    std::vector<bool> used(4 * entries + 65536, false);
    for (const JsonMember& member : vocab) {
      const int32_t id = id_of(member.value);
      if (used[static_cast<size_t>(id)])
        fail(Exit::data, "{}token id {} is used twice", member.value.where(), id);
      used[static_cast<size_t>(id)] = true;
      ids_[member.key] = id;
      token_at(id).text = decoded(member.key);
    }
    if (tokens_.empty()) fail(Exit::data, "{}the vocabulary is empty", model.where());
    if (!added || added->is_null()) return;
    for (const JsonValue& entry : added->items()) {
      const int32_t id = id_of(entry.at("id"));
      const std::string& content = entry.get_string("content");
      if (content.empty()) fail(Exit::data, "{}an added token is empty", entry.where());
      if (entry.get_bool("single_word", false))
        fail(Exit::data, "{}the added token '{}' has single_word, which is not supported", entry.where(),
             content);
      token_at(id) = {content, entry.get_bool("special", false)};
      added_ids_[content] = id;
      const bool normalised = entry.get_bool("normalized", true);
      const AddedToken token{normalised ? pipeline_->normalise(content) : content, id,
                             entry.get_bool("lstrip", false), entry.get_bool("rstrip", false)};
      (normalised ? normalised_added_ : raw_added_).add(token);
    }
  }

  void read_model(const JsonValue& model) {
    if (model.get_double("dropout", 0.0) != 0.0)
      fail(Exit::data, "{}BPE dropout is not supported", model.at("dropout").where());
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!model.get_string(key, "").empty())
        fail(Exit::data, "{}{} is not supported", model.at(key).where(), key);
    BpeModel::Options options;
    options.byte_symbols = pipeline_->byte_level();
    options.byte_fallback = model.get_bool("byte_fallback", false);
    options.ignore_merges = model.get_bool("ignore_merges", false);
    options.fuse_unknown = model.get_bool("fuse_unk", false);
    if (const std::string unknown = model.get_string("unk_token", ""); !unknown.empty()) {
      const auto found = ids_.find(unknown);
      if (found == ids_.end())
        fail(Exit::data, "{}unk_token '{}' is not in the vocabulary", model.at("unk_token").where(), unknown);
      options.unknown = found->second;
    }
    std::vector<BpeModel::Merge> merges;
    for (const JsonValue& entry : model.at("merges").items()) {
      std::string left, right;
      if (entry.is_array()) {
        if (entry.items().size() != 2)
          fail(Exit::data, "{}a merge has {} parts, not 2", entry.where(), entry.items().size());
        left = entry.items()[0].as_string();
        right = entry.items()[1].as_string();
      } else {
        const std::string& pair = entry.as_string();
        const size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos)
          fail(Exit::data, "{}the merge '{}' is not two tokens with a space between", entry.where(), pair);
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      }
      const auto id_of = [&](const std::string& token) {
        const auto found = ids_.find(token);
        if (found == ids_.end())
          fail(Exit::data, "{}a merge needs the token '{}', which is missing", entry.where(), token);
        return found->second;
      };
      merges.push_back({id_of(left), id_of(right), id_of(left + right)});
    }
    std::unordered_map<std::string, int32_t> symbols;
    std::string bytes;
    for (const auto& [token, id] : ids_) {
      if (!options.byte_symbols) {
        symbols.emplace(token, id);
      } else if (byte_level_bytes(token, bytes)) {
        symbols.emplace(bytes, id);
      }
    }
    bpe_ = std::make_unique<BpeModel>(options, std::move(symbols), merges);
  }

  std::optional<int32_t> id_of_name(const std::string& name) const {
    if (const auto found = added_ids_.find(name); found != added_ids_.end()) return found->second;
    if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
    return std::nullopt;
  }

  // The names of the end and the beginning token.
  void read_names(const std::string& path) {
    constexpr std::string_view suffix = "tokenizer.json";
    if (path.ends_with(suffix)) {
      const std::string config = path.substr(0, path.size() - suffix.size()) + "tokenizer_config.json";
      if (path_exists(config)) config_text_ = read_file(config, kMaxFileBytes);
      if (!config_text_.empty()) {
        const JsonValue root = parse_json(config_text_, config);
        const auto named = [&](const char* key) -> std::optional<int32_t> {
          const JsonValue* value = root.find(key);
          if (value && value->is_object()) value = value->find("content");
          return value && !value->is_null() ? id_of_name(value->as_string()) : std::nullopt;
        };
        eos_ = named("eos_token");
        bos_ = named("bos_token");
      }
    }
    const auto first_of = [&](std::initializer_list<const char*> names) -> std::optional<int32_t> {
      for (const char* name : names)
        if (const auto id = id_of_name(name)) return id;
      return std::nullopt;
    };
    if (!eos_) eos_ = first_of({"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"});
    if (!bos_) bos_ = first_of({"<|begin_of_text|>", "<s>", "<bos>"});
  }

  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const uint64_t id_ = next_id();  // tells the per-thread caches apart
  std::string text_, config_text_;
  std::unique_ptr<HfPipeline> pipeline_;
  std::unique_ptr<BpeModel> bpe_;
  AddedTokens raw_added_, normalised_added_;
  std::vector<Token> tokens_;  // by id
  std::unordered_map<std::string, int32_t> ids_, added_ids_;
  std::optional<int32_t> bos_, eos_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::string& path) {
  return std::make_unique<HfTokenizer>(path);
}

}  // namespace nrl::data
