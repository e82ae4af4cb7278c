#include <cmath>
#include <vector>

#include "core/ops/policy_loss.h"
#include "core/ops/segments.h"
#include "core/ops/transfer.h"
#include "tests/ops/cases.h"

namespace nrl::ops_test {
namespace {

using namespace nrl::ops;
using Options = PolicyLoss::Options;

struct Setup {
  const char* name;
  Options options;
  bool old = true, reference = false, importance = false;
};
const Setup setups[] = {
    {"clip", {}},
    {"clip higher", {.lower = 0.1, .upper = 0.4}, true, false, true},
    {"dual clip", {.dual_clip = 1.5}, true, false, true},
    {"dual clip within the range", {.upper = 0.8, .dual_clip = 1.2}},
    {"clip k1", {.kl_penalty = 0.5, .kl_type = KlEstimator::k1}, true, true},
    {"clip k2", {.kl_penalty = 0.5, .kl_type = KlEstimator::k2}, true, true, true},
    {"clip k3 with entropy", {.kl_penalty = 0.5, .entropy_coef = 0.01}, true, true, true},
    {"reinforce", {.type = PolicyObjective::reinforce}, false, false, true},
    {"reinforce k3", {.type = PolicyObjective::reinforce, .kl_penalty = 1}, true, true},
    {"gspo", {.type = PolicyObjective::gspo, .lower = 0.05, .upper = 0.05}},
    {"gspo k3 with entropy",
     {.type = PolicyObjective::gspo, .dual_clip = 1.02, .kl_penalty = 0.3, .entropy_coef = 0.02},
     true,
     true,
     true},
    {"rloo", {.type = PolicyObjective::rloo}},
    {"rloo dual clip", {.type = PolicyObjective::rloo, .upper = 0.5, .dual_clip = 1.7}, true, false, true},
};
/// Losses of which the value is not a function with this derivative: the ratio is a constant.
const Setup stopped[] = {
    {"cispo", {.type = PolicyObjective::cispo}, true, true, true},
    {"cispo k3 with entropy",
     {.type = PolicyObjective::cispo, .lower = 1, .kl_penalty = 0.5, .entropy_coef = 0.1},
     true,
     true},
    {"cispo on policy", {.type = PolicyObjective::cispo}, false},
    {"clip on policy", {}, false}};

/// N rows of `segments` sequences. Ratios keep a distance from the bounds of every setup. Every eleventh row
/// has no target, every seventh the normalizer 0, and the last no segment; there all other numbers are NaN.
struct Policy {
  Setup setup;
  Buffer log_prob, target, normalizer, advantage, old, reference, importance, entropy, segment, log_ratios,
      tokens, weight, entropy_weight, metrics;
  bool by_sequence;

  Policy(const Setup& s, int64_t n, int64_t segments, DType t = DType::f32)
      : setup(s), by_sequence(is_of_sequences(s.options.type)) {
    log_prob = Buffer(t, {n});
    target = Buffer(DType::i32, {n});
    normalizer = Buffer(t, {n});
    advantage = Buffer(t, {n});
    old = Buffer(t, {n});
    reference = Buffer(t, {n});
    importance = Buffer(t, {n});
    entropy = Buffer(t, {n});
    segment = Buffer(DType::i32, {n});
    log_ratios = Buffer(DType::f64, {segments});
    tokens = Buffer(DType::f64, {segments});
    weight = Buffer(t, {n}).fill(NAN);
    entropy_weight = Buffer(t, {n}).fill(NAN);
    metrics = Buffer(DType::f64, {PolicyMetric::count}).fill(0.5);
    const Buffer noise = Buffer(DType::f64, {n}).normal("noise"),
                 more = Buffer(DType::f64, {n}).normal("more");
    // Ratios, kappas: within and beyond each bound, of both signs.
    constexpr double ratios[] = {0.3, 0.85, 0.97, 1.03, 1.13, 1.25, 1.33, 1.45, 1.7, 2.5, 0.99, 1.01};
    constexpr double kappas[] = {0.1, -0.7, 1.5, 2.4, 3.0, -4.0, 5.0, -9.0, 11.0, -15.0, 19.0, 25.0, -25.0};
    // Sequences: for each token.
    constexpr double drifts[] = {0.03, 0.09, -0.08};
    for (int64_t i = 0; i < n; ++i) {
      const int64_t s = i * segments / n;
      const double lp = -0.2 - std::fabs(noise.get(i)), c = by_sequence
                                                                ? 0.25 + 0.5 * static_cast<double>(s % 3)
                                                                : 0.5 + 0.1 * static_cast<double>(i % 5);
      const double drift = drifts[s % 3];
      const double log_ratio =
          by_sequence ? drift * (1 + 0.5 * std::tanh(more.get(i))) : std::log(ratios[i % 12]);
      log_prob.set(i, lp);
      old.set(i, lp - log_ratio);
      reference.set(i, lp + kappas[i % 13]);
      normalizer.set(i, i % 7 == 5 ? 0.0 : c);
      const double of_sequence = (s % 4 == 1 || s % 4 == 2 ? 1 : -1) * (1 + 0.1 * static_cast<double>(s));
      advantage.set(i, by_sequence ? of_sequence : i % 24 == 3 ? 0.0 : more.get(i));
      importance.set(i, by_sequence  ? 0.75 + 0.25 * static_cast<double>(s % 3)
                        : i % 9 == 1 ? 0.0
                                     : 0.5 + 0.25 * static_cast<double>(i % 4));
      entropy.set(i, std::fabs(more.get(i)));
      target.set(i, i % 11 == 7 ? -1 : 3);
      segment.set(i, i + 1 == n && n > 1 ? -1 : static_cast<double>(s));
      const bool counts =
          target.get(i) >= 0 && normalizer.get(i) > 0 && (!by_sequence || segment.get(i) >= 0);
      if (counts) tokens.set(s, tokens.get(s) + 1);
      if (counts) continue;
      for (Buffer* b : {&log_prob, &old, &reference, &advantage, &importance, &entropy}) b->set(i, NAN);
    }
    for (int64_t i = 0; i < n; ++i)  // sums over segments do not know normalizers
      if (by_sequence && normalizer.get(i) == 0) target.set(i, -1);
  }

  PolicyLoss call() const {
    PolicyLoss a{.log_prob = log_prob,
                 .target = target,
                 .normalizer = normalizer,
                 .advantage = advantage,
                 .options = setup.options,
                 .weight = weight,
                 .metrics = metrics};
    if (setup.old) a.old = old;
    if (setup.reference) a.reference = reference;
    if (setup.importance) a.importance = importance;
    if (setup.options.entropy_coef != 0 || setup.importance) a.entropy = entropy;
    if (setup.options.entropy_coef != 0) a.entropy_weight = entropy_weight;
    if (by_sequence) a.segment = segment, a.log_ratios = log_ratios, a.tokens = tokens;
    return a;
  }
  SegmentSum sums() const {
    return {.x = log_prob, .minus = old, .target = target, .segment = segment, .out = log_ratios};
  }
};

/// The same context with exactly the workspace of the op; a library's context has its own.
template <class Body>
void with_workspace(Exec& e, const Body& body) {
  std::vector<std::byte> memory(e.libraries ? 0 : policy_loss_workspace(e.partials()));
  Exec exact = e;
  if (!e.libraries) exact.workspace = {memory.data(), memory.size()};
  body(exact);
  synchronize(exact);
}

Outputs run(Exec& e, const Setup& s, int64_t n, int64_t segments, bool few) {
  Policy p(s, n, segments), only(s, n, segments);
  Exec used = few ? few_blocks(e) : e;
  with_workspace(used, [&](Exec& exec) {
    if (p.by_sequence) {
      segment_sum(exec, p.sums());
      segment_sum(exec, only.sums());
    }
    policy_loss(exec, p.call());
    // Without one of the results the other is the same.
    PolicyLoss call = only.call();
    call.metrics = {};
    policy_loss(exec, call);
    call = only.call();
    call.weight = call.entropy_weight = {};
    policy_loss(exec, call);
  });
  expect(same_bits(only.weight, p.weight) && same_bits(only.metrics, p.metrics), "results depend on wishes");
  for (int64_t i = 0; i < n; ++i)
    if (p.target.get(i) < 0 || p.normalizer.get(i) == 0)
      expect(p.weight.get(i) == 0, "a row that does not count has a weight");
  Outputs out{{"weight", p.weight}, {"metrics", p.metrics}};
  if (s.options.entropy_coef != 0) out.push_back({"entropy_weight", p.entropy_weight});
  return out;
}

/// Derivatives by all log-probabilities of the loss of 30 rows of 3 sequences, and by the entropies. Ratios
/// of sequences follow from the log-probabilities.
GradProblem gradient(DType t, const Setup& s) {
  auto p = std::make_shared<Policy>(s, 30, 3, t);
  GradProblem g;
  for (int64_t i = 0; i < 30; ++i)  // differences of 0 must be numbers
    for (Buffer* b : {&p->log_prob, &p->old, &p->reference, &p->advantage, &p->importance, &p->entropy})
      if (std::isnan(b->get(i))) b->set(i, -1.0);
  g.inputs = {&p->log_prob};
  g.gradients = {&p->weight};
  if (s.options.entropy_coef != 0) g.inputs.push_back(&p->entropy), g.gradients.push_back(&p->entropy_weight);
  g.keep = p;
  g.backward = [q = p.get()](Exec& e) {
    q->metrics.fill(0);
    if (q->by_sequence) e.kernels->segment_sum(e, q->sums());
    e.kernels->policy_loss(e, q->call());
  };
  g.loss = [q = p.get(), backward = g.backward](Exec& e) {
    backward(e);
    return q->metrics.get(PolicyMetric::loss);
  };
  return g;
}

void near(double got, double want, const std::string& what, double accuracy = 1e-12) {
  expect(std::fabs(got - want) <= accuracy * (1 + std::fabs(want)),
         fmt::format("{}: {}, wanted {}", what, got, want));
}

/// Rows given by hand, in one sequence.
struct Few {
  Buffer log_prob, target, normalizer, advantage, old, segment, log_ratios, tokens, weight, metrics;
  explicit Few(const std::vector<double>& given, double advantage_of_all = 1) {
    const auto n = static_cast<int64_t>(given.size());
    for (Buffer* b : {&log_prob, &normalizer, &advantage, &old, &weight}) *b = Buffer(DType::f32, {n});
    target = Buffer(DType::i32, {n});
    segment = Buffer(DType::i32, {n});
    log_ratios = Buffer(DType::f64, {1});
    tokens = Buffer(DType::f64, {1}).fill(static_cast<double>(n));
    metrics = Buffer(DType::f64, {PolicyMetric::count});
    normalizer.fill(1);
    advantage.fill(advantage_of_all);
    for (int64_t i = 0; i < n; ++i) log_prob.set(i, given[static_cast<size_t>(i)]);
  }
  PolicyLoss call(const Options& options) const {
    PolicyLoss a{.log_prob = log_prob,
                 .target = target,
                 .normalizer = normalizer,
                 .advantage = advantage,
                 .old = old,
                 .options = options,
                 .weight = weight,
                 .metrics = metrics};
    if (is_of_sequences(options.type)) a.segment = segment, a.log_ratios = log_ratios, a.tokens = tokens;
    return a;
  }
  double metric(PolicyMetric::Index m) const { return metrics.get(m); }
};
void run(Exec& e, const PolicyLoss& a) {
  policy_loss(e, a);
  synchronize(e);
}

/// Just within a bound a row has its gradient, just beyond it none, and only on the side on which the ratio
/// gains from moving away.
void bounds(Exec& e) {
  constexpr double near_bound = 2e-6;
  struct Case {
    double bound, beyond, advantage;
  };
  for (const Case& c : {Case{1.2, 1, 1}, {0.8, -1, -1}, {1.5, 1, -1}}) {
    Few rows({std::log(c.bound) - c.beyond * near_bound, std::log(c.bound) + c.beyond * near_bound},
             c.advantage);
    run(e, rows.call({.dual_clip = 1.5}));
    near(rows.weight.get(0), -c.advantage * std::exp(rows.log_prob.get(0)), fmt::format("within {}", c.bound),
         1e-6);
    near(rows.weight.get(1), 0, fmt::format("beyond {}", c.bound));
    near(rows.metric(PolicyMetric::clipped), 1, "clipped");
    near(rows.metric(PolicyMetric::loss), -2 * c.advantage * c.bound, "loss", 1e-5);
  }
  // The other sides are not clipped.
  for (const double advantage : {1.0, -1.0}) {
    Few rows({std::log(advantage > 0 ? 0.5 : 1.9)}, advantage);
    run(e, rows.call({}));
    near(rows.weight.get(0), -advantage * std::exp(rows.log_prob.get(0)), "not clipped", 1e-6);
    near(rows.metric(PolicyMetric::ratio_clamped), advantage > 0 ? 0.8 : 1.2, "clamped ratio");
    near(rows.metric(PolicyMetric::clipped), 0, "clipped");
  }
  // Logarithms of ratios and of the reference's beyond 20.
  Few far({25, -25, 19}, -1);
  run(e, far.call({.lower = 1, .upper = 1e12}));
  near(far.weight.get(0), 0, "ratio beyond e^20");
  near(far.weight.get(1), 0, "ratio below e^-20");
  near(far.weight.get(2), std::exp(19.0), "ratio e^19", 1e-6);
  near(far.metric(PolicyMetric::ratio), std::exp(20.0) + std::exp(-20.0) + std::exp(19.0), "ratios");
}

/// The estimators within their bounds and beyond, by hand.
void divergences(Exec& e) {
  const struct {
    KlEstimator type;
    double kappa, value, slope;
  } cases[] = {{KlEstimator::k1, 3, -3, 1},
               {KlEstimator::k1, -9.5, 9.5, 1},
               {KlEstimator::k1, 10.5, -10, 0},
               {KlEstimator::k2, -3, 4.5, 3},
               {KlEstimator::k2, 4.5, 10, 0},
               {KlEstimator::k3, 2, std::exp(2.0) - 3, 1 - std::exp(2.0)},
               {KlEstimator::k3, -9, std::exp(-9.0) + 8, 1 - std::exp(-9.0)},
               {KlEstimator::k3, 2.75, 10, 0},
               {KlEstimator::k3, -25, 10, 0},
               {KlEstimator::k3, 0, 0, 0}};
  for (const auto& c : cases) {
    Few rows({-1}, 0);
    Buffer reference = Buffer(DType::f32, {1}).fill(-1 + c.kappa);
    rows.normalizer.fill(0.5);
    PolicyLoss a = rows.call({.kl_penalty = 0.25, .kl_type = c.type});
    a.reference = reference;
    run(e, a);
    const std::string name = fmt::format("{} of {}", name_of(c.type), c.kappa);
    near(rows.metric(PolicyMetric::kl), 0.5 * c.value, name);
    near(rows.metric(PolicyMetric::loss), 0.125 * c.value, name + " in the loss");
    near(rows.weight.get(0), 0.125 * c.slope, name + " slope", 1e-7);
  }
}

/// Without old log-probabilities the ratio is 1 with the gradient of the log-probability, as if they were the
/// same numbers. CISPO is REINFORCE with the bounded ratio as a weight.
void equivalences(Exec& e) {
  const std::vector<double> given{-1, -0.5, -2.25};
  for (const Options& o :
       {Options{}, Options{.lower = 0, .upper = 0}, Options{.type = PolicyObjective::cispo},
        Options{.type = PolicyObjective::gspo}, Options{.type = PolicyObjective::rloo}}) {
    Few absent(given), same(given);
    for (int64_t i = 0; i < 3; ++i) same.old.set(i, same.log_prob.get(i));
    PolicyLoss a = absent.call(o);
    a.old = a.log_ratios = {};
    run(e, a);
    run(e, same.call(o));
    expect(same_bits(absent.weight, same.weight) && same_bits(absent.metrics, same.metrics),
           fmt::format("{} on policy", name_of(o.type)));
    const double part = o.type == PolicyObjective::gspo ? 1.0 / 3 : 1;
    for (int64_t i = 0; i < 3; ++i) near(absent.weight.get(i), -part, "gradient on policy", 1e-7);
  }
  Few cispo(given, -2), reinforce(given, -2);
  Buffer bounded(DType::f32, {3});
  for (int64_t i = 0; i < 3; ++i) {
    cispo.old.set(i, std::vector{-1.125, -2.0, -1.0}[static_cast<size_t>(i)]);
    bounded.set(i, std::clamp(std::exp(cispo.log_prob.get(i) - cispo.old.get(i)), 0.75, 1.5));
  }
  run(e, cispo.call({.type = PolicyObjective::cispo, .lower = 0.25, .upper = 0.5}));
  PolicyLoss a = reinforce.call({.type = PolicyObjective::reinforce});
  a.importance = bounded;
  run(e, a);
  for (int64_t i = 0; i < 3; ++i) near(cispo.weight.get(i), reinforce.weight.get(i), "cispo", 1e-6);
  near(cispo.metric(PolicyMetric::loss), reinforce.metric(PolicyMetric::loss), "cispo loss", 1e-6);
  near(cispo.metric(PolicyMetric::clipped), 2, "cispo clipped");
}

/// Sequences of 1 and of 4096 tokens whose log-probabilities move by 0.05 each stay finite: gspo's ratio does
/// not depend on the length, rloo's is bounded.
void lengths(Exec& e) {
  for (const int64_t n : {1, 4096})
    for (const double move : {0.05, -0.05})
      for (const double advantage : {1.0, -1.0}) {
        Few rows(std::vector<double>(static_cast<size_t>(n), -1.0), advantage);
        rows.old.fill(-1 - move);
        segment_sum(e, {.x = rows.log_prob,
                        .minus = rows.old,
                        .target = rows.target,
                        .segment = rows.segment,
                        .out = rows.log_ratios});
        with_workspace(e, [&](Exec& exec) { policy_loss(exec, rows.call({.type = PolicyObjective::gspo})); });
        const std::string name = fmt::format("{} tokens by {}, advantage {}", n, move, advantage);
        const double ratio = std::exp(move), length = static_cast<double>(n);
        near(rows.metric(PolicyMetric::loss), -advantage * ratio, name, 1e-6);
        near(rows.weight.get(n - 1), -advantage * ratio / length, name + " weight", 1e-6 / length);
        near(rows.metric(PolicyMetric::ratio), ratio * length, name + " ratio", 1e-6);
        Few bounded = rows;
        bounded.metrics.fill(0);
        with_workspace(e,
                       [&](Exec& exec) { policy_loss(exec, bounded.call({.type = PolicyObjective::rloo})); });
        expect(std::isfinite(bounded.metric(PolicyMetric::loss)) && std::isfinite(bounded.weight.get(0)),
               name + " rloo");
        if (n == 1) near(bounded.weight.get(0), rows.weight.get(0), "rloo of one token", 1e-7);
      }
}

/// Metrics of 5000 rows have the same bits for any number of threads.
void any_threads(Exec& e) {
  const Setup& s = setups[6];
  Policy first(s, 5000, 4);
  with_workspace(e, [&](Exec& exec) { policy_loss(exec, first.call()); });
  for (const int threads : {1, 3, 5, 8}) {
    Policy again(s, 5000, 4);
    Exec more = e;
    more.threads = threads;
    policy_loss(more, again.call());
    synchronize(more);
    expect(same_bits(first.metrics, again.metrics) && same_bits(first.weight, again.weight),
           fmt::format("{} threads give other bits", threads));
  }
}

/// A NaN of a row that counts reaches the loss and its weight, in every type.
void nans(Exec& e) {
  for (const PolicyObjective type :
       {PolicyObjective::clip, PolicyObjective::cispo, PolicyObjective::reinforce, PolicyObjective::gspo,
        PolicyObjective::rloo}) {
    Few rows({-1, NAN});
    rows.log_ratios.fill(NAN);
    run(e, rows.call({.type = type}));
    expect(std::isnan(rows.metric(PolicyMetric::loss)), fmt::format("{}: a NaN is lost", name_of(type)));
  }
  Few rows({-1});
  Buffer reference = Buffer(DType::f32, {1}).fill(NAN);
  PolicyLoss a = rows.call({.kl_penalty = 0.1});
  a.reference = reference;
  run(e, a);
  expect(std::isnan(rows.metric(PolicyMetric::loss)), "a NaN of the reference is lost");
}

/// Losses and derivatives by TRL 1.16 (GRPOTrainer, RLOOTrainer) and autograd: two sequences of 4 and 3
/// tokens with the advantages 1.5 and -0.75, the loss a mean of the sequences' means (rloo: of the
/// sequences).
struct Known {
  Options options;
  double loss;
  double weights[8];
};
const Known known[] = {
    {{.upper = 0.25},
     -0.35230336687625957,
     {0, -0.21246533495002995, -0.14602514682588841, 0, 0, 0.11031211282307442, 0.26462500207658435, 0}},
    {{.upper = 0.25, .kl_penalty = 0.3},
     -0.32718752276557822,
     {0.014755100260776245, -0.21246533495002995, -0.17035219447714323, 0.0082949706348223184,
      -0.014201270834387068, 0.077876049288068017, 0.28429846909095269, 0}},
    {{.type = PolicyObjective::cispo, .lower = 1, .upper = 0.25},
     0.16588435295250337,
     {-0.234375, -0.21246533495002995, -0.14602514682588841, -0.234375, 0.097350097883925596,
      0.11031211282307442, 0.15625, 0}},
    {{.type = PolicyObjective::gspo, .upper = 0.25, .kl_penalty = 0.3},
     -0.42679232061638711,
     {-0.20445460839600582, -0.21920970865678208, -0.24353675630803689, -0.21091473802195976,
      0.12744228579896622, 0.10920749309834688, 0.1613170236477216, 0}},
    {{.type = PolicyObjective::rloo, .upper = 0.25},
     -0.39187821951817448,
     {0, 0, 0, 0, 0.54562178048182552, 0.54562178048182552, 0.54562178048182552, 0}},
};
void known_values(Exec& e) {
  const std::vector<double> old{-1.5, -0.625, -2.5, -0.75, -0.5, -3.375, -2.25, 0},
      reference{-1.75, -0.5, -2.25, -0.5, -0.5, -3, -2, 0};
  for (const Known& k : known) {
    Few rows({-1.25, -0.5, -2.75, -0.25, -0.75, -3.5, -1.5, 0});
    Buffer references(DType::f32, {8}), tokens(DType::f64, {2}), log_ratios(DType::f64, {2});
    tokens.set(0, 4);
    tokens.set(1, 3);
    const bool by_sequence = is_of_sequences(k.options.type);
    for (int64_t i = 0; i < 8; ++i) {
      rows.old.set(i, old[static_cast<size_t>(i)]);
      references.set(i, reference[static_cast<size_t>(i)]);
      rows.advantage.set(i, i < 4 ? 1.5 : -0.75);
      rows.segment.set(i, i / 4);
      rows.normalizer.set(i, by_sequence ? 0.5 : i < 4 ? 0.5 / 4 : 0.5 / 3);
    }
    rows.target.set(7, -1);
    segment_sum(e, {.x = rows.log_prob,
                    .minus = rows.old,
                    .target = rows.target,
                    .segment = rows.segment,
                    .out = log_ratios});
    PolicyLoss a = rows.call(k.options);
    a.reference = references;
    if (by_sequence) a.log_ratios = log_ratios, a.tokens = tokens;
    run(e, a);
    const std::string name(name_of(k.options.type));
    near(rows.metric(PolicyMetric::loss), k.loss, name + " loss", 1e-7);
    for (int64_t i = 0; i < 8; ++i)
      near(rows.weight.get(i), k.weights[i], fmt::format("{} weight {}", name, i), 1e-7);
  }
}

void refused(Exec& e) {
  const Few rows({-1, -2});
  const auto refuses = [&](const char* text, const Options& options, const auto& change) {
    PolicyLoss a = rows.call(options);
    change(a);
    try {
      policy_loss(e, a);
    } catch (const Error& error) {
      return expect(std::string(error.what()).find(text) != std::string::npos, error.what());
    }
    expect(false, fmt::format("accepted: {}", text));
  };
  const auto as_is = [](PolicyLoss&) {};
  refuses("reference is", {.kl_penalty = 0.1}, as_is);
  refuses("entropy is", {.entropy_coef = 0.1}, as_is);
  refuses("entropy_weight is", {.entropy_coef = 0.1}, [](PolicyLoss& a) { a.entropy = a.old; });
  refuses("clipped", {.lower = -0.1}, as_is);
  refuses("dual_clip", {.dual_clip = 1}, as_is);
  refuses("dual_clip", {.type = PolicyObjective::cispo, .dual_clip = 3}, as_is);
  refuses("segment is", {.type = PolicyObjective::gspo}, [](PolicyLoss& a) { a.segment = {}; });
  refuses("log_ratios is", {.type = PolicyObjective::rloo}, [](PolicyLoss& a) { a.log_ratios = a.metrics; });
  refuses("with segments", {}, [](PolicyLoss& a) { a.segment = a.target; });
  refuses("metrics are", {}, [](PolicyLoss& a) { a.metrics = a.metrics.rows(0, 3); });
  refuses("weight is", {}, [](PolicyLoss& a) { a.weight = a.weight.rows(0, 1); });
  refuses("advantage is", {}, [](PolicyLoss& a) { a.advantage = a.target; });
}

}  // namespace

NRL_OP_CASES(policy_loss) {
  const auto add = [&](const Setup& s) {
    for (const auto& [n, segments] : {std::pair<int64_t, int64_t>{1, 1}, {70, 4}, {3000, 13}})
      registry.tests.push_back({fmt::format("policy_loss.{} {}", s.name, n),
                                [=](Exec& e) { return run(e, s, n, segments, false); }, true});
    registry.tests.push_back({fmt::format("policy_loss.{} few blocks", s.name),
                              [=](Exec& e) { return run(e, s, 1500, 5, true); }, true});
  };
  for (const Setup& s : setups) {
    add(s);
    registry.grads.push_back(
        {fmt::format("policy_loss.{}", s.name), [=](DType t) { return gradient(t, s); }});
  }
  for (const Setup& s : stopped) add(s);
  registry.properties.push_back({"policy_loss.bounds", bounds});
  registry.properties.push_back({"policy_loss.divergences", divergences});
  registry.properties.push_back({"policy_loss.equivalences", equivalences});
  registry.properties.push_back({"policy_loss.lengths", lengths});
  registry.properties.push_back({"policy_loss.any threads", any_threads});
  registry.properties.push_back({"policy_loss.nans", nans});
  registry.properties.push_back({"policy_loss.known values", known_values});
  registry.properties.push_back({"policy_loss.refused", refused});
}

}  // namespace nrl::ops_test
