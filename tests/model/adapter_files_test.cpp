// Adapters in PEFT's files: what they compute, merged or not, and files that do not fit.

#include "apps/state/adapter_files.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "apps/state/checkpoint.h"
#include "apps/state/merge_adapter.h"
#include "apps/state/model_source.h"
#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"
#include "tests/model/fixture.h"
#include "tests/reference/decoder.h"

using namespace nrl;
using test::StoredTensor;
using test::TemporaryDirectory;

namespace {

constexpr int64_t rank = 3;
const std::string prefix = "base_model.model.", a_suffix = ".lora_A.weight", b_suffix = ".lora_B.weight";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The modules that `leaves` name, with (out, in).
std::vector<std::pair<std::string, std::vector<int64_t>>> modules_of(const test::Fixture& f,
                                                                     const std::vector<std::string>& leaves) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> out;
  for (const auto& [name, shape] : f.tensors)
    for (const std::string& leaf : leaves)
      if (name.ends_with("." + leaf + ".weight")) {
        const bool conv1d = name.starts_with("transformer.");
        out.push_back({name.substr(0, name.size() - 7), {shape[conv1d ? 1 : 0], shape[conv1d ? 0 : 1]}});
      }
  return out;
}

std::vector<StoredTensor> adapter_tensors(const test::Fixture& f, const std::vector<std::string>& leaves) {
  std::vector<StoredTensor> out;
  for (const auto& [module, size] : modules_of(f, leaves)) {
    out.push_back(test::stored(prefix + module + a_suffix, {rank, size[1]}));
    out.push_back(test::stored(prefix + module + b_suffix, {size[0], rank}));
  }
  return out;
}

JsonValue adapter_config(const std::string& base) {
  return JsonValue::object({{"peft_type", "LORA"},
                            {"r", rank},
                            {"lora_alpha", 1.5},
                            {"target_modules", "all-linear"},
                            {"bias", "none"},
                            {"lora_dropout", 0.1},
                            {"use_dora", false},
                            {"rank_pattern", JsonValue::object()},
                            {"modules_to_save", JsonValue()},
                            {"base_model_name_or_path", base}});
}

void write_adapter(const std::string& directory, const JsonValue& config,
                   const std::vector<StoredTensor>& tensors) {
  std::filesystem::create_directories(directory);
  write_file_atomic(directory + "/adapter_config.json", config.dump(2));
  test::write_tensors(directory + "/adapter_model.safetensors", tensors);
}

std::vector<float> floats(const StoredTensor& t) {
  std::vector<float> out(t.bytes.size() / 4);
  std::memcpy(out.data(), t.bytes.data(), t.bytes.size());
  return out;
}

/// The weights with s B A added in double.
std::vector<StoredTensor> merged(const test::Fixture& f, const std::vector<StoredTensor>& adapter,
                                 double scale) {
  std::vector<StoredTensor> out;
  for (const auto& [name, shape] : f.tensors) {
    out.push_back(test::stored(name, shape));
    const std::string module = prefix + name.substr(0, name.size() - 7);
    const auto find = [&](const std::string& tensor) {
      return std::find_if(adapter.begin(), adapter.end(),
                          [&](const StoredTensor& t) { return t.name == tensor; });
    };
    const auto a = find(module + a_suffix), b = find(module + b_suffix);
    if (a == adapter.end()) continue;
    const bool conv1d = name.starts_with("transformer.");
    const int64_t rows = b->shape[0], in = a->shape[1];
    std::vector<float> w = floats(out.back());
    const std::vector<float> x = floats(*a), y = floats(*b);
    for (int64_t o = 0; o < rows; ++o)
      for (int64_t i = 0; i < in; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < rank; ++k)
          sum += static_cast<double>(y[o * rank + k]) * static_cast<double>(x[k * in + i]);
        float& element = w[conv1d ? i * rows + o : o * in + i];
        element = static_cast<float>(static_cast<double>(element) + scale * sum);
      }
    std::memcpy(out.back().bytes.data(), w.data(), out.back().bytes.size());
  }
  return out;
}

std::vector<double> logits_of(const std::string& directory, const std::vector<int32_t>& tokens) {
  test::LoadedModel m(directory);
  model::Inference session = m.inference(static_cast<int64_t>(tokens.size()));
  const auto logits = session.append(tokens);
  return {logits.begin(), logits.end()};
}

std::vector<double> reference_logits(const std::string& directory, const std::vector<int32_t>& tokens) {
  const reference::Config config = reference::read_config(directory);
  const reference::Tensor all = reference::logits(config, reference::read_weights(config, directory), tokens);
  return {all.values.end() - static_cast<std::ptrdiff_t>(all.columns), all.values.end()};
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

/// A base model and an adapter of it in a directory.
struct Files {
  explicit Files(const std::string& fixture, const std::vector<std::string>& leaves)
      : f(test::read_fixture(fixture)), tensors(adapter_tensors(f, leaves)), config(adapter_config(base())) {
    test::write_model(base(), f.config, f.tensors);
    write_adapter(adapter(), config, tensors);
  }
  std::string base() const { return directory / "base"; }
  std::string adapter() const { return directory / "adapter"; }

  TemporaryDirectory directory{TemporaryDirectory::Where::memory};
  test::Fixture f;
  std::vector<StoredTensor> tensors;
  JsonValue config;
};

const std::vector<std::string> llama_linear{"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                            "gate_proj", "up_proj", "down_proj"};

}  // namespace

TEST_CASE("an adapter computes what its merged weights do in double precision", "[model][lora]") {
  struct Case {
    const char* fixture;
    std::vector<std::string> leaves;
  };
  for (const Case& c : {Case{"llama", llama_linear},
                        {"llama", {"k_proj", "up_proj"}},
                        {"qwen3", {"q_proj", "v_proj", "down_proj"}},
                        {"mistral", {"q_proj", "o_proj"}},
                        {"gpt2", {"c_attn", "c_proj", "c_fc"}},
                        {"gpt2-untied", {"c_attn"}}}) {
    INFO(c.fixture << " " << c.leaves.front());
    const Files files(c.fixture, c.leaves);
    const std::string wanted = files.directory / "wanted", written = files.directory / "merged";
    test::write_model(wanted, files.f.config, merged(files.f, files.tensors, 0.5));
    const std::vector<double> want = reference_logits(wanted, files.f.tokens);
    CHECK(largest_difference(logits_of(files.adapter(), files.f.tokens), want) < 1e-5);
    CHECK(largest_difference(logits_of(files.base(), files.f.tokens), want) > 1e-2);
    train::merge_adapter(files.adapter(), written);
    CHECK(largest_difference(logits_of(written, files.f.tokens), want) < 1e-5);
    // Rounded once, and nothing else has changed.
    const SafetensorsSet got(written), expected(wanted), base(files.base());
    REQUIRE(got.names() == base.names());
    for (const std::string& name : got.names()) {
      const auto bytes = [&](const SafetensorsSet& set) {
        std::string out(set.at(name).tensor->bytes(), '\0');
        set.read(name, out.data(), out.size());
        return out;
      };
      const StoredTensor mine{name, DType::f32, {}, bytes(got)}, other{name, DType::f32, {}, bytes(expected)};
      const std::string module = name.size() > 7 ? name.substr(0, name.size() - 7) : name;
      const bool adapts = std::any_of(files.tensors.begin(), files.tensors.end(), [&](const StoredTensor& t) {
        return t.name == prefix + module + a_suffix;
      });
      CHECK((mine.bytes == bytes(base)) == !adapts);
      const std::vector<float> x = floats(mine), y = floats(other);
      for (size_t i = 0; i < x.size(); ++i)
        REQUIRE(std::abs(x[i] - y[i]) <= 3e-7f * std::max(1.0f, std::abs(y[i])));
    }
  }
}

TEST_CASE("merged weights keep their type", "[model][lora]") {
  const Files files("llama", {"q_proj"});
  test::write_model(files.base(), files.f.config, files.f.tensors, DType::bf16);
  train::merge_adapter(files.adapter(), files.directory / "merged");
  const SafetensorsSet got(files.directory / "merged");
  for (const std::string& name : got.names()) CHECK(got.at(name).tensor->dtype == DType::bf16);
  CHECK(train::stored_dtype(files.adapter()) == DType::f32);  // of the adapter
}

TEST_CASE("what is written is read again", "[model][lora]") {
  const Files files("llama", {"q_proj", "v_proj"});
  model::ModelSpec spec = train::load_model_directory(files.adapter());
  CHECK(spec.trained.adapters.rank == rank);
  CHECK(spec.trained.adapters.scale() == 0.5f);
  CHECK(spec.trained.adapters.targets.size() == 4);
  // Last components where they select the same modules.
  const std::string text = train::adapter_config_json(spec, files.base());
  const JsonValue json = parse_json(text, "adapter_config.json");
  CHECK(json.at("target_modules").dump() == R"(["q_proj","v_proj"])");
  CHECK(json.get_string("base_model_name_or_path") == files.base());
  spec.trained.adapters.excludes = {"layers.1.self_attn.v_proj"};
  CHECK(contains(train::adapter_config_json(spec, files.base()), R"("model.layers.0.self_attn.v_proj")"));
  spec.trained.adapters.excludes.clear();
  std::filesystem::create_directories(files.directory / "again");
  write_file_atomic(files.directory / "again/adapter_config.json", text);
  test::write_tensors(files.directory / "again/adapter_model.safetensors", files.tensors);
  const train::StoredAdapter again = train::read_adapter(files.directory / "again");
  CHECK(again.spec.rank == spec.trained.adapters.rank);
  CHECK(again.spec.alpha == spec.trained.adapters.alpha);
  CHECK(again.spec.targets == spec.trained.adapters.targets);
  CHECK(again.base == files.base());
}

TEST_CASE("adapters that do not fit are refused by name", "[model][lora]") {
  const Files files("llama", {"q_proj", "up_proj"});
  const auto refused = [&](const JsonValue& config, const std::vector<StoredTensor>& tensors,
                           const std::string& part) {
    write_adapter(files.adapter(), config, tensors);
    const test::Caught e = test::error_of([&] { test::LoadedModel m(files.adapter()); });
    INFO(part << ": " << e.text);
    CHECK(e.code != 0);
    CHECK(contains(e.text, part));
    // Nothing is left of a merge that fails.
    const std::string output = files.directory / "merged";
    CHECK(test::error_of([&] { train::merge_adapter(files.adapter(), output); }).code == e.code);
    CHECK(!path_exists(output));
    CHECK(!path_exists(output + ".tmp"));
  };
  const auto with = [&](const char* key, JsonValue value) {
    JsonValue config = files.config;
    config.set(key, std::move(value));
    return config;
  };
  refused(with("peft_type", "LOHA"), files.tensors, "peft_type is \"LOHA\"");
  refused(with("r", 4), files.tensors, "has shape");
  refused(with("r", 0), files.tensors, "r is 0");
  refused(with("r", "3"), files.tensors, "adapter_config.json:");
  refused(with("lora_alpha", 0), files.tensors, "lora_alpha is 0");
  refused(with("bias", "all"), files.tensors, "bias is \"all\"");
  refused(with("use_dora", true), files.tensors, "use_dora");
  refused(with("rank_pattern", JsonValue::object({{"q_proj", 8}})), files.tensors, "rank_pattern");
  refused(with("modules_to_save", JsonValue::array({"lm_head"})), files.tensors, "modules_to_save");
  refused(with("base_model_name_or_path", files.directory / "nowhere"), files.tensors, "nowhere");
  for (size_t i = 0; i < files.tensors.size(); ++i) {
    std::vector<StoredTensor> tensors = files.tensors;
    tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
    refused(files.config, tensors, files.tensors[i].name);
    tensors = files.tensors;
    ++tensors[i].shape[tensors[i].name.ends_with(a_suffix) ? 1 : 0];
    tensors[i] = test::stored(tensors[i].name, tensors[i].shape);
    refused(files.config, tensors, files.tensors[i].name);
    tensors = files.tensors;
    const float nan = NAN;
    tensors[i].bytes.replace(4, 4, reinterpret_cast<const char*>(&nan), 4);
    if (i > 0) continue;  // loading finds it, merging writes no NaN
    write_adapter(files.adapter(), files.config, tensors);
    CHECK(
        contains(test::error_of([&] { test::LoadedModel m(files.adapter()); }).text, files.tensors[i].name));
    CHECK(test::error_of([&] { train::merge_adapter(files.adapter(), files.directory / "merged"); }).code !=
          0);
    CHECK(!path_exists(files.directory / "merged"));
  }
  std::vector<StoredTensor> more = files.tensors;
  more.push_back(test::stored("base_model.model.lm_head.lora_A.weight", {rank, 48}));
  more.push_back(test::stored("base_model.model.lm_head.lora_B.weight", {40, rank}));
  refused(files.config, more, "lm_head");
  more = files.tensors;
  more.push_back(test::stored("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", {rank, 48}));
  more.push_back(test::stored("base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight", {48, rank}));
  refused(files.config, more, "layers.9");
  more = files.tensors;
  more.push_back(test::stored("model.norm.weight", {48}));
  refused(files.config, more, "model.norm.weight");
}

TEST_CASE("a damaged adapter is an error, never a crash", "[model][lora]") {
  const Files files("llama", {"q_proj"});
  const std::string config = files.adapter() + "/adapter_config.json",
                    tensors = files.adapter() + "/adapter_model.safetensors";
  const auto whole = [](const std::string& path) { return read_file(path, uint64_t{1} << 20); };
  const std::string texts[] = {whole(config), whole(tensors)};
  int refused = 0, tried = 0;
  for (const int which : {0, 1}) {
    const std::string& path = which == 0 ? config : tensors;
    // The header of the tensors, whose values may be any numbers.
    const size_t end = which == 0 ? texts[0].size() : std::min<size_t>(texts[1].size(), 900);
    for (size_t i = 0; i < end; i += 3)
      for (const int change : {0, 1, 2}) {
        std::string text = texts[which];
        if (change == 0) text[i] = static_cast<char>(text[i] ^ 1 << (i % 7));
        if (change == 1) text.erase(i, 5);
        if (change == 2) text.resize(i);
        write_file_atomic(path, text);
        ++tried;
        try {
          train::read_adapter(files.adapter());
        } catch (const Error& e) {
          CHECK((e.code() == Exit::data || e.code() == Exit::no_input));
          ++refused;
        }
      }
    write_file_atomic(path, texts[which]);
  }
  CHECK(refused > tried / 2);
  train::read_adapter(files.adapter());
}

TEST_CASE("an adapter belongs to a model and a configuration", "[model][lora]") {
  const Files files("llama", {"q_proj", "v_proj"});
  const model::ModelSpec spec = train::load_model_directory(files.adapter());
  CHECK(train::other_adapter(files.adapter(), spec).empty());
  const auto other = [&](const auto& change) {
    model::ModelSpec changed = spec;
    change(changed);
    return train::other_adapter(files.adapter(), changed);
  };
  CHECK(contains(other([](auto& s) { s.trained.adapters.rank = 4; }), "policy.lora.dim is 4, but r"));
  CHECK(contains(other([](auto& s) { s.trained.adapters.alpha = 2; }), "policy.lora.alpha is 2"));
  CHECK(contains(other([](auto& s) { s.trained.adapters.rank_stabilized = true; }), "use_rslora is true"));
  CHECK(contains(other([](auto& s) { s.trained.adapters.targets = {"q_proj"}; }),
                 "v_proj.lora_A.weight, which"));
  CHECK(contains(other([](auto& s) { s.trained.adapters.targets = {"all-linear"}; }), "has no base_model"));
  CHECK(contains(other([](auto& s) { s.heads *= 2; }), "this model needs"));
  CHECK(other([](auto& s) { s.trained.adapters.dropout = 0.5f; }).empty());
}
