#if defined(__x86_64__)

#include "partition_kernels_generic.h"

namespace trtpu {

extern const PartitionKernels kPartitionKernelsAvx2;
const PartitionKernels kPartitionKernelsAvx2 = {
    .name = "avx2",
    .make_keys_i32 = generic::MakeKeys<std::int32_t>,
    .make_keys_i64 = generic::MakeKeys<std::int64_t>,
    .fill_buckets = generic::FillBuckets,
    .sort_bucket = generic::SortBucket<generic::StartsOf>,
    .bucket_size = generic::kBucketSize,
    .resolve_bucket = generic::ResolveBucket,
    .count_bucket = generic::CountBucket,
    .write_ones = generic::WriteOnes,
    .write_per_sample = generic::WritePerSample,
    .write_per_id = generic::WritePerId,
};

}  // namespace trtpu

#endif
