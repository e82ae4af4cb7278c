// The figures of a run: that those of metrics.jsonl agree with each other, with formulas written out here,
// and with what is printed.

#include "apps/model/families/hf_config.h"
#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

/// Operations of one token in training: 2 per weight of a matrix forward and 4 backward; causal attention at
/// T tokens sees (T + 1) / 2 keys on average, with 4 operations per key and element of the heads forward.
double gpt2_flops(double layers, double hidden, double ffn, double vocab, double t) {
  const double matrices = layers * (4 * hidden * hidden + 2 * hidden * ffn) + vocab * hidden;
  return 6 * matrices + 3 * layers * 4 * hidden * (t + 1) / 2;
}
double llama_flops(double layers, double hidden, double heads, double kv_heads, double head_dim, double ffn,
                   double vocab, double t) {
  const double matrices =
      layers * (2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * ffn) +
      vocab * hidden;
  return 6 * matrices + 3 * layers * 4 * heads * head_dim * (t + 1) / 2;
}

/// "12.3k" as the step line prints tokens per second.
std::string compact(double value) {
  if (value < 999.5) return fmt::format("{:.0f}", value);
  return value < 999.95e3 ? fmt::format("{:.1f}k", value / 1e3) : fmt::format("{:.2f}M", value / 1e6);
}

const JsonValue& event(const std::vector<JsonValue>& rows, std::string_view name) {
  for (const JsonValue& row : rows)
    if (row.get_string("event", "") == name) return row;
  FAIL("no event " << name);
  return rows.front();
}

}  // namespace

TEST_CASE("the operations of a token are those of the formula") {
  const auto flops = [](const std::string& config, int64_t t) {
    return training_flops_per_token(model::parse_model_config(config, "test"), t);
  };
  for (int64_t t : {1, 8, 1024}) {
    CHECK(flops(R"({"model_type":"gpt2","vocab_size":272,"n_embd":16,"n_layer":3,"n_head":4})", t) ==
          Approx(gpt2_flops(3, 16, 64, 272, static_cast<double>(t))).epsilon(1e-12));
    CHECK(flops(R"({"model_type":"gpt2","vocab_size":272,"n_embd":16,"n_layer":3,"n_head":4,"n_inner":40,
                    "tie_word_embeddings":false})",
                t) == Approx(gpt2_flops(3, 16, 40, 272, static_cast<double>(t))).epsilon(1e-12));
    CHECK(flops(R"({"model_type":"llama","vocab_size":100,"hidden_size":24,"intermediate_size":40,
                    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":10})",
                t) == Approx(llama_flops(2, 24, 4, 2, 10, 40, 100, static_cast<double>(t))).epsilon(1e-12));
  }
}

TEST_CASE("a sliding window leaves out the keys that no query sees") {
  // Two layers of q, k, v, o and three matrices of the MLP, and the head.
  const double matrices = 6 * (2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 8) + 32 * 8);
  const auto flops = [](const std::string& window, int64_t t) {
    const std::string config =
        R"({"model_type":"mistral","vocab_size":32,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":2,
            "num_attention_heads":2,"num_key_value_heads":1,"sliding_window":)" +
        window + "}";
    return training_flops_per_token(model::parse_model_config(config, "test"), t);
  };
  // Six tokens see 1, 2, 3, 3, 3 and 3 keys.
  CHECK(flops("3", 6) == Approx(matrices + 3 * 2 * 4 * 8 * (1 + 2 + 3 + 3 + 3 + 3) / 6.0).epsilon(1e-12));
  CHECK(flops("1", 6) == Approx(matrices + 3 * 2 * 4 * 8).epsilon(1e-12));
  for (int64_t t : {1, 2, 3}) CHECK(flops("3", t) == flops("null", t));
  // Mistral 7B at twice its window: not as if every token saw all before it.
  CHECK(flops("4096", 8192) < flops("null", 8192));
}

TEST_CASE("rows, events and summary of a run agree") {
  const Workbench bench;
  const Finished run =
      bench.run("run", {"logger.progress=json", "pretrain.max_num_steps=6", "data.split=[1,1,0]",
                        "pretrain.val_period=3", "pretrain.val_batches=2"});
  INFO(run.err);
  REQUIRE(run.code == Exit::ok);
  const Rows rows = bench.steps("run");
  REQUIRE(rows.size() == 6);
  double sum = 0, step_seconds = 0, kernel_seconds = 0;
  std::vector<double> rates;
  for (const JsonValue& row : rows) {
    const double rate = row.get_double("tokens_per_s"), ms = row.get_double("step_ms");
    CHECK(rate * ms / 1e3 == Approx(4 * 8).epsilon(1e-9));
    CHECK(row.get_int("tokens") == row.get_int("step") * 4 * 8);
    for (const char* part : {"data_ms", "gemm_ms", "attention_ms"}) {
      CHECK(row.get_double(part) > 0);
      CHECK(row.get_double(part) < ms);
    }
    CHECK(row.get_double("gemm_ms") + row.get_double("attention_ms") < ms);
    CHECK(row.get_double("comm_ms") < ms);
    // At least 4 bytes of each of the 12624 parameters; AdamW keeps two more numbers for each.
    const int64_t weights = row.get_int("mem_weights_bytes");
    CHECK(weights >= 4 * 12624);
    CHECK(row.get_int("mem_gradients_bytes") == weights);
    CHECK(row.get_int("mem_optimizer_bytes") == 2 * weights);
    // The logits of a microbatch are one of the activations.
    CHECK(row.get_int("mem_activations_bytes") >= 2 * 8 * 272 * 4);
    step_seconds += ms / 1e3;
    kernel_seconds += (row.get_double("gemm_ms") + row.get_double("attention_ms")) / 1e3;
    if (row.get_int("step") == 1) continue;
    rates.push_back(rate);
    sum += rate;
  }

  const std::vector<JsonValue> lines = json_lines(run.out, "stdout");
  // What is printed of a step or an evaluation is its row, but for the time.
  size_t seen = 0;
  const Rows all = bench.rows("run");
  for (const JsonValue& line : lines) {
    if (line.contains("event")) continue;
    REQUIRE(seen < all.size());
    for (const JsonMember& member : all[seen].members())
      if (member.key != "time") CHECK(line.at(member.key).dump() == member.value.dump());
    ++seen;
  }
  CHECK(seen == all.size());

  const JsonValue& summary = event(lines, "summary");
  CHECK(summary.get_string("outcome") == "done: 6 steps");
  CHECK(summary.get_int("steps") == 6);
  CHECK(summary.get_int("max_steps") == 6);
  CHECK(summary.get_int("tokens") == 6 * 4 * 8);
  // Without the first step, which pays for the start.
  CHECK(summary.get_double("mean_tokens_per_s") == Approx(sum / 5).epsilon(1e-9));
  std::sort(rates.begin(), rates.end());
  CHECK(summary.get_double("median_tokens_per_s") == Approx(rates[2]).epsilon(0.006));
  double best = INFINITY, eval_seconds = 0;
  int64_t best_step = 0;
  for (const JsonValue& row : all) {
    if (!row.contains("val_loss")) continue;
    eval_seconds += row.get_double("eval_s");
    if (row.get_double("val_loss") >= best) continue;
    best = row.get_double("val_loss");
    best_step = row.get_int("step");
  }
  CHECK(summary.get_double("best_val_loss") == best);
  CHECK(summary.get_int("best_val_step") == best_step);
  CHECK(contains(summary.get_string("checkpoint"), "run/checkpoints/step-6"));
  // The sections of the run lie within it, and what they are made of lies within them.
  const auto seconds = [&](const char* name) { return summary.get_double(name); };
  const double in_steps = seconds("compute_s") + seconds("comm_s") + seconds("data_s");
  CHECK(seconds("compute_s") > kernel_seconds);
  CHECK(in_steps <= step_seconds);
  CHECK(seconds("eval_s") >= eval_seconds);
  CHECK(seconds("checkpoint_s") > 0);
  CHECK(in_steps + seconds("eval_s") + seconds("checkpoint_s") + seconds("other_s") <= seconds("wall_s"));
}

TEST_CASE("a resumed run leaves its own first step out of its mean rate") {
  const Workbench bench;
  REQUIRE(bench.run("run", {"pretrain.max_num_steps=2"}).code == Exit::ok);
  const Finished run = bench.run("run", {"pretrain.max_num_steps=5", "logger.progress=json"});
  REQUIRE(run.code == Exit::ok);
  const std::vector<double> rates = bench.values("run", "tokens_per_s");
  const JsonValue summary = event(json_lines(run.out, "stdout"), "summary");
  CHECK(summary.get_double("mean_tokens_per_s") == Approx((rates[3] + rates[4]) / 2).epsilon(1e-9));
  CHECK(summary.get_int("steps") == 3);
  CHECK(summary.get_int("tokens") == 3 * 4 * 8);
}

TEST_CASE("mfu is tokens/s times operations over the peak of the banner") {
  Workbench bench;
  const auto check = [&](double flops) {
    const Finished run =
        bench.run("run", {"pretrain.max_num_steps=1", "logger.progress=json",
                          "policy.max_total_sequence_length=64", "checkpointing.enabled=false"});
    REQUIRE(run.code == Exit::ok);
    const std::vector<JsonValue> lines = json_lines(run.out, "stdout");
    // As fixed_peak.cpp says.
    CHECK(event(lines, "start").at("sections").get_string("mfu").starts_with("of 40 GFLOP/s per rank"));
    const JsonValue row = bench.steps("run").front();
    CHECK(row.get_double("mfu") == Approx(row.get_double("tokens_per_s") * flops / 40e9).epsilon(1e-9));
  };
  check(llama_flops(2, 16, 4, 2, 4, 24, 272, 64));
  bench.model = "{model_type: gpt2, vocab_size: 272, n_embd: 16, n_layer: 2, n_head: 4, n_positions: 64}";
  check(gpt2_flops(2, 16, 64, 272, 64));
}

TEST_CASE("mfu counts the keys that the documents of a sample see") {
  const Workbench bench;
  std::vector<int32_t> tokens = bench.random_tokens(2000, 3);
  for (size_t i = 3; i < tokens.size(); i += 4) tokens[i] = 256;
  bench.write_tokens("documents", tokens);
  const auto check = [&](const std::vector<std::string>& more, double t) {
    std::vector<std::string> keys{"logger.progress=json", "checkpointing.enabled=false",
                                  "policy.tokenizer.name=bytes",
                                  "data.train.data_path=" + bench / "documents"};
    keys.insert(keys.end(), more.begin(), more.end());
    const Finished run = bench.run("run", keys);
    INFO(run.err);
    REQUIRE(run.code == Exit::ok);
    const double flops = llama_flops(2, 16, 4, 2, 4, 24, 272, t);
    for (const JsonValue& row : bench.steps("run"))
      CHECK(row.get_double("mfu") == Approx(row.get_double("tokens_per_s") * flops / 40e9).epsilon(1e-9));
    const JsonValue summary = event(json_lines(run.out, "stdout"), "summary");
    CHECK(summary.get_double("mfu") ==
          Approx(summary.get_double("median_tokens_per_s") * flops / 40e9).epsilon(1e-6));
  };
  check({}, 8);
  check({"data.reset_position_ids=true", "data.eod_mask_loss=true"}, 8);
  check({"data.reset_attention_mask=true"}, 4);  // every sample is two documents of 4 tokens
}

TEST_CASE("the lines on the terminal have the figures of the rows") {
  const Workbench bench;
  const Finished run =
      bench.run("run", {"pretrain.max_num_steps=5", "policy.scheduler.lr_warmup_iters=5",
                        "data.split=[1,1,0]", "pretrain.val_at_end=true", "pretrain.val_batches=1"});
  REQUIRE(run.code == Exit::ok);
  std::vector<double> rates;
  for (const JsonValue& row : bench.steps("run")) {
    const double rate = row.get_double("tokens_per_s"), ms = row.get_double("step_ms");
    const std::string line =
        fmt::format(" step {}/5  loss {:.4f}  lr {:.2e}  gnorm {:.3f}  {} tok/s  mfu {:.1f}%  mem ",
                    row.get_int("step"), row.get_double("loss"), row.get_double("lr"),
                    row.get_double("grad_norm"), compact(rate), 100 * row.get_double("mfu"));
    INFO(line);
    const size_t at = run.out.find(line);
    REQUIRE(at != std::string::npos);
    const std::string rest = run.out.substr(at, run.out.find('\n', at) - at);
    CHECK(contains(rest,
                   fmt::format("  {:.3f}s  data {:.1f}%", ms / 1e3, 100 * row.get_double("data_ms") / ms)));
    if (row.get_int("step") > 1) rates.push_back(rate);
  }
  CHECK(contains(run.out, fmt::format("val_loss {:.4f} ", bench.rows("run").back().get_double("val_loss"))));
  CHECK(contains(run.out, fmt::format("\nspeed       mean {} tok/s",
                                      compact((rates[0] + rates[1] + rates[2] + rates[3]) / 4))));
  CHECK(contains(run.out, "\nsteps       5 of 5\n"));
  CHECK(contains(run.out, "\ntokens      160\n"));
}
