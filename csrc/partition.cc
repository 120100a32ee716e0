#include "trtpu/partition.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "partition_state.h"

namespace trtpu {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

Slice SliceOf(const PartitionState& state, const KjtView& kjt, std::int64_t feature,
              std::int64_t core) {
  const std::size_t f = static_cast<std::size_t>(feature);
  const std::int64_t first = std::min(core * state.samples_per_core[f], state.num_samples[f]);
  const std::int64_t last = std::min(first + state.samples_per_core[f], state.num_samples[f]);
  const std::int32_t* starts = state.starts.data() + kjt.key_of_feature[f] * kjt.batch_size;
  const bool is_sequence = state.layout.combiners[f] == Combiner::kNone;
  const std::int64_t first_id = is_sequence ? starts[0] + first : starts[first];
  return {.ids = kjt.values,
          .weights = is_sequence ? nullptr : kjt.weights,
          .starts = is_sequence ? nullptr : starts + first,
          .first_id = first_id,
          .num_ids = is_sequence ? last - first : starts[last] - first_id,
          .num_samples = last - first,
          .first_sample = state.first_sample[f],
          .combiner = state.layout.combiners[f]};
}

// The divisor of a bag's gains; 0 where the gains are to be 0. Sums run in order, in float32.
float Divisor(Combiner combiner, const float* weights, std::int64_t size) {
  switch (combiner) {
    case Combiner::kMean: {
      float sum = 0;
      for (std::int64_t i = 0; i < size; ++i) sum += weights[i];
      return sum;
    }
    case Combiner::kSqrtN: {
      float sum = 0;
      for (std::int64_t i = 0; i < size; ++i) {
        const double weight = weights[i];
        sum = static_cast<float>(sum + weight * weight);
      }
      return std::sqrt(sum);
    }
    default:
      return 1;
  }
}

// Appends one value per id: bits of its gain << 32 | sample, counted from `first_sample`.
void AddOccurrences(const Slice& slice, std::uint32_t first_sample, std::uint64_t* occurrences) {
  const auto pack = [](float gain, std::int64_t sample) {
    return static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(gain)) << 32 |
           static_cast<std::uint32_t>(sample);
  };
  for (std::int64_t s = 0; s < slice.num_samples; ++s) {
    const std::int64_t begin = slice.starts == nullptr ? s : slice.starts[s];
    const std::int64_t size = slice.starts == nullptr ? 1 : slice.starts[s + 1] - begin;
    const std::int64_t sample = slice.first_sample - first_sample + s;
    if (slice.weights == nullptr) {
      for (std::int64_t i = 0; i < size; ++i) *occurrences++ = pack(1, sample);
      continue;
    }
    const float* weights = slice.weights + begin;
    const float divisor = Divisor(slice.combiner, weights, size);
    for (std::int64_t i = 0; i < size; ++i) {
      *occurrences++ = pack(divisor == 0 ? 0 : weights[i] / divisor, sample);
    }
  }
}

// One gain per sample, without weights.
void AddSampleGains(const Slice& slice, float* gains) {
  for (std::int64_t s = 0; s < slice.num_samples; ++s) {
    const float size =
        slice.starts == nullptr ? 1 : static_cast<float>(slice.starts[s + 1] - slice.starts[s]);
    switch (slice.combiner) {
      case Combiner::kMean:
        gains[s] = 1.0f / size;  // an empty bag's gain is not used
        break;
      case Combiner::kSqrtN:
        gains[s] = 1.0f / std::sqrt(size);
        break;
      default:
        gains[s] = 1;
    }
  }
}

// Walks a slice's samples, id by id.
class SampleCursor {
 public:
  // Samples are counted from `first_sample`.
  SampleCursor(const Slice& slice, std::uint32_t first_sample)
      : slice_(slice), first_(slice.first_sample - first_sample), at_(slice.first_id) {}

  // The samples of the next n ids.
  void Next(std::int64_t n, std::uint32_t* samples) {
    if (slice_.starts == nullptr) {
      std::iota(samples, samples + n, first_ + static_cast<std::uint32_t>(at_ - slice_.first_id));
      at_ += n;
      return;
    }
    const std::int64_t end = at_ + n;
    while (at_ < end) {
      const std::int64_t bag_end = slice_.starts[sample_ + 1];
      const std::int64_t stop = std::min(bag_end, end);
      const std::uint32_t row = first_ + static_cast<std::uint32_t>(sample_);
      for (; at_ < stop; ++at_) *samples++ = row;
      if (stop == bag_end) ++sample_;
    }
  }

 private:
  const Slice& slice_;
  std::uint32_t first_;
  std::int64_t at_;
  std::int64_t sample_ = 0;
};

std::int32_t BitsOf(std::int64_t value) {
  return static_cast<std::int32_t>(std::bit_width(static_cast<std::uint64_t>(value)));
}

// How to sort an item in buckets. More than kMaxBucketBits: it cannot be.
SortPlan PlanOf(const PartitionItem& item, const KeyMap& map, std::int64_t bucket_size) {
  const std::int32_t key_bits = map.part_bits + map.row_bits;
  // Indices are replaced by samples, so both have to fit.
  const std::int64_t num_low =
      item.gains == GainKind::kPerId ? std::max(item.size, item.num_samples) : item.num_samples;
  SortPlan plan{};
  plan.low_bits = BitsOf(std::max<std::int64_t>(num_low - 1, 0));
  const std::int32_t needed = std::max(map.part_bits, key_bits + plan.low_bits - 32);
  // Less than eight buckets are not worth it: each id would wait for the one before to be counted.
  std::int32_t wanted = std::min(BitsOf(item.size / bucket_size), kMaxWantedBucketBits);
  if (wanted < 3) wanted = 0;
  // With few bits, and ids enough to pay for the counters, the buckets are the sort.
  if (key_bits <= std::min(9, BitsOf(item.size))) wanted = key_bits;
  plan.bucket_bits = std::min(std::max(wanted, needed), key_bits);
  plan.rest_bits = key_bits - plan.bucket_bits;
  // A digit costs its histogram's size in every bucket.
  const std::int64_t mean_size = item.size >> std::min(plan.bucket_bits, 31);
  const std::int32_t widest = std::clamp(BitsOf(mean_size) - 1, 6, kMaxDigitBits);
  plan.num_digits = std::min((plan.rest_bits + widest - 1) / widest, kMaxDigits);
  if (plan.num_digits > 0) {
    plan.digit_bits = (plan.rest_bits + plan.num_digits - 1) / plan.num_digits;
  }
  return plan;
}

// Keys of ids [first, first + n); see PartitionKernels.
bool MakeKeys(const PartitionKernels& kernels, const IntArray& ids, std::int64_t first,
              std::int64_t n, const KeyMap& map, const SortPlan& plan, std::uint32_t* keys,
              std::uint32_t* histogram) {
  return ids.is_64bit ? kernels.make_keys_i64(static_cast<const std::int64_t*>(ids.data) + first, n,
                                              map, plan, keys, histogram)
                      : kernels.make_keys_i32(static_cast<const std::int32_t*>(ids.data) + first, n,
                                              map, plan, keys, histogram);
}

// What one item needs to be sorted.
struct ItemContext {
  const PartitionKernels& kernels;
  const KeyMap& map;
  std::int64_t num_cores;
  PartitionItem& item;
  PartitionScratch& scratch;
  std::uint32_t* words;      // out (size)
  std::uint64_t* wide_run;   // out (size), is_wide
  std::uint32_t* ends;       // out (2^bucket_bits, or P)
  float* gains;              // out (num_samples) kPerSample, (size) kPerId
  std::int32_t* ids;         // out (P)
  std::int32_t* unique_ids;  // out (P)
};

// What tells the next n occurrences apart: their sample, counted from the item's first one, or
// their index where each has its own gain.
void NextLow(GainKind gains, SampleCursor& cursor, std::int64_t index, std::int64_t n,
             std::uint32_t* low) {
  if (gains == GainKind::kPerId) {
    std::iota(low, low + n, static_cast<std::uint32_t>(index));
  } else {
    cursor.Next(n, low);
  }
}

// Calls body(slice, cursor, first, n, at) for blocks of ids [first, first + n) of each slice, the
// at-th and following of the item.
template <class Body>
void ForEachBlock(std::span<const Slice> slices, std::uint32_t first_sample, Body body) {
  std::int64_t at = 0;
  for (const Slice& slice : slices) {
    SampleCursor cursor(slice, first_sample);
    for (std::int64_t i = 0; i < slice.num_ids; i += kBlock) {
      const std::int64_t n = std::min<std::int64_t>(kBlock, slice.num_ids - i);
      body(slice, cursor, slice.first_id + i, n, at);
      at += n;
    }
  }
}

// Sorts through buckets and counts the partitions. Returns false when an id is outside the table.
bool SortInBuckets(ItemContext& c, std::span<const Slice> slices) {
  const PartitionKernels& kernels = c.kernels;
  const SortPlan& plan = c.item.plan;
  const std::int64_t num_buckets = std::int64_t{1} << plan.bucket_bits;
  std::uint32_t* const counts = c.scratch.bucket_counts;
  std::uint32_t* const keys = c.scratch.keys.data();
  std::memset(counts, 0, sizeof(*counts) * 2 * static_cast<std::size_t>(num_buckets));
  bool is_outside = false;
  ForEachBlock(
      slices, c.item.first_sample,
      [&](const Slice& slice, SampleCursor&, std::int64_t first, std::int64_t n, std::int64_t at) {
        is_outside |= MakeKeys(kernels, slice.ids, first, n, c.map, plan, keys + at, counts);
        // The buckets will be written at random: have them near by then.
        for (std::int64_t i = at; i < at + n; i += 16) __builtin_prefetch(c.words + i, 1, 2);
      });
  if (is_outside) return false;
  std::uint32_t sum = 0;
  for (std::int64_t b = 0; b < num_buckets; ++b) {
    c.ends[b] = sum;  // starts, until the buckets are filled
    sum += counts[b] + counts[num_buckets + b];
  }
  ForEachBlock(
      slices, c.item.first_sample,
      [&](const Slice&, SampleCursor& cursor, std::int64_t, std::int64_t n, std::int64_t at) {
        NextLow(c.item.gains, cursor, at, n, c.scratch.low);
        kernels.fill_buckets(keys + at, c.scratch.low, n, plan, c.ends, c.words);
      });
  const std::int32_t part_shift = plan.bucket_bits - c.map.part_bits;
  std::int64_t begin = 0;
  for (std::int64_t b = 0; b < num_buckets; ++b) {
    const std::int64_t n = c.ends[b] - begin;
    if (n == 0) continue;
    std::uint32_t* const bucket = c.words + begin;
    if (n > 1 && plan.rest_bits > 0) {
      kernels.sort_bucket(bucket, n, plan, c.scratch.histogram, c.scratch.other.data());
    }
    if (c.item.gains == GainKind::kPerId) {
      kernels.resolve_bucket(bucket, n, plan.low_bits, c.scratch.occurrences.data(),
                             c.gains + begin);
    }
    const std::int64_t partition = c.map.PartitionOf(b >> part_shift);
    kernels.count_bucket(bucket, n, plan.low_bits, c.ids + partition, c.unique_ids + partition);
    begin += n;
  }
  return true;
}

// As SortInBuckets for what does not fit buckets: keys of more than 32 bits, or very many
// occurrences. Returns false when an id is outside the table.
bool SortWide(ItemContext& c, std::span<const Slice> slices) {
  constexpr std::int32_t kDigitBits = 11;
  constexpr std::uint64_t kSize = std::uint64_t{1} << kDigitBits;
  WideEntry *from = c.scratch.wide.data(), *to = c.scratch.wide_other.data();
  bool is_outside = false;
  ForEachBlock(slices, c.item.first_sample,
               [&](const Slice& slice, SampleCursor& cursor, std::int64_t first, std::int64_t n,
                   std::int64_t at) {
                 NextLow(c.item.gains, cursor, at, n, c.scratch.low);
                 for (std::int64_t i = 0; i < n; ++i) {
                   const std::uint64_t id = static_cast<std::uint64_t>(slice.ids[first + i]);
                   is_outside |= id >= c.map.num_embeddings;
                   const std::uint64_t quotient = id / c.map.divisor,
                                       remainder = id % c.map.divisor;
                   const bool has_blocks = c.map.mapping == RowMapping::kBlocks;
                   const std::uint64_t place = has_blocks ? quotient : remainder;
                   const std::uint64_t part = (place + c.map.rotation) % c.map.num_parts;
                   const std::uint64_t row = has_blocks ? remainder : quotient;
                   from[at + i] = {part << 32 | (row & 0xffffffffu), c.scratch.low[i]};
                 }
               });
  if (is_outside) return false;
  const std::int64_t size = c.item.size;
  const auto sort_by = [&](std::int32_t first_bit, std::int32_t num_bits) {
    std::uint32_t* const next = c.scratch.histogram;
    static_assert(kSize <= kHistogramSize);
    for (std::int32_t bit = first_bit; bit < first_bit + num_bits; bit += kDigitBits) {
      std::memset(next, 0, sizeof(*next) * kSize);
      for (std::int64_t i = 0; i < size; ++i) ++next[(from[i].key >> bit) & (kSize - 1)];
      std::exclusive_scan(next, next + kSize, next, 0u);
      for (std::int64_t i = 0; i < size; ++i) {
        to[next[(from[i].key >> bit) & (kSize - 1)]++] = from[i];
      }
      std::swap(from, to);
    }
  };
  sort_by(0, c.map.row_bits);
  sort_by(32, c.map.part_bits);
  std::uint64_t part = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    for (; part < from[i].key >> 32; ++part) c.ends[part] = static_cast<std::uint32_t>(i);
    std::uint32_t sample = from[i].low;
    if (c.item.gains == GainKind::kPerId) {
      const std::uint64_t occurrence = c.scratch.occurrences.data()[from[i].low];
      c.gains[i] = std::bit_cast<float>(static_cast<std::uint32_t>(occurrence >> 32));
      sample = static_cast<std::uint32_t>(occurrence);
    }
    c.wide_run[i] = from[i].key << 32 | sample;
    const bool is_first = i == 0 || from[i].key != from[i - 1].key;
    const std::int64_t partition = c.map.PartitionOf(static_cast<std::int64_t>(part));
    c.ids[partition] += is_first || c.wide_run[i] != c.wide_run[i - 1];
    c.unique_ids[partition] += is_first;
  }
  for (; part < c.map.num_parts; ++part) c.ends[part] = static_cast<std::uint32_t>(size);
  return true;
}

// Sorts one item and counts its partitions. Returns false when an id was outside the table.
bool SortItem(ItemContext& c, std::span<const Slice> slices) {
  std::fill_n(c.ids, c.num_cores, 0);
  std::fill_n(c.unique_ids, c.num_cores, 0);
  if (c.item.gains == GainKind::kPerId) {
    std::uint64_t* occurrences = c.scratch.occurrences.data();
    for (const Slice& slice : slices) {
      AddOccurrences(slice, c.item.first_sample, occurrences);
      occurrences += slice.num_ids;
    }
  } else if (c.item.gains == GainKind::kPerSample) {
    for (const Slice& slice : slices) {
      AddSampleGains(slice, c.gains + (slice.first_sample - c.item.first_sample));
    }
  }
  return c.item.is_wide ? SortWide(c, slices) : SortInBuckets(c, slices);
}

// Copies a slice without its invalid ids (kDrop) or with row 0 in their place (kClamp); returns the
// copy, which lives in the three given arrays, and adds to num_invalid.
Slice Sanitize(const Slice& slice, std::int64_t num_embeddings, IdPolicy policy, std::int64_t* ids,
               float* weights, std::int32_t* starts, std::int64_t* num_invalid) {
  std::int32_t size = 0;
  for (std::int64_t s = 0; s < slice.num_samples; ++s) {
    const std::int64_t begin = slice.starts == nullptr ? slice.first_id + s : slice.starts[s];
    const std::int64_t end = slice.starts == nullptr ? begin + 1 : slice.starts[s + 1];
    starts[s] = size;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t id = slice.ids[i];
      const bool is_valid = id >= 0 && id < num_embeddings;
      *num_invalid += !is_valid;
      if (!is_valid && policy == IdPolicy::kDrop) continue;
      ids[size] = is_valid ? id : 0;
      if (slice.weights != nullptr) weights[size] = slice.weights[i];
      ++size;
    }
  }
  starts[slice.num_samples] = size;
  Slice valid = slice;
  valid.ids = {.data = ids, .size = size, .is_64bit = true};
  valid.weights = slice.weights == nullptr ? nullptr : weights;
  valid.starts = starts;
  valid.first_id = 0;
  valid.num_ids = size;
  return valid;
}

// The invalid id that comes first in the KJT (column, then position).
PartitionProblem FindInvalidId(const PartitionState& state, const KjtView& kjt) {
  std::vector<std::int64_t> features(static_cast<std::size_t>(state.layout.num_features()));
  std::iota(features.begin(), features.end(), 0);
  std::stable_sort(features.begin(), features.end(), [&](std::int64_t a, std::int64_t b) {
    return kjt.key_of_feature[static_cast<std::size_t>(a)] <
           kjt.key_of_feature[static_cast<std::size_t>(b)];
  });
  PartitionProblem first;
  std::int64_t first_position = 0, first_key = -1;
  for (const std::int64_t feature : features) {
    const std::size_t f = static_cast<std::size_t>(feature);
    const std::int64_t key = kjt.key_of_feature[f];
    if (first.kind != PartitionProblem::kNone && key != first_key) break;
    const std::int64_t num_embeddings =
        state.layout.tables[static_cast<std::size_t>(state.table_of_feature[f])].num_embeddings;
    const std::int32_t* starts = state.starts.data() + key * kjt.batch_size;
    for (std::int64_t i = starts[0]; i < starts[kjt.batch_size]; ++i) {
      const std::int64_t id = kjt.values[i];
      if (id >= 0 && id < num_embeddings) continue;
      if (first.kind == PartitionProblem::kNone || i < first_position) {
        const std::int64_t bag =
            std::upper_bound(starts, starts + kjt.batch_size + 1, i) - starts - 1;
        first = {PartitionProblem::kId, feature, bag, i - starts[bag], id};
        first_position = i;
        first_key = key;
      }
      break;
    }
  }
  return first;
}

// Sizes everything for the batch whose `starts` are known.
PartitionProblem PlanBatch(PartitionState& state, const KjtView& kjt,
                           std::int64_t padded_batch_size) {
  const Layout& layout = state.layout;
  const std::int64_t num_local = layout.num_local_cores;
  std::vector<std::int64_t>& samples_of_stack = state.samples_of_stack;
  std::fill(samples_of_stack.begin(), samples_of_stack.end(), 0);
  std::int64_t begin = 0, wide_begin = 0, ends_begin = 0, gains_begin = 0;
  for (std::int64_t t = 0; t < layout.num_tables(); ++t) {
    const TableLayout& table = layout.tables[static_cast<std::size_t>(t)];
    const KeyMap& map = state.key_maps[static_cast<std::size_t>(t)];
    std::int64_t& stack_samples = samples_of_stack[static_cast<std::size_t>(table.stack)];
    const std::int64_t first_sample = stack_samples;
    GainKind gains = GainKind::kOnes;
    for (std::int64_t f = table.first_feature; f < table.first_feature + table.num_features; ++f) {
      const std::size_t i = static_cast<std::size_t>(f);
      const std::int32_t* starts = state.starts.data() + kjt.key_of_feature[i] * kjt.batch_size;
      if (layout.combiners[i] == Combiner::kNone) {
        state.num_samples[i] = starts[kjt.batch_size] - starts[0];
        state.samples_per_core[i] = (state.num_samples[i] + num_local - 1) / num_local;
        if (!layout.sequence_samples_per_core.empty()) {
          state.samples_per_core[i] =
              std::max(state.samples_per_core[i], layout.sequence_samples_per_core[i]);
        }
      } else {
        state.num_samples[i] = kjt.batch_size;
        state.samples_per_core[i] = padded_batch_size / num_local;
        if (kjt.weights != nullptr) {
          gains = GainKind::kPerId;
        } else if (layout.combiners[i] != Combiner::kSum && gains == GainKind::kOnes) {
          gains = GainKind::kPerSample;
        }
      }
      state.first_sample[i] = static_cast<std::uint32_t>(stack_samples);
      stack_samples += state.samples_per_core[i];
      if (stack_samples > kInt32Max) {
        return {PartitionProblem::kTooLarge, table.stack, -1, -1, stack_samples};
      }
    }
    for (std::int64_t core = 0; core < num_local; ++core) {
      PartitionItem& item = state.items[static_cast<std::size_t>(t * num_local + core)];
      item = {};
      for (std::int64_t f = table.first_feature; f < table.first_feature + table.num_features;
           ++f) {
        item.size += SliceOf(state, kjt, f, core).num_ids;
      }
      if (item.size > kInt32Max) {
        return {PartitionProblem::kTooLarge, table.stack, -1, -1, item.size};
      }
      item.num_samples = stack_samples - first_sample;
      item.first_sample = static_cast<std::uint32_t>(first_sample);
      item.gains = gains;
      item.plan = PlanOf(item, map, state.kernels.bucket_size);
      item.is_wide = !map.is_narrow || item.plan.bucket_bits > kMaxBucketBits;
      std::int64_t& begin_of_kind = item.is_wide ? wide_begin : begin;
      item.begin = begin_of_kind;
      begin_of_kind += item.size;
      item.ends_begin = ends_begin;
      ends_begin += item.is_wide ? layout.num_cores : std::int64_t{1} << item.plan.bucket_bits;
      item.gains_begin = gains_begin;
      if (gains == GainKind::kPerSample) gains_begin += item.num_samples;
      if (gains == GainKind::kPerId) gains_begin += item.size;
    }
  }
  state.words.Reserve(static_cast<std::size_t>(begin));
  state.wide_runs.Reserve(static_cast<std::size_t>(wide_begin));
  state.ends.Reserve(static_cast<std::size_t>(ends_begin));
  state.gains.Reserve(static_cast<std::size_t>(gains_begin));

  std::iota(state.order.begin(), state.order.end(), 0);
  if (state.pool.num_threads() > 1) {
    std::sort(state.order.begin(), state.order.end(), [&](std::int64_t a, std::int64_t b) {
      const std::int64_t size_a = state.items[static_cast<std::size_t>(a)].size;
      const std::int64_t size_b = state.items[static_cast<std::size_t>(b)].size;
      return size_a != size_b ? size_a > size_b : a < b;
    });
  }
  std::int64_t largest = 0, largest_wide = 0, most_occurrences = 0;
  for (const PartitionItem& item : state.items) {
    std::int64_t& size = item.is_wide ? largest_wide : largest;
    size = std::max(size, item.size);
    if (item.gains == GainKind::kPerId) most_occurrences = std::max(most_occurrences, item.size);
  }
  for (PartitionScratch& scratch : state.scratch) {
    scratch.keys.Reserve(static_cast<std::size_t>(largest));
    scratch.other.Reserve(static_cast<std::size_t>(2 * largest + kSpill));
    scratch.wide.Reserve(static_cast<std::size_t>(largest_wide));
    scratch.wide_other.Reserve(static_cast<std::size_t>(largest_wide));
    scratch.occurrences.Reserve(static_cast<std::size_t>(most_occurrences));
  }
  return {};
}

ItemContext ContextOf(PartitionState& state, std::int64_t i, int thread) {
  PartitionItem& item = state.items[static_cast<std::size_t>(i)];
  const std::int64_t row = i * state.layout.num_cores;
  return {.kernels = state.kernels,
          .map = state.key_maps[static_cast<std::size_t>(i / state.layout.num_local_cores)],
          .num_cores = state.layout.num_cores,
          .item = item,
          .scratch = state.scratch[static_cast<std::size_t>(thread)],
          .words = state.words.data() + item.begin,
          .wide_run = state.wide_runs.data() + item.begin,
          .ends = state.ends.data() + item.ends_begin,
          .gains = state.gains.data() + item.gains_begin,
          .ids = state.ids.data() + row,
          .unique_ids = state.unique_ids.data() + row};
}

std::span<Slice> SlicesOf(const PartitionState& state, const KjtView& kjt, std::int64_t item,
                          PartitionScratch& scratch) {
  const std::int64_t num_local = state.layout.num_local_cores;
  const TableLayout& table = state.layout.tables[static_cast<std::size_t>(item / num_local)];
  const std::span<Slice> slices(scratch.slices.data(),
                                static_cast<std::size_t>(table.num_features));
  for (std::size_t k = 0; k < slices.size(); ++k) {
    slices[k] =
        SliceOf(state, kjt, table.first_feature + static_cast<std::int64_t>(k), item % num_local);
  }
  return slices;
}

// Sorts every item; returns whether one of them has an invalid id and is not sorted.
bool SortItems(PartitionState& state, const KjtView& kjt) {
  state.pool.Run(static_cast<std::int64_t>(state.order.size()), [&](std::int64_t rank, int thread) {
    const std::int64_t i = state.order[static_cast<std::size_t>(rank)];
    ItemContext context = ContextOf(state, i, thread);
    const std::span<const Slice> slices = SlicesOf(state, kjt, i, context.scratch);
    context.item.has_invalid = !SortItem(context, slices);
  });
  return std::any_of(state.items.begin(), state.items.end(),
                     [](const PartitionItem& item) { return item.has_invalid; });
}

// Sorts what is left of the items that SortItems could not.
void SortSanitizedItems(PartitionState& state, const KjtView& kjt, IdPolicy policy) {
  const std::int64_t num_local = state.layout.num_local_cores;
  std::int64_t largest = 0, most_starts = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(state.items.size()); ++i) {
    const PartitionItem& item = state.items[static_cast<std::size_t>(i)];
    if (!item.has_invalid) continue;
    largest = std::max(largest, item.size);
    std::int64_t num_starts = 0;
    for (const Slice& slice : SlicesOf(state, kjt, i, state.scratch[0])) {
      num_starts += slice.num_samples + 1;
    }
    most_starts = std::max(most_starts, num_starts);
  }
  for (PartitionScratch& scratch : state.scratch) {
    scratch.valid_ids.Reserve(static_cast<std::size_t>(largest));
    scratch.valid_weights.Reserve(static_cast<std::size_t>(largest));
    scratch.valid_starts.Reserve(static_cast<std::size_t>(most_starts));
  }
  state.pool.Run(static_cast<std::int64_t>(state.order.size()), [&](std::int64_t rank, int thread) {
    const std::int64_t i = state.order[static_cast<std::size_t>(rank)];
    ItemContext context = ContextOf(state, i, thread);
    if (!context.item.has_invalid) return;
    const std::int64_t core = i % num_local;
    const TableLayout& table = state.layout.tables[static_cast<std::size_t>(i / num_local)];
    std::int64_t* ids = context.scratch.valid_ids.data();
    float* weights = context.scratch.valid_weights.data();
    std::int32_t* starts = context.scratch.valid_starts.data();
    std::int64_t* num_invalid = state.num_invalid.data() + table.first_feature * num_local + core;
    const std::span<Slice> slices = SlicesOf(state, kjt, i, context.scratch);
    context.item.size = 0;
    for (Slice& slice : slices) {
      slice = Sanitize(slice, table.num_embeddings, policy, ids, weights, starts, num_invalid);
      ids += slice.num_ids;
      weights += slice.num_ids;
      starts += slice.num_samples + 1;
      num_invalid += num_local;
      context.item.size += slice.num_ids;
    }
    SortItem(context, slices);
  });
}

PartitionProblem ProblemOf(const KjtView& kjt, const KjtProblem& problem) {
  const auto at = [&](PartitionProblem::Kind kind) -> PartitionProblem {
    const std::int64_t bag =
        std::max<std::int64_t>(problem.position - (kind == PartitionProblem::kOffset ? 1 : 0), 0);
    const std::int64_t batch = std::max<std::int64_t>(kjt.batch_size, 1);
    return {kind, bag / batch, bag % batch, problem.position, problem.value};
  };
  switch (problem.kind) {
    case KjtProblem::kLength:
      return at(PartitionProblem::kLength);
    case KjtProblem::kOffset:
      return at(PartitionProblem::kOffset);
    case KjtProblem::kTotal:
      return {PartitionProblem::kTotal, -1, -1, problem.position, problem.value};
    default:
      return {};
  }
}

}  // namespace

PartitionState::PartitionState(Layout layout_in, ThreadPool& pool_in,
                               const PartitionKernels& kernels_in)
    : layout(std::move(layout_in)),
      pool(pool_in),
      kernels(kernels_in),
      scratch(static_cast<std::size_t>(pool_in.num_threads())) {
  const std::size_t num_features = layout.combiners.size();
  const std::size_t num_local = static_cast<std::size_t>(layout.num_local_cores);
  const std::size_t num_cores = static_cast<std::size_t>(layout.num_cores);
  const std::size_t num_stacks = static_cast<std::size_t>(layout.num_stacks);
  const std::size_t num_items = layout.tables.size() * num_local;
  std::int32_t most_features = 0;
  for (const TableLayout& table : layout.tables) {
    key_maps.push_back(MakeKeyMap(table, layout.num_cores));
    table_of_feature.insert(table_of_feature.end(), static_cast<std::size_t>(table.num_features),
                            static_cast<std::int32_t>(key_maps.size() - 1));
    most_features = std::max(most_features, table.num_features);
  }
  for (PartitionScratch& one : scratch) one.slices.resize(static_cast<std::size_t>(most_features));
  samples_per_core.resize(num_features);
  num_samples.resize(num_features);
  first_sample.resize(num_features);
  num_invalid.resize(num_features * num_local);
  items.resize(num_items);
  order.resize(num_items);
  samples_of_stack.resize(num_stacks);
  num_slots.resize(num_stacks * num_local);
  stack_ids.resize(num_stacks * num_local * num_cores);
  ids.Reserve(num_items * num_cores);
  unique_ids.Reserve(num_items * num_cores);
  slots.Reserve(num_items * num_cores);
}

Partitioner::Partitioner(Layout layout, ThreadPool& pool, const PartitionKernels& kernels)
    : state_(std::make_unique<PartitionState>(std::move(layout), pool, kernels)) {}

Partitioner::~Partitioner() = default;

bool Partitioner::has_batch() const { return state_->has_batch; }

std::span<const std::int64_t> Partitioner::num_slots() const { return state_->num_slots; }

const Layout& Partitioner::layout() const { return state_->layout; }

PartitionProblem Partitioner::Partition(const KjtView& kjt, std::int64_t padded_batch_size,
                                        IdPolicy policy, const Stats& stats) {
  PartitionState& state = *state_;
  const Layout& layout = state.layout;
  state.has_batch = false;
  state.starts.Reserve(static_cast<std::size_t>(kjt.num_keys * kjt.batch_size + 1));
  state.key_sums.Reserve(static_cast<std::size_t>(kjt.num_keys));
  const KjtProblem kjt_problem =
      FindStarts(kjt, state.pool, state.key_sums.data(), state.starts.data());
  if (kjt_problem.kind != KjtProblem::kNone) return ProblemOf(kjt, kjt_problem);
  if (const PartitionProblem problem = PlanBatch(state, kjt, padded_batch_size);
      problem.kind != PartitionProblem::kNone) {
    return problem;
  }
  std::fill(state.num_invalid.begin(), state.num_invalid.end(), 0);
  if (SortItems(state, kjt)) {
    if (policy == IdPolicy::kError) return FindInvalidId(state, kjt);
    SortSanitizedItems(state, kjt, policy);
  }
  const Counts counts = {
      .ids = state.ids.data(), .unique_ids = state.unique_ids.data(), .slots = state.slots.data()};
  SumCounts(layout, counts, state.pool, stats, state.num_slots.data());
  std::copy_n(stats.ids, state.stack_ids.size(), state.stack_ids.begin());
  std::copy(state.samples_per_core.begin(), state.samples_per_core.end(), stats.samples_per_core);
  std::copy(state.num_samples.begin(), state.num_samples.end(), stats.num_samples);
  for (std::int64_t f = 0; f < layout.num_features(); ++f) {
    const auto first = state.num_invalid.begin() + f * layout.num_local_cores;
    stats.num_invalid[f] = std::accumulate(first, first + layout.num_local_cores, std::int64_t{0});
  }
  for (std::size_t i = 0; i < state.num_slots.size(); ++i) {
    if (state.num_slots[i] > kInt32Max) {
      return {PartitionProblem::kTooLarge, static_cast<std::int64_t>(i) / layout.num_local_cores,
              -1, -1, state.num_slots[i]};
    }
  }
  state.has_batch = true;
  return {};
}

}  // namespace trtpu
