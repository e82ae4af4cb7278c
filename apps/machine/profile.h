#pragma once
// Measured rates of a device and its links, over the facts that device_models.h has: a JSON file that
// `nrl-train bench calibrate` writes and `nrl-train plan --profile` reads. The same file describes hardware
// that the tables do not know: every fact of a DeviceModel may replace one of the nearest device.

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/machine/device_models.h"
#include "apps/machine/fabric.h"
#include "core/io/json.h"
#include "core/ops/cost.h"

namespace nrl::machine {

/// The properties of a call that its time depends on. Calls with equal keys are timed once.
struct CallKey {
  std::string op;
  DType operands = DType::f32;
  std::array<int64_t, 3> gemm{};  ///< as in ops::Cost
  int64_t bytes = 0;              ///< moved: operands, scratch and epilogue
  int64_t head_dim = 0, keys = 0;
  bool backward = false, tf32 = false;

  auto operator<=>(const CallKey&) const = default;
};
CallKey key_of(const ops::Call& call);
/// A cost with this key: all bytes count as operands.
ops::Cost cost_of(const CallKey& key, ops::Work work, double flops, bool library);

/// Between rounds; calls with a wider interquartile range, relative to their time, are unsteady.
inline constexpr double unsteady_call = 0.10;

struct MeasuredCall {
  CallKey key;
  /// As in ops::Cost, for the time that the model expects.
  ops::Work work = ops::Work::memory;
  double flops = 0;
  bool library = false;
  double seconds = 0;  ///< median of the rounds
  int rounds = 1;
  double iqr = 0;  ///< seconds between the first and the third quartile

  bool unsteady() const { return iqr > unsteady_call * seconds; }
  bool operator==(const MeasuredCall&) const = default;
};

/// An op beside an operation of a group: seconds together over seconds alone.
struct MeasuredOverlap {
  std::string op;
  ops::Work work = ops::Work::gemm;  ///< of the op
  comm::Op comm = comm::Op::all_reduce;
  double slowdown = 1;       ///< of the op
  double comm_slowdown = 1;  ///< of the operation

  bool operator==(const MeasuredOverlap&) const = default;
};

/// Every part but the base is optional.
struct Profile {
  std::string base;  ///< a name of device_model_names(), or "cpu"
  /// Facts over the base's, by their names in the file ("memory", "copy", ...).
  std::map<std::string, double> facts;
  std::string driver, build, date;  ///< date: ISO 8601; orders files of a merge
  std::vector<double> clocks_mhz;   ///< samples while it was measured
  double power_w = 0;               ///< mean while it was measured
  std::vector<MeasuredCall> calls;
  std::vector<MeasuredOperation> links;
  std::vector<MeasuredOverlap> overlap;
  std::optional<double> host_gap_s;  ///< between two kernels
  std::optional<double> spread;      ///< relative standard deviation of the ranks' step times

  bool operator==(const Profile&) const = default;

  /// `of`: the base's model, on a CPU measured or assumed by the caller.
  DeviceModel device(const DeviceModel& of) const;
};

/// The reason why a clock was not steady while it was sampled: a sample is more than 15 % away from the
/// median. Empty: it was. A GPU that has just woken is faster than after a minute under load.
std::string unsteady_clocks(const std::vector<double>& clocks_mhz);

/// Checks everything: Exit::data with file:line:column and the name of the field for unknown devices, fields
/// and operations, numbers that are not positive and finite, and clocks that strayed by 15 % from their
/// median while it was measured.
Profile parse_profile(std::string_view text, std::string_view source);
Profile read_profile(const std::string& path);
/// Numbers with six digits: files are compared line by line.
std::string to_json(const Profile& profile);
/// One profile of several of the same base: where they disagree, the newest counts. Exit::data if the bases
/// differ.
Profile merged(std::vector<Profile> profiles);

}  // namespace nrl::machine
