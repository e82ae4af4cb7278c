#include "apps/profile/perfetto.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <protozero/pbf_reader.hpp>
#include <zlib.h>

#include "apps/profile/slices.h"
#include "core/io/atomic_file.h"
#include "core/io/scratch_directory.h"
#include "tests/catch.h"
#include "tests/profile/sample_recording.h"

namespace nrl::profile {
namespace {

// An event as a viewer sees it.
struct Seen {
  uint64_t time = 0, track = 0;
  uint32_t sequence = 0;
  int type = 0;
  int64_t value = 0;
  std::string name;
  std::map<std::string, double> notes;
  std::vector<uint64_t> flows, ending_flows;
};

struct Names {
  std::map<uint64_t, std::string> events, notes;
};

struct Trace {
  std::vector<Seen> events;
  std::map<uint64_t, std::string> tracks;
  std::map<uint64_t, uint64_t> parents;
  std::map<uint32_t, Names> names;  // by sequence
  size_t packets = 0;

  void read(protozero::data_view data) {
    protozero::pbf_reader trace(data);
    while (trace.next(1)) read_packet(trace.get_view());
  }

  void read_packet(protozero::data_view data) {
    protozero::pbf_reader packet(data);
    Seen seen;
    protozero::data_view event, interned;
    uint32_t flags = 0;
    while (packet.next()) switch (packet.tag()) {
        case 8:
          seen.time = packet.get_uint64();
          break;
        case 10:
          seen.sequence = packet.get_uint32();
          break;
        case 11:
          event = packet.get_view();
          break;
        case 12:
          interned = packet.get_view();
          break;
        case 13:
          flags = packet.get_uint32();
          break;
        case 50:
          return inflate(packet.get_view());
        case 60:
          read_track(packet.get_view());
          break;
        default:
          FAIL("packet with field " << packet.tag());
      }
    ++packets;
    REQUIRE(seen.sequence != 0);
    if (flags & 1) names[seen.sequence] = {};
    if (interned.data()) intern(names[seen.sequence], interned);
    if (!event.data()) return;
    CHECK((flags & 2) != 0);
    read_event(event, names.at(seen.sequence), seen);
    events.push_back(seen);
  }

  void inflate(protozero::data_view data) {
    std::string plain(size_t{1} << 20, '\0');
    uLongf bytes = plain.size();
    REQUIRE(uncompress(reinterpret_cast<Bytef*>(plain.data()), &bytes,
                       reinterpret_cast<const Bytef*>(data.data()), data.size()) == Z_OK);
    read({plain.data(), bytes});
  }

  static void intern(Names& names, protozero::data_view data) {
    protozero::pbf_reader interned(data);
    while (interned.next()) {
      const auto list = interned.tag();
      protozero::pbf_reader entry = interned.get_message();
      uint64_t id = 0;
      std::string name;
      while (entry.next()) {
        if (entry.tag() == 1)
          id = entry.get_uint64();
        else
          name = entry.get_string();
      }
      if (list == 2) names.events[id] = name;
      if (list == 3) names.notes[id] = name;
    }
  }

  static void read_event(protozero::data_view data, const Names& names, Seen& seen) {
    protozero::pbf_reader event(data);
    while (event.next()) switch (event.tag()) {
        case 4: {
          protozero::pbf_reader note = event.get_message();
          std::string name;
          double value = 0;
          while (note.next()) {
            if (note.tag() == 1)
              name = names.notes.at(note.get_uint64());
            else if (note.tag() == 3)
              value = static_cast<double>(note.get_uint64());
            else
              value = note.get_double();
          }
          seen.notes[name] = value;
          break;
        }
        case 9:
          seen.type = event.get_int32();
          break;
        case 10:
          seen.name = names.events.at(event.get_uint64());
          break;
        case 11:
          seen.track = event.get_uint64();
          break;
        case 30:
          seen.value = event.get_int64();
          break;
        case 47:
          seen.flows.push_back(event.get_fixed64());
          break;
        case 48:
          seen.ending_flows.push_back(event.get_fixed64());
          break;
        default:
          event.skip();
      }
  }

  void read_track(protozero::data_view data) {
    protozero::pbf_reader descriptor(data);
    uint64_t id = 0, parent = 0;
    std::string name;
    while (descriptor.next()) switch (descriptor.tag()) {
        case 1:
          id = descriptor.get_uint64();
          break;
        case 2:
          name = descriptor.get_string();
          break;
        case 3:
        case 4: {
          const int field = descriptor.tag() == 3 ? 6 : 5;
          protozero::pbf_reader inner = descriptor.get_message();
          while (inner.next()) {
            if (static_cast<int>(inner.tag()) == field)
              name = inner.get_string();
            else
              inner.skip();
          }
          break;
        }
        case 5:
          parent = descriptor.get_uint64();
          break;
        default:
          descriptor.skip();
      }
    CHECK(tracks.try_emplace(id, name).second);
    parents[id] = parent;
  }

  // Begins and ends pair on every track, and times ascend in every sequence.
  size_t balanced_slices() const {
    std::map<uint64_t, int> depth;
    std::map<uint32_t, uint64_t> last;
    size_t slices = 0;
    for (const Seen& e : events) {
      CHECK(tracks.count(e.track) == 1);
      CHECK(e.time >= last[e.sequence]);
      last[e.sequence] = e.time;
      if (e.type == 1) ++depth[e.track], ++slices;
      if (e.type == 2) {
        --depth[e.track];
        REQUIRE(depth[e.track] >= 0);
      }
    }
    for (const auto& [track, open] : depth) CHECK(open == 0);
    return slices;
  }

  std::multiset<uint64_t> flows(bool ending) const {
    std::multiset<uint64_t> all;
    for (const Seen& e : events) {
      const auto& of_event = ending ? e.ending_flows : e.flows;
      all.insert(of_event.begin(), of_event.end());
    }
    return all;
  }
};

Trace trace_in(const std::string& path) {
  const std::string data = read_file(path, uint64_t{1} << 30);
  Trace trace;
  trace.read({data.data(), data.size()});
  return trace;
}

TEST_CASE("a Perfetto trace has every range and message of a rank") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "rank-0.pftrace");
  const Recorded recorded = sample_recording(0);
  write_trace(path, recorded);
  const Trace trace = trace_in(path);
  CHECK(trace.balanced_slices() == recorded.window.events.size() + recorded.messages.size());
  std::multiset<std::string> names;
  for (const auto& [id, name] : trace.tracks) names.insert(name);
  CHECK(names.count("rank 0 node0 cpu") == 1);
  CHECK(names.count("main") == 1);
  CHECK(names.count("dp[0,1]") == 2);  // two operations at a time
  CHECK(names.count("pp[0,1]") == 1);
  const auto gemm = std::find_if(trace.events.begin(), trace.events.end(),
                                 [](const Seen& e) { return e.name == "linear_forward"; });
  REQUIRE(gemm != trace.events.end());
  CHECK(gemm->time == static_cast<uint64_t>(recorded.window.begin + 300'000));
  CHECK(gemm->notes.at("flops") == 2e7);
  CHECK(gemm->notes.at("bytes") == 4e5);
  CHECK(gemm->notes.at("attainable_percent") == 67);  // 2e7 FLOPs at 100 GFLOP/s in 300 us
  const auto reduce = std::find_if(trace.events.begin(), trace.events.end(),
                                   [](const Seen& e) { return e.name == "all_reduce"; });
  REQUIRE(reduce != trace.events.end());
  CHECK(reduce->notes.at("bytes") == 1 << 20);
  CHECK(reduce->notes.at("queued_us") == 2);
  CHECK(reduce->notes.at("late_us") == 1000);
  std::map<std::string, std::vector<int64_t>> counts;
  for (const Seen& e : trace.events)
    if (e.type == 4) counts[trace.tracks.at(e.track)].push_back(e.value);
  constexpr int64_t mib = 1 << 20;
  CHECK(counts["memory: weights"] == std::vector<int64_t>{2 * mib, 0});
  CHECK(counts["memory: activations"] == std::vector<int64_t>{mib, 3 * mib, mib, 0, mib, 3 * mib, mib, 0,  //
                                                              mib, 3 * mib, mib, 0, mib, 3 * mib, mib, 0});
}

TEST_CASE("Perfetto traces of ranks join, and their arrows meet") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  std::vector<std::string> paths;
  uint64_t bytes = 0;
  for (const int rank : {0, 1}) {
    paths.push_back(join_path(directory.path(), "rank-" + std::to_string(rank) + ".pftrace"));
    write_trace(paths.back(), sample_recording(rank));
    bytes += File::open_read(paths.back()).size();
  }
  const std::string all = join_path(directory.path(), "all.pftrace");
  CHECK(join_traces(all, paths) == 2);
  CHECK(read_file(all, bytes) == read_file(paths[0], bytes) + read_file(paths[1], bytes));
  const Trace trace = trace_in(all);
  trace.balanced_slices();
  CHECK(trace.names.size() == 2);
  // 4 messages; 4 reductions, in which rank 1 arrived last.
  CHECK(trace.flows(false).size() == 8);
  CHECK(trace.flows(false) == trace.flows(true));
  for (const Seen& e : trace.events) {
    if (!e.flows.empty()) CHECK(e.sequence == (e.name == "send" ? 1 : 2));
    if (!e.ending_flows.empty()) CHECK(e.type == 2);
  }
  CHECK(join_traces(all, paths, bytes - 1) == 1);
  CHECK(read_file(all, bytes) == read_file(paths[0], bytes));
  CHECK(join_traces(all, {}, 0) == 0);
}

TEST_CASE("arrows lead from the last rank of a collective to all others of its group") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "rank.pftrace");
  const auto arrows = [&](std::vector<int> members) {
    Recorded recorded = sample_recording(1);  // the last one to arrive
    recorded.groups[0].members = std::move(members);
    std::erase_if(recorded.messages, [](const comm::LogEntry& e) { return e.group != 0; });
    recorded.messages.resize(1);
    recorded.last_arrival = {recorded.messages[0].enqueued_ns};
    write_trace(path, recorded);
    return trace_in(path).flows(false).size();
  };
  CHECK(arrows({1, 8, 12}) == 2);
  CHECK(arrows({}) == 0);
  CHECK(arrows(std::vector<int>(64, 2)) == 64);
  CHECK(arrows(std::vector<int>(65, 2)) == 0);
}

TEST_CASE("arrows of messages follow their numbers") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const auto numbers = [&](int rank, bool ending, auto&& change) {
    const std::string path = join_path(directory.path(), "rank.pftrace");
    Recorded recorded = sample_recording(rank);
    std::erase_if(recorded.messages, [](const comm::LogEntry& e) { return e.group != 1; });
    recorded.last_arrival.clear();
    for (comm::LogEntry& entry : recorded.messages) change(entry);
    write_trace(path, recorded);
    return trace_in(path).flows(ending);
  };
  const auto as_is = [](comm::LogEntry&) {};
  const auto sent = numbers(0, false, as_is);
  CHECK(sent.size() == 4);
  // A window may have fewer receives than sends, and another order.
  const auto reversed = numbers(1, true, [](comm::LogEntry& e) { e.message = 3 - e.message; });
  CHECK(reversed == sent);
  CHECK(numbers(1, true, [](comm::LogEntry& e) { e.message += 10; }).count(*sent.begin()) == 0);
  CHECK(numbers(1, true, [](comm::LogEntry& e) { e.lane = 1; }).count(*sent.begin()) == 0);
  CHECK(numbers(1, true, [](comm::LogEntry& e) { e.message = -1; }).empty());
}

TEST_CASE("Perfetto traces of a device show its streams") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "rank-1.pftrace");
  Recorded recorded = sample_recording(1, true);
  // Device times need not nest.
  trace::Event& last = recorded.window.events.back();
  last.end += 1;
  write_trace(path, recorded);
  const Trace trace = trace_in(path);
  CHECK(trace.balanced_slices() == recorded.window.events.size() + recorded.messages.size());
  const auto stream = std::find_if(trace.tracks.begin(), trace.tracks.end(),
                                   [](const auto& t) { return t.second == "device stream 1"; });
  REQUIRE(stream != trace.tracks.end());
  CHECK(trace.tracks.at(trace.parents.at(stream->first)) == "rank 1 node0 H100");
}

TEST_CASE("Perfetto traces take at most 35 bytes per range") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "rank-0.pftrace");
  Recorded recorded = sample_recording(0);
  // A larger window, with times that do not repeat.
  const std::vector<trace::Event> pattern = recorded.window.events;
  uint64_t random = 1;
  for (int64_t window = 1; window < 200; ++window)
    for (trace::Event event : pattern) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      event.begin += window * 20'000'000 + static_cast<int64_t>(random >> 50);
      random = random * 6364136223846793005u + 1442695040888963407u;
      event.end += window * 20'000'000 + static_cast<int64_t>(random >> 50);
      recorded.window.events.push_back(event);
    }
  write_trace(path, recorded);
  const size_t slices = trace_in(path).balanced_slices();
  const double each = static_cast<double>(File::open_read(path).size()) / static_cast<double>(slices);
  UNSCOPED_INFO(slices << " slices, " << each << " bytes each");
  CHECK(slices == recorded.window.events.size() + recorded.messages.size());
  CHECK(each <= 35);
  if (std::getenv("NRL_VERBOSE")) WARN(slices << " slices, " << each << " bytes each");
}

TEST_CASE("a trace of a rank without ranges is valid") {
  const ScratchDirectory directory(scratch_parent(), "nrl-profile-test-");
  const std::string path = join_path(directory.path(), "empty.pftrace");
  write_trace(path, {});
  const Trace trace = trace_in(path);
  CHECK(trace.events.empty());
  CHECK(trace.tracks.size() == 1);
}

TEST_CASE("ranges of a track nest or are disjoint") {
  const auto text = [](const std::vector<Slice>& slices) {
    std::string out;
    for (const Slice& s : slices)
      out += std::to_string(s.begin) + "-" + std::to_string(s.end) + ":" + std::to_string(s.source) + " ";
    return out;
  };
  CHECK(text(nested({{0, 10, 0}, {2, 4, 1}, {4, 10, 2}})) == "0-10:0 2-4:1 4-10:2 ");
  CHECK(text(nested({{0, 10, 0}, {8, 12, 1}, {9, 10, 2}, {11, 12, 3}})) == "0-10:0 9-10:2 10-12:1 11-12:3 ");
  CHECK(text(nested({{5, 3, 0}, {5, 5, 1}})) == "5-5:0 5-5:1 ");
  const auto lanes = lanes_of({{0, 5, 0}, {1, 3, 1}, {2, 9, 2}, {3, 4, 3}, {5, 6, 4}});
  REQUIRE(lanes.size() == 3);
  CHECK(text(lanes[0]) == "0-5:0 5-6:4 ");
  CHECK(text(lanes[1]) == "1-3:1 3-4:3 ");
  CHECK(text(lanes[2]) == "2-9:2 ");
}

}  // namespace
}  // namespace nrl::profile
