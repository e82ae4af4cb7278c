// Training in this process, stopped and resumed: every number of a checkpoint is restored and used, every
// file of it is verified.
#include <cmath>
#include <cstring>
#include <fstream>

#include "apps/train/launch/launch.h"
#include "apps/train/start/run_setup.h"
#include "apps/train/trainer.h"
#include "core/io/indexed_dataset.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"
#include "tests/train/captured_output.h"
#include "tests/train/json_lines.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

constexpr int64_t batch = 4, length = 16;

// A tiny Llama on a corpus of its own; every run has its directory.
class Runs {
 public:
  Runs() {
    IndexedDatasetWriter corpus(dir_ / "corpus", 61);
    const PhiloxStream random(1, "corpus");
    for (uint64_t document = 0; document < 40; ++document) {
      std::vector<int32_t> tokens;
      for (uint64_t i = 0; i < 50; ++i)
        tokens.push_back(static_cast<int32_t>(random.bits(document * 50 + i) % 61));
      corpus.add_sequence(tokens);
      corpus.end_document();
    }
    corpus.finish();
  }

  std::string store(const std::string& name) const { return dir_ / (name + "/checkpoints"); }
  std::string step(const std::string& name, int64_t n) const {
    return fmt::format("{}/step-{}", store(name), n);
  }

  ConfigResult config(const std::string& name, std::vector<std::string> overrides = {}) const {
    overrides.push_back("logger.log_dir=" + (dir_ / (name + "/logs")));
    overrides.push_back("checkpointing.checkpoint_dir=" + store(name));
    overrides.push_back("data.train.data_path=" + (dir_ / "corpus"));
    overrides.push_back("data.validation.data_path=" + (dir_ / "corpus"));
    ConfigResult result = load_config_text(R"(algorithm: pretrain
policy:
  model: {model_type: llama, vocab_size: 61, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
          num_attention_heads: 2, max_position_embeddings: 64}
  train_global_batch_size: 4
  train_micro_batch_size: 2
  max_total_sequence_length: 16
  optimizer: {lr: 3.0e-3}
pretrain: {max_num_steps: 4, seed: 7, val_period: 2, val_batches: 1}
checkpointing: {save_period: 2}
kernels: {num_threads: 1}
device: cpu
)",
                                           "test.yaml", overrides);
    CAPTURE(render(result.diagnostics));
    REQUIRE(result.ok());
    return result;
  }

  Exit train(const std::string& name, std::vector<std::string> overrides = {}) const {
    const auto world = comm::World::init();
    try {
      return train::train(*world, config(name, std::move(overrides)));
    } catch (const AgreedExit& agreed) {
      return agreed.code;
    }
  }

  // What a run would begin with.
  void begin(const std::string& name, const std::vector<std::string>& overrides,
             const std::function<void(const Run&)>& look) const {
    const auto world = comm::World::init();
    monitor::StartPhases phases;
    look(*set_up_run(*world, config(name, overrides), phases));
  }

  std::vector<JsonValue> rows(const std::string& name, const char* key) const {
    const std::string path = name + "/logs/metrics.jsonl";
    std::vector<JsonValue> out = json_lines(read_file(dir_ / path, 1 << 20), path);
    std::erase_if(out, [key](const JsonValue& row) { return !row.contains(key); });
    return out;
  }

  JsonValue state(const std::string& name, int64_t n) const {
    return CheckpointReader(step(name, n)).manifest().state;
  }
  // Whether two runs ended with the same file in their last checkpoint.
  bool same(const std::string& a, const std::string& b, const std::string& file) const {
    return read_file(step(a, 4) + "/" + file, 1 << 24) == read_file(step(b, 4) + "/" + file, 1 << 24);
  }

  // Copies a checkpoint to another run, changed and with good checksums.
  void copy(const std::string& from, const std::string& to, int64_t n,
            const std::function<void(JsonValue&)>& edit_state,
            const std::function<void(const std::string&, DType, std::string&)>& edit_tensor = {}) const {
    CheckpointReader reader(step(from, n));
    CheckpointWriter writer(store(to), n, 0);
    std::map<std::string, std::vector<std::string>> tensors;  // of each file
    for (const auto& [name, tensor] : reader.manifest().tensors)
      tensors[tensor.shards.at(0).file].push_back(name);
    for (const CheckpointFile& f : reader.manifest().files) {
      if (!tensors.contains(f.name)) {
        writer.add_file(f.name, reader.read_text(f.name));
        continue;
      }
      std::vector<ShardSpec> shards;
      for (const std::string& name : tensors[f.name])
        shards.push_back(ShardSpec::whole(name, reader.at(name).dtype, reader.at(name).shape));
      writer.add_tensors(f.name, shards, [&](SafetensorsWriter& w) {
        for (const ShardSpec& s : shards) {
          std::string bytes(static_cast<size_t>(*checked_product(s.shape) * size_of(s.dtype)), '\0');
          reader.read_logical(s.logical, bytes.data(), bytes.size());
          if (edit_tensor) edit_tensor(s.logical, s.dtype, bytes);
          w.write(s.key, bytes.data(), bytes.size());
        }
      });
    }
    JsonValue state = reader.manifest().state;
    edit_state(state);
    writer.commit(state);
  }
  void copy(const std::string& from, const std::string& to, int64_t n) const {
    copy(from, to, n, [](JsonValue&) {});
  }

 private:
  TemporaryDirectory dir_{TemporaryDirectory::Where::memory};
};

void scale(std::string& bytes, float factor) {
  for (size_t i = 0; i < bytes.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, bytes.data() + i, 4);
    value *= factor;
    std::memcpy(bytes.data() + i, &value, 4);
  }
}

// Fails the saves of these steps.
std::vector<std::string> g_failing;
int fail_saves(FileOp op, const std::string& path) {
  for (const std::string& step : g_failing)
    if (op == FileOp::make_directory && contains(path, "/" + step + ".tmp-")) return EIO;
  return 0;
}

constexpr const char* optimizer_file = "optimizer-00001-of-00001.safetensors";

}  // namespace

TEST_CASE("a resumed run makes the same steps as one that was not stopped") {
  for (const std::string precision : {"float32", "bfloat16"}) {
    CAPTURE(precision);
    const Runs runs;
    const std::vector<std::string> more{"policy.precision=" + precision,
                                        "policy.model.attention_dropout=0.2"};
    REQUIRE(runs.train("whole", more) == Exit::ok);
    runs.copy("whole", "parts", 2);
    REQUIRE(runs.train("parts", more) == Exit::ok);
    const auto whole = runs.rows("whole", "loss"), parts = runs.rows("parts", "loss");
    REQUIRE(whole.size() == 4);
    REQUIRE(parts.size() == 2);
    for (const size_t i : {0, 1})
      for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens"})
        CHECK(parts[i].at(key).dump() == whole[i + 2].at(key).dump());
    for (const char* file : {"model.safetensors", optimizer_file}) CHECK(runs.same("parts", "whole", file));
    CHECK(runs.state("parts", 4).dump() == runs.state("whole", 4).dump());
  }
}

TEST_CASE("scales of FP8 operands that follow from earlier steps are restored") {
  const Runs runs;
  const std::vector<std::string> more{"policy.fp8_cfg.enabled=true",
                                      "policy.fp8_cfg.fp8_recipe=delayed",
                                      "policy.fp8_cfg.fp8_amax_history_len=3",
                                      "policy.fp8_cfg.fp8_amax_compute_algo=max",
                                      "policy.scheduler.lr_decay_style=constant",
                                      "policy.model.intermediate_size=32"};
  REQUIRE(runs.train("whole", more) == Exit::ok);
  runs.copy("whole", "parts", 2);
  REQUIRE(runs.train("parts", more) == Exit::ok);
  for (const char* file : {"model.safetensors", optimizer_file}) CHECK(runs.same("parts", "whole", file));
  auto attention = more;
  attention.push_back("policy.fp8_cfg.fp8_dot_product_attention=true");
  attention.push_back("policy.model.num_key_value_heads=2");
  REQUIRE(runs.train("whole attention", attention) == Exit::ok);
  runs.copy("whole attention", "parts of attention", 2);
  REQUIRE(runs.train("parts of attention", attention) == Exit::ok);
  for (const char* file : {"model.safetensors", optimizer_file})
    CHECK(runs.same("parts of attention", "whole attention", file));
  auto experts = more;
  experts.back() =
      "policy.model={model_type: mixtral, vocab_size: 61, hidden_size: 16, intermediate_size: 16, "
      "num_hidden_layers: 1, num_attention_heads: 4, num_local_experts: 4, num_experts_per_tok: 2}";
  REQUIRE(runs.train("whole experts", experts) == Exit::ok);
  runs.copy("whole experts", "parts of experts", 2);
  REQUIRE(runs.train("parts of experts", experts) == Exit::ok);
  for (const char* file : {"model.safetensors", optimizer_file})
    CHECK(runs.same("parts of experts", "whole experts", file));
  for (const std::string edited : {"fp8.scale", "fp8.amax"}) {
    CAPTURE(edited);
    int found = 0;
    runs.copy(
        "whole", edited, 2, [](JsonValue&) {},
        [&](const std::string& tensor, DType, std::string& bytes) {
          if (tensor == edited) ++found, scale(bytes, 3.0f);
        });
    CHECK(found == 1);
    REQUIRE(runs.train(edited, more) == Exit::ok);
    CHECK_FALSE(runs.same(edited, "whole", "model.safetensors"));
  }
  // Another history begins anew, and one without any leaves it out.
  runs.copy("whole", "longer", 2);
  auto longer = more;
  longer[2] = "policy.fp8_cfg.fp8_amax_history_len=4";
  CHECK(runs.train("longer", longer) == Exit::ok);
  runs.copy("whole", "current", 2);
  CHECK(runs.train("current", {"policy.fp8_cfg.enabled=true", "policy.model.intermediate_size=32"}) ==
        Exit::ok);
}

TEST_CASE("every counter of a checkpoint is restored") {
  const Runs runs;
  REQUIRE(runs.train("whole") == Exit::ok);
  runs.copy("whole", "edited", 2, [](JsonValue& state) {
    state.set("updates", 1);
    state.set("skipped", 1);
    state.set("skipped_in_a_row", 1);
    state.set("loss_scale", 256.0);
    state.set("clean_steps", 1);
    state.set("consumed_samples", 12);
    state.set("tokens", 1000);
    state.set("dataset_samples", 999);
    state.set("global_batch", 6);
    state.set("best_val_loss", 0.5);
    state.set("best_val_step", 1);
  });
  runs.begin("edited", {}, [&](const Run& run) {
    CHECK(run.resumed_from == runs.step("edited", 2));
    const Position& p = run.position;
    CHECK(p.step == 2);
    CHECK(p.updates == 1);
    CHECK(p.skipped == 1);
    CHECK(p.skipped_in_a_row == 1);
    CHECK(p.loss_scale == 256);
    CHECK(p.clean_steps == 1);
    CHECK(p.consumed_samples == 12);
    CHECK(p.tokens == 1000);
    CHECK(p.best_val_loss == 0.5);
    CHECK(p.best_val_step == 1);
    // Of this run, not of the one before: 12 samples and two steps of 4.
    CHECK(p.global_batch == batch);
    CHECK(p.dataset_samples == 20);
    // 40 documents of 50 tokens make 124 samples of 16.
    CHECK(run.changes == std::vector<std::string>{"sample order: 999 samples -> 20, more than one epoch of "
                                                  "124 (the order changes: some samples may "
                                                  "repeat or be missed)"});
  });
  runs.copy("whole", "longer", 2, [](JsonValue& state) { state.set("dataset_samples", 100); });
  runs.begin("longer", {}, [&](const Run& run) {
    CHECK(run.position.dataset_samples == 16);
    CHECK(run.changes.empty());
  });
  REQUIRE(runs.train("edited") == Exit::ok);
  const auto whole = runs.rows("whole", "loss"), edited = runs.rows("edited", "loss");
  CHECK(edited.at(0).get_int("tokens") == 1000 + batch * length);
  CHECK(edited.at(1).get_int("tokens") == 1000 + 2 * batch * length);
  const JsonValue state = runs.state("edited", 4);
  CHECK(state.get_int("step") == 4);
  CHECK(state.get_int("updates") == 3);
  CHECK(state.get_int("skipped") == 1);
  CHECK(state.get_int("skipped_in_a_row") == 0);
  CHECK(state.get_int("consumed_samples") == 20);
  CHECK(state.get_int("tokens") == 1128);
  CHECK(state.get_double("best_val_loss") == 0.5);  // no evaluation was better
  CHECK(state.get_int("best_val_step") == 1);

  // Each alone: the samples that come next, and the number of updates that corrects Adam's bias.
  runs.copy("whole", "samples", 2, [](JsonValue& s) { s.set("consumed_samples", 12); });
  runs.copy("whole", "updates", 2, [](JsonValue& s) {
    s.set("updates", 1);
    s.set("skipped", 1);
  });
  REQUIRE(runs.train("samples") == Exit::ok);
  REQUIRE(runs.train("updates") == Exit::ok);
  const auto loss = [&](const char* name, size_t i) {
    return runs.rows(name, "loss").at(i).get_double("loss");
  };
  CHECK(loss("samples", 0) != whole.at(2).get_double("loss"));
  CHECK(loss("updates", 0) == whole.at(2).get_double("loss"));
  CHECK(loss("updates", 1) != whole.at(3).get_double("loss"));
}

TEST_CASE("a resumed run tells what has changed, and refuses what was not allowed") {
  const Runs runs;
  REQUIRE(runs.train("whole") == Exit::ok);
  const auto changes = [&](const std::vector<std::string>& overrides) {
    std::vector<std::string> lines;
    runs.begin("whole", overrides, [&](const Run& run) { lines = run.changes; });
    return lines;
  };
  CHECK(changes({}).empty());
  CHECK(changes({"policy.optimizer.lr=0.5"}) ==
        std::vector<std::string>{"policy.optimizer.lr: 0.003 -> 0.5"});
  // Given, and chosen by auto.
  const std::vector<std::string> other_micro{"policy.train_micro_batch_size: 2 -> 4"};
  CHECK(changes({"policy.train_micro_batch_size=4"}) == other_micro);
  CHECK(changes({"policy.train_micro_batch_size=auto"}) == other_micro);
  CHECK(runs.train("whole", {"data.seed=8"}) == Exit::config);
  CHECK(runs.train("whole", {"data.seed=8", "checkpointing.allow_changes=[model]"}) == Exit::config);
  CHECK(changes({"data.seed=8", "checkpointing.allow_changes=[seed]"}).size() == 1);
  CHECK(list_directory(runs.store("whole")) == std::vector<std::string>{"LATEST", "step-2", "step-4"});
}

TEST_CASE("the best evaluation is the lowest loss, over resumes too") {
  const Runs runs;
  REQUIRE(runs.train("whole") == Exit::ok);
  const auto evaluations = runs.rows("whole", "val_loss");
  REQUIRE(evaluations.size() == 2);
  const size_t best = evaluations[1].get_double("val_loss") < evaluations[0].get_double("val_loss") ? 1 : 0;
  for (const int64_t n : {2, 4}) {
    const size_t row = n == 2 ? 0 : best;
    CHECK(runs.state("whole", n).get_double("best_val_loss") == evaluations[row].get_double("val_loss"));
    CHECK(runs.state("whole", n).get_int("best_val_step") == evaluations[row].get_int("step"));
  }
  runs.copy("whole", "worse", 2, [](JsonValue& s) {
    s.set("best_val_loss", 50.0);
    s.set("best_val_step", 1);
  });
  REQUIRE(runs.train("worse") == Exit::ok);
  CHECK(runs.state("worse", 4).get_double("best_val_loss") == evaluations[1].get_double("val_loss"));
  CHECK(runs.state("worse", 4).get_int("best_val_step") == 4);
}

TEST_CASE("skipped steps in a row are counted over a resume") {
  const Runs runs;
  REQUIRE(runs.train("whole") == Exit::ok);
  const auto huge = [](const std::string& name, DType, std::string& bytes) {
    if (name == "model.layers.0.mlp.down_proj.weight" || name == "lm_head.weight") scale(bytes, 1e30f);
  };
  for (const int64_t before : {0, 2}) {
    CAPTURE(before);
    const std::string name = fmt::format("skipped{}", before);
    runs.copy(
        "whole", name, 2,
        [&](JsonValue& s) {
          s.set("updates", 2 - before);
          s.set("skipped", before);
          s.set("skipped_in_a_row", before);
        },
        huge);
    const Exit code = runs.train(
        name, {"pretrain.max_nonfinite_steps=3", "pretrain.val_period=0", "checkpointing.save_period=0"});
    CHECK(runs.rows(name, "loss").size() == (before == 2 ? 1 : 2));
    CHECK((code == Exit::diverged) == (before == 2));
  }
}

TEST_CASE("weights and every kind of optimizer state are restored") {
  const Runs runs;
  for (const std::string precision : {"float32", "bfloat16", "reduced"}) {
    std::vector<std::string> more{"policy.precision=" + (precision == "reduced" ? "bfloat16" : precision)};
    if (precision == "reduced")
      more.insert(more.end(),
                  {"policy.optimizer.use_precision_aware_optimizer=true",
                   "policy.optimizer.exp_avg_dtype=fp8", "policy.optimizer.exp_avg_sq_dtype=fp16"});
    REQUIRE(runs.train(precision, more) == Exit::ok);
    for (const std::string prefix : {"", "exp_avg/", "exp_avg_sq/", "master/"}) {
      if (prefix == "master/" && precision == "float32") continue;
      CAPTURE(precision, prefix);
      const std::string edited = prefix + "model.norm.weight",
                        name = precision + prefix.substr(0, prefix.find('/'));
      runs.copy(
          precision, name + "-edited", 2, [](JsonValue&) {},
          [&](const std::string& tensor, DType dtype, std::string& bytes) {
            if (tensor != edited) return;
            if (dtype == DType::f32)
              scale(bytes, 1.5f);
            else
              bytes[1] = '\x40';  // the first element: 1 becomes 2 or more
          });
      REQUIRE(runs.train(name + "-edited", more) == Exit::ok);
      // Its trace is in the weights, or where bf16 hides it in the optimizer's state.
      CHECK_FALSE((runs.same(name + "-edited", precision, "model.safetensors") &&
                   runs.same(name + "-edited", precision, optimizer_file)));
    }
  }
}

TEST_CASE("optimizer state in fewer bits that is not finite is refused with its name") {
  const Runs runs;
  const std::vector<std::string> more{
      "policy.precision=bfloat16", "policy.optimizer.use_precision_aware_optimizer=true",
      "policy.optimizer.exp_avg_dtype=fp8", "policy.optimizer.exp_avg_sq_dtype=bf16"};
  REQUIRE(runs.train("good", more) == Exit::ok);
  for (const std::string prefix : {"exp_avg/", "exp_avg_sq/", "master/"}) {
    CAPTURE(prefix);
    const std::string name = "bad-" + prefix.substr(0, prefix.find('/')),
                      tensor = prefix + "model.norm.weight";
    runs.copy(
        "good", name, 2, [](JsonValue&) {},
        [&](const std::string& edited, DType, std::string& bytes) {
          if (edited == tensor) std::memcpy(bytes.data() + 12, "\0\0\xc0\x7f", 4);
        });
    const TemporaryDirectory output(TemporaryDirectory::Where::memory);
    const CapturedOutput captured(output / "out.txt", output / "err.txt");
    const Exit code = runs.train(name, more);
    captured.restore();
    CHECK(code == Exit::data);
    CHECK(contains(read_file(output / "err.txt", 1 << 16), tensor + "\" has 1 NaN"));
  }
}

TEST_CASE("biases of routers follow the load, evaluation does not move them, and a resume restores them") {
  for (const std::string precision : {"float32", "bfloat16"}) {
    CAPTURE(precision);
    const Runs runs;
    const std::vector<std::string> more{
        "policy.precision=" + precision,
        "policy.model={model_type: qwen3_moe, vocab_size: 61, hidden_size: 16, intermediate_size: 24, "
        "num_hidden_layers: 2, num_attention_heads: 2, head_dim: 8, max_position_embeddings: 64, "
        "num_experts: 4, "
        "num_experts_per_tok: 2, moe_intermediate_size: 8, moe_router_score_function: sigmoid, "
        "moe_router_enable_expert_bias: true, moe_router_bias_update_rate: 0.0078125, initializer_range: "
        "0.2}"};
    REQUIRE(runs.train("whole", more) == Exit::ok);
    runs.copy("whole", "parts", 2);
    REQUIRE(runs.train("parts", more) == Exit::ok);
    auto unevaluated = more;
    unevaluated.emplace_back("pretrain.val_period=0");
    REQUIRE(runs.train("unevaluated", unevaluated) == Exit::ok);
    for (const char* file : {"model.safetensors", optimizer_file}) {
      CHECK(runs.same("parts", "whole", file));
      CHECK(runs.same("unevaluated", "whole", file));
    }
    CheckpointReader reader(runs.step("whole", 4));
    for (const char* layer : {"0", "1"}) {
      const std::string name = fmt::format("model.layers.{}.mlp.gate.e_score_correction_bias", layer);
      REQUIRE(reader.at(name).dtype == DType::f32);
      float bias[4];
      reader.read_logical(name, reinterpret_cast<char*>(bias), sizeof(bias));
      // Four steps of the rate, up or down.
      constexpr float rate = 0.0078125f;
      CHECK(std::any_of(bias, bias + 4, [](float b) { return b != 0; }));
      for (const float b : bias) CHECK((std::fabs(b) <= 4 * rate && b / rate == std::round(b / rate)));
    }
  }
}

TEST_CASE("one changed byte in any file of the newest checkpoint, and the one before is used") {
  const Runs runs;
  REQUIRE(runs.train("whole", {"checkpointing.verify_saved=false"}) == Exit::ok);
  const std::vector<std::string> files = list_directory(runs.step("whole", 4));
  CHECK(files == std::vector<std::string>{"config.json", "generation_config.json", "manifest.json",
                                          "model.safetensors", "nrl-train.yaml", optimizer_file});
  for (const std::string& file : files)
    for (const int where : {0, 1, 2}) {
      CAPTURE(file, where);
      const std::string name = fmt::format("{}-{}", file, where);
      for (const int64_t n : {2, 4}) runs.copy("whole", name, n);
      const std::string path = runs.step(name, 4) + "/" + file;
      std::string bytes = read_file(path, 1 << 24);
      char& byte = bytes[where == 0 ? 0 : where == 1 ? bytes.size() / 2 : bytes.size() - 1];
      byte = static_cast<char>(byte ^ 1);
      overwrite(path, bytes);

      // Found before anything is trained: the run resumes from the one before.
      runs.begin(name, {}, [&](const Run& run) {
        CHECK(run.resumed_from == runs.step(name, 2));
        CHECK(run.position.step == 2);
        REQUIRE(run.warnings.size() >= 1);
        CHECK(contains(run.warnings[0], "checkpoint not used: " + path));
      });
      const std::string aside = runs.store(name) + "/previous-1";
      CHECK(list_directory(aside) == std::vector<std::string>{"step-4"});
      const TemporaryDirectory output;
      const CapturedOutput captured(output / "out.txt", output / "err.txt");
      const Exit code = runs.train(name, {"checkpointing.resume=" + aside + "/step-4"});
      captured.restore();
      CHECK(code == Exit::data);
      CHECK(contains(read_file(output / "err.txt", 1 << 20), aside + "/step-4/" + file));
      CHECK(error_of([&] { verify_model_directory(aside + "/step-4"); }).code == 65);
    }
  // Trained from there, the run ends with the state of one that was never damaged.
  REQUIRE(runs.train("model.safetensors-1") == Exit::ok);
  for (const char* file : {"model.safetensors", optimizer_file})
    CHECK(runs.same("model.safetensors-1", "whole", file));
}

TEST_CASE("a run survives two saves that fail in a row, but not a third, nor its last one") {
  struct Case {
    std::vector<std::string> failing;
    Exit code;
    std::vector<std::string> saved;
  };
  const Case cases[] = {
      {{"step-1", "step-2"}, Exit::ok, {"LATEST", "step-3", "step-4", "step-5"}},
      {{"step-1", "step-2", "step-4"}, Exit::ok, {"LATEST", "step-3", "step-5"}},
      {{"step-1", "step-2", "step-3"}, Exit::cannot_create, {}},
      {{"step-5"}, Exit::cannot_create, {"LATEST", "step-1", "step-2", "step-3", "step-4"}}};
  for (const Case& c : cases) {
    CAPTURE(c.failing);
    const Runs runs;
    g_failing = c.failing;
    set_file_op_hook(fail_saves);
    Exit code = Exit::ok;
    try {
      code = runs.train("run", {"pretrain.max_num_steps=5", "checkpointing.save_period=1",
                                "checkpointing.keep_latest_k=9"});
    } catch (const Error& e) {
      code = e.code();
    }
    set_file_op_hook(nullptr);
    CHECK(code == c.code);
    const bool any = path_exists(runs.store("run"));
    CHECK((any ? list_directory(runs.store("run")) : std::vector<std::string>{}) == c.saved);
  }
}

namespace {
std::string g_store;
// A run elsewhere takes the lock while the first checkpoint is being written.
int take_lock_at_save(FileOp op, const std::string& path) {
  if (op == FileOp::make_directory && contains(path, "step-1.tmp-"))
    std::ofstream(g_store + "/run.lock")
        << R"({"host":"elsewhere.invalid","pid":7,"boot_id":"b","start_ticks":1,"since":"then"})";
  return 0;
}
}  // namespace

TEST_CASE("a run that has lost its directory to another one saves nothing more") {
  const Runs runs;
  g_store = runs.store("run");
  set_file_op_hook(take_lock_at_save);
  const TemporaryDirectory output;
  const CapturedOutput captured(output / "out.txt", output / "err.txt");
  const Exit code = runs.train("run", {"checkpointing.save_period=1"});
  captured.restore();
  set_file_op_hook(nullptr);
  const std::string text = read_file(output / "err.txt", 1 << 20);
  CHECK(code == Exit::cannot_create);
  CHECK(contains(text, "run.lock: this run has lost the lock to pid 7 on elsewhere.invalid"));
  CHECK(list_directory(g_store) == std::vector<std::string>{"run.lock"});
}

TEST_CASE("checkpointing.resume chooses where a run starts") {
  const Runs runs;
  REQUIRE(runs.train("whole") == Exit::ok);
  const auto started_from = [&](const std::string& name, const std::vector<std::string>& overrides) {
    std::string from;
    runs.begin(name, overrides, [&](const Run& run) {
      from = run.resumed_from;
      CHECK(run.position.step == (from.empty() ? 0 : contains(from, "step-2") ? 2 : 4));
    });
    return from;
  };
  CHECK(started_from("empty", {}) == "");
  CHECK(started_from("whole", {}) == runs.step("whole", 4));
  // Without checkpoints of its own a run starts from initial weights unless checkpointing.resume
  // names a directory.
  const std::string off = "checkpointing.enabled=false";
  CHECK(started_from("whole", {off}) == "");
  CHECK(started_from("whole", {off, "checkpointing.resume=" + runs.step("whole", 2)}) ==
        runs.step("whole", 2));
  CHECK(list_directory(runs.store("whole")) == std::vector<std::string>{"LATEST", "step-2", "step-4"});
  // Of another directory: everything in this one is set aside.
  for (const int64_t n : {2, 4}) runs.copy("whole", "other", n);
  CHECK(started_from("other", {"checkpointing.resume=" + runs.step("whole", 2)}) == runs.step("whole", 2));
  CHECK(list_directory(runs.store("other") + "/previous-1") == std::vector<std::string>{"step-2", "step-4"});
  // In the same: what is newer.
  CHECK(started_from("whole", {"checkpointing.resume=" + runs.step("whole", 2) + "/"}) ==
        runs.step("whole", 2) + "/");
  CHECK(list_directory(runs.store("whole")) == std::vector<std::string>{"LATEST", "previous-1", "step-2"});
  CHECK(started_from("whole", {"checkpointing.resume=never"}) == "");
  CHECK(list_directory(runs.store("whole")) == std::vector<std::string>{"previous-1", "previous-2"});
}
