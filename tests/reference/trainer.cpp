#include "tests/reference/trainer.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include <yaml-cpp/yaml.h>

namespace reference {
namespace {

// The value under a dotted key; null where there is none.
YAML::Node find(const YAML::Node& root, const std::string& key) {
  YAML::Node at = YAML::Clone(root);
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('.', begin), key.size());
    const YAML::Node next = at[key.substr(begin, end - begin)];
    if (!next.IsDefined()) return YAML::Node();
    at.reset(next);
    begin = end + 1;
  }
  return at;
}

template <class T>
T get(const YAML::Node& root, const std::string& key, T fallback) {
  const YAML::Node node = find(root, key);
  return node.IsNull() ? fallback : node.as<T>();
}

template <class T>
std::vector<T> list(const YAML::Node& root, const std::string& key) {
  const YAML::Node node = find(root, key);
  if (node.IsNull()) return {};
  return node.IsSequence() ? node.as<std::vector<T>>() : std::vector<T>{node.as<T>()};
}

std::string to_json(const YAML::Node& node) {
  std::string text;
  if (node.IsMap()) {
    for (const auto& member : node)
      text += (text.empty() ? "" : ", ") + to_json(member.first) + ": " + to_json(member.second);
    return "{" + text + "}";
  }
  if (node.IsSequence()) {
    for (const auto& item : node) text += (text.empty() ? "" : ", ") + to_json(item);
    return "[" + text + "]";
  }
  const auto scalar = node.as<std::string>();
  char* end = nullptr;
  std::strtod(scalar.c_str(), &end);
  const bool plain = *end == '\0' || scalar == "true" || scalar == "false" || scalar == "null";
  return plain ? scalar : '"' + scalar + '"';
}

}  // namespace

Config read_model(const std::string& path) {
  return parse_config(to_json(YAML::LoadFile(path)["policy"]["model"]));
}

Run read_run(const std::string& path) {
  const YAML::Node yaml = YAML::LoadFile(path);
  Run run;
  run.batch = get<int64_t>(yaml, "policy.train_global_batch_size", 32);
  run.seed = get<int64_t>(yaml, "pretrain.seed", 42);
  run.train.paths = list<std::string>(yaml, "data.train.data_path");
  run.train.weights = list<double>(yaml, "data.train.weights");
  run.train.sequence_length = get<int64_t>(yaml, "policy.max_total_sequence_length", 1024);
  run.train.seed = static_cast<uint32_t>(get<int64_t>(yaml, "data.seed", run.seed));
  run.train.reset_position_ids = get(yaml, "data.reset_position_ids", false);
  run.train.reset_attention_mask = get(yaml, "data.reset_attention_mask", false);
  run.train.eod_mask_loss = get(yaml, "data.eod_mask_loss", false);
  // Of the tokenizers only that of bytes is known here.
  if (get<std::string>(yaml, "policy.tokenizer.name", "") == "bytes") run.train.end_token = 256;
  const auto split = list<double>(yaml, "data.split");
  for (size_t i = 0; i < split.size(); ++i) run.train.split.at(i) = split[i];
  run.steps = get<int64_t>(yaml, "pretrain.max_num_steps", INT64_MAX);
  if (const auto epochs = get<int64_t>(yaml, "pretrain.max_num_epochs", 0); epochs > 0)
    run.steps = std::min(run.steps, epochs * epoch_samples(run.train, 0) / run.batch);

  run.weight_decay = get(yaml, "policy.optimizer.weight_decay", 0.1);
  run.eps = get(yaml, "policy.optimizer.eps", 1e-8);
  if (const auto betas = list<double>(yaml, "policy.optimizer.betas"); !betas.empty())
    run.beta1 = betas.at(0), run.beta2 = betas.at(1);
  const YAML::Node policy = yaml["policy"];
  if (policy["max_grad_norm"])
    run.max_grad_norm = policy["max_grad_norm"].IsNull() ? 0 : policy["max_grad_norm"].as<double>();

  const auto rate = [&](double lr) {
    return scaled_rate(lr, get<std::string>(yaml, "policy.optimizer.lr_scaling.rule", "none"), run.batch,
                       get<int64_t>(yaml, "policy.optimizer.lr_scaling.base_batch_size", 32));
  };
  Schedule& s = run.schedule;
  const std::string scheduler = "policy.scheduler.";
  s.style = get<std::string>(yaml, scheduler + "lr_decay_style", "cosine");
  s.lr = rate(get(yaml, "policy.optimizer.lr", 3e-4));
  s.min_lr = rate(get(yaml, scheduler + "min_lr", 0.0));
  s.warmup = get<int64_t>(yaml, scheduler + "lr_warmup_iters", 0);
  s.wsd_decay = get<int64_t>(yaml, scheduler + "lr_wsd_decay_iters", 0);
  s.end = get<int64_t>(yaml, scheduler + "lr_decay_iters", std::max(run.steps, s.warmup + s.wsd_decay));
  if (const double ratio = get(yaml, scheduler + "warmup_ratio", 0.0); ratio > 0)
    s.warmup = std::lround(ratio * static_cast<double>(s.end));

  run.validation = run.train;
  if (const auto paths = list<std::string>(yaml, "data.validation.data_path"); !paths.empty()) {
    run.validation.paths = paths;
    run.validation.weights = list<double>(yaml, "data.validation.weights");
    run.validation.split = {1, 0, 0};
    run.validation_part = 0;
  }
  if (get<int64_t>(yaml, "pretrain.val_period", 0) > 0 || get(yaml, "pretrain.val_at_end", false) ||
      get(yaml, "pretrain.val_at_start", false)) {
    const int64_t whole = epoch_samples(run.validation, run.validation_part) / run.batch;
    run.validation_samples =
        run.batch * get<int64_t>(yaml, "pretrain.val_batches", std::max<int64_t>(whole, 1));
  }
  return run;
}

bool decays(const std::string& name) {
  return !name.ends_with(".bias") && name.find("norm") == std::string::npos;
}

double global_norm(const Tensors& tensors) {
  double sum = 0;
  for (const auto& [name, t] : tensors)
    for (const double x : t.values) sum += x * x;
  return std::sqrt(sum);
}

namespace {
// Tokens with a loss.
double count_targets(const DataSettings& data, const std::vector<Tokens>& samples) {
  double count = 0;
  for (const Tokens& s : samples)
    for (const int32_t target : make_inputs(data, s).targets) count += target >= 0;
  return count;
}
}  // namespace

double mean_loss(const Config& config, const Tensors& weights, const DataSettings& data,
                 const std::vector<Tokens>& samples) {
  double sum = 0;
  for (const Tokens& s : samples) {
    const Inputs in = make_inputs(data, s);
    sum += loss(config, weights, in.tokens, in.targets, in.layout);
  }
  return sum / count_targets(data, samples);
}

Trainer::Trainer(const Config& config, const Run& run, Tensors weights)
    : config_(config),
      run_(run),
      weights_(std::move(weights)),
      m_(zeros_like(weights_)),
      v_(zeros_like(weights_)) {}

Step Trainer::step(const std::vector<Tokens>& batch) {
  Tensors read = weights_;
  if (round_)
    for (auto& [name, t] : read)
      for (double& x : t.values) x = round_(x);
  // The loss is the mean over all tokens of the batch that have one, and the gradient is that of the mean.
  const double tokens = count_targets(run_.train, batch);
  Tensors gradients = zeros_like(weights_);
  Step result;
  for (const Tokens& s : batch) {
    const Inputs in = make_inputs(run_.train, s);
    result.loss += loss_and_gradient(config_, read, in.tokens, in.targets, 1 / tokens, gradients, in.layout,
                                     1 / static_cast<double>(batch.size())) /
                   tokens;
  }
  result.grad_norm = global_norm(gradients);
  result.lr = learning_rate(run_.schedule, ++steps_);
  // As in PyTorch's clip_grad_norm_: 1e-6 keeps the quotient finite.
  const double clip = run_.max_grad_norm / (result.grad_norm + 1e-6);
  if (run_.max_grad_norm > 0 && clip < 1)
    for (auto& [name, g] : gradients)
      for (double& x : g.values) x *= clip;
  update(gradients, result.lr);
  return result;
}

Step Trainer::skip() {
  return {NAN, NAN, learning_rate(run_.schedule, ++steps_), true};
}

// AdamW (Loshchilov and Hutter, 2019) with the bias corrections of Adam (Kingma and Ba, 2015).
void Trainer::update(const Tensors& gradients, double lr) {
  ++updates_;
  const double correction1 = 1 - std::pow(run_.beta1, static_cast<double>(updates_));
  const double correction2 = 1 - std::pow(run_.beta2, static_cast<double>(updates_));
  for (auto& [name, w] : weights_) {
    const Tensor& g = gradients.at(name);
    Tensor &m = m_.at(name), &v = v_.at(name);
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = run_.beta1 * m[i] + (1 - run_.beta1) * g[i];
      v[i] = run_.beta2 * v[i] + (1 - run_.beta2) * g[i] * g[i];
      if (decays(name)) w[i] -= lr * run_.weight_decay * w[i];
      w[i] -= lr * (m[i] / correction1) / (std::sqrt(v[i] / correction2) + run_.eps);
    }
  }
}

}  // namespace reference
