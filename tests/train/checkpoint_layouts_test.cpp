// Checkpoints of real parameter lists, divided over tensor-parallel ranks and pipeline stages: the ranks
// share the writing, and every layout reads what any other has written.
#include <set>
#include <span>

#include "apps/model/families/hf_config.h"
#include "apps/state/checkpoint.h"
#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/io/checkpoint_test_util.h"
#include "tests/model/tiny_model.h"

using namespace nrl;
using namespace nrl::test;
using namespace nrl::train;

namespace {

// Layouts of all ranks: a line each.
struct Ranks {
  int tp, pp, chunks = 1;
  bool sequence = false;
  /// Ranks of experts: data-parallel ones, outside of the tensor-parallel ranks.
  int ep = 1, etp = 1;
  int experts() const { return ep * etp; }
  int count() const { return tp * experts() * pp; }
  model::ModelLayout of(int rank) const {
    return {.tensor = tp,
            .tensor_rank = rank % tp,
            .sequence_parallel = sequence,
            .expert = ep,
            .expert_rank = rank / tp / etp % ep,
            .expert_tensor = etp,
            .expert_tensor_rank = rank / tp % etp,
            .stages = pp,
            .stage = rank / tp / experts(),
            .chunks = chunks};
  }
};
const Ranks layouts[] = {{1, 1}, {2, 1}, {2, 1, 1, true}, {1, 2}, {1, 4}, {1, 2, 2}, {2, 2}, {2, 2, 2, true}};
const Ranks expert_layouts[] = {
    {1, 1}, {.tp = 1, .pp = 1, .ep = 2}, {.tp = 1, .pp = 1, .etp = 2}, {.tp = 1, .pp = 2, .ep = 2, .etp = 2}};

// A rank's state: every number is a function of its tensor and its element there.
class RankState {
 public:
  RankState(const model::ModelSpec& spec, const model::ParameterList& whole, const Ranks& ranks, int rank,
            bool filled)
      : parameters_(model::make_parameters(spec, ranks.of(rank))) {
    state_.spec = &spec;
    state_.parameters = &parameters_;
    state_.whole = &whole;
    int64_t total = 0;
    for (const model::Parameter& p : parameters_.all) total += p.numel();
    for (std::vector<float>& values : memory_) values.assign(static_cast<size_t>(total), -1);
    std::vector<Tensor> weights;
    int64_t at = 0;
    for (size_t p = 0; p < parameters_.all.size(); ++p) {
      const model::Parameter& parameter = parameters_.all[p];
      weights.push_back(parameter.view(memory_[0].data() + at, DType::f32));
      // One rank saves what several hold: tensor rank 0, of a tied embedding the first stage, and all but
      // experts the first rank of the experts.
      const bool expert = parameter.group == model::group_name::expert;
      const bool copy = parameter.copies == model::Copies::tp ||
                        parameter.group == model::group_name::tensor_partial || expert;
      const bool data_copy = !expert && ranks.of(rank).expert_group_rank() > 0;
      const bool tied_copy = parameter.group == model::group_name::tied && ranks.of(rank).stage > 0;
      group_.parameters.push_back(static_cast<int>(p));
      group_.owned.push_back({.parameter = static_cast<int>(p),
                              .offset = 0,
                              .count = parameter.numel(),
                              .weight = at,
                              .gradient = at,
                              .state = at,
                              .counted = !(copy && rank % ranks.tp > 0) && !tied_copy && !data_copy});
      group_.saved_weights.push_back(static_cast<int>(p));
      if (group_.owned.back().counted) group_.saved.push_back(group_.owned.back());
      if (filled)
        for (int kind = 0; kind < 3; ++kind)
          for (const model::Part& part : parameter.parts)
            for (int64_t i = 0; i < part.numel(); ++i)
              memory_[kind][at + part.offset + i] = value(kind, part, i);
      at += parameter.numel();
    }
    state_.weights = engine::whole_slices(parameters_, weights);
    state_.groups.emplace_back().group = &group_;
    for (const auto& [kind, name] : {std::pair(1, "exp_avg"), std::pair(2, "exp_avg_sq")}) {
      group_.state.push_back({name, DType::f32, -1});
      state_.groups[0].state.push_back(make_tensor(memory_[kind].data(), DType::f32, {total}));
    }
  }
  RankState(const RankState&) = delete;

  static float value(int kind, const model::Part& part, int64_t i) {
    return static_cast<float>((name_hash(part.name) + static_cast<uint64_t>(part.element(i) * 3 + kind)) %
                              100003);
  }
  int64_t wrong() const {
    int64_t wrong = 0, at = 0;
    for (const model::Parameter& parameter : parameters_.all) {
      for (int kind = 0; kind < 3; ++kind)
        for (const model::Part& part : parameter.parts)
          for (int64_t i = 0; i < part.numel(); ++i)
            wrong += memory_[kind][at + part.offset + i] != value(kind, part, i);
      at += parameter.numel();
    }
    return wrong;
  }
  const TrainState& state() const { return state_; }

 private:
  model::ParameterList parameters_;
  plan::ParamGroup group_;
  TrainState state_;
  std::vector<float> memory_[3];  // weights, exp_avg, exp_avg_sq
};

}  // namespace

TEST_CASE(
    "tensor slices and pipeline stages share the writing, and any layout reads any other's checkpoint") {
  for (const auto& [family, config] : tiny_configs()) {
    const model::ModelSpec spec = [&, text = config] {
      // Four layers, and sizes that two ranks divide.
      JsonValue json = parse_json(text, "test");
      const bool gpt2 = json.get_string("model_type") == "gpt2";
      json.set(gpt2 ? "n_layer" : "num_hidden_layers", 4);
      if (gpt2) json.set("n_head", 4);
      return model::parse_model_config(json.dump(), "test");
    }();
    if (spec.heads % 2 || spec.kv_heads % 2 || spec.ffn % 2) continue;
    const std::span<const Ranks> tried =
        spec.expert_layers() > 0 ? std::span<const Ranks>(expert_layouts) : layouts;
    CAPTURE(family);
    const model::ParameterList whole = model::make_parameters(spec);
    const Position position{.step = 3, .updates = 3, .consumed_samples = 12, .tokens = 12};
    for (const Ranks& save : tried) {
      CAPTURE(save.tp, save.pp, save.chunks, save.sequence, save.ep, save.etp);
      const TemporaryDirectory dir(TemporaryDirectory::Where::memory);
      SaveOptions options;
      options.store = dir / "c";
      options.resolved_config = "a: b\n";
      options.run = JsonValue::object({});
      ThreadRanks group(save.count());
      for (const Caught& caught : group.run([&](int rank) {
             const RankState own(spec, whole, save, rank, true);
             save_checkpoint(own.state(), position, options, group.group(rank));
           }))
        REQUIRE(caught.text == "");
      const std::string step = dir / "c/step-3";
      REQUIRE(validate_checkpoint(step, Validation::full).empty());
      // Every rank writes a part: one file of weights and one of optimizer state each.
      const SafetensorsSet files(step);
      REQUIRE(files.files().size() == static_cast<size_t>(save.count()));
      std::set<std::string> names;
      for (const model::Parameter& p : whole.all)
        for (const model::Part& part : p.parts) names.insert(part.name);
      REQUIRE(files.names().size() == names.size());
      int optimizer_files = 0;
      for (const std::string& file : list_directory(step)) optimizer_files += file.starts_with("optimizer-");
      REQUIRE(optimizer_files == save.count());

      for (const Ranks& load : tried) {
        CAPTURE(load.tp, load.pp, load.chunks, load.ep, load.etp);
        for (int rank = 0; rank < load.count(); ++rank) {
          RankState own(spec, whole, load, rank, false);
          CheckpointReader reader(step);
          load_checkpoint(reader, own.state());
          REQUIRE(own.wrong() == 0);
        }
      }
    }
  }
}
