#include "apps/train/launch/launch.h"

#include "apps/train/launch/run_control.h"
#include "apps/train/launch/run_records.h"
#include "core/base/log.h"
#include "core/base/threads.h"

namespace nrl::train {

int run_in_world(const std::function<int(comm::World&)>& body, Watch watch) {
  RunControl control;
  const auto world = comm::World::init();
  log::init(world->rank(), world->size());
  const auto end = [&] {
    world->finalize();
    control.finish();
  };
  try {
    if (watch == Watch::at_once) control.connect(*world, {});
    const int code = body(*world);
    end();
    return code;
  } catch (const AgreedExit& agreed) {
    // All ranks reach this with the same code.
    world->mark_failed();
    end();
    return static_cast<int>(agreed.code);
  } catch (const std::exception& e) {
    // The other ranks may be blocked in communication, so they must be ended.
    const Error error = error_from(e);
    if (control.connected()) {
      // A lost peer is rarely the cause: the verdict names it.
      if (error.code() != Exit::peer_lost) log::error_text(error.what());
      control.fail(error);
    }
    log::error_text(error.what());
    if (world->size() > 1) world->abort(error.code());
    world->mark_failed();
    return static_cast<int>(error.code());
  }
}

engine::StepResult collect_step(comm::World& world, engine::Engine& engine) {
  try {
    return engine.collect();
  } catch (const engine::StepStuck& e) {
    if (RunControl* control = RunControl::current(); control && control->connected()) control->hangs(e);
    log::error_text(e.what());
    if (RunRecords* records = RunRecords::current()) records->failed(records->describe(e.code(), e.what()));
    world.abort(e.code());
  }
}

}  // namespace nrl::train
