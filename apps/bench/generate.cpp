// nrl-train bench generate: prefill and decode of the model of a configuration, with random weights. A pass
// of decoding is bound by memory where the batch is small: it reads each weight once, and the keys and values
// of every sequence.

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "apps/bench/machine.h"
#include "apps/rollout/generator.h"
#include "apps/state/model_source.h"
#include "apps/train/start/run_check.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/philox.h"
#include "core/base/text.h"
#include "core/config/load.h"

namespace nrl::bench {
namespace {

constexpr int rounds = 3;  ///< the fastest one counts: it was disturbed least by other programs

struct Lengths {
  int64_t prompt, generated;
};

struct Rates {
  double prefill = 0, decode = 0;  ///< tokens/s
  double first_token_s = 0;        ///< from submit() on, of the first sequence
};

/// Weights in one piece of memory, which then consists of huge pages.
struct RandomWeights {
  RandomWeights(Machine& machine, const model::ParameterList& parameters, DType dtype)
      : memory(machine), all(memory.normal(dtype, {padded_total(parameters)}, 0.02)) {
    auto* at = static_cast<std::byte*>(all.data);
    for (const model::Parameter& p : parameters.all) {
      views.push_back({p.view(at, dtype), {}});
      at += padded(p) * size_of(dtype);
    }
  }
  static int64_t padded(const model::Parameter& p) { return (p.numel() + 63) / 64 * 64; }
  static int64_t padded_total(const model::ParameterList& parameters) {
    int64_t n = 0;
    for (const model::Parameter& p : parameters.all) n += padded(p);
    return n;
  }
  Tensors memory;
  Tensor all;
  std::vector<model::ParameterView> views;
};

/// Bytes of the weights that a pass of decoding reads: all, but of an embedding that is not the head a few
/// rows.
double weight_bytes(const model::ParameterList& parameters, DType dtype) {
  int64_t all = parameters.total();
  for (const int once : {parameters.embedding, parameters.positions})
    if (once >= 0 && once != parameters.head) all -= parameters.all[static_cast<size_t>(once)].numel();
  return static_cast<double>(all * size_of(dtype));
}

model::GenerationLimits limits_of(const Machine& machine, int64_t batch, const Lengths& lengths) {
  model::GenerationLimits limits;
  limits.longest = lengths.prompt + lengths.generated;
  limits.page_tokens = machine.gpu() ? 64 : 16;
  limits.sequences = batch;
  limits.tokens = std::max<int64_t>(machine.gpu() ? 2048 : 512, batch);
  limits.pages = batch * ((limits.longest + limits.page_tokens - 1) / limits.page_tokens + 1);
  return limits;
}

Rates generate_once(rollout::LocalGenerator& generator, int64_t vocabulary, int64_t batch,
                    const Lengths& lengths, uint64_t seed) {
  const PhiloxStream random(seed, "bench generate");
  std::vector<rollout::Request> requests;
  for (int64_t i = 0; i < batch; ++i) {
    std::vector<int32_t> prompt;
    for (int64_t t = 0; t < lengths.prompt; ++t)
      prompt.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(i * lengths.prompt + t)) %
                                            static_cast<uint64_t>(vocabulary)));
    requests.push_back({.id = i, .prompt = std::make_shared<const std::vector<int32_t>>(std::move(prompt))});
  }
  const rollout::GeneratorCounts before = generator.counts();
  const auto begin = std::chrono::steady_clock::now();
  Rates rates;
  generator.submit(requests,
                   {.max_new_tokens = lengths.generated, .seed = seed, .on_token = [&](int64_t, int32_t) {
                      if (rates.first_token_s == 0)
                        rates.first_token_s =
                            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
                      return false;
                    }});
  while (generator.next()) {
  }
  const rollout::GeneratorCounts after = generator.counts();
  rates.prefill = static_cast<double>(after.prompt_tokens - before.prompt_tokens) /
                  (after.prefill_seconds - before.prefill_seconds);
  rates.decode = static_cast<double>(after.decoded_tokens - before.decoded_tokens) /
                 (after.decode_seconds - before.decode_seconds);
  return rates;
}

}  // namespace

int generate(const Args& args) {
  ConfigResult config = load_config(args.config, args.overrides);
  train::check_but_memory(config, {.world = 0, .files = false, .memory = false});
  if (!config.diagnostics.empty()) output::write(output::Stream::err, render(config.diagnostics));
  if (!config.ok()) return static_cast<int>(exit_code(config.diagnostics));
  const model::ModelSpec spec = train::load_model_spec(config);
  train::require_logits(spec, "bench generate", args.config);
  const model::ParameterList parameters = model::make_parameters(spec);
  Machine machine(args.device, args.quick);
  const Lengths lengths{args.quick ? 8 : args.prompt_tokens.value_or(128),
                        args.quick ? 4 : args.new_tokens.value_or(64)};
  const std::vector<int64_t> batches = !args.batches.empty() ? args.batches
                                       : args.quick          ? std::vector<int64_t>{1, 2}
                                                             : std::vector<int64_t>{1, 16};
  std::vector<DType> dtypes{precision_of(args, machine)};
  if (args.precision == "auto" && !machine.gpu()) dtypes.push_back(DType::bf16);
  machine.copy_bandwidth();
  log::info("device    {}", machine.name());
  log::info("model     {} parameters, prompts of {} tokens, {} new ones", grouped(parameters.total()),
            lengths.prompt, lengths.generated);
  Report report(args, machine.describe());
  report.set("config", args.config);
  report.set("parameters", parameters.total());
  report.set("prompt_tokens", lengths.prompt);
  report.set("new_tokens", lengths.generated);
  struct Row {
    DType dtype;
    int64_t batch;
    Rates best;
    double bytes;  ///< of a pass of decoding
  };
  std::vector<Row> rows;
  for (const DType dtype : dtypes) {
    const RandomWeights weights(machine, parameters, dtype);
    for (const int64_t batch : batches) {
      rollout::LocalGenerator generator(spec, parameters, weights.views, machine.exec(),
                                        limits_of(machine, batch, lengths));
      Row row{dtype, batch, {}, 0};
      for (int i = 0; i < (args.quick ? 1 : rounds); ++i) {
        const Rates r = generate_once(generator, spec.vocab_size, batch, lengths, static_cast<uint64_t>(i));
        row.best.prefill = std::max(row.best.prefill, r.prefill);
        row.best.decode = std::max(row.best.decode, r.decode);
        row.best.first_token_s = i == 0 ? r.first_token_s : std::min(row.best.first_token_s, r.first_token_s);
      }
      // The pass that samples the last token but n reads the keys and values of all tokens but n + 1.
      const double context = static_cast<double>(lengths.prompt) + static_cast<double>(lengths.generated) / 2;
      row.bytes = weight_bytes(parameters, dtype) +
                  static_cast<double>(batch) * context *
                      static_cast<double>(model::GenerationPass::page_bytes(spec, {}, 1, dtype));
      rows.push_back(row);
    }
  }
  const double copy = machine.copy_bandwidth_again();
  log::info("copies    {:.1f} GB/s (measured)", copy * 1e-9);
  log::info("{:<10}{:>7}{:>18}{:>16}{:>18}{:>10}{:>12}{:>10}", "precision", "batch", "prefill tokens/s",
            "first token ms", "decode tokens/s", "ms/pass", "MB/pass", "of bound");
  for (const Row& row : rows) {
    const double pass = static_cast<double>(row.batch) / row.best.decode, bound = row.bytes / copy;
    const char* precision = row.dtype == DType::f32    ? "float32"
                            : row.dtype == DType::bf16 ? "bfloat16"
                                                       : "float16";
    log::info("{:<10}{:>7}{:>18.0f}{:>16.1f}{:>18.1f}{:>10.2f}{:>12.1f}{:>8.0f} %", precision, row.batch,
              row.best.prefill, row.best.first_token_s * 1e3, row.best.decode, pass * 1e3, row.bytes * 1e-6,
              bound / pass * 100);
    report.add(JsonValue::object({{"precision", precision},
                                  {"batch", row.batch},
                                  {"prefill_tokens_per_s", row.best.prefill},
                                  {"first_token_s", row.best.first_token_s},
                                  {"decode_tokens_per_s", row.best.decode},
                                  {"bytes_per_pass", row.bytes},
                                  {"fraction_of_bound", bound / pass}}));
  }
  report.set("copy_bandwidth", copy);
  return report.finish();
}

}  // namespace nrl::bench
