// Weights from model directories that other programs wrote: safetensors files made here byte by byte.
#include <cmath>
#include <cstring>

#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "core/config/load.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

struct Written {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

void write_safetensors(const std::string& path, const std::map<std::string, Written>& tensors) {
  std::string header = "{", data;
  for (const auto& [name, t] : tensors) {
    std::string shape;
    for (const int64_t d : t.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          header == "{" ? "" : ",", name, t.dtype, shape, data.size(),
                          data.size() + t.bytes.size());
    data += t.bytes;
  }
  header += "}";
  const uint64_t length = header.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  write_file_atomic(path, head + header + data);
}

// Element i is `first` + i.
Written counting(std::vector<int64_t> shape, float first) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  Written t{"F32", std::move(shape), {}};
  for (int64_t i = 0; i < n; ++i) {
    const float value = first + static_cast<float>(i);
    t.bytes.append(reinterpret_cast<const char*>(&value), 4);
  }
  return t;
}

struct Model {
  explicit Model(const std::string& config, DType dtype = DType::f32)
      : spec(model::parse_model_config(config, "test")), parameters(model::make_parameters(spec)) {
    for (const model::Parameter& p : parameters.all) {
      memory.emplace_back(static_cast<size_t>(p.numel() * size_of(dtype)), '\0');
      weights.push_back(p.view(memory.back().data(), dtype));
    }
  }
  void load(const std::string& directory) {
    load_weights(directory, spec, engine::whole_slices(parameters, weights));
  }
  const Tensor& at(const std::string& name) const {
    for (size_t p = 0; p < parameters.all.size(); ++p)
      if (parameters.all[p].name == name) return weights[p];
    FAIL("no parameter " << name);
    return weights[0];
  }

  model::ModelSpec spec;
  model::ParameterList parameters;
  std::vector<std::string> memory;
  std::vector<Tensor> weights;
};

constexpr const char* gpt2 =
    R"({"model_type":"gpt2","vocab_size":5,"n_embd":4,"n_layer":1,"n_head":2,"n_positions":3})";

// As published: without the prefix "transformer.", Conv1D as [in, out], buffers beside the parameters.
std::map<std::string, Written> published_gpt2() {
  return {{"wte.weight", counting({5, 4}, 0)},
          {"wpe.weight", counting({3, 4}, 100)},
          {"h.0.ln_1.weight", counting({4}, 200)},
          {"h.0.ln_1.bias", counting({4}, 210)},
          {"h.0.attn.bias", counting({1, 1, 3, 3}, 0)},
          {"h.0.attn.masked_bias", counting({1}, 0)},
          {"h.0.attn.c_attn.weight", counting({4, 12}, 300)},
          {"h.0.attn.c_attn.bias", counting({12}, 400)},
          {"h.0.attn.c_proj.weight", counting({4, 4}, 500)},
          {"h.0.attn.c_proj.bias", counting({4}, 600)},
          {"h.0.ln_2.weight", counting({4}, 700)},
          {"h.0.ln_2.bias", counting({4}, 710)},
          {"h.0.mlp.c_fc.weight", counting({4, 16}, 800)},
          {"h.0.mlp.c_fc.bias", counting({16}, 900)},
          {"h.0.mlp.c_proj.weight", counting({16, 4}, 1000)},
          {"h.0.mlp.c_proj.bias", counting({4}, 1100)},
          {"ln_f.weight", counting({4}, 1200)},
          {"ln_f.bias", counting({4}, 1210)}};
}

}  // namespace

TEST_CASE("a published GPT-2 is read, with and without the prefix of its names") {
  for (const bool prefix : {false, true}) {
    CAPTURE(prefix);
    const TemporaryDirectory dir;
    std::map<std::string, Written> files;
    for (const auto& [name, tensor] : published_gpt2()) files[(prefix ? "transformer." : "") + name] = tensor;
    if (prefix) files["lm_head.weight"] = files["transformer.wte.weight"];  // of a tied model, saved twice
    write_safetensors(dir / "model.safetensors", files);
    Model m(gpt2);
    m.load(dir.path());
    const auto value = [&](const char* name, int64_t i) { return m.at(name).ptr<float>()[i]; };
    CHECK(value("embedding.weight", 7) == 7);
    CHECK(value("positions.weight", 11) == 111);
    // [out, in] here: row 5 of the 12 outputs, column 2 of the 4 inputs, is row 2, column 5 of the file.
    CHECK(value("layers.0.qkv.weight", 5 * 4 + 2) == 300 + 2 * 12 + 5);
    CHECK(value("layers.0.qkv.bias", 11) == 411);
    CHECK(value("layers.0.o.weight", 1 * 4 + 3) == 500 + 3 * 4 + 1);
    CHECK(value("layers.0.mlp_in.weight", 9 * 4 + 1) == 800 + 1 * 16 + 9);
    CHECK(value("layers.0.mlp_out.weight", 3 * 16 + 15) == 1000 + 15 * 4 + 3);
    CHECK(value("layers.0.norm1.weight", 1) == 201);
    CHECK(value("layers.0.norm2.bias", 2) == 712);
    CHECK(value("final_norm.weight", 3) == 1203);
    CHECK(value("final_norm.bias", 0) == 1210);
  }
}

TEST_CASE("a directory of another model is refused") {
  const auto attempt = [](const std::function<void(std::map<std::string, Written>&)>& edit) {
    const TemporaryDirectory dir;
    auto files = published_gpt2();
    edit(files);
    write_safetensors(dir / "model.safetensors", files);
    Model m(gpt2);
    return error_of([&] { m.load(dir.path()); });
  };
  CHECK(attempt([](auto&) {}).code == 0);
  const auto refused = [&](const std::string& part,
                           const std::function<void(std::map<std::string, Written>&)>& edit) {
    const Caught caught = attempt(edit);
    CAPTURE(caught.text);
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, part));
  };
  refused("there is no tensor \"ln_f.bias\"", [](auto& f) { f.erase("ln_f.bias"); });
  refused("tensors that config.json does not describe: h.1.ln_1.weight",
          [](auto& f) { f["h.1.ln_1.weight"] = counting({4}, 0); });
  refused("wpe.weight has shape [4, 4]; config.json needs [3, 4]", [](auto& f) {
    f["wpe.weight"] = counting({4, 4}, 0);
  });
  // The same number of elements, transposed.
  refused("h.0.attn.c_attn.weight has shape [12, 4]", [](auto& f) {
    f["h.0.attn.c_attn.weight"].shape = {12, 4};
  });
  refused("h.0.ln_1.bias has dtype I32", [](auto& f) { f["h.0.ln_1.bias"].dtype = "I32"; });
  refused("has 1 NaN or infinite values of",
          [](auto& f) { std::memset(f["h.0.ln_1.bias"].bytes.data(), 0xff, 4); });
}

TEST_CASE("half precision is read exactly, and rounded to nearest even where it must be") {
  const std::string config =
      R"({"model_type":"llama","vocab_size":4096,"hidden_size":16,"intermediate_size":2,
      "num_hidden_layers":1,"num_attention_heads":2,"tie_word_embeddings":true})";
  const auto directory = [](const TemporaryDirectory& dir, const Written& embedding) {
    std::map<std::string, Written> files{{"model.embed_tokens.weight", embedding},
                                         {"model.norm.weight", counting({16}, 0)}};
    const std::string l = "model.layers.0.";
    for (const char* norm : {"input_layernorm", "post_attention_layernorm"})
      files[l + norm + ".weight"] = counting({16}, 0);
    for (const char* p : {"q", "k", "v", "o"})
      files[l + "self_attn." + p + "_proj.weight"] = counting({16, 16}, 0);
    for (const char* p : {"gate", "up"}) files[l + "mlp." + p + "_proj.weight"] = counting({2, 16}, 0);
    files[l + "mlp.down_proj.weight"] = counting({16, 2}, 0);
    write_safetensors(dir / "model.safetensors", files);
    return dir.path();
  };
  const TemporaryDirectory dir;
  // Every finite f16: sign, 5 bits of exponent with bias 15, 10 bits of mantissa.
  Written half{"F16", {4096, 16}, {}};
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto finite = static_cast<uint16_t>((bits >> 10 & 31) == 31 ? 0 : bits);
    half.bytes.append(reinterpret_cast<const char*>(&finite), 2);
  }
  Model f32(config);
  f32.load(directory(dir, half));
  const float* got = f32.at("embedding.weight").ptr<float>();
  CHECK(got[0x3c00] == 1.0f);
  CHECK(got[0x0001] == 0x1p-24f);  // the least subnormal
  CHECK(got[0x03ff] == 1023 * 0x1p-24f);
  CHECK(got[0x7bff] == 65504.0f);
  CHECK(got[0x8400] == -0x1p-14f);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 31) continue;
    double want = exponent == 0 ? mantissa / 1024.0 * 0x1p-14
                                : (1 + mantissa / 1024.0) * std::pow(2.0, exponent - 15.0);
    if (bits >> 15) want = -want;
    if (static_cast<double>(got[bits]) != want) FAIL_CHECK("f16 " << bits << " is read as " << got[bits]);
  }
  CHECK(stored_dtype(dir.path()) == DType::f32);

  // f32 to bf16: half a unit goes to the even neighbor.
  Written single{"F32", {4096, 16}, std::string(4096 * 16 * 4, '\0')};
  const uint32_t given[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff,
                            0xbf818000, 0x3f80ffff, 0x00000001};
  const uint16_t wanted[] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0xbf82, 0x3f81, 0x0000};
  std::memcpy(single.bytes.data(), given, sizeof given);
  Model bf(config, DType::bf16);
  bf.load(directory(dir, single));
  for (size_t i = 0; i < std::size(wanted); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, static_cast<const char*>(bf.at("embedding.weight").data) + 2 * i, 2);
    CHECK(bits == wanted[i]);
  }
  // f16 as it is, and f32 to f16: to the even neighbor.
  Model f16_model(config, DType::f16);
  f16_model.load(directory(dir, half));
  CHECK(std::memcmp(f16_model.at("embedding.weight").data, half.bytes.data(), half.bytes.size()) == 0);
  const float exact[] = {1.0f + 0x1p-11f, 1.0f + 0x1.8p-10f, 65519.0f, -65519.0f, 0x1p-25f, 0x1.8p-24f};
  const uint16_t rounded[] = {0x3c00, 0x3c02, 0x7bff, 0xfbff, 0x0000, 0x0002};
  std::memcpy(single.bytes.data(), exact, sizeof exact);
  f16_model.load(directory(dir, single));
  CHECK(std::memcmp(f16_model.at("embedding.weight").data, rounded, sizeof rounded) == 0);
  // bf16 to f32 is exact: the upper half of the bits.
  Written brain{"BF16", {4096, 16}, std::string(4096 * 16 * 2, '\0')};
  const uint16_t low[] = {0x3f81, 0xc2f7, 0x0001};
  std::memcpy(brain.bytes.data(), low, sizeof low);
  f32.load(directory(dir, brain));
  for (size_t i = 0; i < std::size(low); ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, f32.at("embedding.weight").ptr<float>() + i, 4);
    CHECK(bits == static_cast<uint32_t>(low[i]) << 16);
  }
}

TEST_CASE("a run from a model directory carries its tokenizer files over") {
  const TemporaryDirectory dir;
  // What the tokenizers of transformers save; config.json and weights are written anew.
  const std::vector<std::string> carried{"added_tokens.json",
                                         "chat_template.jinja",
                                         "generation_config.json",
                                         "merges.txt",
                                         "special_tokens_map.json",
                                         "spiece.model",
                                         "tokenizer.json",
                                         "tokenizer.model",
                                         "tokenizer_config.json",
                                         "chat_template.json",
                                         "vocab.json"};
  for (const std::string& name : carried) write_file_atomic(dir / name, "{\"of\": \"" + name + "\"}");
  write_file_atomic(dir / "config.json", "{}");
  write_file_atomic(dir / "README.md", "");
  Config c;
  c.policy.model_name = dir.path();
  std::map<std::string, std::string> files;
  const HfFiles hf = collect_hf_files(c);
  for (const auto& file : hf.files) files[file.name] = file.content;
  CHECK(files.size() == carried.size());
  for (const std::string& name : carried) CHECK(files[name] == "{\"of\": \"" + name + "\"}");
  CHECK(hf.keep_config_ids);
}
