#include "trtpu/stats.h"

#include <algorithm>
#include <cstdint>

namespace trtpu {

void SumCounts(const Layout& layout, const Counts& counts, ThreadPool& pool, const Stats& stats,
               std::int64_t* num_slots) {
  const std::int64_t num_partitions = layout.num_cores;
  const std::int64_t num_local = layout.num_local_cores;
  const auto row_of = [&](std::int64_t table, std::int64_t core) {
    return (table * num_local + core) * num_partitions;
  };
  pool.Run(layout.num_stacks * num_local, [&](std::int64_t item, int) {
    const std::int64_t stack = item / num_local, core = item % num_local;
    std::int32_t* ids = stats.ids + item * num_partitions;
    std::int32_t* unique_ids = stats.unique_ids + item * num_partitions;
    std::int64_t slot = 0;
    for (std::int64_t p = 0; p < num_partitions; ++p) {
      std::int32_t sum = 0, unique = 0;
      for (std::int64_t t = 0; t < layout.num_tables(); ++t) {
        if (layout.tables[static_cast<std::size_t>(t)].stack != stack) continue;
        const std::int64_t i = row_of(t, core) + p;
        counts.slots[i] = static_cast<std::int32_t>(slot + sum);
        sum += counts.ids[i];
        unique += counts.unique_ids[i];
      }
      ids[p] = sum;
      unique_ids[p] = unique;
      slot = (slot + sum + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    }
    num_slots[item] = slot;
  });
  for (std::int64_t t = 0; t < layout.num_tables(); ++t) {
    const std::int64_t begin = row_of(t, 0), end = row_of(t + 1, 0);
    stats.table_max_ids[t] = *std::max_element(counts.ids + begin, counts.ids + end);
    stats.table_max_unique_ids[t] =
        *std::max_element(counts.unique_ids + begin, counts.unique_ids + end);
  }
}

}  // namespace trtpu
