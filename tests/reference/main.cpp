// Compares what a run of nrl-train left behind with a run of its own: reference_trainer COMMAND ARGS... (see
// usage).

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <set>

#include "core/io/json.h"
#include "tests/reference/compare.h"
#include "tests/reference/initial.h"
#include "tests/reference/trainer.h"

namespace reference {
namespace {

using Args = std::vector<std::string>;

const char* const usage =
    "reference_trainer train CONFIG.yaml INITIAL SAMPLES VALIDATION METRICS LAST [bf16] [poison TOKEN]\n"
    "    trains CONFIG from the model directory INITIAL and compares: SAMPLES, VALIDATION (`data show "
    "--json` of all\n"
    "    steps; - for none), METRICS (metrics.jsonl) and LAST (the last checkpoint). Steps with TOKEN are "
    "skipped.\n"
    "reference_trainer eval MODEL PREFIX LENGTH MAX_TOKENS BYTES RESULT\n"
    "    compares RESULT (`eval --json`) with the loss on windows of LENGTH tokens of the first MAX_TOKENS\n"
    "    (0: all), which are BYTES of text (0: not known)\n"
    "reference_trainer initial MODEL OTHER     initial weights, and those of another seed\n"
    "reference_trainer data PREFIX VOCAB DOCUMENTS SEED     writes a token file\n"
    "reference_trainer poison MODEL TOKEN     makes the token's embedding overflow float\n";

std::vector<nrl::JsonValue> read_lines(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::vector<nrl::JsonValue> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(nrl::parse_json(line, path));
  return rows;
}

// `data show --json` against the samples in our own order.
void compare_samples(Comparison& c, const std::string& path, const std::vector<Tokens>& samples,
                     int64_t batch) {
  const std::vector<nrl::JsonValue> rows = read_lines(path);
  c.require(rows.size() == samples.size(), path + " has " + std::to_string(rows.size()) +
                                               " samples instead of " + std::to_string(samples.size()));
  for (size_t i = 0; i < std::min(rows.size(), samples.size()); ++i) {
    Tokens tokens;
    for (const nrl::JsonValue& token : rows[i].at("tokens").items())
      tokens.push_back(static_cast<int32_t>(token.as_int()));
    const auto number = static_cast<int64_t>(i);
    c.require(tokens == samples[i] && rows[i].get_int("sample") == number &&
                  rows[i].get_int("step") == number / batch + 1,
              path + ": sample " + std::to_string(i) + " is another one");
  }
}

// What a float32 run may differ by: its sums have about 1e-7 relative error, Adam's division by sqrt(v)
// passes it on to the weights, and 20 steps let it grow. bf16 keeps 8 bits of each activation (relative error
// 2^-9); the loss averages over many tokens, single elements of the state do not.
struct Tolerances {
  double loss = 1e-6, grad_norm = 1e-5, weights = 1e-4, state = 1e-4;
};
constexpr Tolerances bf16_tolerances{3e-3, 2e-2, 0.1, 0.1};

// Rounds to the nearest bf16, half to even: what the layers read of f32 master weights.
double round_to_bf16(double x) {
  uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  bits += 0x7fff + (bits >> 16 & 1);
  return static_cast<double>(std::bit_cast<float>(bits & 0xffff0000));
}

Tensors rounded(Tensors all) {
  for (auto& [name, t] : all)
    for (double& x : t.values) x = round_to_bf16(x);
  return all;
}

int compare_training(const Args& args) {
  const std::string &initial = args.at(1), &samples_path = args.at(2), &validation_path = args.at(3),
                    &metrics_path = args.at(4), &last = args.at(5);
  const bool bf16 = args.size() > 6 && args[6] == "bf16";
  const int32_t poison = args.size() > 7 && args[6] == "poison" ? std::stoi(args[7]) : -1;
  const Tolerances tolerance = bf16 ? bf16_tolerances : Tolerances{};
  const Run run = read_run(args.at(0));
  const Config config = read_config(last);
  Comparison c;

  const std::vector<Tokens> samples = make_samples(run.train, 0, run.steps * run.batch);
  compare_samples(c, samples_path, samples, run.batch);
  std::vector<Tokens> validation;
  if (run.validation_samples > 0) {
    validation = make_samples(run.validation, run.validation_part, run.validation_samples);
    compare_samples(c, validation_path, validation, run.batch);
  }

  const Tensors start = read_weights(config, initial);  // with bf16, f32 master weights start from these
  Trainer trainer(config, run, start);
  if (bf16) trainer.set_rounding(round_to_bf16);
  const auto validation_loss = [&] {
    return mean_loss(config, bf16 ? rounded(trainer.weights()) : trainer.weights(), validation);
  };
  int64_t step = 0, evaluations = 0, clipped = 0, skipped = 0, best_step = 0;
  double best = 0;  // evaluation loss
  std::printf("step  loss          reference     relative   grad norm     reference     relative   lr\n");
  for (const nrl::JsonValue& row : read_lines(metrics_path)) {
    if (row.contains("val_loss")) {
      const double expected = validation_loss();
      std::printf("%4ld  val %.9f %.9f\n", static_cast<long>(step), row.get_double("val_loss"), expected);
      c.check("evaluation loss", "step " + std::to_string(step),
              relative(row.get_double("val_loss"), expected), tolerance.loss);
      c.require(row.get_int("step") == step, "an evaluation out of place");
      if (evaluations++ == 0 || expected < best) best = expected, best_step = step;
      continue;
    }
    const std::string where = "step " + std::to_string(++step);
    c.require(row.get_int("step") == step, where + " is missing");
    const std::vector<Tokens> batch(samples.begin() + (step - 1) * run.batch,
                                    samples.begin() + step * run.batch);
    const bool poisoned = std::any_of(batch.begin(), batch.end(), [&](const Tokens& s) {
      return std::find(s.begin(), s.end() - 1, poison) != s.end() - 1;
    });
    const Step ours = poisoned ? trainer.skip() : trainer.step(batch);
    c.require(row.get_bool("skipped") == ours.skipped,
              where + " must" + (ours.skipped ? "" : " not") + " be skipped");
    c.require(row.get_double("lr") == ours.lr, where + ": lr " + std::to_string(row.get_double("lr")) +
                                                   " instead of " + std::to_string(ours.lr));
    c.require(row.get_int("tokens") == step * run.batch * run.train.sequence_length, where + ": tokens");
    skipped += ours.skipped;
    if (ours.skipped) continue;
    const double loss = row.get_double("loss"), norm = row.get_double("grad_norm");
    std::printf("%4ld  %.9f  %.9f  %9.2e  %.9f  %.9f  %9.2e  %.9g\n", static_cast<long>(step), loss,
                ours.loss, relative(loss, ours.loss), norm, ours.grad_norm, relative(norm, ours.grad_norm),
                ours.lr);
    c.check("loss", where, relative(loss, ours.loss), tolerance.loss);
    c.check("gradient norm", where, relative(norm, ours.grad_norm), tolerance.grad_norm);
    clipped += run.max_grad_norm > 0 && ours.grad_norm > run.max_grad_norm;
  }
  c.require(step == run.steps, "the run has " + std::to_string(step) + " steps");
  c.require(validation.empty() || evaluations > 0, "the run was not evaluated");
  const auto some = [&](int64_t count) { return count > 0 && count < run.steps; };
  const nrl::JsonValue position = nrl::read_json(last + "/manifest.json").at("state");
  const std::map<std::string, int64_t> counters = {
      {"step", run.steps},
      {"updates", run.steps - skipped},
      {"skipped", skipped},
      {"consumed_samples", run.steps * run.batch},
      {"tokens", run.steps * run.batch * run.train.sequence_length},
      {"best_val_step", best_step}};
  for (const auto& [name, expected] : counters)
    c.require(position.get_int(name) == expected, "the checkpoint's " + name + " is " +
                                                      std::to_string(position.get_int(name)) +
                                                      " instead of " + std::to_string(expected));
  if (evaluations > 0)
    c.check("best evaluation loss", "checkpoint", relative(position.get_double("best_val_loss"), best),
            tolerance.loss);
  c.require(run.max_grad_norm == 0 || some(clipped),
            "a comparison needs steps that clip and steps that do not");
  c.require(poison < 0 || some(skipped), "a comparison needs steps that are skipped and steps that are not");

  Tensors change = trainer.weights();
  for (auto& [name, t] : change)
    for (size_t i = 0; i < t.size(); ++i) t[i] -= start.at(name)[i];
  const Tensors weights = read_weights(config, last);
  const Tensors master = bf16 ? read_optimizer_state(config, last, "master") : weights;
  c.tensors("weights / update", master, trainer.weights(), change, tolerance.weights);
  if (bf16) c.tensors("bf16 weights", weights, rounded(master), master, 0);
  c.tensors("exp_avg", read_optimizer_state(config, last, "exp_avg"), trainer.exp_avg(), trainer.exp_avg(),
            tolerance.state);
  c.tensors("exp_avg_sq", read_optimizer_state(config, last, "exp_avg_sq"), trainer.exp_avg_sq(),
            trainer.exp_avg_sq(), tolerance.state);
  return c.report();
}

// Every token but the first of the stream is predicted once, from those before it in its window.
int compare_evaluation(const Args& args) {
  const Config config = read_config(args.at(0));
  const Tensors weights = read_weights(config, args.at(0));
  const auto length = static_cast<size_t>(std::stoul(args.at(2))),
             most = static_cast<size_t>(std::stoul(args.at(3)));
  Tokens stream;
  for (const Tokens& document : read_token_file(args.at(1)))
    stream.insert(stream.end(), document.begin(), document.end());
  if (most > 0 && most < stream.size()) stream.resize(most);
  double sum = 0;
  for (size_t begin = 0; begin + 1 < stream.size(); begin += length) {
    const size_t count = std::min(length, stream.size() - 1 - begin);
    const auto at = stream.begin() + static_cast<std::ptrdiff_t>(begin),
               end = at + static_cast<std::ptrdiff_t>(count);
    sum += loss(config, weights, Tokens(at, end), Tokens(at + 1, end + 1));
  }
  const double expected = sum / static_cast<double>(stream.size() - 1);
  Comparison c;
  const std::vector<nrl::JsonValue> rows = read_lines(args.at(5));
  c.require(!rows.empty(), "there is no result");
  for (const nrl::JsonValue& row : rows) {
    c.require(row.get_uint("tokens") == stream.size() - 1, "another number of tokens");
    c.check("loss", "eval", relative(row.get_double("loss"), expected), 1e-6);
    const double bytes = std::stod(args.at(4)), bits = sum / std::log(2.0) / bytes;
    if (bytes > 0) c.check("bits per byte", "eval", relative(row.get_double("bits_per_byte"), bits), 1e-6);
    c.require(bytes > 0 || row.at("bits_per_byte").is_null(), "bits per byte of data without a tokenizer");
    c.check("perplexity", "eval", relative(row.get_double("perplexity"), std::exp(expected)), 1e-5);
  }
  return c.report();
}

int run_command(const Args& args) {
  const std::string command = args.at(0);
  const Args rest(args.begin() + 1, args.end());
  if (command == "train") return compare_training(rest);
  if (command == "eval") return compare_evaluation(rest);
  if (command == "initial") return compare_initial_weights(rest.at(0), rest.at(1));
  if (command == "poison") return poison_embedding(rest.at(0), std::stoi(rest.at(1)));
  if (command != "data") throw std::out_of_range(command);
  write_token_file(rest.at(0), std::stoi(rest.at(1)), std::stoi(rest.at(2)),
                   static_cast<uint32_t>(std::stoul(rest.at(3))));
  return 0;
}

}  // namespace
}  // namespace reference

int main(int argc, char** argv) {
  try {
    return reference::run_command({argv + 1, argv + argc});
  } catch (const std::out_of_range&) {
    std::fputs(reference::usage, stderr);
    return 64;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
