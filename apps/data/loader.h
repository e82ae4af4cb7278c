#pragma once
// Micro-batches for one data-parallel rank, read ahead by threads.

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <ostream>
#include <thread>
#include <vector>

#include "apps/data/gpt_dataset.h"

namespace nrl::data {

/// Which samples a rank takes. A global batch is `accumulation * data_parallel * micro_batch` consecutive
/// samples; micro- batch m of rank r holds the `micro_batch` ones from `m * micro_batch * data_parallel + r *
/// micro_batch` on (Megatron's order). The samples of a global batch, and so the position of a run, do not
/// depend on the number of ranks.
struct LoaderOptions {
  int64_t micro_batch = 1;
  int64_t data_parallel_rank = 0;
  int64_t data_parallel_size = 1;
  int64_t accumulation = 1;      ///< micro-batches a step and rank
  int64_t consumed_samples = 0;  ///< global, at the start; the first global batch begins here
  int64_t steps = 0;             ///< global batches to deliver
  int threads = 1;               ///< 0: read in `next`
  int prefetch = 4;              ///< micro-batches read ahead at most
  int64_t global_batch() const { return micro_batch * data_parallel_size * accumulation; }
};

/// The number of the first sample of a rank's micro-batch.
int64_t first_sample(const LoaderOptions& options, int64_t step, int64_t micro_batch);

struct MicroBatch {
  int64_t step = 0;                ///< global batch since the loader's start
  int64_t index = 0;               ///< micro-batch in the step
  std::vector<int64_t> samples;    ///< [micro_batch]
  std::vector<int32_t> tokens;     ///< [micro_batch, T]
  std::vector<int32_t> targets;    ///< [micro_batch, T]: the tokens one place on; < 0: no loss
  std::vector<int32_t> positions;  ///< [micro_batch, T] where documents reset them; else empty: 0 .. T - 1
  std::vector<int32_t> bounds;  ///< first rows of the sequences that attention keeps apart, and the row count
  int64_t loss_tokens = 0;      ///< targets that have a loss
};

/// Delivers accumulation * steps micro-batches in order. The order never depends on the number of threads.
/// Buffers are allocated once. The dataset must outlive the loader.
class BatchLoader {
 public:
  /// Throws Error (`config`) where the dataset has fewer samples than the steps need.
  BatchLoader(const TokenDataset& dataset, const LoaderOptions& options);
  /// Stops the threads, wherever they are.
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// The next micro-batch, valid until the next call. An error of the reading threads is thrown here, in the
  /// place of the micro-batch it belongs to. Asking for more than there is is an internal error.
  const MicroBatch& next();
  /// Seconds that `next` has waited for data so far.
  double wait_seconds() const { return wait_seconds_; }

 private:
  struct Slot {
    MicroBatch batch;
    std::vector<int32_t> ids;  // [T + 1]
    Sample sample;
    std::exception_ptr error;
    int64_t ready = -1;  // the micro-batch it holds
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
  int64_t claimed_ = 0, released_ = 0, delivered_ = 0;  // micro-batches; the first two under mutex_
  bool stop_ = false;
  double wait_seconds_ = 0;
  std::vector<std::thread> threads_;
};

/// `data show`: the samples of the steps [first, last), counted from 1, with `global_batch` samples each, one
/// JSON object a line: {"step":S,"sample":N,"tokens":[T + 1 ids]}, and as far as the dataset's rules for
/// documents ask for them "positions":[T], "segments":[first rows], "no_loss":[rows].
void show_samples(const TokenDataset& dataset, int64_t global_batch, int64_t first, int64_t last,
                  std::ostream& out);

}  // namespace nrl::data
