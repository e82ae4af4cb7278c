#pragma once
// The configuration of an evaluation of a stored model: its command line, and a few keys of the training run
// that saved the model.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "apps/model/spec/spec.h"
#include "core/base/cluster_node.h"
#include "core/config/load.h"

namespace nrl::train {

struct EvaluationOptions {
  std::string directory;  ///< checkpoint (step-N), Hugging Face directory or adapter
  /// "key=value" as in a run: the division of the model over ranks (section distributed) and kernels; with
  /// `examples` also how records become examples (section data, policy.tokenizer).
  std::vector<std::string> overrides = {};
  int64_t sequence_length = 0;  ///< of a window; 0: as in training, else the model's maximum up to 1024
  /// Windows per forward pass and rank, or fewer if the data have fewer. A microbatch of examples has room
  /// for as many of full length.
  int64_t micro_batch = 4;
  int64_t tokens = INT64_MAX;  ///< most tokens of a dataset that is evaluated
  bool examples = false;       ///< files of records are evaluated, not token files
  DeviceKind device = DeviceKind::cpu;
  int threads = 0;  ///< 0: this rank's share of the cores
};

/// Windows of `length` tokens that predict all of `tokens` tokens, at least 2, but the first one.
int64_t windows_of(int64_t tokens, int64_t length);

/// The checked configuration of an evaluation by `ranks` ranks on `nodes` (empty: unknown). Its microbatch
/// and its length are in section policy; data.validation has the format of records. Throws Error with all
/// problems: keys that an evaluation does not read, and layouts that do not suit the ranks or the model.
ConfigResult evaluation_config(const EvaluationOptions& options, const model::ModelSpec& spec, int ranks,
                               std::span<const ClusterNode> nodes = {});

}  // namespace nrl::train
