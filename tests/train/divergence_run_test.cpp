// The losses of distillation on policy in whole runs: 0 where student and teacher are the same model, and
// else the divergence of the two models' distributions as the decoder of tests/reference computes it.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/reference/decoder.h"
#include "tests/train/digits.h"

using namespace nrl;
using namespace nrl::test;

namespace {

constexpr size_t vocabulary = 272, generations = 12;

struct Model {
  explicit Model(const std::string& directory)
      : config(reference::read_config(directory)), weights(reference::read_weights(config, directory)) {}
  reference::Config config;
  reference::Tensors weights;
};

/// The bytes of a text in samples.jsonl.
reference::Tokens tokens_of(const std::string& text) {
  reference::Tokens ids;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 2, "\\x") == 0) {
      ids.push_back(std::stoi(text.substr(i + 2, 2), nullptr, 16));
      i += 3;
    } else if (text[i] == '\\' && i + 1 < text.size() &&
               std::string("ntr").find(text[i + 1]) != std::string::npos) {
      ids.push_back(text[++i] == 'n' ? '\n' : text[i] == 't' ? '\t' : '\r');
    } else {
      ids.push_back(static_cast<unsigned char>(text[i]));
    }
  }
  return ids;
}

struct Loss {
  std::string kl_type;
  size_t topk = vocabulary;
  bool zero_outside = false;
  double temperature = 1, forward = 1;  ///< weight of the forward divergence
};

/// log softmax(logits / temperature) of row `row` at `ids`.
std::vector<double> log_softmax(const reference::Tensor& logits, size_t row, const std::vector<size_t>& ids,
                                double temperature) {
  std::vector<double> z;
  for (const size_t id : ids) z.push_back(logits(row, id) / temperature);
  const double most = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const double x : z) sum += std::exp(x - most);
  for (double& x : z) x -= most + std::log(sum);
  return z;
}

double divergence(const Loss& loss, const reference::Tensor& student, const reference::Tensor& teacher,
                  size_t row) {
  std::vector<size_t> all(vocabulary), ids;
  std::iota(all.begin(), all.end(), size_t{0});
  ids = all;
  std::sort(ids.begin(), ids.end(), [&](size_t a, size_t b) { return teacher(row, a) > teacher(row, b); });
  ids.resize(loss.topk);
  const std::vector<double> q = log_softmax(teacher, row, ids, loss.temperature);
  const std::vector<double> whole = log_softmax(student, row, all, loss.temperature);
  std::vector<double> p = log_softmax(student, row, ids, loss.temperature);
  double inside = 0, forward = 0, reverse = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (loss.zero_outside) p[i] = whole[ids[i]];
    inside += std::exp(p[i]);
    forward += std::exp(q[i]) * (q[i] - p[i]);
    reverse += std::exp(p[i]) * (p[i] - q[i]);
  }
  if (loss.zero_outside && loss.topk < vocabulary) {
    REQUIRE(inside < 1);
    for (const size_t id : all)
      if (std::find(ids.begin(), ids.end(), id) == ids.end())
        reverse += std::exp(whole[id]) * (whole[id] + 100);
  }
  return loss.temperature * loss.temperature * (loss.forward * forward + (1 - loss.forward) * reverse);
}

class Pair : public Digits {
 public:
  Pair() {
    for (const auto& [name, seed] : {std::pair{"student", 4}, {"teacher", 3}}) {
      const Finished finished =
          learn(name, {"policy.optimizer.lr=0.02", "loop.max_num_steps=20", "checkpointing.save_period=20",
                       fmt::format("loop.seed={}", seed)});
      INFO(finished.err);
      REQUIRE(finished.code == Exit::ok);
    }
  }
  std::string directory(const std::string& name) const { return *this / (name + "/checkpoints/step-20"); }

  /// The first step of the student, on all completions of one prompt, which samples.jsonl has.
  JsonValue first_step(const std::string& name, const std::string& teacher, const Loss& loss) const {
    const std::string given = loss.forward > 0 && loss.forward < 1
                                  ? fmt::format("distill.mixed_kl_weight={}", loss.forward)
                                  : "distill.val_period=0";
    const Finished finished = run(
        name, {"algorithm=distill", "policy.model_name=" + directory("student"),
               "policy.tokenizer={name: bytes, chat_template: none}", "policy.max_total_sequence_length=8",
               "policy.train_global_batch_size=12", "policy.train_micro_batch_size=3",
               "policy.generation.max_new_tokens=3", "distill.num_prompts_per_step=1",
               fmt::format("distill.num_generations_per_prompt={}", generations),
               fmt::format("distill.topk={}", loss.topk),
               fmt::format("distill.zero_outside_topk={}", loss.zero_outside),
               "distill.kl_type=" + loss.kl_type, fmt::format("distill.temperature={}", loss.temperature),
               given, "reference.model_name=" + directory(teacher),
               "data.train={data_path: " + (*this / "prompts.jsonl") + ", format: prompts}",
               "loop.max_num_steps=1", "loop.seed=9"});
    INFO(finished.err);
    REQUIRE(finished.code == Exit::ok);
    return steps(name).at(0);
  }
};

}  // namespace

TEST_CASE("the loss of on-policy distillation is the divergence from the teacher", "[distill]") {
  const Pair bench;
  const Model student(bench.directory("student")), teacher(bench.directory("teacher"));
  const std::vector<Loss> losses{
      {.kl_type = "forward"},
      {.kl_type = "reverse", .forward = 0},
      {.kl_type = "mixed", .forward = 0.25},
      {.kl_type = "forward", .temperature = 2},
      {.kl_type = "reverse", .zero_outside = true, .forward = 0},
      {.kl_type = "forward", .topk = 16},
      {.kl_type = "reverse", .topk = 16, .forward = 0},
      {.kl_type = "mixed", .topk = 16, .zero_outside = true, .temperature = 0.5, .forward = 0.75}};
  for (size_t i = 0; i < losses.size(); ++i) {
    const Loss& loss = losses[i];
    CAPTURE(i, loss.kl_type);
    const std::string name = fmt::format("run{}", i);
    const JsonValue step = bench.first_step(name, "teacher", loss);
    const Rows samples = bench.samples(name);
    REQUIRE(samples.size() == generations);
    double sum = 0;
    int64_t tokens = 0;
    for (const JsonValue& sample : samples) {
      reference::Tokens ids = tokens_of(sample.get_string("prompt"));
      const size_t prompt = ids.size();
      const reference::Tokens completion = tokens_of(sample.get_string("completion"));
      ids.insert(ids.end(), completion.begin(), completion.end());
      if (sample.at("ended").as_bool()) ids.push_back(256);
      const reference::Tensor p = reference::logits(student.config, student.weights, ids),
                              q = reference::logits(teacher.config, teacher.weights, ids);
      for (size_t row = prompt - 1; row + 1 < ids.size(); ++row, ++tokens) sum += divergence(loss, p, q, row);
    }
    // Every completion has its text in samples.jsonl.
    REQUIRE(step.get_double("completion_tokens") * generations == Approx(static_cast<double>(tokens)));
    CHECK(sum / static_cast<double>(tokens) > 0.01);
    // The probability of ids outside of the k, times 100, is what the others lack in f32.
    CHECK(step.get_double("loss") ==
          Approx(sum / static_cast<double>(tokens)).epsilon(loss.zero_outside ? 4e-5 : 1e-5));
  }
}

TEST_CASE("a student that is its teacher has a loss of 0 and no gradient", "[distill]") {
  const Pair bench;
  for (const Loss& loss : {Loss{.kl_type = "forward"}, Loss{.kl_type = "reverse", .forward = 0},
                           Loss{.kl_type = "mixed", .forward = 0.5},
                           Loss{.kl_type = "mixed", .topk = 5, .temperature = 3, .forward = 0.5}}) {
    CAPTURE(loss.kl_type, loss.topk);
    std::filesystem::remove_all(bench / "same");
    const JsonValue step = bench.first_step("same", "student", loss);
    CHECK(std::abs(step.get_double("loss")) < 1e-6);
    CHECK(step.get_double("grad_norm") < 1e-5);
  }
}
