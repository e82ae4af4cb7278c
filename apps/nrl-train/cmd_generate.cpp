// nrl-train generate: continue a text with a trained model.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "apps/data/tokenizer.h"
#include "apps/model/inference.h"
#include "apps/nrl-train/commands.h"
#include "apps/train/checkpoint.h"
#include "apps/train/model_source.h"
#include "apps/train/resume.h"
#include "core/base/philox.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/memory.h"
#include "core/ops/kernel_table.h"

namespace nrl::app {
namespace {

// Softmax with temperature over the likeliest tokens, cut by top-k, then by top-p; then one draw.
int32_t sample(std::span<const float> logits, const GenerateArgs& args, float uniform,
               std::vector<int32_t>& order) {
  const auto n = static_cast<int64_t>(logits.size());
  if (args.temperature == 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  order.resize(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  const int64_t keep = args.top_k > 0 ? std::min(args.top_k, n) : n;
  if (keep < n) std::nth_element(order.begin(), order.begin() + keep - 1, order.end(), likelier);
  order.resize(static_cast<size_t>(keep));
  if (args.top_p < 1) std::sort(order.begin(), order.end(), likelier);
  const float top = logits[static_cast<size_t>(*std::min_element(order.begin(), order.end(), likelier))];
  auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[static_cast<size_t>(id)] - top)) / args.temperature);
  };
  double total = 0;
  for (int32_t id : order) total += weight(id);
  if (args.top_p < 1) {
    double sum = 0;
    size_t count = 0;
    while (count < order.size() && (count == 0 || sum < args.top_p * total)) sum += weight(order[count++]);
    order.resize(count);
    total = sum;
  }
  double left = static_cast<double>(uniform) * total;
  for (int32_t id : order)
    if ((left -= weight(id)) < 0) return id;
  return order.back();
}

}  // namespace

int run_generate(const GenerateArgs& args) {
  const model::ModelSpec spec = train::load_model_directory(args.directory);
  const auto tokenizer =
      args.tokenizer.empty() ? data::tokenizer_in(args.directory) : data::make_tokenizer(args.tokenizer);
  std::vector<int32_t> prompt = tokenizer->encode(args.prompt);
  if (prompt.empty() && tokenizer->bos()) prompt.push_back(*tokenizer->bos());
  if (prompt.empty() && tokenizer->eos()) prompt.push_back(*tokenizer->eos());
  if (prompt.empty())
    fail(Exit::usage, "--prompt has no tokens, and this tokenizer has no beginning token to start from");
  for (int32_t id : prompt)
    if (id >= spec.vocab_size)
      fail(Exit::data,
           "the tokenizer gives id {}, the model's vocabulary ends at {}; is it the right tokenizer?", id,
           spec.vocab_size);

  const int threads = args.threads > 0 ? args.threads : cpu::available_cores();
  omp_set_num_threads(threads);
  const model::ParameterList parameters = model::make_parameters(spec);
  std::vector<cpu::HostMemory> memory;
  std::vector<Tensor> weights;
  std::vector<model::ParameterView> views;
  const DType dtype = train::stored_dtype(args.directory);
  for (const model::Parameter& p : parameters.all) {
    memory.emplace_back(static_cast<size_t>(p.numel() * size_of(dtype)));
    weights.push_back(p.shape.size() == 1
                          ? make_tensor(memory.back().data(), dtype, {p.shape[0]})
                          : make_tensor(memory.back().data(), dtype, {p.shape[0], p.shape[1]}));
    views.push_back({weights.back(), {}});
  }
  train::load_weights(args.directory, spec, parameters, weights);

  ops::Exec exec;
  exec.kernels = &ops::cpu_kernels(cpu::best_isa());
  exec.threads = threads;
  const auto asked = static_cast<int64_t>(prompt.size()) + args.max_tokens;
  const int64_t length = spec.learned_positions ? std::min(asked, spec.max_positions) : asked;
  if (static_cast<int64_t>(prompt.size()) >= length)
    fail(Exit::usage, "the prompt has {} tokens, which leaves no room in the model's {} positions",
         prompt.size(), spec.max_positions);
  model::Inference session(spec, parameters, views, exec, length);
  const PhiloxStream random(args.seed, "generate");

  std::fputs(args.prompt.c_str(), stdout);
  std::fflush(stdout);
  std::vector<int32_t> made, order;
  std::string printed;
  std::span<const float> logits = session.append(prompt);
  while (true) {
    // Ids that the model has and the tokenizer does not (a padded vocabulary) are never chosen.
    const auto usable = std::min<size_t>(logits.size(), static_cast<size_t>(tokenizer->vocab_size()));
    const int32_t next = sample(logits.first(usable), args, random.uniform(made.size()), order);
    if (tokenizer->eos() == next) break;
    made.push_back(next);
    // Text is decoded as a whole: a character may take several tokens. What is complete is printed.
    const std::string text = tokenizer->decode(made);
    size_t complete = text.size();
    for (size_t back = 1; back <= std::min<size_t>(4, text.size()); ++back) {
      const auto c = static_cast<unsigned char>(text[text.size() - back]);
      if ((c & 0xC0) == 0x80) continue;
      const size_t need = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
      if (need > back) complete = text.size() - back;
      break;
    }
    if (complete > printed.size()) {
      std::fwrite(text.data() + printed.size(), 1, complete - printed.size(), stdout);
      std::fflush(stdout);
      printed = text.substr(0, complete);
    }
    if (static_cast<int64_t>(made.size()) == args.max_tokens || session.length() == session.max_tokens())
      break;
    logits = session.append(std::span(&next, 1));
  }
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace nrl::app
