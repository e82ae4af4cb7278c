// Keys of section reliability.
#include "core/config/schema.h"

namespace nrl::config_detail {

void add_reliability_keys(Table& t) {
  const Need watched{is_not("reliability.control", "off", "auto or require")};
  t.section("reliability", "Runs that lose a rank, or hang.");
  t.resume("reliability", OnResume::unrelated);
  NRL_KEY(t, reliability.control)
      .help(
          "Find ranks that died, stopped or hang, and end all ranks with one message and one exit code. "
          "auto: "
          "with several ranks; where nodes cannot connect, each node by itself, with a warning. require: "
          "refuse to run there. off: leave it to the launcher, which does not see a rank that hangs.");
  NRL_KEY(t, reliability.interface)
      .help("Network interface, or IPv4 address, for the messages between nodes; null: the default route's.")
      .only_with(watched);
  NRL_KEY(t, reliability.heartbeat_timeout_seconds)
      .at_least(1)
      .at_most(86400)
      .help("Silence after which a rank is lost for the others of its node, unless steps complete.")
      .only_with(watched);
  NRL_KEY(t, reliability.network_timeout_seconds)
      .at_least(2)
      .at_most(86400)
      .help("Silence after which a node is lost for the others, unless steps complete.")
      .only_with(watched);
  NRL_KEY(t, reliability.step_timeout_seconds)
      .at_least(1)
      .at_most(864000)
      .help(
          "Time without any progress on a rank after which all ranks are asked what they wait for. auto: 20 "
          "times the median step and at least 60 s where a step computes; 600 s in the first steps, while "
          "data is read, in evaluations and checkpoints; 1800 s while the run starts.")
      .only_with(watched);
  NRL_KEY(t, reliability.stragglers)
      .help(
          "Warn of ranks that need longer for their own work, without waits for others, than their peers: at "
          "least 10 % and five robust deviations above the median in three windows of 10 s in a row.")
      .only_with(watched);
  NRL_KEY(t, reliability.stacks)
      .help("Keep the stacks of the threads of a run that hangs, for nrl-train diagnose.")
      .only_with(watched);
  NRL_KEY(t, reliability.replica_check_period)
      .at_least(0)
      .help(
          "Steps between comparisons of the ranks that hold the same weights and optimizer state, bit for "
          "bit; also before every checkpoint. Other bits mean that hardware computed or kept a wrong number: "
          "the run ends with exit code 81. 0: never. Without effect where no rank has a replica.");
  NRL_KEY(t, reliability.recompute_check_period)
      .at_least(0)
      .help(
          "Steps between checks that repeat the passes of a step twice on every rank and compare "
          "log-probabilities and gradients bit for bit; a difference ends the run with exit code 81. 0: "
          "never. Costs two steps each. A GPU needs kernels.deterministic.");
}

}  // namespace nrl::config_detail
