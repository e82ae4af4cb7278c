#include <cmath>
#include <map>

#include "apps/machine/collective_time.h"
#include "tests/catch.h"

using namespace nrl;
using comm::Op;
using machine::Crossing;
using machine::DeviceModel;
using machine::Fabric;

namespace {

constexpr double mib = 1 << 20, gib = 1 << 30;

DeviceModel h100() {
  return machine::find_device_model("--device", "h100");
}
/// Without NCCL's protocols: a step between nodes takes `latency`.
DeviceModel host(double latency) {
  DeviceModel m;
  m.node = {.bandwidth = 8e9, .latency = 0};
  m.network = {.bandwidth = 1e9, .latency = latency};
  return m;
}
Fabric fabric_of(const DeviceModel& device, int domains, int inside) {
  return Fabric({}, device, std::vector<ClusterNode>(static_cast<size_t>(domains), {"node", inside}),
                domains * inside);
}
Crossing whole(int domains, int inside) {
  return {
      .ranks = domains * inside, .domains = domains, .inside = inside, .rails = domains > 1 && inside > 1};
}
machine::CollectiveTime time_of(const DeviceModel& device, int domains, int inside, Op op, double bytes) {
  return collective_time(fabric_of(device, domains, inside), whole(domains, inside), op, bytes);
}
double seconds(const DeviceModel& device, int domains, int inside, Op op, double bytes) {
  return time_of(device, domains, inside, op, bytes).time.value;
}

/// A ring of n ranks, simulated message by message: a rank passes a piece on when it has it and its link is
/// free. Returns the time at which the last piece has gone `passes` times around.
double simulate_ring(int n, int passes, double piece_seconds, double latency) {
  const int hops = passes * (n - 1);
  std::vector<double> link(static_cast<size_t>(n)), has(static_cast<size_t>(n));  // by rank; by piece
  for (int hop = 0; hop < hops; ++hop)
    for (int piece = 0; piece < n; ++piece) {
      const int from = (piece + hop) % n;
      const double sent = std::max(link[from], has[piece]) + piece_seconds;
      link[from] = sent;
      has[piece] = sent + latency;
    }
  return *std::max_element(has.begin(), has.end());
}

/// Bytes that the ports of the ranks carry when every rank sends `bytes` to each.
struct Loads {
  double node = 0, adapter = 0;
};
Loads exchange_loads(int domains, int inside, double bytes) {
  std::map<int, Loads> of;
  const int n = domains * inside;
  for (int from = 0; from < n; ++from)
    for (int to = 0; to < n; ++to) {
      if (from == to) continue;
      (from / inside == to / inside ? of[from].node : of[from].adapter) += bytes;
    }
  return of[0];
}

/// Bytes that a rank sends at most in two binary trees with half of the data each, in which a rank is inside
/// one and a leaf of the other: sums go up, results down.
double tree_load(int n, double bytes) {
  std::vector<double> sent(static_cast<size_t>(n));
  for (const bool mirrored : {false, true})
    for (int i = 1; i < n; ++i) {  // in a heap, rank i below (i - 1) / 2
      const auto rank = [&](int at) { return mirrored ? n - 1 - at : at; };
      sent[rank(i)] += bytes / 2;
      sent[rank((i - 1) / 2)] += bytes / 2;
    }
  return *std::max_element(sent.begin(), sent.end());
}

}  // namespace

TEST_CASE("rings, trees and exchanges take the time of their messages", "[machine]") {
  for (const double latency : {0.0, 1e-4, 5e-3})
    for (const int n : {2, 3, 4, 8, 17, 64}) {
      INFO(n << " nodes, latency " << latency);
      const DeviceModel device = host(latency);
      const double bytes = 64 * mib, piece = bytes / n / 1e9;
      CHECK(seconds(device, n, 1, Op::all_gather, bytes) ==
            Approx(simulate_ring(n, 1, piece, latency)).epsilon(0.01));
      CHECK(seconds(device, n, 1, Op::reduce_scatter, bytes) ==
            Approx(simulate_ring(n, 1, piece, latency)).epsilon(0.01));
      const double ring = simulate_ring(n, 2, piece, latency);
      const double tree = 2 * std::ceil(std::log2(n)) * latency + 2 * bytes / 1e9;
      CHECK(seconds(device, n, 1, Op::all_reduce, bytes) == Approx(std::min(ring, tree)).epsilon(0.01));
      if (n >= 8) CHECK(tree_load(n, bytes) == Approx(2 * bytes).epsilon(0.01));
    }
  for (const auto& [domains, inside] : {std::pair(1, 8), std::pair(2, 4), std::pair(4, 2), std::pair(8, 8)}) {
    const double n = domains * inside, bytes = 64 * mib;
    const Loads loads = exchange_loads(domains, inside, bytes / n);
    CHECK(seconds(host(0), domains, inside, Op::all_to_all, bytes) ==
          Approx(std::max(loads.node / 8e9, loads.adapter / 1e9)).epsilon(0.01));
  }
}

TEST_CASE("of an exchange the own part is free, and the node's goes over NVLink", "[machine]") {
  const double bytes = 8 * gib;
  CHECK(seconds(h100(), 1, 8, Op::all_to_all, bytes) == Approx(7.0 / 8 * bytes / 370e9).epsilon(0.001));
  CHECK(seconds(h100(), 2, 4, Op::all_to_all, bytes) == Approx(4.0 / 8 * bytes / 46e9).epsilon(0.001));
  CHECK(seconds(h100(), 4, 2, Op::all_to_all, bytes) == Approx(6.0 / 8 * bytes / 46e9).epsilon(0.001));
  CHECK(machine::pattern_of(Op::exchange, comm::Purpose::experts) == Op::all_to_all);
  // A token has 4 of 8 experts on the other one of two nodes, to which it goes once with a probability of 255
  // / 256.
  CHECK(machine::once_to_each_node(2, 8) == Approx(255.0 / 256 / 4));
  CHECK(machine::once_to_each_node(64, 1) == Approx(1));
  CHECK(machine::once_to_each_node(1, 8) == Approx(1.0 / 8));
  CHECK(machine::once_to_each_node(4, 8) < machine::once_to_each_node(8, 8));
  const double part = machine::once_to_each_node(2, 8);
  CHECK(collective_time(fabric_of(h100(), 2, 4), whole(2, 4), Op::all_to_all, bytes, part).time.value ==
        Approx(part * 4.0 / 8 * bytes / 46e9).epsilon(0.002));
  CHECK(machine::pattern_of(Op::exchange, comm::Purpose::layers) == Op::exchange);
}

TEST_CASE("steps cost time, and NCCL's algorithm is the fastest one", "[machine]") {
  // 40 MiB over 192 nodes: 2.7 ms of steps in a ring of Simple's 14 us, 0.78 ms with LL128; 1 ms of bytes.
  const auto bucket = time_of(h100(), 192, 1, Op::reduce_scatter, 40 * mib);
  CHECK(bucket.algorithm == "ring LL128");
  CHECK(bucket.time.value ==
        Approx(14e-6 + 191 * 4e-6 + 191.0 / 192 * 40 * mib / (0.92 * 46e9)).epsilon(1e-6));
  CHECK(time_of(h100(), 2, 8, Op::all_gather, 4 * gib).algorithm == "ring");
  CHECK(time_of(h100(), 64, 1, Op::all_gather, 8 * mib).algorithm == "PAT");
  CHECK(time_of(h100(), 512, 8, Op::all_reduce, 1024).algorithm == "tree LL");
  CHECK(time_of(h100(), 1, 8, Op::all_reduce, 1024).algorithm.starts_with("ring LL"));
  for (const Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter})
    for (const double bytes : {1024.0, mib, 40 * mib, gib}) {
      double before = 0;
      for (int domains = 2; domains <= 2048; domains *= 2) {
        const double now = seconds(h100(), domains, 8, op, bytes);
        INFO(name_of(op) << " of " << bytes << " bytes on " << domains << " nodes");
        CHECK(now >= before);
        before = now;
      }
      CHECK(before > seconds(h100(), 1, 8, op, bytes));
    }
}

TEST_CASE("switches add within a domain of Hopper GPUs", "[machine]") {
  const auto sum = time_of(h100(), 1, 8, Op::all_reduce, gib);
  CHECK(sum.algorithm == "NVLS");
  CHECK(sum.time.value == Approx(75e-6 + gib * (1 + 1.0 / 8) / (0.83 * 370e9)).epsilon(1e-9));
  // Azure's ND H100 v5, bus bandwidth of 8 ranks: seconds are 7 / 4 of the bytes over it.
  const std::map<double, double> published{{32, 295.5e9},  {64, 361.8e9},   {128, 400.6e9},
                                           {256, 423.4e9}, {1024, 466.4e9}, {8192, 478.9e9}};
  for (const auto& [mebibytes, bandwidth] : published) {
    INFO(mebibytes << " MiB");
    CHECK(seconds(h100(), 1, 8, Op::all_reduce, mebibytes * mib) ==
          Approx(1.75 * mebibytes * mib / bandwidth).epsilon(0.05));
  }
  for (const auto& [device, domains] : {std::pair("h100", 2), std::pair("a100", 1), std::pair("h100-nvl", 1)})
    CHECK(time_of(machine::find_device_model("--device", device), domains, domains > 1 ? 8 : 2,
                  Op::all_reduce, gib)
              .algorithm != "NVLS");
  CHECK(time_of(h100(), 1, 8, Op::reduce_scatter, gib).algorithm == "ring");
}

TEST_CASE("more bandwidth and fewer limits are never slower", "[machine]") {
  for (const Op op : {Op::all_reduce, Op::all_gather, Op::all_to_all, Op::send, Op::broadcast, Op::exchange})
    for (const double bytes : {1e3, 1e6, 1e9}) {
      ClusterConfig slow;
      slow.fabric.oversubscription = 4;
      slow.fabric.leaf_ranks = 16;
      const std::vector<ClusterNode> nodes(8, {"node", 8});
      const auto at = [&](const ClusterConfig& c, bool spine) {
        Crossing crossing = whole(8, 8);
        crossing.spine = spine;
        return collective_seconds(Fabric(c, h100(), nodes, 64), crossing, op, bytes).value;
      };
      CHECK(at({}, false) <= at(slow, false));
      CHECK(at(slow, false) <= at(slow, true));
      CHECK(at(slow, false) == (op == Op::all_reduce || op == Op::all_gather || op == Op::broadcast
                                    ? at({}, false)
                                    : at(slow, true)));  // other rails
      slow.fabric.rail_optimized = false;
      CHECK(at(slow, false) == at({}, false));
      ClusterConfig fast;
      fast.fabric.adapters_per_rank = 2;
      CHECK(at(fast, false) <= at({}, false));
    }
  // Nothing is sent in a group of one.
  CHECK(seconds(h100(), 1, 1, Op::all_reduce, 1e9) == 0);
}

TEST_CASE("measurements replace the model at their points", "[machine]") {
  Fabric fabric = fabric_of(h100(), 4, 8);
  const Crossing two = whole(2, 8), four = whole(4, 8);
  const double before = collective_seconds(fabric, two, Op::all_reduce, mib).value;
  const machine::MeasuredOperation small{Op::all_gather, 16, 2, mib, 1e-4},
      large{Op::all_gather, 16, 2, 64 * mib, 64e-4};
  fabric.set_measured({large, small});
  const auto gather = [&](const Crossing& c, double bytes) {
    return collective_time(fabric, c, Op::all_gather, bytes).time;
  };
  CHECK(gather(two, mib).value == Approx(1e-4));
  CHECK(gather(two, mib).source == machine::Source::profile);
  CHECK(gather(two, 8 * mib).value == Approx(8e-4));
  CHECK(gather(two, 1).value == Approx(1e-4));
  CHECK(gather(two, 640 * mib).value == Approx(640e-4));
  // More nodes: the same bytes through a link, and the steps of the model.
  const double wider = gather(four, 8 * mib).value, link = 8e-4 * (31.0 / 32) / (15.0 / 16);
  CHECK(wider >= link);
  CHECK(wider <= link + 32 * 14e-6);
  // Inside a node and for other operations nothing was measured.
  CHECK(gather(whole(1, 8), mib).source == machine::Source::assumed);
  CHECK(collective_seconds(fabric, two, Op::all_reduce, mib).value == before);
}
