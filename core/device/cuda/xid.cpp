#include "core/device/cuda/xid.h"

#include <algorithm>
#include <iterator>

namespace nrl::cuda {
namespace {

struct Entry {
  int xid;
  Recovery recovery;
  const char* meaning;
};

constexpr Entry entries[] = {
    {13, Recovery::restart_run, "an exception in a kernel"},
    {31, Recovery::restart_run, "a kernel used an address that is not its own"},
    {46, Recovery::reset_gpu, "it has stopped processing"},
    {48, Recovery::reset_gpu, "an uncorrectable memory error"},
    {61, Recovery::reset_gpu, "its micro-controller has stopped"},
    {62, Recovery::reset_gpu, "its micro-controller has halted"},
    {63, Recovery::none, "a row of memory is remapped at the next reset"},
    {64, Recovery::reset_gpu, "a row of memory cannot be remapped"},
    {74, Recovery::reset_gpu, "an NVLink error"},
    {79, Recovery::restart_node, "it has fallen off the bus"},
    {92, Recovery::none, "many memory errors that were corrected"},
    {94, Recovery::restart_run, "an uncorrectable memory error, contained in one process"},
    {95, Recovery::reset_gpu, "an uncorrectable memory error that is not contained"},
    {109, Recovery::reset_gpu, "a context switch does not end"},
    {110, Recovery::reset_gpu, "a security fault"},
    {119, Recovery::reset_gpu, "its system processor does not answer"},
    {120, Recovery::reset_gpu, "an error of its system processor"},
    {140, Recovery::reset_gpu, "an uncorrectable memory error"},
};

const Entry* find(int xid) {
  const auto at =
      std::find_if(std::begin(entries), std::end(entries), [&](const Entry& e) { return e.xid == xid; });
  return at == std::end(entries) ? nullptr : &*at;
}

}  // namespace

Recovery recovery_of(int xid) {
  const Entry* entry = find(xid);
  return entry ? entry->recovery : Recovery::none;
}

std::string describe_xid(int xid) {
  std::string text = "Xid " + std::to_string(xid);
  if (const Entry* entry = find(xid)) text += std::string(" (") + entry->meaning + ")";
  switch (recovery_of(xid)) {
    case Recovery::none:
      return text;
    case Recovery::restart_run:
      return text + ": start the run again";
    case Recovery::reset_gpu:
      return text + ": reset the GPU";
    case Recovery::restart_node:
      return text + ": restart the node";
  }
  return text;
}

}  // namespace nrl::cuda
