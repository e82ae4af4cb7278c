#include <filesystem>
#include <fstream>

#include <unistd.h>

#include "tests/catch.h"
#include "tests/config/helpers.h"

using namespace nrl;
using namespace nrl::test;

namespace {

Config load_good(const ConfigResult& result) {
  INFO(render(result.diagnostics));
  REQUIRE(result.ok());
  return result.config;
}

/// A temporary directory.
struct Folder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("nrl_config_good_" + std::to_string(::getpid()));
  Folder() { std::filesystem::create_directories(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name) << text;
    return (path / name).string();
  }
};

void require_round_trip(const ConfigResult& result) {
  REQUIRE(result.ok());
  const std::string dump = dump_resolved(result);
  const ConfigResult again = load_config_text(dump, "dump.yaml");
  INFO(dump);
  INFO(render(again.diagnostics));
  REQUIRE(again.ok());
  CHECK(again.config == result.config);
}

}  // namespace

TEST_CASE("the smallest configuration has the documented defaults", "[config]") {
  const Config config = load_good(load_text(base_yaml));
  CHECK(config.algorithm == Algorithm::pretrain);
  CHECK(config.policy.precision == Precision::automatic);
  CHECK(config.policy.optimizer.betas == std::array<double, 2>{0.9, 0.95});
  CHECK(config.policy.train_micro_batch_size.is_auto());
  CHECK(config.data.train.data_path == std::vector<std::string>{"corpus"});
  CHECK(config.pretrain.max_num_steps == 10);
  CHECK(config.policy.model_json == "{\"model_type\": \"llama\"}");
}

TEST_CASE("every kind of value is read", "[config]") {
  const ConfigResult result = load_text(
      "policy:\n"
      "  model_name: \"/models/\\u00e9 x\"\n"
      "  precision: bfloat16\n"
      "  train_global_batch_size: 1k\n"
      "  train_micro_batch_size: 4\n"
      "  max_grad_norm: null\n"
      "  optimizer: {lr: 1.5e-4, betas: [0.8, 0.99], lr_scaling: {rule: sqrt, base_batch_size: 256}}\n"
      "  scheduler: {lr_decay_style: WSD, lr_wsd_decay_iters: 100, warmup_ratio: 0.01, unit: "
      "optimizer_steps}\n"
      "  recompute: {granularity: selective, modules: [norm]}\n"
      "distributed: {shard_strategy: optim, overlap_grad_reduce: False, bucket_size_mb: 0.5, "
      "data_parallel_size: 2}\n"
      "pretrain: {max_num_steps: 2M, max_num_epochs: 3, on_nonfinite: stop, val_at_start: true}\n"
      "data:\n"
      "  train:\n"
      "    data_path:\n"
      "      - web\n"
      "      - 'code # 1'\n"
      "    weights: [0.7, 0.3]\n"
      "  split: 969,30,1\n"
      "checkpointing: {resume: results/step-5, keep_latest_k: null, save_period: 1MiB}\n"
      "kernels: {num_threads: 3, isa: avx2}\n");
  const Config config = load_good(result);
  CHECK(config.policy.model_name == "/models/\xc3\xa9 x");
  CHECK(config.policy.train_global_batch_size == 1000);
  CHECK(config.policy.train_micro_batch_size.value() == 4);
  CHECK(!config.policy.max_grad_norm);
  CHECK(config.policy.optimizer.lr == 1.5e-4);
  CHECK(config.policy.optimizer.betas == std::array<double, 2>{0.8, 0.99});
  CHECK(config.policy.optimizer.lr_scaling.rule == LrScalingRule::sqrt);
  CHECK(config.policy.scheduler.lr_decay_style == LrDecayStyle::wsd);
  CHECK(config.policy.recompute.modules.value() == std::vector{BlockModule::norm});
  CHECK(config.distributed.shard_strategy == ShardStrategy::optim);
  CHECK(!config.distributed.overlap_grad_reduce);
  CHECK(config.distributed.bucket_size_mb == 0.5);
  CHECK(config.pretrain.max_num_steps == 2000000);
  CHECK(config.pretrain.on_nonfinite == OnNonfinite::stop);
  CHECK(config.data.train.data_path == std::vector<std::string>{"web", "code # 1"});
  CHECK(*config.data.train.weights == std::vector{0.7, 0.3});
  CHECK(*config.data.split == std::array<double, 3>{969, 30, 1});
  CHECK(config.checkpointing.resume == ResumeFrom{ResumeMode::directory, "results/step-5"});
  CHECK(!config.checkpointing.keep_latest_k);
  CHECK(config.checkpointing.save_period == 1048576);
  CHECK(config.kernels.num_threads.value() == 3);
  CHECK(result.origins.at("policy.optimizer.lr").text == "t.yaml:7:19");
  CHECK(result.origins.count("policy.optimizer.eps") == 0);
  require_round_trip(result);
}

TEST_CASE("odd but valid layouts of YAML are read", "[config]") {
  const std::string crlf =
      "policy:\r\n  model: {model_type: llama}\r\npretrain: {max_num_steps: 10}\r\ndata: {train: {data_path: "
      "c}}\r\n";
  CHECK(load_good(load_text(crlf)).pretrain.max_num_steps == 10);
  const std::string indented =
      "# note\n\n  policy: {model: {model_type: llama}}\n  pretrain: {max_num_steps: 10}\n  data: {train: "
      "{data_path: c}}\n";
  CHECK(load_good(load_text(indented)).pretrain.max_num_steps == 10);
  CHECK(load_good(load_text("---\n" + base_yaml)).pretrain.max_num_steps == 10);
  CHECK(load_good(load_text("\xef\xbb\xbf" + base_yaml)).pretrain.max_num_steps == 10);
  CHECK(load_good(load_text(base_yaml + "logger:\n  # nothing\n")).logger.log_interval == 10);
  CHECK(load_good(load_text(base_yaml + "logger: {log_dir: __end__}")).logger.log_dir == "__end__");
  CHECK(load_good(load_text(base_yaml + "logger:\n  log_dir: >-\n    a\n    b\n")).logger.log_dir == "a b");
}

TEST_CASE("overrides come last and are parsed as YAML", "[config]") {
  const ConfigResult result =
      load_base({"policy.optimizer.lr=1e-3", "policy.optimizer={lr: 2e-3, eps: 1e-6}",
                 "data.train.data_path=[a, b]", "++pretrain.seed=7", "logger.log_dir=a=b"});
  const Config config = load_good(result);
  CHECK(config.policy.optimizer.lr == 2e-3);
  CHECK(config.policy.optimizer.eps == 1e-6);
  CHECK(config.data.train.data_path == std::vector<std::string>{"a", "b"});
  CHECK(config.pretrain.seed == 7);
  CHECK(config.logger.log_dir == "a=b");
  CHECK(result.origins.at("pretrain.seed").text == "command line: ++pretrain.seed=7");
  require_round_trip(result);
}

TEST_CASE("foreign spellings are translated and listed", "[config]") {
  const ConfigResult result = load_text(
      "model: {name: /m, attention: {type: flash}}\n"
      "training: {bf16: true, fp16: false, mixed_precision: true, learning_rate: 1e-3, max_steps: 7, "
      "warmup_ratio: 0.1}\n"
      "policy:\n"
      "  hf_config_overrides: {hidden_size: 64, rope_scaling: {type: yarn, factor: 4}}\n"
      "  megatron_cfg:\n"
      "    tensor_model_parallel_size: 1\n"
      "    optimizer: {optimizer: adam, min_lr: 1e-5, use_distributed_optimizer: true}\n"
      "    scheduler: {lr_decay_style: inverse_square_root}\n"
      "distributed: {backend: ray, num_nodes: 3, world_size: 24}\n"
      "checkpointing: {save_total_limit: 2, save_steps: 5}\n"
      "data: {train_files: [x]}\n");
  const Config config = load_good(result);
  CHECK(config.policy.model_name == "/m");
  CHECK(config.policy.precision == Precision::bfloat16);
  CHECK(config.policy.attention.type == AttentionType::flash_attention);
  CHECK(config.policy.optimizer.lr == 1e-3);
  CHECK(config.policy.scheduler.lr_decay_style == LrDecayStyle::inverse_square_root);
  CHECK(config.distributed.shard_strategy == ShardStrategy::optim);
  CHECK(config.distributed.backend == CommBackend::automatic);
  CHECK(config.cluster.world_size == 24);
  CHECK(config.checkpointing.keep_latest_k == 2);
  CHECK(config.policy.model_json ==
        "{\"hidden_size\": 64, \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}}");
  auto listed = [&](std::string_view given, std::string_view canonical) {
    for (const Translation& t : result.translated)
      if (t.given == given && t.canonical == canonical && !t.place.empty()) return true;
    return false;
  };
  CHECK(listed("training.bf16: true", "policy.precision: bfloat16"));
  CHECK(listed("model.name: /m", "policy.model_name: /m"));
  CHECK(listed("distributed.backend: ray", "distributed.backend: auto"));
  CHECK(listed("training.max_steps: 7", "pretrain.max_num_steps: 7"));
  require_round_trip(result);
  CHECK(load_good(load_base({"training.mixed_precision=true"})).policy.precision == Precision::bfloat16);
  CHECK(load_good(load_base({"training.mixed_precision=false"})).policy.precision == Precision::float32);
  CHECK(load_good(load_base({"training.bf16=false"})).policy.precision == Precision::automatic);
}

TEST_CASE("training.batch_size counts the sequences of one accumulation step", "[config]") {
  const std::string guide = base_yaml + "training: {batch_size: 192, gradient_accumulation_steps: 4}\n";
  const ConfigResult result = load_text(guide);
  CHECK(load_good(result).policy.train_global_batch_size == 768);
  REQUIRE(result.translated.size() == 2);
  CHECK(result.translated[1].given == "training.batch_size: 192");
  CHECK(result.translated[1].canonical ==
        "policy.train_global_batch_size: 768 (192 x policy.gradient_accumulation_steps 4)");
  CHECK(validate_for_world(result, 24).empty());
  CHECK(resolve_batch(result.config, 24).micro == 8);
  require_round_trip(result);
  const auto global = [&](const std::string& text, std::vector<std::string> overrides) {
    return load_good(load_text(text, std::move(overrides))).policy.train_global_batch_size;
  };
  CHECK(global(base_yaml + "training: {batch_size: 192}\n", {}) == 192);
  CHECK(global(guide, {"policy.gradient_accumulation_steps=2"}) == 384);
  CHECK(global(guide, {"training.batch_size=96"}) == 384);
  CHECK(global(guide, {"policy.train_global_batch_size=64"}) == 64);
  CHECK(global(guide, {"policy.gradient_accumulation_steps=null"}) == 192);
  CHECK(global(guide + "logger: {log_dir: x}\n", {"policy.train_global_batch_size=768"}) == 768);
  CHECK(global(base_yaml, {"training.batch_size=8", "policy.gradient_accumulation_steps=4",
                           "policy.train_global_batch_size=32"}) == 32);
}

TEST_CASE("of a key that the command line gives twice the later value counts", "[config]") {
  const auto precision = [](std::vector<std::string> overrides) {
    return load_good(load_text(base_yaml + "training: {fp16: true}\n", std::move(overrides)))
        .policy.precision;
  };
  CHECK(precision({}) == Precision::float16);
  CHECK(precision({"training.bf16=true"}) == Precision::bfloat16);
  CHECK(precision({"training.fp16=false"}) == Precision::automatic);
  CHECK(precision({"training.bf16=true", "training.bf16=false"}) == Precision::automatic);
  CHECK(precision({"policy.precision=float32", "policy.precision=bfloat16"}) == Precision::bfloat16);
  const std::string mixed = base_yaml + "training: {mixed_precision: true}\n";
  CHECK(load_good(load_text(mixed, {"policy.precision=float32"})).policy.precision == Precision::float32);
  CHECK(load_good(load_text(mixed, {"training.mixed_precision=false"})).policy.precision ==
        Precision::float32);
  CHECK(load_good(load_base({"policy.model.rope_scaling={factor: 2}", "policy.model.rope_scaling=null",
                             "policy.model.rope_scaling.factor=3"}))
            .policy.model_json == "{\"model_type\": \"llama\", \"rope_scaling\": {\"factor\": 3}}");
}

TEST_CASE("the configurations of guides load as they are", "[config]") {
  const auto documented = [](const std::string& name, int ranks) {
    const std::vector<std::string> minimum{"policy.model.model_type=llama", "data.train.data_path=corpus",
                                           "pretrain.max_num_steps=2"};
    const ConfigResult result = load_config(NRL_SOURCE_DIR "/tests/cli/documents/" + name + ".yaml", minimum);
    INFO(render(result.diagnostics));
    CHECK(result.diagnostics.empty());
    CHECK(validate_for_world(result, ranks).empty());
    CHECK_FALSE(validate_for_world(result, ranks - 1).empty());
    return load_good(result);
  };
  const Config efficient = documented("memory-efficient", 2);
  CHECK(efficient.policy.precision == Precision::bfloat16);
  CHECK(efficient.distributed.model_parallel == true);
  CHECK(efficient.policy.pin_memory.value());
  const Config large = documented("large-model", 8);
  CHECK(large.policy.loss_scaling.value().scale == 32768);
  CHECK(large.policy.checkpoint_every == 2);
  const Config cluster = documented("multi-node", 24);
  CHECK(cluster.policy.train_global_batch_size == 768);
  CHECK(cluster.distributed.backend == CommBackend::automatic);
}

TEST_CASE("files inherit depth first, and places name the right file", "[config]") {
  const Folder folder;
  folder.write("base.yaml", base_yaml + "logger: {log_dir: base, log_interval: 3}\n");
  folder.write("sub/mid.yaml",
               "defaults: ../base.yaml\nlogger: {log_dir: mid}\npolicy: {optimizer: {lr: 0.5}}\n");
  folder.write("more.yaml", "policy: {optimizer: {lr: 0.25}}\n");
  const std::string top =
      folder.write("top.yaml", "defaults: [sub/mid.yaml, more.yaml]\npretrain: {seed: 5}\n");
  const ConfigResult result = load_config(top);
  const Config config = load_good(result);
  CHECK(config.logger.log_dir == "mid");
  CHECK(config.logger.log_interval == 3);
  CHECK(config.policy.optimizer.lr == 0.25);
  CHECK(config.pretrain.seed == 5);
  REQUIRE(result.files.size() == 4);
  CHECK(contains(result.files[0], "base.yaml"));
  CHECK(contains(result.files[3], "top.yaml"));
  CHECK(contains(result.origins.at("logger.log_dir").text, "mid.yaml:2:19"));
  require_round_trip(result);

  folder.write("sub/mid.yaml", "defaults: ../base.yaml\nlogger: {log_dirr: mid}\n");
  const ConfigResult wrong = load_config(top);
  REQUIRE(wrong.diagnostics.size() == 1);
  CHECK(contains(wrong.diagnostics[0].file, "sub/mid.yaml"));
  CHECK(wrong.diagnostics[0].line == 2);
  CHECK(wrong.diagnostics[0].column == 10);

  folder.write("base.yaml", "defaults: top.yaml\n");
  const ConfigResult circle = load_config(top);
  CHECK(contains(render(circle.diagnostics), "inherits from itself"));
  CHECK(contains(render(circle.diagnostics), "base.yaml:1:11"));
  const ConfigResult missing = load_config(folder.write("m.yaml", "defaults: nowhere.yaml\n"));
  CHECK(contains(render(missing.diagnostics), "m.yaml:1:11"));
  CHECK(contains(render(missing.diagnostics), "No such file"));
}

TEST_CASE("a file that inherits twice from each of many files ends", "[config]") {
  const Folder folder;
  folder.write("f0.yaml", base_yaml);
  std::string top;
  for (int i = 1; i <= 12; ++i) {
    const std::string below = "f" + std::to_string(i - 1) + ".yaml";
    top = folder.write("f" + std::to_string(i) + ".yaml", "defaults: [" + below + ", " + below + "]\n");
  }
  CHECK(contains(render(load_config(top).diagnostics), "more than 64 files"));
}

TEST_CASE("a whole value may refer to another key", "[config]") {
  const ConfigResult result =
      load_base({"logger.log_dir=${checkpointing.checkpoint_dir}", "checkpointing.checkpoint_dir=out",
                 "data.seed=${pretrain.seed}", "policy.tokenizer.name=${policy.model_name}"});
  const Config config = load_good(result);
  CHECK(config.logger.log_dir == "out");
  CHECK(config.data.seed == 42);
  CHECK(!config.policy.tokenizer.name);
  require_round_trip(result);
  const Config chain =
      load_good(load_base({"checkpointing.checkpoint_dir=${logger.log_dir}",
                           "logger.log_dir=${policy.tokenizer.name}", "policy.tokenizer.name=bytes"}));
  CHECK(chain.checkpointing.checkpoint_dir == "bytes");
  CHECK(
      contains(render(load_base({"logger.log_dir=x/${data.seed}"}).diagnostics), "must be the whole value"));
  CHECK(contains(render(load_base({"logger.log_dir=${no.such}"}).diagnostics), "'no.such' is not a key"));
  CHECK(contains(render(load_base({"logger.log_dir=${checkpointing.checkpoint_dir}",
                                   "checkpointing.checkpoint_dir=${logger.log_dir}"})
                            .diagnostics),
                 "circular"));
  const auto multiplied = [](const std::string& text) {
    return render(
        load_base({"policy.train_global_batch_size=" + text, "policy.train_micro_batch_size=3"}).diagnostics);
  };
  CHECK(load_good(load_base({"policy.train_global_batch_size=${mul:4, ${policy.train_micro_batch_size}}",
                             "policy.train_micro_batch_size=${mul:${data.num_workers},3}"}))
            .policy.train_global_batch_size == 12);
  CHECK(contains(multiplied("${mul:4}"), "multiplies two whole numbers, not ''"));
  CHECK(contains(multiplied("${mul:4,x}"), "multiplies two whole numbers, not 'x'"));
  CHECK(contains(multiplied("${mul:4,${no.such}}"), "'no.such' is not a key"));
  CHECK(contains(multiplied("${mul:9000000000000,9000000000000}"), "multiplies two whole numbers"));
}

TEST_CASE("the section of a loop names the algorithm", "[config][algorithm]") {
  const std::string model =
      "policy: {model: {model_type: llama}, tokenizer: {name: bytes}}\ndata: {train: {data_path: c}}\n";
  const ConfigResult tuned = load_text(model + "sft: {max_num_steps: 3}\n");
  CHECK(load_good(tuned).algorithm == Algorithm::sft);
  CHECK(contains(tuned.where("algorithm"), ":3:1"));
  CHECK(load_good(load_text(model + "pretrain: {max_num_steps: 3}\n")).algorithm == Algorithm::pretrain);
  CHECK(contains(render(load_text(model + "sft: {max_num_steps: 3}\nalgorithm: pretrain\n").diagnostics),
                 "belongs to algorithm sft"));
  CHECK(contains(
      render(load_text(model + "sft: {max_num_steps: 3}\npretrain: {max_num_steps: 3}\n").diagnostics),
      "belongs to algorithm sft"));
  // Names of other programs mean the loop of the algorithm.
  const Config named =
      load_good(load_text(model + "algorithm: sft\ntraining: {max_steps: 7}\nloop: {seed: 9}\n"));
  CHECK(named.sft.max_num_steps == 7);
  CHECK(named.sft.seed == 9);
}

TEST_CASE("model keys keep their order and their mappings together", "[config]") {
  const ConfigResult result = load_text(
      "policy:\n"
      "  model:\n"
      "    num_hidden_layers: 2\n"
      "    model_type: llama\n"
      "    rope_scaling: {rope_type: llama3, factor: 8.0, long_factor: [1, 2.5]}\n"
      "    eos_token_id: [1, 2]\n"
      "    bos_token_id: 7\n"
      "    head_dim: null\n"
      "    tie_word_embeddings: true\n"
      "pretrain: {max_num_steps: 1}\n"
      "data: {train: {data_path: c}}\n",
      {"policy.model.num_hidden_layers=3", "policy.model.rope_scaling.low_freq_factor=1"});
  CHECK(load_good(result).policy.model_json ==
        "{\"num_hidden_layers\": 3, \"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": "
        "\"llama3\", \"factor\": 8, \"long_factor\": [1, 2.5], \"low_freq_factor\": 1}, \"eos_token_id\": "
        "[1, 2], \"bos_token_id\": 7, \"head_dim\": null, \"tie_word_embeddings\": true}");
  require_round_trip(result);
  const ConfigResult reset =
      load_text(base_yaml, {"policy.model.rope_scaling={factor: 2}", "policy.model.rope_scaling=null"});
  CHECK(load_good(reset).policy.model_json == "{\"model_type\": \"llama\", \"rope_scaling\": null}");
  require_round_trip(reset);
  // A later floor can point at the place.
  const Diagnostic d = diagnose(result, "policy.model.rope_scaling.factor", "too large", "at most 4");
  CHECK(d.line == 5);
  CHECK(d.column == 47);
  CHECK(contains(d.excerpt, " 5 |     rope_scaling: {rope_type: llama3, factor: 8.0,"));
  CHECK(contains(d.excerpt, "^^^ at most 4"));
}

TEST_CASE("a run of no steps needs no schedule", "[config]") {
  CHECK(load_base({"pretrain.max_num_steps=0", "policy.scheduler.lr_warmup_iters=5"}).ok());
}

TEST_CASE("a schedule longer than the run is kept, with a warning", "[config]") {
  struct Case {
    std::vector<std::string> overrides;
    std::string warning;
    int64_t end;  // of the decay
  };
  const Case cases[] = {{{"policy.scheduler.lr_warmup_iters=40"},
                         "the warm-up (40 steps) is longer than the run (10): the schedule is unchanged, so "
                         "the last step uses 25 % of lr and there is no decay",
                         40},
                        {{"policy.scheduler.lr_decay_iters=20"},
                         "the schedule (20 steps) is longer than the run (10): it is unchanged, so the run "
                         "ends before min_lr",
                         20},
                        {{"policy.scheduler.lr_decay_style=WSD", "policy.scheduler.lr_wsd_decay_iters=8",
                          "policy.scheduler.lr_warmup_iters=4"},
                         "the schedule (12 steps) is longer than the run (10)",
                         12},
                        {{"policy.scheduler.lr_decay_style=constant", "policy.scheduler.lr_warmup_iters=20"},
                         "the last step uses 50 % of lr",
                         20},
                        {{"policy.scheduler.lr_warmup_iters=10"}, "", 10},
                        {{"policy.scheduler.lr_decay_style=WSD", "policy.scheduler.lr_wsd_decay_iters=6",
                          "policy.scheduler.lr_warmup_iters=4", "policy.scheduler.lr_decay_iters=10"},
                         "",
                         10}};
  for (const Case& c : cases) {
    const ConfigResult result = load_base(c.overrides);
    const std::string shown = render(result.diagnostics);
    INFO(shown);
    CHECK(result.ok());
    CHECK(result.diagnostics.size() == (c.warning.empty() ? 0u : 1u));
    CHECK(contains(shown, c.warning));
    if (!c.warning.empty()) CHECK(contains(shown, "--> command line: policy.scheduler.lr_"));
    CHECK(decay_end(result.config.policy.scheduler, 10) == c.end);
  }
}

TEST_CASE("warnings do not stop", "[config]") {
  const ConfigResult result = load_base({"policy.scheduler.lr_decay_iters=5"});
  CHECK(result.ok());
  CHECK(contains(render(result.diagnostics), "warning: the rate reaches min_lr at step 5"));
  CHECK(!contains(render(result.diagnostics), "nothing was started"));
}

TEST_CASE("keys without an effect are named", "[config]") {
  const auto warned = [](std::vector<std::string> keys) {
    const ConfigResult result = load_base(std::move(keys));
    CHECK(result.ok());
    return render(result.diagnostics);
  };
  const std::string constant = "policy.scheduler.lr_decay_style=constant";
  CHECK(contains(warned({constant, "policy.scheduler.min_lr=1e-5"}),
                 "policy.scheduler.min_lr has no effect without policy.scheduler.lr_decay_style other than"));
  CHECK(contains(warned({constant, "policy.scheduler.lr_decay_iters=10"}),
                 "policy.scheduler.lr_decay_iters has no effect without policy.scheduler.lr_decay_style"));
  CHECK(contains(warned({"pretrain.max_num_steps=1"}), "the only step has a learning rate of 0"));
  CHECK(warned({constant, "pretrain.max_num_steps=1"}).empty());
  CHECK(contains(warned({"profiling.enabled=true", "profiling.steps=11:12"}), "the run has only 10 steps"));
  CHECK(warned({"profiling.enabled=true", "profiling.steps=10:12"}).empty());
  CHECK(warned({"pretrain.max_num_steps=1", "policy.scheduler.min_lr=1e-5"}).empty());
}

TEST_CASE("microbatch and accumulation leave the number of replicas open", "[config]") {
  const ConfigResult result =
      load_base({"policy.train_global_batch_size=8", "policy.train_micro_batch_size=2",
                 "policy.gradient_accumulation_steps=1"});
  CHECK(result.ok());
  CHECK(validate_for_world(result, 4).empty());
  CHECK(resolve_batch(result.config, 4).data_parallel == 4);
  CHECK(contains(render(validate_for_world(result, 2)),
                 "train_global_batch_size 8 is not micro 2 x data parallel 2"));
}

TEST_CASE("what a precision chooses by itself reads back", "[config]") {
  for (const char* precision : {"float32", "bfloat16", "float16", "fastest"})
    require_round_trip(load_base({std::string("policy.precision=") + precision,
                                  "policy.optimizer.use_precision_aware_optimizer=true"}));
}

TEST_CASE("texts of every shape survive the round trip", "[config]") {
  for (const char* text :
       {"auto", "null", "true",  "010", "1e5", "a: b",  "# x",    "- x",
        "a#b",  "it's", "\"q\"", "\\n", "[x",  "{",     "*a",     "&a",
        "!t",   "%x",   "@x",    "`x",  "~",   " lead", "trail ", "\xe6\x97\xa5\xe6\x9c\xac",
        "2k",   "...",  "---",   "-",   "?",   ":",     "1.",     ".5",
        "${x"}) {
    std::string quoted = "'";
    for (const char* c = text; *c; ++c) quoted += *c == '\'' ? std::string("''") : std::string(1, *c);
    const ConfigResult result = load_base({"checkpointing.checkpoint_dir=" + quoted + "'"});
    if (std::string(text).starts_with("${")) {
      CHECK(!result.ok());
      continue;
    }
    INFO(text);
    CHECK(load_good(result).checkpointing.checkpoint_dir == text);
    require_round_trip(result);
  }
}

TEST_CASE("the configurations that are shipped load cleanly", "[config]") {
  int count = 0;
  for (const char* name : {"llama-17m.yaml", "smollm-135m.yaml", "gpt2-124m.yaml", "quickstart.yaml",
                           "experts-tiny.yaml", "lora-quickstart.yaml"}) {
    const ConfigResult result = load_config(std::string(NRL_SOURCE_DIR "/configs/") + name);
    INFO(name);
    INFO(render(result.diagnostics));
    CHECK(result.diagnostics.empty());
    CHECK(result.translated.empty());
    CHECK(validate_for_world(result, 1).empty());
    CHECK(validate_for_world(result, 4).empty());
    require_round_trip(result);
    ++count;
  }
  CHECK(count == 6);
}
