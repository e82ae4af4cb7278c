// Parameters in several groups, cut over tensor-parallel ranks and stages, trained through reducer, optimizer
// and checkpoint: the same numbers as one group on one rank.
#include <algorithm>
#include <map>

#include "apps/engine/group_reducer.h"
#include "apps/engine/optimizer.h"
#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "apps/state/rank_group.h"
#include "core/device/cpu/features.h"
#include "core/ops/kernel_table.h"
#include "core/ops/step.h"
#include "tests/catch.h"
#include "tests/comm/shared_directory.h"
#include "tests/comm/world_fixture.h"
#include "tests/io/fake_staging.h"
#include "tests/io/io_test_util.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;
using namespace nrl::engine;

namespace {

constexpr int sample_count = 4, layers = 2;
constexpr int64_t row_width = 12;

// Tensor-parallel, data-parallel and pipeline ranks; `rank` in that order, leftmost fastest.
struct Layout {
  int tp, dp, pp;
  int tp_rank(int rank) const { return rank % tp; }
  int dp_rank(int rank) const { return rank / tp % dp; }
  int pp_rank(int rank) const { return rank / tp / dp; }
};

std::vector<Layout> layouts(int ranks) {
  std::vector<Layout> out;
  for (int tp = 1; tp <= ranks; ++tp)
    for (int pp = 1; pp <= layers; ++pp)
      if (ranks % (tp * pp) == 0) out.push_back({tp, ranks / tp / pp, pp});
  return out;
}

// Gradients are small multiples of 1/8: sums of them and of their squares are exact in any order.
float gradient(const std::string& name, int64_t element, int sample, int step) {
  const auto mixed = name_hash(name) % 1000 + static_cast<uint64_t>(element * 31 + sample * 17 + step * 7);
  return (static_cast<float>(mixed % 13) - 6) / 8;
}

// A model on one rank: fused, cut, copied, transposed, tied and frozen parameters.
class Toy {
 public:
  Toy(Layout layout, int rank, bool one_group, DType weight)
      : spec_(model::parse_model_config(tiny_configs()[0].second, "test")) {
    build(one_group);
    std::swap(whole_, parameters_);
    layout_ = layout, rank_ = rank;
    build(one_group);
    const int stage = layout.pp_rank(rank);
    groups_ = plan::make_param_groups(
        parameters_,
        [&](const std::string& name) {
          plan::GroupOptions o;
          o.strategy = name == "embedding" ? parallel::sharding::ddp : parallel::sharding::optim;
          o.shards = layout.dp;
          o.shard_rank = layout.dp_rank(rank);
          o.bucket_elements = 700 * layout.dp;  // resumed with others
          o.recipe = precision::recipe_for_weights(weight);
          o.first_tp = layout.tp_rank(rank) == 0;
          o.least_saved = 1;                           // all ranks that hold something write a part of it
          if (name == "embedding" && layout.pp > 1) {  // on the stages at both ends
            o.reduce = parallel::group::tied;
            o.shards = 2 * layout.dp;
            o.shard_rank += stage == 0 ? 0 : layout.dp;
          }
          return o;
        },
        memory_);
    const memory::BufferId scalars = memory_.add("scalars", memory::Category::data, 8 * S::count);
    memory_.solve();
    arenas_ = memory::Arenas(memory_);
    exec_.kernels = &ops::cpu_kernels(cpu::best_isa());
    exec_.threads = 1;
    tensors_ = bind_groups(groups_, memory_, arenas_, exec_);
    scalars_ = make_tensor(arenas_.at(memory_, scalars), DType::f64, {S::count});
    views_ = parameter_views(parameters_, tensors_);
  }
  Toy(const Toy&) = delete;

  void initialize() {
    std::vector<float> values;
    for (size_t p = 0; p < views_.size(); ++p)
      for (const model::Part& part : parameters_.all[p].parts) {
        values.resize(static_cast<size_t>(part.numel()));
        model::initial_values(spec_, parameters_.all[p], part, 3, values.data(), 1);
        for (int64_t i = 0; i < part.numel(); ++i) {
          if (views_[p].weight.dtype == DType::f32)
            views_[p].weight.ptr<float>()[part.offset + i] = values[i];
          else
            views_[p].weight.ptr<bf16>()[part.offset + i] = bf16(values[i]);
        }
      }
    initialize_master_weights(exec_, tensors_);
  }

  // Steps [first, last) with this rank's share of the samples.
  void train(int first, int last, const parallel::Groups& ranks, bool overlap) {
    scalars_.ptr<double>()[S::updates] = first;
    GroupReducer reducer(tensors_, ranks, overlap, exec_);
    const OptimizerConfig config{};
    Optimizer optimizer(config, 1.0, 1, 0, tensors_, scalars_, arenas_, {}, {}, exec_);
    for (int step = first; step < last; ++step) {
      std::fill_n(scalars_.ptr<double>(), static_cast<int>(S::sums), 0.0);
      scalars_.ptr<double>()[S::learning_rate] = 1e-2;
      reducer.start();
      for (size_t p = views_.size(); p-- > 0;) {
        if (!views_[p].grad) continue;
        // The copies of the embedding have the gradients of different samples.
        const bool copied = parameters_.all[p].name == "embedding" && layout_.pp > 1;
        const int first = layout_.dp_rank(rank_) + (copied && layout_.pp_rank(rank_) > 0 ? layout_.dp : 0);
        for (const model::Part& part : parameters_.all[p].parts)
          for (int64_t i = 0; i < part.numel(); ++i)
            for (int s = first; s < sample_count; s += layout_.dp * (copied ? 2 : 1))
              views_[p].grad.ptr<float>()[part.offset + i] += gradient(part.name, part.element(i), s, step);
        reducer.ready(static_cast<int>(p));
      }
      reducer.finish();
      optimizer.step(ranks[parallel::group::all]);
      reducer.gather();
      norms.push_back(scalars_.ptr<double>()[S::grad_norm]);
      REQUIRE(scalars_.ptr<double>()[S::skip] == 0);
      REQUIRE(scalars_.ptr<double>()[S::grad_scale] < 0.1);  // clipped
    }
  }

  TrainState state(Staging* staging = nullptr) {
    TrainState s;
    s.spec = &spec_;
    s.parameters = &parameters_;
    s.whole = &whole_;
    s.weights = weight_slices(parameters_, tensors_);
    s.groups = tensors_;
    s.staging = staging;
    return s;
  }

  // Every number that this rank holds, by logical tensor ("w/NAME" for weights) and element.
  using Numbers = std::map<std::string, std::map<int64_t, float>>;
  Numbers numbers() const {
    Numbers out;
    for (size_t p = 0; p < views_.size(); ++p)
      for (const model::Part& part : parameters_.all[p].parts)
        for (int64_t i = 0; i < part.numel(); ++i) {
          const Tensor& w = views_[p].weight;
          out["w/" + part.name][part.element(i)] = w.dtype == DType::f32
                                                       ? w.ptr<float>()[part.offset + i]
                                                       : static_cast<float>(w.ptr<bf16>()[part.offset + i]);
        }
    for (const GroupTensors& t : tensors_)
      for (size_t k = 0; k < t.state.size(); ++k)
        for (const plan::OwnedRange& r : t.group->owned)
          for (const model::Part& part : parameters_.all[r.parameter].parts)
            for (int64_t e = std::max(r.offset, part.offset);
                 e < std::min(r.offset + r.count, part.offset + part.numel()); ++e)
              out[t.group->state[k].name + "/" + part.name][part.element(e - part.offset)] =
                  t.state[k].ptr<float>()[r.state + e - r.offset];
    return out;
  }

  std::vector<double> norms;
  const std::vector<plan::ParamGroup>& groups() const { return groups_; }
  const std::vector<model::ParameterView>& views() const { return views_; }
  const model::ParameterList& parameters() const { return parameters_; }

 private:
  // The parameters of rank_ in layout_.
  void build(bool one_group) {
    using model::Copies;
    const int stage = layout_.pp_rank(rank_);
    const auto on_stage = [&](int s) { return s == stage; };
    const auto group = [&](const char* name) { return std::string(one_group ? "dense" : name); };
    // The embedding is tied: the last stage has a copy.
    if (on_stage(0) || on_stage(layout_.pp - 1))
      add("embedding", {rows_of({"wte", {53, row_width}}, 0, 53)}, group("embedding"));
    for (int l = 0; l < layers; ++l) {
      if (!on_stage(l * layout_.pp / layers)) continue;
      const std::string us = fmt::format("{}.", l);
      add(us + "norm", {{us + "norm", {row_width}, 0, row_width, 0, 1}}, "dense", Copies::tp);
      const model::Part c_attn{us + "c_attn", {3 * row_width, row_width}, 0, 0, 0, row_width, 0, true};
      add(us + "qkv",
          {rows_of(c_attn, 0, row_width), rows_of(c_attn, row_width, row_width),
           rows_of(c_attn, 2 * row_width, row_width)},
          "dense");
      model::Part o{us + "o", {row_width, row_width}};
      o.rows = row_width;
      o.column = begin(row_width), o.columns = end(row_width) - o.column;
      o.transposed_on_disk = l == 0;
      add(us + "o", {o}, "dense");
      add(us + "frozen", {rows_of({us + "frozen", {20, row_width}}, 0, 20)}, "frozen");
      add(us + "adapter", {{us + "adapter", {4, row_width}, 0, 4, 0, row_width}}, group("adapter"),
          Copies::tp);
    }
  }

  using S = ops::StepScalar;

  int64_t begin(int64_t n) const { return n * layout_.tp_rank(rank_) / layout_.tp; }
  int64_t end(int64_t n) const { return n * (layout_.tp_rank(rank_) + 1) / layout_.tp; }
  // This rank's rows among [first, first + count).
  model::Part rows_of(model::Part part, int64_t first, int64_t count) const {
    part.row = first + begin(count);
    part.rows = end(count) - begin(count);
    part.columns = part.width();
    return part;
  }
  void add(const std::string& name, std::vector<model::Part> parts, const std::string& group,
           model::Copies copies = model::Copies::none) {
    model::Parameter p;
    p.name = name;
    p.group = group;
    p.trainable = group != "frozen";
    p.copies = copies;
    p.decay = parts[0].global.size() == 2;
    p.shape = {0};
    if (p.decay) p.shape.push_back(parts[0].columns);
    for (model::Part& part : parts) {
      part.offset = p.shape[0] * part.columns;
      p.shape[0] += part.rows;
      p.parts.push_back(part);
    }
    parameters_.all.push_back(std::move(p));
  }

  Layout layout_{1, 1, 1};
  int rank_ = 0;
  model::ModelSpec spec_;
  model::ParameterList parameters_, whole_;
  memory::MemoryPlan memory_;
  std::vector<plan::ParamGroup> groups_;
  memory::Arenas arenas_;
  ops::Exec exec_;
  std::vector<GroupTensors> tensors_;
  Tensor scalars_;
  std::vector<model::ParameterView> views_;
};

// Every number that `got` holds is that of `want`; returns how many there are.
int64_t same_numbers(const Toy::Numbers& got, const Toy::Numbers& want) {
  int64_t bad = 0, count = 0;
  for (const auto& [name, elements] : got) {
    REQUIRE(want.contains(name));
    for (const auto& [element, value] : elements) {
      bad += want.at(name).at(element) != value;
      ++count;
    }
  }
  REQUIRE(bad == 0);
  return count;
}

parallel::Groups groups_of(comm::Communicator& world, Layout layout) {
  return {parallel::ProcessGrid({.tp = layout.tp, .pp = layout.pp}, world.size(), world.rank()), world,
          std::array{parallel::group::dp_cp, parallel::group::all, parallel::group::tied}};
}

/// This rank alone.
struct Alone {
  explicit Alone(comm::Communicator& world) : comm(world.split(world.rank(), 0, "alone")) {}
  std::unique_ptr<comm::Communicator> comm;
  parallel::Groups groups = groups_of(*comm, {1, 1, 1});
};

SaveOptions options(const std::string& store) {
  SaveOptions o;
  o.store = store;
  o.resolved_config = "a: b\n";
  o.run = JsonValue::object({});
  return o;
}

}  // namespace

TEST_CASE("groups on any layout of ranks train, save and resume as one group on one rank does") {
  comm::Communicator& world = test_world().comm();
  const int rank = world.rank();
  const std::vector<Layout> all = layouts(world.size());
  for (const DType weight : {DType::f32, DType::bf16}) {
    const Alone alone(world);
    const Layout single{1, 1, 1};
    Toy reference(single, 0, true, weight);
    reference.initialize();
    const Toy::Numbers start = reference.numbers();
    reference.train(0, 3, alone.groups, true);
    const Toy::Numbers saved = reference.numbers();
    reference.train(3, 5, alone.groups, true);
    const Toy::Numbers last = reference.numbers();
    REQUIRE(saved.at("w/wte") != start.at("w/wte"));
    REQUIRE(saved.at("w/0.frozen") == start.at("w/0.frozen"));

    for (size_t i = 0; i < all.size(); ++i) {
      const Layout layout = all[i];
      CAPTURE(layout.tp, layout.dp, layout.pp, name_of(weight));
      const SharedDirectory dir(world);
      {
        const parallel::Groups ranks = groups_of(world, layout);
        Toy toy(layout, rank, false, weight);
        toy.initialize();
        toy.train(0, 3, ranks, i % 2 == 0);
        same_numbers(toy.numbers(), saved);
        REQUIRE(toy.norms == std::vector<double>(reference.norms.begin(), reference.norms.begin() + 3));
        const Position position{.step = 3, .updates = 3, .consumed_samples = 12, .tokens = 12};
        save_checkpoint(toy.state(), position, options(dir.path), rank_group(world));
        // The same files through staging buffers, whose pieces are smaller than most slices.
        const SharedDirectory staged(world);
        FakeStaging staging(4 * row_width * 4);
        save_checkpoint(toy.state(&staging), position, options(staged.path), rank_group(world));
        if (rank == 0) REQUIRE(staging.transfers > 0);  // others may own nothing
        if (rank == 0) {
          int files = 0;
          for (const std::string& file : list_directory(dir.path + "/step-3")) {
            CAPTURE(file);
            const auto text = [&](const std::string& store) {
              return read_file(store + "/step-3/" + file, uint64_t{1} << 30);
            };
            REQUIRE((text(staged.path) == text(dir.path)));
            ++files;
          }
          REQUIRE(files >= 4);
        }
        world.barrier();
      }
      const std::string step = dir.path + "/step-3";
      const SafetensorsSet files(step);
      REQUIRE(files.names().size() == 11);
      REQUIRE(files.files().size() == static_cast<size_t>(world.size()));
      REQUIRE(validate_checkpoint(step, Validation::full).empty());

      // Read by any number of ranks in any layout; every number is somewhere.
      for (int readers = 1; readers <= 3; ++readers)
        for (const Layout& other : layouts(readers)) {
          CAPTURE(readers, other.tp, other.dp, other.pp);
          Toy::Numbers joined;
          for (int reader = 0; reader < readers; ++reader) {
            Toy toy(other, reader, readers == 2, weight);
            CheckpointReader checkpoint(step);
            FakeStaging staging(4 * row_width * 4);
            load_checkpoint(checkpoint, toy.state(reader == 0 ? &staging : nullptr));
            staging.finish();
            REQUIRE((staging.transfers > 0) == (reader == 0));
            same_numbers(toy.numbers(), saved);
            for (const auto& [name, elements] : toy.numbers())
              joined[name].insert(elements.begin(), elements.end());
          }
          REQUIRE((joined == saved));
        }
      world.barrier();

      // Another layout of the same ranks goes on from it.
      const auto next = std::find_if(all.begin(), all.end(), [&](const Layout& other) {
        return other.pp == 1 && other.tp != layout.tp;
      });
      const Layout other = next == all.end() ? layout : *next;
      const parallel::Groups ranks = groups_of(world, other);
      Toy toy(other, rank, false, weight);
      CheckpointReader checkpoint(step);
      load_checkpoint(checkpoint, toy.state());
      toy.train(3, 5, ranks, i % 2 == 1);
      same_numbers(toy.numbers(), last);
      world.barrier();
    }
  }
}

TEST_CASE("a frozen group has weights and nothing else") {
  const Toy toy({1, 1, 1}, 0, false, DType::bf16);
  std::vector<std::string> names;
  for (const plan::ParamGroup& g : toy.groups()) {
    names.push_back(g.name);
    CAPTURE(g.name);
    const bool frozen = g.name == "frozen";
    REQUIRE(g.trainable == !frozen);
    REQUIRE((g.gradients < 0) == frozen);
    REQUIRE((g.chunks < 0) == frozen);
    REQUIRE(g.state.empty() == frozen);
    REQUIRE(g.counted.empty() == frozen);
  }
  REQUIRE(names == std::vector<std::string>{"embedding", "dense", "frozen", "adapter"});
  int frozen = -1;
  for (size_t p = 0; p < toy.views().size(); ++p) {
    const bool trainable = toy.parameters().all[p].trainable;
    REQUIRE(static_cast<bool>(toy.views()[p].grad) == trainable);
    REQUIRE(toy.views()[p].weight);
    if (!trainable) frozen = static_cast<int>(p);
  }
  // The gradient of a frozen parameter is a mistake of the caller.
  Toy other({1, 1, 1}, 0, false, DType::f32);
  const Alone alone(test_world().comm());
  const std::vector<GroupTensors> tensors = other.state().groups;
  ops::Exec exec;
  GroupReducer reducer(tensors, alone.groups, true, exec);
  reducer.start();
  REQUIRE(error_of([&] { reducer.ready(frozen); }).code == 70);
  for (size_t p = 0; p < other.views().size(); ++p)
    if (static_cast<int>(p) != frozen && other.views()[p].grad) reducer.ready(static_cast<int>(p));
  reducer.finish();
  // A group is trained as a whole or not at all.
  model::ParameterList mixed = toy.parameters();
  mixed.all[0].trainable = false, mixed.all[0].group = "dense";
  memory::MemoryPlan memory;
  REQUIRE(error_of([&] {
            plan::make_param_groups(
                mixed, [](const std::string&) { return plan::GroupOptions{}; }, memory);
          }).code == 70);
}

TEST_CASE("the learning rate of a group is scaled by its own factor") {
  model::ParameterList list;
  for (const char* name : {"a", "b"}) {
    model::Parameter p;
    p.name = p.group = name;
    p.shape = {6};
    p.parts = {{name, {6}, 0, 6, 0, 1}};
    list.all.push_back(p);
  }
  memory::MemoryPlan memory;
  const auto groups = plan::make_param_groups(
      list,
      [](const std::string& name) {
        plan::GroupOptions o;
        o.strategy = parallel::sharding::ddp;
        o.lr_scale = name == "b" ? 3.0f : 1.0f;
        return o;
      },
      memory);
  memory.solve();
  const memory::Arenas arenas(memory);
  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::Isa::baseline);
  exec.threads = 1;
  const auto tensors = bind_groups(groups, memory, arenas, exec);
  std::vector<double> values(ops::StepScalar::count);
  values[ops::StepScalar::learning_rate] = 0.5;
  const Alone alone(test_world().comm());
  for (const GroupTensors& t : tensors) std::fill_n(t.gradients.ptr<float>(), 6, 1.0f);
  Optimizer optimizer({}, 0, 1, 0, tensors, make_tensor(values.data(), DType::f64, {ops::StepScalar::count}),
                      arenas, {}, {}, exec);
  optimizer.step(*alone.comm);
  // The first step of Adam is the learning rate.
  REQUIRE(tensors[0].weights.ptr<float>()[5] == Approx(-0.5));
  REQUIRE(tensors[1].weights.ptr<float>()[5] == Approx(-1.5));
}
