// Memory that is kept between batches.
#ifndef TRTPU_BUFFER_H_
#define TRTPU_BUFFER_H_

#include <cstddef>
#include <new>
#include <type_traits>

namespace trtpu {

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
      const std::size_t grown = size + size / 8 + 64;
      Free();
      data_ = static_cast<T*>(::operator new(grown * sizeof(T), kAlignment));
      size_ = grown;
    }
    return data_;
  }

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void Free() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    size_ = 0;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace trtpu

#endif  // TRTPU_BUFFER_H_
