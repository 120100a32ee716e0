// Where every id lives: the native side of sparsecore/layout.py.
#ifndef TRTPU_LAYOUT_H_
#define TRTPU_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace trtpu {

enum class Combiner : std::int32_t { kSum = 0, kMean = 1, kSqrtN = 2, kNone = 3 };

struct TableLayout {
  std::int32_t stack;
  std::int64_t num_embeddings;
  std::int64_t row_offset;  // rows of every core that belong to tables before this one in the stack
  std::int64_t rotation;
  std::int32_t
      first_feature;  // the table's features are [first_feature, first_feature + num_features)
  std::int32_t num_features;
  std::int64_t block_rows = 0;  // rows of a core's contiguous block; 0: every num_cores-th row
};

struct Layout {
  std::vector<TableLayout> tables;  // stack order
  std::vector<Combiner> combiners;  // one per feature, stack order
  // The least samples of a core for each sequence feature, stack order; empty: what a batch needs.
  std::vector<std::int64_t> sequence_samples_per_core;
  std::int32_t num_stacks;
  std::int32_t num_cores;        // partitions
  std::int32_t num_local_cores;  // source cores of this process

  [[nodiscard]] std::int32_t num_tables() const { return static_cast<std::int32_t>(tables.size()); }
  [[nodiscard]] std::int32_t num_features() const {
    return static_cast<std::int32_t>(combiners.size());
  }
};

// What contradicts itself in `layout`; empty when nothing does.
[[nodiscard]] std::string CheckLayout(const Layout& layout);

// How an id becomes a partition and a row.
enum class RowMapping {
  kMod,            // partition = (id + rotation) mod num_cores, row = id div num_cores
  kModPowerOfTwo,  // the same with a power of two of cores: shifts and masks do
  kBlocks,  // partition = (id div block_rows + rotation) mod num_cores, row = id mod block_rows
};

// Maps ids of one table to sort keys: id -> part << row_bits | row (without the table's
// row_offset). Parts are the partitions that have rows of the table, numbered in their order: all
// of them, or as many as there are blocks. Plain numbers, so that every vector kernel can use them.
struct KeyMap {
  RowMapping mapping;
  std::uint64_t num_embeddings;
  std::uint64_t num_parts;
  std::uint64_t rotation;    // part = (place + rotation) mod num_parts
  std::uint64_t divisor;     // num_cores, or block_rows
  std::uint64_t reciprocal;  // id * reciprocal >> reciprocal_shift == id div divisor, id < 2^31
  std::int32_t reciprocal_shift;
  std::int32_t part_bits;  // bits of the largest part
  std::int32_t row_bits;   // bits of the largest row
  bool is_narrow;          // keys fit 32 bits, and ids 31 where the reciprocal is needed
  std::int64_t skipped;    // partitions without rows of the table, behind part number rotation - 1

  [[nodiscard]] std::int64_t PartitionOf(std::int64_t part) const {
    return part < static_cast<std::int64_t>(rotation) ? part : part + skipped;
  }
};

[[nodiscard]] KeyMap MakeKeyMap(const TableLayout& table, std::int32_t num_cores);

}  // namespace trtpu

#endif  // TRTPU_LAYOUT_H_
