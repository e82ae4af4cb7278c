// What lies in the files of a checkpoint, read without our own readers: names, shapes and order of elements
// as transformers has them, optimizer state by element; and what is read back.
#include <bit>
#include <cmath>
#include <cstring>
#include <regex>

#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

struct Stored {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> out;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) out.push_back(std::stoll(one));
  return out;
}

// The format: 8 bytes of length, a JSON header, the tensors back to back.
std::map<std::string, Stored> read_safetensors(const std::string& path) {
  const std::string file = read_file(path, 1 << 24);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const std::string header = file.substr(8, length), data = file.substr(8 + length);
  CHECK((8 + length) % 8 == 0);
  CHECK(header.starts_with(R"({"__metadata__":{"format":"pt"},)"));  // transformers refuses files without it
  std::map<std::string, Stored> tensors;
  const std::regex entry(
      R"re("([^"]+)":\{"dtype":"(\w+)","shape":\[([0-9,]*)\],"data_offsets":\[(\d+),(\d+)\]\})re");
  size_t bytes = 0;
  for (std::sregex_iterator it(header.begin(), header.end(), entry), end; it != end; ++it) {
    const std::smatch& m = *it;
    const size_t first = std::stoull(m[4]), last = std::stoull(m[5]);
    tensors[m[1]] = {m[2], numbers(m[3]), data.substr(first, last - first)};
    bytes += last - first;
  }
  CHECK(bytes == data.size());
  return tensors;
}

// A tensor of a Hugging Face file: which rows of which of our parameters it is; Conv1D is [in, out].
struct Expected {
  std::string name, parameter;
  int64_t rows, columns;  // as we hold it, columns 0: a vector
  int64_t first_row = 0;
  bool conv1d = false;
};

// As in modeling_{gpt2,llama,mistral,qwen2,qwen3,gemma3}.py of transformers.
std::vector<Expected> expected_tensors(const std::string& family, const model::ModelSpec& m) {
  const int64_t h = m.hidden, v = m.vocab_size, f = m.ffn, q = m.heads * m.head_dim,
                kv = m.kv_heads * m.head_dim;
  std::vector<Expected> all;
  if (family.starts_with("gpt2")) {
    all = {{"transformer.wte.weight", "embedding.weight", v, h},
           {"transformer.wpe.weight", "positions.weight", m.max_positions, h},
           {"transformer.ln_f.weight", "final_norm.weight", h, 0},
           {"transformer.ln_f.bias", "final_norm.bias", h, 0}};
    for (int i = 0; i < m.layers; ++i) {
      const std::string hf = fmt::format("transformer.h.{}.", i), us = fmt::format("layers.{}.", i);
      const std::vector<Expected> layer{
          {"ln_1.weight", "norm1.weight", h, 0},
          {"ln_1.bias", "norm1.bias", h, 0},
          {"attn.c_attn.weight", "qkv.weight", 3 * h, h, 0, true},
          {"attn.c_attn.bias", "qkv.bias", 3 * h, 0},
          {"attn.c_proj.weight", "o.weight", h, h, 0, true},
          {"attn.c_proj.bias", "o.bias", h, 0},
          {"ln_2.weight", "norm2.weight", h, 0},
          {"ln_2.bias", "norm2.bias", h, 0},
          {"mlp.c_fc.weight", "mlp_in.weight", 4 * h, h, 0, true},
          {"mlp.c_fc.bias", "mlp_in.bias", 4 * h, 0},
          {"mlp.c_proj.weight", "mlp_out.weight", h, 4 * h, 0, true},
          {"mlp.c_proj.bias", "mlp_out.bias", h, 0},
      };
      for (Expected e : layer) {
        e.name = hf + e.name;
        e.parameter = us + e.parameter;
        all.push_back(e);
      }
    }
    return all;
  }
  all = {{"model.embed_tokens.weight", "embedding.weight", v, h},
         {"model.norm.weight", "final_norm.weight", h, 0}};
  if (!m.tied) all.push_back({"lm_head.weight", "head.weight", v, h});
  for (int i = 0; i < m.layers; ++i) {
    const std::string hf = fmt::format("model.layers.{}.", i), us = fmt::format("layers.{}.", i);
    std::vector<Expected> layer{
        {"input_layernorm.weight", "norm1.weight", h, 0},
        {"post_attention_layernorm.weight", "norm2.weight", h, 0},
        {"self_attn.q_proj.weight", "qkv.weight", q, h},
        {"self_attn.k_proj.weight", "qkv.weight", kv, h, q},
        {"self_attn.v_proj.weight", "qkv.weight", kv, h, q + kv},
        {"self_attn.o_proj.weight", "o.weight", h, q},
        {"mlp.gate_proj.weight", "mlp_in.weight", f, h},
        {"mlp.up_proj.weight", "mlp_in.weight", f, h, f},
        {"mlp.down_proj.weight", "mlp_out.weight", h, f},
    };
    const bool all_biases = family.starts_with("llama3");  // attention_bias and mlp_bias
    if (all_biases || family == "qwen2")
      for (const Expected& e : std::vector<Expected>{{"self_attn.q_proj.bias", "qkv.bias", q, 0},
                                                     {"self_attn.k_proj.bias", "qkv.bias", kv, 0, q},
                                                     {"self_attn.v_proj.bias", "qkv.bias", kv, 0, q + kv}})
        layer.push_back(e);
    if (all_biases)
      for (const Expected& e : std::vector<Expected>{{"self_attn.o_proj.bias", "o.bias", h, 0},
                                                     {"mlp.gate_proj.bias", "mlp_in.bias", f, 0},
                                                     {"mlp.up_proj.bias", "mlp_in.bias", f, 0, f},
                                                     {"mlp.down_proj.bias", "mlp_out.bias", h, 0}})
        layer.push_back(e);
    const bool gemma = family.starts_with("gemma3");
    if (gemma) {
      layer[1] = {"post_attention_layernorm.weight", "post_norm1.weight", h, 0};
      layer.push_back({"pre_feedforward_layernorm.weight", "norm2.weight", h, 0});
      layer.push_back({"post_feedforward_layernorm.weight", "post_norm2.weight", h, 0});
    }
    if (family == "qwen3" || gemma) {
      layer.push_back({"self_attn.q_norm.weight", "q_norm.weight", m.head_dim, 0});
      layer.push_back({"self_attn.k_norm.weight", "k_norm.weight", m.head_dim, 0});
    }
    for (Expected e : layer) {
      e.name = hf + e.name;
      e.parameter = us + e.parameter;
      all.push_back(e);
    }
  }
  return all;
}

// CRC-32C bit by bit (RFC 3720, appendix B.4; polynomial 0x1EDC6F41 reflected).
std::string crc32c_of(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return fmt::format("{:08x}", ~crc);
}

// The state of one rank of a model in which every number differs from every other: element e of parameter p
// is 8192 p + e in the weights (bf16: that many bits), and a fraction more in each kind of optimizer state.
class FakeState {
 public:
  FakeState(const std::string& config, int rank, int ranks, DType dtype, bool filled)
      : spec_(model::parse_model_config(config, "test")), parameters_(model::make_parameters(spec_)) {
    state_.spec = &spec_;
    state_.parameters = state_.whole = &parameters_;
    int64_t held = 0;
    std::vector<Tensor> weights;
    for (size_t p = 0; p < parameters_.all.size(); ++p) {
      const model::Parameter& parameter = parameters_.all[p];
      const int64_t n = parameter.numel(), begin = n * rank / ranks, end = n * (rank + 1) / ranks;
      NRL_CHECK(n <= 8192, "{} elements", n);  // of a rank, which is a thread
      group_.parameters.push_back(static_cast<int>(p));
      memory_.emplace_back(static_cast<size_t>(n * size_of(dtype)), filled ? '\0' : '\x11');
      weights.push_back(parameter.view(memory_.back().data(), dtype));
      if (filled)
        for (int64_t e = 0; e < n; ++e) {
          const std::string bytes = weight_bytes(p, e, dtype);
          std::memcpy(memory_.back().data() + e * size_of(dtype), bytes.data(), bytes.size());
        }
      if (begin == end) continue;
      group_.owned.push_back({static_cast<int>(p), begin, end - begin, -1, -1, held});
      held += end - begin;
    }
    group_.saved = group_.owned;
    for (size_t p = 0; p < parameters_.all.size(); ++p) group_.saved_weights.push_back(static_cast<int>(p));
    state_.weights = engine::whole_slices(parameters_, weights);
    for (int kind = 0; kind < 3; ++kind) {
      kinds_[kind].assign(static_cast<size_t>(held), -1.0f);
      for (const plan::OwnedRange& range : group_.owned)
        for (int64_t e = 0; filled && e < range.count; ++e)
          kinds_[kind][range.state + e] =
              optimizer_value(kind, static_cast<size_t>(range.parameter), range.offset + e);
    }
    group_.weight = dtype;
    state_.groups.emplace_back().group = &group_;
    for (int kind = 0; kind < (dtype == DType::bf16 ? 3 : 2); ++kind) {
      group_.state.push_back({kind == 0 ? "exp_avg" : kind == 1 ? "exp_avg_sq" : "master", DType::f32, -1});
      state_.groups[0].state.push_back(make_tensor(kinds_[kind].data(), DType::f32, {held}));
    }
  }
  FakeState(const FakeState&) = delete;

  static std::string weight_bytes(size_t p, int64_t e, DType dtype) {
    const auto number = static_cast<uint32_t>(8192 * static_cast<int64_t>(p) + e);
    std::string bytes(static_cast<size_t>(size_of(dtype)), '\0');
    if (dtype == DType::f32) {
      const auto value = static_cast<float>(number);
      std::memcpy(bytes.data(), &value, 4);
    } else {
      const auto bits = static_cast<uint16_t>(number % 0x7f80);  // finite
      std::memcpy(bytes.data(), &bits, 2);
    }
    return bytes;
  }
  static float optimizer_value(int kind, size_t p, int64_t e) {
    return static_cast<float>(8192 * static_cast<int64_t>(p) + e) + 0.25f * static_cast<float>(kind + 1);
  }

  model::ModelSpec spec_;
  model::ParameterList parameters_;
  plan::ParamGroup group_;
  TrainState state_;
  std::vector<std::string> memory_;
  std::vector<float> kinds_[3];
};

const Position position{7, 5, 60, 1920, 2, 1, 1024, 3, 96, 12, 3.25, 4};

SaveOptions options(const std::string& store) {
  SaveOptions o;
  o.store = store;
  o.resolved_config = "algorithm: pretrain\n";
  o.run = JsonValue::object({{"version", 1}});
  o.hf.files = {{"tokenizer.model", std::string("a\0b", 3)}, {"vocab.json", "{}"}};
  o.hf.bos = 1;
  o.hf.eos = 2;
  return o;
}

std::string save_on(const std::string& config, int ranks, DType dtype, const std::string& store) {
  ThreadRanks group(ranks);
  for (const Caught& caught : group.run([&](int rank) {
         FakeState fake(config, rank, ranks, dtype, true);
         save_checkpoint(fake.state_, position, options(store), group.group(rank));
       }))
    REQUIRE(caught.text == "");
  return store + "/step-7";
}

size_t index_of(const model::ParameterList& list, const std::string& name) {
  for (size_t p = 0; p < list.all.size(); ++p)
    if (list.all[p].name == name) return p;
  FAIL("no parameter " << name);
  return 0;
}

std::string config_of(const std::string& name) {
  for (const auto& [family, config] : tiny_configs())
    if (family == name) return config;
  FAIL("no family " << name);
  return "";
}

}  // namespace

TEST_CASE("a checkpoint holds what transformers reads, and the optimizer state of every element") {
  for (const auto& [family, config] : tiny_configs())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      // The names of experts are compared with files of transformers (tests/model/config_fixtures_test.cpp).
      if (model::parse_model_config(config, "test").expert_layers() > 0) continue;
      CAPTURE(family, name_of(dtype));
      const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
      const std::string step = save_on(config, 3, dtype, dir / "c");
      const FakeState fake(config, 0, 1, dtype, true);
      const auto expected = expected_tensors(family, fake.spec_);

      CHECK(contains(read_file(step + "/config.json", 10000),
                     dtype == DType::f32 ? "\"torch_dtype\": \"float32\"" : "\"torch_dtype\": \"bfloat16\""));
      const auto weights = read_safetensors(step + "/model.safetensors");
      CHECK(weights.size() == expected.size());
      std::map<std::string, std::pair<size_t, int64_t>> place;  // parameter and first element
      for (const Expected& e : expected) {
        CAPTURE(e.name);
        REQUIRE(weights.contains(e.name));
        const Stored& stored = weights.at(e.name);
        const size_t p = index_of(fake.parameters_, e.parameter);
        const int64_t columns = std::max<int64_t>(e.columns, 1);
        place[e.name] = {p, e.first_row * columns};
        CHECK(stored.dtype == (dtype == DType::f32 ? "F32" : "BF16"));
        CHECK(stored.shape == (e.columns == 0 ? std::vector{e.rows}
                               : e.conv1d     ? std::vector{e.columns, e.rows}
                                              : std::vector{e.rows, e.columns}));
        std::string want;
        for (int64_t i = 0; i < e.rows * columns; ++i) {
          const int64_t row = e.conv1d ? i % e.rows : i / columns,
                        column = e.conv1d ? i / e.rows : i % columns;
          want += FakeState::weight_bytes(p, (e.first_row + row) * columns + column, dtype);
        }
        CHECK((stored.bytes == want));  // no dump of binary data
      }

      // The pieces of all ranks, by name and first element.
      std::map<std::string, std::map<int64_t, Stored>> optimizer;
      for (int file = 1; file <= 3; ++file)
        for (auto& [key, stored] :
             read_safetensors(fmt::format("{}/optimizer-{:05}-of-00003.safetensors", step, file))) {
          const size_t at = key.find('@');
          optimizer[key.substr(0, at)][at == std::string::npos ? 0 : std::stoll(key.substr(at + 1))] = stored;
        }
      const std::vector<std::string> kinds =
          dtype == DType::f32 ? std::vector<std::string>{"exp_avg/", "exp_avg_sq/"}
                              : std::vector<std::string>{"exp_avg/", "exp_avg_sq/", "master/"};
      CHECK(optimizer.size() == expected.size() * kinds.size());
      for (size_t kind = 0; kind < kinds.size(); ++kind)
        for (const Expected& e : expected) {
          CAPTURE(kinds[kind], e.name);
          const auto [p, first] = place[e.name];
          int64_t next = 0;
          bool good = true;
          for (const auto& [begin, stored] : optimizer[kinds[kind] + e.name]) {
            good = good && begin == next && stored.dtype == "F32";
            for (size_t i = 0; i < stored.bytes.size() / 4; ++i, ++next) {
              float value = 0;
              std::memcpy(&value, stored.bytes.data() + 4 * i, 4);
              good = good && value == FakeState::optimizer_value(static_cast<int>(kind), p, first + next);
            }
          }
          CHECK(good);
          CHECK(next == e.rows * std::max<int64_t>(e.columns, 1));
        }
    }
}

TEST_CASE("any number of ranks reads the exact state that any other number saved") {
  for (const auto& [family, config] : tiny_configs())
    for (const auto& [writers, readers] : {std::pair{1, 3}, {3, 1}, {3, 2}, {2, 4}}) {
      const DType dtype = readers % 2 == 0 ? DType::bf16 : DType::f32;
      CAPTURE(family, writers, readers);
      const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
      const std::string step = save_on(config, writers, dtype, dir / "c");
      for (int rank = 0; rank < readers; ++rank) {
        const FakeState want(config, rank, readers, dtype, true);
        FakeState got(config, rank, readers, dtype, false);
        CheckpointReader reader(step);
        load_checkpoint(reader, got.state_);
        CHECK((got.memory_ == want.memory_));
        for (int kind = 0; kind < (dtype == DType::bf16 ? 3 : 2); ++kind)
          CHECK(got.kinds_[kind] == want.kinds_[kind]);
      }
    }
}

TEST_CASE("position, configuration and tokenizer files are in the checkpoint as given") {
  const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
  const std::string step = save_on(config_of("llama"), 2, DType::f32, dir / "c");
  const std::string manifest = read_file(step + "/manifest.json", 1 << 20);
  CHECK(contains(
      manifest,
      R"("state":{"step":7,"updates":5,"consumed_samples":60,"tokens":1920,"skipped":2,"skipped_in_a_row":1,)"
      R"("loss_scale":1024.0,"clean_steps":3,"dataset_samples":96,"global_batch":12,"best_val_loss":3.25,"best_val_step":4,"run":{"version":1}})"));
  // Every file with its size and checksum, and the manifest's own over all before its last line.
  for (const std::string& name : list_directory(step)) {
    const std::string bytes = read_file(step + "/" + name, 1 << 20);
    if (name != "manifest.json")
      CHECK(contains(manifest, fmt::format(R"({{"name":"{}","bytes":{},"crc32c":"{}")", name, bytes.size(),
                                           crc32c_of(bytes))));
  }
  const size_t tail = manifest.rfind("\"crc32c\"");
  CHECK(manifest.substr(tail) == fmt::format("\"crc32c\":\"{}\"}}\n", crc32c_of(manifest.substr(0, tail))));
  const Position read = read_position(CheckpointReader(step));
  CHECK(read.step == 7);
  CHECK(read.updates == 5);
  CHECK(read.consumed_samples == 60);
  CHECK(read.tokens == 1920);
  CHECK(read.skipped == 2);
  CHECK(read.skipped_in_a_row == 1);
  CHECK(read.loss_scale == 1024);
  CHECK(read.clean_steps == 3);
  CHECK(read.dataset_samples == 96);
  CHECK(read.global_batch == 12);
  CHECK(read.best_val_loss == 3.25);
  CHECK(read.best_val_step == 4);
  CHECK(read_file(step + "/nrl-train.yaml", 100) == "algorithm: pretrain\n");
  CHECK(read_file(step + "/tokenizer.model", 100) == std::string("a\0b", 3));
  CHECK(list_directory(step) ==
        std::vector<std::string>{"config.json", "generation_config.json", "manifest-00001.json",
                                 "manifest.json", "model.safetensors", "nrl-train.yaml",
                                 "optimizer-00001-of-00002.safetensors",
                                 "optimizer-00002-of-00002.safetensors", "tokenizer.model", "vocab.json"});
  CHECK(read_file(step + "/generation_config.json", 1000) ==
        "{\n  \"_from_model_config\": true,\n  \"bos_token_id\": 1,\n  \"eos_token_id\": 2\n}\n");

  // checkpointing.save_optimizer: false.
  SaveOptions without = options(dir / "weights");
  without.optimizer = false;
  FakeState fake(config_of("llama"), 0, 1, DType::f32, true);
  const std::string weights = save_checkpoint(fake.state_, position, without, {});
  CHECK_FALSE(path_exists(weights + "/optimizer-00001-of-00001.safetensors"));
  CheckpointReader reader(weights);
  const Caught caught = error_of([&] { load_checkpoint(reader, fake.state_); });
  CHECK(caught.code == 65);
  CHECK(contains(caught.text, "has no optimizer state (checkpointing.save_optimizer: false"));
}

TEST_CASE("config.json has the keys and values that transformers reads") {
  struct Case {
    const char *family, *members;
  };
  // PretrainedConfig subclasses of transformers; sizes as in tests/model/tiny_model.h.
  const Case cases[] = {
      {"gpt2",
       R"("model_type":"gpt2";"architectures":["GPT2LMHeadModel"];"vocab_size":61;"n_embd":24;"n_layer":2;"n_head":3;)"
       R"("n_positions":32;"n_inner":96;"activation_function":"gelu_new";"layer_norm_epsilon":0.00001;"tie_word_embeddings":true)"},
      {"llama",
       R"("model_type":"llama";"architectures":["LlamaForCausalLM"];"vocab_size":67;"hidden_size":32;)"
       R"("intermediate_size":48;"num_hidden_layers":2;"num_attention_heads":4;"num_key_value_heads":2;"head_dim":8;)"
       R"("max_position_embeddings":64;"hidden_act":"silu";"rms_norm_eps":0.000001;"rope_theta":10000;"tie_word_embeddings":false)"},
      {"llama3 rope, odd head_dim",
       R"("architectures":["LlamaForCausalLM"];"head_dim":18;"num_key_value_heads":1;"attention_bias":true;"mlp_bias":true;)"
       R"("tie_word_embeddings":true)"},
      {"mistral",
       R"("model_type":"mistral";"architectures":["MistralForCausalLM"];"sliding_window":5;"attention_dropout":0.2)"},
      {"qwen2",
       R"("model_type":"qwen2";"architectures":["Qwen2ForCausalLM"];"tie_word_embeddings":true;"head_dim":8)"},
      {"qwen3",
       R"("model_type":"qwen3";"architectures":["Qwen3ForCausalLM"];"head_dim":12;"tie_word_embeddings":false)"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.family);
    const model::ModelSpec spec = model::parse_model_config(config_of(c.family), "test");
    const JsonValue json = parse_json(hf_config_json(spec, "bfloat16", {}), "config.json");
    std::istringstream members(std::string(c.members) +
                               R"(;"torch_dtype":"bfloat16";"dtype":"bfloat16";"initializer_range":0.02)");
    for (std::string member; std::getline(members, member, ';');) {
      CAPTURE(member);
      const JsonValue want = parse_json("{" + member + "}", "test");
      const auto& [key, value] = *want.members().begin();
      REQUIRE(json.contains(key));
      // Numbers by value: 1e-05 and 0.00001 are the same, and so is the float that it is read into.
      if (value.is_number())
        CHECK(json.get_double(key) == Approx(value.as_double()).epsilon(1e-7));
      else
        CHECK(json.at(key).dump() == value.dump());
    }
  }
}

TEST_CASE("NaN in any part of a checkpoint is named when it is read, and not written") {
  const std::string config = config_of("llama");
  for (const char* tensor : {"model.norm.weight", "exp_avg/model.norm.weight", "exp_avg_sq/model.norm.weight",
                             "master/model.norm.weight"}) {
    CAPTURE(tensor);
    const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
    FakeState fake(config, 0, 1, DType::bf16, true);
    const size_t p = index_of(fake.parameters_, "final_norm.weight");
    const std::string name = tensor;
    if (name.starts_with("model.")) {
      std::memset(fake.memory_[p].data(), 0xff, 2);
    } else {
      const int kind = name.starts_with("exp_avg/") ? 0 : name.starts_with("exp_avg_sq/") ? 1 : 2;
      fake.kinds_[kind][fake.group_.owned[p].state] = INFINITY;
    }
    const Caught refused = error_of([&] { save_checkpoint(fake.state_, position, options(dir / "c"), {}); });
    CHECK(refused.code == 79);
    CHECK(contains(refused.text, fmt::format("\"{}\"", name)));

    // Written by another program, with good checksums.
    CheckpointWriter writer(dir / "d", 7, 0);
    const auto add = [&](const std::string& file, const std::vector<std::string>& prefixes, DType dtype) {
      std::vector<ShardSpec> shards;
      for (const std::string& prefix : prefixes)
        for (const auto& parameter : fake.parameters_.all)
          for (const auto& part : parameter.parts)
            shards.push_back(ShardSpec::whole(prefix + part.name, dtype, part.global));
      writer.add_tensors(file, shards, [&](SafetensorsWriter& w) {
        for (const ShardSpec& s : shards) {
          std::string bytes(static_cast<size_t>(*checked_product(s.shape) * size_of(dtype)), '\0');
          if (s.key == name) std::memset(bytes.data(), 0xff, static_cast<size_t>(size_of(dtype)));
          w.write(s.key, bytes.data(), bytes.size());
        }
      });
    };
    add("model.safetensors", {""}, DType::bf16);
    add("optimizer-00001-of-00001.safetensors", {"exp_avg/", "exp_avg_sq/", "master/"}, DType::f32);
    CheckpointReader reader(writer.commit(JsonValue::object()));
    const Caught caught = error_of([&] { load_checkpoint(reader, fake.state_); });
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, fmt::format("\"{}\" has 1 NaN or infinite values of", name)));
  }
}
