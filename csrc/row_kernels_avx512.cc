// Kernels for x86-64-v4 machines.
#if defined(__x86_64__)
#include "row_kernels_impl.h"

namespace trtpu {

extern constexpr RowKernels kAvx512RowKernels = MakeKernels("avx512");

}  // namespace trtpu
#endif  // __x86_64__
