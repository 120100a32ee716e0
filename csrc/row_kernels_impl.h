// The kernels of RowKernels, written once. Each row_kernels_<instruction set>.cc includes this file
// and exports kKernels; the unnamed namespace keeps its code out of every other file.
#ifndef TRTPU_ROW_KERNELS_IMPL_H_
#define TRTPU_ROW_KERNELS_IMPL_H_

#include <cstdint>
#include <cstring>

#include "row_kernels.h"
#include "simd.h"
#include "trtpu/optimizer_rules.inc"

namespace trtpu {
namespace {

bool IsSorted(const std::int32_t* ids, std::int64_t num_ids) {
  bool descends = false;
  for (std::int64_t i = 1; i < num_ids; ++i) descends |= ids[i - 1] > ids[i];
  return !descends;
}

bool AllInside(const std::int32_t* samples, std::int64_t num_samples, const SampleRange* ranges,
               std::int64_t num_ranges) {
  if (num_ranges == 1) {
    const auto begin = static_cast<std::uint32_t>(ranges->begin);
    const auto count = static_cast<std::uint32_t>(ranges->count);
    bool outside = false;
    for (std::int64_t i = 0; i < num_samples; ++i)
      outside |= static_cast<std::uint32_t>(samples[i]) - begin >= count;
    return !outside;
  }
  for (std::int64_t i = 0; i < num_samples; ++i) {
    bool inside = false;
    for (std::int64_t r = 0; r < num_ranges; ++r)
      inside |=
          static_cast<std::uint32_t>(samples[i]) - static_cast<std::uint32_t>(ranges[r].begin) <
          static_cast<std::uint32_t>(ranges[r].count);
    if (!inside) return false;
  }
  return true;
}

template <bool kWrite, class Element>
void Prefetch(const Element* row, std::int64_t num_elements) {
  const char* end = reinterpret_cast<const char*>(row + num_elements);
  for (const char* p = reinterpret_cast<const char*>(row); p < end; p += 64)
    __builtin_prefetch(p, kWrite ? 1 : 0, 3);
}

// Columns of one row as vectors: kVectors of them, or (kVectors = 0) as many as the item says, the
// last one possibly partial.
template <int kVectors>
struct Columns {
  std::int64_t num_vectors;
  int tail;  // lanes of the last vector, 0 when it is full

  explicit Columns(std::int64_t num_columns)
      : num_vectors(kVectors ? kVectors : (num_columns + kLaneFloats - 1) / kLaneFloats),
        tail(kVectors ? 0 : static_cast<int>(num_columns % kLaneFloats)) {}

  std::int64_t size() const { return kVectors ? kVectors : num_vectors; }
  bool Partial(std::int64_t k) const { return !kVectors && tail && k + 1 == num_vectors; }
  template <class Element>
  Vec Load(const Element* row, std::int64_t k) const {
    return Partial(k) ? Vec::LoadN(row + k * kLaneFloats, tail) : Vec::Load(row + k * kLaneFloats);
  }
  template <class Element>
  void Store(Element* row, std::int64_t k, Vec v) const {
    Partial(k) ? v.StoreN(row + k * kLaneFloats, tail) : v.Store(row + k * kLaneFloats);
  }
};

// ---- lookup ----

// Offset, in elements from the item's table, of a partition's local row 0 in its columns (it may
// lie before the table: only rows from row_offset on exist).
inline std::int64_t PartitionBase(const LookupItem& item, std::int64_t partition) {
  std::int64_t place = partition - item.rotation;
  if (place < 0) place += item.num_cores;
  return (place * item.partition_step - item.row_offset * item.row_step) * item.dim + item.column;
}

// Walks the entries of all runs some distance ahead of their use and prefetches their rows.
template <class Element, int kVectors>
class RowPrefetcher {
 public:
  explicit RowPrefetcher(const LookupItem& item) : item_(item), stride_(item.row_step * item.dim) {
    NextRun(0);
    constexpr int kAhead = kVectors >= 8 ? 12 : kVectors >= 4 ? 24 : 48;
    for (int i = 0; i < kAhead; ++i) Step();
  }

  void Step() {
    if (entry_ == end_) return;
    const Element* row = base_ + item_.ids[entry_] * stride_;
    if constexpr (kVectors == 1) {  // one line: fetching it again costs less than a wrong branch
      __builtin_prefetch(row);
    } else {
      if (row != last_) Prefetch<false>(row, kVectors ? kVectors * kLaneFloats : item_.num_columns);
      last_ = row;
    }
    if (++entry_ == end_) NextRun(partition_ + 1);
  }

 private:
  void NextRun(std::int64_t partition) {
    while (partition < item_.num_cores && item_.run_begins[partition] == item_.run_ends[partition])
      ++partition;
    if (partition == item_.num_cores) return;
    partition_ = partition;
    entry_ = item_.run_begins[partition];
    end_ = item_.run_ends[partition];
    base_ = static_cast<const Element*>(item_.table) + PartitionBase(item_, partition);
  }

  const LookupItem& item_;
  const std::int64_t stride_;
  std::int64_t partition_ = 0;
  std::int64_t entry_ = 0;
  std::int64_t end_ = 0;
  const Element* base_ = nullptr;
  const Element* last_ = nullptr;
};

// Whether no sample has two entries; sets the bits of the rows that have one.
bool TakeOnce(const LookupItem& item) {
  if (item.num_entries > item.num_rows) return false;
  if (item.num_rows == 0) return true;  // `taken` may be null, which memset must not get
  std::memset(item.taken, 0, static_cast<std::size_t>((item.num_rows + 63) / 64) * 8);
  std::uint64_t twice = 0;
  for (std::int64_t p = 0; p < item.num_cores; ++p) {
    for (std::int64_t i = item.run_begins[p]; i < item.run_ends[p]; ++i) {
      const auto row = static_cast<std::uint32_t>(item.samples[i] - item.first_sample);
      const std::uint64_t bit = std::uint64_t{1} << (row % 64);
      twice |= item.taken[row / 64] & bit;
      item.taken[row / 64] |= bit;
    }
    if (twice) return false;
  }
  return true;
}

// Calls visit(entry, row vectors) for every entry. Wide rows are loaded once per run of equal ids.
template <class Element, int kVectors, class Visit>
void ForEachEntry(const LookupItem& item, const Visit& visit) {
  constexpr int kCount = kVectors ? kVectors : 1;
  const Columns<kVectors> columns(item.num_columns);
  const std::int64_t stride = item.row_step * item.dim;
  RowPrefetcher<Element, kVectors> prefetcher(item);
  for (std::int64_t p = 0; p < item.num_cores; ++p) {
    const std::int64_t end = item.run_ends[p];
    const Element* base = static_cast<const Element*>(item.table) + PartitionBase(item, p);
    for (std::int64_t i = item.run_begins[p]; i < end;) {
      const std::int32_t id = item.ids[i];
      const Element* row = base + id * stride;
      Vec values[kCount];
      for (int k = 0; k < kCount; ++k) values[k] = columns.Load(row, k);
      do {
        prefetcher.Step();
        visit(i, values);
        ++i;
      } while (kVectors > 2 && i < end && item.ids[i] == id);
    }
  }
}

template <class Element, int kVectors>
void LookupColumns(const LookupItem& shared) {
  const LookupItem item = shared;  // a copy: vector stores may alias `shared`, not this
  constexpr int kCount = kVectors ? kVectors : 1;
  const Columns<kVectors> columns(item.num_columns);
  const auto write = [&](float* out, std::int64_t k, Vec v) {
    item.stream ? v.Stream(out + k * kLaneFloats) : columns.Store(out, k, v);
  };
  const auto out_of = [&](const SampleRange& range, std::int64_t sample) {
    return item.out + range.offset + sample * range.stride + item.column;
  };
  if (TakeOnce(item)) {  // at most one id per sample: rows go straight to the output
    ForEachEntry<Element, kVectors>(item, [&](std::int64_t i, const Vec* values) {
      const std::int32_t sample = item.samples[i];
      const SampleRange* range = item.ranges;
      while (sample - range->begin >= range->count) ++range;
      float* out = out_of(*range, sample - range->begin);
      const Vec gain(item.gains[i]);
      for (int k = 0; k < kCount; ++k)
        write(out, k, Vec(0.0f) + gain * values[k]);  // as the sum below: -0 becomes 0
    });
    for (std::int64_t r = 0; r < item.num_ranges; ++r) {
      const SampleRange& range = item.ranges[r];
      for (std::int64_t s = 0; s < range.count; ++s) {
        const std::int64_t row = range.begin - item.first_sample + s;
        if (item.taken[row / 64] >> (row % 64) & 1) continue;
        for (int k = 0; k < kCount; ++k) write(out_of(range, s), k, Vec(0.0f));
      }
    }
  } else {
    constexpr std::int64_t stride = kCount * kLaneFloats;
    std::memset(item.slab, 0, static_cast<std::size_t>(item.num_rows * stride) * sizeof(float));
    ForEachEntry<Element, kVectors>(item, [&](std::int64_t i, const Vec* values) {
      float* sum = item.slab + (item.samples[i] - item.first_sample) * stride;
      const Vec gain(item.gains[i]);
      for (int k = 0; k < kCount; ++k) {
        float* p = sum + k * kLaneFloats;
        (Vec::Load(p) + gain * values[k]).Store(p);
      }
    });
    for (std::int64_t r = 0; r < item.num_ranges; ++r) {
      const SampleRange& range = item.ranges[r];
      const float* sum = item.slab + (range.begin - item.first_sample) * stride;
      for (std::int64_t s = 0; s < range.count; ++s, sum += stride)
        for (int k = 0; k < kCount; ++k)
          write(out_of(range, s), k, Vec::Load(sum + k * kLaneFloats));
    }
  }
  if (item.stream) StreamFence();
}

template <class Element>
void Lookup(const LookupItem& item) {
  switch (item.num_columns) {
    case 16:
      return LookupColumns<Element, 1>(item);
    case 32:
      return LookupColumns<Element, 2>(item);
    case 64:
      return LookupColumns<Element, 4>(item);
    case 128:
      return LookupColumns<Element, 8>(item);
    default:
      return LookupColumns<Element, 0>(item);  // less than 16: one partial vector
  }
}

// ---- update ----

void Compact(const CompactItem& item) {
  const Columns<0> columns(item.dim);
  const Vec high(item.max_gradient);
  const Vec low(-item.max_gradient);
  for (std::int64_t r = 0; r < item.num_ranges; ++r) {
    const SampleRange& range = item.ranges[r];
    for (std::int64_t s = 0; s < range.count; ++s) {
      const float* from = item.grad + range.offset + s * range.stride;
      float* to = item.rows + (range.begin - item.first_sample + s) * item.row_stride;
      for (std::int64_t k = 0; k < columns.size(); ++k)
        columns.Store(to, k, Min(high, Max(low, columns.Load(from, k))));  // a NaN stays
    }
  }
}

// One row's step from its summed gradient; `sum(k)` is vector k of it.
template <class Rule, class Element, int kVectors, class Sum>
void ApplyRule(const UpdateItem& item, const Columns<kVectors>& columns, std::int64_t row,
               const float* operands, const Sum& sum) {
  Element* weights = static_cast<Element*>(item.table) + row * item.row_stride;
  constexpr int kSlots = Rule::kNumRowSlots;
  float* slots[kSlots + 1];
  for (int s = 0; s < kSlots; ++s) slots[s] = item.row_slots[s] + row * item.row_stride;
  const auto load_slots = [&](std::int64_t k, Vec* values) {
    for (int s = 0; s < kSlots; ++s) values[s] = columns.Load(slots[s], k);
  };
  float scalars[Rule::kNumScalars + 1];
  if constexpr (Rule::kHasMean) {
    Vec lanes(0.0f);
    for (std::int64_t k = 0; k < columns.size(); ++k) {
      Vec values[kSlots + 1];
      load_slots(k, values);
      Vec term = Rule::MeanTerm(sum(k), columns.Load(weights, k), values, operands);
      if (columns.Partial(k)) term = KeepFirst(term, columns.tail);
      lanes = lanes + term;
    }
    float scalar_slots[Rule::kNumScalarSlots + 1];
    for (int s = 0; s < Rule::kNumScalarSlots; ++s)
      scalar_slots[s] = item.scalar_slots[s][row * item.scalar_stride];
    Rule::Scalar(SumLanes(lanes) / static_cast<float>(item.dim), scalar_slots, operands, scalars);
    for (int s = 0; s < Rule::kNumScalarSlots; ++s)
      item.scalar_slots[s][row * item.scalar_stride] = scalar_slots[s];
  }
  for (std::int64_t k = 0; k < columns.size(); ++k) {
    Vec weight = columns.Load(weights, k);
    Vec values[kSlots + 1];
    load_slots(k, values);
    Rule::Row(sum(k), weight, values, operands, scalars);
    columns.Store(weights, k, weight);
    for (int s = 0; s < kSlots; ++s) columns.Store(slots[s], k, values[s]);
  }
}

template <class Rule, class Element, int kVectors>
void UpdateRows(const UpdateItem& shared) {
  const UpdateItem item = shared;  // a copy: vector stores may alias `shared`, not this
  // Measured: more lines in flight than the core can track cost more than they hide.
  constexpr std::int64_t kRowsAhead = kVectors >= 8 ? 2 : kVectors >= 4 ? 4 : 16;
  constexpr std::int64_t kGradsAhead = kVectors >= 8 ? 4 : kVectors >= 4 ? 8 : 16;
  static_assert(kRowsAhead <= kMaxAhead && kGradsAhead <= kMaxAhead);
  const Columns<kVectors> columns(item.dim);
  const std::int64_t num_columns = kVectors ? kVectors * kLaneFloats : item.dim;
  float operands[Rule::kNumOperands + 1];
  for (int i = 0; i < Rule::kNumOperands; ++i) operands[i] = item.operands[i];
  const auto gradient = [&](std::int64_t i) {
    return item.grad + static_cast<std::int64_t>(item.grad_rows[i]) * item.grad_stride;
  };
  const auto prefetch_row = [&](std::int64_t row) {
    Prefetch<true>(static_cast<Element*>(item.table) + row * item.row_stride, num_columns);
    for (int s = 0; s < Rule::kNumRowSlots; ++s)
      Prefetch<true>(item.row_slots[s] + row * item.row_stride, num_columns);
    for (int s = 0; s < Rule::kNumScalarSlots; ++s)
      __builtin_prefetch(item.scalar_slots[s] + row * item.scalar_stride, 1, 3);
  };
  for (std::int64_t u = 0; u < kRowsAhead; ++u) prefetch_row(item.rows[u]);
  for (std::int64_t i = 0; i < kGradsAhead; ++i) Prefetch<false>(gradient(i), num_columns);
  Vec sums[kVectors ? kVectors : 1];
  const auto sum = [&](std::int64_t k) {
    if constexpr (kVectors)
      return sums[k];
    else
      return Vec::Load(item.sum + k * kLaneFloats);
  };
  const auto set_sum = [&](std::int64_t k, Vec v) {
    if constexpr (kVectors)
      sums[k] = v;
    else
      v.Store(item.sum + k * kLaneFloats);
  };
  std::int64_t i = 0;
  for (std::int64_t u = 0; u < item.num_rows; ++u) {
    prefetch_row(item.rows[u + kRowsAhead]);
    for (std::int64_t k = 0; k < columns.size(); ++k) set_sum(k, Vec(0.0f));
    const std::int64_t end = item.starts[u + 1];
    do {
      Prefetch<false>(gradient(i + kGradsAhead), num_columns);
      const float* from = gradient(i);
      const Vec gain(item.gains[i]);
      for (std::int64_t k = 0; k < columns.size(); ++k)
        set_sum(k, sum(k) + gain * columns.Load(from, k));
    } while (++i < end);
    ApplyRule<Rule, Element, kVectors>(item, columns, item.rows[u], operands, sum);
  }
}

template <class Rule, class Element>
void Update(const UpdateItem& item) {
  switch (item.dim) {
    case 16:
      return UpdateRows<Rule, Element, 1>(item);
    case 32:
      return UpdateRows<Rule, Element, 2>(item);
    case 64:
      return UpdateRows<Rule, Element, 4>(item);
    case 128:
      return UpdateRows<Rule, Element, 8>(item);
    default:
      return UpdateRows<Rule, Element, 0>(item);
  }
}

#define TRTPU_RULE_KERNEL(Name)                                         \
  {rules::Name##Rule::kName,           rules::Name##Rule::kNumRowSlots, \
   rules::Name##Rule::kNumScalarSlots, rules::Name##Rule::kNumOperands, \
   Update<rules::Name##Rule, float>,   Update<rules::Name##Rule, Half>},
constexpr RuleKernel kRules[] = {TRTPU_FOR_EACH_RULE(TRTPU_RULE_KERNEL)};
#undef TRTPU_RULE_KERNEL

constexpr RowKernels MakeKernels(const char* name) {
  return {name,         IsSorted, AllInside, Lookup<float>,
          Lookup<Half>, Compact,  kRules,    static_cast<int>(sizeof(kRules) / sizeof(kRules[0]))};
}

}  // namespace
}  // namespace trtpu

#endif  // TRTPU_ROW_KERNELS_IMPL_H_
