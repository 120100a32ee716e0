#include "trtpu/layout.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace trtpu {
namespace {

constexpr std::int64_t kMaxRow = std::numeric_limits<std::int32_t>::max() - 1;  // the maximum pads

std::int32_t BitsOf(std::uint64_t value) {
  return static_cast<std::int32_t>(std::bit_width(value));
}

// Rows of the fullest core.
std::int64_t NumRows(const TableLayout& table, std::int64_t num_cores) {
  return table.block_rows > 0 ? std::min(table.block_rows, table.num_embeddings)
                              : (table.num_embeddings - 1) / num_cores + 1;
}

std::string CheckTable(const Layout& layout, const TableLayout& table, std::int32_t first_feature,
                       std::int64_t first_row) {
  if (table.stack < 0 || table.stack >= layout.num_stacks) {
    return "stack " + std::to_string(table.stack) + " is outside 0.." +
           std::to_string(layout.num_stacks - 1);
  }
  if (table.num_embeddings < 1) {
    return "num_embeddings=" + std::to_string(table.num_embeddings) + " is not positive";
  }
  if (table.rotation < 0 || table.rotation >= layout.num_cores) {
    return "rotation=" + std::to_string(table.rotation) + " is outside 0.." +
           std::to_string(layout.num_cores - 1);
  }
  if (table.block_rows < 0 ||
      (table.block_rows > 0 && (table.num_embeddings - 1) / table.block_rows >= layout.num_cores)) {
    return "block_rows=" + std::to_string(table.block_rows) + " does not spread " +
           std::to_string(table.num_embeddings) + " rows over " + std::to_string(layout.num_cores) +
           " cores";
  }
  if (table.row_offset < first_row) {
    return "row_offset=" + std::to_string(table.row_offset) + " overlaps the rows below " +
           std::to_string(first_row);
  }
  if (table.row_offset > kMaxRow - (NumRows(table, layout.num_cores) - 1)) {
    return "its last row on a core does not fit int32 (row_offset=" +
           std::to_string(table.row_offset) +
           ", num_embeddings=" + std::to_string(table.num_embeddings) + " over " +
           std::to_string(layout.num_cores) + " cores); use fewer tables per stack or more cores";
  }
  if (table.num_features < 0 || table.first_feature != first_feature ||
      table.num_features > layout.num_features() - first_feature) {
    return "its features do not follow those of the table before";
  }
  return {};
}

}  // namespace

std::string CheckLayout(const Layout& layout) {
  if (layout.num_stacks < 1 || layout.num_cores < 1 || layout.num_local_cores < 1 ||
      layout.num_local_cores > layout.num_cores) {
    return "num_stacks=" + std::to_string(layout.num_stacks) +
           ", num_cores=" + std::to_string(layout.num_cores) +
           ", num_local_cores=" + std::to_string(layout.num_local_cores) +
           " must be positive, with no more local cores than cores";
  }
  if (static_cast<std::int64_t>(layout.num_cores) * layout.num_local_cores > (1 << 30)) {
    return "num_cores * num_local_cores must be at most 2^30";
  }
  for (const Combiner combiner : layout.combiners) {
    if (combiner < Combiner::kSum || combiner > Combiner::kNone) {
      return "combiner " + std::to_string(static_cast<std::int32_t>(combiner)) +
             " is not 0 (sum), 1 (mean), 2 (sqrtn) or 3 (none)";
    }
  }
  std::vector<std::int64_t> first_row(static_cast<std::size_t>(layout.num_stacks), 0);
  std::int32_t first_feature = 0;
  for (std::int32_t t = 0; t < layout.num_tables(); ++t) {
    const TableLayout& table = layout.tables[static_cast<std::size_t>(t)];
    const bool has_stack = table.stack >= 0 && table.stack < layout.num_stacks;
    const std::int64_t row = has_stack ? first_row[static_cast<std::size_t>(table.stack)] : 0;
    const std::string problem = CheckTable(layout, table, first_feature, row);
    if (!problem.empty()) return "table " + std::to_string(t) + ": " + problem;
    first_row[static_cast<std::size_t>(table.stack)] =
        table.row_offset + NumRows(table, layout.num_cores);
    first_feature += table.num_features;
  }
  if (first_feature != layout.num_features()) {
    return "the tables name " + std::to_string(first_feature) + " features, there are " +
           std::to_string(layout.num_features()) + " combiners";
  }
  return {};
}

KeyMap MakeKeyMap(const TableLayout& table, std::int32_t num_cores) {
  const std::uint64_t cores = static_cast<std::uint64_t>(num_cores);
  const std::uint64_t last = static_cast<std::uint64_t>(table.num_embeddings) - 1;
  const bool has_blocks = table.block_rows > 0;
  KeyMap map{};
  map.mapping = has_blocks                   ? RowMapping::kBlocks
                : std::has_single_bit(cores) ? RowMapping::kModPowerOfTwo
                                             : RowMapping::kMod;
  map.num_embeddings = last + 1;
  // A block may be longer than its table.
  map.divisor =
      has_blocks ? std::min(static_cast<std::uint64_t>(table.block_rows), last + 1) : cores;
  map.num_parts = has_blocks ? last / map.divisor + 1 : cores;
  map.rotation = static_cast<std::uint64_t>(table.rotation);
  if (has_blocks) {  // the blocks that pass the last core have the first partitions
    const std::uint64_t end = map.rotation + map.num_parts;
    map.rotation = end > cores ? end - cores : 0;
    map.skipped = table.rotation - static_cast<std::int64_t>(map.rotation);
  }
  map.part_bits = BitsOf(map.num_parts - 1);
  map.row_bits = BitsOf(static_cast<std::uint64_t>(NumRows(table, num_cores)) - 1);
  // ceil(2^(31+l) / d) with l = ceil(log2 d) fits 32 bits and is exact below 2^31.
  const bool is_small = last < (1ull << 31);
  if (is_small || !has_blocks) {
    map.reciprocal_shift = 31 + BitsOf(map.divisor - 1);
    map.reciprocal = ((std::uint64_t{1} << map.reciprocal_shift) + map.divisor - 1) / map.divisor;
  }
  map.is_narrow =
      map.part_bits + map.row_bits <= 32 && (map.mapping == RowMapping::kModPowerOfTwo || is_small);
  return map;
}

}  // namespace trtpu
