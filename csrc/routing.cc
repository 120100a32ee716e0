#include "trtpu/routing.h"

#include <algorithm>
#include <vector>

namespace trtpu {
namespace {

// A thread takes about this many floats at a time.
constexpr std::int64_t kPieceFloats = 1 << 15;

// Vectors [first, last) of one run, whose first one is at float `packed` of the packed buffer.
struct Piece {
  std::int64_t first, last, width, packed;
};

std::vector<Piece> Cut(const VectorRuns& runs) {
  std::vector<Piece> pieces;
  std::int64_t first = 0, packed = 0;
  for (std::size_t r = 0; r < runs.counts.size(); ++r) {
    const std::int64_t end = first + runs.counts[r], width = runs.widths[r];
    const std::int64_t step = std::max<std::int64_t>(kPieceFloats / width, 1);
    for (; first < end; first += step) {
      const std::int64_t last = std::min(first + step, end);
      pieces.push_back({first, last, width, packed});
      packed += (last - first) * width;
    }
    first = end;
  }
  return pieces;
}

}  // namespace

std::string NumberSamples(const SourceStack& stack, std::span<std::int32_t> numbers,
                          std::span<std::int32_t> samples, std::span<std::int64_t> counts,
                          ThreadPool& pool) {
  const auto num_tables = static_cast<std::int64_t>(stack.table_rows.size());
  const auto num_slots = static_cast<std::int64_t>(stack.embedding_ids.size());
  std::vector<std::int64_t> begins(stack.num_partitions);
  std::int64_t begin = 0;
  for (std::int64_t p = 0; p < stack.num_partitions; ++p) {
    const std::int64_t end = stack.row_pointers[p];
    begins[p] = begin;
    if (end < begin || end > num_slots)
      return "row pointer " + std::to_string(end) + " of partition " + std::to_string(p) +
             " is not in " + std::to_string(begin) + ".." + std::to_string(num_slots);
    begin = std::min((end + 7) / 8 * 8, num_slots);
  }
  std::vector<std::string> errors(stack.num_partitions);
  pool.Run(stack.num_partitions, [&](std::int64_t p, int) {
    std::vector<std::int32_t> number_of(stack.num_samples, -1);
    std::int64_t* count = counts.data() + p * num_tables;
    std::fill_n(count, num_tables, 0);
    std::int32_t next = 0;
    std::int64_t table = 0;
    for (std::int64_t slot = begins[p]; slot < stack.row_pointers[p]; ++slot) {
      const std::int32_t row = stack.embedding_ids[slot], sample = stack.sample_ids[slot];
      while (table + 1 < num_tables && row >= stack.table_rows[table + 1]) ++table;
      if (sample < 0 || sample >= stack.num_samples) {
        errors[p] = "sample " + std::to_string(sample) + " of slot " + std::to_string(slot) +
                    " is not in 0.." + std::to_string(stack.num_samples - 1);
        return;
      }
      std::int32_t& number = number_of[sample];
      if (number < 0) {
        samples[begins[p] + next] = sample;
        number = next++;
        ++count[table];
      }
      numbers[slot] = number;
    }
  });
  for (const std::string& error : errors)
    if (!error.empty()) return error;
  return {};
}

std::string CheckRuns(const VectorRuns& runs, std::size_t packed_floats,
                      std::size_t spread_floats) {
  if (runs.counts.size() != runs.widths.size())
    return std::to_string(runs.counts.size()) + " counts, " + std::to_string(runs.widths.size()) +
           " widths";
  const auto num_offsets = static_cast<std::int64_t>(runs.offsets.size());
  const auto limit = static_cast<std::int64_t>(spread_floats);
  std::int64_t vector = 0, floats = 0;
  for (std::size_t r = 0; r < runs.counts.size(); ++r) {
    const std::int64_t count = runs.counts[r], width = runs.widths[r];
    if (count < 0 || count > num_offsets - vector || width < 1)
      return "run " + std::to_string(r) + " has " + std::to_string(count) + " vectors of width " +
             std::to_string(width);
    for (const std::int64_t end = vector + count; vector < end; ++vector)
      if (runs.offsets[vector] < 0 || runs.offsets[vector] > limit - width)
        return "vector " + std::to_string(vector) + " at float " +
               std::to_string(runs.offsets[vector]) + " is outside " + std::to_string(limit);
    floats += count * width;
  }
  if (vector != num_offsets || floats != static_cast<std::int64_t>(packed_floats))
    return "runs of " + std::to_string(vector) + " vectors and " + std::to_string(floats) +
           " floats do not fit " + std::to_string(num_offsets) + " offsets and " +
           std::to_string(packed_floats) + " floats";
  return {};
}

void GatherVectors(const VectorRuns& runs, const float* spread, float divisor, float* packed,
                   ThreadPool& pool) {
  const std::vector<Piece> pieces = Cut(runs);
  pool.Run(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t i, int) {
    const Piece& piece = pieces[i];
    float* to = packed + piece.packed;
    for (std::int64_t v = piece.first; v < piece.last; ++v, to += piece.width) {
      const float* from = spread + runs.offsets[v];
      for (std::int64_t k = 0; k < piece.width; ++k) to[k] = from[k] / divisor;
    }
  });
}

void AddVectors(const VectorRuns& runs, const float* packed, float* spread, ThreadPool& pool) {
  const std::vector<Piece> pieces = Cut(runs);
  pool.Run(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t i, int) {
    const Piece& piece = pieces[i];
    const float* from = packed + piece.packed;
    for (std::int64_t v = piece.first; v < piece.last; ++v, from += piece.width) {
      float* to = spread + runs.offsets[v];
      for (std::int64_t k = 0; k < piece.width; ++k) to[k] += from[k];
    }
  });
}

}  // namespace trtpu
