#include "trtpu/buffer.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace trtpu {

void* AllocateScratch(std::size_t num_bytes) {
  constexpr std::size_t kCacheLine = 64, kHugePage = std::size_t{2} << 20;
  const std::size_t alignment = num_bytes >= kHugePage / 2 ? kHugePage : kCacheLine;
  const std::size_t rounded = (num_bytes + alignment - 1) / alignment * alignment;
  void* const data = std::aligned_alloc(alignment, rounded);
  if (data == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  // Advice: where it is refused the pages are small and the results the same.
  if (alignment == kHugePage) static_cast<void>(madvise(data, rounded, MADV_HUGEPAGE));
#endif
  return data;
}

void FreeScratch(void* data) { std::free(data); }

}  // namespace trtpu
