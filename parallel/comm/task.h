#pragma once
// Coroutines for communication: straight-line code that suspends, so that one thread keeps
// several operations in flight.

#include <coroutine>
#include <cstdint>
#include <exception>
#include <utility>

namespace nrl::comm {

/// Result of one attempt to make progress on an operation.
enum class Advance : uint8_t { waiting, progressed, done };

/// A coroutine. `co_await until(condition)` suspends it until the condition holds; `co_await` of another task
/// runs that task first. Starts with the first resume(). Reference arguments must outlive it.
///
///   Task all_reduce(...) {
///     post(requests);
///     co_await until([&] { return test(requests); });
///     reduce(...);
///   }
class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Coroutine = std::coroutine_handle<promise_type>;

  struct promise_type {
    Coroutine parent;           // the task that awaits this one; null for the outermost
    promise_type* root = this;  // of the outermost task
    std::exception_ptr error;
    // Of the root only.
    Coroutine innermost;             // resumed by resume()
    bool (*ready)(void*) = nullptr;  // condition of the innermost task; null: none
    void* condition = nullptr;

    Task get_return_object() { return Task(Coroutine::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() noexcept {}
    void unhandled_exception() noexcept { error = std::current_exception(); }
  };

  Task() = default;
  Task(Task&& o) noexcept : coroutine_(std::exchange(o.coroutine_, nullptr)) {}
  Task& operator=(Task&& o) noexcept {
    std::swap(coroutine_, o.coroutine_);
    return *this;
  }
  ~Task() {
    if (coroutine_) coroutine_.destroy();
  }

  /// Runs the task until it suspends or ends. Throws its error. Must not be called after `done`.
  Advance resume() {
    promise_type& root = coroutine_.promise();
    if (root.ready) {
      if (!root.ready(root.condition)) return Advance::waiting;
      root.ready = nullptr;
    }
    // Tasks are resumed from here and not from each other: the stack stays flat.
    while (true) {
      const Coroutine running = root.innermost;
      running.resume();
      if (running.done()) {
        if (running == coroutine_) {
          if (root.error) std::rethrow_exception(root.error);
          return Advance::done;
        }
        root.innermost = running.promise().parent;
      } else if (root.ready) {
        return Advance::progressed;
      }
    }
  }

  auto operator co_await() const noexcept {
    struct Awaiter {
      Coroutine child;
      bool await_ready() const noexcept { return false; }
      void await_suspend(Coroutine parent) const noexcept {
        promise_type& root = *parent.promise().root;
        child.promise().parent = parent;
        child.promise().root = &root;
        root.innermost = child;
      }
      void await_resume() const {
        if (child.promise().error) std::rethrow_exception(child.promise().error);
      }
    };
    return Awaiter{coroutine_};
  }

 private:
  explicit Task(Coroutine coroutine) : coroutine_(coroutine) { coroutine_.promise().innermost = coroutine_; }
  Coroutine coroutine_;
};

/// Awaitable: suspends until `condition` returns true; its exceptions are rethrown in the task.
template <class Condition>
class Until {
 public:
  explicit Until(Condition condition) : condition_(std::move(condition)) {}
  bool await_ready() { return condition_(); }
  void await_suspend(Task::Coroutine task) noexcept {
    Task::promise_type& root = *task.promise().root;
    root.condition = this;
    root.ready = [](void* self) noexcept { return static_cast<Until*>(self)->holds(); };
  }
  void await_resume() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  bool holds() noexcept {
    try {
      return condition_();
    } catch (...) {
      error_ = std::current_exception();
      return true;
    }
  }
  Condition condition_;
  std::exception_ptr error_;
};

template <class Condition>
Until<Condition> until(Condition condition) {
  return Until<Condition>(std::move(condition));
}

}  // namespace nrl::comm
