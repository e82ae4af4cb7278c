// tokenizer.json files of Hugging Face's `tokenizers` with a BPE model: GPT-2, Llama 2 and 3,
// Mistral, Qwen, ...

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <span>

#include "apps/data/added_tokens.h"
#include "apps/data/bpe.h"
#include "apps/data/hf_pipeline.h"
#include "apps/data/offset_map.h"
#include "apps/data/tokenizer.h"
#include "apps/data/tokenizer_traits.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"

namespace nrl::data {
namespace {

constexpr uint64_t max_file_bytes = 64ull << 20;

class HfTokenizer final : public Tokenizer {
 public:
  explicit HfTokenizer(const std::string& path)
      : Tokenizer(traits_beside(path)), text_(read_file(path, max_file_bytes)) {
    const JsonValue root = parse_json(text_, path);
    pipeline_ = std::make_unique<HfPipeline>(root.find("normalizer"), root.find("pre_tokenizer"));
    const JsonValue& model = root.at("model");
    read_vocabulary(model, root.find("added_tokens"));
    read_model(model);
    find_names();
  }

  int64_t encode(std::string_view text, std::vector<int32_t>& out) const override {
    return encode(text, out, nullptr);
  }
  int64_t encode_spans(std::string_view text, std::vector<int32_t>& ids,
                       std::vector<int64_t>& ends) const override {
    return encode(text, ids, &ends);
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    bool first = !pipeline_->byte_level() && pipeline_->adds_space();
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size())
        fail(Exit::data, "token {} is not in the vocabulary of {}", id, vocab_size());
      const Token& token = tokens_[id];
      if (token.special) continue;
      text += first && token.text.starts_with(' ') ? token.text.substr(1) : token.text;
      first = false;
    }
    return text;
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> eos() const override { return eos_; }
  std::optional<int32_t> id_of(std::string_view token) const override {
    const std::string name(token);
    if (const auto found = added_ids_.find(name); found != added_ids_.end()) return found->second;
    if (const auto found = ids_.find(name); found != ids_.end()) return found->second;
    return std::nullopt;
  }
  std::vector<SpecialToken> special_token_list() const override {
    const std::vector<int32_t> ends = eos_ids();
    std::vector<SpecialToken> list;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const auto id = static_cast<int32_t>(i);
      if (tokens_[i].special || std::binary_search(ends.begin(), ends.end(), id))
        list.push_back({tokens_[i].text, id});
    }
    return list;
  }
  std::string_view kind() const override { return "hf"; }
  std::vector<File> files() const override {
    std::vector<File> all{{"tokenizer.json", text_}};
    carry(traits_.files, all);
    const auto missing = [&](std::string_view name) {
      return std::none_of(all.begin(), all.end(), [&](const File& file) { return file.name == name; });
    };
    JsonValue names = JsonValue::object();
    for (const auto& [key, token] : names_) names.set(key, token);
    if (missing("special_tokens_map.json"))
      all.push_back({"special_tokens_map.json", names.dump(1) + "\n", true});
    if (missing("tokenizer_config.json")) {
      // Without it transformers uses the tokenizer class of the model family, whose normalizer and
      // pre-tokenizer replace those of tokenizer.json.
      names.set("tokenizer_class", "PreTrainedTokenizerFast");
      names.set("clean_up_tokenization_spaces", false);
      all.push_back({"tokenizer_config.json", names.dump(1) + "\n", true});
    }
    return all;
  }

 private:
  // `ends`: if not null, receives the end of each token in `text`.
  int64_t encode(std::string_view text, std::vector<int32_t>& out, std::vector<int64_t>* ends) const {
    require_utf8(text);
    BpeModel::Workspace& workspace = bpe_->workspace();
    int64_t skipped = 0;
    HfPipeline::Marked marked;
    OffsetMaps normalization;
    const std::function<void(std::string_view)> model = [&](std::string_view piece) {
      skipped += bpe_->encode(piece, out, workspace, ends, ends ? piece.data() - marked.begin : 0);
    };
    const auto push = [&](int32_t id, size_t end) {
      out.push_back(id);
      if (ends) ends->push_back(static_cast<int64_t>(end));
    };
    // Converts the ends from index `first` on to offsets in the text of which a part was encoded.
    const auto convert_ends = [&](size_t first, OffsetMaps& maps, size_t part) {
      const auto changed = std::span(*ends).subspan(first);
      convert(maps, changed);
      if (part > 0)
        for (int64_t& end : changed) end += static_cast<int64_t>(part);
    };
    raw_added_.split(
        text,
        [&](size_t begin, size_t end) {
          std::string_view segment = text.substr(begin, end - begin);
          std::string normalized;
          normalization.clear();
          if (pipeline_->normalizes())
            segment = normalized = pipeline_->normalize(segment, ends ? &normalization : nullptr);
          const size_t first_of_segment = ends ? ends->size() : 0;
          normalized_added_.split(
              segment,
              [&](size_t b, size_t e) {
                const size_t first = ends ? ends->size() : 0;
                pipeline_->split(segment.substr(b, e - b), begin == 0 && b == 0, model,
                                 ends ? &marked : nullptr);
                if (ends) convert_ends(first, marked.maps, b);
              },
              push);
          if (ends) convert_ends(first_of_segment, normalization, begin);
        },
        push);
    return skipped;
  }

  struct Token {
    std::string text;  // decoded
    bool special = false;
  };

  Token& token_at(int32_t id) {
    if (static_cast<size_t>(id) >= tokens_.size()) tokens_.resize(static_cast<size_t>(id) + 1);
    return tokens_[id];
  }

  // The text of a model token.
  std::string decoded(const std::string& token) const {
    std::string text;
    if (pipeline_->byte_level()) return byte_level_bytes(token, text) ? text : token;
    if (token.size() == 6 && token.starts_with("<0x") && token.ends_with('>')) {
      char* end = nullptr;
      const long byte = std::strtol(token.c_str() + 3, &end, 16);
      if (end == token.c_str() + 5) return std::string(1, static_cast<char>(byte));
    }
    for (size_t at = 0; at < token.size();) {
      const bool space = std::string_view(token).substr(at).starts_with(space_mark);
      text += space ? ' ' : token[at];
      at += space ? space_mark.size() : 1;
    }
    return text;
  }

  void read_vocabulary(const JsonValue& model, const JsonValue* added) {
    if (const std::string type = model.get_string("type", "BPE"); type != "BPE")
      fail(Exit::data, "{}the model type '{}' is not supported; expected BPE", model.where(), type);
    const JsonObject& vocab = model.at("vocab").members();
    const size_t entries = vocab.size() + (added ? added->items().size() : 0);
    const auto id_of = [&](const JsonValue& value) {
      const int64_t id = value.as_int();
      // Ids index tables, so gaps are allowed, but not arbitrarily large ids.
      if (id < 0 || static_cast<size_t>(id) >= 4 * entries + 65536)
        fail(Exit::data, "{}token id {} is out of range for {} tokens", value.where(), id, entries);
      return static_cast<int32_t>(id);
    };
    std::vector<bool> used(4 * entries + 65536, false);
    for (const JsonMember& member : vocab) {
      const int32_t id = id_of(member.value);
      if (used[id]) fail(Exit::data, "{}token id {} is used twice", member.value.where(), id);
      used[id] = true;
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
      const bool normalized = entry.get_bool("normalized", true);
      const AddedToken token{.content = normalized ? pipeline_->normalize(content) : content,
                             .id = id,
                             .strip_left = entry.get_bool("lstrip", false),
                             .strip_right = entry.get_bool("rstrip", false)};
      (normalized ? normalized_added_ : raw_added_).add(token);
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
          fail(Exit::data, "{}a merge has {} parts; expected 2", entry.where(), entry.items().size());
        left = entry.items()[0].as_string();
        right = entry.items()[1].as_string();
      } else {
        const std::string& pair = entry.as_string();
        const size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos)
          fail(Exit::data, "{}the merge '{}' must be two tokens separated by a space", entry.where(), pair);
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      }
      const auto id_of = [&](const std::string& token) {
        const auto found = ids_.find(token);
        if (found == ids_.end())
          fail(Exit::data, "{}a merge uses the token '{}', which is not in the vocabulary", entry.where(),
               token);
        return found->second;
      };
      merges.push_back({.left = id_of(left),
                        .right = id_of(right),
                        .result = id_of(left + right),
                        .rank = static_cast<int32_t>(merges.size())});
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

  static TokenizerTraits traits_beside(const std::string& path) {
    constexpr std::string_view name = "tokenizer.json";
    return path.ends_with(name) ? read_tokenizer_traits(path.substr(0, path.size() - name.size()))
                                : TokenizerTraits();
  }

  // Finds the names of the special tokens.
  void find_names() {
    names_ = traits_.special_tokens;
    const auto find_named = [&](const char* key, std::initializer_list<const char*> usual) {
      std::optional<int32_t> id;
      if (const auto name = names_.find(key); name != names_.end()) id = id_of(name->second);
      for (const char* name : usual) {
        if (id) break;
        if ((id = id_of(name))) names_[key] = name;
      }
      return id;
    };
    bos_ = find_named("bos_token", {"<|begin_of_text|>", "<s>", "<bos>"});
    eos_ = find_named("eos_token", {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"});
    if (!traits_.named) traits_.special_tokens = names_;
  }

  std::string text_;
  std::map<std::string, std::string> names_;  // text of special tokens, by "eos_token" etc.
  std::unique_ptr<HfPipeline> pipeline_;
  std::unique_ptr<BpeModel> bpe_;
  AddedTokens raw_added_, normalized_added_;
  std::vector<Token> tokens_;  // by id
  std::unordered_map<std::string, int32_t> ids_, added_ids_;
  std::optional<int32_t> bos_, eos_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_hf_tokenizer(const std::string& path) {
  return std::make_unique<HfTokenizer>(path);
}

}  // namespace nrl::data
