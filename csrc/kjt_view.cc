#include "trtpu/kjt_view.h"

#include <cstdint>

namespace trtpu {
namespace {

constexpr std::int64_t kFault = -1;

// Writes one column's running sums to starts[1..n]. Returns the sum, kFault when a length is
// negative or larger than all values together.
template <class Int>
std::int64_t ScanLengths(const Int* lengths, std::int64_t n, std::int64_t num_values,
                         std::int32_t* starts) {
  std::uint64_t sum = 0;  // n * num_values fits; garbage may wrap and is a fault anyway
  bool fault = false;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t length = lengths[i];
    fault |= (length < 0) | (length > num_values);
    sum += static_cast<std::uint64_t>(length);
    starts[i + 1] = static_cast<std::int32_t>(sum);
  }
  return fault ? kFault : static_cast<std::int64_t>(sum);
}

template <class Int>
KjtProblem FromLengths(const Int* lengths, const KjtView& kjt, ThreadPool& pool,
                       std::int64_t* scratch, std::int32_t* starts) {
  const std::int64_t batch = kjt.batch_size;
  const std::int64_t num_values = kjt.values.size;
  pool.Run(kjt.num_keys, [&](std::int64_t key, int) {
    scratch[key] = ScanLengths(lengths + key * batch, batch, num_values, starts + key * batch);
  });
  std::int64_t total = 0;
  for (std::int64_t key = 0; key < kjt.num_keys; ++key) {
    const std::int64_t sum = scratch[key];
    if (sum == kFault) {
      std::int64_t i = key * batch;
      while (i + 1 < (key + 1) * batch && lengths[i] >= 0 && lengths[i] <= num_values) ++i;
      return {KjtProblem::kLength, i, lengths[i]};
    }
    scratch[key] = total;
    total += sum;
  }
  if (total != num_values) return {KjtProblem::kTotal, kjt.num_keys * batch, total};
  starts[0] = 0;
  pool.Run(kjt.num_keys, [&](std::int64_t key, int) {
    const std::int32_t before = static_cast<std::int32_t>(scratch[key]);
    for (std::int64_t i = key * batch + 1; i <= (key + 1) * batch; ++i) starts[i] += before;
  });
  return {};
}

// Copies one column's offsets to starts[1..n], given the offset before it. Returns kFault when they
// fall or pass num_values.
template <class Int>
std::int64_t CopyOffsets(const Int* offsets, std::int64_t n, std::int64_t num_values,
                         std::int32_t* starts) {
  std::int64_t before = offsets[0];
  bool fault = before < 0;
  for (std::int64_t i = 1; i <= n; ++i) {
    const std::int64_t offset = offsets[i];
    fault |= (offset < before) | (offset > num_values);
    starts[i] = static_cast<std::int32_t>(offset);
    before = offset;
  }
  return fault ? kFault : 0;
}

template <class Int>
KjtProblem FromOffsets(const Int* offsets, const KjtView& kjt, ThreadPool& pool,
                       std::int64_t* scratch, std::int32_t* starts) {
  const std::int64_t batch = kjt.batch_size;
  const std::int64_t num_values = kjt.values.size;
  const std::int64_t last = kjt.num_keys * batch;
  if (offsets[0] != 0) return {KjtProblem::kOffset, 0, offsets[0]};
  starts[0] = 0;
  pool.Run(kjt.num_keys, [&](std::int64_t key, int) {
    scratch[key] = CopyOffsets(offsets + key * batch, batch, num_values, starts + key * batch);
  });
  for (std::int64_t key = 0; key < kjt.num_keys; ++key) {
    if (scratch[key] != kFault) continue;
    std::int64_t i = key * batch + 1;
    while (i < (key + 1) * batch && offsets[i] >= offsets[i - 1] && offsets[i] <= num_values) ++i;
    return {KjtProblem::kOffset, i, offsets[i]};
  }
  if (starts[last] != num_values) return {KjtProblem::kTotal, last, starts[last]};
  return {};
}

}  // namespace

KjtProblem FindStarts(const KjtView& kjt, ThreadPool& pool, std::int64_t* scratch,
                      std::int32_t* starts) {
  const auto with_type = [](const IntArray& array, auto&& body) {
    return array.is_64bit ? body(static_cast<const std::int64_t*>(array.data))
                          : body(static_cast<const std::int32_t*>(array.data));
  };
  if (kjt.offsets.data != nullptr) {
    return with_type(kjt.offsets, [&](const auto* offsets) {
      return FromOffsets(offsets, kjt, pool, scratch, starts);
    });
  }
  return with_type(kjt.lengths, [&](const auto* lengths) {
    return FromLengths(lengths, kjt, pool, scratch, starts);
  });
}

}  // namespace trtpu
