// What the kernels of one instruction set offer to row_ops.cc, in plain structs: this header goes
// into files compiled for wide vectors, so nothing in it may have inline code of its own.
#ifndef TRTPU_ROW_KERNELS_H_
#define TRTPU_ROW_KERNELS_H_

#include <cstdint>

namespace trtpu {

inline constexpr int kMaxSlots = 4;      // optimizer state arrays of one kind per table
inline constexpr int kLaneFloats = 16;   // floats per vector and per cache line
inline constexpr int kMaxColumns = 128;  // columns that one lookup item accumulates

// A float16 in memory. It is computed with as float32, and rounded to nearest even when stored.
struct Half {
  std::uint16_t bits;
};

// The samples of one feature on one core.
struct SampleRange {
  std::int32_t begin;   // first sample id on the core
  std::int32_t count;   // how many exist; ids behind them are padding
  std::int64_t offset;  // float offset of the first sample's vector in the output or gradient
  std::int64_t stride;  // floats from one sample's vector to the next
};

// Sums rows of one table into the samples of one core, for a block of columns.
struct LookupItem {
  // Entries of the core; run p (ids of partition p) is [run_begins[p], run_ends[p]).
  const std::int32_t* ids;
  const std::int32_t* samples;
  const float* gains;
  const std::int32_t* run_begins;
  const std::int32_t* run_ends;
  std::int64_t num_entries;  // over all runs
  // Local row l of partition p is row (l - row_offset) * row_step + ((p - rotation) mod P) *
  // partition_step of the table.
  const void* table;  // of Half in lookup_half, else of float
  std::int64_t dim;
  std::int64_t num_cores;
  std::int64_t rotation;
  std::int64_t row_offset;
  std::int64_t row_step;
  std::int64_t partition_step;
  // Columns [column, column + num_columns); num_columns is 16, 32, 64, 128 or less than 16.
  std::int64_t column;
  std::int64_t num_columns;
  // Samples [first_sample, first_sample + num_rows) belong to the ranges.
  const SampleRange* ranges;
  std::int64_t num_ranges;
  std::int32_t first_sample;
  std::int64_t num_rows;
  float* out;
  bool stream;           // write past the caches: the output is large and 64-byte aligned
  float* slab;           // (num_rows, num_columns rounded up to 16), 64-byte aligned
  std::uint64_t* taken;  // one bit per row
};

// Copies the gradient of one table's samples on one core into consecutive rows, clipped.
struct CompactItem {
  const float* grad;
  const SampleRange* ranges;
  std::int64_t num_ranges;
  std::int32_t first_sample;
  std::int64_t dim;
  float max_gradient;  // > 0; infinity for no clipping
  float* rows;         // row (sample - first_sample) starts at a multiple of row_stride
  std::int64_t row_stride;
};

// Entries may be prefetched this far behind the end of an update item's lists.
inline constexpr int kMaxAhead = 32;

// Applies one optimizer step to rows of one partition of one table, once each, with the sum of
// their entries' gain * gradient, in the order of the entries.
struct UpdateItem {
  std::int64_t num_rows;
  const std::uint32_t* rows;       // (num_rows + kMaxAhead) without the table's row offset
  const std::uint32_t* starts;     // (num_rows + 1) first entry of each row
  const std::uint32_t* grad_rows;  // (starts[num_rows] + kMaxAhead) row of grad
  const float* gains;
  const float* grad;
  std::int64_t grad_stride;
  // Row r starts at table + r * row_stride; the same in a row slot; r * scalar_stride in a scalar
  // one.
  void* table;  // of Half in update_half, else of float
  float* row_slots[kMaxSlots];
  float* scalar_slots[kMaxSlots];
  std::int64_t dim;
  std::int64_t row_stride;
  std::int64_t scalar_stride;
  const float* operands;
  float* sum;  // scratch (dim rounded up to 16), 64-byte aligned
};

// The fused update of one optimizer rule.
struct RuleKernel {
  const char* name;
  int num_row_slots;
  int num_scalar_slots;
  int num_operands;
  void (*update)(const UpdateItem& item);
  void (*update_half)(const UpdateItem& item);
};

struct RowKernels {
  const char* name;  // of the instruction set
  bool (*is_sorted)(const std::int32_t* ids, std::int64_t num_ids);
  // Whether every sample lies in one of the ranges.
  bool (*all_inside)(const std::int32_t* samples, std::int64_t num_samples,
                     const SampleRange* ranges, std::int64_t num_ranges);
  void (*lookup)(const LookupItem& item);
  void (*lookup_half)(const LookupItem& item);
  void (*compact)(const CompactItem& item);
  const RuleKernel* rules;
  int num_rules;
};

// Constants, so that looking at them runs no code compiled for their instruction set.
extern const RowKernels kBaselineRowKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RowKernels kAvx512RowKernels;
#endif

}  // namespace trtpu

#endif  // TRTPU_ROW_KERNELS_H_
