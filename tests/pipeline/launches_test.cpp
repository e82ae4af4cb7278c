// Every schedule under the rules by which devices start NCCL's kernels. Each message is a kernel that
// occupies the device until its partner runs.

#include <cstdlib>

#include "tests/catch.h"
#include "tests/pipeline/legal.h"

using namespace nrl;
using namespace nrl::pipeline;
using comm::LaunchRules;
using Order = comm::LaunchRules::Order;

namespace {

/// The options of the other tests, and the sizes at which groups of microbatches are larger than the stages.
std::vector<ScheduleOptions> messages_of(ScheduleKind kind) {
  std::vector<ScheduleOptions> out;
  const auto add = [&](const ScheduleOptions& o) {
    if (o.stages > 1 && supported(o) && unsupported_reason(o).empty()) out.push_back(o);
  };
  for (const ScheduleOptions& o : all_options(kind)) add(o);
  for (const int p : {2, 3, 4, 6, 8})
    for (const int v : {1, 2, 3})
      for (const int n : {16, 20, 24, 32})
        for (const int group : {0, p, 2 * p})
          for (const bool overlap : {false, true})
            if (group == 0 || kind == ScheduleKind::interleaved) add({kind, p, v, n, group, overlap});
  return out;
}

struct Count {
  int sizes = 0, free = 0, issued = 0, serial = 0;
};

Count count(ScheduleKind kind) {
  Count out;
  for (const ScheduleOptions& o : messages_of(kind)) {
    const comm::LaunchModel model = message_launches(all_stages(o));
    ++out.sizes;
    // A stage has at most four channels, and the groups of a run leave room for the kernels of all of them.
    const std::string hang = model.hang({Order::free, model.streams()});
    INFO(text(o));
    CHECK(model.streams() <= 4);
    CHECK(hang == "");
    out.free += !hang.empty();
    out.issued += !model.hang({Order::issued}).empty();
    out.serial += !model.hang({Order::serial}).empty();
  }
  if (std::getenv("NRL_TEST_PRINT"))
    fmt::print(
        "{:<12} {:4} sizes; hangs: kernels start freely {}, in order of issue {}, one after another {}\n",
        name_of(kind), out.sizes, out.free, out.issued, out.serial);
  return out;
}

}  // namespace

TEST_CASE("messages of all schedules and sizes end when the kernels of all channels fit", "[launches]") {
  for (const ScheduleKind kind : all_kinds)
    if (kind != ScheduleKind::single) count(kind);
}

TEST_CASE("an order of launches would make schedules hang", "[launches]") {
  // Why NCCL_LAUNCH_ORDER_IMPLICIT is off.
  const Count one_f_one_b = count(ScheduleKind::one_f_one_b), interleaved = count(ScheduleKind::interleaved);
  CHECK(one_f_one_b.issued == 0);
  CHECK(one_f_one_b.serial > 0);
  CHECK(interleaved.issued > 0);
  CHECK(interleaved.serial > interleaved.issued);
  const auto hang = [](const ScheduleOptions& o, const LaunchRules& rules) {
    return message_launches(all_stages(o)).hang(rules);
  };
  const ScheduleOptions uneven{ScheduleKind::interleaved, 2, 2, 5};
  CHECK(hang(uneven, {Order::issued}) != "");
  CHECK(hang(uneven, {Order::free}) == "");
}

TEST_CASE("messages hang where fewer kernels fit than there are channels", "[launches]") {
  // One at a time: the send of one stage meets the send of the other.
  const ScheduleOptions o{ScheduleKind::one_f_one_b, 2, 1, 4};
  const comm::LaunchModel model = message_launches(all_stages(o));
  REQUIRE(model.streams() == 2);
  CHECK(model.hang({Order::free, 2}) == "");
  CHECK_THAT(model.hang({Order::free, 1}),
             ContainsSubstring("rank 0: #") && ContainsSubstring("waits for its partner"));
}

TEST_CASE("a receive that is missing or a send too many is found", "[launches]") {
  std::vector<Schedule> stages = all_stages({ScheduleKind::one_f_one_b, 2, 1, 2});
  std::erase_if(stages[1].actions,
                [](const Action& a) { return a.kind == ActionKind::receive_forward && a.microbatch == 1; });
  CHECK_THAT(message_launches(stages).hang({}), ContainsSubstring("send_forward(chunk 0, microbatch 1)"));
}
