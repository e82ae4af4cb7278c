#include "apps/machine/collective_time.h"

#include <bit>
#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace nrl::machine {
namespace {

using comm::Op;

/// How an algorithm moves data: seconds of its start and of a step inside a domain and between domains, the
/// fraction of the links' bandwidth that it reaches, and the bytes/s that it never exceeds inside a domain,
/// on two of them, and on more.
struct Protocol {
  std::string_view name;
  double start, node_step, network_step, fraction;
  double most[3];
};

constexpr double unlimited = std::numeric_limits<double>::infinity();
// The tables of NCCL's tuner, src/graph/tuning.cc of NCCL 2.27 (baseLat, hwLat, llMaxBws of Hopper, and the
// refinements of busBw): LL sends as many bytes of flags as of data, LL128 120 bytes of 128; trees lose 8 %.
constexpr Protocol nccl_ring[] = {
    {"ring", 8.4e-6, 3.4e-6, 14e-6, 1, {unlimited, unlimited, unlimited}},
    {"ring LL128", 14e-6, 1.9e-6, 4e-6, 0.92, {unlimited, unlimited, unlimited}},
    {"ring LL", 6.6e-6, 0.6e-6, 2.7e-6, 0.5, {141e9, 45e9, 35e9}}};
constexpr Protocol nccl_tree[] = {
    {"tree", 8.4e-6, 4e-6, 14e-6, 0.92, {unlimited, unlimited, unlimited}},
    {"tree LL128", 14e-6, 1.25e-6, 8.5e-6, 0.92 * 120 / 128, {unlimited, unlimited, unlimited}},
    {"tree LL", 6.8e-6, 0.6e-6, 5e-6, 0.92 / 3.8, {141e9, 45e9, 35e9}}};
// PAT (arXiv:2506.20252), with one rank in each domain. The tuner counts a part that is linear in the ranks.
constexpr double pat_start = 8.4e-6, pat_step = 14e-6 / 3.5, pat_rank = 2.8e-6, pat_fraction = 0.75;
// NVLS: switches add and multicast, a rank sends its bytes once and a part of the results. All-reduce on 8
// H100 and 8 H200 takes these seconds within 4 % from 32 MiB to 8 GiB (Azure, AI-benchmarking-guide, ND H100
// v5 and ND H200 v5: 295 to 479 GB/s of bus bandwidth); NCCL's tuner has 0.85 for the fraction.
constexpr double nvls_start = 75e-6, nvls_fraction = 0.83;
/// A message to another domain occupies the sender's proxy thread for this long (getNetOverhead).
constexpr double message_overhead = 1e-6;

/// ceil(log2(n)).
int doublings(int n) {
  return std::bit_width(static_cast<unsigned>(n - 1));
}

/// The times of the algorithms of one operation.
class Estimate {
 public:
  Estimate(const Fabric& fabric, const Crossing& crossing) : f_(fabric), c_(crossing) {
    network_ = f_.adapter_bandwidth(c_.spine);
    // A ring leaves a domain through the adapters of all of its members there, each time over NVLink.
    ring_ = c_.domains == 1 ? f_.node_bandwidth() : std::min(f_.node_bandwidth(), c_.inside * network_);
  }

  /// `rounds` passes around a ring with `bytes` through each link.
  void ring(int rounds, double bytes) {
    const double node = rounds * (c_.ranks - c_.domains), network = rounds * (c_.domains - 1);
    if (f_.nccl())
      for (const Protocol& p : nccl_ring)
        consider(p.name, p.start + node * p.node_step + network * p.network_step, bytes / rate(p, ring_));
    else
      consider("ring", host_start() + network * f_.network().latency, bytes / ring_);
  }
  /// Up and down a tree of domains, a chain in each.
  void tree(double bytes) {
    const double node = 2 * (c_.inside - 1), network = 2 * doublings(c_.domains);
    if (f_.nccl())
      for (const Protocol& p : nccl_tree)
        consider(p.name, p.start + node * p.node_step + network * p.network_step, 2 * bytes / rate(p, ring_));
    else
      consider("tree", host_start() + network * f_.network().latency, 2 * bytes / ring_);
  }
  void logarithmic(double bytes) {
    if (!f_.nccl() || c_.domains < c_.ranks) return;
    consider("PAT", pat_start + doublings(c_.ranks) * pat_step + c_.ranks * pat_rank,
             bytes / (pat_fraction * ring_));
  }
  /// Sums in the switches of an NVLink domain.
  void switches(double bytes) {
    if (!f_.nvls() || c_.domains > 1 || c_.ranks < 3) return;
    consider("NVLS", nvls_start, bytes * (1 + 1.0 / c_.ranks) / (nvls_fraction * f_.node_bandwidth()));
  }
  /// Between all pairs, `bytes` to each.
  void pairs(double bytes, double across) {
    const int outside = c_.ranks - c_.inside;
    const double latency =
        outside == 0
            ? message_latency()
            : message_latency() + (outside - 1) * (f_.nccl() ? message_overhead : f_.network().latency);
    consider("pairs", latency,
             std::max((c_.inside - 1 + (1 - across) * outside) * bytes / f_.node_bandwidth(),
                      across * outside * bytes / beyond_rail()));
  }
  void message(double bytes) {
    consider("message", message_latency(),
             bytes / (c_.domains > 1 ? std::min(f_.node_bandwidth(), beyond_rail()) : f_.node_bandwidth()));
  }
  CollectiveTime best() const { return best_; }

 private:
  double host_start() const { return f_.node().latency; }
  double message_latency() const {
    if (f_.nccl())
      return nccl_ring[0].start + (c_.domains > 1 ? nccl_ring[0].network_step : nccl_ring[0].node_step);
    return 0;  // the link's latency is added by consider()
  }
  /// Adapters at different places of their nodes have different leaf switches if these are by rail.
  double beyond_rail() const { return f_.adapter_bandwidth(c_.spine || (c_.rails && f_.rail_optimized())); }
  double rate(const Protocol& p, double link) const {
    return std::min(p.fraction * link, p.most[std::min(c_.domains, 3) - 1]);
  }
  void consider(std::string_view name, double latency, double transfer) {
    latency = std::max(latency, (c_.domains > 1 ? f_.network() : f_.node()).latency);
    if (!best_.algorithm.empty() && latency + transfer >= best_.time.value) return;
    best_ = {{latency + transfer, Source::assumed}, latency, name};
  }

  const Fabric& f_;
  const Crossing& c_;
  double network_, ring_;
  CollectiveTime best_;
};

CollectiveTime modeled(const Fabric& fabric, const Crossing& c, Op op, double bytes, double across = 1) {
  if (c.ranks == 1 || op == Op::split) return {};
  Estimate e(fabric, c);
  const double wire = comm::wire_bytes(op, bytes, c.ranks);
  switch (op) {
    case Op::all_reduce:
    case Op::barrier:
      e.ring(2, wire);
      e.tree(op == Op::barrier ? 0 : bytes);
      e.switches(op == Op::barrier ? 0 : bytes);
      break;
    case Op::all_gather:
    case Op::reduce_scatter:
      e.ring(1, wire);
      e.logarithmic(wire);
      break;
    case Op::broadcast:
      e.ring(1, wire);
      break;
    case Op::all_to_all:
    case Op::all_to_all_v:
      e.pairs(bytes / c.ranks, across);
      break;
    case Op::send:
    case Op::recv:
    case Op::exchange:
      e.message(bytes);
      break;
    case Op::split:
      break;
  }
  return e.best();
}

/// Bytes through a link for each byte of the operation.
double wire_factor(Op op, int ranks) {
  return op == Op::recv ? 1 : comm::wire_bytes(op, 1, ranks);
}

/// The measurements of this operation at the numbers of ranks and domains nearest to the group's, on the same
/// link.
std::vector<MeasuredOperation> nearest(const Fabric& fabric, const Crossing& c, Op op) {
  const auto distance = [&](const MeasuredOperation& m) {
    return std::pair(std::abs(std::log(static_cast<double>(m.domains) / c.domains)),
                     std::abs(std::log(static_cast<double>(m.ranks) / c.ranks)));
  };
  std::vector<MeasuredOperation> out;
  for (const MeasuredOperation& m : fabric.measured()) {
    if (m.op != op || (m.domains > 1) != (c.domains > 1)) continue;
    if (!out.empty() && distance(m) > distance(out.front())) continue;
    if (!out.empty() && distance(m) < distance(out.front())) out.clear();
    out.push_back(m);
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  return out;
}

/// Seconds of `bytes` by points in ascending order: at a constant bandwidth after the last one, at the time
/// of the first before it.
double interpolated(std::span<const MeasuredOperation> points, double bytes) {
  if (bytes <= points.front().bytes) return points.front().seconds;
  if (bytes >= points.back().bytes) return points.back().seconds * bytes / points.back().bytes;
  const auto above =
      std::find_if(points.begin(), points.end(), [&](const MeasuredOperation& m) { return m.bytes > bytes; });
  const auto below = above - 1;
  const double part = std::log(bytes / below->bytes) / std::log(above->bytes / below->bytes);
  return below->seconds * std::pow(above->seconds / below->seconds, part);
}

}  // namespace

double once_to_each_node(double nodes, int64_t choices) {
  const auto k = static_cast<double>(choices);
  // Other nodes with an expert of a token, over its experts on other nodes.
  return nodes * (1 - std::pow(1 - 1.0 / nodes, k)) / k;
}

CollectiveTime collective_time(const Fabric& fabric, const Crossing& crossing, Op op, double bytes,
                               double across) {
  CollectiveTime model = modeled(fabric, crossing, op, bytes, across);
  if (crossing.ranks == 1 || fabric.measured().empty()) return model;
  const std::vector<MeasuredOperation> points = nearest(fabric, crossing, op);
  if (points.empty()) return model;
  const MeasuredOperation& as = points.front();
  Crossing measured = crossing;
  measured.ranks = as.ranks;
  measured.domains = as.domains;
  measured.inside = std::max(as.ranks / as.domains, 1);
  const double factor = wire_factor(op, as.ranks),
               equal = factor > 0 ? bytes * wire_factor(op, crossing.ranks) / factor : bytes;
  const double steps = model.latency - modeled(fabric, measured, op, equal).latency,
               part = across < 1 ? model.time.value / modeled(fabric, crossing, op, bytes).time.value : 1,
               seconds = part * (interpolated(points, equal) + std::max(steps, 0.0));
  return {{seconds, Source::profile}, model.latency, "measured"};
}

}  // namespace nrl::machine
