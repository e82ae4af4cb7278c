#include "apps/profile/chrome.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "apps/profile/chrome_writer.h"
#include "apps/profile/slices.h"
#include "core/base/error.h"
#include "core/io/json.h"

namespace nrl::profile {
namespace {

constexpr int device = 0, stream_of_compute = 7;  // as PyTorch's default stream
constexpr int first_stream_of_groups = 20, issuing_thread = 999;

bool is_kernel(const trace::Event& event) {
  return event.kind == trace::Kind::op;
}

class ChromeTrace {
 public:
  ChromeTrace(const std::string& path, const Recorded& recorded, int world)
      // Holistic Trace Analysis searches the text for "rank": with the blank.
      : out_(path,
             fmt::format("\"schemaVersion\": 1,\n\"distributedInfo\": {{\"rank\": {}, \"world_size\": {}, "
                         "\"backend\": \"nccl\"}},\n\"deviceProperties\": [{{\"id\": {}, \"name\": {}}}],\n"
                         "\"displayTimeUnit\": \"ms\",\n",
                         recorded.rank, world, device, JsonValue(recorded.device).dump())),
        recorded_(recorded) {}

  void write() {
    name("process_name", process(), 0,
         fmt::format("rank {} {} {}", recorded_.rank, recorded_.host, recorded_.device));
    name("process_labels", device, 0, "GPU 0");
    threads();
    kernels();
    messages();
    out_.commit();
  }

 private:
  // Numbers of processes of the host must differ from the number of the device.
  int process() const { return recorded_.rank + 1; }

  void name(std::string_view what, int pid, int tid, std::string_view value) {
    out_.name(what, pid, tid, value);
  }

  // `arguments`: members of "args".
  void event(std::string_view category, std::string_view event_name, int pid, int tid, const Slice& slice,
             std::string_view arguments) {
    const int64_t zero = recorded_.window.begin;
    out_.slice(category, event_name, pid, tid, slice.begin - zero, slice.end - zero, arguments);
  }

  // A kernel, and the call that launched it at `launched`, from a range of the thread until `until`.
  void kernel(std::string_view kernel_name, int stream, const Slice& slice, int thread, int64_t launched,
              int64_t until, std::string_view arguments) {
    const int64_t correlation = ++correlation_;
    event("cuda_runtime", "cudaLaunchKernel", process(), thread,
          {launched, std::clamp(launched + 1000, launched, std::max(launched, until))},
          fmt::format(R"("correlation": {})", correlation));
    event("kernel", kernel_name, device, stream, slice,
          fmt::format(R"("stream": {}, "device": {}, "correlation": {}{}{})", stream, device, correlation,
                      arguments.empty() ? "" : ", ", arguments));
  }

  // The ranges of threads.
  void threads() {
    const auto& events = recorded_.window.events;
    std::vector<std::vector<Slice>> rows(recorded_.window.rows.size());
    for (uint32_t i = 0; i < events.size(); ++i) {
      NRL_CHECK(events[i].row < rows.size(), "row {} of {}", events[i].row, rows.size());
      rows[events[i].row].push_back({events[i].begin, events[i].end, i});
    }
    for (uint32_t row = 0; row < rows.size(); ++row) {
      if (recorded_.window.rows[row].starts_with("device")) continue;
      name("thread_name", process(), static_cast<int>(row), recorded_.window.rows[row]);
      for (const Slice& slice : nested(std::move(rows[row]))) {
        const trace::Event& e = events[slice.source];
        event(is_kernel(e) ? "cpu_op" : "user_annotation",
              e.kind == trace::Kind::step ? fmt::format("ProfilerStep#{}", e.tag.step) : e.name, process(),
              static_cast<int>(row), slice, "");
      }
    }
  }

  // The operations of the compute row.
  void kernels() {
    const auto& events = recorded_.window.events;
    std::unordered_map<uint32_t, const trace::Event*> launches;  // by call
    std::vector<Slice> slices;
    for (uint32_t i = 0; i < events.size(); ++i) {
      if (!is_kernel(events[i])) continue;
      if (events[i].row == recorded_.compute_row)
        slices.push_back({events[i].begin, events[i].end, i});
      else if (events[i].call != trace::no_call)
        launches.try_emplace(events[i].call, &events[i]);
    }
    name("thread_name", device, stream_of_compute, fmt::format("stream {}", stream_of_compute));
    for (const Slice& slice : nested(std::move(slices))) {
      const trace::Event& e = events[slice.source];
      const auto launch = launches.find(e.call);
      const trace::Event& host = launch == launches.end() ? e : *launch->second;
      std::string arguments;
      if (e.call < recorded_.costs.size())
        arguments = fmt::format(R"("flops": {:.0f}, "bytes": {:.0f})", recorded_.costs[e.call].flops,
                                recorded_.costs[e.call].bytes());
      kernel(e.name, stream_of_compute, slice, recorded_.on_device && &host == &e ? issuing_thread : host.row,
             host.begin, host.end, arguments);
    }
  }

  void messages() {
    std::vector<std::vector<Slice>> groups(recorded_.groups.size());
    for (uint32_t i = 0; i < recorded_.messages.size(); ++i) {
      const comm::LogEntry& entry = recorded_.messages[i];
      NRL_CHECK(entry.group < groups.size(), "group {} of {}", entry.group, groups.size());
      groups[entry.group].push_back(
          {entry.started_ns ? entry.started_ns : entry.enqueued_ns, entry.ended_ns, i});
    }
    if (!recorded_.messages.empty()) name("thread_name", process(), issuing_thread, "calls of communication");
    int stream = first_stream_of_groups;
    for (uint32_t group = 0; group < groups.size(); ++group)
      for (const auto& lane : lanes_of(std::move(groups[group]))) {
        name("thread_name", device, stream, recorded_.groups[group].label);
        for (const Slice& slice : lane) {
          const comm::LogEntry& entry = recorded_.messages[slice.source];
          kernel(fmt::format("nccl:{}", comm::name_of(entry.op)), stream, slice, issuing_thread,
                 entry.enqueued_ns, slice.begin,
                 fmt::format(R"("bytes": {}, "Process Group Name": {})", entry.bytes,
                             out_.quoted(recorded_.groups[group].label)));
        }
        ++stream;
      }
  }

  ChromeWriter out_;
  const Recorded& recorded_;
  int64_t correlation_ = 0;
};

}  // namespace

void write_chrome_trace(const std::string& path, const Recorded& recorded, int world) {
  ChromeTrace(path, recorded, world).write();
}

}  // namespace nrl::profile
