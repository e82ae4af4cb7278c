#pragma once
// Schedules are data: the order of one rank's work in an optimizer step. A generator makes the list, one
// interpreter executes it (apps/model/interpreter.h), and the simulator (simulate.h) runs the lists of all
// stages against each other without a model.
//
// The model is cut into P * V chunks of layers in model order. Stage p of P has V of them; its chunk c is
// chunk c * P + p of the model, so activations go from stage p to stage (p + 1) % P and gradients the other
// way. Where P is 1, all chunks are on this rank: a receive then copies from the neighboring chunk, and
// nothing is sent.
//
// Messages use one FIFO per neighbor and kind (activations to the next chunk, gradients to the previous one):
// a stage receives in the order in which the neighbor sends. Sends are asynchronous and may need the matching
// receive to complete.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::pipeline {

enum class ActionKind : uint8_t {
  forward,           ///< microbatch through the chunk; of the model's last chunk with loss and head gradients
  backward,          ///< data and weight gradients, layer by layer
  backward_data,     ///< data gradients only; the weight gradients follow in backward_weight
  backward_weight,   ///< any time after backward_data; in order of microbatches per chunk
  send_forward,      ///< starts to send the chunk's output to the next chunk
  receive_forward,   ///< the chunk's input, from the previous chunk
  send_backward,     ///< starts to send the gradient of the chunk's input to the previous chunk
  receive_backward,  ///< the gradient of the chunk's output, from the next chunk
  finish_send,       ///< completes the oldest unfinished send of this chunk and microbatch: its buffer may be
                     ///< reused
  finish_reduce,     ///< waits until the gradients of all buckets are reduced over data-parallel ranks
  step,              ///< clip, update, and bring updated weights to all ranks
};

struct Action {
  ActionKind kind;
  int chunk = 0;  ///< local index
  int microbatch = 0;
  /// Which copy of the chunk's activations: microbatch % stashes[chunk]. A stash is occupied from
  /// receive_forward (first chunk: forward) to backward or backward_weight; in evaluation, to forward or its
  /// finish_send.
  int stash = 0;
  /// The last microbatch: every weight gradient that this action adds to is complete for the optimizer step.
  /// Norms add to theirs in the data part, the head in the forward pass of the model's last chunk.
  bool last = false;

  bool operator==(const Action&) const = default;
};

struct Schedule {
  std::vector<Action> actions;
  std::vector<int> stashes;  ///< per local chunk: copies of its activations that exist at once
};

enum class ScheduleKind : uint8_t {
  single,        ///< one stage; each microbatch's backward follows its forward at once
  forward_only,  ///< evaluation
  one_f_one_b,   ///< 1F1B: bubble (P-1)(f+b), min(N, P-p) stashes
  interleaved,   ///< 1F1B over V > 1 chunks per stage: bubble (P-1)(f+b)/V, more stashes
  zb_h1,  ///< zero-bubble H1: 1F1B with deferred weight gradients; bubble (P-1)(f+d-w), min(N, P) stashes
};

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::single;
  int stages = 1;            ///< P
  int chunks_per_stage = 1;  ///< V
  int microbatches = 1;      ///< N, per optimizer step
};

/// The actions of `stage` in one optimizer step. Throws Error (configuration) with the reason where the kind
/// does not support the sizes; what it accepts is free of deadlock.
Schedule make_schedule(const ScheduleOptions& options, int stage);

/// Adds to `computation` (forward, backward, backward_data and backward_weight of every chunk and microbatch
/// of `stage`, microbatches of a chunk in ascending order) what every schedule needs: messages, stashes,
/// `last`, and, where there are backward passes, the reduction and the optimizer step. `options.kind` is not
/// read.
Schedule complete_schedule(std::span<const Action> computation, const ScheduleOptions& options, int stage);

/// "1f1b", "zb_h1", ...
std::string_view name(ScheduleKind kind);

/// "receive_forward(chunk 0, microbatch 3)".
std::string describe(const Action& action);

}  // namespace nrl::pipeline
