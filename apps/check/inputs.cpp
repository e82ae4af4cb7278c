// Rules about files that the configuration names, and about variables of the environment.
#include <cstdlib>

#include "apps/check/check.h"
#include "apps/check/rule.h"
#include "apps/data/manifest.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"
#include "core/device/cpu/file_memory.h"
#include "core/io/atomic_file.h"

namespace nrl::check {
namespace {

constexpr const char *train_key = "data.train.data_path", *validation_key = "data.validation.data_path",
                     *tokenizer_key = "policy.tokenizer.name", *model_key = "policy.model_name";

const DatasetConfig& set_of(const Facts& f, bool train) {
  return train ? f.config().data.train : f.config().data.validation;
}

/// The advice for a prefix of token files of which some are missing.
std::string advice_for(const std::string& prefix) {
  if (!path_exists(prefix))
    return fmt::format(
        "expected a prefix of token files, relative to the working directory; make them with "
        "nrl-train prepare --input TEXT --tokenizer ... --output {}",
        clipped(prefix));
  if (prefix.ends_with(".bin") || prefix.ends_with(".idx"))
    return fmt::format("give the prefix without the suffix: {}", prefix.substr(0, prefix.size() - 4));
  return fmt::format(
      "'{0}' is not a token file; if it is text, make token files with nrl-train prepare "
      "--input {0} --tokenizer ... --output PREFIX",
      clipped(prefix));
}

Rule data_exists(bool train) {
  const char* key = train ? train_key : validation_key;
  return {
      {key}, [=](const Facts& f) {
        Verdict out;
        if (trains_on_examples(f.config())) {
          for (const std::string& path : set_of(f, train).data_path)
            if (!path.empty() && !path_exists(path))
              out.push_back({.reason = fmt::format("{}: there is no {}", key, clipped(path)),
                             .remedy = {"expected a file of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst) or a "
                                        "directory of them, relative to the working directory"},
                             .exit = Exit::no_input});
          return out;
        }
        for (const std::string& prefix : set_of(f, train).data_path) {
          std::vector<std::string> absent;
          for (const char* suffix : {".idx", ".bin"})
            if (!path_exists(prefix + suffix)) absent.push_back(clipped(prefix) + suffix);
          if (!prefix.empty() && !absent.empty())
            out.push_back({.reason = fmt::format("{}: {} {} missing", key, fmt::join(absent, " and "),
                                                 absent.size() > 1 ? "are" : "is"),
                           .remedy = {advice_for(prefix)},
                           .exit = Exit::no_input});
        }
        return out;
      }};
}

/// The data were made with the tokenizer that goes into checkpoints.
Rule same_tokenizer(bool train) {
  return {{train ? train_key : validation_key}, [=](const Facts& f) {
            const auto& own = f.policy().tokenizer.name;
            const auto& tokenizer = own ? own : f.policy().model_name;
            const char* key = own ? tokenizer_key : model_key;
            Verdict out;
            if (!tokenizer || !f.result.sound(key) || trains_on_examples(f.config())) return out;
            for (const std::string& prefix : set_of(f, train).data_path) {
              std::string text;
              try {
                text = data::other_tokenizer_warning(prefix, *tokenizer);
              } catch (const Error&) {
                continue;  // a manifest that cannot be read is an error of the rule about the vocabulary
              }
              if (!text.empty())
                out.push_back({.reason = text,
                               .remedy = {fmt::format("{} is {}; prepare the data with its tokenizer", key,
                                                      clipped(*tokenizer))},
                               .severity = Severity::warning});
            }
            return out;
          }};
}

Verdict judge_resume(const Facts& f) {
  const auto& [resume, directory] = f.config().checkpointing.resume;
  if (resume != ResumeMode::directory || is_directory(directory)) return {};
  return {{.reason = fmt::format("checkpointing.resume: there is no directory '{}'", clipped(directory)),
           .remedy = {"give a checkpoint directory (.../step-N), auto or never"},
           .exit = Exit::no_input}};
}

/// Makes a file where a CPU run keeps offloaded memory, and drops it.
Verdict judge_offload_directory(const Facts& f) {
  const auto& directory = f.config().memory.offload_dir;
  if (!directory || f.gpu) return {};
  try {
    const cpu::FileMemory smallest(cpu::scratch_directory(*directory), 1);
  } catch (const Error& e) {
    return {{.reason = e.what(), .exit = e.code()}};
  }
  return {};
}

Verdict judge_documents(const Facts& f) {
  if (!f.documents) return {};
  const DataConfig& c = f.config().data;
  return {{.reason = f.documents->what(),
           .key = c.reset_attention_mask ? "data.reset_attention_mask"
                  : c.reset_position_ids ? "data.reset_position_ids"
                                         : "data.eod_mask_loss",
           .exit = f.documents->code()}};
}

Verdict judge_threads(const Facts& f) {
  const auto invalid = cpu::omp_num_threads().invalid;
  if (f.world == 0 || !f.config().kernels.num_threads.is_auto() || !invalid) return {};
  return {{.reason = fmt::format(
               "OMP_NUM_THREADS is \"{}\", which is ignored: expected a number from 1 to {}, or a list of "
               "them (\"4,2\"), of which the first counts",
               printable(clipped(*invalid, 80)), max_threads),
           .remedy = {"Fix: correct or unset it, or set kernels.num_threads"},
           .severity = Severity::warning}};
}

/// A variable of NeMo RL's for Nsight Systems, which a training run would ignore.
Rule is_unset(const char* name, std::string why, std::string (*replacement)(const char* value)) {
  return {{}, [=](const Facts&) -> Verdict {
            const char* value = std::getenv(name);
            if (!value || !*value) return {};
            return {{.reason = fmt::format("{} is set, but {}", name, why),
                     .remedy = {fmt::format("Fix: unset {}, and {}", name, replacement(value)),
                                "nsys profile --trace=cuda,nvtx nrl-train CONFIG records a whole run"},
                     .place = fmt::format("environment: {}={}", name, value)}};
          }};
}

const Rule file_table[] = {
    data_exists(true),
    data_exists(false),
    same_tokenizer(true),
    same_tokenizer(false),
    {{"checkpointing.resume"}, judge_resume},
    {{"memory.offload_dir"}, judge_offload_directory},
};
/// Without its base model a trained adapter is of no use, and checkpoints of adapters do not hold it.
Verdict judge_adapters(const Facts& f) {
  if (!f.policy().lora.enabled || f.policy().model_name) return {};
  return {{.reason = "policy.lora.enabled: there is no base model, which checkpoints of adapters do not hold",
           .remedy = {"give it as policy.model_name: DIRECTORY"}}};
}

const Rule adapter_table[] = {{{"policy.lora.enabled", model_key}, judge_adapters}};
const Rule document_table[] = {{{train_key, validation_key, tokenizer_key}, judge_documents}};
const Rule thread_table[] = {{{"kernels.num_threads"}, judge_threads}};
const Rule profiler_table[] = {
    is_unset("NRL_NSYS_PROFILE_STEP_RANGE", "nrl-train does not start and stop Nsight Systems at steps",
             [](const char* value) {
               return fmt::format(
                   "set profiling.enabled=true and profiling.steps={}: every rank records "
                   "these steps into LOG_DIR/profile/step-FIRST",
                   parse_step_range(value) ? value : "FIRST:END (END exclusive)");
             }),
    is_unset("NRL_NSYS_WORKER_PATTERNS", "the ranks of nrl-train have no worker names", [](const char*) {
      return std::string(
          "set profiling.enabled=true: every rank N records into a file of its own, "
          "LOG_DIR/profile/step-FIRST/rank-N.pftrace");
    })};

}  // namespace

Diagnostics check_inputs(const Facts& facts, bool files, bool training) {
  Diagnostics out;
  if (files) out = judge(file_table, facts);
  out += judge(thread_table, facts);
  if (training) out += judge(profiler_table, facts);
  if (training) out += judge(adapter_table, facts);
  out += judge(document_table, facts);
  return out;
}

}  // namespace nrl::check
