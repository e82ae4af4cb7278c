#pragma once
// Microbatches of one data-parallel rank, prefetched by threads.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <ostream>
#include <thread>
#include <vector>

#include "apps/data/gpt_dataset.h"

namespace nrl::data {

/// The name of the range in which a thread fills a microbatch.
inline constexpr const char* read_range = "read samples";

/// Selects the samples of a rank. A global batch is `accumulation * data_parallel_size * micro_batch`
/// consecutive samples; microbatch m of rank r has `micro_batch` samples starting at
/// `(m * data_parallel_size + r) * micro_batch` (Megatron's order). The samples of a global batch, and
/// therefore the position of a run, do not depend on the number of ranks.
struct LoaderOptions {
  int64_t micro_batch = 1;
  int64_t data_parallel_rank = 0;
  int64_t data_parallel_size = 1;
  int64_t accumulation = 1;      ///< microbatches per step and rank
  int64_t consumed_samples = 0;  ///< index of the first sample of the first global batch
  int64_t steps = 0;             ///< global batches to deliver
  int threads = 1;               ///< 0: next() reads synchronously
  int prefetch = 4;              ///< maximum number of prefetched microbatches
  int64_t global_batch() const { return micro_batch * data_parallel_size * accumulation; }
};

/// Index of the first sample of a rank's microbatch.
int64_t first_sample(const LoaderOptions& options, int64_t step, int64_t micro_batch);

/// A microbatch in host memory, before plan::BatchTensors copies it to the device.
/// N rows: micro_batch samples of T tokens, or packed sequences of any lengths.
struct HostMicroBatch {
  int64_t step = 0;              ///< global batch, counted from the loader's start
  int64_t index = 0;             ///< microbatch in the step
  std::vector<int64_t> samples;  ///< [micro_batch]; of packed sequences empty
  std::vector<int32_t> tokens;   ///< [N]
  std::vector<int32_t> targets;  ///< [N]: the next tokens; < 0: no loss
  std::vector<int32_t>
      positions;                ///< [N] if documents or packed sequences reset them, else empty: 0 .. T - 1
  std::vector<int32_t> bounds;  ///< first row of each attention sequence, and the row count
  int64_t loss_tokens = 0;      ///< number of targets with a loss
  // Inputs of an objective (model::LossNeeds); empty if it has none.
  int64_t sequences = 0;                ///< of `bounds`, without padding, which is last
  std::vector<double> sequence_values;  ///< [sequences * values]
  /// [columns][N * width]: numbers of 4 bytes, f32 as their bits. 0 in rows of padding.
  std::vector<std::vector<int32_t>> columns;
};

/// Microbatches that a loader holds at once, and the bytes of their buffers for samples of `length` tokens.
int64_t loader_slots(const LoaderOptions& options);
int64_t loader_bytes(const LoaderOptions& options, const DocumentRules& rules, int64_t length);

/// Delivers accumulation * steps microbatches in an order that does not depend on the number of threads.
/// Buffers are allocated once. The dataset must outlive the loader.
class BatchLoader {
 public:
  /// Throws Error (`config`) if the dataset has too few samples.
  BatchLoader(const TokenDataset& dataset, const LoaderOptions& options);
  /// Stops and joins the threads.
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// The next microbatch, valid until the next call. An error of a reading thread is thrown instead of the
  /// microbatch that it concerns. Must not be called more than accumulation * steps times.
  const HostMicroBatch& next();

 private:
  struct Slot {
    HostMicroBatch batch;
    std::vector<int32_t> ids;  // [T + 1]
    Sample sample;
    std::exception_ptr error;
    int64_t ready = -1;  // number of the microbatch in this slot
  };

  void fill(Slot& slot, int64_t number);
  void work();
  void stop();

  const TokenDataset& dataset_;
  LoaderOptions options_;
  int64_t total_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable free_, ready_;
  int64_t claimed_ = 0, released_ = 0, delivered_ = 0;  // microbatches; the first two under mutex_
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

/// Output of `data show --json`: the samples of steps [first, last), counted from 1, of `global_batch`
/// samples, one JSON object per line: {"step":S,"sample":N,"tokens":[T + 1 ids]}, and depending on the data
/// set's document rules "positions":[T], "segments":[first rows], "no_loss":[rows].
void show_samples(const TokenDataset& dataset, int64_t global_batch, int64_t first, int64_t last,
                  std::ostream& out);

}  // namespace nrl::data
