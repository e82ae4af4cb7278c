// op_tests test|grad|big|list [PARTS]
//
// PARTS selects cases by texts in their names, separated by commas; after a "-" those without any of them.
// Mode big: tensors of more than 2^31 elements (big.h).
//
// Environment: NRL_TEST_BACKEND=NAME runs on that backend only; NRL_TEST_SMALL=N leaves out cases with a
// tensor of more than N elements; NRL_TEST_ONCE=1 does not compare the bits of two runs; NRL_TEST_BIG=N is
// the number of elements in mode big. Exit code 77: there is nothing to run on, for the reason printed.

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

#include <malloc.h>

#include "core/device/runtime.h"
#include "tests/kernels/uncovered.h"
#include "tests/ops/backend.h"
#include "tests/ops/big.h"
#include "tests/ops/reference/table.h"
#include "tests/ops/registry.h"

namespace nrl::ops_test {
namespace {

int failures = 0, large = 0;

void report(const std::string& where, const std::string& what) {
  ++failures;
  std::printf("FAILED %s: %s\n", where.c_str(), what.c_str());
}

/// A kernel of this case has made the device unusable for the rest of the process.
struct Lost {
  std::string where;
};

/// Runs `body`; an exception is a failure of `where`. Then tries the devices of `on`.
template <class Body>
void guarded(const std::string& where, const Body& body, std::span<const Backend> on = {}) {
  try {
    return body();
  } catch (const Failure& f) {
    report(where, f.text);
  } catch (const MissingKernel& m) {
    report(where, "there is no kernel " + m.name);
  } catch (const TooLarge&) {
    ++large;
  } catch (const std::exception& e) {
    report(where, e.what());
  }
  for (const Backend& backend : on) {
    try {
      if (backend.device) backend.device->synchronize();
    } catch (const Error&) {
      throw Lost{where};
    }
  }
}

/// Scratch memory for every context: one runs at a time. It starts as NaN, and then has what ops left there.
ops::Workspace scratch() {
  constexpr size_t bytes = size_t{96} << 20;
  static std::vector<std::byte> memory(bytes, std::byte{0xff});
  return {memory.data(), bytes};
}

/// An execution context with its workspace.
struct Context {
  ops::Exec exec;
  Context(const ops::KernelTable& kernels, int threads) {
    exec.kernels = &kernels;
    exec.threads = threads;
    exec.workspace = scratch();
  }
  Context(const Backend& backend, int threads) : Context(backend.kernels, threads) {
    if (backend.scratch) exec.workspace = {backend.scratch->data(), backend.scratch->size()};
    if (backend.gpu) exec.reduction_blocks = ops::gpu_partials;
    exec.device = backend.device.get();
    exec.stream = backend.stream ? backend.stream->get() : nullptr;
    exec.libraries = backend.libraries.get();
    exec.multiprocessors = backend.device ? backend.device->properties().multiprocessors
                           : backend.gpu  ? 4
                                          : 0;
  }
};

constexpr int exit_skipped = 77;
/// Nothing to run on.
struct Skipped {
  std::string why;
};

/// Whether the names selected by `filter` (see above) include this one.
bool selected(const std::string& name, std::string_view filter) {
  if (filter.empty()) return true;
  const bool inverted = filter.front() == '-';
  if (inverted) filter.remove_prefix(1);
  while (!filter.empty()) {
    const std::string_view part = filter.substr(0, filter.find(','));
    if (name.find(part) != std::string::npos) return !inverted;
    filter.remove_prefix(std::min(filter.size(), part.size() + 1));
  }
  return inverted;
}

/// Keeps the cases that `filter` selects, and of these the shard that the environment names.
template <class Case>
void keep_selected(std::vector<Case>& cases, std::string_view filter) {
  std::erase_if(cases, [&](const Case& c) { return !selected(c.name, filter); });
  const char* shard = std::getenv("NRL_TEST_SHARD");
  if (!shard) return;
  size_t i = 0, n = 0, next = 0;
  if (std::sscanf(shard, "%zu/%zu", &i, &n) != 2 || i >= n)
    throw Skipped{fmt::format("NRL_TEST_SHARD={} is not I/N", shard)};
  std::erase_if(cases, [&](const Case&) { return next++ % n != i; });
}

std::vector<Backend> backends() {
  Program all = program();
  if (const char* only = std::getenv("NRL_TEST_BACKEND")) {
    std::erase_if(all.backends, [only](const Backend& b) { return b.name != only; });
    if (all.skipped.empty()) all.skipped = fmt::format("there is no backend {}", only);
  }
  if (all.backends.empty()) throw Skipped{all.skipped};
  return std::move(all.backends);
}

bool all_same(const Outputs& a, const Outputs& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Output& x, const Output& y) { return same_bits(x.value, y.value); });
}

/// Whether the op of a case has exponentials.
bool has_exponentials(const std::string& name) {
  const auto is = [&name](std::string_view part) { return name.find(part) != std::string::npos; };
  return is("attention") || is("cross_entropy") || is("activation") || is("router") || is("topk_kl") ||
         is("scatter_columns");
}

/// What a GPU's arithmetic adds to the tolerance of a case.
double more_on_gpu(const std::string& name, const ops::Exec& exec) {
  return (has_exponentials(name) ? exp_tolerance(exec) : 0) +
         (name.starts_with("linear fp8")           ? fp8_sum_tolerance(exec, false)
          : name.starts_with("grouped_linear fp8") ? fp8_sum_tolerance(exec, true)
                                                   : 0);
}

/// Compares one run with the reference; returns the largest error / tolerance.
double compare(const std::string& where, const Outputs& got, const Outputs& want, double more) {
  expect(got.size() == want.size(), "another number of outputs than the reference");
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double tol =
        tolerance(got[i].value.tensor().dtype, got[i].reduction_length, got[i].rounded_factors) + more;
    const double error = error_of(got[i].value, want[i].value);
    worst = std::max(worst, error / tol);
    if (!(error <= tol)) {
      report(where, fmt::format("{} is off by {:.3g}, tolerance {:.3g}", got[i].name, error, tol));
    }
    if (!got[i].value.gap_intact()) report(where, got[i].name + ": wrote outside its rows");
  }
  return worst;
}

void run_test(const TestCase& test, const Backend& backend, const Outputs& want, double& worst,
              std::string& worst_name) {
  const std::string where = fmt::format("{} [{}]", test.name, backend.name);
  Context two(backend, 2);
  const Outputs got = test.body(two.exec);
  const double more = more_on_gpu(test.name, two.exec);
  const double relative = compare(where, got, want, more);
  if (relative > worst) {
    worst = relative;
    worst_name = where;
  }
  if (backend.deterministic && !std::getenv("NRL_TEST_ONCE")) {
    const Outputs again = test.body(two.exec);
    if (!all_same(got, again)) report(where, "another run gives other bits");
  }
  if (backend.gpu) return;
  Context one(backend, 1);
  const Outputs single = test.body(one.exec);
  compare(where + " 1 thread", single, want, 0);
  if (test.any_threads && !all_same(got, single)) report(where, "one thread gives other bits than two");
}

void run_tests(const Registry& registry) {
  const std::vector<Backend> all = backends();
  Context reference(ops::reference_kernels(), 1);
  if (const char* small = std::getenv("NRL_TEST_SMALL")) largest_buffer() = std::atoll(small);
  int count = 0;
  double worst = 0;
  std::string worst_name;
  for (const TestCase& test : registry.tests) {
    guarded(test.name, [&] {
      const Outputs want = test.body(reference.exec);
      for (const Backend& backend : all) {
        if (!backend.runs(test.name) || (test.no_gpu && backend.gpu)) continue;
        guarded(fmt::format("{} [{}]", test.name, backend.name),
                [&] { run_test(test, backend, want, worst, worst_name); }, {&backend, 1});
        ++count;
      }
    });
  }
  for (const PropertyCase& property : registry.properties) {
    if (property.large && largest_buffer() < INT64_MAX) {
      ++large;
      continue;
    }
    for (const Backend& backend : all) {
      if (!backend.runs(property.name) || (property.no_gpu && backend.gpu)) continue;
      guarded(fmt::format("{} [{}]", property.name, backend.name),
              [&] {
                Context two(backend, 2);
                property.body(two.exec);
                ++count;
              },
              {&backend, 1});
    }
  }
  std::printf("test: %d runs, worst error / tolerance %.2f (%s)\n", count, worst, worst_name.c_str());
  if (large > 0) std::printf("%d cases have tensors larger than NRL_TEST_SMALL\n", large);
  if (count == 0) report("test", "no case has that name");
}

/// Derivative of `loss` by element i of `input`, fourth order.
double difference(const GradProblem& problem, ops::Exec& exec, Buffer& input, int64_t i) {
  const double x = input.get(i), h = 1e-3;
  auto at = [&](double step) {
    input.set(i, x + step * h);
    const double value = problem.loss(exec);
    input.set(i, x);
    return value;
  };
  return (8.0 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12.0 * h);
}

void run_grads(const Registry& registry) {
  constexpr double difference_tolerance = 1e-8;
  const std::vector<Backend> all = backends();
  int count = 0;
  double worst = 0;
  for (const GradCase& grad : registry.grads) {
    const auto check = [&] {
      Context reference(ops::reference_kernels(), 1);
      const GradProblem exact = grad.make(DType::f64);
      expect(!exact.inputs.empty() && exact.inputs.size() == exact.gradients.size(),
             "one gradient per input");
      exact.loss(reference.exec);
      exact.backward(reference.exec);
      std::vector<Buffer> analytic;
      for (const Buffer* g : exact.gradients) analytic.push_back(*g);
      for (size_t k = 0; k < exact.inputs.size(); ++k) {
        Buffer numeric = analytic[k];
        for (int64_t i = 0; i < numeric.size(); ++i) {
          numeric.set(i, difference(exact, reference.exec, *exact.inputs[k], i));
        }
        const double error = error_of(analytic[k], numeric);
        worst = std::max(worst, error);
        if (!(error <= difference_tolerance)) {
          report(grad.name,
                 fmt::format("gradient {} of the reference is off its differences by {:.3g}", k, error));
        }
      }
      for (const Backend& backend : all) {
        if (!backend.runs(grad.name)) continue;
        Context two(backend, 2);
        const GradProblem single = grad.make(DType::f32);
        single.loss(two.exec);
        single.backward(two.exec);
        for (size_t k = 0; k < analytic.size(); ++k) {
          const double error = error_of(*single.gradients[k], analytic[k]);
          const double tol =
              tolerance(DType::f32, single.reduction_length) + more_on_gpu(grad.name, two.exec);
          if (!(error <= tol)) {
            report(
                fmt::format("{} [{}]", grad.name, backend.name),
                fmt::format("gradient {} is off the reference by {:.3g}, tolerance {:.3g}", k, error, tol));
          }
        }
      }
      ++count;
    };
    guarded(grad.name, check, all);
  }
  std::printf("grad: %d problems, worst difference %.2g\n", count, worst);
  if (count == 0) report("grad", "no case has that name");
}

void run_big(std::string_view filter) {
  const char* smaller = std::getenv("NRL_TEST_BIG");
  const int64_t elements = smaller ? std::atoll(smaller) : (int64_t{1} << 31) + 1;
  int count = 0;
  for (const Backend& backend : backends()) {
    if (!backend.device && !smaller) throw Skipped{"only for GPUs; NRL_TEST_BIG=N chooses smaller tensors"};
    for (const BigCase& big : big_cases()) {
      if (!selected(big.name, filter)) continue;
      const std::string where = fmt::format("{} [{}]", big.name, backend.name);
      const size_t needed = static_cast<size_t>(elements) * big.bytes_per_element / 100 * 103;
      if (backend.device && backend.device->free_memory() < needed) {
        std::printf("left out: %s needs %zu MiB of free memory\n", where.c_str(), needed >> 20);
        continue;
      }
      guarded(where,
              [&] {
                Context two(backend, 2);
                const std::string differs = big.run(two.exec, elements);
                if (!differs.empty()) report(where, differs);
              },
              {&backend, 1});
      ++count;
    }
  }
  std::printf("big: %d runs on more than %lld elements\n", count, static_cast<long long>(elements));
  if (count == 0) report("big", "no case ran");
}

void list(const Registry& registry) {
  const auto print = [](const char* mode, const auto& cases) {
    for (const auto& one : cases) std::printf("%s  %s\n", mode, one.name.c_str());
  };
  print("test", registry.tests);
  print("test", registry.properties);
  print("grad", registry.grads);
  std::printf("\n%s", uncovered_without_gpu);
}

/// Runs a mode; the process's exit code.
template <class Mode>
int run(const Mode& mode) {
  try {
    mode();
  } catch (const Skipped& s) {
    std::printf("skipped: %s\n%s", s.why.c_str(), uncovered_without_gpu);
    return exit_skipped;
  } catch (const Lost& lost) {
    std::printf("lost: %s: the device is unusable, later cases did not run\n", lost.where.c_str());
  }
  if (failures > 0) std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nrl::ops_test

int main(int argc, char** argv) {
  using namespace nrl::ops_test;
  // Large buffers come and go with every case: their pages stay with the process.
  mallopt(M_MMAP_THRESHOLD, INT_MAX);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
  const std::string_view mode = argc > 1 ? argv[1] : "", filter = argc > 2 ? argv[2] : "";
  Registry registry;
  for (Register r : registrars()) r(registry);
  const auto run_selected = [&](void (*body)(const Registry&)) {
    return run([&] {
      keep_selected(registry.tests, filter);
      keep_selected(registry.properties, filter);
      keep_selected(registry.grads, filter);
      body(registry);
    });
  };
  if (mode == "test") return run_selected(run_tests);
  if (mode == "grad") return run_selected(run_grads);
  if (mode == "big") return run([&] { run_big(filter); });
  if (mode == "list") return run_selected(list);
  std::fprintf(stderr, "usage: op_tests test|grad|big|list [[-]TEXT[,TEXT]...]\n");
  return 64;
}
