#include <cmath>

#include "core/ops/pair_loss.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;
using Options = PairLoss::Options;

struct Setup {
  const char* name;
  Options options;
};
const Setup setups[] = {
    {"sigmoid", {.beta = 0.3}},
    {"sigmoid averaged", {.beta = 1.5, .average = true}},
    {"sigmoid smoothed with sft",
     {.beta = 0.3, .label_smoothing = 0.2, .preference_weight = 0.7, .sft_weight = 0.4}},
    {"sigmoid sft averaged", {.beta = 0.3, .sft_weight = 2, .average = true, .sft_average = true}},
    {"reward model", {.beta = 1, .center = 0.05}},
    {"robust", {.type = PreferenceLoss::robust, .beta = 0.3, .label_smoothing = 0.1}},
    {"robust averaged", {.type = PreferenceLoss::robust, .beta = 2, .label_smoothing = 0.4, .average = true}},
    {"hinge", {.type = PreferenceLoss::hinge, .beta = 0.3}},
    {"hinge averaged", {.type = PreferenceLoss::hinge, .beta = 1, .average = true}},
    {"ipo", {.type = PreferenceLoss::ipo, .beta = 0.25, .average = true}},
    {"apo_zero", {.type = PreferenceLoss::apo_zero, .beta = 0.3}},
    {"apo_zero averaged", {.type = PreferenceLoss::apo_zero, .beta = 2, .sft_weight = 0.1, .average = true}},
    {"apo_down", {.type = PreferenceLoss::apo_down, .beta = 0.3}},
    {"apo_down averaged", {.type = PreferenceLoss::apo_down, .beta = 1, .average = true, .center = 0.1}},
    {"simpo", {.type = PreferenceLoss::simpo, .beta = 2, .gamma = 0.5, .average = true}},
    {"simpo smoothed",
     {.type = PreferenceLoss::simpo, .beta = 2, .label_smoothing = 0.3, .gamma = 1.2, .average = true}},
    {"orpo", {.type = PreferenceLoss::orpo, .beta = 0.1, .average = true}},
    {"orpo with sft",
     {.type = PreferenceLoss::orpo, .beta = 0.5, .sft_weight = 1, .average = true, .sft_average = true}},
};

/// Sums of log-probabilities of 1 to 9 tokens; every third pair does not count, and has sums that are NaN.
/// The first sequence has one token, one of a pair none.
struct Pairs {
  Buffer sums, values, gradient, metrics;
  explicit Pairs(int64_t pairs) {
    sums = Buffer(DType::f64, {2 * pairs});
    values = Buffer(DType::f64, {2 * pairs, PairValue::count});
    gradient = Buffer(DType::f64, {2 * pairs}).fill(NAN);
    metrics = Buffer(DType::f64, {PairMetric::count}).fill(0.25);
    const Buffer spread = Buffer(DType::f64, {2 * pairs}).normal("spread");
    const Buffer reference = Buffer(DType::f64, {2 * pairs}).normal("reference", 2.0);
    const Buffer tokens = Buffer(DType::i32, {2 * pairs}).integers("tokens", 1, 10);
    for (int64_t s = 0; s < 2 * pairs; ++s) {
      const double n = s == 0 ? 1 : s == 5 ? 0 : tokens.get(s);
      sums.set(s, -n * (0.8 + 0.3 * std::tanh(spread.get(s))) - 0.4);
      set(s, PairValue::normalizer, s / 2 % 3 == 2 ? 0 : 0.5 / static_cast<double>(s / 2 + 1));
      set(s, PairValue::tokens, n);
      set(s, PairValue::reference, sums.get(s) + reference.get(s));
      set(s, PairValue::margin, s / 2 % 2 == 0 ? 0 : 0.3);
      if (s / 2 % 3 == 2) sums.set(s, NAN);
    }
  }
  void set(int64_t segment, PairValue::Index column, double value) {
    values.set(segment * PairValue::count + column, value);
  }
  PairLoss call(const Options& options) const {
    return {.sums = sums, .values = values, .options = options, .gradient = gradient, .metrics = metrics};
  }
};

Outputs run(Exec& e, int64_t pairs, const Options& options) {
  Pairs p(pairs);
  pair_loss(e, p.call(options));
  synchronize(e);
  for (int64_t s = 0; s < 2 * pairs; ++s)
    expect(s / 2 % 3 != 2 || p.gradient.get(s) == 0, "a pair that does not count has a gradient");
  // Without one of the results the other is the same.
  Pairs only(pairs);
  PairLoss call = only.call(options);
  call.metrics = {};
  pair_loss(e, call);
  call = only.call(options);
  call.gradient = {};
  pair_loss(e, call);
  synchronize(e);
  expect(same_bits(only.gradient, p.gradient) && same_bits(only.metrics, p.metrics),
         "results depend on wishes");
  return {{"gradient", p.gradient}, {"metrics", p.metrics}};
}

GradProblem gradient(const Options& options) {
  auto p = std::make_shared<Pairs>(8);
  for (int64_t s = 0; s < 16; ++s)
    if (std::isnan(p->sums.get(s))) p->sums.set(s, -3.0);
  GradProblem g;
  g.inputs = {&p->sums};
  g.gradients = {&p->gradient};
  g.keep = p;
  g.loss = [=, q = p.get()](Exec& e) {
    q->metrics.fill(0);
    e.kernels->pair_loss(e, q->call(options));
    return q->metrics.get(PairMetric::loss);
  };
  g.backward = [=, q = p.get()](Exec& e) { e.kernels->pair_loss(e, q->call(options)); };
  return g;
}

/// One pair with these sums; without references.
struct One {
  Pairs p{1};
  One(double chosen, double rejected, double tokens = 1) {
    p.sums.set(0, chosen);
    p.sums.set(1, rejected);
    for (const int64_t s : {0, 1}) {
      p.set(s, PairValue::normalizer, 1);
      p.set(s, PairValue::tokens, tokens);
      p.set(s, PairValue::reference, 0);
    }
    p.metrics.fill(0);
  }
  void run(Exec& e, const Options& options) {
    pair_loss(e, p.call(options));
    synchronize(e);
  }
  double metric(PairMetric::Index m) const { return p.metrics.get(m); }
  double loss() const { return metric(PairMetric::loss); }
};

void near(double got, double want, const std::string& what) {
  expect(std::fabs(got - want) <= 1e-12 * (1 + std::fabs(want)),
         fmt::format("{}: {}, wanted {}", what, got, want));
}

/// log 2 and half of the largest slope if the policy is the reference; equal rewards are not accurate.
void policy_is_reference(Exec& e) {
  One one(-40, -70, 9);
  one.p.set(0, PairValue::reference, -40);
  one.p.set(1, PairValue::reference, -70);
  one.p.set(0, PairValue::normalizer, 0.25);
  one.run(e, {.beta = 0.2});
  near(one.loss(), 0.25 * std::log(2.0), "loss");
  near(one.metric(PairMetric::accuracy), 0, "accuracy");
  near(one.p.gradient.get(0), -0.25 * 0.1, "chosen");
  near(one.p.gradient.get(1), 0.25 * 0.1, "rejected");
  near(one.metric(PairMetric::log_probs_rejected), -70, "log-probability");
}

/// Swapping the sequences of a pair negates x: -log s(-x) = -log s(x) + x, and gradients change places.
void swapped(Exec& e) {
  const Options options{.beta = 0.3};
  One one(-3, -5), other(-5, -3);
  one.run(e, options);
  other.run(e, options);
  const double x = 0.3 * 2;
  near(one.loss(), std::log1p(std::exp(-x)), "loss");
  near(other.loss(), one.loss() + x, "swapped loss");
  near(one.metric(PairMetric::rewards_chosen), other.metric(PairMetric::rewards_rejected), "rewards");
  near(one.metric(PairMetric::accuracy), 1, "accuracy");
  near(other.metric(PairMetric::accuracy), 0, "accuracy of the swapped pair");
  near(one.p.gradient.get(0), -0.3 / (1 + std::exp(x)), "gradient");
  near(other.p.gradient.get(0), -0.3 / (1 + std::exp(-x)), "swapped gradient");
  near(one.p.gradient.get(0) + one.p.gradient.get(1), 0, "sum of the gradients");
}

/// Sums of +-1e4, and averages of 0, give finite losses and gradients, with the limits of the formulas.
void extremes(Exec& e) {
  for (const Setup& s : setups)
    for (const auto& [chosen, rejected] :
         {std::pair{1e4, -1e4}, {-1e4, 1e4}, {-1e4, -1e4}, {0.0, -1e4}, {-1e4, 0.0}, {0.0, 0.0}}) {
      One one(chosen, rejected);
      one.run(e, s.options);
      for (const double x : {one.loss(), one.p.gradient.get(0), one.p.gradient.get(1)})
        expect(std::isfinite(x), fmt::format("{} of {} and {}: {}", s.name, chosen, rejected, x));
    }
  One good(1e4, -1e4), bad(-1e4, 1e4);
  good.run(e, {.beta = 1});
  bad.run(e, {.beta = 1});
  near(good.loss(), 0, "loss at x = 2e4");
  near(good.p.gradient.get(0), 0, "slope at x = 2e4");
  near(bad.loss(), 2e4, "loss at x = -2e4");
  near(bad.p.gradient.get(0), -1, "slope at x = -2e4");
}

/// On either side of the corner of the hinge, and on it.
void hinge_corner(Exec& e) {
  for (const double distance : {-1e-9, 0.0, 1e-9}) {
    One one(1.5 + distance, 0.5);
    one.run(e, {.type = PreferenceLoss::hinge, .beta = 1});
    near(one.p.gradient.get(0), distance < 0 ? -1 : 0, fmt::format("chosen at {}", distance));
    near(one.p.gradient.get(1), distance < 0 ? 1 : 0, fmt::format("rejected at {}", distance));
  }
}

/// A margin of a reward model moves the loss; a NaN of a pair that counts reaches it in every type.
void margins_and_nans(Exec& e) {
  One one(2, 1);
  one.p.set(0, PairValue::margin, 0.5);
  one.p.set(1, PairValue::margin, 1e9);  // not read
  one.run(e, {.beta = 1, .center = 0.01});
  near(one.metric(PairMetric::preference_loss), std::log1p(std::exp(-0.5)), "loss with a margin");
  near(one.loss(), std::log1p(std::exp(-0.5)) + 0.09, "loss with the centering");
  near(one.p.gradient.get(1), 1 / (1 + std::exp(0.5)) + 0.06, "rejected");
  for (const Setup& s : setups) {
    One lost(-1, NAN);
    lost.run(e, s.options);
    expect(std::isnan(lost.loss()), fmt::format("{}: a NaN is lost", s.name));
  }
}

/// Values and derivatives by TRL 1.16 (DPOTrainer, CPOTrainer, ORPOTrainer) and autograd, of sums -7.25 and
/// -11.5 of 4 and 6 tokens, references -8 and -10.75, beta 0.4.
struct Known {
  Options options;
  double loss, chosen, rejected;
};
const Known known[] = {
    {{.beta = 0.4}, 0.43748795048588562, -0.1417374775096818, 0.1417374775096818},
    {{.beta = 0.4, .average = true}, 0.6325990353171691, -0.046879062662624378, 0.031252708441749585},
    {{.type = PreferenceLoss::robust, .beta = 0.4, .label_smoothing = 0.1},
     0.36248795048588561,
     -0.19173747750968179,
     0.19173747750968179},
    {{.type = PreferenceLoss::hinge, .beta = 0.4},
     0.39999999999999991,
     -0.40000000000000002,
     0.40000000000000002},
    {{.type = PreferenceLoss::ipo, .beta = 0.4, .average = true}, 0.87890625, -0.46875, 0.3125},
    {{.type = PreferenceLoss::apo_zero, .beta = 0.4},
     0.85111496637668194,
     -0.097783324676298355,
     0.097783324676298355},
    {{.type = PreferenceLoss::apo_down, .beta = 0.4},
     0.92878621058586364,
     0.0062696284936354235,
     0.091513696182662932},
    {{.type = PreferenceLoss::simpo, .beta = 2, .label_smoothing = 0.2, .gamma = 0.5, .average = true},
     0.79124338178506959,
     -0.18620205573851067,
     0.12413470382567378},
    {{.type = PreferenceLoss::orpo, .beta = 0.4, .sft_weight = 1, .average = true, .sft_average = true},
     2.0658618365902619,
     -0.30607599125932122,
     0.036676158194511747},
};
void known_values(Exec& e) {
  for (const Known& k : known) {
    One one(-7.25, -11.5);
    one.p.set(0, PairValue::tokens, 4);
    one.p.set(1, PairValue::tokens, 6);
    one.p.set(0, PairValue::reference, -8);
    one.p.set(1, PairValue::reference, -10.75);
    one.run(e, k.options);
    const std::string name(name_of(k.options.type));
    near(one.loss(), k.loss, name + " loss");
    near(one.p.gradient.get(0), k.chosen, name + " chosen");
    near(one.p.gradient.get(1), k.rejected, name + " rejected");
  }
}

void refused(Exec& e) {
  const Pairs p(2);
  const auto refuses = [&](const char* text, const auto& change) {
    PairLoss a = p.call({});
    change(a);
    try {
      pair_loss(e, a);
    } catch (const Error& error) {
      return expect(std::string(error.what()).find(text) != std::string::npos, error.what());
    }
    expect(false, fmt::format("accepted: {}", text));
  };
  refuses("even number", [](PairLoss& a) { a.sums = a.sums.rows(0, 3); });
  refuses("values are", [](PairLoss& a) { a.values = a.values.rows(0, 2); });
  refuses("gradient is", [](PairLoss& a) { a.gradient = a.gradient.rows(0, 2); });
  refuses("metrics are", [](PairLoss& a) { a.metrics = a.metrics.rows(0, 2); });
  refuses("label smoothing", [](PairLoss& a) { a.options.label_smoothing = 0.5; });
  refuses("beta", [](PairLoss& a) { a.options.beta = 0; });
  for (const PreferenceLoss type : {PreferenceLoss::ipo, PreferenceLoss::simpo, PreferenceLoss::orpo})
    refuses("without averages", [=](PairLoss& a) { a.options.type = type; });
}

}  // namespace

NRL_OP_CASES(pair_loss) {
  for (const Setup& s : setups) {
    for (const int64_t pairs : {1, 7, 300})
      registry.tests.push_back({fmt::format("pair_loss.{} {}", s.name, pairs),
                                [=](Exec& e) { return run(e, pairs, s.options); }, true});
    registry.grads.push_back(
        {fmt::format("pair_loss.{}", s.name), [=](DType) { return gradient(s.options); }});
  }
  registry.properties.push_back({"pair_loss.policy is reference", policy_is_reference});
  registry.properties.push_back({"pair_loss.swapped", swapped});
  registry.properties.push_back({"pair_loss.extremes", extremes});
  registry.properties.push_back({"pair_loss.hinge corner", hinge_corner});
  registry.properties.push_back({"pair_loss.margins and nans", margins_and_nans});
  registry.properties.push_back({"pair_loss.known values", known_values});
  registry.properties.push_back({"pair_loss.refused", refused});
}

}  // namespace nrl::ops_test
