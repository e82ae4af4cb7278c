// Steps that are not finite: which are skipped, that they change nothing, and at which step a run gives up.
//
// Token `poison` makes every loss that predicts it infinite: its row of the output matrix is so negative that
// the logit overflows to -inf. Steps without it are ordinary ones, since its probability is 0 there. So the
// data decides which steps fail.

#include <cstring>
#include <set>

#include "tests/catch.h"
#include "tests/train/training_run.h"

using namespace nrl;
using namespace nrl::test;

namespace {

using Numbers = std::vector<int64_t>;

constexpr int32_t poison = 200;
constexpr int64_t T = Workbench::sequence, batch = Workbench::global;
constexpr int64_t steps_of_data = 12, windows = steps_of_data * batch;

/// Overwrites elements of a tensor in a safetensors file.
void set_elements(const std::string& path, const std::string& name, int64_t first,
                  const std::vector<float>& values) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), 8);
  std::string header(header_bytes, ' ');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const JsonValue tensor = parse_json(header, path).at(name);
  REQUIRE(tensor.get_string("dtype") == "F32");
  const int64_t begin = tensor.at("data_offsets").items()[0].as_int();
  file.seekp(8 + static_cast<std::streamoff>(header_bytes) + begin + 4 * first);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(4 * values.size()));
}

class Poisoned : public Workbench {
 public:
  Poisoned() {
    model =
        "{model_type: gpt2, vocab_size: 272, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 16, "
        "tie_word_embeddings: false, attn_pdrop: 0, resid_pdrop: 0, embd_pdrop: 0}";
    write("corpus", [](int64_t window) { return window; }, {});
    REQUIRE(run("start", {"pretrain.max_num_steps=0"}).code == Exit::ok);
    const std::string start = *this / "start/checkpoints/step-0";
    std::filesystem::remove(start + "/manifest.json");
    // The first two elements after the last norm are always 2: the logit of `poison` is at most -1.2e39.
    set_elements(start + "/model.safetensors", "transformer.ln_f.weight", 0, {0, 0});
    set_elements(start + "/model.safetensors", "transformer.ln_f.bias", 0, {2, 2});
    set_elements(start + "/model.safetensors", "lm_head.weight", poison * 16, {-3e38f, -3e38f});
    model = "{}";
    start_ = "policy.model_name=" + start;
  }

  /// Windows of T tokens, each with the content of window `content(i)`, and `poison` in those named. Every
  /// window starts with token 0, so that no sample sees the window after it.
  void write(const std::string& name, const std::function<int64_t(int64_t)>& content,
             const std::set<int64_t>& poisoned) const {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < windows; ++i) {
      const int64_t source = content(i);
      // The window's number in the digits 1 and 2, so that it is recognized.
      std::vector<int32_t> window{0, static_cast<int32_t>(1 + source / 16),
                                  static_cast<int32_t>(1 + source % 16)};
      for (int64_t k = 3; k < T; ++k) window.push_back(static_cast<int32_t>(1 + (source * 7 + k * k) % 100));
      if (poisoned.contains(source)) window[5] = poison;
      tokens.insert(tokens.end(), window.begin(), window.end());
    }
    tokens.push_back(0);
    write_tokens(name, tokens);
  }

  /// The windows that a step reads, in their order.
  Numbers windows_of(int64_t step) const {
    data::DatasetOptions options;
    options.sources.push_back({*this / "corpus", std::nullopt, nullptr});
    options.sequence_length = T;
    options.samples = windows;
    options.seed = 7;
    options.vocab_size = 272;
    const auto dataset = data::open_token_dataset(options);
    Numbers found;
    std::vector<int32_t> sample(T + 1);
    for (int64_t i = (step - 1) * batch; i < step * batch; ++i) {
      dataset->read(i, sample);
      found.push_back((sample[1] - 1) * 16 + sample[2] - 1);
    }
    return found;
  }

  /// The data whose steps `bad` cannot be computed.
  void poison_steps(const std::string& name, const Numbers& bad) const {
    std::set<int64_t> poisoned;
    for (int64_t step : bad) poisoned.insert(windows_of(step)[step % batch]);
    write(
        name, [](int64_t window) { return window; }, poisoned);
  }

  Finished train(const std::string& name, const std::string& data, std::vector<std::string> keys) const {
    keys.insert(keys.begin(), {start_, "data.train.data_path=" + *this / data, "pretrain.max_num_steps=12"});
    return launcher.empty() ? run(name, keys) : run_ranks(launcher, name, keys);
  }
  std::string launcher;  ///< empty: one rank, in this process

  Numbers skipped(const std::string& name) const {
    Numbers found;
    for (const JsonValue& row : steps(name)) {
      // A loss that is not finite has no number in JSON.
      CHECK(row.at("loss").is_null() == row.get_bool("skipped"));
      if (row.get_bool("skipped")) found.push_back(row.get_int("step"));
    }
    return found;
  }

 private:
  std::string start_;
};

void check_counters(const JsonValue& at, int64_t step, int64_t skipped, int64_t in_a_row) {
  CHECK(at.get_int("step") == step);
  CHECK(at.get_int("updates") == step - skipped);
  CHECK(at.get_int("skipped") == skipped);
  CHECK(at.get_int("skipped_in_a_row") == in_a_row);
  CHECK(at.get_int("consumed_samples") == step * batch);
  CHECK(at.get_int("tokens") == step * batch * T);
}

}  // namespace

TEST_CASE("skipped steps change nothing but the position, and so many in a row end the run") {
  const Poisoned bench;
  bench.poison_steps("bad", {2, 4, 5, 7, 8, 9});
  const std::vector<std::string> keys{"checkpointing.save_period=1", "checkpointing.keep_latest_k=null"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), keys.begin(), keys.end());
    return more;
  };

  const Finished run = bench.train("run", "bad", with({"pretrain.max_nonfinite_steps=3"}));
  INFO(run.err);
  CHECK(run.code == Exit::diverged);
  CHECK(static_cast<int>(run.code) == 79);
  CHECK(contains(run.err,
                 "non-finite gradients in 3 consecutive steps (last: 9); the weights are from step 6"));
  CHECK(contains(run.err, "3 steps succeeded since"));
  CHECK(bench.skipped("run") == Numbers{2, 4, 5, 7, 8, 9});
  CHECK(bench.step_numbers("run") == Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9});
  size_t lines = 0;
  for (size_t at = 0; (at = run.out.find("skipped\n", at)) != std::string::npos; ++at) ++lines;
  CHECK(lines == 6);
  // Nothing is saved at the step that ends the run; the checkpoints before it are there.
  CHECK(bench.checkpoints("run").size() == 1 + 8);
  check_counters(bench.position("run", 1), 1, 0, 0);
  check_counters(bench.position("run", 2), 2, 1, 1);
  check_counters(bench.position("run", 3), 3, 1, 0);
  check_counters(bench.position("run", 5), 5, 3, 2);
  check_counters(bench.position("run", 6), 6, 3, 0);
  check_counters(bench.position("run", 8), 8, 5, 2);
  const auto optimizer = [&](int64_t step) {
    return bench.read(fmt::format("run/checkpoints/step-{}/optimizer-00001-of-00001.safetensors", step));
  };
  for (const auto& [good, bad] : {std::pair<int64_t, int64_t>{1, 2}, {3, 4}, {3, 5}, {6, 7}, {6, 8}}) {
    CAPTURE(good, bad);
    CHECK(bench.weights("run", good) == bench.weights("run", bad));
    CHECK(optimizer(good) == optimizer(bad));
  }
  CHECK(bench.weights("run", 5) != bench.weights("run", 6));

  // The updates are those of a run whose data are those of the good steps alone.
  const Numbers order[] = {bench.windows_of(1), bench.windows_of(2), bench.windows_of(3),
                           bench.windows_of(6)};
  bench.write("good",
              [&](int64_t window) {
                // What steps 1, 2, 3 read becomes what steps 1, 3 and 6 of the other run read.
                for (int64_t k = 0; k < batch; ++k) {
                  const auto slot = static_cast<size_t>(k);
                  if (order[1][slot] == window) return order[2][slot];
                  if (order[2][slot] == window) return order[3][slot];
                }
                return window;
              },
              {});
  CHECK(bench.train("good", "good", {"pretrain.max_num_steps=3"}).code == Exit::ok);
  CHECK(bench.weights("good", 3) == bench.weights("run", 6));
  const auto run_loss = bench.values("run", "loss"), good_loss = bench.values("good", "loss");
  CHECK(good_loss == std::vector<double>{run_loss[0], run_loss[2], run_loss[5]});

  // A row of skipped steps is counted on over a resume: steps 7 and 8 before, 9 after it.
  CHECK(bench.train("parts", "bad", with({"pretrain.max_nonfinite_steps=3", "pretrain.max_num_steps=8"}))
            .code == Exit::ok);
  const Finished rest = bench.train("parts", "bad", with({"pretrain.max_nonfinite_steps=3"}));
  CHECK(rest.code == Exit::diverged);
  CHECK(contains(rest.err, "in 3 consecutive steps (last: 9)"));
  CHECK(contains(rest.err, "No step succeeded with the weights loaded from"));
  CHECK(bench.skipped("parts") == Numbers{2, 4, 5, 7, 8, 9});
  CHECK(bench.step_numbers("parts") == Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("all ranks skip a step that one of them cannot compute, and end together") {
  Poisoned bench;
  bench.poison_steps("bad", {2, 4, 5, 7, 8, 9});
  CHECK(bench.train("one", "bad", {"pretrain.max_nonfinite_steps=3"}).code == Exit::diverged);
  const auto one = bench.values("one", "loss");
  bench.launcher = NRL_TWO_RANKS;
  for (const char* strategy : {"ddp", "optim"}) {
    CAPTURE(strategy);
    const Finished run = bench.train(strategy, "bad",
                                     {"pretrain.max_nonfinite_steps=3", "checkpointing.save_period=5",
                                      fmt::format("distributed.shard_strategy={}", strategy)});
    INFO(run.err);
    CHECK(run.code == Exit::diverged);
    CHECK(contains(run.err, "in 3 consecutive steps (last: 9)"));
    CHECK(bench.step_numbers(strategy) == Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9});
    CHECK(bench.skipped(strategy) == Numbers{2, 4, 5, 7, 8, 9});
    check_counters(bench.position(strategy, 5), 5, 3, 2);
    const auto losses = bench.values(strategy, "loss");
    for (size_t step : {1, 3, 6}) CHECK(losses[step - 1] == Approx(one[step - 1]).epsilon(1e-5));
  }
}

TEST_CASE("the learning rate belongs to the step, also after skipped ones, and the limit is exact") {
  const Poisoned bench;
  bench.poison_steps("bad", {2, 4, 5, 7, 8, 9});
  const auto last_step = [&](std::vector<std::string> keys) {
    keys.emplace_back("checkpointing.resume=never");
    const Finished run = bench.train("run", "bad", keys);
    INFO(run.err);
    CHECK(run.code == (bench.step_numbers("run").back() == 12 ? Exit::ok : Exit::diverged));
    return bench.step_numbers("run").back();
  };
  CHECK(last_step({"pretrain.max_nonfinite_steps=2"}) == 5);
  CHECK(last_step({"pretrain.max_nonfinite_steps=1"}) == 2);
  CHECK(last_step({"pretrain.on_nonfinite=stop"}) == 2);
  CHECK(last_step({"pretrain.max_nonfinite_steps=4", "policy.scheduler.lr_warmup_iters=10"}) == 12);
  const auto rates = bench.values("run", "lr");
  REQUIRE(rates.size() == 12);
  for (int64_t step = 1; step <= 12; ++step)
    CHECK(rates[step - 1] == Approx(1e-2 * std::min(1.0, static_cast<double>(step) / 10)).epsilon(1e-12));
}

TEST_CASE("an evaluation that is not finite is no best one, and does not stop the run from saving") {
  const Poisoned bench;
  bench.poison_steps("bad", {2});
  const Finished run = bench.train(
      "run", "corpus",
      {"pretrain.val_at_end=true", "data.validation.data_path=" + bench / "bad", "pretrain.max_num_steps=3"});
  INFO(run.err);
  CHECK(run.code == Exit::ok);
  CHECK(bench.rows("run").back().at("val_loss").is_null());
  check_counters(bench.position("run", 3), 3, 0, 0);
  CHECK(bench.position("run", 3).get_double("best_val_loss") == 0);
  CHECK(bench.position("run", 3).get_int("best_val_step") == 0);
}

TEST_CASE("the first tensor that is not finite is named, and naming it changes nothing") {
  Poisoned bench;
  bench.poison_steps("bad", {2, 4, 5});
  const std::vector<std::string> keys{"pretrain.max_num_steps=6", "policy.train_micro_batch_size=1"};
  const auto with = [&](const std::string& more) {
    std::vector<std::string> out = keys;
    out.push_back(more);
    return out;
  };
  const Finished all = bench.train("all", "bad", keys);
  INFO(all.out);
  CHECK(all.code == Exit::ok);
  // Step 2 names its windows in order of microbatches: the last one of a step divisible by the batch is 2
  // mod 4.
  CHECK(contains(all.out,
                 "first in the log-probabilities of the targets (rank 0; microbatch 3 of 4, forward)"));
  CHECK(contains(all.out, "The weights are finite. Samples: nrl-train data show CONFIG --steps 2:3"));
  CHECK(contains(all.out, "--steps 4:5"));
  CHECK(!contains(all.out, "--steps 5:6"));  // of the same row

  const Finished off = bench.train("off", "bad", with("monitoring.nan_check=off"));
  CHECK(!contains(off.out, "first in"));
  CHECK(bench.weights("all", 6) == bench.weights("off", 6));
  CHECK(bench.values("all", "loss").back() == bench.values("off", "loss").back());
  const Finished loss = bench.train("loss", "bad", with("monitoring.nan_check=loss"));
  CHECK(contains(loss.out, "the loss is not finite, the gradient norm "));
  CHECK(!contains(loss.out, "first in"));

  bench.launcher = NRL_TWO_RANKS;
  const Finished two = bench.train("two", "bad", keys);
  INFO(two.out);
  CHECK(contains(two.out, "first in the log-probabilities of the targets (rank "));
}
