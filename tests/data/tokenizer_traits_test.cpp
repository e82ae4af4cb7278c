// Files beside a tokenizer: special tokens by name, end tokens, chat templates, and their way into exports.

#include "apps/data/tokenizer_traits.h"

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/special_tokens.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/data/sentencepiece_kinds.h"
#include "tests/data/tokenizer_files.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::data;
using namespace nrl::test;

namespace {

using Ids = std::vector<int32_t>;
using Names = std::map<std::string, std::string>;

// A model directory, with the tokenizer of a fixture unless `fixture` is empty.
class ModelDirectory {
 public:
  explicit ModelDirectory(const std::string& fixture = "gpt2.json") {
    if (!fixture.empty())
      put("tokenizer.json", read_file(std::string(NRL_TEST_DATA) + "/fixtures/" + fixture, 1 << 20));
  }
  void put(const std::string& name, const std::string& content) const {
    write_file_atomic(directory_ / name, content);
  }
  std::unique_ptr<Tokenizer> load() const { return tokenizer_in(directory_.path()); }
  Caught error() const {
    return error_of([&] { load(); });
  }
  const std::string& path() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
};

std::string content_of(const Tokenizer& tokenizer, const std::string& name) {
  for (const auto& file : tokenizer.files())
    if (file.name == name) return file.content;
  return {};
}

}  // namespace

TEST_CASE("special tokens have the names of the files beside the tokenizer", "[tokenizer][traits]") {
  ModelDirectory model;
  CHECK(model.load()->special_tokens() == Names{{"eos_token", "<|endoftext|>"}});
  model.put("tokenizer_config.json",
            R"({"bos_token": null, "eos_token": {"content": "<tool>", "lstrip": false}, "add_bos_token": true,
                "additional_special_tokens": ["<a>", {"content": "<b>"}], "pad_token": "<pad>"})");
  auto tokenizer = model.load();
  CHECK(tokenizer->special_tokens() == Names{{"eos_token", "<tool>"}, {"pad_token", "<pad>"}});
  CHECK(tokenizer->additional_special_tokens() == std::vector<std::string>{"<a>", "<b>"});
  CHECK(tokenizer->eos() == 340);
  // The older files with special_tokens_map.json, which counts if the other one lists no added tokens.
  model.put(
      "special_tokens_map.json",
      R"({"eos_token": "<tool>s", "unk_token": {"content": "<u>"}, "additional_special_tokens": ["<b>", "<c>"]})");
  tokenizer = model.load();
  CHECK(tokenizer->special_tokens() ==
        Names{{"eos_token", "<tool>s"}, {"pad_token", "<pad>"}, {"unk_token", "<u>"}});
  CHECK(tokenizer->additional_special_tokens() == std::vector<std::string>{"<a>", "<b>", "<c>"});
  CHECK(tokenizer->eos() == 341);
  model.put(
      "tokenizer_config.json",
      R"({"eos_token": "<tool>", "added_tokens_decoder": {}, "extra_special_tokens": {"image_token": "<i>"}})");
  tokenizer = model.load();
  CHECK(tokenizer->special_tokens() ==
        Names{{"eos_token", "<tool>"}, {"image_token", "<i>"}, {"unk_token", "<u>"}});
  model.put("tokenizer_config.json", R"({"extra_special_tokens": ["<i>"]})");
  CHECK(model.load()->additional_special_tokens() == std::vector<std::string>{"<i>", "<b>", "<c>"});
}

TEST_CASE("ids of tokens", "[tokenizer][traits]") {
  const ModelDirectory model;
  const auto gpt2 = model.load();
  CHECK(gpt2->id_of("<|endoftext|>") == 0);
  CHECK(gpt2->id_of("<tool>s") == 341);
  CHECK(gpt2->id_of("\u0120the") == gpt2->encode(" the").front());
  CHECK_FALSE(gpt2->id_of("<none>"));
  const auto bytes = make_byte_tokenizer();
  CHECK(bytes->id_of("<|endoftext|>") == 256);
  CHECK(bytes->id_of("\xff") == 255);
  CHECK_FALSE(bytes->id_of("ab"));
  const auto pieces = make_sentencepiece(train({{"byte_fallback", "true"}}), "test");
  CHECK(pieces->id_of("</s>") == pieces->eos());
  CHECK(pieces->id_of("<unk>") == 0);
  CHECK(pieces->id_of("\u2581the") == pieces->encode("the").front());
  CHECK_FALSE(pieces->id_of("<none>"));
  CHECK(pieces->special_tokens() ==
        Names{{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"unk_token", "<unk>"}});
}

TEST_CASE("end tokens are a union of three files", "[tokenizer][traits]") {
  const ModelDirectory model;
  CHECK(model.load()->eos_ids() == Ids{0});
  model.put("config.json", R"({"eos_token_id": 7})");
  CHECK(model.load()->eos_ids() == Ids{0, 7});
  model.put("generation_config.json", R"({"eos_token_id": [340, 7, 5]})");
  CHECK(model.load()->eos_ids() == Ids{0, 5, 7, 340});
  model.put("generation_config.json", R"({"eos_token_id": null})");
  model.put("config.json", R"({"text_config": {"eos_token_id": [1, 106]}})");
  CHECK(model.load()->eos_ids() == Ids{0, 1, 106});
}

TEST_CASE("chat templates", "[tokenizer][traits]") {
  const ModelDirectory model;
  CHECK_FALSE(model.load()->chat_template());
  model.put("tokenizer_config.json", R"({"chat_template": "one\n{{ x }}"})");
  CHECK(model.load()->chat_template() == "one\n{{ x }}");
  CHECK_FALSE(model.load()->chat_template("tool_use"));
  model.put(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})");
  auto tokenizer = model.load();
  CHECK(tokenizer->chat_template() == "d");
  CHECK(tokenizer->chat_template("tool_use") == "t");
  // Files win.
  model.put("chat_template.jinja", "file\n");
  std::filesystem::create_directory(join_path(model.path(), "chat_templates"));
  model.put("chat_templates/rag.jinja", "r");
  model.put("chat_templates/notes.txt", "\xff");
  tokenizer = model.load();
  CHECK(tokenizer->chat_template() == "file\n");
  CHECK(tokenizer->chat_template("tool_use") == "t");
  CHECK(tokenizer->chat_template("rag") == "r");
  CHECK_FALSE(tokenizer->chat_template("notes"));
}

TEST_CASE("malformed files beside a tokenizer are refused with their position", "[tokenizer][traits]") {
  const auto refused = [](const std::string& name, const std::string& content, const std::string& part) {
    ModelDirectory model;
    model.put(name, content);
    const Caught caught = model.error();
    CAPTURE(name, content, caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, "/" + name + ":" + part));
  };
  refused("tokenizer_config.json", "{\n\"eos_token\": 3}", "2:14: ");
  refused("tokenizer_config.json", "[]", "1:1: ");
  refused("tokenizer_config.json", "{\"eos_token\": {\"text\": 3}}", "1:15: ");
  refused("tokenizer_config.json", "{\"chat_template\": 3}", "1:19: ");
  refused("tokenizer_config.json", "{\"chat_template\": [{\"name\": \"a\"}]}", "1:20: ");
  refused("tokenizer_config.json", "{\"additional_special_tokens\": \"<a>\"}", "1:31: ");
  refused("special_tokens_map.json", "{\"unk_token\": []}", "1:15: ");
  refused("generation_config.json", "{\"eos_token_id\": [1, \"2\"]}", "1:22: ");
  refused("generation_config.json", "{\"eos_token_id\": -1}", "1:18: ");
  refused("config.json", "{\"eos_token_id\": 1.5}", "1:18: ");
  refused("chat_template.jinja", "a\nbc\xff", "2:3: ");
}

TEST_CASE("files beside a tokenizer reach exported model directories", "[tokenizer][traits]") {
  const auto copy_of = [](const Tokenizer& tokenizer) {
    auto directory = std::make_unique<ModelDirectory>("");
    write_files(tokenizer, directory->path());
    return directory;
  };
  const std::string generation = R"({"eos_token_id": [0, 340]})";
  const ModelDirectory hf;
  hf.put("chat_template.jinja", "template");
  hf.put("generation_config.json", generation);
  const auto hf_copy = copy_of(*hf.load())->load();
  CHECK(hf_copy->chat_template() == "template");
  CHECK(hf_copy->eos_ids() == Ids{0, 340});
  CHECK(content_of(*hf_copy, "generation_config.json") == generation);

  // A sentencepiece model with the files of another program: these are left alone, and nothing is derived.
  ModelDirectory pieces("");
  const std::string model = train({{"byte_fallback", "true"}});
  pieces.put("tokenizer.model", model);
  const auto own = pieces.load();
  CHECK(contains(content_of(*own, "tokenizer_config.json"), "nrl_tokenizer"));
  const std::string config =
      R"({"tokenizer_class": "LlamaTokenizer", "chat_template": "c", "eos_token": "</s>"})";
  pieces.put("tokenizer_config.json", config);
  const auto copy = copy_of(*pieces.load());
  CHECK(copy->load()->chat_template() == "c");
  CHECK(content_of(*copy->load(), "tokenizer_config.json") == config);
  CHECK_FALSE(path_exists(join_path(copy->path(), "tokenizer.json")));
  // Files that this program derived stay derived, with the template that was put beside them.
  const auto derived = copy_of(*own);
  derived->put("chat_template.jinja", "mine");
  const auto again = copy_of(*derived->load());
  CHECK(again->load()->kind() == "sentencepiece");
  CHECK(again->load()->chat_template() == "mine");
  CHECK(path_exists(join_path(again->path(), "tokenizer.json")));
  for (const auto& file : derived->load()->files())
    CHECK(file.derived == (file.name != "tokenizer.model" && file.name != "chat_template.jinja"));

  const auto bytes = copy_of(*make_byte_tokenizer());
  bytes->put("chat_template.jinja", "b");
  const auto bytes_again = copy_of(*bytes->load());
  CHECK(bytes_again->load()->kind() == "bytes");
  CHECK(bytes_again->load()->chat_template() == "b");
  CHECK(bytes_again->load()->special_tokens() == Names{{"eos_token", "<|endoftext|>"}});

  // Beside PREFIX.model, as of a dataset.
  const TemporaryDirectory dataset;
  write_file_atomic(dataset / "d.model", model);
  write_file_atomic(dataset / "d.chat_template.jinja", "prefix");
  write_file_atomic(dataset / "chat_template.jinja", "other");
  CHECK(load_sentencepiece(dataset / "d.model")->chat_template() == "prefix");
}

TEST_CASE("special tokens are found in text", "[tokenizer][traits]") {
  ModelDirectory model;
  model.put("generation_config.json", R"({"eos_token_id": 341})");
  const SpecialTokenFinder finder(*model.load());
  CHECK(finder.texts() == std::vector<std::string>{"<|endoftext|>", "<tool>s"});  // <tool> is not special
  const std::string text = "x<|endoftext|><tool><tool>s <|endoftext|";
  CHECK(finder.count(text) == 2);
  const auto match = finder.find(text);
  REQUIRE(match);
  CHECK(match->begin == 1);
  CHECK(match->end == 14);
  CHECK(match->id == 0);
  CHECK(finder.find(text, 2)->id == 341);
  CHECK_FALSE(finder.find(text, 27));
  CHECK_FALSE(finder.find("", 0));
  CHECK(finder.count("plain < text <|") == 0);
  const auto pieces = make_sentencepiece(train({{"control_symbols", "<ctl>"}}), "test");
  const SpecialTokenFinder of_pieces(*pieces);
  CHECK(of_pieces.texts() == std::vector<std::string>{"<unk>", "<s>", "</s>", "<ctl>"});
  CHECK(of_pieces.count("<s> a</s><ctl><ud>") == 3);
  CHECK(SpecialTokenFinder(*make_byte_tokenizer()).count("a<|endoftext|>") == 1);
}

TEST_CASE("no mutation of a file beside a tokenizer does harm", "[tokenizer][traits][fuzz]") {
  const std::pair<std::string, std::string> files[] = {
      {"tokenizer_config.json",
       R"({"eos_token":{"content":"<tool>"},"chat_template":[{"name":"default","template":"x"}],)"
       R"("additional_special_tokens":["<a>",{"content":"<b>"}],"extra_special_tokens":{"i":"<i>"}})"},
      {"special_tokens_map.json", R"({"eos_token":"<tool>","unk_token":{"content":"<u>"}})"},
      {"generation_config.json", R"({"eos_token_id":[1,2,3]})"},
      {"config.json", R"({"eos_token_id":[1],"text_config":{"eos_token_id":2}})"},
      {"chat_template.jinja", "{{ \u4e2d }}\n"}};
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  for (int i = 0; i < fuzz_iterations() / 10; ++i) {
    const auto& [name, content] = files[static_cast<size_t>(i) % std::size(files)];
    const std::string changed = mutated(content, static_cast<uint64_t>(i));
    std::filesystem::remove(dir / name);
    File::create(dir / name).pwrite_all(changed.data(), changed.size(), 0);
    const Caught caught = error_of([&] { read_tokenizer_traits(dir / ""); });
    REQUIRE((caught.code == 0 || caught.code == 65));
    if (caught.code == 65) REQUIRE(contains(caught.text, name + ":"));
    std::filesystem::remove(dir / name);
  }
}
