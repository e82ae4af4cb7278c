// What a checkpoint records of its run, and which changes a resume accepts.
#include "apps/state/resume.h"

#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "core/io/checkpoint_store.h"
#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

const char* const llama =
    R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2)";

model::ModelSpec spec(const std::string& more = "") {
  return model::parse_model_config(llama + more + "}", "config.json");
}

Inputs inputs() {
  Inputs in;
  in.train = {{"a", "idx 1; bin 1"}, {"b", "idx 2; bin 2"}};
  in.validation = {{"v", "idx 3; bin 3"}};
  return in;
}

RunRecord record(const Config& config, const model::ModelSpec& m = spec(), const Inputs& in = inputs()) {
  return make_record(config, m, DType::f32, 2, in);
}

std::vector<std::string> compare(const RunRecord& saved, const RunRecord& now,
                                 std::vector<ResumeChange> allowed = {}) {
  return compare_records(saved, now, allowed, "store/step-5");
}

// A committed checkpoint of one tensor with this state.
std::string save_state(const std::string& store, int64_t step, const JsonValue& state) {
  CheckpointWriter writer(store, step, 100);
  writer.add_file("config.json", std::string(llama) + "}");
  return writer.commit(state);
}

JsonValue position(int64_t step) {
  return JsonValue::object({{"step", step},
                            {"updates", step},
                            {"consumed_samples", step * 8},
                            {"tokens", step * 256},
                            {"skipped", 0},
                            {"skipped_in_a_row", 0},
                            {"dataset_samples", 80},
                            {"global_batch", 8},
                            {"best_val_loss", 0.0},
                            {"best_val_step", 0}});
}

}  // namespace

TEST_CASE("changes that any resume may make are listed") {
  const Config before;
  CHECK(compare(record(before), record(before)).empty());
  Config after = before;
  after.policy.optimizer.lr = 1e-5;
  after.policy.train_global_batch_size = 64;
  after.pretrain.max_num_steps = 7;
  after.logger.log_dir = "elsewhere";
  Inputs moved = inputs();
  moved.train[1].prefix = "/new/b";
  moved.validation.clear();
  CHECK(compare(record(before), record(after, spec(), moved)) ==
        std::vector<std::string>{
            "data.train.data_path[1]: b -> /new/b (same content)",
            "data.validation.content[0]: idx 3; bin 3 -> none", "data.validation.data_path[0]: v -> none",
            "policy.optimizer.lr: 3e-04 -> 1e-05",
            "policy.train_global_batch_size: 32 -> 64 (step count and data position are preserved)",
            "pretrain.max_num_steps: null -> 7"});
}

TEST_CASE("changes that need a word are refused with the key that allows them") {
  const Config before;
  Config sequence = before, seed = before, split = before;
  sequence.policy.max_total_sequence_length = 2048;
  seed.pretrain.seed = 43;
  split.data.split = {9, 1, 0};
  Inputs content = inputs(), fewer = inputs();
  content.train[0].content = "idx 1; bin 9";
  fewer.train.pop_back();
  struct Case {
    RunRecord now;
    const char* line;
    ResumeChange allow;
  };
  const Case cases[] = {
      {record(sequence), "policy.max_total_sequence_length: 1024 -> 2048", ResumeChange::sequence_length},
      {record(seed), "data.seed: 42 -> 43", ResumeChange::seed},
      {record(split), "data.split: null -> [9, 1, 0]", ResumeChange::data},
      {record(before, spec(), content), "data.train.content[0]: idx 1; bin 1 -> idx 1; bin 9",
       ResumeChange::data},
      {record(before, spec(), fewer), "data.train.content[1]: idx 2; bin 2 -> none", ResumeChange::data},
      {record(before, spec(R"(, "rope_theta": 500000)")), "policy.model.rope_theta: 10000 -> 500000",
       ResumeChange::model},
      {record(before, spec(R"(, "rms_norm_eps": 1e-5)")), "policy.model.norm_eps: 1e-06 -> 1e-05",
       ResumeChange::model},
      {record(before, spec(R"(, "hidden_act": "gelu")")), "policy.model.hidden_act: silu -> gelu",
       ResumeChange::model},
      {record(before, spec(R"(, "rope_scaling": {"rope_type": "linear", "factor": 2})")),
       "policy.model.rope_type: default -> linear", ResumeChange::model},
  };
  for (const Case& c : cases) {
    CAPTURE(c.line);
    const Caught caught = error_of([&] { compare(record(before), c.now); });
    CHECK(caught.code == 78);
    CHECK(contains(caught.text, "store/step-5"));
    CHECK(contains(caught.text, c.line));
    CHECK(contains(caught.text, fmt::format("checkpointing.allow_changes=[{}]", name_of(c.allow))));
    const std::vector<std::string> changed = compare(record(before), c.now, {c.allow});
    CHECK(std::any_of(changed.begin(), changed.end(),
                      [&](const std::string& s) { return s.starts_with(c.line); }));
    // Another permission does not allow it.
    const ResumeChange other = c.allow == ResumeChange::data ? ResumeChange::seed : ResumeChange::data;
    CHECK(error_of([&] { compare(record(before), c.now, {other}); }).code == 78);
  }
  // Another sliding window, in the family that has one.
  const auto mistral = [](int window) {
    return model::parse_model_config(
        fmt::format(
            R"({{"model_type": "mistral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
          "num_hidden_layers": 2, "num_attention_heads": 4, "sliding_window": {}}})",
            window),
        "config.json");
  };
  CHECK(contains(error_of([&] { compare(record(before, mistral(8)), record(before, mistral(9))); }).text,
                 "policy.model.sliding_window: 8 -> 9"));
}

TEST_CASE("another model, and other weights, are refused without a key") {
  const Config config;
  const std::vector<ResumeChange> all{ResumeChange::data, ResumeChange::seed, ResumeChange::sequence_length,
                                      ResumeChange::model};
  // The same shapes of all tensors, cut into other heads.
  const auto heads = [](int n) {
    return model::parse_model_config(
        fmt::format(R"({{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
          "num_hidden_layers": 2, "num_attention_heads": {}}})",
                    n),
        "config.json");
  };
  Caught caught = error_of([&] { compare(record(config, heads(4)), record(config, heads(2)), all); });
  CHECK(caught.code == 78);
  CHECK(contains(caught.text, "policy.model.num_attention_heads: 4 -> 2"));
  CHECK_FALSE(contains(caught.text, "allow_changes"));
  caught =
      error_of([&] { compare(record(config), make_record(config, spec(), DType::bf16, 2, inputs()), all); });
  CHECK(contains(caught.text, "policy.precision: f32 -> bf16"));
}

TEST_CASE("a record survives the manifest; a checkpoint without one says what cannot be compared") {
  const TemporaryDirectory dir;
  const RunRecord now = record(Config());
  JsonValue state = position(1);
  state.set("run", record_to_json(now));
  const SavedRecord saved = read_record(CheckpointReader(save_state(dir.path(), 1, state)), 8);
  CHECK(saved.record == now);
  CHECK(saved.incomplete.empty());

  const SavedRecord old = read_record(CheckpointReader(save_state(dir.path(), 2, position(2))), 8);
  CHECK(contains(old.incomplete, "were not compared"));
  // Its own config.json still tells the model, and the position the batch.
  CHECK(compare(old.record, now) ==
        std::vector<std::string>{
            "policy.train_global_batch_size: 8 -> 32 (step count and data position are preserved)"});
  CHECK(error_of([&] { compare(old.record, record(Config(), spec(R"(, "rope_theta": 7)"))); }).code == 78);

  state.set("run", JsonValue::object({{"version", 2}, {"facts", 3}}));
  CHECK(contains(read_record(CheckpointReader(save_state(dir.path(), 3, state)), 8).incomplete,
                 "another version"));
  state.set("run", JsonValue::object({{"version", 1}, {"facts", JsonValue::object({{"x", 3}})}}));
  CHECK(error_of([&] { read_record(CheckpointReader(save_state(dir.path(), 4, state)), 8); }).code == 65);
}

TEST_CASE("counters out of range or in contradiction are refused") {
  const TemporaryDirectory dir;
  const auto attempt = [&](std::string key, JsonValue value) {
    JsonValue state = position(5);
    state.set(std::move(key), std::move(value));
    return error_of([&] { read_position(CheckpointReader(save_state(dir.path(), 5, state))); });
  };
  CHECK(attempt("step", 5).text.empty());
  CHECK(contains(attempt("step", 6).text, "inconsistent"));
  CHECK(contains(attempt("updates", 4).text, "inconsistent"));
  CHECK(contains(attempt("tokens", 1).text, "inconsistent"));
  CHECK(contains(attempt("consumed_samples", 0).text, "inconsistent"));
  for (const char* key : {"step", "updates", "skipped", "skipped_in_a_row", "consumed_samples", "tokens",
                          "dataset_samples", "global_batch", "best_val_step"})
    for (const int64_t value : {int64_t{-1}, INT64_MIN, INT64_MAX}) {
      CAPTURE(key, value);
      const Caught caught = attempt(key, value);
      CHECK(caught.code == 65);
      CHECK(contains(caught.text, fmt::format("{} is {}", key, value)));
    }
  CHECK(attempt("tokens", 1e30).code == 65);
  // Rollbacks: absent in checkpoints of runs without any, and of earlier versions.
  JsonValue recovered = position(5);
  CHECK(read_position(CheckpointReader(save_state(dir.path(), 5, recovered))).lr_factor == 1);
  recovered.set("recoveries", 2);
  recovered.set("lr_factor", 0.25);
  const Position read = read_position(CheckpointReader(save_state(dir.path(), 5, recovered)));
  CHECK(read.recoveries == 2);
  CHECK(read.lr_factor == 0.25);
  CHECK(attempt("recoveries", -1).code == 65);
  CHECK(attempt("recoveries", 1).code == 65);  // without lr_factor
  for (const double factor : {0.0, -0.5, 1.5, 1e300}) {
    JsonValue state = recovered;
    state.set("lr_factor", factor);
    const Caught caught =
        error_of([&] { read_position(CheckpointReader(save_state(dir.path(), 5, state))); });
    CHECK(caught.code == 65);
    CHECK(contains(caught.text, "lr_factor is"));
  }
  for (const double value : {-1.0, -1e300, 1e300})
    CHECK(contains(attempt("best_val_loss", value).text, "best_val_loss is"));
}

TEST_CASE("the verification of a checkpoint covers its counters") {
  const TemporaryDirectory dir;
  const auto problems = [&](const std::function<void(JsonValue&)>& edit) {
    JsonValue state = position(5);
    edit(state);
    return verify_checkpoint(save_state(dir.path(), 5, state));
  };
  CHECK(problems([](JsonValue&) {}).empty());
  const std::string manifest = dir / "step-5/manifest.json";
  for (const char* key : {"step", "updates", "skipped", "skipped_in_a_row", "consumed_samples", "tokens",
                          "dataset_samples", "global_batch", "best_val_step"})
    for (const int64_t value : {int64_t{-1}, INT64_MAX}) {
      const auto found = problems([&](JsonValue& state) { state.set(key, value); });
      REQUIRE(found.size() == 1);
      CHECK(found[0].starts_with(manifest + ": "));
      CHECK(contains(found[0], fmt::format("{} is {}", key, value)));
    }
  CHECK(problems([](JsonValue& state) { state.set("tokens", "many"); }).at(0).starts_with(manifest + ":"));
  CHECK(problems([](JsonValue& state) {
          state.set("run", JsonValue::object({{"version", 1}, {"facts", 3}}));
        })
            .at(0)
            .starts_with(manifest + ":"));
  const std::string path = save_state(dir.path(), 5, position(5));
  remove_tree(path + "/config.json");
  CHECK(verify_checkpoint(path) == std::vector<std::string>{path + "/config.json: missing"});
}

TEST_CASE("after wrong bits, checkpoints whose replicas agreed are left") {
  const TemporaryDirectory dir;
  CheckpointingConfig config;
  config.enabled = true;
  config.checkpoint_dir = dir.path();
  std::vector<std::string> warnings;
  const auto unproven = [&] {
    warnings.clear();
    return without_agreement(config, warnings);
  };
  CHECK((unproven().empty() && warnings.empty()));
  save_state(dir.path(), 4, position(4));
  // None says so: the newest one is taken, with a warning.
  CHECK((unproven().empty() && warnings.size() == 1));
  JsonValue agreed = position(8);
  agreed.set("replicas_agreed", true);
  save_state(dir.path(), 8, agreed);
  save_state(dir.path(), 12, position(12));
  const KnownDamage found = unproven();
  CHECK((found.size() == 2 && found.contains(dir / "step-4") && found.contains(dir / "step-12")));
  CHECK(warnings.empty());
  const CheckpointChoice choice = choose_checkpoint(config, found);
  CHECK(choice.path == dir / "step-8");
  REQUIRE(!choice.warnings.empty());
  CHECK(contains(choice.warnings[0], dir / "step-12: the attempt before ended with silent data corruption"));
  // One that the command names is taken.
  config.resume.mode = ResumeMode::directory;
  CHECK(unproven().empty());
}

TEST_CASE("ranks that see other files are named with the file") {
  const std::vector<InputFile> files{{"a.idx", "1 bytes, CRC-32C 1"}, {"a.bin", "2 bytes, CRC-32C 2"}};
  const std::string good = to_text(files);
  const std::vector<std::string> hosts{"n0", "n1", "n2"};
  CHECK_NOTHROW(require_same_files({good, good, good}, hosts));
  std::vector<InputFile> other = files;
  other[1].second = "missing";
  const Caught caught = error_of([&] { require_same_files({good, good, to_text(other)}, hosts); });
  CHECK(caught.code == 65);
  CHECK(
      contains(caught.text, "rank 0 (n0) sees a.bin (2 bytes, CRC-32C 2), rank 2 (n2) sees a.bin (missing)"));
  other.pop_back();
  CHECK(contains(error_of([&] {
                   require_same_files({good, to_text(other), good}, hosts);
                 }).text,
                 "rank 1 (n1) sees no file"));
}
