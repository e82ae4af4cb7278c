#pragma once
// Standard output and standard error of the process, written without waiting for whoever reads them.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace nrl {

/// Two file descriptors for lines of text, each with a bounded queue and a thread that writes it (started
/// with its first text). write() never waits for a reader. Texts reach the two descriptors in the order of
/// the calls; a descriptor that takes nothing for 0.2 s no longer holds up the other one. A full queue drops
/// its oldest texts and says how many lines are missing where they were. A descriptor that fails (EPIPE, EIO)
/// discards everything from then on. Thread-safe; no signal is delivered to the threads.
class OutputQueue {
 public:
  enum class Stream : uint8_t { out, err };
  /// The text that stands for dropped lines.
  using DroppedText = std::string (*)(int64_t lines);
  static std::string plain_dropped_text(int64_t lines);  ///< "(N lines were not shown)\n"

  struct Options {
    size_t queue_bytes = size_t{1} << 20;   ///< of one stream; a longer single text is taken all the same
    std::chrono::milliseconds stuck{1000};  ///< flush() gives up on a write() that takes longer
    std::chrono::milliseconds flush{5000};  ///< and returns after this time in any case
  };

  /// Does not own the descriptors.
  OutputQueue(int out, int err, const Options& options);
  OutputQueue(int out, int err) : OutputQueue(out, err, Options{}) {}
  ~OutputQueue();  ///< does not flush and does not wait for a thread that is inside of write(2)
  OutputQueue(const OutputQueue&) = delete;
  OutputQueue& operator=(const OutputQueue&) = delete;

  void write(Stream stream, std::string_view text);
  void set_dropped_text(DroppedText text);  ///< for `out`
  /// Waits until everything is written; false when a reader was too slow (see Options).
  bool flush();
  /// flush() at the end of the process: what standard output did not take is counted on standard error.
  void finish();
  /// Waits for at most `limit`. For signal handlers: async-signal-safe.
  void wait_in_handler(std::chrono::milliseconds limit) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the threads
};

/// The two streams of the process. write() is direct (through stdio, as in any program) until background(),
/// and goes through an OutputQueue after it.
namespace output {

using Stream = OutputQueue::Stream;

void write(Stream stream, std::string_view text);
/// For processes with work that must not wait for a reader. What is queued is flushed by exit() and
/// std::terminate(), and by flush() before anything else that ends the process.
void background();
void set_dropped_text(OutputQueue::DroppedText text);
void flush();
/// Async-signal-safe.
void flush_in_handler(std::chrono::milliseconds limit);

}  // namespace output
}  // namespace nrl
