// Lookup and update against a plain loop; the same bits from every instruction set and thread
// count; float16 tables are float32 ones, rounded; corrupt buffers are refused. Run it under the
// sanitizers.
#include "trtpu/row_ops.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"

namespace {

using trtpu::ConstWeights;
using trtpu::FeatureGeometry;
using trtpu::Geometry;
using trtpu::PackedStack;
using trtpu::RowOps;
using trtpu::TableGeometry;
using trtpu::TableState;
using trtpu::ThreadPool;

constexpr std::int32_t kPad = 0x7FFFFFFF;

struct Batch {
  Geometry geometry;
  std::vector<std::int32_t> row_pointers, ids, samples;
  std::vector<float> gains;
  std::int64_t num_floats = 0;

  std::vector<PackedStack> Stacks() const { return {{row_pointers, ids, samples, gains}}; }
};

// One stack of three tables (the second with two features, the second and third in blocks of rows)
// and a batch of `batch_size` samples on `num_local` cores.
Batch MakeBatch(std::int64_t num_cores, std::int64_t num_local, std::int64_t batch_size,
                std::int64_t dim, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random);
  };
  const std::vector<std::int64_t> rows = {3, 500, 70};
  const std::vector<std::int64_t> num_features = {1, 2, 1};
  const std::int64_t per_core = (batch_size + num_local - 1) / num_local;
  std::vector<std::int64_t> ints = {num_cores, num_local, 1, 3, 4};
  std::int64_t row_offset = 0, feature = 0;
  // [core][partition] (row, sample) -> gain
  std::vector<std::map<std::tuple<std::int64_t, std::int64_t>, float>> entries(num_local *
                                                                               num_cores);
  for (std::size_t t = 0; t < rows.size(); ++t) {
    const std::int64_t rotation = static_cast<std::int64_t>(t) % num_cores;
    // None; the shortest that hold the table; one for all rows.
    const std::int64_t n = t == 0 ? 0 : t == 1 ? (rows[t] + num_cores - 1) / num_cores : rows[t];
    ints.insert(ints.end(), {0, rows[t], dim, row_offset, rotation, feature, num_features[t], n});
    for (std::int64_t f = 0; f < num_features[t]; ++f, ++feature) {
      for (std::int64_t s = 0; s < batch_size; ++s) {
        for (std::int64_t count = below(4); count > 0; --count) {
          const std::int64_t id = below(rows[t]) * below(4) / 3;
          const std::int64_t place = n > 0 ? id / n : id % num_cores;
          const std::int64_t row = n > 0 ? id % n : id / num_cores;
          const std::int64_t partition = (place + rotation) % num_cores;
          entries[s / per_core * num_cores + partition]
                 [{row + row_offset, feature * per_core + s % per_core}] +=
              0.25f * static_cast<float>(1 + below(8));
        }
      }
    }
    row_offset += ((n > 0 ? n : (rows[t] + num_cores - 1) / num_cores) + 7) / 8 * 8;
  }
  for (std::int64_t f = 0; f < 4; ++f)
    ints.insert(ints.end(), {f * per_core, per_core, batch_size, f * dim, 4 * dim});

  Batch batch;
  CHECK(batch.geometry.Decode(ints).empty());
  batch.num_floats = batch_size * 4 * dim;
  std::int64_t slots = 0;
  for (std::int64_t c = 0; c < num_local; ++c) {
    std::int64_t needed = 0;
    for (std::int64_t p = 0; p < num_cores; ++p)
      needed += (static_cast<std::int64_t>(entries[c * num_cores + p].size()) + 7) / 8 * 8;
    slots = std::max(slots, needed);
  }
  const std::int64_t pointers = std::max<std::int64_t>(num_cores, 8);
  batch.row_pointers.assign(num_local * pointers, 0);
  batch.ids.assign(num_local * slots, kPad);
  batch.samples.assign(num_local * slots, kPad);
  batch.gains.assign(num_local * slots, 0.0f);
  for (std::int64_t c = 0; c < num_local; ++c) {
    std::int64_t at = 0;
    for (std::int64_t p = 0; p < num_cores; ++p) {
      for (const auto& [place, gain] : entries[c * num_cores + p]) {
        batch.ids[c * slots + at] = static_cast<std::int32_t>(std::get<0>(place));
        batch.samples[c * slots + at] = static_cast<std::int32_t>(std::get<1>(place));
        batch.gains[c * slots + at] = gain;
        ++at;
      }
      batch.row_pointers[c * pointers + p] = static_cast<std::int32_t>(at);
      at = (at + 7) / 8 * 8;
    }
  }
  return batch;
}

using Arrays = std::vector<std::vector<float>>;

std::vector<float> RandomFloats(std::int64_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(0.1f, 1.0f);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(random);
  return values;
}

// The nearest float16 number: a multiple of its last place, which is 2^-24 at the smallest.
float Rounded(float value) {
  const int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
  return std::ldexp(std::nearbyint(std::ldexp(value, 10 - exponent)), exponent - 10);
}

using Halves = std::vector<std::uint16_t>;

// Bits of float16 numbers, and back.
Halves Pack(const std::vector<float>& values) {
  Halves halves;
  for (const float value : values) {
    const float size = std::abs(value);
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    // Exponent and leading one add up, so that a number below 2^-14 has exponent bits 0.
    const int bits = (exponent + 14) * 1024 + static_cast<int>(std::ldexp(size, 10 - exponent));
    halves.push_back(static_cast<std::uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0)));
  }
  return halves;
}
std::vector<float> Unpack(const Halves& halves) {
  std::vector<float> values;
  for (const std::uint16_t bits : halves) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024),
                                  std::max(exponent, 1) - 25);
    values.push_back(bits & 0x8000 ? -size : size);
  }
  return values;
}

// Float16 can hold their elements.
Arrays MakeTables(const Geometry& geometry) {
  Arrays tables;
  for (const TableGeometry& table : geometry.tables) {
    tables.push_back(RandomFloats(table.num_embeddings * table.dim, 11));
    for (float& value : tables.back()) value = Rounded(value);
  }
  return tables;
}

// Calls visit(table, id, first float of the sample's vector, gain) in the order of the semantics.
template <class Visit>
void ForEachEntry(const Batch& batch, const Visit& visit) {
  const Geometry& g = batch.geometry;
  const std::int64_t slots = static_cast<std::int64_t>(batch.ids.size()) / g.num_local_cores;
  for (std::int64_t c = 0; c < g.num_local_cores; ++c) {
    std::int64_t begin = 0;
    for (std::int64_t p = 0; p < g.num_cores; ++p) {
      const std::int64_t end = batch.row_pointers[c * std::max<std::int64_t>(g.num_cores, 8) + p];
      for (std::int64_t i = c * slots + begin; i < c * slots + end; ++i) {
        std::size_t t = g.tables.size() - 1;
        while (batch.ids[i] < g.tables[t].row_offset) --t;
        const std::int64_t row = batch.ids[i] - g.tables[t].row_offset;
        const std::int64_t place = (p - g.tables[t].rotation + g.num_cores) % g.num_cores;
        const std::int64_t n = g.tables[t].block_rows;
        const std::int64_t id = n > 0 ? place * n + row : row * g.num_cores + place;
        for (const FeatureGeometry& feature : g.features) {
          const std::int64_t sample = batch.samples[i] - feature.sample_offset;
          if (sample < 0 || sample >= feature.samples_per_core) continue;
          visit(t, id,
                feature.out_offset + (c * feature.samples_per_core + sample) * feature.out_stride,
                batch.gains[i]);
        }
      }
      begin = (end + 7) / 8 * 8;
    }
  }
}

std::vector<float> Lookup(RowOps& ops, const Batch& batch, const Arrays& tables,
                          bool is_half = false) {
  std::vector<float> out(batch.num_floats, -1.0f);
  std::vector<Halves> halves;
  std::vector<ConstWeights> weights;
  for (const auto& table : tables) {
    halves.push_back(Pack(table));
    weights.push_back({table.data(), false});
    if (is_half) weights.back() = {halves.back().data(), true};
  }
  CHECK(ops.Lookup(batch.geometry, batch.Stacks(), weights, out).empty());
  return out;
}

// Tables and slots after one step.
Arrays Update(RowOps& ops, const Batch& batch, const std::string& rule, float max_gradient,
              std::string* error = nullptr, bool is_half = false) {
  const trtpu::RuleShape shape = trtpu::FindRule(rule).value();
  Arrays arrays = MakeTables(batch.geometry);
  const std::size_t num_tables = arrays.size();
  for (const TableGeometry& table : batch.geometry.tables) {
    for (int s = 0; s < shape.num_row_slots; ++s)
      arrays.push_back(RandomFloats(table.num_embeddings * table.dim, 12));
    for (int s = 0; s < shape.num_scalar_slots; ++s)
      arrays.push_back(RandomFloats(table.num_embeddings, 13));
  }
  std::vector<Halves> halves(num_tables);
  std::vector<TableState> states(num_tables);
  std::size_t next = num_tables;
  for (std::size_t t = 0; t < num_tables; ++t) {
    states[t].weights = {arrays[t].data(), false};
    if (is_half) {
      halves[t] = Pack(arrays[t]);
      states[t].weights = {halves[t].data(), true};
    }
    for (int s = 0; s < shape.num_row_slots; ++s)
      states[t].row_slots.push_back(arrays[next++].data());
    for (int s = 0; s < shape.num_scalar_slots; ++s)
      states[t].scalar_slots.push_back(arrays[next++].data());
  }
  const std::vector<float> grad = RandomFloats(batch.num_floats, 14);
  const std::vector<float> operands =
      RandomFloats(static_cast<std::int64_t>(num_tables) * shape.num_operands, 15);
  const std::string got =
      ops.Update(batch.geometry, batch.Stacks(), states, grad, operands, rule, max_gradient);
  CHECK(error || got.empty());
  if (error) *error = got;
  for (std::size_t t = 0; is_half && t < num_tables; ++t) arrays[t] = Unpack(halves[t]);
  return arrays;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool SameBits(const Arrays& a, const Arrays& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return SameBits(x, y); });
}

void LookupAndSgdEqualPlainLoops(const Batch& batch, RowOps& ops) {
  const Arrays tables = MakeTables(batch.geometry);
  std::vector<float> out(batch.num_floats, 0.0f);
  ForEachEntry(batch, [&](std::size_t t, std::int64_t id, std::int64_t vector, float gain) {
    const std::int64_t dim = batch.geometry.tables[t].dim;
    for (std::int64_t k = 0; k < dim; ++k) out[vector + k] += gain * tables[t][id * dim + k];
  });
  CHECK(SameBits(Lookup(ops, batch, tables), out));

  Arrays expected = tables;
  Arrays sums;
  for (const auto& table : tables) sums.emplace_back(table.size(), 0.0f);
  const std::vector<float> grad = RandomFloats(batch.num_floats, 14);
  const float max_gradient = 0.5f;
  ForEachEntry(batch, [&](std::size_t t, std::int64_t id, std::int64_t vector, float gain) {
    const std::int64_t dim = batch.geometry.tables[t].dim;
    for (std::int64_t k = 0; k < dim; ++k)
      sums[t][id * dim + k] += gain * std::min(grad[vector + k], max_gradient);
  });
  const std::vector<float> lr = RandomFloats(static_cast<std::int64_t>(tables.size()), 15);
  for (std::size_t t = 0; t < tables.size(); ++t)
    for (std::size_t i = 0; i < tables[t].size(); ++i) expected[t][i] -= lr[t] * sums[t][i];
  CHECK(SameBits(Update(ops, batch, "sgd", max_gradient), expected));
}

void ThreadsAndInstructionSetsGiveTheSameBits(const Batch& batch) {
  ThreadPool one(1);
  RowOps single(one);
  CHECK(trtpu::SetInstructionSet("baseline"));
  const Arrays tables = MakeTables(batch.geometry);
  const std::vector<float> out = Lookup(single, batch, tables);
  std::map<std::string, Arrays> updated;
  for (const std::string_view rule : trtpu::RuleNames())
    updated[std::string(rule)] = Update(single, batch, std::string(rule), 0.0f);
  for (const std::string_view name : trtpu::InstructionSets()) {
    CHECK(trtpu::SetInstructionSet(name));
    for (const int num_threads : {1, 4}) {
      ThreadPool pool(num_threads);
      RowOps ops(pool);
      CHECK(SameBits(Lookup(ops, batch, tables), out));
      for (const auto& [rule, arrays] : updated)
        CHECK(SameBits(Update(ops, batch, rule, 0.0f), arrays));
    }
  }
}

// The same computation: exact when weights are loaded, rounded when they are stored.
void HalfTablesAreRoundedFloatTables(const Batch& batch, RowOps& ops) {
  const Arrays tables = MakeTables(batch.geometry);
  for (const std::string_view name : trtpu::InstructionSets()) {
    CHECK(trtpu::SetInstructionSet(name));
    CHECK(SameBits(Lookup(ops, batch, tables, true), Lookup(ops, batch, tables)));
    for (const std::string_view view : trtpu::RuleNames()) {
      const std::string rule(view);
      Arrays expected = Update(ops, batch, rule, 0.0f);
      for (std::size_t t = 0; t < tables.size(); ++t)
        for (float& value : expected[t]) value = Rounded(value);
      CHECK(SameBits(Update(ops, batch, rule, 0.0f, nullptr, true), expected));
    }
  }
}

// Whatever is in the buffers, memory stays intact, and a refused update changes nothing.
void CorruptBuffersAreHarmless(const Batch& good, RowOps& ops) {
  std::mt19937 random(5);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  const Arrays untouched = [&] {
    Batch empty = good;
    std::fill(empty.row_pointers.begin(), empty.row_pointers.end(), 0);
    return Update(ops, empty, "adagrad", 0.0f);
  }();
  const std::vector<std::int32_t> values = {-1, 0, 1, 7, 8, 63, 64, 1000, kPad, -kPad - 1};
  int num_refused = 0;
  for (int round = 0; round < 300; ++round) {
    Batch bad = good;
    auto& array = round % 3 == 0 ? bad.row_pointers : round % 3 == 1 ? bad.ids : bad.samples;
    array[below(array.size())] = values[below(values.size())];
    std::string error;
    const Arrays arrays = Update(ops, bad, "adagrad", 0.0f, &error);
    if (error.empty()) continue;
    ++num_refused;
    CHECK(SameBits(arrays, untouched));
    std::vector<float> out(bad.num_floats, -1.0f);
    const Arrays tables = MakeTables(bad.geometry);
    std::vector<ConstWeights> weights;
    for (const auto& table : tables) weights.push_back({table.data(), false});
    CHECK(!ops.Lookup(bad.geometry, bad.Stacks(), weights, out).empty());
    CHECK(std::count(out.begin(), out.end(), -1.0f) == bad.num_floats);
  }
  CHECK(num_refused > 100);
}

void CorruptGeometriesAreRefused(const Batch& batch) {
  const Geometry& g = batch.geometry;
  std::vector<std::int64_t> ints = {g.num_cores, g.num_local_cores, g.num_stacks,
                                    static_cast<std::int64_t>(g.tables.size()),
                                    static_cast<std::int64_t>(g.features.size())};
  for (const TableGeometry& t : g.tables)
    ints.insert(ints.end(), {t.stack, t.num_embeddings, t.dim, t.row_offset, t.rotation,
                             t.first_feature, t.num_features, t.block_rows});
  for (const FeatureGeometry& f : g.features)
    ints.insert(ints.end(),
                {f.sample_offset, f.samples_per_core, f.num_samples, f.out_offset, f.out_stride});
  Geometry decoded;
  CHECK(decoded.Decode(ints).empty());
  for (std::size_t i = 0; i < ints.size(); ++i) {
    for (const std::int64_t value : {std::int64_t{-1}, std::int64_t{1} << 62}) {
      std::vector<std::int64_t> bad = ints;
      bad[i] = value;
      CHECK(!decoded.Decode(bad).empty());
    }
  }
  ints.pop_back();
  CHECK(!decoded.Decode(ints).empty());
}

}  // namespace

int main() {
  // More source cores than partitions: what one owner of rows gets from many.
  for (const auto& [num_cores, num_local] : {std::pair{1, 1}, {2, 2}, {3, 2}, {8, 8}, {1, 5}}) {
    for (const std::int64_t dim : {1, 3, 16, 20, 64, 128, 200}) {
      const Batch batch = MakeBatch(num_cores, num_local, 37, dim, static_cast<unsigned>(dim));
      ThreadPool pool(2);
      RowOps ops(pool);
      LookupAndSgdEqualPlainLoops(batch, ops);
      ThreadsAndInstructionSetsGiveTheSameBits(batch);
      if (num_cores == 2) HalfTablesAreRoundedFloatTables(batch, ops);
    }
  }
  ThreadPool pool(2);
  RowOps ops(pool);
  for (const std::int64_t num_cores : {2, 9}) {
    const Batch batch = MakeBatch(num_cores, num_cores, 37, 16, 3);
    CorruptBuffersAreHarmless(batch, ops);
    CorruptGeometriesAreRefused(batch);
  }
  std::puts("ok");
}
