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

void PackItem(const PartitionState& state, std::int64_t item_index,
              std::span<const StackBuffers> stacks) {
  const PartitionItem& item = state.items[static_cast<std::size_t>(item_index)];
  const std::int64_t num_local = state.layout.num_local_cores, num_cores = state.layout.num_cores;
  const std::int64_t t = item_index / num_local;
  const TableLayout& table = state.layout.tables[static_cast<std::size_t>(t)];
  const CoreBuffers out =
      BuffersOf(state, stacks[static_cast<std::size_t>(table.stack)], item_index % num_local);
  const std::uint64_t* run = state.runs.data() + item.begin;
  const KeyMap& map = state.key_maps[static_cast<std::size_t>(t)];
  const std::uint32_t row_mask =
      item.is_wide ? ~0u : static_cast<std::uint32_t>((std::uint64_t{1} << map.row_bits) - 1);
  const std::uint32_t row_offset = static_cast<std::uint32_t>(table.row_offset);
  std::int64_t begin = 0;
  for (std::int64_t p = 0; p < num_cores; ++p) {
    const std::int64_t i = item_index * num_cores + p;
    const std::int64_t size = state.run_ends.data()[i] - begin;
    if (size > 0) {
      const std::int64_t slot = state.slots.data()[i], num_distinct = state.ids.data()[i];
      std::int32_t* row_ids = out.embedding_ids + slot;
      std::int32_t* samples = out.sample_ids + slot;
      float* gains = out.gains + slot;
      switch (item.gains) {
        case GainKind::kOnes:
          state.kernels.write_ones(run + begin, size, row_mask, row_offset, num_distinct, row_ids,
                                   samples, gains);
          break;
        case GainKind::kPerSample:
          state.kernels.write_per_sample(run + begin, size, row_mask, row_offset, num_distinct,
                                         state.sample_gains.data() + item.gains_begin,
                                         item.first_sample, row_ids, samples, gains);
          break;
        case GainKind::kPerId:
          state.kernels.write_per_id(run + begin, size, row_mask, row_offset, num_distinct,
                                     state.run_gains.data() + item.begin + begin, row_ids, samples,
                                     gains);
          break;
      }
    }
    begin += size;
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
