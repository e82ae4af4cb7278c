// Any layout trains as one rank does, with any feature: cells that have pairs of values of the table, run by
// the comparison of `nrl-train verify`. Each cell also takes undisturbed steps and an evaluation, whose
// communication must be the planned one and come to its end under NCCL's rules.
//
// `mpirun -n 4 layout_tests "[.table]"` prints the table of four ranks and trains nothing; "[.all]" trains a
// cell for every pair.
#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <sstream>
#include <utility>

#include "apps/engine/step_traffic.h"
#include "apps/plan/dry_rank.h"
#include "apps/state/model_source.h"
#include "apps/train/launch/launch.h"
#include "apps/train/start/run_config.h"
#include "apps/verify/random_tokens.h"
#include "apps/verify/trial.h"
#include "apps/verify/trial_runs.h"
#include "parallel/comm/recording/recording.h"
#include "tests/catch.h"
#include "tests/comm/world_fixture.h"
#include "tests/layouts/cover.h"

using namespace nrl;
using namespace nrl::test;

namespace {

ConfigResult load(std::vector<std::string> keys) {
  ConfigResult result = load_config_text(layouts_config, "layouts.yaml", keys);
  const int ranks = test_world().size();
  nrl::train::check_tried_run(result, {.world = ranks, .local = ranks, .files = false});
  return result;
}

std::vector<std::string> problems(const std::vector<std::string>& keys) {
  std::vector<std::string> out;
  for (const Diagnostic& d : load(keys).diagnostics)
    if (d.severity == Severity::error) out.push_back(d.message);
  return out;
}

std::set<std::string> tags_of(const std::vector<Dimension>& dimensions, const Cell& cell) {
  std::set<std::string> out;
  for (size_t d = 0; d < cell.size(); ++d)
    if (cell[d] >= 0) {
      const std::vector<std::string>& tags = dimensions[d].values[cell[d]].tags;
      out.insert(tags.begin(), tags.end());
    }
  return out;
}

constexpr size_t all_cells = 1'000'000;

/// The cells that ctest trains: the first ones, as many as take no longer than the tests in their place did.
size_t trained_cells(int ranks) {
  const std::map<int, size_t> cells{{1, 60}, {2, 120}, {3, 30}, {4, 120}, {8, 40}};
  return cells.at(ranks);
}

Covering cover_table(const std::vector<Dimension>& dimensions, size_t most) {
  return cover(
      dimensions, [&](const Cell& cell) { return problems(overrides(dimensions, cell)); }, most);
}

/// Operations and bytes by group and operation.
using Traffic = std::map<std::string, std::array<int64_t, 2>>;

/// Totals of the groups so far.
Traffic counted() {
  Traffic out;
  for (const comm::LogTotal& t : test_world().collective_log().totals())
    if (t.ranks > 1 && t.group != "world")
      out[fmt::format("{} {}", t.group, comm::name_of(t.op))] = {t.count, t.bytes};
  return out;
}

std::string text_of(const Traffic& traffic) {
  std::string out;
  for (const auto& [name, total] : traffic)
    out += fmt::format("\n  {}: {} calls, {} bytes", name, total[0], total[1]);
  return out;
}

/// The ranks must have communicated since `before` what a dry run of a step counts. The bytes of rows that go
/// to experts depend on the router.
void check_traffic(const ConfigResult& config, const plan::RunPlan& made, const plan::GridPosition& position,
                   const Traffic& before) {
  const ops::DryDevice device = plan::usual_device(made.device, 1, made.recipe);
  auto plan =
      plan::make_run_plan(config.config, nrl::train::load_model_spec(config),
                          resolve_batch(config.config, test_world().size()), position, device.type(), 1);
  Traffic planned, sent;
  std::set<std::string> routed;
  for (const plan::Traffic& t :
       plan::by_operation(engine::step_traffic(plan, engine::training_options(config.config), device))) {
    const std::string name = fmt::format("{} {}", name_of(t.group), name_of(t.op));
    if (t.balanced()) routed.insert(name);
    planned[name] = {t.count, t.balanced() ? 0 : t.bytes};
  }
  for (const auto& [name, total] : counted()) {
    const auto earlier = before.contains(name) ? before.at(name) : std::array<int64_t, 2>{};
    if (total != earlier)
      sent[name] = {total[0] - earlier[0], routed.contains(name) ? 0 : total[1] - earlier[1]};
  }
  INFO("sent" << text_of(sent) << "\nplanned" << text_of(planned));
  CHECK((sent == planned));
}

/// Records all communication of the world.
class Recording {
 public:
  explicit Recording(comm::World& world) : plain_(world.comm().split(0, world.rank(), "plain")) {
    world.wrap([this](std::unique_ptr<comm::Communicator> inner) {
      return comm::make_recording(std::move(inner), recorder_, comm::RecordingMode::log);
    });
  }
  void begin() { recorder_->clear(); }
  /// The recorded operations must come to their end under NCCL's rules, in any order.
  void check() {
    const comm::LaunchModel model = comm::recorded_launches(*plain_, *recorder_);
    const std::string hang = model.hang({comm::LaunchRules::Order::free, model.streams()});
    INFO(hang);
    CHECK(hang.empty());
  }

 private:
  std::unique_ptr<comm::Communicator> plain_;
  std::shared_ptr<comm::Recorder> recorder_ = std::make_shared<comm::Recorder>();
};

/// Trains a cell and its reference for some steps, which are compared one by one.
verify::TrialResult compare_steps(const ConfigResult& config, int64_t count) {
  const auto data = verify::random_tokens(config, count);
  verify::TrialRuns runs(test_world(), config, data, count - 1);
  verify::compare_steps(runs, count);
  return runs.result();
}

/// Trains a cell and its reference: compared steps, undisturbed steps, and an evaluation.
verify::TrialResult train(const ConfigResult& config, Recording* recording) {
  constexpr int64_t compared = 2, undisturbed = 2, steps = compared + undisturbed;
  const auto data = verify::random_tokens(config, steps + 1);
  verify::TrialRuns runs(test_world(), config, data, steps - 1);
  verify::compare_steps(runs, compared);
  verify::Learner &layout = runs.layout(), *const reference = runs.reference();
  // The plan allows for a router that sends all rows to one rank.
  const size_t needed = layout.engine().dry_step(layout.objective()).workspace,
               planned = layout.engine().exec().workspace.size;
  CHECK((layout.plan().spec.moe.experts > 0 ? needed <= planned : needed == planned));
  if (recording) recording->begin();
  std::vector<verify::Outcome> got, want(undisturbed);
  layout.open(compared + 1, undisturbed);
  for (int64_t i = 0; i < undisturbed; ++i) {
    const engine::StepInput input = layout.next_step();
    const Traffic before = counted();
    layout.engine().step(input, layout.objective());
    got.push_back(layout.collect());
    layout.engine().finish_gathers();
    // An even router needs one round. Steps with examples may have fewer microbatches and rows than planned.
    if (recording && i + 1 == undisturbed && got.back().expert_rounds <= 1 &&
        !trains_on_examples(config.config))
      check_traffic(config, layout.plan(), layout.position(), before);
  }
  const double evaluation = layout.evaluate(steps + 1);
  if (recording) recording->check();
  double wanted = 0;
  if (reference) {
    want = reference->train(compared + 1, undisturbed);
    wanted = reference->evaluate(steps + 1);
  }
  for (size_t i = 0; i < got.size(); ++i)
    runs.comparison().step({.step = compared + 1 + static_cast<int64_t>(i)}, got[i], want[i], true);
  runs.comparison().evaluation({.step = steps}, evaluation, wanted);
  runs.comparison().weights({.step = steps}, runs.compare_held(verify::held_weights));
  return runs.result();
}

std::string text_of(const verify::TrialResult& result) {
  std::string out;
  for (const verify::Check& c : result.checks)
    out += fmt::format("\n  {} {} {:.1e} (limit {:.0e}){}", name_of(c.kind), c.name, c.error, c.limit,
                       c.problem);
  return out;
}

/// With other values for those that change the order of sums.
Cell in_order(const std::vector<Dimension>& dimensions, Cell cell) {
  for (size_t d = 0; d < cell.size(); ++d)
    if (cell[d] >= 0 && dimensions[d].values[cell[d]].reorders) cell[d] = 0;
  return cell;
}

ConfigResult with_seed(std::vector<std::string> keys, int seed) {
  keys.push_back(fmt::format("training.seed={}", seed));
  return load(keys);
}

/// Within the limits of `verify`, which are for two steps. Where numbers are rounded to few bits, sums in
/// another order move some to their neighbors, and tokens to other experts; with the initial weights of some
/// seed few enough.
void check_limits(const std::set<std::string>& tags, const std::vector<std::string>& keys,
                  Recording* recording) {
  const bool rounds = tags.contains("rounds");
  const int seeds = rounds ? 10 : 1;
  const double most = rounds ? 3 : 1;
  verify::TrialResult result;
  bool passed = false;
  for (int seed = 1; seed <= seeds && !passed; ++seed) {
    result = train(with_seed(keys, seed), recording);
    passed = result.passed() ||
             (result.checks.front().problem.empty() && result.checks.front().severity() <= most);
  }
  INFO(text_of(result));
  CHECK(passed);
}

/// Stages add in the order of one rank, and what a rank computes again or moves is the same bits. The squares
/// of the norm are added by parameter group.
void check_bits(const std::vector<std::string>& keys) {
  const verify::TrialResult result = compare_steps(with_seed(keys, 1), 2);
  INFO(text_of(result));
  CHECK(!result.checks.empty());
  for (const verify::Check& c : result.checks) CHECK(c.error <= (c.kind == verify::Kind::norm ? 1e-14 : 0));
}

/// Ranks that share a tensor agree on its scale, so that a layout rounds the same numbers to FP8 with the
/// same scales. Sums in another order differ by 1e-7, which moves one in about 1e6 numbers over the middle of
/// two FP8 numbers, and with it all that follow. Of several initial weights of a small model some have no
/// such number in the first step, or one in the last layer. Scales on which ranks do not agree change every
/// number with any weights, by 2e-2 and more.
void check_operands(std::vector<std::string> keys) {
  // Few microbatches have few numbers that could be rounded otherwise.
  std::vector<std::string> few = keys;
  few.push_back(fmt::format("policy.train_global_batch_size={}", test_world().size()));
  few.emplace_back("policy.train_micro_batch_size=1");
  if (problems(few).empty()) keys = few;
  double least = INFINITY;
  for (int seed = 1; seed <= 40 && least > 4e-3; ++seed) {
    double worst = 0;
    for (const verify::Check& c : compare_steps(with_seed(keys, seed), 1).checks)
      if (!(c.error <= worst)) worst = c.error;
    least = std::min(least, worst);
  }
  CHECK(least <= 4e-3);
}

/// `done`: the configurations of which the bits or the operands were compared.
void run(const std::vector<Dimension>& dimensions, const Cell& cell, Recording* recording,
         std::set<Cell>& done) {
  const std::set<std::string> tags = tags_of(dimensions, cell);
  check_limits(tags, overrides(dimensions, cell), recording);
  const Cell ordered = in_order(dimensions, cell);
  if (tags.contains("exchange") || !done.insert(ordered).second) return;
  const std::vector<std::string> keys = overrides(dimensions, ordered);
  if (!problems(keys).empty()) return;
  if (!tags.contains("tp") && !tags.contains("gradients"))
    check_bits(keys);
  else if (tags.contains("operands") && !tags_of(dimensions, ordered).contains("wide"))
    check_operands(keys);
}

/// The cells that rank 0 finds, at most so many, on all ranks.
std::vector<Cell> cells_of(const std::vector<Dimension>& dimensions, size_t most) {
  comm::World& world = test_world();
  std::string text;
  if (world.rank() == 0)
    for (const Cell& cell : cover_table(dimensions, most).cells)
      for (const int v : cell) text += fmt::format("{} ", v);
  world.comm().broadcast_text(text, 0);
  std::vector<Cell> out;
  std::istringstream numbers(text);
  Cell cell;
  for (int v; numbers >> v;) {
    cell.push_back(v);
    if (cell.size() == dimensions.size()) out.push_back(std::exchange(cell, {}));
  }
  return out;
}

/// The overrides of values by the names of their dimensions and their own.
std::vector<std::string> keys_of(const std::vector<Dimension>& dimensions,
                                 const std::vector<std::pair<std::string, std::string>>& values) {
  std::vector<std::string> out;
  for (const auto& [dimension, value] : values)
    for (const Dimension& d : dimensions)
      for (const Value& v : d.values)
        if (d.name == dimension && v.name == value) out.insert(out.end(), v.keys.begin(), v.keys.end());
  return out;
}

/// Cells of three and more values that have failed before, on four ranks: rows that were recomputed while
/// gradients returned, and exchanges of one microbatch in different numbers of rounds.
std::vector<std::vector<std::string>> failed_before(const std::vector<Dimension>& dimensions) {
  const std::vector<std::pair<std::string, std::string>> common{
      {"family", "qwen2_moe"}, {"grid", "cp 4"}, {"microbatches", "4 of two"}};
  std::vector<std::vector<std::string>> out;
  for (std::vector<std::pair<std::string, std::string>> values :
       {std::vector<std::pair<std::string, std::string>>{
            {"experts", "ep 2 x etp 2"}, {"precision", "delayed"}, {"recompute", "norm, activation, moe"}},
        {{"experts", "ep 2"}, {"dispatch", "rows in rounds"}, {"precision", "tensorwise"}}}) {
    values.insert(values.begin(), common.begin(), common.end());
    out.push_back(keys_of(dimensions, values));
  }
  return out;
}

void train_cells(size_t most) {
  comm::World& world = test_world();
  const std::vector<Dimension> dimensions = table(world.size());
  const std::vector<Cell> cells = cells_of(dimensions, most);
  CHECK(cells.size() >= trained_cells(world.size()));
  Recording recording(world);
  std::set<Cell> done;
  for (const Cell& cell : cells) {
    INFO(name_of(dimensions, cell));
    CAPTURE(overrides(dimensions, cell));
    run(dimensions, cell, world.size() > 1 ? &recording : nullptr, done);
  }
  if (world.size() != 4) return;
  for (const std::vector<std::string>& keys : failed_before(dimensions)) {
    CAPTURE(keys);
    check_limits({"rounds"}, keys, &recording);
  }
}

/// Rows are values of layouts, columns are values of features. x: ctest trains a cell with both, o: there is
/// another cell with both, a letter: the program refuses them for that reason, a point: one of them does not
/// apply with the other.
void print(const std::vector<Dimension>& dimensions, const Covering& covering) {
  std::vector<std::pair<int, int>> columns;
  std::vector<std::string> reasons;  // one of each kind
  const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnpqrstuvwyz";
  const auto count = static_cast<int>(dimensions.size());
  const auto trained = static_cast<int>(trained_cells(test_world().size()));
  const auto each = [&](bool layout, const auto& visit) {
    for (int d = 0; d < count; ++d)
      if (const Dimension& dimension = dimensions[d]; dimension.layout == layout)
        for (int v = 0; v < static_cast<int>(dimension.values.size()); ++v)
          visit(d, v, dimension.name + ": " + dimension.values[v].name);
  };
  const auto letter_of = [&](const std::string& reason) {
    const auto known = std::find_if(reasons.begin(), reasons.end(), [&](const std::string& other) {
      return kind_of(other) == kind_of(reason);
    });
    const auto i = static_cast<size_t>(known - reasons.begin());
    if (known == reasons.end()) reasons.push_back(reason);
    return letters.at(i);
  };
  each(false, [&](int d, int v, const std::string& name) {
    columns.emplace_back(d, v);
    fmt::print("{:>3}  {}\n", columns.size(), name);
  });
  for (const int digit : {10, 1}) {
    fmt::print("{:46}", "");
    for (size_t i = 1; i <= columns.size(); ++i) fmt::print("{}", i / static_cast<size_t>(digit) % 10);
    fmt::print("\n");
  }
  const auto row = [&](int d, int v, const std::string& name) {
    fmt::print("{:46}", name);
    for (const auto& [e, w] : columns) {
      const Pair pair = e < d ? Pair{{e, d}, {w, v}} : Pair{{d, e}, {v, w}};
      const auto cell = covering.pairs.find(pair);
      const auto refused = covering.refused.find(pair);
      fmt::print("{}", cell != covering.pairs.end()        ? (cell->second < trained ? 'x' : 'o')
                       : refused != covering.refused.end() ? letter_of(refused->second)
                                                           : '.');
    }
    fmt::print("\n");
  };
  each(true, row);
  each(false, row);
  for (const std::string& reason : reasons) fmt::print("{}  {}\n", letter_of(reason), reason);
  const auto in_ctest = std::count_if(covering.pairs.begin(), covering.pairs.end(),
                                      [&](const auto& pair) { return pair.second < trained; });
  fmt::print(
      "{} cells have {} pairs of values; {} of them are in the {} cells that ctest trains; {} are refused\n",
      covering.cells.size(), covering.pairs.size(), in_ctest, trained, covering.refused.size());
}

}  // namespace

TEST_CASE("pairs of a layout and a feature train as one rank does") {
  train_cells(trained_cells(test_world().size()));
}

TEST_CASE("every pair of a layout and a feature trains as one rank does", "[.all]") {
  train_cells(all_cells);
}

TEST_CASE("the table", "[.table]") {
  if (test_world().rank() > 0) return;
  const std::vector<Dimension> dimensions = table(test_world().size());
  print(dimensions, cover_table(dimensions, all_cells));
}
