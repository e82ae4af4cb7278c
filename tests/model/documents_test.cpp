// Documents packed into a microbatch with sequence bounds and positions of their own: each must have the loss
// and the gradients that it has beside any other tokens.

#include "tests/catch.h"
#include "tests/model/tiny_model.h"
#include "tests/sim/ops.h"

using namespace nrl;
using test::TinyModel;

namespace {

using Row = std::vector<int32_t>;

/// A microbatch of TinyModel::tokens tokens and the memory it lies in.
struct Packed {
  Row ids, targets, positions, bounds;
  std::vector<float> weight = std::vector<float>(TinyModel::tokens, -0.1f);

  model::MicroBatch batch(TinyModel& m) {
    model::MicroBatch b = m.batch();
    const auto tensor = [](Row& row) {
      return make_tensor(row.data(), DType::i32, {static_cast<int64_t>(row.size())});
    };
    b.ids = tensor(ids), b.target = tensor(targets), b.positions = tensor(positions);
    b.cu_seqlens = tensor(bounds);
    b.loss_weight = make_tensor(weight.data(), DType::f32, {TinyModel::tokens});
    return b;
  }
};

struct Document {
  int begin, end;
};
constexpr Document documents[] = {{0, 5}, {5, 6}, {6, 13}, {13, 19}};
constexpr int32_t words = 59;  // fewer than every vocabulary has

/// All documents; the bounds end with empty sequences, as those of a planned room do.
Packed all_documents() {
  Packed p;
  p.bounds = {0, 5, 6, 13, 19, 19, 19, 19, 19};
  for (const auto& [begin, end] : documents)
    for (int i = begin; i < end; ++i) {
      p.ids.push_back((i * 37 + 11) % words);
      p.targets.push_back((i * 13 + 5) % words);
      p.positions.push_back(i - begin);
    }
  return p;
}

/// One document at the front, and behind it sequences of other tokens without targets.
Packed alone(const Packed& all, const Document& d) {
  const int length = d.end - d.begin;
  Packed p;
  const int middle = (length + TinyModel::tokens) / 2;
  p.bounds = {0, length, middle, TinyModel::tokens};
  for (int i = 0; i < TinyModel::tokens; ++i) {
    const bool own = i < length;
    const auto from = static_cast<size_t>(d.begin + i);
    p.ids.push_back(own ? all.ids[from] : (i * 29 + 2) % words);
    p.targets.push_back(own ? all.targets[from] : -1);
    p.positions.push_back(own ? i : i - (i < middle ? length : middle));
  }
  return p;
}

std::vector<float> log_probs(TinyModel& m, Packed p) {
  const model::MicroBatch batch = p.batch(m);
  m.decoder_.evaluate(batch);
  const Tensor lp = m.decoder_.log_prob(batch);
  return {lp.ptr<float>(), lp.ptr<float>() + TinyModel::tokens};
}

void add_gradients(TinyModel& m, Packed p) {
  const model::MicroBatch b = p.batch(m);
  m.decoder_.train({&b, 1}, {});
}

void check(const ops::KernelTable& kernels, int threads, DeviceType device) {
  for (const auto& [name, config] : test::tiny_configs()) {
    if (name == "gpt2 with dropout" || name == "mistral") continue;  // masks are of other tokens
    INFO(name);
    TinyModel packed(config, kernels, threads, {}, precision::float32, device);
    // What a router balances and drops depends on all tokens of the microbatch.
    if (packed.spec_.moe.aux_loss > 0 || packed.spec_.moe.capacity_factor > 0) continue;
    // Several steps add up.
    TinyModel separate(config, kernels, threads, test::TinyOptions{.device = device, .overwrite = false});
    const Packed all = all_documents();
    const std::vector<float> found = log_probs(packed, all);
    for (const Document& d : documents) {
      const std::vector<float> expected = log_probs(separate, alone(all, d));
      for (int i = d.begin; i < d.end; ++i) {
        INFO("token " << i);
        CHECK(found[i] == Approx(expected[i - d.begin]).epsilon(1e-5));
      }
    }
    // They would see each other.
    Packed mixed = all;
    mixed.bounds = {0, 9, TinyModel::tokens};
    const std::vector<float> other = log_probs(packed, mixed);
    CHECK(std::abs(other[18] - found[18]) > 1e-3f);

    add_gradients(packed, all);
    for (const Document& d : documents) add_gradients(separate, alone(all, d));
    for (size_t p = 0; p < packed.gradients_.size(); ++p) {
      INFO(packed.parameters_.all[p].name);
      CHECK(test::relative_difference(packed.gradients_[p], separate.gradients_[p]) < 2e-5);
    }
  }
}

}  // namespace

TEST_CASE("documents of a microbatch have the loss and gradients that they have alone", "[model]") {
  check(ops::cpu_kernels(cpu::best_isa()), 2, DeviceType::cpu);
}

TEST_CASE("documents have the loss and gradients that they have alone, by the GPU's kernels",
          "[model][sim]") {
  check(ops::sim_kernels(), ops::gpu_partials, DeviceType::cuda);
}
