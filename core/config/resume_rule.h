#pragma once
// The part of a key's declaration that says whether a resumed run may change it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"

namespace nrl {

enum class OnResume : uint8_t {
  refused,     ///< the run that saved the checkpoint must have had the same value
  needs_word,  ///< may differ if checkpointing.allow_changes has the word
  reported,    ///< may differ; the run says that it does
  unrelated,   ///< changes no number of a training run, or is compared by its consequences; not recorded
};

struct ResumeRule {
  OnResume change = OnResume::refused;
  ResumeChange word = ResumeChange::data;  ///< with needs_word
  std::string_view consequence = {};       ///< of a change, for its report: "the sample order changes"
};

/// The rule of a key; of an unknown one the default, OnResume::refused.
ResumeRule resume_rule(std::string_view key);

/// The keys of `config` that a checkpoint records, for a resume to compare: those with a member of Config
/// whose rule is another than OnResume::unrelated.
std::vector<std::string> recorded_keys(const Config& config);

}  // namespace nrl
