#include "apps/profile/perfetto.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <string_view>
#include <vector>

#include <protozero/pbf_writer.hpp>
#include <spdlog/fmt/fmt.h>
#include <zlib.h>

#include "apps/plan/parts.h"
#include "apps/profile/lifetimes.h"
#include "apps/profile/slices.h"
#include "core/base/error.h"
#include "core/io/atomic_file.h"
#include "memory/plan.h"

namespace nrl::profile {
namespace {

// Field numbers of the messages of Perfetto.
namespace field {
enum Trace { packet = 1 };
enum Packet {
  timestamp = 8,
  sequence = 10,
  track_event = 11,
  interned_data = 12,
  sequence_flags = 13,
  compressed_packets = 50,
  track_descriptor = 60
};
enum Event {
  categories = 3,  // by identifier
  annotation = 4,
  type = 9,
  name = 10,  // by identifier
  track = 11,
  counter_value = 30,
  flow = 47,
  ending_flow = 48
};
enum Annotation { annotation_name = 1, uint_value = 3, double_value = 5 };
enum Interned { category_names = 1, event_names = 2, annotation_names = 3 };
enum Entry { entry_id = 1, entry_name = 2 };
enum Descriptor { uuid = 1, track_name = 2, process = 3, thread = 4, parent = 5, counter = 8 };
enum Process { pid = 1, process_name = 6 };
enum Thread { thread_pid = 1, thread_id = 2, thread_name = 5 };
enum Counter { unit = 3 };
}  // namespace field

enum EventType : int32_t { slice_begin = 1, slice_end = 2, count = 4 };
constexpr uint32_t state_cleared = 1, needs_state = 2;  // sequence_flags
constexpr int32_t unit_bytes = 3;

enum class Note : uint8_t {
  flops,
  bytes,
  attainable_percent,
  layer,
  microbatch,
  queued_us,
  late_us,
  exposed_us,
  clock_error_us,
};
constexpr std::array<std::string_view, 9> note_names{"flops",   "bytes",      "attainable_percent",
                                                     "layer",   "microbatch", "queued_us",
                                                     "late_us", "exposed_us", "clock_error_us"};
constexpr std::array<std::string_view, 12> kind_names{"step",      "phase",         "layer",  "op",
                                                      "recompute", "communication", "wait",   "message",
                                                      "copy",      "data",          "report", "other"};
constexpr uint32_t category_of_messages = static_cast<uint32_t>(trace::Kind::communication);

// --- The file: packets, compressed in blocks.

class TraceFile {
 public:
  explicit TraceFile(const std::string& path) : file_(path) {}

  // Adds a packet that `fill` writes.
  template <class Fill>
  void packet(Fill&& fill) {
    {
      protozero::pbf_writer trace(block_);
      protozero::pbf_writer packet(trace, field::packet);
      fill(packet);
    }
    if (block_.size() >= block_bytes) flush();
  }
  void commit() {
    flush();
    file_.commit();
  }

 private:
  static constexpr size_t block_bytes = size_t{256} << 10;

  void flush() {
    if (block_.empty()) return;
    uLongf bytes = compressBound(block_.size());
    compressed_.resize(bytes);
    const int status = compress2(reinterpret_cast<Bytef*>(compressed_.data()), &bytes,
                                 reinterpret_cast<const Bytef*>(block_.data()), block_.size(), 1);
    NRL_CHECK(status == Z_OK, "deflate: {}", status);
    compressed_.resize(bytes);
    block_.clear();
    {
      protozero::pbf_writer trace(block_);
      protozero::pbf_writer packet(trace, field::packet);
      packet.add_bytes(field::compressed_packets, compressed_);
    }
    file_.write(block_);
    block_.clear();
  }

  AtomicFile file_;
  std::string block_, compressed_;
};

// --- Flows

// From a collective of a larger group, most would lead to ranks that are not in the trace.
constexpr size_t most_arrows = 64;

// FNV-1a: the same number on all ranks.
uint64_t flow_number(std::string_view text) {
  uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

struct Flows {
  std::vector<uint64_t> from_begin, to_end;  // that start at the begin of a slice, or arrive at its end
};

// By index of recorded.messages.
std::vector<Flows> flows_of(const Recorded& recorded) {
  std::vector<Flows> flows(recorded.messages.size());
  for (size_t i = 0; i < flows.size(); ++i) {
    const comm::LogEntry& entry = recorded.messages[i];
    const auto& [name, label, ranks, nodes, members] = recorded.groups[entry.group];
    if (entry.op == comm::Op::send || entry.op == comm::Op::recv) {
      if (entry.message < 0 || entry.peer < 0 || static_cast<size_t>(entry.peer) >= members.size()) continue;
      const bool sends = entry.op == comm::Op::send;
      const int here = recorded.rank, there = members[entry.peer];
      const uint64_t id = flow_number(fmt::format("{} {}>{} {} {}", label, sends ? here : there,
                                                  sends ? there : here, entry.lane, entry.message));
      (sends ? flows[i].from_begin : flows[i].to_end).push_back(id);
    } else if (i < recorded.last_arrival.size() && recorded.last_arrival[i] > 0) {
      const auto id_of = [&](int rank) {
        return flow_number(fmt::format("{} #{} {}", label, entry.seq, rank));
      };
      if (entry.enqueued_ns < recorded.last_arrival[i]) {
        flows[i].to_end.push_back(id_of(recorded.rank));
      } else if (members.size() <= most_arrows) {
        for (const int rank : members)
          if (rank != recorded.rank) flows[i].from_begin.push_back(id_of(rank));
      }
    }
  }
  return flows;
}

// --- One rank

class RankTrace {
 public:
  RankTrace(const std::string& path, const Recorded& recorded)
      : file_(path), recorded_(recorded), flows_(flows_of(recorded)) {}

  void write() {
    collect_ranges();
    collect_messages();
    collect_memory();
    intern();
    describe();
    // Times of a track ascend already, and equal ones have a meaning.
    std::stable_sort(marks_.begin(), marks_.end(),
                     [](const Mark& a, const Mark& b) { return a.time < b.time; });
    for (const Mark& mark : marks_) emit(mark);
    file_.commit();
  }

 private:
  enum class Shows : uint8_t { range, message, bytes };
  struct Track {
    std::string name;
    Shows shows;
    uint32_t thread;  // its number; 0: not a thread
  };
  struct Mark {
    int64_t time;
    uint32_t track, source;  // index of the event, the message or the count
    bool begin;
  };

  void add_track(std::string name, Shows shows, uint32_t thread, std::span<const Slice> slices) {
    const auto track = static_cast<uint32_t>(tracks_.size());
    tracks_.push_back({std::move(name), shows, thread});
    for (const Edge& edge : edges_of(slices))
      marks_.push_back({edge.time, track, slices[edge.index].source, edge.begin});
  }

  void collect_ranges() {
    const trace::Window& window = recorded_.window;
    std::vector<std::vector<Slice>> rows(window.rows.size());
    for (uint32_t i = 0; i < window.events.size(); ++i) {
      const trace::Event& event = window.events[i];
      NRL_CHECK(event.row < rows.size(), "row {} of {}", event.row, rows.size());
      rows[event.row].push_back({event.begin, event.end, i});
    }
    for (uint32_t row = 0; row < rows.size(); ++row)
      add_track(window.rows[row], Shows::range, window.rows[row].starts_with("device") ? 0 : row + 1,
                nested(std::move(rows[row])));
  }

  void collect_messages() {
    std::vector<std::vector<Slice>> groups(recorded_.groups.size());
    for (uint32_t i = 0; i < recorded_.messages.size(); ++i) {
      const comm::LogEntry& entry = recorded_.messages[i];
      NRL_CHECK(entry.group < groups.size(), "group {} of {}", entry.group, groups.size());
      groups[entry.group].push_back({begin_of(entry), entry.ended_ns, i});
    }
    for (uint32_t group = 0; group < groups.size(); ++group)
      for (const auto& lane : lanes_of(std::move(groups[group])))
        add_track(recorded_.groups[group].label, Shows::message, 0, lane);
  }

  // Live bytes by category, over all steps.
  void collect_memory() {
    std::array<std::map<int64_t, int64_t>, memory::category_count> changes;  // by time
    for (int64_t step = recorded_.first_step;
         !recorded_.buffers.empty() && step < recorded_.first_step + std::ssize(recorded_.step_begins) - 1;
         ++step)
      for (const LiveRange& range : live_ranges(recorded_, step)) {
        const auto& buffer = recorded_.buffers[range.buffer];
        auto& of_category = changes[static_cast<size_t>(buffer.category)];
        of_category[range.begin] += buffer.bytes;
        of_category[range.end] -= buffer.bytes;
      }
    for (size_t c = 0; c < changes.size(); ++c) {
      if (changes[c].empty()) continue;
      const auto track = static_cast<uint32_t>(tracks_.size());
      tracks_.push_back(
          {fmt::format("memory: {}", memory::name_of(static_cast<memory::Category>(c))), Shows::bytes, 0});
      int64_t bytes = 0;
      for (const auto& [time, change] : changes[c]) {
        if (change == 0) continue;
        bytes += change;
        marks_.push_back({time, track, static_cast<uint32_t>(counts_.size()), false});
        counts_.push_back(bytes);
      }
    }
  }

  static int64_t begin_of(const comm::LogEntry& entry) {
    return entry.started_ns ? entry.started_ns : entry.enqueued_ns;
  }

  std::string_view name_of(const Track& track, uint32_t source) const {
    return track.shows == Shows::range ? std::string_view(recorded_.window.events[source].name)
                                       : comm::name_of(recorded_.messages[source].op);
  }

  // All names, in the first packet of the rank's sequence.
  void intern() {
    for (const Mark& mark : marks_) {
      if (!mark.begin) continue;
      const std::string_view name = name_of(tracks_[mark.track], mark.source);
      if (names_.find(name) == names_.end()) names_.emplace(name, names_.size() + 1);
    }
    packet(state_cleared | needs_state, [&](protozero::pbf_writer& packet) {
      protozero::pbf_writer interned(packet, field::interned_data);
      const auto entry = [&](field::Interned list, uint64_t id, std::string_view name) {
        protozero::pbf_writer entry(interned, list);
        entry.add_uint64(field::entry_id, id);
        entry.add_string(field::entry_name, name.data(), name.size());
      };
      for (size_t i = 0; i < kind_names.size(); ++i) entry(field::category_names, i + 1, kind_names[i]);
      for (const auto& [name, id] : names_) entry(field::event_names, id, name);
      for (size_t i = 0; i < note_names.size(); ++i) entry(field::annotation_names, i + 1, note_names[i]);
    });
  }

  // The descriptors of the process and of its tracks.
  void describe() {
    descriptor(0, [&](protozero::pbf_writer& d) {
      protozero::pbf_writer process(d, field::process);
      process.add_int32(field::pid, process_id());
      process.add_string(field::process_name,
                         fmt::format("rank {} {} {}", recorded_.rank, recorded_.host, recorded_.device));
    });
    for (uint32_t t = 0; t < tracks_.size(); ++t)
      descriptor(t + 1, [&, &track = tracks_[t]](protozero::pbf_writer& d) {
        if (!track.thread) {
          d.add_uint64(field::parent, uuid_of(0));
          d.add_string(field::track_name, track.name);
          if (track.shows == Shows::bytes)
            protozero::pbf_writer(d, field::counter).add_int32(field::unit, unit_bytes);
          return;
        }
        protozero::pbf_writer thread(d, field::thread);
        thread.add_int32(field::thread_pid, process_id());
        // The main thread has the number of the process. Numbers of threads must be unique among ranks, too.
        thread.add_int32(field::thread_id, track.thread == 1
                                               ? process_id()
                                               : process_id() << 12 | static_cast<int32_t>(track.thread));
        thread.add_string(field::thread_name, track.name);
      });
  }

  void emit(const Mark& mark) {
    const Track& track = tracks_[mark.track];
    packet(needs_state, [&](protozero::pbf_writer& packet) {
      packet.add_uint64(field::timestamp, static_cast<uint64_t>(mark.time));
      protozero::pbf_writer event(packet, field::track_event);
      event.add_uint64(field::track, uuid_of(mark.track + 1));
      if (track.shows == Shows::bytes) {
        event.add_int32(field::type, count);
        event.add_int64(field::counter_value, counts_[mark.source]);
        return;
      }
      event.add_int32(field::type, mark.begin ? slice_begin : slice_end);
      if (track.shows == Shows::message) {
        const Flows& flows = flows_[mark.source];
        if (mark.begin)
          for (const uint64_t id : flows.from_begin) event.add_fixed64(field::flow, id);
        else
          for (const uint64_t id : flows.to_end) event.add_fixed64(field::ending_flow, id);
      }
      if (!mark.begin) return;
      event.add_uint64(field::name, names_.find(name_of(track, mark.source))->second);
      if (track.shows == Shows::range)
        annotate(event, recorded_.window.events[mark.source]);
      else
        annotate(event, mark.source, recorded_.messages[mark.source]);
    });
  }

  void annotate(protozero::pbf_writer& out, const trace::Event& event) const {
    out.add_uint64(field::categories, static_cast<uint64_t>(event.kind) + 1);
    if (event.call < recorded_.costs.size()) {
      const ops::Cost& cost = recorded_.costs[event.call];
      if (cost.flops > 0) note(out, Note::flops, static_cast<uint64_t>(cost.flops));
      note(out, Note::bytes, static_cast<uint64_t>(cost.bytes()));
      const double attainable = plan::attainable(cost, recorded_.peaks).seconds();
      if (attainable > 0 && event.end > event.begin)
        note(out, Note::attainable_percent,
             static_cast<uint64_t>(attainable / static_cast<double>(event.end - event.begin) * 1e11 + 0.5));
    }
    if (event.kind == trace::Kind::layer) {
      if (event.tag.layer >= 0) note(out, Note::layer, static_cast<uint64_t>(event.tag.layer));
      if (event.tag.microbatch >= 0) note(out, Note::microbatch, static_cast<uint64_t>(event.tag.microbatch));
    }
    if (event.kind == trace::Kind::step && recorded_.clock_error > 0)
      note(out, Note::clock_error_us, recorded_.clock_error * 1e6);
  }

  void annotate(protozero::pbf_writer& out, uint32_t index, const comm::LogEntry& entry) const {
    out.add_uint64(field::categories, category_of_messages + 1);
    note(out, Note::bytes, static_cast<uint64_t>(entry.bytes));
    const auto microseconds = [&](Note name, int64_t ns) {
      if (ns > 0) note(out, name, static_cast<double>(ns) * 1e-3);
    };
    microseconds(Note::queued_us, begin_of(entry) - entry.enqueued_ns);
    microseconds(Note::exposed_us, entry.exposed_ns);
    if (index < recorded_.last_arrival.size() && recorded_.last_arrival[index] > 0)
      microseconds(Note::late_us, recorded_.last_arrival[index] - entry.enqueued_ns);
  }

  static void note(protozero::pbf_writer& event, Note name, uint64_t value) {
    protozero::pbf_writer annotation(event, field::annotation);
    annotation.add_uint64(field::annotation_name, static_cast<uint64_t>(name) + 1);
    annotation.add_uint64(field::uint_value, value);
  }
  static void note(protozero::pbf_writer& event, Note name, double value) {
    protozero::pbf_writer annotation(event, field::annotation);
    annotation.add_uint64(field::annotation_name, static_cast<uint64_t>(name) + 1);
    annotation.add_double(field::double_value, value);
  }

  // Viewers keep process 0 for the idle one.
  int32_t process_id() const { return recorded_.rank + 1; }
  // Unique among all ranks. Index 0 is the process.
  uint64_t uuid_of(uint32_t index) const { return static_cast<uint64_t>(process_id()) << 20 | index; }

  template <class Fill>
  void packet(uint32_t flags, Fill&& fill) {
    file_.packet([&](protozero::pbf_writer& packet) {
      packet.add_uint32(field::sequence, static_cast<uint32_t>(process_id()));
      packet.add_uint32(field::sequence_flags, flags);
      fill(packet);
    });
  }
  template <class Fill>
  void descriptor(uint32_t index, Fill&& fill) {
    packet(needs_state, [&](protozero::pbf_writer& packet) {
      protozero::pbf_writer d(packet, field::track_descriptor);
      d.add_uint64(field::uuid, uuid_of(index));
      fill(d);
    });
  }

  TraceFile file_;
  const Recorded& recorded_;
  std::vector<Flows> flows_;  // by message
  std::vector<Track> tracks_;
  std::vector<Mark> marks_;
  std::vector<int64_t> counts_;
  std::map<std::string, uint64_t, std::less<>> names_;  // to identifiers, from 1
};

}  // namespace

void write_trace(const std::string& path, const Recorded& recorded) {
  RankTrace(path, recorded).write();
}

size_t join_traces(const std::string& path, std::span<const std::string> traces, uint64_t most_bytes) {
  AtomicFile out(path);
  std::string piece;
  size_t joined = 0;
  for (uint64_t sum = 0; joined < traces.size(); ++joined) {
    const File in = File::open_read(traces[joined]);
    const uint64_t size = in.size();
    if (size > most_bytes - sum) break;
    for (uint64_t at = 0; at < size; at += piece.size()) {
      piece.resize(std::min<uint64_t>(size - at, uint64_t{1} << 20));
      in.pread_all(piece.data(), piece.size(), at);
      out.write(piece);
    }
    sum += size;
  }
  out.commit();
  return joined;
}

}  // namespace nrl::profile
