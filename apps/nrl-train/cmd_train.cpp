// nrl-train CONFIG.yaml: the training run, and its end on all ranks with the same code.

#include "apps/nrl-train/commands.h"
#include "apps/train/run_io/stop_signal.h"
#include "apps/train/session.h"
#include "apps/train/trainer.h"
#include "core/base/log.h"
#include "core/base/output.h"
#include "core/base/threads.h"
#include "parallel/comm/world.h"

namespace nrl::app {

int run_in_world(const std::function<int(comm::World&)>& body) {
  const auto world = comm::World::init();
  log::init(world->rank(), world->size());
  try {
    const int code = body(*world);
    world->finalize();
    return code;
  } catch (const train::Leave& leave) {
    // Every rank is here with the same code.
    world->mark_failed();
    world->finalize();
    return static_cast<int>(leave.code);
  } catch (const std::exception& e) {
    // The other ranks wait elsewhere.
    const Error error = error_from(e);
    log::error_text(error.what());
    if (world->size() > 1) world->abort(error.code());
    world->mark_failed();
    return static_cast<int>(error.code());
  }
}

int run_train(const ConfigArgs& args) {
  stop::handle_at_start();
  output::background();
  return run_in_world([&](comm::World& world) {
    const ConfigResult config = train::load_config_together(world, args.path, args.overrides);
    return static_cast<int>(train::train(world, config));
  });
}

}  // namespace nrl::app
