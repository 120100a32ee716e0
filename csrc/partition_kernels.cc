#include "trtpu/partition_kernels.h"

#include <span>

#include "partition_kernels_generic.h"

namespace trtpu {

#if defined(__x86_64__)
extern const PartitionKernels kPartitionKernelsAvx2;
extern const PartitionKernels kPartitionKernelsAvx512;
#endif

namespace {

constexpr PartitionKernels kBaseline = {
    .name = "baseline",
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

struct Available {
  const PartitionKernels* sets[3] = {&kBaseline};
  std::size_t size = 1;

  Available() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("x86-64-v3")) sets[size++] = &kPartitionKernelsAvx2;
    if (__builtin_cpu_supports("x86-64-v4")) sets[size++] = &kPartitionKernelsAvx512;
#endif
  }
};

}  // namespace

std::span<const PartitionKernels* const> AvailablePartitionKernels() {
  static const Available available;
  return {available.sets, available.size};
}

}  // namespace trtpu
