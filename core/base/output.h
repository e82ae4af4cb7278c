#pragma once
// Standard output and standard error of the process, written without blocking on their readers.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace nrl {

/// Two file descriptors for lines of text, each with a bounded queue and a writer thread (started with its
/// first text). write() never blocks on a reader. Texts reach the two descriptors in the order of the calls,
/// unless one of them is blocked for more than 0.2 s. A full queue drops its oldest texts and prints how many
/// lines are missing in their place. A descriptor that fails (EPIPE, EIO) discards everything from then on.
/// Thread-safe; no signal is delivered to the threads.
class OutputQueue {
 public:
  enum class Stream : uint8_t { out, err };
  /// Returns the text printed in place of dropped lines.
  using DroppedText = std::string (*)(int64_t lines);
  static std::string plain_dropped_text(int64_t lines);  ///< "(N lines were not shown)\n"

  struct Options {
    size_t queue_bytes = size_t{1} << 20;   ///< per stream; a longer single text is accepted
    std::chrono::milliseconds stuck{1000};  ///< flush() gives up on a descriptor blocked for longer
    std::chrono::milliseconds flush{5000};  ///< longest time of flush()
  };

  /// Does not own the descriptors.
  OutputQueue(int out, int err, const Options& options);
  OutputQueue(int out, int err) : OutputQueue(out, err, Options{}) {}
  ~OutputQueue();  ///< does not flush, and does not wait for a thread inside write(2)
  OutputQueue(const OutputQueue&) = delete;
  OutputQueue& operator=(const OutputQueue&) = delete;

  void write(Stream stream, std::string_view text);
  void set_dropped_text(DroppedText text);  ///< for `out`
  /// Waits until everything is written; false when a reader was too slow (Options).
  bool flush();
  /// flush() at the end of the process; reports unwritten lines of standard output on standard error.
  void finish();
  /// Waits for at most `limit`. For signal handlers: async-signal-safe.
  void wait_in_handler(std::chrono::milliseconds limit) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads
};

/// The two streams of the process. write() goes through stdio until background() is called, and through an
/// OutputQueue after it.
namespace output {

using Stream = OutputQueue::Stream;

void write(Stream stream, std::string_view text);
/// For processes whose work must not block on a reader. exit() and std::terminate() flush the queue; call
/// flush() before any other way to end the process.
void background();
void set_dropped_text(OutputQueue::DroppedText text);
void flush();
/// Async-signal-safe.
void flush_in_handler(std::chrono::milliseconds limit);

}  // namespace output
}  // namespace nrl
