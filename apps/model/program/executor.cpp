#include "apps/model/program/executor.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/status.h"
#include "core/ops/transfer.h"

namespace nrl::model {

using program::Step;
using program::StepKind;
using program::Use;

Executor::Executor(ProgramLayers& all, ProgramMemory& memory, const program::Program& list,
                   const Execution& on)
    : all_(all), memory_(memory), list_(list), on_(on), places_(list, all.list) {}

void Executor::run() {
  const trace::TagScope outer(trace::tag());  // what passes change is of this program
  int repetitions = on_.times.value_or(list_.period.times);
  while (next_ < list_.steps.size()) {
    if (next_ == list_.period.end && repetitions > 0) {
      --repetitions;
      next_ = list_.period.begin;
      shift_ += list_.period.microbatches;
    }
    step();
  }
  if (all_.at_results) report_results();
  exec().step = exec().microbatch = -1;
  NRL_CHECK(started_.empty(), "the program does not wait for all that it starts");
}

SlotValue Executor::value(program::SlotId slot, int microbatch) const {
  return {slot, with_rows(tensor_of(slot, microbatch), all_.list.spec(slot), on_.batches[microbatch])};
}

// Slots keep their contents until the next step is entered: here they are as the last step has left them.
void Executor::report_results() {
  const Unreported last = std::exchange(last_, {});
  if (!last.step) return;
  const bool computed = last.step->kind == StepKind::compute || last.step->kind == StepKind::copy ||
                        (last.step->kind == StepKind::wait && last.step->of == StepKind::receive);
  StepResults now{.step = *last.step, .microbatch = last.microbatch, .mode = list_.mode};
  if (computed)
    for (const Use& u : list_.writes(*last.step)) {
      if (last.step->kind == StepKind::compute && in_flight(u.slot()))
        deferred_.push_back({last.step, last.microbatch, u.slot()});
      else
        now.written.push_back(value(u.slot(), last.microbatch));
    }
  std::erase_if(deferred_, [&](const Unreported& d) {
    if (in_flight(d.slot)) return false;
    StepResults arrived{.step = *d.step, .microbatch = d.microbatch, .mode = list_.mode};
    arrived.written.push_back(value(d.slot, d.microbatch));
    const void* const data = arrived.written.front().value.data;
    const bool reused = std::any_of(now.written.begin(), now.written.end(),
                                    [&](const SlotValue& v) { return v.value.data == data; });
    if (!reused) all_.at_results(arrived);
    return true;
  });
  if (now.written.empty()) return;
  for (const Use& u : list_.reads(*last.step)) now.read.push_back(value(u.slot(), last.microbatch));
  all_.at_results(now);
}

const Step& Executor::pass() {
  if (all_.at_results) report_results();
  const Step& s = next();
  if (all_.at_results) last_ = {&s, microbatch(s)};
  places_.enter(list_, s, shift_);
  exec().step = static_cast<int>(next_);
  const bool counted = list_.mode == memory::training && (s.of_microbatch() || s.buckets > 0);
  exec().microbatch = counted ? microbatch(s) : -1;
  const int tick = memory_.first_tick + static_cast<int>(next_);
  trace::Tag& tag = trace::tag();
  tag.tick = tick;
  tag.microbatch = s.of_microbatch() ? microbatch(s) : -1;
  status::Page& page = status::page();
  page.microbatch.store(tag.microbatch, std::memory_order_relaxed);
  page.layer.store(s.of_microbatch() ? s.layer : -1, std::memory_order_relaxed);
  page.backward.store(s.backward || s.again, std::memory_order_relaxed);
  status::made_progress();
  if (all_.at_tick) all_.at_tick(tick);
  ++next_;
  return s;
}

void Executor::step() {
  if (next().kind == StepKind::visit) return visit();
  const Step& s = pass();
  switch (s.kind) {
    case StepKind::copy:
      return copy(s);
    case StepKind::send:
    case StepKind::receive:
    case StepKind::offload:
    case StepKind::fetch:
      return start(s);
    case StepKind::wait:
      return wait(s);
    case StepKind::report:
      if (on_.hooks && on_.hooks->log_probs_ready) on_.hooks->log_probs_ready(microbatch(s));
      return;
    case StepKind::gather:
    case StepKind::release:
    case StepKind::open:
    case StepKind::reduce:
      return communicate(s);
    case StepKind::update: {
      const trace::Range range("optimizer_step", trace::Kind::phase);
      if (on_.hooks && on_.hooks->update) on_.hooks->update();
      return;
    }
    default:
      NRL_CHECK(false, "{} has no step {} there", layer(s.layer).name(), s.index);
  }
}

void Executor::visit() {
  const Step& s = pass();
  if (!pass_) pass_.emplace(s.backward || s.again ? "backward_pass" : "forward_pass", trace::Kind::phase);
  Run r;
  r.executor_ = this;
  r.index_ = s.layer;
  r.layer_ = &layer(s.layer);
  r.context_ = &r.layer_->context();
  r.batch_ = &on_.batches[microbatch(s)];
  r.microbatch_ = microbatch(s);
  r.in_flight_ = &in_flight_;
  r.mode_ = s.again ? memory::recompute : list_.mode;
  r.dgrad_ = s.dgrad;
  r.wgrad_ = s.wgrad;
  r.first_ = on_.first && microbatch(s) == 0;
  r.last_ = s.last;
  {
    const trace::TagScope of_program(trace::tag());
    trace::tag().layer = static_cast<int16_t>(s.layer);
    trace::tag().chunk = static_cast<int16_t>(all_.list.of(s.layer).chunk);
    const trace::Range range(all_.trace_names[s.layer], trace::Kind::layer);
    if (s.backward) {
      r.cursor_ = r.layer_->table().forward_steps();
      r.layer_->backward(r);
    } else {
      std::optional<trace::Range> again;
      if (s.again) again.emplace("recompute", trace::Kind::recompute);
      r.layer_->forward(r);
    }
    NRL_CHECK(in_flight_.empty(), "{} does not wait for all communication", r.layer_->name());
  }
  if (s.ends) pass_.reset();
}

void Executor::visit_nested(const Run& outer) {
  pass();
  const trace::Range range("recompute", trace::Kind::recompute);
  Run r = outer;
  r.mode_ = memory::recompute;
  r.dgrad_ = r.wgrad_ = false;
  r.cursor_ = 0;
  r.layer_->forward(r);
}

void Executor::skip_nested() {
  do ++next_;
  while (next_ < list_.steps.size() && next().kind != StepKind::visit && next().within_visit() &&
         next().again);
}

bool Executor::enter(Run& r, int index) {
  for (;;) {
    if (next_ == list_.steps.size()) return false;
    const Step& s = next();
    if (!s.within_visit() || s.round != r.listed_round_) return false;
    if (s.kind == StepKind::carry) {
      pass();
      continue;
    }
    if (s.kind == StepKind::compute) {
      if (s.again != r.recomputes() || s.index != index) return false;
      break;
    }
    if (r.recomputes()) return false;
    if (s.one_round && r.rounds_ > 1)
      skip_nested();
    else
      visit_nested(r);
  }
  pass();
  return true;
}

bool Executor::names(const Run& r, Slot slot) const {
  const program::SlotId id = all_.list.slot(r.index_, slot);
  if (id < 0) return true;  // a port without a neighbor, which is empty
  const Step& s = list_.steps[next_ - 1];
  return program::names(list_.reads(s), id) || program::names(list_.writes(s), id);
}

Tensor Executor::tensor_of(program::SlotId slot, int microbatch) const {
  return memory_.device[places_.at(slot, microbatch)];
}

Tensor Executor::tensor(const Run& r, Slot slot) const {
  const program::SlotId id = all_.list.slot(r.index_, slot);
  if (id < 0) return {};
  return with_rows(tensor_of(id, r.microbatch_), r.layer_->table().slots()[slot.id], *r.batch_);
}

Tensor Executor::with_rows(Tensor t, const memory::SlotSpec& slot, const MicroBatch& batch) const {
  const int64_t tokens = batch.ids.dim(0);
  const int64_t own = tokens * all_.rows[sequence_rows] / all_.rows[token_rows];
  if (slot.rows == token_rows) t.shape[0] = tokens;
  if (slot.rows == sequence_rows) t.shape[0] = own;
  if (slot.rows < sent_rows || slot.rows > dispatched_rows_by_128) return t;
  const LayerContext& context = layer(0).context();
  t.shape[0] = expert_rows(*context.spec, context.layout, own, list_.mode == memory::generation)
                   .of(static_cast<RowDomain>(slot.rows));
  return t;
}

std::span<int32_t> Executor::host_values(const Run& r) const {
  return memory_.values[r.index_][list_.stashes.of(all_.list.of(r.index_).chunk, r.microbatch_)];
}

Executor::ListedRounds Executor::rounds(const Run& r) const {
  ListedRounds out;
  size_t i = next_;
  const auto own = [&](const Step& s) { return s.within_visit() && (!r.recomputes() || s.again); };
  while (i < list_.steps.size() && list_.steps[i].kind == StepKind::carry) ++i;
  for (; i < list_.steps.size() && own(list_.steps[i]) && list_.steps[i].round >= 0; ++i)
    if (const auto round = static_cast<size_t>(list_.steps[i].round); round >= out.begin.size())
      out.begin.resize(round + 1, i);
  out.end = i;
  return out;
}

void Executor::enter_round(Run& r, const ListedRounds& rounds, int index, bool forward) {
  while (next_ < rounds.end && next().kind == StepKind::carry) pass();
  r.listed_round_ = 0;
  if (rounds.begin.empty()) return;
  const int last = static_cast<int>(rounds.begin.size()) - 1;
  r.listed_round_ = forward ? std::max(0, last - index) : std::min(index, last);
  next_ = rounds.begin[r.listed_round_];
}

void Executor::end_rounds(Run& r, const ListedRounds& rounds) {
  next_ = rounds.end;
  r.listed_round_ = -1;
}

void Executor::copy(const Step& s) {
  const Tensor x = tensor_of(list_.reads(s)[0].slot(), microbatch(s)),
               y = tensor_of(list_.writes(s)[0].slot(), microbatch(s));
  if (x.data != y.data) ops::copy(exec(), x, y);
}

void Executor::start(const Step& s) {
  const bool out = s.kind == StepKind::send || s.kind == StepKind::offload;
  const auto uses = out ? list_.reads(s) : list_.writes(s);
  const int m = microbatch(s);
  Started now{.kind = s.kind, .slot = uses[0].slot(), .microbatch = m};
  if (s.kind == StepKind::send || s.kind == StepKind::receive) {
    const Tensor t = with_rows(tensor_of(now.slot, m), all_.list.spec(now.slot), on_.batches[m]);
    const comm::StreamRef stream{exec().stream};
    if (out)
      now.message = on_.messages->send(s.backward, comm::ConstView(t.data, t.numel(), t.dtype), stream);
    else
      now.message = on_.messages->receive(s.backward, comm::View(t.data, t.numel(), t.dtype), stream);
  } else if (!exec().needed || all_.copies.observed()) {
    std::vector<memory::HostCopy> copies;
    for (const Use& u : uses) {
      void* const device = tensor_of(u.slot(), m).data;
      void* const host = memory_.host[places_.index(u.slot(), m)];
      copies.push_back({.to = out ? host : device,
                        .from = out ? device : host,
                        .bytes = static_cast<size_t>(all_.list.slots[u.slot()].bytes)});
    }
    const trace::Range range(name_of(out ? memory::HostWork::to_host : memory::HostWork::from_host),
                             trace::Kind::copy);
    now.copies =
        all_.copies.start(copies, out ? device::CopyKind::device_to_host : device::CopyKind::host_to_device);
  }
  started_.push_back(std::move(now));
}

void Executor::communicate(const Step& s) {
  if (s.buckets == 0) {
    if (on_.hooks && on_.hooks->finish_reduce) on_.hooks->finish_reduce();
  } else if (all_.sharded) {
    Step now = s;
    if (s.throughout)
      now.microbatches -=
          (list_.period.times - on_.times.value_or(list_.period.times)) * list_.period.microbatches;
    all_.sharded->execute(now, list_.buckets_of(s));
  }
}

void Executor::wait(const Step& s) {
  if (!s.of_microbatch()) return communicate(s);
  const program::SlotId slot = s.reads > 0 ? list_.reads(s)[0].slot() : list_.writes(s)[0].slot();
  const auto found = std::find_if(started_.begin(), started_.end(), [&](const Started& t) {
    return t.kind == s.of && t.slot == slot && t.microbatch == microbatch(s);
  });
  NRL_CHECK(found != started_.end(), "the program waits for what it has not started");
  Started done = std::move(*found);
  started_.erase(found);
  if (done.kind == StepKind::send || done.kind == StepKind::receive) {
    const trace::Range range(done.kind == StepKind::send ? "finish_send" : "receive", trace::Kind::message);
    done.message.wait();
  } else if (done.copies >= 0) {
    const trace::Range range("finish_copies", trace::Kind::copy);
    all_.copies.finish(done.copies);
  }
}

}  // namespace nrl::model
