#include "trtpu/row_ops.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>

#include "row_kernels.h"

namespace trtpu {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// A lookup item sums into a slab of about this size, so that it stays in the L2 cache.
constexpr std::int64_t kSlabBytes = 1 << 20;
// An output larger than this is written past the caches.
constexpr std::size_t kStreamFloats = (4 << 20) / sizeof(float);
// An update item sorts about this many entries at a time, so that they stay in the L2 cache.
constexpr std::int64_t kMaxItemEntries = 1 << 14;
// Gradient rows that are used this many times are gathered into consecutive memory first.
constexpr std::int64_t kCompactUses = 3;

constexpr std::int64_t RoundUp(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr std::int64_t CeilDiv(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

template <class... Parts>
std::string Concat(const Parts&... parts) {
  std::string text;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_convertible_v<decltype(part), std::string_view>)
      text += part;
    else
      text += std::to_string(part);
  };
  (append(parts), ...);
  return text;
}

// Uninitialized memory that starts on a cache line and only grows.
template <class T>
class Buffer {
 public:
  T* Reserve(std::int64_t size) {
    if (size > size_) {
      size += size / 8;  // room for the next batches
      const auto bytes = static_cast<std::size_t>(RoundUp(size * std::int64_t{sizeof(T)}, 64));
      data_.reset();
      data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  std::int64_t size_ = 0;
};

// Those that this machine runs, the widest first.
std::vector<const RowKernels*> AllKernels() {
  std::vector<const RowKernels*> kernels;
#if defined(__x86_64__)
  // All of a level: the compiler may use any of it in those files.
  if (__builtin_cpu_supports("x86-64-v4")) kernels.push_back(&kAvx512RowKernels);
  if (__builtin_cpu_supports("x86-64-v3")) kernels.push_back(&kAvx2RowKernels);
#endif
  kernels.push_back(&kBaselineRowKernels);
  return kernels;
}

std::atomic<const RowKernels*>& CurrentKernels() {
  static std::atomic<const RowKernels*> current{AllKernels().front()};
  return current;
}

const RuleKernel* FindRuleKernel(const RowKernels& kernels, std::string_view rule) {
  for (int i = 0; i < kernels.num_rules; ++i)
    if (kernels.rules[i].name == rule) return &kernels.rules[i];
  return nullptr;
}

// Entries of one (table, partition), of one source core or of several merged ones.
struct Entries {
  const std::uint32_t* rows;
  const std::uint32_t* grad_rows;
  const float* gains;
  std::int64_t size;
  std::uint32_t first_row;   // to subtract from rows
  std::uint32_t grad_shift;  // to add to grad_rows, modulo 2^32
};

struct EntryBuffer {
  Buffer<std::uint32_t> rows, grad_rows;
  Buffer<float> gains;

  void Reserve(std::int64_t size) {
    rows.Reserve(size);
    grad_rows.Reserve(size);
    gains.Reserve(size);
  }
};

// Merges two sorted lists into `to` from `at` on; of equal rows, a's come first.
void Merge(const Entries& a, const Entries& b, EntryBuffer& to, std::int64_t at) {
  std::uint32_t* rows = to.rows.get() + at;
  std::uint32_t* grad_rows = to.grad_rows.get() + at;
  float* gains = to.gains.get() + at;
  std::int64_t i = 0, j = 0, n = 0;
  while (i < a.size && j < b.size) {  // selects, no branches: the order is random
    const bool from_b = b.rows[j] < a.rows[i];
    rows[n] = (from_b ? b.rows[j] : a.rows[i]) - a.first_row;
    grad_rows[n] =
        (from_b ? b.grad_rows + j : a.grad_rows + i)[0] + (from_b ? b.grad_shift : a.grad_shift);
    gains[n] = (from_b ? b.gains + j : a.gains + i)[0];
    j += from_b;
    i += !from_b;
    ++n;
  }
  for (const auto& [rest, k] : {std::pair{&a, i}, std::pair{&b, j}}) {
    for (std::int64_t m = k; m < rest->size; ++m, ++n) {
      rows[n] = rest->rows[m] - rest->first_row;
      grad_rows[n] = rest->grad_rows[m] + rest->grad_shift;
      gains[n] = rest->gains[m];
    }
  }
}

// Reduces sorted `rows` to the distinct ones, in place, and sets where each starts. Returns their
// number; one more start is the end. The lists get kMaxAhead harmless entries to prefetch.
std::int64_t FindDistinct(std::uint32_t* rows, std::int64_t size, std::uint32_t* starts) {
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::uint32_t row = rows[i];
    const bool is_last = i + 1 == size || rows[i + 1] != row;
    rows[num_rows] = row;
    starts[num_rows + 1] = static_cast<std::uint32_t>(i + 1);
    num_rows += is_last;
  }
  starts[0] = 0;
  std::fill_n(rows + num_rows, kMaxAhead, rows[num_rows - 1]);
  return num_rows;
}

// Rows of a table on every core, with padding.
std::int64_t RowsPerCore(const TableGeometry& table, std::int64_t num_cores) {
  return RoundUp(table.block_rows > 0 ? table.block_rows : CeilDiv(table.num_embeddings, num_cores),
                 8);
}

// From one row of a partition to its next, and from the first row of a partition to that of the
// next, in rows of the table.
std::int64_t RowStep(const TableGeometry& table, std::int64_t num_cores) {
  return table.block_rows > 0 ? 1 : num_cores;
}
std::int64_t PartitionStep(const TableGeometry& table) {
  return table.block_rows > 0 ? table.block_rows : 1;
}

}  // namespace

// ---- geometry ----

std::string Geometry::Decode(std::span<const std::int64_t> ints) {
  constexpr std::size_t kHeaderInts = 5, kTableInts = 8, kFeatureInts = 5;
  if (ints.size() < kHeaderInts) return Concat("geometry has ", ints.size(), " ints, wanted >= 5");
  num_cores = ints[0];
  num_local_cores = ints[1];
  num_stacks = ints[2];
  const std::int64_t num_tables = ints[3], num_features = ints[4];
  const auto limit = static_cast<std::int64_t>(ints.size());
  if (num_cores < 1 || num_cores > kMaxInt32 || num_local_cores < 1 ||
      num_local_cores > kMaxInt32 || num_stacks < 0 || num_stacks > limit || num_tables < 0 ||
      num_tables > limit || num_features < 0 || num_features > limit ||
      static_cast<std::int64_t>(kHeaderInts) + num_tables * std::int64_t{kTableInts} +
              num_features * std::int64_t{kFeatureInts} !=
          limit)
    return Concat("geometry: ", ints.size(), " ints do not fit the header (cores ", num_cores,
                  ", local cores ", num_local_cores, ", stacks ", num_stacks, ", tables ",
                  num_tables, ", features ", num_features, ")");
  tables.clear();
  features.clear();
  const std::int64_t* at = ints.data() + kHeaderInts;
  for (std::int64_t t = 0; t < num_tables; ++t, at += kTableInts)
    tables.push_back({at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]});
  for (std::int64_t f = 0; f < num_features; ++f, at += kFeatureInts)
    features.push_back({at[0], at[1], at[2], at[3], at[4]});

  for (std::int64_t f = 0; f < num_features; ++f) {
    const FeatureGeometry& feature = features[f];
    if (feature.sample_offset < 0 || feature.samples_per_core < 0 ||
        feature.sample_offset > kMaxInt32 || feature.samples_per_core > kMaxInt32 ||
        feature.sample_offset + feature.samples_per_core > kMaxInt32 || feature.num_samples < 0 ||
        feature.num_samples > kMaxInt32 ||
        feature.num_samples > num_local_cores * feature.samples_per_core ||
        feature.out_offset < 0 || feature.out_offset > (std::int64_t{1} << 60) ||
        feature.out_stride < 0 || feature.out_stride > kMaxInt32)
      return Concat("geometry: feature ", f, " has impossible samples or output");
  }
  std::int64_t next_feature = 0, stack = 0, next_row = 0;
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const TableGeometry& table = tables[t];
    if (table.stack > stack) next_row = 0;
    if (table.stack < stack || table.stack >= num_stacks || table.num_embeddings < 1 ||
        table.num_embeddings > (std::int64_t{1} << 56) || table.dim < 1 || table.dim > kMaxInt32 ||
        table.row_offset < next_row || table.row_offset > kMaxInt32 || table.rotation < 0 ||
        table.rotation >= num_cores || table.block_rows < 0 || table.block_rows > kMaxInt32 ||
        (table.block_rows > 0 && (table.num_embeddings - 1) / table.block_rows >= num_cores))
      return Concat("geometry: table ", t, " has an impossible shape or place");
    stack = table.stack;
    next_row = table.row_offset + RowsPerCore(table, num_cores);
    if (next_row > kMaxInt32) return Concat("geometry: table ", t, " has too many rows per core");
    if (table.first_feature < next_feature || table.first_feature >= num_features ||
        table.num_features < 1 || table.num_features > num_features - table.first_feature)
      return Concat("geometry: the features of table ", t, " do not follow those before");
    next_feature = table.first_feature + table.num_features;
    const FeatureGeometry& first = features[table.first_feature];
    std::int64_t next_sample = first.sample_offset;
    for (std::int64_t f = table.first_feature; f < next_feature; ++f) {
      if (features[f].sample_offset != next_sample)
        return Concat("geometry: the samples of table ", t, "'s features are not consecutive");
      next_sample += features[f].samples_per_core;
    }
    if ((next_sample - first.sample_offset) * num_local_cores > kMaxInt32)
      return Concat("geometry: table ", t, " has more than 2^31 samples");
  }
  return {};
}

// ---- instruction sets and rules ----

std::vector<std::string_view> InstructionSets() {
  std::vector<std::string_view> names;
  for (const RowKernels* kernels : AllKernels()) names.emplace_back(kernels->name);
  return names;
}

std::string_view InstructionSet() { return CurrentKernels().load()->name; }

bool SetInstructionSet(std::string_view name) {
  for (const RowKernels* kernels : AllKernels()) {
    if (kernels->name == name) {
      CurrentKernels().store(kernels);
      return true;
    }
  }
  return false;
}

std::optional<RuleShape> FindRule(std::string_view rule) {
  const RuleKernel* kernel = FindRuleKernel(kBaselineRowKernels, rule);
  if (!kernel) return std::nullopt;
  return RuleShape{kernel->num_row_slots, kernel->num_scalar_slots, kernel->num_operands};
}

std::vector<std::string_view> RuleNames() {
  const RowKernels& kernels = kBaselineRowKernels;
  std::vector<std::string_view> names;
  for (int i = 0; i < kernels.num_rules; ++i) names.emplace_back(kernels.rules[i].name);
  return names;
}

// ---- one call ----

// The samples of a table on one core are consecutive: its features follow each other.
struct TableSamples {
  std::int32_t first;
  std::int64_t per_core;
};

struct RowOps::Scratch {
  // Per thread. Cache lines apart, as threads write to the pointers' targets only.
  struct Thread {
    Buffer<float> slab;
    Buffer<std::uint64_t> taken;
    EntryBuffer merged[2];
    Buffer<std::uint32_t> starts;
    std::vector<Entries> lists;
    Buffer<float> sum;
  };
  struct LookupTask {
    std::int64_t table, core, column, num_columns, cost;
  };
  // Entries of core c are [cuts[begins + c], cuts[ends + c]).
  struct UpdateTask {
    std::int64_t table, partition, begins, ends, num_entries;
  };

  std::vector<Thread> threads;
  std::vector<SampleRange> ranges;    // (table, core, feature of the table)
  std::vector<std::int32_t> cuts;     // see Index
  std::vector<std::int64_t> planes;   // (tables) plane of cuts where a table's runs begin
  std::vector<std::int64_t> entries;  // (tables, cores) number of entries
  std::vector<std::string> errors;
  std::vector<LookupTask> lookups;
  std::vector<UpdateTask> updates;
  std::vector<std::int64_t> order;      // tables, most entries first
  std::vector<std::int64_t> compacted;  // (tables) start in `compact`, or -1
  Buffer<float> compact;

  const Geometry* geometry = nullptr;
  std::span<const PackedStack> stacks;
  std::int64_t core_stride = 0;
  std::int64_t partition_stride = 0;

  std::int64_t SlotsPerCore(std::int64_t stack) const {
    return static_cast<std::int64_t>(stacks[stack].embedding_ids.size()) /
           geometry->num_local_cores;
  }
  TableSamples Samples(const TableGeometry& table) const {
    const FeatureGeometry& first = geometry->features[table.first_feature];
    const FeatureGeometry& last = geometry->features[table.first_feature + table.num_features - 1];
    return {static_cast<std::int32_t>(first.sample_offset),
            last.sample_offset + last.samples_per_core - first.sample_offset};
  }
  const SampleRange* Ranges(const TableGeometry& table, std::int64_t core) const {
    return &ranges[table.first_feature * geometry->num_local_cores + core * table.num_features];
  }
  std::int64_t PlaneSize() const { return geometry->num_cores * geometry->num_local_cores; }
  std::int64_t FirstId(const TableGeometry& table, std::int64_t partition) const {
    const std::int64_t place = partition - table.rotation;
    return (place < 0 ? place + geometry->num_cores : place) * PartitionStep(table);
  }

  std::string Index(const Geometry& g, std::span<const PackedStack> buffers, std::size_t num_floats,
                    bool cores_adjacent, bool need_all, const RowKernels& kernels,
                    ThreadPool& pool);
  std::string IndexCore(std::int64_t stack, std::int64_t first_table, std::int64_t last_table,
                        std::int64_t core, bool need_all, const RowKernels& kernels);
  void PlanLookup(int num_threads);
  void PlanUpdate(int num_threads);
  void MergeTask(const UpdateTask& task, Thread& thread, UpdateItem& item);
};

// Checks the buffers and finds where each table's run begins in each (core, partition). One plane
// of cuts holds that for one table: the entry of core c and partition p is at c * core_stride + p *
// partition_stride. A stack has one more plane than tables: the ends. `need_all` wants a table for
// every id; an update passes over the ids of tables that it leaves out.
std::string RowOps::Scratch::Index(const Geometry& g, std::span<const PackedStack> buffers,
                                   std::size_t num_floats, bool cores_adjacent, bool need_all,
                                   const RowKernels& kernels, ThreadPool& pool) {
  geometry = &g;
  stacks = buffers;
  core_stride = cores_adjacent ? 1 : g.num_cores;
  partition_stride = cores_adjacent ? g.num_local_cores : 1;
  if (static_cast<std::int64_t>(stacks.size()) != g.num_stacks)
    return Concat("got buffers of ", stacks.size(), " stacks, the geometry has ", g.num_stacks);
  for (std::int64_t s = 0; s < g.num_stacks; ++s) {
    const PackedStack& stack = stacks[s];
    const std::size_t slots = stack.embedding_ids.size();
    if (static_cast<std::int64_t>(stack.row_pointers.size()) !=
        g.num_local_cores * std::max<std::int64_t>(g.num_cores, 8))
      return Concat("stack ", s, ": ", stack.row_pointers.size(), " row pointers for ",
                    g.num_local_cores, " local cores and ", g.num_cores, " partitions");
    if (stack.sample_ids.size() != slots || stack.gains.size() != slots ||
        slots % static_cast<std::size_t>(g.num_local_cores) != 0 || slots > kMaxInt32)
      return Concat("stack ", s, ": ", slots, " embedding_ids, ", stack.sample_ids.size(),
                    " sample_ids and ", stack.gains.size(), " gains for ", g.num_local_cores,
                    " local cores");
  }

  const auto num_tables = static_cast<std::int64_t>(g.tables.size());
  ranges.resize(g.features.size() * g.num_local_cores);
  planes.clear();
  std::int64_t num_planes = 0;
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const TableGeometry& table = g.tables[t];
    const bool follows =
        t > 0 && g.tables[t - 1].stack == table.stack &&
        g.tables[t - 1].row_offset + RowsPerCore(g.tables[t - 1], g.num_cores) == table.row_offset;
    planes.push_back(follows ? num_planes - 1 : num_planes);
    num_planes = planes[t] + 2;
    for (std::int64_t c = 0; c < g.num_local_cores; ++c) {
      SampleRange* range =
          &ranges[table.first_feature * g.num_local_cores + c * table.num_features];
      for (std::int64_t f = 0; f < table.num_features; ++f, ++range) {
        const FeatureGeometry& feature = g.features[table.first_feature + f];
        if (feature.num_samples > 0 &&
            feature.out_offset + (feature.num_samples - 1) * feature.out_stride + table.dim >
                static_cast<std::int64_t>(num_floats))
          return Concat("feature ", table.first_feature + f, ": its vectors end behind the ",
                        num_floats, " floats of the output");
        const std::int64_t first = c * feature.samples_per_core;
        const std::int64_t count =
            std::clamp<std::int64_t>(feature.num_samples - first, 0, feature.samples_per_core);
        *range = {static_cast<std::int32_t>(feature.sample_offset),
                  static_cast<std::int32_t>(count), feature.out_offset + first * feature.out_stride,
                  feature.out_stride};
      }
    }
  }

  cuts.resize(num_planes * PlaneSize());
  entries.assign(num_tables * g.num_local_cores, 0);
  errors.assign(g.num_stacks * g.num_local_cores, {});
  std::vector<std::int64_t> first_table(g.num_stacks + 1, num_tables);
  for (std::int64_t t = num_tables - 1; t >= 0; --t) first_table[g.tables[t].stack] = t;
  for (std::int64_t s = g.num_stacks - 1; s >= 0; --s)
    first_table[s] = std::min(first_table[s], first_table[s + 1]);
  pool.Run(g.num_stacks * g.num_local_cores, [&](std::int64_t item, int) {
    const std::int64_t stack = item / g.num_local_cores;
    errors[item] = IndexCore(stack, first_table[stack], first_table[stack + 1],
                             item % g.num_local_cores, need_all, kernels);
  });
  for (std::string& error : errors)
    if (!error.empty()) return std::move(error);
  return {};
}

std::string RowOps::Scratch::IndexCore(std::int64_t stack, std::int64_t first_table,
                                       std::int64_t last_table, std::int64_t core, bool need_all,
                                       const RowKernels& kernels) {
  const Geometry& g = *geometry;
  const std::int64_t slots = SlotsPerCore(stack);
  const std::int32_t* pointers =
      &stacks[stack].row_pointers[core * std::max<std::int64_t>(g.num_cores, 8)];
  const std::int32_t* ids = stacks[stack].embedding_ids.data() + core * slots;
  const std::int32_t* samples = stacks[stack].sample_ids.data() + core * slots;
  const auto where = [&](std::int64_t partition) {
    return Concat("stack ", stack, ", core ", core, ", partition ", partition, ": ");
  };
  std::int64_t begin = 0;
  for (std::int64_t p = 0; p < g.num_cores; ++p) {
    const std::int64_t end = pointers[p];
    if (end < begin || end > slots)
      return Concat(where(p), "row pointer ", end, " is outside ", begin, "..", slots);
    if (!kernels.is_sorted(ids + begin, end - begin))
      return Concat(where(p), "embedding_ids are not sorted");
    const auto find = [&](std::int64_t from, std::int64_t row) {
      return std::lower_bound(ids + from, ids + end, row) - ids;
    };
    std::int64_t last = begin, num_found = 0;
    for (std::int64_t t = first_table; t < last_table; ++t) {
      const TableGeometry& table = g.tables[t];
      const std::int64_t first = find(last, table.row_offset);
      last = find(first, table.row_offset + RowsPerCore(table, g.num_cores));
      std::int32_t* cut =
          &cuts[planes[t] * PlaneSize() + core * core_stride + p * partition_stride];
      cut[0] = static_cast<std::int32_t>(first);
      cut[PlaneSize()] = static_cast<std::int32_t>(last);
      if (first == last) continue;
      const std::int64_t behind = table.num_embeddings - FirstId(table, p);
      const std::int64_t rows =
          table.block_rows > 0 ? std::min(behind, table.block_rows) : CeilDiv(behind, g.num_cores);
      if (ids[last - 1] - table.row_offset >= rows)
        return Concat(where(p), "row ", ids[last - 1], " is not in table ", t, ", whose rows are ",
                      table.row_offset, "..", table.row_offset + rows - 1);
      if (!kernels.all_inside(samples + first, last - first, Ranges(table, core),
                              table.num_features))
        return Concat(where(p), "sample_ids of table ", t, " are outside its features");
      entries[t * g.num_local_cores + core] += last - first;
      num_found += last - first;
    }
    if (need_all && first_table < last_table && num_found < end - begin)
      return Concat(where(p), end - begin - num_found, " embedding_ids are in no table");
    begin = std::min(RoundUp(end, 8), slots);
  }
  return {};
}

// Cuts tables into (core, column block) tasks whose slab fits the cache, then further while a task
// is longer than a thread's share.
void RowOps::Scratch::PlanLookup(int num_threads) {
  const Geometry& g = *geometry;
  std::int64_t total = 0;
  const auto cost_of = [&](std::int64_t table, std::int64_t core) {
    return entries[table * g.num_local_cores + core] + Samples(g.tables[table]).per_core;
  };
  const auto num_tables = static_cast<std::int64_t>(g.tables.size());
  for (std::int64_t t = 0; t < num_tables; ++t)
    for (std::int64_t c = 0; c < g.num_local_cores; ++c) total += cost_of(t, c) * g.tables[t].dim;
  lookups.clear();
  std::int64_t slab_floats = 0, taken_words = 0;
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const TableGeometry& table = g.tables[t];
    const std::int64_t rows = Samples(table).per_core;
    taken_words = std::max(taken_words, CeilDiv(rows, 64));
    for (std::int64_t c = 0; c < g.num_local_cores; ++c) {
      const std::int64_t cost = cost_of(t, c);
      const bool needs_slab = entries[t * g.num_local_cores + c] > rows;
      std::int64_t widest = kMaxColumns;
      while (widest > kLaneFloats &&
             ((needs_slab && rows * widest * std::int64_t{sizeof(float)} > kSlabBytes) ||
              (num_threads > 1 && cost * std::min(widest, table.dim) * num_threads > total)))
        widest /= 2;
      for (std::int64_t column = 0; column < table.dim;) {
        std::int64_t columns = widest;
        while (columns > kLaneFloats && columns > table.dim - column) columns /= 2;
        slab_floats = std::max(slab_floats, rows * columns);
        columns = std::min(columns, table.dim - column);
        lookups.push_back({t, c, column, columns, cost * columns});
        column += columns;
      }
    }
  }
  std::stable_sort(lookups.begin(), lookups.end(),
                   [](const LookupTask& a, const LookupTask& b) { return a.cost > b.cost; });
  threads.resize(num_threads);
  for (Thread& thread : threads) {
    thread.slab.Reserve(slab_floats);
    thread.taken.Reserve(taken_words);
  }
}

// Cuts (table, partition) runs into tasks at row boundaries: a row has one owner.
void RowOps::Scratch::PlanUpdate(int num_threads) {
  const Geometry& g = *geometry;
  const std::int64_t cores = g.num_local_cores;
  const auto num_tables = static_cast<std::int64_t>(g.tables.size());
  const auto entries_of = [&](std::int64_t table) {
    return std::accumulate(&entries[table * cores], &entries[table * cores] + cores,
                           std::int64_t{0});
  };
  const std::int64_t total = std::accumulate(entries.begin(), entries.end(), std::int64_t{0});
  const std::int64_t grain =
      std::clamp<std::int64_t>(total / (8 * num_threads), 1024, kMaxItemEntries);
  order.resize(num_tables);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return entries_of(a) > entries_of(b); });
  updates.clear();
  std::int64_t max_entries = 0, max_dim = 0;
  const auto add = [&](UpdateTask task) {
    for (std::int64_t c = 0; c < cores; ++c)
      task.num_entries += cuts[task.ends + c] - cuts[task.begins + c];
    if (task.num_entries > 0) updates.push_back(task);
    max_entries = std::max(max_entries, task.num_entries);
  };
  for (const std::int64_t t : order) {
    const TableGeometry& table = g.tables[t];
    max_dim = std::max(max_dim, table.dim);
    for (std::int64_t p = 0; p < g.num_cores; ++p) {
      const std::int64_t end = (planes[t] + 1) * PlaneSize() + p * cores;
      std::int64_t begin = planes[t] * PlaneSize() + p * cores;
      std::int64_t count = 0, longest = 0;
      for (std::int64_t c = 0; c < cores; ++c) {
        const auto length = [&](std::int64_t core) {
          return std::int64_t{cuts[end + core]} - cuts[begin + core];
        };
        count += length(c);
        if (length(c) > length(longest)) longest = c;
      }
      const std::int64_t slots = SlotsPerCore(table.stack);
      const std::int32_t* ids = stacks[table.stack].embedding_ids.data();
      const std::int64_t pieces = CeilDiv(count, grain);
      const std::int64_t first = cuts[begin + longest];
      const std::int64_t length = cuts[end + longest] - first;
      for (std::int64_t piece = 1; piece < pieces; ++piece) {
        const std::int32_t row = ids[longest * slots + first + length * piece / pieces];
        const auto middle = static_cast<std::int64_t>(cuts.size());
        for (std::int64_t c = 0; c < cores; ++c) {
          const std::int32_t* core_ids = ids + c * slots;
          cuts.push_back(static_cast<std::int32_t>(
              std::lower_bound(core_ids + cuts[begin + c], core_ids + cuts[end + c], row) -
              core_ids));
        }
        add({t, p, begin, middle, 0});
        begin = middle;
      }
      add({t, p, begin, end, 0});
    }
  }
  threads.resize(num_threads);
  for (Thread& thread : threads) {
    for (EntryBuffer& buffer : thread.merged) buffer.Reserve(max_entries + kMaxAhead);
    thread.starts.Reserve(max_entries + 1);
    thread.lists.reserve(cores);
    thread.sum.Reserve(RoundUp(max_dim, kLaneFloats));
  }
}

// Sets the item's lists: the task's entries, sorted by row and stable in core order.
void RowOps::Scratch::MergeTask(const UpdateTask& task, Thread& thread, UpdateItem& item) {
  const TableGeometry& table = geometry->tables[task.table];
  const TableSamples samples = Samples(table);
  const PackedStack& stack = stacks[table.stack];
  const std::int64_t slots = SlotsPerCore(table.stack);
  std::vector<Entries>& lists = thread.lists;
  lists.clear();
  for (std::int64_t c = 0; c < geometry->num_local_cores; ++c) {
    const std::int64_t begin = c * slots + cuts[task.begins + c];
    const std::int64_t size = cuts[task.ends + c] - cuts[task.begins + c];
    if (size == 0) continue;
    lists.push_back({reinterpret_cast<const std::uint32_t*>(stack.embedding_ids.data() + begin),
                     reinterpret_cast<const std::uint32_t*>(stack.sample_ids.data() + begin),
                     stack.gains.data() + begin, size, static_cast<std::uint32_t>(table.row_offset),
                     static_cast<std::uint32_t>(c * samples.per_core - samples.first)});
  }
  const Entries nothing = {};
  int side = 0;
  do {  // pairs of neighbours, until one list is left; at least once, to apply the shifts
    EntryBuffer& to = thread.merged[side];
    side ^= 1;
    std::int64_t at = 0;
    std::size_t num_merged = 0;
    for (std::size_t i = 0; i < lists.size(); i += 2) {
      const bool paired = i + 1 < lists.size();
      const Entries& second = paired ? lists[i + 1] : nothing;
      const std::int64_t size = lists[i].size + second.size;
      Merge(lists[i], second, to, at);
      lists[num_merged++] = {
          to.rows.get() + at, to.grad_rows.get() + at, to.gains.get() + at, size, 0, 0};
      at += size;
    }
    lists.resize(num_merged);
  } while (lists.size() > 1);
  EntryBuffer& merged = thread.merged[side ^ 1];
  item.num_rows = FindDistinct(merged.rows.get(), lists[0].size, thread.starts.get());
  std::fill_n(merged.grad_rows.get() + lists[0].size, kMaxAhead, 0);
  item.rows = merged.rows.get();
  item.starts = thread.starts.get();
  item.grad_rows = merged.grad_rows.get();
  item.gains = merged.gains.get();
}

RowOps::RowOps(ThreadPool& pool) : pool_(pool), scratch_(std::make_unique<Scratch>()) {}
RowOps::~RowOps() = default;

std::string RowOps::Lookup(const Geometry& geometry, std::span<const PackedStack> stacks,
                           std::span<const ConstWeights> tables, std::span<float> out) {
  const std::lock_guard lock(mutex_);
  const RowKernels& kernels = *CurrentKernels().load();
  Scratch& scratch = *scratch_;
  if (std::string error = scratch.Index(geometry, stacks, out.size(), /*cores_adjacent=*/false,
                                        /*need_all=*/true, kernels, pool_);
      !error.empty())
    return error;
  scratch.PlanLookup(pool_.num_threads());
  pool_.Run(static_cast<std::int64_t>(scratch.lookups.size()), [&](std::int64_t i, int thread) {
    const Scratch::LookupTask& task = scratch.lookups[i];
    const TableGeometry& table = geometry.tables[task.table];
    const PackedStack& stack = stacks[table.stack];
    const std::int64_t first_slot = task.core * scratch.SlotsPerCore(table.stack);
    const TableSamples samples = scratch.Samples(table);
    if (samples.per_core == 0) return;
    const std::int64_t begins =
        scratch.planes[task.table] * scratch.PlaneSize() + task.core * scratch.core_stride;
    LookupItem item = {};
    item.ids = stack.embedding_ids.data() + first_slot;
    item.samples = stack.sample_ids.data() + first_slot;
    item.gains = stack.gains.data() + first_slot;
    item.run_begins = &scratch.cuts[begins];
    item.run_ends = &scratch.cuts[begins + scratch.PlaneSize()];
    item.num_entries = scratch.entries[task.table * geometry.num_local_cores + task.core];
    item.table = tables[task.table].data;
    item.dim = table.dim;
    item.num_cores = geometry.num_cores;
    item.rotation = table.rotation;
    item.row_offset = table.row_offset;
    item.row_step = RowStep(table, geometry.num_cores);
    item.partition_step = PartitionStep(table);
    item.column = task.column;
    item.num_columns = task.num_columns;
    item.ranges = scratch.Ranges(table, task.core);
    item.num_ranges = table.num_features;
    item.first_sample = samples.first;
    item.num_rows = samples.per_core;
    item.out = out.data();
    item.stream = out.size() >= kStreamFloats && task.num_columns % kLaneFloats == 0;
    for (std::int64_t r = 0; r < item.num_ranges; ++r)
      item.stream &=
          item.ranges[r].stride % kLaneFloats == 0 &&
          reinterpret_cast<std::uintptr_t>(out.data() + item.ranges[r].offset + task.column) % 64 ==
              0;
    item.slab = scratch.threads[thread].slab.get();
    item.taken = scratch.threads[thread].taken.get();
    (tables[task.table].is_half ? kernels.lookup_half : kernels.lookup)(item);
  });
  return {};
}

std::string RowOps::Update(const Geometry& geometry, std::span<const PackedStack> stacks,
                           std::span<const TableState> tables, std::span<const float> grad,
                           std::span<const float> operands, std::string_view rule,
                           float max_gradient) {
  const std::lock_guard lock(mutex_);
  const RowKernels& kernels = *CurrentKernels().load();
  const RuleKernel* rule_kernel = FindRuleKernel(kernels, rule);
  if (!rule_kernel) return Concat("no fused update for rule '", rule, "'");
  Scratch& scratch = *scratch_;
  if (std::string error = scratch.Index(geometry, stacks, grad.size(), /*cores_adjacent=*/true,
                                        /*need_all=*/false, kernels, pool_);
      !error.empty())
    return error;
  scratch.PlanUpdate(pool_.num_threads());

  // Gradient rows that are used often, or of features that share a table, or to be clipped.
  const std::int64_t cores = geometry.num_local_cores;
  const auto num_tables = static_cast<std::int64_t>(geometry.tables.size());
  const bool clip = max_gradient > 0;
  scratch.compacted.assign(num_tables, -1);
  std::int64_t compact_floats = 0;
  std::vector<std::int64_t> compact_tables;
  for (std::int64_t t = 0; t < num_tables; ++t) {
    const TableGeometry& table = geometry.tables[t];
    const std::int64_t num_samples = scratch.Samples(table).per_core * cores;
    const std::int64_t uses = std::accumulate(&scratch.entries[t * cores],
                                              &scratch.entries[t * cores] + cores, std::int64_t{0});
    const bool far_apart = geometry.features[table.first_feature].out_stride != table.dim;
    if (!clip && table.num_features == 1 && !(far_apart && uses >= kCompactUses * num_samples))
      continue;
    scratch.compacted[t] = compact_floats;
    compact_tables.push_back(t);
    compact_floats += num_samples * RoundUp(table.dim, kLaneFloats);
  }
  scratch.compact.Reserve(compact_floats);
  pool_.Run(static_cast<std::int64_t>(compact_tables.size()) * cores, [&](std::int64_t i, int) {
    const std::int64_t t = compact_tables[i / cores];
    const std::int64_t core = i % cores;
    const TableGeometry& table = geometry.tables[t];
    const TableSamples samples = scratch.Samples(table);
    CompactItem item = {};
    item.grad = grad.data();
    item.ranges = scratch.Ranges(table, core);
    item.num_ranges = table.num_features;
    item.first_sample = samples.first;
    item.dim = table.dim;
    item.max_gradient = clip ? max_gradient : std::numeric_limits<float>::infinity();
    item.row_stride = RoundUp(table.dim, kLaneFloats);
    item.rows =
        scratch.compact.get() + scratch.compacted[t] + core * samples.per_core * item.row_stride;
    kernels.compact(item);
  });

  pool_.Run(static_cast<std::int64_t>(scratch.updates.size()), [&](std::int64_t i, int number) {
    const Scratch::UpdateTask& task = scratch.updates[i];
    const TableGeometry& table = geometry.tables[task.table];
    const TableState& state = tables[task.table];
    Scratch::Thread& thread = scratch.threads[number];
    UpdateItem item = {};
    scratch.MergeTask(task, thread, item);
    if (scratch.compacted[task.table] >= 0) {
      item.grad = scratch.compact.get() + scratch.compacted[task.table];
      item.grad_stride = RoundUp(table.dim, kLaneFloats);
    } else {
      item.grad = grad.data() + geometry.features[table.first_feature].out_offset;
      item.grad_stride = geometry.features[table.first_feature].out_stride;
    }
    const std::int64_t first_id = scratch.FirstId(table, task.partition);
    const auto element =
        static_cast<std::int64_t>(state.weights.is_half ? sizeof(Half) : sizeof(float));
    item.table = static_cast<char*>(state.weights.data) + first_id * table.dim * element;
    for (std::size_t s = 0; s < state.row_slots.size(); ++s)
      item.row_slots[s] = state.row_slots[s] + first_id * table.dim;
    for (std::size_t s = 0; s < state.scalar_slots.size(); ++s)
      item.scalar_slots[s] = state.scalar_slots[s] + first_id;
    item.dim = table.dim;
    item.scalar_stride = RowStep(table, geometry.num_cores);
    item.row_stride = item.scalar_stride * table.dim;
    item.operands = operands.data() + task.table * rule_kernel->num_operands;
    item.sum = thread.sum.get();
    (state.weights.is_half ? rule_kernel->update_half : rule_kernel->update)(item);
  });
  return {};
}

}  // namespace trtpu
