// Runs that train adapters, or leave tensors frozen: what they start from, compute, save and resume.

#include <cstring>
#include <map>

#include "apps/state/merge_adapter.h"
#include "apps/train/loop/evaluation.h"
#include "apps/train/start/run_check.h"
#include "core/io/safetensors.h"
#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Overrides = std::vector<std::string>;

/// A workbench with a base model, which was trained for four steps.
class LoraBench : public Workbench {
 public:
  LoraBench() { REQUIRE(run("base").code == Exit::ok); }

  std::string base() const { return *this / "base/checkpoints/step-4"; }
  /// Keys of a run that trains adapters of it, and more.
  Overrides lora(Overrides more = {}) const {
    more.insert(more.begin(), {"policy.model_name=" + base(), "policy.lora.enabled=true", "policy.lora.dim=4",
                               "policy.lora.alpha=8", "policy.optimizer.weight_decay=0.5"});
    return more;
  }
  std::string file(const std::string& run, int64_t step, const std::string& name) const {
    return read(fmt::format("{}/checkpoints/step-{}/{}", run, step, name));
  }
  /// The bytes of every tensor of a file.
  std::map<std::string, std::string> tensors(const std::string& path) const {
    std::map<std::string, std::string> out;
    const SafetensorsFile all(*this / path);
    for (const TensorInfo& t : all.tensors()) {
      out[t.name].resize(t.bytes());
      all.read(t, out[t.name].data(), out[t.name].size());
    }
    return out;
  }
};

}  // namespace

TEST_CASE("adapters begin as the base model and improve it, which stays as it is", "[run][lora]") {
  const LoraBench bench;
  const std::string before = bench.weights("base", 4);
  const Overrides validation{"data.split=[1,1,0]", "pretrain.val_at_start=true", "pretrain.val_at_end=true"};
  Overrides plain{"policy.model_name=" + bench.base()};
  plain.insert(plain.end(), validation.begin(), validation.end());
  REQUIRE(bench.run("full", plain).code == Exit::ok);
  const Finished finished = bench.run("lora", bench.lora(validation));
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  CHECK(contains(finished.out, "adapters of rank 4 (x 2) of 14 modules"));
  const auto evaluations = [&](const std::string& run) {
    std::vector<double> out;
    for (const JsonValue& row : bench.rows(run))
      if (row.contains("val_loss")) out.push_back(row.get_double("val_loss"));
    return out;
  };
  const std::vector<double> with = evaluations("lora"), without = evaluations("full");
  REQUIRE(with.size() == 2);
  CHECK(with[0] == without[0]);
  CHECK(with[1] < with[0]);
  CHECK(bench.values("lora", "loss")[0] == bench.values("full", "loss")[0]);
  CHECK(bench.weights("base", 4) == before);
}

TEST_CASE("a checkpoint of adapters is a directory of PEFT", "[run][lora]") {
  const LoraBench bench;
  REQUIRE(bench.run("lora", bench.lora({"policy.lora.target_modules=[q_proj,down_proj]"})).code == Exit::ok);
  const std::string directory = "lora/checkpoints/step-4/";
  CHECK(!path_exists(bench / (directory + "model.safetensors")));
  CHECK(!path_exists(bench / (directory + "config.json")));
  const JsonValue config = parse_json(bench.read(directory + "adapter_config.json"), "adapter_config.json");
  CHECK(config.get_string("peft_type") == "LORA");
  CHECK(config.get_int("r") == 4);
  CHECK(config.get_double("lora_alpha") == 8);
  CHECK(config.get_string("base_model_name_or_path") == bench.base());
  CHECK(config.at("target_modules").dump() == R"(["down_proj","q_proj"])");
  const SafetensorsFile file(bench / (directory + "adapter_model.safetensors"));
  CHECK(file.tensors().size() == 8);
  const std::string q = "base_model.model.model.layers.1.self_attn.q_proj.lora_";
  CHECK(file.at(q + "A.weight").shape == std::vector<int64_t>{4, 16});
  CHECK(file.at(q + "B.weight").shape == std::vector<int64_t>{16, 4});
  CHECK(file.at("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight").shape ==
        std::vector<int64_t>{4, 24});
  // Optimizer state of the adapters alone.
  for (const auto& [name, bytes] : bench.tensors(directory + "optimizer-00001-of-00001.safetensors"))
    CHECK(contains(name, "lora_"));
}

TEST_CASE("a resumed run of adapters goes on bit for bit", "[run][lora]") {
  const LoraBench bench;
  const std::string dropout = "policy.lora.dropout=0.2";
  REQUIRE(bench.run("whole", bench.lora({dropout})).code == Exit::ok);
  REQUIRE(bench.run("parts", bench.lora({dropout, "pretrain.max_num_steps=2"})).code == Exit::ok);
  const Finished resumed = bench.run("parts", bench.lora({dropout}));
  INFO(resumed.err);
  REQUIRE(resumed.code == Exit::ok);
  for (const char* name : {"adapter_model.safetensors", "optimizer-00001-of-00001.safetensors"})
    CHECK(bench.file("whole", 4, name) == bench.file("parts", 4, name));
  CHECK(bench.values("whole", "loss") == bench.values("parts", "loss"));
  // Another rank of the adapter, another base model.
  const Finished rank =
      bench.run("parts", bench.lora({dropout, "policy.lora.dim=2", "pretrain.max_num_steps=6"}));
  CHECK(rank.code == Exit::config);
  CHECK(contains(rank.err, "policy.lora.dim"));
  REQUIRE(bench.run("other", {"pretrain.seed=8"}).code == Exit::ok);
  const std::string other = "policy.model_name=" + bench / "other/checkpoints/step-4";
  const Finished model = bench.run("parts", bench.lora({dropout, other, "pretrain.max_num_steps=6"}));
  CHECK(model.code == Exit::config);
  CHECK(contains(model.err, "policy.model_name.content"));
}

TEST_CASE("a run starts from an adapter", "[run][lora]") {
  const LoraBench bench;
  REQUIRE(bench.run("first", bench.lora()).code == Exit::ok);
  const std::string adapter = "policy.lora.adapter=" + bench / "first/checkpoints/step-4";
  REQUIRE(bench.run("second", bench.lora({adapter, "pretrain.max_num_steps=0"})).code == Exit::ok);
  CHECK(bench.tensors("second/checkpoints/step-0/adapter_model.safetensors") ==
        bench.tensors("first/checkpoints/step-4/adapter_model.safetensors"));
  for (const auto& [key, text] :
       std::map<std::string, std::string>{{"policy.lora.dim=2", "policy.lora.dim is 2, but r of the adapter"},
                                          {"policy.lora.target_modules=q_proj", "does not select"},
                                          {"policy.lora.adapter=" + bench.base(), "adapter_config.json"}}) {
    const Finished finished = bench.run("second", bench.lora({adapter, key}));
    INFO(finished.err);
    CHECK(finished.code != Exit::ok);
    CHECK(contains(finished.err, text));
  }
}

TEST_CASE("keys of adapters change what is trained", "[run][lora]") {
  const LoraBench bench;
  REQUIRE(bench.run("plain", bench.lora()).code == Exit::ok);
  for (const char* key : {"policy.lora.alpha=16", "policy.lora.dropout=0.2", "policy.lora.use_rslora=true",
                          "policy.lora.lora_A_init=xavier"}) {
    INFO(key);
    REQUIRE(bench.run("changed", bench.lora({key, "checkpointing.resume=never"})).code == Exit::ok);
    CHECK(bench.values("changed", "loss").back() != bench.values("plain", "loss").back());
  }
}

TEST_CASE("an evaluation of the files gives the loss of the run", "[run][lora]") {
  const LoraBench bench;
  REQUIRE(bench
              .run("lora", bench.lora({"data.split=[1,1,0]", "pretrain.val_at_end=true",
                                       "pretrain.max_num_steps=20"}))
              .code == Exit::ok);
  const std::string adapter = bench / "lora/checkpoints/step-20", merged = bench / "merged";
  train::merge_adapter(adapter, merged);
  const auto world = comm::World::init();
  const IndexedDataset data(bench / "corpus");
  std::vector<double> losses;
  for (const std::string& directory : {adapter, merged, bench.base()}) {
    train::StoredModelEvaluator evaluator(
        *world, {.directory = directory, .sequence_length = 8, .tokens = data.tokens()});
    losses.push_back(evaluator.run(data, 0).loss());
  }
  CHECK(losses[1] == Approx(losses[0]).epsilon(1e-6));
  CHECK(std::abs(losses[2] - losses[0]) > 1e-3);
}

TEST_CASE("frozen tensors keep their bits", "[run][lora]") {
  const LoraBench bench;
  const Finished finished = bench.run("frozen", {"policy.model_name=" + bench.base(),
                                                 "policy.freeze=[embed_tokens,\"*norm*\",\"layers.0.*\"]",
                                                 "policy.optimizer.weight_decay=0.5"});
  INFO(finished.err);
  REQUIRE(finished.code == Exit::ok);
  CHECK(contains(finished.out, "parameters trained, frozen: embed_tokens, *norm*, layers.0.*"));
  const auto before = bench.tensors("base/checkpoints/step-4/model.safetensors"),
             after = bench.tensors("frozen/checkpoints/step-4/model.safetensors");
  REQUIRE(before.size() == after.size());
  int changed = 0;
  for (const auto& [name, bytes] : before) {
    INFO(name);
    const bool frozen =
        contains(name, "embed_tokens") || contains(name, "norm") || contains(name, "layers.0.");
    CHECK((after.at(name) == bytes) == frozen);
    changed += frozen ? 0 : 1;
  }
  CHECK(changed == 8);  // the matrices of layer 1, and the head
  for (const auto& [name, bytes] :
       bench.tensors("frozen/checkpoints/step-4/optimizer-00001-of-00001.safetensors"))
    CHECK(!contains(name, "norm"));
}

TEST_CASE("two ranks save one adapter, which one rank resumes", "[run][lora]") {
  const LoraBench bench;
  const std::string launcher = NRL_TWO_RANKS;
  for (const char* layout : {"distributed.tensor_parallel_size=2", "distributed.pipeline_parallel_size=2",
                             "distributed.shard_strategy=optim_grads_params"}) {
    INFO(layout);
    std::filesystem::remove_all(bench / "two");
    REQUIRE(bench.run("one", bench.lora({"checkpointing.resume=never"})).code == Exit::ok);
    const Finished two = bench.run_ranks(launcher, "two", bench.lora({layout, "pretrain.max_num_steps=2"}));
    INFO(two.err);
    REQUIRE(two.code == Exit::ok);
    CHECK(path_exists(bench / "two/checkpoints/step-2/adapter_model.safetensors"));
    REQUIRE(bench.run("two", bench.lora()).code == Exit::ok);
    const std::vector<double> want = bench.values("one", "loss"), got = bench.values("two", "loss");
    REQUIRE(got.size() == 4);
    for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(want[i]).epsilon(1e-6));
  }
}

TEST_CASE("what adapters cannot be combined with is refused with the reason", "[run][lora]") {
  const LoraBench bench;
  for (const auto& [keys, text] : std::vector<std::pair<Overrides, std::string>>{
           {bench.lora({"policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_param=true"}),
            "is not supported with adapters"},
           {{"policy.freeze=[lm_head]", "policy.fp8_cfg.enabled=true", "policy.fp8_cfg.fp8_param=true"},
            "the optimizer writes FP8 weights"},
           {{"policy.lora.dim=4"}, "policy.lora.dim"},
           {bench.lora({"policy.lora.target_modules=[lm_head]"}), "lm_head, which cannot have an adapter"},
           {bench.lora({"policy.lora.target_modules=[wq]"}), "selects no module"},
           {{"policy.freeze=[q_proj]"}, "both are one matrix here"}}) {
    const Finished finished = bench.run("refused", keys);
    INFO(text << ": " << finished.err);
    CHECK(finished.code == Exit::config);
    CHECK(contains(finished.err, text));
  }
  write_file_atomic(bench / "scratch.yaml", bench.yaml("scratch"));
  ConfigResult scratch = load_config(bench / "scratch.yaml", Overrides{"policy.lora.enabled=true"});
  train::check_but_memory(scratch, {.training = true});
  CHECK(contains(render(scratch.diagnostics), "there is no base model"));
  // An adapter where a model is expected.
  REQUIRE(bench.run("lora", bench.lora()).code == Exit::ok);
  const Finished finished = bench.run("again", {"policy.model_name=" + bench / "lora/checkpoints/step-4"});
  CHECK(finished.code == Exit::no_input);
  CHECK(contains(finished.err, "give it as policy.lora.adapter"));
}
