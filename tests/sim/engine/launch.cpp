#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/sim/engine/block.h"
#include "tests/sim/engine/sanitizers.h"

namespace nrl::sim {
namespace {

template <class Int>
bool parse(std::string_view text, Int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

Options options_of_environment() {
  Options o;
  if (const char* text = std::getenv("NRL_SIM_ORDER")) {
    const std::string_view order = text;
    const size_t colon = order.find(':');
    const std::string_view name = order.substr(0, colon);
    bool good = true;
    if (name == "reverse") {
      o.order = Order::reverse;
    } else if (name == "random") {
      o.order = Order::random;
    } else {
      good = name == "forward";
    }
    if (colon != order.npos)
      good = good && o.order == Order::random && parse(order.substr(colon + 1), o.seed);
    if (!good) fail(Exit::usage, "NRL_SIM_ORDER={} is none of forward, reverse, random, random:SEED", text);
  }
  if (const char* text = std::getenv("NRL_SIM_THREADS")) {
    if (!parse(std::string_view(text), o.threads) || o.threads < 1) {
      fail(Exit::usage, "NRL_SIM_THREADS={} is not a number of threads", text);
    }
  }
  if (const char* text = std::getenv("NRL_SIM_RESIDENT")) {
    if (!parse(std::string_view(text), o.resident) || o.resident < 1) {
      fail(Exit::usage, "NRL_SIM_RESIDENT={} is not a number of blocks", text);
    }
  }
  return o;
}

std::mutex options_mutex;
std::optional<Options> chosen;

/// The workers of a launch share this.
struct Grid {
  const Launch& launch;
  const Options& options;
  void (*body)(void*);
  void* arguments;
  std::vector<uint32_t> blocks = {};  ///< in the order in which they start
  std::atomic<size_t> next = 0;

  bool start(size_t i, ThreadBlock& slot) {
    if (i >= blocks.size()) return false;
    slot.start(launch, blocks[i], options, body, arguments);
    return true;
  }
};

/// A multiprocessor, as it were: blocks follow each other in its resident slots.
class Worker {
 public:
  void run(Grid& grid) {
    if (busy_) throw KernelError(fmt::format("kernel {}: launched by a kernel", grid.launch.kernel));
    busy_ = true;
    std::exception_ptr error;
    try {
      if (grid.options.resident > 1) {
        run_together(grid);
      } else {
        run_one_by_one(grid);
      }
    } catch (...) {
      error = std::current_exception();
    }
    for (auto& slot : slots_) slot->join();
    busy_ = false;
    ++launches_;
    if (error) std::rethrow_exception(error);
  }

 private:
  ThreadBlock& slot(size_t i) {
    while (slots_.size() <= i) slots_.push_back(std::make_unique<ThreadBlock>());
    return *slots_[i];
  }

  /// To the thread sanitizer blocks of one slot are ordered, and blocks of two slots are concurrent. Which
  /// blocks share a slot alternates from launch to launch.
  void run_one_by_one(Grid& grid) {
    for (size_t i; (i = grid.next.fetch_add(1)) < grid.blocks.size();) {
      ThreadBlock& block = slot(sanitizer::thread() ? (i >> launches_ % 2) % 2 : 0);
      grid.start(i, block);
      while (block.step() != Progress::done) {
      }
    }
  }

  void run_together(Grid& grid) {
    struct Resident {
      ThreadBlock* block;
      bool waits;
    };
    std::vector<Resident> residents;
    for (size_t i = 0; i < static_cast<size_t>(grid.options.resident); ++i)
      if (grid.start(grid.next.fetch_add(1), slot(i))) residents.push_back({slots_[i].get(), false});
    const bool random = grid.options.order == Order::random;
    for (size_t turn = 0; !residents.empty(); ++turn) {
      const size_t drawn = random ? philox4x32(turn, ~uint64_t{1}, grid.options.seed)[0] : turn;
      Resident& one = residents[drawn % residents.size()];
      switch (one.block->step()) {
        case Progress::waits:
          one.waits = true;
          // Only a block that has not started could give the signals.
          if (grid.options.threads == 1 && std::ranges::all_of(residents, &Resident::waits))
            one.block->alone();
          continue;
        case Progress::done:
          if (!grid.start(grid.next.fetch_add(1), *one.block)) {
            std::swap(one, residents.back());
            residents.pop_back();
          }
          break;
        case Progress::moved:
          break;
      }
      for (Resident& r : residents) r.waits = false;
    }
  }

  std::vector<std::unique_ptr<ThreadBlock>> slots_;
  size_t launches_ = 0;
  bool busy_ = false;
};

/// Keeps its stacks from launch to launch. To the thread sanitizer a stream is a thread, and kernels of two
/// streams must not share CUDA threads, which would put them in order.
Worker& worker_here() {
  static thread_local Worker only;
  if (!sanitizer::thread()) return only;
  static thread_local std::list<std::pair<void*, Worker>> of_streams;  // the latest first
  constexpr size_t most = 8;
  void* const stream = sanitizer::current_fiber();
  auto it =
      std::find_if(of_streams.begin(), of_streams.end(), [=](const auto& w) { return w.first == stream; });
  if (it == of_streams.end()) {
    of_streams.emplace_front(std::piecewise_construct, std::tuple(stream), std::tuple());
    if (of_streams.size() > most) of_streams.pop_back();
  } else {
    of_streams.splice(of_streams.begin(), of_streams, it);
  }
  return of_streams.front().second;
}

}  // namespace

Options options() {
  const std::lock_guard lock(options_mutex);
  if (!chosen) chosen = options_of_environment();
  return *chosen;
}

void set_options(const Options& options) {
  const std::lock_guard lock(options_mutex);
  chosen = options;
}

void check_launch(const Launch& launch, size_t argument_bytes) {
  const ::dim3 g = launch.grid, b = launch.block;
  std::string wrong;
  constexpr unsigned max_block_z = 64, max_grid_yz = 65535, max_grid_x = 0x7fffffff;
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > max_threads || b.y > max_threads || b.z > max_block_z ||
      uint64_t{b.x} * b.y * b.z > max_threads) {
    wrong = fmt::format("blocks of {} x {} x {} threads", b.x, b.y, b.z);
  } else if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > max_grid_x || g.y > max_grid_yz || g.z > max_grid_yz) {
    wrong = fmt::format("a grid of {} x {} x {} blocks", g.x, g.y, g.z);
  } else if (launch.shared > max_shared) {
    wrong = fmt::format("{} bytes of dynamic shared memory, more than {}", launch.shared, max_shared);
  } else if (argument_bytes > max_arguments) {
    wrong = fmt::format("{} bytes of arguments, more than {}", argument_bytes, max_arguments);
  }
  if (!wrong.empty()) {
    throw KernelError(fmt::format("kernel {}: a GPU refuses {}", launch.kernel, wrong));
  }
}

void run_grid(const Launch& launch, void (*body)(void*), void* arguments) {
  Worker& here = worker_here();
  const Options chosen_options = options();
  Grid grid{launch, chosen_options, body, arguments};
  grid.blocks.resize(size_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  permute(chosen_options, ~uint64_t{0}, std::span<uint32_t>(grid.blocks));
  const size_t threads = std::min(static_cast<size_t>(chosen_options.threads), grid.blocks.size());
  if (threads == 1) {
    here.run(grid);
    return;
  }
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> pool;
  for (size_t t = 0; t < threads; ++t) {
    pool.emplace_back([&] {
      try {
        Worker().run(grid);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        grid.next = grid.blocks.size();
      }
    });
  }
  for (std::thread& t : pool) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace nrl::sim
