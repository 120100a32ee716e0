// Kernels for every machine that the library runs on.
#include "row_kernels_impl.h"

namespace trtpu {

extern constexpr RowKernels kBaselineRowKernels = MakeKernels("baseline");

}  // namespace trtpu
