// Rules about files that the configuration names, and about variables of the environment.
#include <cstdlib>

#include "apps/check/check.h"
#include "apps/check/rule.h"
#include "apps/data/manifest.h"
#include "core/base/error.h"
#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/config/nsys.h"
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

/// Nsight Systems sees nothing of a CPU, and must have been started before the run.
Verdict judge_nsys(const Facts& f) {
  std::optional<NsysWindow> window;
  try {
    window = nsys_window(f.config().profiling);
  } catch (const Error& e) {
    return {{.reason = e.what(), .exit = e.code()}};
  }
  if (!window) return {};
  const std::string ours = fmt::format(
      "profiling.enabled=true profiling.steps={} records these steps without a tool, on a CPU, too",
      window->text());
  if (!window->has_worker())
    return {{.reason = fmt::format("{}: no pattern matches the ranks, which are named policy_worker",
                                   window->source),
             .remedy = {"Fix: add *policy* to the patterns, or " + ours}}};
  if (!f.gpu)
    return {{.reason = fmt::format("{}: Nsight Systems captures GPUs, and this run is on a CPU{}",
                                   window->source, f.why_no_gpu.empty() ? "" : " (" + f.why_no_gpu + ")"),
             .remedy = {"Fix: " + ours}}};
  if (under_profiler()) return {};
  return {
      {.reason = fmt::format("{}: the run was not started under nsys", window->source),
       .remedy = {"Fix: write profiling.nsys into CONFIG itself or on the command line of nrl-train train"}}};
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
const Rule profiler_table[] = {{{"profiling.nsys.steps", "profiling.nsys.workers"}, judge_nsys}};

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
