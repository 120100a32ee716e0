// KJT batch -> sorted, merged, partitioned ids; and from there into SparseCore buffers.
#ifndef TRTPU_PARTITION_H_
#define TRTPU_PARTITION_H_

#include <cstdint>
#include <memory>
#include <span>

#include "trtpu/kjt_view.h"
#include "trtpu/layout.h"
#include "trtpu/partition_kernels.h"
#include "trtpu/stats.h"
#include "trtpu/thread_pool.h"

namespace trtpu {

// What to do with an id outside its table.
enum class IdPolicy : std::int32_t {
  kError = 0,
  kClamp = 1,  // becomes row 0
  kDrop = 2,   // leaves its bag; in a sequence its position stays, without an entry
};

struct PartitionProblem {
  enum Kind {
    kNone,
    kLength,    // a negative length, or one above the number of values
    kOffset,    // offsets that do not start at 0, fall, or pass the number of values
    kTotal,     // the bags do not hold exactly the values
    kId,        // an id outside its table
    kTooLarge,  // more samples or slots than int32 can number
  } kind = kNone;
  std::int64_t index = -1;     // kId: feature (stack order); kLength, kOffset: KJT column;
                               // kTooLarge: stack
  std::int64_t sample = -1;    // bag
  std::int64_t position = -1;  // kId: inside the bag; else in lengths or offsets
  std::int64_t value = 0;      // the id, length, offset or total that is wrong
};

// Row pointers of one core: what the hardware reads, at least 8.
[[nodiscard]] constexpr std::int64_t NumRowPointers(std::int64_t num_cores) {
  return num_cores < 8 ? 8 : num_cores;
}

// One stack's arrays, owned by the caller. Core c of the C local cores has slots
// [c * num_slots / C, (c + 1) * num_slots / C) and pointers [c * max(P, 8), (c + 1) * max(P, 8)).
struct StackBuffers {
  std::int32_t* row_pointers;   // (C * max(P, 8))
  std::int32_t* embedding_ids;  // (num_slots)
  std::int32_t* sample_ids;     // (num_slots)
  float* gains;                 // (num_slots)
  std::int64_t num_slots;
};

struct PartitionState;

// Keeps the sorted ids of the last batch and all scratch: in the steady state nothing is allocated.
// Not thread-safe.
class Partitioner {
 public:
  // CheckLayout(layout) found nothing. `pool` outlives the object.
  Partitioner(Layout layout, ThreadPool& pool,
              const PartitionKernels& kernels = *AvailablePartitionKernels().back());
  ~Partitioner();

  // Sorts and merges a batch. `padded_batch_size` is a multiple of the local cores and at least
  // kjt.batch_size. After a problem there is no batch to pack and `stats` is unspecified. Nothing
  // of the KJT is borrowed after the return.
  [[nodiscard]] PartitionProblem Partition(const KjtView& kjt, std::int64_t padded_batch_size,
                                           IdPolicy policy, const Stats& stats);

  // Whether the last Partition() found no problem.
  [[nodiscard]] bool has_batch() const;

  // Slots that each local core of each stack needs, multiples of 8: (num_stacks, C).
  [[nodiscard]] std::span<const std::int64_t> num_slots() const;

  // Writes the last batch, as often as wanted. has_batch(), and every core has its num_slots() or
  // more. Slots after a core's last aligned partition keep what they held.
  void Pack(std::span<const StackBuffers> stacks);

  [[nodiscard]] const Layout& layout() const;

 private:
  std::unique_ptr<PartitionState> state_;
};

}  // namespace trtpu

#endif  // TRTPU_PARTITION_H_
