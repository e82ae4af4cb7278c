#pragma once
// A training run on one rank, set up: configuration agreed on, data open, memory laid out, weights in place.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "apps/data/gpt_dataset.h"
#include "apps/plan/run_plan.h"
#include "apps/train/accelerator.h"
#include "apps/train/checkpoint.h"
#include "apps/train/optimizer.h"
#include "apps/train/resume.h"
#include "apps/train/step_scalars.h"
#include "core/device/cpu/features.h"
#include "core/io/run_lock.h"
#include "parallel/comm/world.h"
#include "parallel/data/grad_reducer.h"
#include "parallel/grid/groups.h"

namespace nrl::train {

/// Leaving with a code that the ranks have agreed on, after the message was printed once.
struct Leave {
  Exit code;
};

/// Runs `work` on every rank; when it fails anywhere, one message is printed and every rank throws Leave with
/// the same code.
void together(comm::World& world, const std::function<void()>& work);

/// Reads the configuration on rank 0 and gives it to all. Bad ones are printed on rank 0 and end in Leave on
/// all.
ConfigResult load_config_together(comm::World& world, const std::string& path,
                                  const std::vector<std::string>& overrides);

/// Which kind of device the run computes on: what `device` says, or for auto a GPU where this process sees
/// one. `why` tells the reason of a choice. Fails (69) when a GPU is demanded and there is none.
DeviceType choose_device(const Config& config, std::string& why);

/// Threads of a rank: kernels.num_threads; for auto OMP_NUM_THREADS, or the processor's share of this rank:
/// cores of its affinity mask over the ranks that share them.
int threads_for(const Config& config, int local_size);

/// Collective. What every rank of this node sees, in the order of local ranks; `mine` are the unique ids of
/// this rank's devices.
std::vector<std::vector<std::string>> devices_of_node(comm::World& world,
                                                      const std::vector<std::string>& mine);

/// Options of the training or validation part of the configured data; `samples` wanted of it. Empty sources:
/// not configured.
data::DatasetOptions dataset_options(const Config& config, int64_t vocab_size, data::Split part,
                                     int64_t samples);

/// The training data of a run: what the trainer reads and `data show` prints.
struct TrainData {
  data::DatasetOptions options;  ///< with open files
  int64_t samples = 0;           ///< the data order is made for
  int64_t epoch_samples = 0;     ///< of one pass over the data
  int64_t max_steps = 0;         ///< of the run, from pretrain.max_num_steps and max_num_epochs
  std::unique_ptr<data::TokenDataset> dataset;  ///< null when only planned
};
/// All but the dataset itself. `at_least`: samples that are needed whatever max_steps says (a run that
/// resumes after its batch was changed).
TrainData plan_train_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                          int64_t at_least = 1);
TrainData open_train_data(const Config& config, int64_t vocab_size, int64_t global_batch,
                          int64_t at_least = 1);

/// The validation data of a run that evaluates.
struct ValidationData {
  data::DatasetOptions options;  ///< with open files, those of the training data where they are the same
  int64_t batches = 0;           ///< global batches of an evaluation
  int64_t epoch_samples = 0;     ///< of one pass over the data
};
/// Nothing when the run does not evaluate.
std::optional<ValidationData> plan_validation_data(const Config& config, const TrainData& train,
                                                   int64_t global_batch);

class Session {
 public:
  /// Everything up to the first step. Nothing is created on disk before all checks have passed on all ranks.
  /// `phase` is told what is being done, for people who wait.
  Session(comm::World& world, ConfigResult config, std::function<void(std::string)> phase);

  comm::World& world() { return world_; }
  const Config& config() const { return config_.config; }
  const ConfigResult& config_result() const { return config_; }
  plan::RunPlan& plan() { return *plan_; }
  ops::Exec& exec() { return exec_; }
  Optimizer& optimizer() { return *optimizer_; }
  GradReducer& reducer() { return *reducer_; }
  /// The data-parallel group for host memory, and for the memory that the ops work on.
  comm::Communicator& dp() { return groups_->host(group::dp_cp); }
  comm::Communicator& device_dp() { return (*groups_)[group::dp_cp]; }
  StepScalars& scalars() { return scalars_; }
  /// Sum of log-probabilities of an evaluation, (1) f64.
  const Tensor& evaluation() const { return evaluation_; }
  const data::TokenDataset& train_data() const { return *train_.dataset; }
  const data::TokenDataset* validation_data() const { return validation_.get(); }
  Position& position() { return position_; }
  int64_t max_steps() const { return train_.max_steps; }
  int64_t validation_batches() const { return validation_batches_; }
  /// Peak of matrix products in FLOP/s, the denominator of MFU; 0: unknown.
  double peak() const { return peak_; }
  /// What the run computes on, for people.
  std::string describe_device() const;
  /// Who does attention, and why not the library if it does not; empty on a CPU.
  const std::string& attention() const { return attention_; }
  /// Kernels that the model and recipe need, all of which the device has.
  int kernels_needed() const { return kernels_needed_; }
  const std::string& resumed_from() const { return resumed_from_; }
  const std::vector<std::string>& warnings() const { return warnings_; }
  const FlatState& flat() const { return flat_; }
  /// Every parameter's weights, where the ops have them; indexed like ParameterList::all.
  std::vector<Tensor> weights() const { return state_of(flat_).weights; }
  /// CPU threads of this rank.
  int host_threads() const { return host_threads_; }
  /// What differs from the run that saved the checkpoint resumed from, one line each.
  const std::vector<std::string>& changes() const { return changes_; }
  /// Shows other hosts that the run lives; call about every 10 seconds.
  void heartbeat() const {
    if (locks_) locks_->heartbeat();
  }

  /// Collective. Returns the path.
  std::string save();

 private:
  void open_data();
  void open_device();
  std::string describe_attention();
  std::optional<DeviceGroups> device_groups();
  void make_initial_weights(const TrainState& state) const;
  void allocate();
  void lock_directories();
  void initialize();
  void start_from_initial_weights();
  void resume_from(const std::string& path);
  /// Fits position and data to a checkpoint of a run with another batch or length.
  void restore_position(const Position& saved);
  RankGroup rank_group();
  /// The state that checkpoints hold, in the memory of `flat`.
  TrainState state_of(const FlatState& flat) const;
  enum class HostState : uint8_t {
    saved,    ///< everything, as it is on the device
    loaded,   ///< everything, brought to the device afterwards
    weights,  ///< weights only, brought to the device afterwards
  };
  /// Calls work(state) with the state in host memory: itself on a CPU, else a copy.
  void with_host_state(HostState what, const std::function<void(const TrainState&)>& work);

  comm::World& world_;
  ConfigResult config_;
  std::function<void(std::string)> phase_;
  Accelerator accelerator_;  // outlives everything that uses the device
  std::unique_ptr<plan::RunPlan> plan_;
  TrainData train_;
  std::unique_ptr<data::TokenDataset> validation_;
  std::unique_ptr<RunLocks> locks_;  // rank 0
  memory::Arenas arenas_;
  std::unique_ptr<Groups> groups_;
  ops::Exec exec_;
  FlatState flat_;
  Tensor evaluation_;
  StepScalars scalars_;
  std::unique_ptr<GradReducer> reducer_;
  std::unique_ptr<Optimizer> optimizer_;
  Position position_;
  std::string resumed_from_;
  std::vector<std::string> warnings_, changes_;
  RunRecord record_;
  HfFiles hf_files_;
  int64_t validation_batches_ = 0;
  double peak_ = 0;
  cpu::Isa isa_ = cpu::Isa::baseline;
  DeviceType device_ = DeviceType::cpu;
  int host_threads_ = 1, device_ordinal_ = 0, devices_ = 0;
  std::string device_why_, comm_why_, attention_;
  int kernels_needed_ = 0;
};

}  // namespace nrl::train
