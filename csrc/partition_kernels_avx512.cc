#if defined(__x86_64__)

#include "partition_kernels_generic.h"

namespace trtpu {

extern const PartitionKernels kPartitionKernelsAvx512;
const PartitionKernels kPartitionKernelsAvx512 = {
    .name = "avx512",
    .make_entries_i32 = generic::MakeEntries<std::int32_t>,
    .make_entries_i64 = generic::MakeEntries<std::int64_t>,
    .count_digits = generic::CountDigits,
    .scatter = generic::Scatter,
    .resolve = generic::Resolve,
    .count_distinct = generic::CountDistinct,
    .write_ones = generic::WriteOnes,
    .write_per_sample = generic::WritePerSample,
    .write_per_id = generic::WritePerId,
};

}  // namespace trtpu

#endif
