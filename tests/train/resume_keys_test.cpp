// Every setting that a checkpoint records, changed alone: listed, allowed by one word, or refused,
// as docs/checkpoints.md says.
#include "apps/model/families/hf_config.h"
#include "apps/state/resume.h"
#include "core/config/load.h"
#include "core/config/resume_rule.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

Config config(const std::string& change = "") {
  std::vector<std::string> overrides;
  if (!change.empty()) overrides.push_back(change);
  const ConfigResult result = load_config_text(R"(algorithm: pretrain
policy:
  model: {model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
          num_attention_heads: 2}
  train_global_batch_size: 4
  train_micro_batch_size: 2
  max_total_sequence_length: 16
pretrain: {max_num_steps: 4, seed: 7}
data: {seed: 3, train: {data_path: [a, b], weights: [1, 2]}}
)",
                                               "test.yaml", overrides);
  CAPTURE(render(result.diagnostics));
  REQUIRE(result.ok());
  return result.config;
}

Inputs inputs() {
  Inputs in;
  in.train = {{"a", "idx 1; bin 1"}, {"b", "idx 2; bin 2"}};
  in.validation = {{"v", "idx 3; bin 3"}};
  return in;
}

model::ModelSpec model_of(const std::string& family, const std::string& more = "") {
  const std::string sizes =
      family == "gpt2"
          ? R"("n_embd":24,"n_layer":2,"n_head":3,"n_positions":32)"
          : R"("hidden_size":24,"intermediate_size":40,"num_hidden_layers":2,"num_attention_heads":4,
                            "num_key_value_heads":2)";
  // The last of two members counts, so that `more` replaces what stands before it.
  JsonValue json =
      parse_json(fmt::format(R"({{"model_type":"{}","vocab_size":64,{}}})", family, sizes), "test");
  if (!more.empty()) {
    const JsonValue changes = parse_json("{" + more + "}", "test");
    for (const auto& [key, value] : changes.members()) json.set(key, value);
  }
  return model::parse_model_config(json.dump(), "test");
}

RunRecord record(const Config& c, const model::ModelSpec& spec, int ranks = 2) {
  return make_record(c, spec, DType::f32, ranks, inputs());
}

const std::vector<ResumeChange> everything{ResumeChange::data, ResumeChange::seed,
                                           ResumeChange::sequence_length, ResumeChange::model};

bool listed(const std::vector<std::string>& lines, const std::string& line) {
  return std::find(lines.begin(), lines.end(), line) != lines.end();
}

}  // namespace

TEST_CASE("every setting that may change freely is listed when it does") {
  struct Case {
    const char *change, *line;
  };
  const Case cases[] = {
      {"policy.train_global_batch_size=8",
       "policy.train_global_batch_size: 4 -> 8 (step count and data position are preserved)"},
      {"policy.max_grad_norm=2.0", "policy.max_grad_norm: 1 -> 2"},
      {"policy.optimizer.lr=0.5", "policy.optimizer.lr: 3e-04 -> 0.5"},
      {"policy.optimizer.weight_decay=0.5", "policy.optimizer.weight_decay: 0.1 -> 0.5"},
      {"policy.optimizer.betas=[0.5, 0.75]", "policy.optimizer.betas: [0.9, 0.95] -> [0.5, 0.75]"},
      {"policy.optimizer.eps=0.5", "policy.optimizer.eps: 1e-08 -> 0.5"},
      {"policy.optimizer.lr_scaling.rule=linear", "policy.optimizer.lr_scaling.rule: none -> linear"},
      {"policy.scheduler.lr_decay_style=constant", "policy.scheduler.lr_decay_style: cosine -> constant"},
      {"policy.scheduler.lr_warmup_iters=2", "policy.scheduler.lr_warmup_iters: 0 -> 2"},
      {"policy.scheduler.warmup_ratio=0.5", "policy.scheduler.warmup_ratio: null -> 0.5"},
      {"policy.scheduler.lr_decay_iters=3", "policy.scheduler.lr_decay_iters: null -> 3"},
      {"policy.scheduler.min_lr=1e-5", "policy.scheduler.min_lr: 0 -> 1e-05"},
      {"pretrain.max_num_steps=9", "pretrain.max_num_steps: 4 -> 9"},
      {"pretrain.max_num_epochs=2", "pretrain.max_num_epochs: null -> 2"},
      {"pretrain.seed=8", "pretrain.seed: 7 -> 8"},
      {"data.reset_position_ids=true", "data.reset_position_ids: false -> true"},
      {"data.reset_attention_mask=true", "data.reset_attention_mask: false -> true"},
      {"data.eod_mask_loss=true", "data.eod_mask_loss: false -> true"},
      {"kernels.tf32=true", "kernels.tf32: false -> true"},
  };
  const model::ModelSpec spec = model_of("llama");
  for (const Case& c : cases) {
    CAPTURE(c.change);
    const auto lines = compare_records(record(config(), spec), record(config(c.change), spec), {}, "step-5");
    CAPTURE(lines);
    CHECK(lines == std::vector<std::string>{c.line});
  }
  // Values that mean nothing with the others of this configuration, or are not built yet.
  const auto direct = [&](const std::function<void(Config&)>& change) {
    Config changed = config();
    change(changed);
    return compare_records(record(config(), spec), record(changed, spec), {}, "step-5");
  };
  using Lines = std::vector<std::string>;
  CHECK(direct([](Config& c) { c.policy.optimizer.lr_scaling.base_batch_size = 64; }) ==
        Lines{"policy.optimizer.lr_scaling.base_batch_size: 32 -> 64"});
  CHECK(direct([](Config& c) { c.policy.scheduler.lr_wsd_decay_iters = 2; }) ==
        Lines{"policy.scheduler.lr_wsd_decay_iters: null -> 2"});
  CHECK(direct([](Config& c) { c.policy.optimizer.name = OptimizerName::sgd; }) ==
        Lines{"policy.optimizer.name: adamw -> sgd"});
  CHECK(direct([](Config& c) { c.policy.scheduler.unit = ScheduleUnit::samples; }) ==
        Lines{"policy.scheduler.unit: optimizer_steps -> samples"});
  CHECK(direct([](Config& c) { c.distributed.grad_reduce_dtype = DType::bf16; }) ==
        Lines{"distributed.grad_reduce_dtype: fp32 -> bf16"});
  CHECK(compare_records(record(config(), spec, 2), record(config(), spec, 4), {}, "step-5") ==
        std::vector<std::string>{"ranks: 2 -> 4"});
}

TEST_CASE("every setting that decides about the data or the numbers needs its word") {
  struct Case {
    const char *family, *before, *after;  // members of the model
    const char* change;                   // of the configuration
    const char* line;
    ResumeChange word;
  };
  using enum ResumeChange;
  const Case cases[] = {
      {"llama", "", "", "policy.max_total_sequence_length=32",
       "policy.max_total_sequence_length: 16 -> 32 (the number of consumed samples is preserved)",
       sequence_length},
      {"llama", "", "", "data.seed=4",
       "data.seed: 3 -> 4 (the sample order changes: some samples may repeat or be missed)", seed},
      {"llama", "", "", "data.split=[8, 1, 1]",
       "data.split: null -> [8, 1, 1] (the sample order changes: some samples may repeat or be missed)",
       data},
      {"llama", "", "", "data.train.weights=[1, 3]",
       "data.train.weights: [1, 2] -> [1, 3] (the sample order changes: some samples may repeat or be "
       "missed)",
       data},
      {"llama", "", R"("rope_theta":500000)", "", "policy.model.rope_theta: 10000 -> 500000", model},
      {"llama", R"("head_dim":8)", R"("head_dim":8,"partial_rotary_factor":0.5)", "",
       "policy.model.partial_rotary_factor: 1 -> 0.5", model},
      {"llama", R"("rope_scaling":{"rope_type":"linear","factor":2})",
       R"("rope_scaling":{"rope_type":"linear","factor":4})", "", "", model},
      {"llama", "", R"("rms_norm_eps":1e-5)", "", "policy.model.norm_eps: 1e-06 -> 1e-05", model},
      {"mistral", R"("sliding_window":8)", R"("sliding_window":9)", "", "policy.model.sliding_window: 8 -> 9",
       model},
      {"llama", "", R"("hidden_act":"gelu")", "", "policy.model.hidden_act: silu -> gelu", model},
      {"llama", "", R"("attention_dropout":0.5)", "", "policy.model.attn_pdrop: 0 -> 0.5", model},
      {"gpt2", R"("resid_pdrop":0.25)", R"("resid_pdrop":0.5)", "", "policy.model.resid_pdrop: 0.25 -> 0.5",
       model},
      {"gpt2", R"("embd_pdrop":0.25)", R"("embd_pdrop":0.5)", "", "policy.model.embd_pdrop: 0.25 -> 0.5",
       model},
  };
  for (const Case& c : cases) {
    CAPTURE(c.before, c.after, c.change);
    const RunRecord saved = record(config(), model_of(c.family, c.before)),
                    now = record(config(c.change), model_of(c.family, *c.after ? c.after : c.before));
    const auto lines = compare_records(saved, now, std::vector{c.word}, "step-5");
    CAPTURE(lines);
    CHECK(lines.size() == 1);
    if (*c.line) CHECK(listed(lines, c.line));
    std::vector<ResumeChange> others = everything;
    std::erase(others, c.word);
    for (const auto& allowed : {std::vector<ResumeChange>{}, others}) {
      const Caught caught = error_of([&] { compare_records(saved, now, allowed, "step-5"); });
      CHECK(caught.code == 78);
      CHECK(contains(caught.text, name_of(c.word).data()));
    }
  }
}

TEST_CASE("a checkpoint records what the keys' rules compare") {
  const std::vector<std::string> keys = recorded_keys(config());
  const RunRecord all = record(config(), model_of("llama"));
  for (const std::string& key : keys) {
    CAPTURE(key);
    CHECK(all.contains(key));
    CHECK(resume_rule(key).change != OnResume::unrelated);
    // A new key must say what a resume may do with it; without that a change is refused.
    CHECK((resume_rule(key).change == OnResume::refused) ==
          (key == "policy.precision" || key == "policy.optimizer.main_params_dtype" ||
           key == "policy.freeze" || key.starts_with("policy.lora.")));
  }
  for (const char* key : {"policy.optimizer.lr", "policy.fp8_cfg.fp8_recipe", "pretrain.seed", "data.split"})
    CHECK(listed(keys, key));
  for (const char* key : {"logger.log_dir", "distributed.tensor_parallel_size", "policy.recompute.method"}) {
    CHECK_FALSE(listed(keys, key));
    CHECK_FALSE(all.contains(key));
  }
  CHECK(resume_rule("policy.model.hidden_size").change == OnResume::refused);
  CHECK(resume_rule("no.such_key").change == OnResume::refused);
}

TEST_CASE("every change of the model's structure is refused") {
  struct Case {
    const char *family, *after, *key;
  };
  const Case cases[] = {
      {"llama", R"("vocab_size":65)", "vocab_size: 64 -> 65"},
      {"llama", R"("hidden_size":32,"head_dim":6)", "hidden_size: 24 -> 32"},
      {"llama", R"("num_hidden_layers":3)", "num_hidden_layers: 2 -> 3"},
      {"llama", R"("num_attention_heads":2,"head_dim":6)", "num_attention_heads: 4 -> 2"},
      {"llama", R"("num_key_value_heads":4)", "num_key_value_heads: 2 -> 4"},
      {"llama", R"("head_dim":12)", "head_dim: 6 -> 12"},
      {"llama", R"("intermediate_size":48)", "intermediate_size: 40 -> 48"},
      {"llama", R"("attention_bias":true)", "qkv_bias: false -> true"},
      {"llama", R"("attention_bias":true)", "o_bias: false -> true"},
      {"llama", R"("mlp_bias":true)", "mlp_bias: false -> true"},
      {"llama", R"("tie_word_embeddings":true)", "tie_word_embeddings: false -> true"},
      {"llama", R"("model_type":"mistral")", "model_type: llama -> mistral"},
      {"llama", R"("model_type":"qwen3")", "qk_norm: false -> true"},
      {"gpt2", R"("n_positions":64)", "learned_positions: 32 -> 64"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.after);
    const Caught caught = error_of([&] {
      compare_records(record(config(), model_of(c.family)), record(config(), model_of(c.family, c.after)),
                      everything, "step-5");
    });
    CHECK(caught.code == 78);
    CHECK(contains(caught.text, fmt::format("policy.model.{}", c.key)));
    CHECK_FALSE(contains(caught.text, "allow_changes"));
  }
}

TEST_CASE("the identity of a run's inputs covers every file that it reads") {
  const TemporaryDirectory dir;
  make_directories(dir / "model");
  const std::vector<std::string> files{"a.idx",
                                       "a.bin",
                                       "b.idx",
                                       "b.bin",
                                       "v.idx",
                                       "v.bin",
                                       "model/config.json",
                                       "model/model-00001-of-00002.safetensors",
                                       "model/model-00002-of-00002.safetensors",
                                       "model/model.safetensors.index.json"};
  for (const std::string& file : files) write_file_atomic(dir / file, "content of " + file);
  write_file_atomic(dir / "model/README.md", "not read");
  Config c;
  c.data.train.data_path = {dir / "a", dir / "b"};
  c.data.validation.data_path = {dir / "v"};
  c.policy.model_name = dir / "model";
  const Inputs before = identify_inputs(c);
  CHECK(before.files.size() == files.size());
  for (const std::string& file : files) {
    CAPTURE(file);
    const std::string text = "content of " + file;
    for (const std::string& other : {"Content of " + file, text + " ", std::string()}) {
      if (other.empty())
        remove_tree(dir / file);
      else
        write_file_atomic(dir / file, other);
      const Inputs after = identify_inputs(c);
      CHECK(to_text(after.files) != to_text(before.files));
      CHECK((after.train[0].content != before.train[0].content) == file.starts_with("a."));
      CHECK((after.train[1].content != before.train[1].content) == file.starts_with("b."));
      CHECK((after.validation[0].content != before.validation[0].content) == file.starts_with("v."));
      const Caught caught = error_of([&] {
        require_same_files({to_text(before.files), to_text(after.files)}, {"n0", "n1"});
      });
      CHECK(caught.code == 65);
      CHECK(contains(caught.text, dir / file));
    }
    write_file_atomic(dir / file, text);
  }
  write_file_atomic(dir / "model/README.md", "something else");
  CHECK(to_text(identify_inputs(c).files) == to_text(before.files));
  const Inputs copy = inputs_from_text(c, to_text(before.files));
  CHECK(copy.files == before.files);
  REQUIRE(copy.train.size() == 2);
  REQUIRE(copy.validation.size() == 1);
  for (const size_t i : {0, 1}) {
    CHECK(copy.train[i].prefix == before.train[i].prefix);
    CHECK(copy.train[i].content == before.train[i].content);
  }
  CHECK(copy.validation[0].content == before.validation[0].content);
  CHECK(error_of([&] { inputs_from_text(c, R"([["a.idx","1"]])"); }).code == 70);
  // Ranks that have not read the files.
  require_same_files({to_text(before.files), "", to_text(before.files)}, {"n0", "n0", "n1"});
  CHECK(before.train[0].prefix == dir / "a");
  CHECK(contains(before.train[0].content, "idx 16 bytes, CRC-32C "));
}
