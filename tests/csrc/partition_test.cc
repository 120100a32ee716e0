// Random batches against a slow restatement of the format, for every kernel set and several thread
// counts. Slots around each partition are watched.
#include "trtpu/partition.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"

namespace trtpu {
namespace {

using Rng = std::mt19937_64;

std::int64_t Pick(Rng& rng, std::int64_t low, std::int64_t high) {  // both included
  return std::uniform_int_distribution<std::int64_t>(low, high)(rng);
}

std::int64_t OneOf(Rng& rng, std::vector<std::int64_t> values) {
  return values[static_cast<std::size_t>(Pick(rng, 0, std::ssize(values) - 1))];
}

// A KJT with its own arrays.
struct Batch {
  std::int64_t num_keys, size, padded;
  std::vector<std::int64_t> values, lengths, offsets;
  std::vector<std::int32_t> values32, lengths32, offsets32;
  std::vector<float> weights;
  std::vector<std::int32_t> key_of_feature;
  bool is_64bit, has_offsets;

  [[nodiscard]] KjtView View() const {
    const auto ints = [&](const auto& wide, const auto& narrow) -> IntArray {
      const std::int64_t n = std::ssize(wide);
      // One element more would be out of bounds: the sanitizers watch it.
      return is_64bit ? IntArray{wide.data(), n, true} : IntArray{narrow.data(), n, false};
    };
    KjtView kjt;
    kjt.values = ints(values, values32);
    (has_offsets ? kjt.offsets : kjt.lengths) =
        has_offsets ? ints(offsets, offsets32) : ints(lengths, lengths32);
    kjt.weights = weights.empty() ? nullptr : weights.data();
    kjt.key_of_feature = key_of_feature;
    kjt.num_keys = num_keys;
    kjt.batch_size = size;
    return kjt;
  }
};

Layout RandomLayout(Rng& rng, bool is_wide) {
  Layout layout;
  layout.num_stacks = static_cast<std::int32_t>(Pick(rng, 1, 3));
  layout.num_cores = static_cast<std::int32_t>(is_wide ? OneOf(rng, {4, 6, 64, 8192})
                                                       : OneOf(rng, {1, 2, 3, 4, 6, 8, 16, 128}));
  layout.num_local_cores = static_cast<std::int32_t>(Pick(rng, 1, std::min(layout.num_cores, 4)));
  std::vector<std::int64_t> next_row(static_cast<std::size_t>(layout.num_stacks), 0);
  const std::int64_t num_tables = Pick(rng, 1, is_wide ? 3 : 4);
  for (std::int64_t t = 0; t < num_tables; ++t) {
    TableLayout table{};
    table.stack = static_cast<std::int32_t>(Pick(rng, 0, layout.num_stacks - 1));
    table.num_embeddings = OneOf(rng, {1, 2, 5, 40, 300, 5000, 1 << 20, 40'000'000});
    if (is_wide) table.num_embeddings = (std::int64_t{1} << 29) * layout.num_cores - 5;
    std::int64_t& row = next_row[static_cast<std::size_t>(table.stack)];
    table.row_offset = row + Pick(rng, 0, 3);
    const std::int64_t least = (table.num_embeddings - 1) / layout.num_cores + 1;
    row = table.row_offset + least;
    if (Pick(rng, 0, 1) == 0) {  // blocks: as short as can be, longer, or one for all
      const std::int64_t longest =
          std::max(least, std::min<std::int64_t>(is_wide ? least : table.num_embeddings + 9,
                                                 INT32_MAX - 1 - table.row_offset));
      table.block_rows = OneOf(rng, {least, Pick(rng, least, longest), longest});
      row = table.row_offset + std::min(table.block_rows, table.num_embeddings);
    }
    table.rotation = Pick(rng, 0, layout.num_cores - 1);
    table.first_feature = layout.num_features();
    table.num_features = static_cast<std::int32_t>(Pick(rng, 0, 3));
    const bool is_sequence = Pick(rng, 0, 3) == 0;
    for (std::int32_t f = 0; f < table.num_features; ++f) {
      layout.combiners.push_back(is_sequence ? Combiner::kNone
                                             : static_cast<Combiner>(Pick(rng, 0, 2)));
    }
    layout.tables.push_back(table);
  }
  CHECK(CheckLayout(layout).empty());
  return layout;
}

Batch RandomBatch(Rng& rng, const Layout& layout, IdPolicy policy) {
  Batch batch{};
  batch.num_keys = Pick(rng, 1, 4);
  batch.size = OneOf(rng, {0, 1, 7, 64, 700});
  const std::int64_t cores = layout.num_local_cores;
  batch.padded = (batch.size + cores - 1) / cores * cores + cores * Pick(rng, 0, 2);
  std::int64_t smallest = std::numeric_limits<std::int64_t>::max();
  for (const TableLayout& table : layout.tables) {
    if (table.num_features > 0) smallest = std::min(smallest, table.num_embeddings);
  }
  batch.is_64bit = smallest > (1 << 30) || Pick(rng, 0, 1) == 0;
  batch.has_offsets = Pick(rng, 0, 1) == 0;
  const std::int64_t longest = OneOf(rng, {0, 1, 3, 20});
  const bool is_skewed = Pick(rng, 0, 1) == 0;
  batch.offsets = {0};
  for (std::int64_t bag = 0; bag < batch.num_keys * batch.size; ++bag) {
    batch.lengths.push_back(Pick(rng, 0, longest));
    batch.offsets.push_back(batch.offsets.back() + batch.lengths.back());
    for (std::int64_t i = 0; i < batch.lengths.back(); ++i) {
      std::int64_t id = Pick(rng, 0, smallest - 1);
      if (is_skewed && Pick(rng, 0, 3) != 0) id %= std::max<std::int64_t>(smallest / 1000, 2);
      id %= smallest;
      if (policy != IdPolicy::kError && Pick(rng, 0, 9) == 0) {
        id = batch.is_64bit ? OneOf(rng, {-1, INT64_MIN, INT64_MAX, std::int64_t{1} << 62})
                            : OneOf(rng, {-1, INT32_MIN, INT32_MAX});
      }
      batch.values.push_back(id);
    }
  }
  if (Pick(rng, 0, 1) == 0) {
    for (std::size_t i = 0; i < batch.values.size(); ++i) {
      // Halves around zero, so that sums of 0 happen.
      batch.weights.push_back(static_cast<float>(Pick(rng, -2, 3)) * 0.5f);
    }
  }
  for (std::int32_t f = 0; f < layout.num_features(); ++f) {
    batch.key_of_feature.push_back(static_cast<std::int32_t>(Pick(rng, 0, batch.num_keys - 1)));
  }
  batch.values32.assign(batch.values.begin(), batch.values.end());
  batch.lengths32.assign(batch.lengths.begin(), batch.lengths.end());
  batch.offsets32.assign(batch.offsets.begin(), batch.offsets.end());
  return batch;
}

// What the format asks for.
struct Expected {
  using Entries = std::map<std::pair<std::int64_t, std::int64_t>, float>;  // (row, sample): gain
  std::vector<Entries> entries;                                            // (num_stacks, C, P)
  std::vector<std::int32_t> unique_ids;                                    // (num_stacks, C, P)
  std::vector<std::int64_t> num_samples, samples_per_core, num_invalid;    // (F)
};

float BagDivisor(Combiner combiner, std::span<const float> weights, bool is_weighted,
                 std::size_t size) {
  float sum = 0;
  for (const float weight : weights) {
    sum = combiner == Combiner::kMean
              ? sum + weight
              : static_cast<float>(static_cast<double>(sum) + static_cast<double>(weight) * weight);
  }
  if (!is_weighted) sum = static_cast<float>(size);
  return combiner == Combiner::kMean ? sum : combiner == Combiner::kSqrtN ? std::sqrt(sum) : 1;
}

Expected Expect(const Layout& layout, const Batch& batch, IdPolicy policy) {
  const std::int64_t C = layout.num_local_cores, P = layout.num_cores;
  Expected expected;
  expected.entries.resize(static_cast<std::size_t>(layout.num_stacks * C * P));
  expected.unique_ids.resize(expected.entries.size());
  std::vector<std::int64_t> first_sample(static_cast<std::size_t>(layout.num_stacks), 0);
  for (const TableLayout& table : layout.tables) {
    for (std::int32_t k = 0; k < table.num_features; ++k) {
      const std::size_t f = static_cast<std::size_t>(table.first_feature + k);
      const bool is_sequence = layout.combiners[f] == Combiner::kNone;
      const bool is_weighted = !batch.weights.empty() && !is_sequence;
      const std::int64_t first_bag = batch.key_of_feature[f] * batch.size;
      const auto start = [&](std::int64_t bag) {
        return batch.offsets[static_cast<std::size_t>(first_bag + bag)];
      };
      const std::int64_t num_samples = is_sequence ? start(batch.size) - start(0) : batch.size;
      const std::int64_t per_core = is_sequence ? (num_samples + C - 1) / C : batch.padded / C;
      std::int64_t& offset = first_sample[static_cast<std::size_t>(table.stack)];
      std::int64_t num_invalid = 0;
      for (std::int64_t bag = 0; bag < batch.size; ++bag) {
        std::vector<std::int64_t> ids, samples;
        std::vector<float> weights;
        for (std::int64_t i = start(bag); i < start(bag + 1); ++i) {
          std::int64_t id = batch.values[static_cast<std::size_t>(i)];
          const bool is_valid = id >= 0 && id < table.num_embeddings;
          num_invalid += !is_valid;
          if (!is_valid && policy == IdPolicy::kDrop) continue;
          ids.push_back(is_valid ? id : 0);
          samples.push_back(is_sequence ? i - start(0) : bag);
          if (is_weighted) weights.push_back(batch.weights[static_cast<std::size_t>(i)]);
        }
        const float divisor = BagDivisor(layout.combiners[f], weights, is_weighted, ids.size());
        for (std::size_t i = 0; i < ids.size(); ++i) {
          const float gain = divisor == 0 ? 0 : (is_weighted ? weights[i] : 1.0f) / divisor;
          const std::int64_t core = samples[i] / per_core;
          const std::int64_t n = table.block_rows;
          const std::int64_t place = n > 0 ? ids[i] / n : ids[i] % P;
          const std::int64_t partition = (place + table.rotation) % P;
          const std::int64_t row = (n > 0 ? ids[i] % n : ids[i] / P) + table.row_offset;
          auto& entries =
              expected.entries[static_cast<std::size_t>((table.stack * C + core) * P + partition)];
          const auto [at, is_new] = entries.insert({{row, offset + samples[i] % per_core}, gain});
          if (!is_new) at->second += gain;
        }
      }
      offset += per_core;
      expected.num_samples.push_back(num_samples);
      expected.samples_per_core.push_back(per_core);
      expected.num_invalid.push_back(num_invalid);
    }
  }
  for (std::size_t i = 0; i < expected.entries.size(); ++i) {
    std::int64_t before = -1;
    for (const auto& [place, gain] : expected.entries[i]) {
      expected.unique_ids[i] += place.first != before;
      before = place.first;
    }
  }
  return expected;
}

// Owns what a partition() fills.
struct OwnedStats {
  std::vector<std::int64_t> samples_per_core, num_samples, num_invalid;
  std::vector<std::int32_t> ids, unique_ids, table_max_ids, table_max_unique_ids;

  explicit OwnedStats(const Layout& layout) {
    const std::size_t F = layout.combiners.size(), T = layout.tables.size();
    const std::size_t n =
        static_cast<std::size_t>(layout.num_stacks * layout.num_local_cores * layout.num_cores);
    samples_per_core.resize(F);
    num_samples.resize(F);
    num_invalid.resize(F);
    ids.resize(n);
    unique_ids.resize(n);
    table_max_ids.resize(T);
    table_max_unique_ids.resize(T);
  }

  Stats View() {
    return {.samples_per_core = samples_per_core.data(),
            .num_samples = num_samples.data(),
            .ids = ids.data(),
            .unique_ids = unique_ids.data(),
            .table_max_ids = table_max_ids.data(),
            .table_max_unique_ids = table_max_unique_ids.data(),
            .num_invalid = num_invalid.data()};
  }
};

void CheckPacked(const Partitioner& partitioner, Partitioner& packer, const Expected& expected) {
  const Layout& layout = partitioner.layout();
  const std::int64_t C = layout.num_local_cores, P = layout.num_cores;
  constexpr std::int32_t kUntouched = -77;
  struct Owned {
    std::vector<std::int32_t> pointers, rows, samples;
    std::vector<float> gains;
  };
  std::vector<Owned> owned(static_cast<std::size_t>(layout.num_stacks));
  std::vector<StackBuffers> stacks;
  for (std::int64_t s = 0; s < layout.num_stacks; ++s) {
    std::int64_t most = 0;
    for (std::int64_t c = 0; c < C; ++c) {
      most = std::max(most, partitioner.num_slots()[static_cast<std::size_t>(s * C + c)]);
    }
    const std::size_t slots = static_cast<std::size_t>(C * (most + s));  // sometimes a slack
    Owned& one = owned[static_cast<std::size_t>(s)];
    one.pointers.assign(static_cast<std::size_t>(C * NumRowPointers(P)), kUntouched);
    one.rows.assign(slots, kUntouched);
    one.samples.assign(slots, kUntouched);
    one.gains.assign(slots, std::bit_cast<float>(kUntouched));
    stacks.push_back({one.pointers.data(), one.rows.data(), one.samples.data(), one.gains.data(),
                      static_cast<std::int64_t>(slots)});
  }
  packer.Pack(stacks);
  for (std::int64_t s = 0; s < layout.num_stacks; ++s) {
    const StackBuffers& stack = stacks[static_cast<std::size_t>(s)];
    for (std::int64_t c = 0; c < C; ++c) {
      const std::int32_t* pointers = stack.row_pointers + c * NumRowPointers(P);
      const std::int64_t first = stack.num_slots / C * c;
      const auto is_slot = [&](std::int64_t slot, std::int64_t row, std::int64_t sample,
                               std::int32_t gain_bits) {
        return stack.embedding_ids[first + slot] == row &&
               stack.sample_ids[first + slot] == sample &&
               std::bit_cast<std::int32_t>(stack.gains[first + slot]) == gain_bits;
      };
      std::int64_t slot = 0;
      for (std::int64_t p = 0; p < P; ++p) {
        for (const auto& [place, gain] :
             expected.entries[static_cast<std::size_t>((s * C + c) * P + p)]) {
          CHECK(is_slot(slot, place.first, place.second, std::bit_cast<std::int32_t>(gain)));
          ++slot;
        }
        CHECK(pointers[p] == slot);
        for (; slot % 8 != 0; ++slot) CHECK(is_slot(slot, INT32_MAX, INT32_MAX, 0x7fc00000));
      }
      for (std::int64_t p = P; p < NumRowPointers(P); ++p) CHECK(pointers[p] == slot);
      CHECK(partitioner.num_slots()[static_cast<std::size_t>(s * C + c)] == slot);
      for (; slot < stack.num_slots / C; ++slot) {
        CHECK(is_slot(slot, kUntouched, kUntouched, kUntouched));
      }
    }
  }
}

void TestRandomBatches(const PartitionKernels& kernels, int num_threads, int num_cases,
                       bool is_wide) {
  ThreadPool pool(num_threads);
  for (int seed = 0; seed < num_cases; ++seed) {
    Rng rng(static_cast<std::uint64_t>(seed));
    const Layout layout = RandomLayout(rng, is_wide);
    Partitioner partitioner(layout, pool, kernels);
    for (int repeat = 0; repeat < 3; ++repeat) {  // the same scratch, larger and smaller
      const IdPolicy policy = static_cast<IdPolicy>(Pick(rng, 0, 2));
      const Batch batch = RandomBatch(rng, layout, policy);
      OwnedStats stats(layout);
      const PartitionProblem problem =
          partitioner.Partition(batch.View(), batch.padded, policy, stats.View());
      CHECK(problem.kind == PartitionProblem::kNone && partitioner.has_batch());
      const Expected expected = Expect(layout, batch, policy);
      CHECK(stats.num_samples == expected.num_samples);
      CHECK(stats.samples_per_core == expected.samples_per_core);
      CHECK(stats.num_invalid == expected.num_invalid);
      CHECK(stats.unique_ids == expected.unique_ids);
      for (std::size_t i = 0; i < expected.entries.size(); ++i) {
        CHECK(stats.ids[i] == std::ssize(expected.entries[i]));
      }
      CheckPacked(partitioner, partitioner, expected);
      CheckPacked(partitioner, partitioner, expected);  // packing twice is fine
    }
  }
}

// Buckets of every size, and ids so popular that they fill buckets alone.
void TestLargeItems(const PartitionKernels& kernels) {
  ThreadPool pool(1);
  Rng rng(5);
  for (const std::int64_t rows : {3ll, 2000ll, 70'000ll, 40'000'000ll}) {
    for (const auto& [is_weighted, num_cores, block_rows] : {std::tuple{false, 2, 0ll},
                                                             {true, 2, 0ll},
                                                             {false, 2, (rows + 1) / 2},
                                                             {false, 64, rows}}) {
      Layout layout;
      layout.num_stacks = layout.num_local_cores = 1;
      layout.num_cores = num_cores;
      layout.combiners = {Combiner::kMean};
      layout.tables = {{.stack = 0,
                        .num_embeddings = rows,
                        .row_offset = 0,
                        .rotation = 1,
                        .first_feature = 0,
                        .num_features = 1,
                        .block_rows = block_rows}};
      Batch batch{};
      batch.num_keys = 1;
      batch.size = batch.padded = 3000;
      batch.is_64bit = true;
      batch.key_of_feature = {0};
      batch.offsets = {0};
      for (std::int64_t bag = 0; bag < batch.size; ++bag) {
        const std::int64_t length = bag == 17 ? 9000 : 12;
        batch.lengths.push_back(length);
        batch.offsets.push_back(batch.offsets.back() + length);
        for (std::int64_t i = 0; i < length; ++i) {
          const std::int64_t kind = Pick(rng, 0, 3);
          batch.values.push_back(kind == 0   ? rows / 2
                                 : kind == 1 ? Pick(rng, 0, 40) % rows
                                             : Pick(rng, 0, rows - 1));
          if (is_weighted) batch.weights.push_back(static_cast<float>(Pick(rng, 1, 9)));
        }
      }
      Partitioner partitioner(layout, pool, kernels);
      OwnedStats stats(layout);
      const PartitionProblem problem =
          partitioner.Partition(batch.View(), batch.padded, IdPolicy::kError, stats.View());
      CHECK(problem.kind == PartitionProblem::kNone);
      CheckPacked(partitioner, partitioner, Expect(layout, batch, IdPolicy::kError));
    }
  }
}

void TestProblems() {
  Layout layout;
  layout.num_stacks = 2;
  layout.num_cores = layout.num_local_cores = 2;
  layout.combiners = {Combiner::kSum, Combiner::kSum, Combiner::kNone};
  for (std::int32_t t = 0; t < 3; ++t) {
    layout.tables.push_back({.stack = t / 2,
                             .num_embeddings = t == 0 ? 10 : 5,
                             .row_offset = t == 1 ? 8 : 0,
                             .rotation = 0,
                             .first_feature = t,
                             .num_features = 1});
  }
  ThreadPool pool(2);
  Partitioner partitioner(layout, pool);
  CHECK(!partitioner.has_batch());
  OwnedStats stats(layout);
  Batch batch{};
  batch.num_keys = 2;
  batch.size = 2;
  batch.padded = 2;
  batch.is_64bit = true;
  // Feature 0 reads column 1; features 1 and 2 read column 0.
  batch.key_of_feature = {1, 0, 0};
  const auto partition = [&](std::vector<std::int64_t> values, std::vector<std::int64_t> lengths) {
    batch.values = std::move(values);
    batch.lengths = std::move(lengths);
    return partitioner.Partition(batch.View(), batch.padded, IdPolicy::kError, stats.View());
  };
  const auto is = [](const PartitionProblem& problem, PartitionProblem::Kind kind,
                     std::int64_t index, std::int64_t sample, std::int64_t position,
                     std::int64_t value) {
    return problem.kind == kind && problem.index == index && problem.sample == sample &&
           problem.position == position && problem.value == value;
  };
  // The first in KJT order is column 0's, although feature 0 has one too.
  CHECK(is(partition({1, 2, 5, 99}, {2, 1, 1, 0}), PartitionProblem::kId, 1, 1, 0, 5));
  CHECK(!partitioner.has_batch());
  CHECK(is(partition({1, 2, 4, 9, -3}, {2, 1, 0, 2}), PartitionProblem::kId, 0, 1, 1, -3));
  CHECK(is(partition({1}, {0, 0, -1, 2}), PartitionProblem::kLength, 1, 0, 2, -1));
  CHECK(is(partition({1}, {1, 1, 0, 0}), PartitionProblem::kTotal, -1, -1, 4, 2));
  CHECK(is(partition({1, 2, 4, 9}, {2, 1, 0, 1}), PartitionProblem::kNone, -1, -1, -1, 0));
  CHECK(partitioner.has_batch());
}

}  // namespace
}  // namespace trtpu

int main() {
  for (const trtpu::PartitionKernels* kernels : trtpu::AvailablePartitionKernels()) {
    std::printf("%s\n", kernels->name);
    trtpu::TestRandomBatches(*kernels, 1, 60, false);
    trtpu::TestRandomBatches(*kernels, 3, 30, false);
    trtpu::TestRandomBatches(*kernels, 1, 10, true);
    trtpu::TestLargeItems(*kernels);
  }
  trtpu::TestProblems();
}
