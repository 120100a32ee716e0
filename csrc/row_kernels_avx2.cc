// Kernels for x86-64-v3 machines.
#if defined(__x86_64__)
#include "row_kernels_impl.h"

namespace trtpu {

extern constexpr RowKernels kAvx2RowKernels = MakeKernels("avx2");

}  // namespace trtpu
#endif  // __x86_64__
