#pragma once
// Memory whose contents lie in a file, so that it may be larger than what the machine has.

#include <cstddef>
#include <string>

namespace nrl::cpu {

/// Zeroed, page-aligned memory that is a shared mapping of an unlinked file: the file's space is reserved at
/// construction and given back when the process ends, however it ends. Pages become resident when touched;
/// evict() takes them out of this process's memory. Move-only owner.
class FileMemory {
 public:
  FileMemory() = default;
  /// `directory`: on a file system that stores its files on a device, as scratch_directory() gives it. Fails
  /// with Exit::cannot_create where no file can be made, and with Exit::io where the space cannot be
  /// reserved.
  FileMemory(const std::string& directory, size_t bytes);
  ~FileMemory();
  FileMemory(FileMemory&& other) noexcept;
  FileMemory& operator=(FileMemory&& other) noexcept;

  /// Starts to read the pages of this range, without waiting.
  void prefetch(const void* begin, size_t bytes) const;
  /// Takes the pages of this range out of the memory of this process. Contents are kept: the system
  /// writes changed pages to the file when it needs their memory.
  void evict(const void* begin, size_t bytes) const;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// The directory for FileMemory: `configured`, or if that is empty TMPDIR, else /var/tmp. Fails with
/// Exit::config if `configured` lies in memory (tmpfs, ramfs), where files save none; such a TMPDIR is passed
/// over.
std::string scratch_directory(const std::string& configured);

}  // namespace nrl::cpu
