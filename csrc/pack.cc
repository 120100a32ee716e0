#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>

#include "partition_state.h"
#include "trtpu/partition.h"

namespace trtpu {
namespace {

constexpr std::int32_t kPadId = std::numeric_limits<std::int32_t>::max();
constexpr float kPadGain = std::bit_cast<float>(0x7fc00000u);  // the quiet NaN of the format

// One core's part of a stack's buffers.
struct CoreBuffers {
  std::int32_t* row_pointers;
  std::int32_t* embedding_ids;
  std::int32_t* sample_ids;
  float* gains;
};

CoreBuffers BuffersOf(const PartitionState& state, const StackBuffers& stack, std::int64_t core) {
  const std::int64_t first = stack.num_slots / state.layout.num_local_cores * core;
  return {stack.row_pointers + core * NumRowPointers(state.layout.num_cores),
          stack.embedding_ids + first, stack.sample_ids + first, stack.gains + first};
}

// What SortWide left.
void PackWide(const PartitionItem& item, const std::uint64_t* run, const std::uint32_t* ends,
              const std::int32_t* slots, const float* gains, const TableLayout& table,
              const KeyMap& map, const CoreBuffers& out) {
  std::int64_t i = 0;
  for (std::int64_t part = 0; part < static_cast<std::int64_t>(map.num_parts); ++part) {
    std::int64_t slot = slots[map.PartitionOf(part)] - 1;
    for (const std::int64_t begin = i; i < ends[part]; ++i) {
      const std::uint32_t sample = static_cast<std::uint32_t>(run[i]);
      const float gain = item.gains == GainKind::kOnes        ? 1
                         : item.gains == GainKind::kPerSample ? gains[sample]
                                                              : gains[i];
      if (i > begin && run[i] == run[i - 1]) {
        out.gains[slot] += gain;
        continue;
      }
      ++slot;
      out.embedding_ids[slot] =
          static_cast<std::int32_t>(run[i] >> 32) + static_cast<std::int32_t>(table.row_offset);
      out.sample_ids[slot] = static_cast<std::int32_t>(sample + item.first_sample);
      out.gains[slot] = gain;
    }
  }
}

void PackItem(const PartitionState& state, std::int64_t item_index,
              std::span<const StackBuffers> stacks) {
  const PartitionItem& item = state.items[static_cast<std::size_t>(item_index)];
  const std::int64_t num_local = state.layout.num_local_cores, num_cores = state.layout.num_cores;
  const std::int64_t t = item_index / num_local;
  const TableLayout& table = state.layout.tables[static_cast<std::size_t>(t)];
  const KeyMap& map = state.key_maps[static_cast<std::size_t>(t)];
  const CoreBuffers out =
      BuffersOf(state, stacks[static_cast<std::size_t>(table.stack)], item_index % num_local);
  const std::uint32_t* ends = state.ends.data() + item.ends_begin;
  const std::int32_t* slots = state.slots.data() + item_index * num_cores;
  const std::int32_t* ids = state.ids.data() + item_index * num_cores;
  const float* gains = state.gains.data() + item.gains_begin;
  if (item.is_wide) {
    return PackWide(item, state.wide_runs.data() + item.begin, ends, slots, gains, table, map, out);
  }
  const std::uint32_t* words = state.words.data() + item.begin;
  const std::int32_t part_shift = item.plan.bucket_bits - map.part_bits;
  std::int64_t begin = 0;
  for (std::int64_t part = 0; part < static_cast<std::int64_t>(map.num_parts); ++part) {
    const std::int64_t p = map.PartitionOf(part);
    std::int64_t slot = slots[p];
    const std::int64_t last_slot = slot + ids[p];
    for (std::int64_t b = part << part_shift; b < (part + 1) << part_shift; ++b) {
      const std::int64_t n = ends[b] - begin;
      if (n == 0) continue;
      const std::uint64_t rest_mask = (std::uint64_t{1} << part_shift) - 1;
      const Slots target = {
          .row_ids = out.embedding_ids + slot,
          .samples = out.sample_ids + slot,
          .gains = out.gains + slot,
          .room = last_slot - slot,
          .first_row = static_cast<std::uint32_t>(
              ((static_cast<std::uint64_t>(b) & rest_mask) << item.plan.rest_bits) +
              static_cast<std::uint64_t>(table.row_offset)),
          .first_sample = item.first_sample,
          .low_bits = item.plan.low_bits};
      switch (item.gains) {
        case GainKind::kOnes:
          slot += state.kernels.write_ones(words + begin, n, target);
          break;
        case GainKind::kPerSample:
          slot += state.kernels.write_per_sample(words + begin, n, target, gains);
          break;
        case GainKind::kPerId:
          slot += state.kernels.write_per_id(words + begin, n, target, gains + begin);
          break;
      }
      begin += n;
    }
  }
}

// Row pointers, and the pads behind each partition.
void PackPointers(const PartitionState& state, std::int64_t stack, std::int64_t core,
                  std::span<const StackBuffers> stacks) {
  const std::int64_t num_local = state.layout.num_local_cores, num_cores = state.layout.num_cores;
  const CoreBuffers out = BuffersOf(state, stacks[static_cast<std::size_t>(stack)], core);
  const std::int32_t* ids = state.stack_ids.data() + (stack * num_local + core) * num_cores;
  std::int64_t slot = 0;
  for (std::int64_t p = 0; p < num_cores; ++p) {
    slot += ids[p];
    out.row_pointers[p] = static_cast<std::int32_t>(slot);
    for (; slot % kSlotAlignment != 0; ++slot) {
      out.embedding_ids[slot] = kPadId;
      out.sample_ids[slot] = kPadId;
      out.gains[slot] = kPadGain;
    }
  }
  std::fill(out.row_pointers + num_cores, out.row_pointers + NumRowPointers(num_cores),
            static_cast<std::int32_t>(slot));
}

}  // namespace

void Partitioner::Pack(std::span<const StackBuffers> stacks) {
  const PartitionState& state = *state_;
  const std::int64_t num_items = static_cast<std::int64_t>(state.items.size());
  const std::int64_t num_local = state.layout.num_local_cores;
  state.pool.Run(num_items + state.layout.num_stacks * num_local, [&](std::int64_t i, int) {
    if (i < num_items) {
      PackItem(state, state.order[static_cast<std::size_t>(i)], stacks);
    } else {
      PackPointers(state, (i - num_items) / num_local, (i - num_items) % num_local, stacks);
    }
  });
}

}  // namespace trtpu
