// A KeyedJaggedTensor's arrays, borrowed.
#ifndef TRTPU_KJT_VIEW_H_
#define TRTPU_KJT_VIEW_H_

#include <cstdint>
#include <span>

#include "trtpu/thread_pool.h"

namespace trtpu {

// A borrowed array of int32 or int64.
struct IntArray {
  const void* data = nullptr;
  std::int64_t size = 0;
  bool is_64bit = false;

  [[nodiscard]] std::int64_t operator[](std::int64_t i) const {
    return is_64bit ? static_cast<const std::int64_t*>(data)[i]
                    : static_cast<const std::int32_t*>(data)[i];
  }
};

// Bag b of KJT column k holds values [starts[k * batch_size + b], starts[k * batch_size + b + 1]).
struct KjtView {
  IntArray values;                 // at most 2^31 - 1
  IntArray lengths;                // (num_keys * batch_size), or
  IntArray offsets;                // (num_keys * batch_size + 1); the other one has no data
  const float* weights = nullptr;  // (values.size) or null
  std::span<const std::int32_t> key_of_feature{};  // (F): KJT column of each feature, stack order
  std::int64_t num_keys = 0;
  std::int64_t batch_size = 0;
};

struct KjtProblem {
  enum Kind { kNone, kLength, kOffset, kTotal } kind = kNone;
  std::int64_t position = -1;  // index into lengths or offsets of the lowest fault
  std::int64_t value = 0;      // what stands there; kTotal: the number of values asked for
};

// Fills starts (num_keys * batch_size + 1) from lengths or offsets, checking that bags are not
// negative and that together they hold all the values. `starts` is unspecified when they do not.
// `scratch` has room for num_keys.
[[nodiscard]] KjtProblem FindStarts(const KjtView& kjt, ThreadPool& pool, std::int64_t* scratch,
                                    std::int32_t* starts);

}  // namespace trtpu

#endif  // TRTPU_KJT_VIEW_H_
