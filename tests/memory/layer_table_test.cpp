// The steps of a recomputation, derived from the table.
#include "memory/layer_table.h"

#include "core/base/error.h"
#include "tests/catch.h"

using namespace nrl::memory;

namespace {

// in (port) -> sum, norm; norm -> up; up -> act; act -> out. `sum` can also recompute `norm`.
struct Table : LayerTable {
  Slot in = add(SlotSpec{.name = "in", .width = 1, .port = true});
  Slot sum = add(SlotSpec{.name = "sum", .width = 1});
  Slot norm = add(SlotSpec{.name = "norm", .width = 1, .rules = "norm all"});
  Slot up = add(SlotSpec{.name = "up", .width = 1, .rules = "all"});
  Slot act = add(SlotSpec{.name = "act", .width = 1, .rules = "activation all"});
  Slot out = add(SlotSpec{.name = "out", .width = 1});
  Slot d_out = add(SlotSpec{.name = "d_out", .width = 1, .port = true});
  Slot d_act = add(SlotSpec{.name = "d_act", .width = 1});
  using LayerTable::add;

  explicit Table(bool backward = true) {
    step("norm", in.bit(), sum.bit() | norm.bit());
    step("norm again", sum.bit(), norm.bit(), recompute);
    step("up", norm.bit(), up.bit());
    step("act", up.bit(), act.bit());
    step("out", act.bit(), out.bit());
    if (!backward) return;
    add(Step{.name = "d_out", .pass = Pass::data, .reads = d_out.bit() | act.bit(), .writes = d_act.bit()});
  }
  void step(const char* name, SlotSet reads, SlotSet writes, Modes modes = every_mode) {
    add(Step{.name = name, .modes = modes, .reads = reads, .writes = writes});
  }
};

constexpr uint64_t steps(std::initializer_list<int> list) {
  uint64_t bits = 0;
  for (int s : list) bits |= uint64_t{1} << s;
  return bits;
}

}  // namespace

TEST_CASE("the input of a layer is what only ports give", "[memory]") {
  const Table t;
  CHECK(t.recomputable() == (t.sum.bit() | t.norm.bit() | t.up.bit() | t.act.bit() | t.out.bit()));
  CHECK(t.inputs() == t.sum.bit());
  CHECK_THROWS_AS(LayerPolicy(t, t.in.bit()), nrl::Error);
  CHECK(t.with_rule("norm") == t.norm.bit());
  CHECK(t.with_rule("all") == (t.norm.bit() | t.up.bit() | t.act.bit()));
  CHECK(t.with_rule("al") == 0);
}

TEST_CASE("a recomputation runs the steps it needs, once", "[memory]") {
  const Table t;
  SlotSet made = 0;
  const LayerPolicy alone(t, t.act.bit());
  CHECK(alone.steps_for(t.act.bit() | t.up.bit(), made) == steps({3}));
  CHECK(made == t.act.bit());
  CHECK(alone.steps_for(t.act.bit(), made) == 0);

  made = 0;
  const LayerPolicy chain(t, t.norm.bit() | t.up.bit() | t.act.bit());
  CHECK(chain.steps_for(t.up.bit(), made) == steps({1, 2}));
  CHECK(made == (t.norm.bit() | t.up.bit()));
  CHECK(chain.steps_for(t.act.bit(), made) == steps({3}));
}

TEST_CASE("ports are read again only where the input is recomputed", "[memory]") {
  const Table t;
  SlotSet made = 0;
  const LayerPolicy kept(t, t.recomputable() & ~t.inputs());
  CHECK(t.reads_of(kept.steps_for(t.out.bit(), made)) ==
        (t.sum.bit() | t.norm.bit() | t.up.bit() | t.act.bit()));
  made = 0;
  const LayerPolicy all(t, t.recomputable());
  CHECK(all.steps_for(t.norm.bit(), made) == steps({0}));  // not the norm of a sum that is missing
  CHECK(made == (t.sum.bit() | t.norm.bit()));
  CHECK(all.steps_for(t.out.bit(), made) == steps({2, 3, 4}));
  CHECK(t.writes_of(steps({2, 4})) == (t.up.bit() | t.out.bit()));
}

TEST_CASE("a slot that a step changes which is not repeated cannot be recomputed", "[memory]") {
  Table t(false);
  t.step("change", t.act.bit(), t.act.bit(), training | evaluation);
  CHECK((t.recomputable() & t.act.bit()) == 0);
  t.step("cached", t.up.bit(), t.up.bit(), generation);
  CHECK((t.recomputable() & t.up.bit()) != 0);
  // Written in two ways: once, and for recomputation.
  const Slot copy = t.add(SlotSpec{.name = "copy", .width = 1});
  t.step("copy", t.up.bit(), copy.bit(), training);
  CHECK((t.recomputable() & copy.bit()) == 0);
  t.step("copy again", t.up.bit(), copy.bit(), recompute);
  CHECK((t.recomputable() & copy.bit()) != 0);
  t.step("change", copy.bit(), copy.bit(), training);
  CHECK((t.recomputable() & copy.bit()) == 0);
}

TEST_CASE("a layer with many slots", "[memory]") {
  LayerTable t;
  std::vector<Slot> slots;
  for (size_t s = 0; s < max_slots; ++s) slots.push_back(t.add(SlotSpec{.name = "s", .width = 1}));
  for (const size_t s : {size_t{0}, size_t{63}, size_t{64}, max_slots - 1})
    CHECK(first_slot(slots[s].bit()) == s);
  CHECK(first_slot(slots[100].bit() | slots[70].bit()) == 70);
  const Slot a = slots[3], b = slots[90];
  t.add(Step{.name = "a", .writes = a.bit()});
  t.add(Step{.name = "b", .reads = a.bit(), .writes = b.bit()});
  SlotSet made = 0;
  const LayerPolicy policy(t, b.bit());
  CHECK(policy.steps_for(b.bit(), made) == steps({1}));
  CHECK(made == b.bit());
}

TEST_CASE("steps that do not fit the table are errors", "[memory]") {
  Table t;
  CHECK_THROWS_WITH(t.step("late", 0, t.out.bit()), ContainsSubstring("follows backward steps"));
  LayerTable other;
  const Slot a = other.add(SlotSpec{.name = "a", .width = 1});
  const Slot port = other.add(SlotSpec{.name = "port", .width = 1, .port = true});
  CHECK_THROWS_WITH(other.add(Step{.name = "s", .reads = a.bit()}),
                    ContainsSubstring("no earlier step wrote"));
  CHECK_THROWS_WITH(other.add(Step{.name = "s", .writes = port.bit()}), ContainsSubstring("another layer"));
  CHECK_THROWS_WITH(other.add(Step{.name = "s", .pass = Pass::data, .remakes = a.bit()}),
                    ContainsSubstring("that no forward step recomputes"));
  for (size_t s = 2; s < max_slots; ++s) other.add(SlotSpec{.name = "s", .width = 1});
  CHECK_THROWS_WITH(other.add(SlotSpec{.name = "s", .width = 1}), ContainsSubstring("more than 192 slots"));
}
