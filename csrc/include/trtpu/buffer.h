// Memory that is kept between batches.
#ifndef TRTPU_BUFFER_H_
#define TRTPU_BUFFER_H_

#include <cstddef>
#include <type_traits>

namespace trtpu {

// Uninitialised bytes, aligned to a cache line; on huge pages when that can pay. Scattered stores
// over a few megabytes miss the first-level TLB at nearly every step on 4 KiB pages.
[[nodiscard]] void* AllocateScratch(std::size_t num_bytes);
void FreeScratch(void* data);

// An uninitialised array that only grows: after the largest batch was seen nothing is allocated any
// more. Starts on a cache line.
template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  ~Buffer() { Free(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Room for `size` elements. Growing loses the contents.
  T* Reserve(std::size_t size) {
    if (size > size_) {
      Free();
      const std::size_t grown = size + size / 8 + 64;
      data_ = static_cast<T*>(AllocateScratch(grown * sizeof(T)));
      size_ = grown;
    }
    return data_;
  }

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }

 private:
  void Free() {
    FreeScratch(data_);
    data_ = nullptr;
    size_ = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace trtpu

#endif  // TRTPU_BUFFER_H_
