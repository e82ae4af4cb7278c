#include "tests/reference/compare_run.h"

#include <algorithm>
#include <bit>
#include <fstream>
#include <stdexcept>

#include "tests/reference/compare.h"
#include "tests/reference/trainer.h"

namespace reference {
namespace {

// What a float32 run may differ by: its sums have a relative error of about 1e-7, Adam's division by sqrt(v)
// passes it on to the weights, and 20 steps let it grow to 1e-5 there. bf16 keeps 8 bits of each activation
// (relative error 2^-9): that averages out in loss and norm, but the update of a tensor is off by percents.
struct Tolerances {
  double loss = 1e-6, grad_norm = 1e-5, weights = 1e-4, state = 1e-4;
};
constexpr Tolerances bf16_tolerances{3e-3, 2e-2, 0.1, 0.1};

// Rounds to the nearest bf16, half away from zero: what the layers read of f32 master weights.
double round_to_bf16(double x) {
  uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  bits += 0x8000;
  return static_cast<double>(std::bit_cast<float>(bits & 0xffff0000));
}

Tensors rounded(Tensors all) {
  for (auto& [name, t] : all)
    for (double& x : t.values) x = round_to_bf16(x);
  return all;
}

Tensors difference(Tensors a, const Tensors& b) {
  for (auto& [name, t] : a)
    for (size_t i = 0; i < t.size(); ++i) t[i] -= b.at(name)[i];
  return a;
}

class RunComparison {
 public:
  explicit RunComparison(const RunFiles& files)
      : files_(files),
        tolerance_(files.bf16 ? bf16_tolerances : Tolerances{}),
        run_(read_run(files.yaml)),
        model_(read_model(files.yaml)),
        start_(read_weights(model_, files.initial)),  // with bf16, f32 master weights start from these
        trainer_(model_, run_, start_),
        samples_(make_samples(run_.train, 0, run_.steps * run_.batch)) {
    if (files.bf16) trainer_.set_rounding(round_to_bf16);
    compare_samples(files.samples, run_.train, samples_);
    if (run_.validation_samples == 0) return;
    validation_ = make_samples(run_.validation, run_.validation_part, run_.validation_samples);
    compare_samples(files.validation, run_.validation, validation_);
  }

  int compare() {
    std::printf("step  loss          reference     relative   grad norm     reference     relative   lr\n");
    for (const nrl::JsonValue& row : read_lines(files_.metrics))
      if (row.contains("val_loss"))
        compare_evaluation(row);
      else
        compare_step(row);
    require_coverage();
    compare_counters();
    compare_state();
    return c_.report();
  }

 private:
  // `data show` against the samples in our own order.
  void compare_samples(const std::string& path, const DataSettings& data,
                       const std::vector<Tokens>& samples) {
    const std::vector<nrl::JsonValue> rows = read_lines(path);
    c_.require_equal(path + ": samples", rows.size(), samples.size());
    for (size_t i = 0; i < std::min(rows.size(), samples.size()); ++i) {
      const std::string where = path + ", line " + std::to_string(i + 1);
      Tokens tokens;
      for (const nrl::JsonValue& token : rows[i].at("tokens").items())
        tokens.push_back(static_cast<int32_t>(token.as_int()));
      c_.require(tokens == samples[i], where + ": other tokens");
      compare_documents(where, rows[i], data, make_inputs(data, samples[i]));
      const auto number = static_cast<int64_t>(i);
      c_.require_equal(where + ": sample", rows[i].get_int("sample"), number);
      c_.require_equal(where + ": step", rows[i].get_int("step"), number / run_.batch + 1);
    }
  }

  // The lists of a sample whose documents are kept apart.
  void compare_documents(const std::string& where, const nrl::JsonValue& row, const DataSettings& data,
                         const Inputs& in) {
    std::vector<size_t> segments, no_loss;
    for (size_t t = 0; t < in.tokens.size(); ++t) {
      if (in.layout.first[t] == t) segments.push_back(t);
      if (in.targets[t] < 0) no_loss.push_back(t);
    }
    const auto compare = [&](const std::string& name, bool wanted, const std::vector<size_t>& expected) {
      c_.require_equal(where + ": has " + name, row.contains(name), wanted);
      if (!wanted || !row.contains(name)) return;
      std::vector<size_t> found;
      for (const nrl::JsonValue& value : row.at(name).items())
        found.push_back(static_cast<size_t>(value.as_int()));
      c_.require(found == expected, where + ": other " + name);
    };
    compare("positions", data.reset_position_ids, in.layout.positions);
    compare("segments", data.reset_attention_mask, segments);
    compare("no_loss", data.eod_mask_loss, no_loss);
    cut_ += segments.size() > 1;
    masked_ += !no_loss.empty();
  }

  void compare_step(const nrl::JsonValue& row) {
    const std::string where = "step " + std::to_string(++step_);
    c_.require_equal(where + ": step", row.get_int("step"), step_);
    if (step_ > run_.steps) return;
    const std::vector<Tokens> batch(samples_.begin() + (step_ - 1) * run_.batch,
                                    samples_.begin() + step_ * run_.batch);
    const bool poisoned = std::any_of(batch.begin(), batch.end(), [&](const Tokens& s) {
      return std::find(s.begin(), s.end() - 1, files_.poison) != s.end() - 1;
    });
    const Step ours = poisoned ? trainer_.skip() : trainer_.step(batch);
    c_.require_equal(where + ": skipped", row.get_bool("skipped"), ours.skipped);
    c_.require_equal(where + ": lr", row.get_double("lr"), ours.lr);
    c_.require_equal(where + ": tokens", row.get_int("tokens"),
                     step_ * run_.batch * run_.train.sequence_length);
    skipped_ += ours.skipped;
    if (ours.skipped) return;
    const double loss = row.get_double("loss"), norm = row.get_double("grad_norm");
    std::printf("%4ld  %.9f  %.9f  %9.2e  %.9f  %.9f  %9.2e  %.9g\n", static_cast<long>(step_), loss,
                ours.loss, relative(loss, ours.loss), norm, ours.grad_norm, relative(norm, ours.grad_norm),
                ours.lr);
    c_.check("loss", where, relative(loss, ours.loss), tolerance_.loss);
    c_.check("gradient norm", where, relative(norm, ours.grad_norm), tolerance_.grad_norm);
    clipped_ += run_.max_grad_norm > 0 && ours.grad_norm > run_.max_grad_norm;
  }

  void compare_evaluation(const nrl::JsonValue& row) {
    const Tensors& weights = trainer_.weights();
    const double found = row.get_double("val_loss"),
                 expected = mean_loss(model_, files_.bf16 ? rounded(weights) : weights, run_.validation,
                                      validation_);
    std::printf("%4ld  evaluation: %.9f  %.9f  %9.2e\n", static_cast<long>(step_), found, expected,
                relative(found, expected));
    const std::string where = "step " + std::to_string(step_);
    c_.check("evaluation loss", where, relative(found, expected), tolerance_.loss);
    c_.require_equal(where + ": step of the evaluation", row.get_int("step"), step_);
    if (evaluations_++ == 0 || expected < best_loss_) best_loss_ = expected, best_step_ = step_;
  }

  // Without these, the comparison could not notice some faults.
  void require_coverage() {
    const auto some = [&](int64_t count) { return count > 0 && count < run_.steps; };
    c_.require(validation_.empty() || evaluations_ > 0, "the run was not evaluated");
    c_.require(run_.max_grad_norm == 0 || some(clipped_),
               "a comparison needs steps that clip and steps that do not");
    c_.require(!run_.train.reset_attention_mask || cut_ > 0, "no sample holds two documents");
    c_.require(!run_.train.eod_mask_loss || masked_ > 0, "every token has a loss");
    c_.require(files_.poison < 0 || some(skipped_),
               "a comparison needs steps that are skipped and steps that are not");
  }

  void compare_counters() {
    c_.require_equal("steps", step_, run_.steps);
    const nrl::JsonValue saved = nrl::read_json(files_.last + "/manifest.json").at("state");
    const auto compare = [&](const std::string& counter, int64_t expected) {
      c_.require_equal("the checkpoint's " + counter, saved.get_int(counter), expected);
    };
    compare("step", run_.steps);
    compare("updates", run_.steps - skipped_);
    compare("skipped", skipped_);
    compare("consumed_samples", run_.steps * run_.batch);
    compare("tokens", run_.steps * run_.batch * run_.train.sequence_length);
    compare("best_val_step", best_step_);
    if (evaluations_ > 0)
      c_.check("best evaluation loss", "checkpoint", relative(saved.get_double("best_val_loss"), best_loss_),
               tolerance_.loss);
  }

  void compare_state() {
    c_.require(read_config(files_.last) == model_, files_.last + "/config.json is of another model");
    const Tensors weights = read_weights(model_, files_.last);
    const Tensors master = files_.bf16 ? read_optimizer_state(model_, files_.last, "master") : weights;
    c_.tensors("weights / update", master, trainer_.weights(), difference(trainer_.weights(), start_),
               tolerance_.weights);
    if (files_.bf16) c_.tensors("bf16 weights", weights, rounded(master), master, 0);
    c_.tensors("exp_avg", read_optimizer_state(model_, files_.last, "exp_avg"), trainer_.exp_avg(),
               trainer_.exp_avg(), tolerance_.state);
    c_.tensors("exp_avg_sq", read_optimizer_state(model_, files_.last, "exp_avg_sq"), trainer_.exp_avg_sq(),
               trainer_.exp_avg_sq(), tolerance_.state);
  }

  const RunFiles& files_;
  const Tolerances tolerance_;
  const Run run_;
  const Config model_;
  const Tensors start_;
  Trainer trainer_;
  const std::vector<Tokens> samples_;
  std::vector<Tokens> validation_;
  Comparison c_;
  int64_t step_ = 0, skipped_ = 0, clipped_ = 0, evaluations_ = 0, best_step_ = 0;
  int64_t cut_ = 0, masked_ = 0;  // samples in segments, and with tokens without a loss
  double best_loss_ = 0;
};

}  // namespace

int compare_run(const RunFiles& files) {
  return RunComparison(files).compare();
}

std::vector<nrl::JsonValue> read_lines(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::vector<nrl::JsonValue> rows;
  for (std::string line; std::getline(in, line);) rows.push_back(nrl::parse_json(line, path));
  return rows;
}

}  // namespace reference
