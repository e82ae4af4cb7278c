#pragma once
// How the head of a model gets dLoss/dlog_prob of its rows from an objective, which the layers do not know.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "apps/model/spec/micro_batch.h"
#include "core/ops/distillation.h"
#include "core/ops/exec.h"

namespace nrl::model {

/// The dependence of dLoss/dlog_prob of a row, and therefore how often the head computes its logits.
enum class Dependence : uint8_t {
  none,      ///< known before the step (MicroBatch::loss_weight): one pass, logits and gradient at once
  token,     ///< the log-probability of the row: logits, weights and gradient, chunk by chunk
  sequence,  ///< the log-probabilities of the sequence or pair, in one microbatch: logits of all chunks,
             ///< weights, logits again
  batch,     ///< the log-probabilities of the step: a forward pass of all microbatches before it
};

/// A column of the rows of a batch beside tokens and targets.
struct ColumnSpec {
  DType dtype = DType::f32;  ///< of 4 bytes
  int64_t width = 1;
};

/// MicroBatch::columns of LossNeeds::divergence, of the same width: the k ids and the teacher's numbers.
struct TeacherColumn {
  enum Index : int {
    ids,        ///< i32
    log_probs,  ///< f32
    count
  };
};

/// The inputs and memory that a plan reserves for an objective. They are known from the configuration before
/// any objective exists.
struct LossNeeds {
  Dependence dependence = Dependence::none;
  bool entropy = false;                  ///< of each row's distribution
  double inverse_temperature = 1;        /// of the distribution
  std::vector<ColumnSpec> columns = {};  ///< MicroBatch::columns
  int64_t sequence_values = 0;  ///< columns of MicroBatch::sequence_values; 0: neither these nor segments
  /// Distillation, with Dependence::none: the score of a row takes the place of its log-probability.
  /// `inverse_temperature` must belong to the same temperature.
  std::optional<ops::TopkKl::Options> divergence = {};
  /// Forward passes only, of a teacher: the largest logits of each row instead of its log-probability; 0:
  /// none.
  int64_t top_k = 0;
};

/// The results of a head for the rows of a microbatch, and memory for the rule. (N) f32, or empty where
/// LossNeeds does not ask for it.
struct HeadOutput {
  Tensor log_prob;  ///< of the targets; a scalar head's scores
  Tensor entropy;
  Tensor top_ids, top_logits;            ///< (N, k) i32 and f32: LossNeeds::top_k, ops::TopColumns
  Tensor weight;                         ///< dLoss/dlog_prob, which the rule writes
  Tensor entropy_weight;                 ///< dLoss/dentropy, the same
  Tensor segment_sums, segment_weights;  ///< (most sequences) f64: memory for a rule of sequences
  /// Sums a tensor of numbers of segments over the ranks that have the rows of one microbatch; enqueued.
  std::function<void(const Tensor&)> sum_over_rows;
  /// False on all but one of these ranks: numbers of segments count once.
  bool counts_segments = true;
};

/// Enqueues ops only and must not wait for a value.
class LossRule {
 public:
  virtual ~LossRule() = default;
  virtual Dependence dependence() const = 0;
  /// Writes out.weight (and out.entropy_weight) of `count` rows from `begin` on, whose log-probabilities and
  /// entropies are valid. Dependence::token: once per chunk; sequence: once, for all rows.
  virtual void weights(ops::Exec& exec, const MicroBatch& batch, const HeadOutput& out, int64_t begin,
                       int64_t count) = 0;
};

}  // namespace nrl::model
