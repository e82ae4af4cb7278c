#pragma once
// A schedule is data: the actions of one rank in an optimizer step, in order. A generator creates the list,
// which is lowered to a program (parallel/program/lower.h), and the simulator (simulate.h) runs the lists of
// all stages against each other without a model.
//
// The model is split into P * V chunks of layers in model order. Stage p of P has V of them; its chunk c is
// chunk c * P + p of the model, so activations go from stage p to stage (p + 1) % P and gradients the other
// way. With P = 1 all chunks are on this rank: a receive copies from the neighboring chunk, and nothing is
// sent.
//
// Messages use one FIFO per neighbor and kind (activations to the next chunk, gradients to the previous one):
// a stage receives in the order in which the neighbor sends. Sends are asynchronous and may need the matching
// receive to complete. A receive may be posted earlier, in the same order, so that the message arrives during
// the pass before the one that needs it.

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/enums.h"
#include "parallel/pipeline/pool.h"

namespace nrl::pipeline {

enum class ActionKind : uint8_t {
  forward,           ///< forward pass; in the model's last chunk with loss and head gradients
  backward,          ///< dgrad and wgrad, layer by layer
  backward_data,     ///< dgrad only; wgrad follows in backward_weight
  backward_weight,   ///< wgrad, any time after backward_data; per chunk in order of microbatches
  send_forward,      ///< starts to send the chunk's output to the next chunk
  receive_forward,   ///< the chunk's input, from the previous chunk
  send_backward,     ///< starts to send the gradient of the chunk's input to the previous chunk
  receive_backward,  ///< the gradient of the chunk's output, from the next chunk
  post_forward,      ///< starts a receive_forward, which then completes it
  post_backward,     ///< starts a receive_backward, which then completes it
  finish_send,       ///< completes the oldest unfinished send of this chunk and microbatch: its buffer may be
                     ///< reused
  finish_reduce,     ///< waits until the gradients of all buckets are reduced over data-parallel ranks
  step,              ///< clip, update, and gather updated weights
};

struct Action {
  ActionKind kind;
  int chunk = 0;  ///< local index
  int microbatch = 0;
  /// The chunk's stash (its activations of one microbatch), a number in its pool: Stashes::of().
  /// Occupied from post_forward or receive_forward (first chunk: forward) to backward or backward_weight; in
  /// evaluation, to forward or its finish_send.
  int stash = 0;
  /// The last microbatch: every weight gradient that this action adds to is complete for the optimizer step.
  /// Norms add to theirs in dgrad, the head in the forward pass of the model's last chunk.
  bool last = false;

  bool operator==(const Action&) const = default;
};

/// The entries [begin, end) of a list are executed `times` more times, each time for the next `microbatches`.
struct Period {
  size_t begin = 0, end = 0;
  int times = 0, microbatches = 0;
  /// A microbatch of a repetition may have any stash of its pool, not only the one that memory was planned
  /// with: the memory of all of them is reserved alike (memory::Liveness::add_family()).
  bool exchanges_stashes = false;

  /// Calls part(begin, end, repetition) for the parts of a list of `size` entries in the order in which they
  /// are executed; an entry is executed for the microbatch of the list + repetition * microbatches.
  template <class F>
  void for_each_part(size_t size, F&& part) const {
    part(size_t{0}, end, 0);
    for (int r = 1; r <= times; ++r) part(begin, end, r);
    part(end, size, times);
  }
};

struct Schedule {
  std::vector<Action> actions;
  Stashes stashes = {};  ///< of all microbatches, also where the period is repeated
  Period period = {};    ///< of actions (shortest_equivalent())
};

/// Each kind is described at its generator in schedule.cpp.
using nrl::ScheduleKind;

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::single;
  int stages = 1;            ///< P
  int chunks_per_stage = 1;  ///< V
  int microbatches = 1;      ///< N, per optimizer step
  /// interleaved: microbatches that pass a chunk before the stage turns to its next chunk, from P to N; the
  /// last group has the rest, of none or at least P. 0: as few as possible, from P, spread evenly.
  int group = 0;
  /// Training: each receive is posted before the pass that precedes its own. Takes one more stash where the
  /// input of a microbatch arrives during the last pass of another one.
  bool overlap_messages = false;
  /// The pool of each of the stage's chunks, from 0: chunks with equal blocks share one. Empty: all do.
  std::vector<int> pools = {};
  auto operator<=>(const ScheduleOptions&) const = default;
};

/// Why the kind does not support the sizes, with the fix; empty if it does.
std::string_view unsupported_reason(const ScheduleOptions& options);

/// The actions of `stage` in one optimizer step, free of deadlock. Fails with Exit::config and the reason
/// when the kind does not support the sizes.
Schedule make_schedule(const ScheduleOptions& options, int stage);

/// Adds messages, stashes, `last` and, if there are backward passes, the reduction and the optimizer step to
/// `computation` (forward, backward, backward_data and backward_weight of every chunk and microbatch of
/// `stage`, microbatches of a chunk in ascending order). Ignores `options.kind`.
Schedule complete_schedule(std::span<const Action> computation, const ScheduleOptions& options, int stage);

/// "receive_forward(chunk 0, microbatch 3)".
std::string describe(const Action& action);

}  // namespace nrl::pipeline
